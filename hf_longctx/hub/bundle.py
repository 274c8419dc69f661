"""What is pushed of a folder: files of known kinds, the code that the model needs, and a list of all their hashes."""

import fnmatch
import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_imports

from .. import __version__, fox, hmt
from ..fox.checkpoint_files import TOKENIZER_FILES, Checkpoint, leads_outside, open_safetensors, read_json
from ..fox.modeling_fox import AUTO_MAP
from ..metrics import read_result
from ..metrics.result import commit


CONTENTS = "hf_longctx.json"  # versions and hashes
ADAPTER = "adapter_model.safetensors"
BASE = "base.json"  # beside an adapter of `hf-longctx finetune`: which weights it was trained on
TRAINING = ("training.txt", "training.yaml", "training_log.jsonl")  # commands, settings, and what metrics.jsonl says
KNOWN = ("README.md", "LICENSE*", "*.png", "*.svg", *TRAINING, *TOKENIZER_FILES)
PICKLED = (b"\x80", b"PK\x03\x04")  # how pickles and PyTorch's archives begin
# Patterns of names that are refused, and why.
REFUSED = {
    ("training_args.bin",): "a pickle of the training's arguments, which hold a token where one was given: remove it",
    ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*"): "the state of a training: push the folder of its model",
    ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt"): "a pickle, which can run code when it is loaded: "
    "load the model, and save it with save_pretrained, which writes safetensors",
    (".*",): "a hidden file, which may hold a secret: remove it",
}
TOOLS = (".git", ".gitattributes", ".cache")  # of git and of `hf download`; not pushed
EVALUATIONS = ".eval_results"  # results on benchmarks that are registered at the Hub, as YAML
PACKAGE_CODE = {
    path.name: path
    for package, suffix in ((fox, "fox"), (hmt, "hmt"))
    for path in Path(package.__file__).parent.glob(f"*_{suffix}.py")
}
PEFT_TASKS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "SEQ_2_SEQ_LM": "ForSeq2SeqLM",
    "FEATURE_EXTRACTION": "ForFeatureExtraction",
}  # besides CAUSAL_LM
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
        config: of the model, or of the adapter; empty for a Space or a kernel.
        base_has_code: whether the base of an adapter has code of its own.
    """

    files: dict[str, Path | bytes]
    left_out: tuple[str, ...]
    config: dict
    base_has_code: bool = False

    @property
    def is_adapter(self) -> bool:
        return ADAPTER in self.files

    @property
    def base(self) -> tuple[str, str | None] | None:
        """Name and revision, on the Hub, of the base of an adapter, or of the backbone that an HMT points to."""
        if self.is_adapter:
            return self.config.get("base_model_name_or_path"), self.config.get("revision")
        if self.config.get("backbone_in_checkpoint", True):
            return None
        return self.config.get("backbone_name_or_path"), self.config.get("backbone_revision")

    @property
    def auto_class(self) -> str:
        """The class of transformers or PEFT that loads it: AutoModelForCausalLM of a FoxForCausalLM, and so on."""
        if self.is_adapter:
            return f"AutoPeftModel{PEFT_TASKS.get(self.config.get('task_type'), 'ForCausalLM')}"
        (name, *_) = self.config.get("architectures") or ["ForCausalLM"]
        if name.endswith("Model") and not name.endswith("LMHeadModel"):
            return "AutoModel"
        task = name.rpartition("For")[2]
        return "AutoModelForCausalLM" if task == name else f"AutoModelFor{task}"  # HMTWrapper, GPT2LMHeadModel

    @property
    def has_code(self) -> bool:
        """Whether it needs trust_remote_code: for its own code, or for that of the FoX that it adapts."""
        return self.base_has_code or any(path.endswith(".py") for path in self.files)

    def text(self, path: str) -> str:
        """Without the byte order mark of some editors; ValueError for a file that is not UTF-8."""
        content = self.files[path]
        try:
            return (content if isinstance(content, bytes) else content.read_bytes()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no UTF-8 text ({error}).") from error

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
            HMT has no name on the Hub; a file is no JSON.
        FileNotFoundError, NotADirectoryError: there is no such folder.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.name not in TOOLS)
    evaluations = [f"{EVALUATIONS}/{path.name}" for path in sorted((folder / EVALUATIONS).glob("*.yaml"))]
    check_names(folder, [*names, *evaluations])
    files = {name: folder / name for name in names if is_known(folder / name)}
    files |= {name: folder / name for name in evaluations}
    base_type = None
    if "config.json" in names:
        config, weights = read_json(folder / "config.json"), model_weights(folder)
        files |= weights | auto_map_and_code(folder, config)
    elif "adapter_config.json" in names:
        config = read_json(folder / "adapter_config.json")
        check_safetensors(folder / ADAPTER)
        parts = {"adapter_config.json", ADAPTER, BASE}.intersection(names)
        files |= {name: folder / name for name in parts}
        base_type = read_json(folder / BASE).get("model_type") if BASE in parts else None
    else:
        raise ValueError(f"{folder} has no config.json and no adapter_config.json; give the folder of a saved model.")
    left_out = tuple(name for name in names if name not in files and name not in (CONTENTS, EVALUATIONS))
    bundle = Bundle(files, left_out, config, base_type in AUTO_MAPS)
    if bundle.base is not None:
        check_base(folder, bundle)
    return with_contents(bundle)


def check_base(folder, bundle):
    """ValueError for a base that is not named, or by the path of a folder."""
    (base, _), field = bundle.base, "base_model_name_or_path" if bundle.is_adapter else "backbone_name_or_path"
    is_name = isinstance(base, str) and not base.startswith(("/", ".", "~")) and not Path(base).exists()
    try:
        validate_repo_id(base if is_name else "")
    except ValueError as error:
        raise ValueError(
            f"{folder} needs {base}, which is no name on the Hub. Push that model first, and put its name into {field} of "
            f"{'adapter_config.json' if bundle.is_adapter else 'config.json'}."
        ) from error


def check_names(folder, names):
    """ValueError for files that must not be pushed, and links that leave the folder."""
    problems = []
    for name in names:
        reasons = [why for patterns, why in REFUSED.items() if any(fnmatch.fnmatch(name.lower(), p) for p in patterns)]
        if name.startswith(EVALUATIONS):
            reasons.clear()
        if leads_outside(folder / name, folder):
            reasons.append(f"a link to {(folder / name).resolve()}, outside of the folder: remove it")
        problems += [f"{name} is {why}" for why in reasons[:1]]
    if problems:
        raise ValueError(f"{folder} cannot be pushed. {'. '.join(problems)}.")


def is_known(path):
    if any(fnmatch.fnmatch(path.name, pattern) for pattern in KNOWN):
        if path.is_file():
            refuse_pickle(path)
        return path.is_file()
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        read_result(path)
    except ValueError:
        return is_benchmark(path)
    return True


def refuse_pickle(path):
    """ValueError for the pickle of a tokenizer, such as X.model."""
    with path.open("rb") as file:
        if file.read(4).startswith(PICKLED):
            raise ValueError(f"{path} is a pickle, which can run code when it is loaded: remove it.")


def is_benchmark(path):
    """Whether it is what scripts/bench writes."""
    try:
        return {"command", "machine", "versions", "rows"} <= read_json(path).keys()
    except ValueError:
        return False


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
    with open_safetensors(path):
        pass


def auto_map_and_code(folder, config):
    """config.json, with an auto_map where FoX or HMT lacks one, and the files of code that it needs."""
    files = {"config.json": folder / "config.json"}
    auto_map = config.get("auto_map") or AUTO_MAPS.get(config.get("model_type"), {})
    if not config.get("auto_map") and auto_map:
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


def with_contents(bundle: Bundle, files: dict[str, bytes] | None = None) -> Bundle:
    """The bundle with other contents of some files, and with one more file: versions, and the sha256 of every file."""
    files = files or {}
    if CONTENTS in bundle.files:
        hashes = json.loads(bundle.files[CONTENTS])["sha256"]  # of weights, they take long
    else:
        hashes = {path: bundle.sha256(path) for path in bundle.files}
    hashes |= {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    versions = {"hf_longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    contents = {"versions": versions, "commit": commit(Path(fox.__file__).parents[2])}
    text = json.dumps(contents | {"sha256": dict(sorted(hashes.items()))}, indent=2) + "\n"
    return replace(bundle, files=bundle.files | files | {CONTENTS: text.encode()})
