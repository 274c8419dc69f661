"""What is pushed of a folder: files of known kinds, the code that the model needs, and a list of all their hashes."""

import fnmatch
import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers.dynamic_module_utils import get_relative_imports

from .. import __version__, fox, hmt
from ..fox.convert_folder import COMPANIONS, Checkpoint, leads_outside, read_json
from ..fox.modeling_fox import AUTO_MAP
from ..metrics import read_result


CONTENTS = "hf_longctx.json"  # versions and hashes
ADAPTER = "adapter_model.safetensors"
KNOWN = ("README.md", "LICENSE*", "*.png", "*.svg", *COMPANIONS)
# Patterns of names that are refused, and why.
REFUSED = {
    ("training_args.bin",): "a pickle of the training's arguments, which hold a token where one was given: remove it",
    ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*"): "the state of a training: push the folder of its model",
    ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt"): "a pickle, which can run code when it is loaded: "
    "load the model, and save it with save_pretrained, which writes safetensors",
    (".*",): "a hidden file, which may hold a secret: remove it",
}
TOOLS = (".git", ".gitattributes", ".cache")  # of git and of `hf download`; not pushed
PACKAGE_CODE = {
    path.name: path
    for package, suffix in ((fox, "fox"), (hmt, "hmt"))
    for path in Path(package.__file__).parent.glob(f"*_{suffix}.py")
}
AUTO_MAPS = {
    "fox": {"AutoConfig": "configuration_fox.FoxConfig", **AUTO_MAP},
    "hmt": {"AutoConfig": "configuration_hmt.HMTConfig", "AutoModelForCausalLM": "modeling_hmt.HMTWrapper"},
}


@dataclass(frozen=True)
class Bundle:
    """What is pushed.

    Attributes:
        files: the content of every file, or where it is read from, by its path in the repository.
        left_out: names in the folder that are not pushed.
        config: of the model, or of the adapter.
    """

    files: dict[str, Path | bytes]
    left_out: tuple[str, ...]
    config: dict

    @property
    def is_adapter(self) -> bool:
        return ADAPTER in self.files

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads the model: AutoModelForCausalLM of a FoxForCausalLM, and so on."""
        (name, *_) = self.config.get("architectures") or ["ForCausalLM"]
        if name.endswith("Model") and not name.endswith("LMHeadModel"):
            return "AutoModel"
        task = name.rpartition("For")[2]
        return "AutoModelForCausalLM" if task == name else f"AutoModelFor{task}"  # HMTWrapper, GPT2LMHeadModel

    def size(self, path: str) -> int:
        """Bytes."""
        content = self.files[path]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def sha256(self, path: str) -> str:
        content = self.files[path]
        if isinstance(content, bytes):
            return hashlib.sha256(content).hexdigest()
        with content.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def build_bundle(folder: str | os.PathLike) -> Bundle:
    """What to push of the folder of a model or of an adapter.

    Known files are taken: configuration, weights, tokenizer, card, pictures, results of the metrics. The code is what
    `auto_map` names, with all that it imports: the package's own files, byte for byte, and others from the folder. A
    FoX or HMT without `auto_map` gets one. What is not known is left out; what should never be public is refused.

    Raises:
        ValueError: a file is refused (a pickle, state of a training, a hidden file, a link that leaves the folder);
            weights are missing or damaged; code is missing or in another repository; the base of an adapter or of an
            HMT is a folder; a file is no JSON.
        FileNotFoundError, NotADirectoryError: there is no such folder.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.name not in TOOLS)
    check_names(folder, names)
    files = {name: folder / name for name in names if is_known(folder / name)}
    if "config.json" in names:
        config, weights = read_json(folder / "config.json"), model_weights(folder)
        files |= weights | auto_map_and_code(folder, config)
        base = None if config.get("backbone_in_checkpoint", True) else config.get("backbone_name_or_path")
    elif "adapter_config.json" in names:
        config = read_json(folder / "adapter_config.json")
        files |= {name: folder / name for name in ("adapter_config.json", ADAPTER)}
        base = config.get("base_model_name_or_path")
        check_safetensors(folder / ADAPTER)
    else:
        raise ValueError(f"{folder} has no config.json and no adapter_config.json; give the folder of a saved model.")
    if base is not None and (os.path.isabs(base) or base.startswith(".") or Path(base).exists()):
        raise ValueError(
            f"{folder} needs {base}, a folder on this machine. Push that model first, and put its name on the Hub into "
            f"{'base_model_name_or_path of adapter_config.json' if ADAPTER in files else 'backbone_name_or_path'}."
        )
    left_out = tuple(name for name in names if name not in files and name != CONTENTS)
    return with_contents(Bundle(files, left_out, config))


def check_names(folder, names):
    """ValueError for files that must not be pushed, and links that leave the folder."""
    problems = []
    for name in names:
        reasons = [why for patterns, why in REFUSED.items() if any(fnmatch.fnmatch(name, p) for p in patterns)]
        if leads_outside(folder / name, folder):
            reasons.append(f"a link to {(folder / name).resolve()}, outside of the folder: remove it")
        problems += [f"{name} is {why}" for why in reasons[:1]]
    if problems:
        raise ValueError(f"{folder} cannot be pushed. {'. '.join(problems)}.")


def is_known(path):
    if any(fnmatch.fnmatch(path.name, pattern) for pattern in KNOWN):
        return path.is_file()
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        read_result(path)
    except ValueError:
        return False
    return True


def model_weights(folder):
    """The safetensors files of a model, with their index; each is opened."""
    checkpoint = Checkpoint(folder)
    files = {path.name: path for path in checkpoint.files.values()}
    index = folder / transformers.utils.SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        absent = sorted(read_json(index)["weight_map"].keys() - checkpoint.files.keys())
        if absent:
            raise ValueError(f"{index} lists {absent[0]}, which no file has; save the model again.")
        files[index.name] = index
    return files


def check_safetensors(path):
    if not path.is_file():
        raise ValueError(f"{path.parent} lacks {path.name}; save the adapter with save_pretrained.")
    with Checkpoint.open(path):
        pass


def auto_map_and_code(folder, config):
    """config.json, with an auto_map where FoX or HMT lacks one, and the files of code that it needs."""
    files = {"config.json": folder / "config.json"}
    auto_map = config.get("auto_map") or AUTO_MAPS.get(config.get("model_type"), {})
    if "auto_map" not in config and auto_map:
        files["config.json"] = (json.dumps(config | {"auto_map": auto_map}, indent=2, sort_keys=True) + "\n").encode()
    tokenizer = folder / "tokenizer_config.json"
    tokenizer_map = read_json(tokenizer).get("auto_map", {}) if tokenizer.is_file() else {}
    modules = module_names("config.json", auto_map) | module_names(tokenizer.name, tokenizer_map)
    while modules:
        name = f"{modules.pop()}.py"
        if name not in files:
            files[name] = code_file(folder, name)
            modules |= set(get_relative_imports(files[name]))
    return files


def module_names(file, auto_map):
    """Modules of an auto_map; ValueError for those of another repository."""
    classes = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    modules = set()
    for name in [name for value in classes for name in (value if isinstance(value, list) else [value])]:
        if name is None:  # there is no slow tokenizer
            continue
        module, _, class_name = name.partition(".") if isinstance(name, str) else ("", "", "")
        if not (module.isidentifier() and class_name.isidentifier()):
            raise ValueError(
                f"auto_map of {file} has {name!r}; it must name a class of a file in the same folder, such as "
                "'modeling_fox.FoxForCausalLM'. Code in another repository changes without this one."
            )
        modules.add(module)
    return modules


def code_file(folder, name):
    """The package's own file, else the folder's; which backbone is in use, only the folder says."""
    path = folder / name
    if name in PACKAGE_CODE and not (name == "custom_backbone_hmt.py" and path.is_file()):
        return PACKAGE_CODE[name]
    if not path.is_file():
        raise ValueError(
            f"{folder} lacks {name}, which its auto_map needs; save the model again with save_pretrained."
        )
    return path


def with_contents(bundle: Bundle) -> Bundle:
    """The bundle with one more file, of versions and the sha256 of every file."""
    versions = {"hf_longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    hashes = {path: bundle.sha256(path) for path in sorted(bundle.files)}
    text = json.dumps({"versions": versions, "sha256": hashes}, indent=2) + "\n"
    return replace(bundle, files=bundle.files | {CONTENTS: text.encode()})
