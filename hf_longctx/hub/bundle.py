"""The files of a push: known files of a folder, the code that the model needs, and the hashes of all of them."""

import fnmatch
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_imports

from .. import __version__, fox, hmt
from ..fox.checkpoint_files import TOKENIZER_FILES, Checkpoint, leads_outside, read_json
from ..fox.modeling_fox import AUTO_MAP
from ..metrics import read_result
from ..metrics.result import Result, commit
from .weights import check_safetensors, check_weights


CONTENTS = "hf_longctx.json"  # versions and hashes
NOTES = "card_notes.md"  # hand-written parts of the card
ADAPTER = "adapter_model.safetensors"
BASE = "base.json"  # `hf-longctx finetune` writes it alongside an adapter: the weights that it was trained on
TRAINING = ("training.txt", "training.yaml", "training_log.jsonl")  # commands, settings, losses
KNOWN = ("README.md", NOTES, "LICENSE", "LICENSE.md", "LICENSE.txt", "*.png", "*.svg", *TRAINING, *TOKENIZER_FILES)
# Patterns of file names that are never pushed, and why.
FORBIDDEN = {
    ("training_args.bin",): "a pickle of the training arguments, which can hold a token: remove it",
    ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*"): "the state of a training run: push the model's folder",
    ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt"): "a pickle, which can run code when it is loaded: "
    "load the model, and save it with save_pretrained, which writes safetensors",
    (".*",): "a hidden file, which can hold a secret: remove it",
}
LEFT_BY_TOOLS = (".git", ".gitattributes", ".cache", ".eval_results")  # git, `hf download` and the Hub; not pushed
MEASUREMENT = re.compile(r"[\w.-]+\.json")  # a name that a card can link to
PACKAGE_CODE = {
    path.name: path
    for package, suffix in ((fox, "fox"), (hmt, "hmt"))
    for path in Path(package.__path__[0]).glob(f"*_{suffix}.py")
}
# `HMTConfig.save_pretrained` writes it: the classes of a backbone that transformers lacks.
BACKBONE_CODE = "custom_backbone_hmt.py"
PEFT_TASKS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}  # besides CAUSAL_LM
AUTO_MAPS = {
    "fox": {"AutoConfig": "configuration_fox.FoxConfig", **AUTO_MAP},
    "hmt": {"AutoConfig": "configuration_hmt.HMTConfig", "AutoModelForCausalLM": "modeling_hmt.HMTWrapper"},
}


@dataclass(frozen=True)
class Bundle:
    """The files of a push, and what they say about the model.

    Attributes:
        files: content of each file, or the path that it is read from, by its path in the repository.
        left_out: names in the folder that are not pushed.
        config: config of the model, or of the adapter; empty for a Space.
        tensors: number of elements of each tensor, by its name.
        results: results of metrics, by file name.
        documents: JSON objects of the results and of the benchmarks in scripts/bench, by file name.
        samples: prompt, generated text and settings, by file name.
        base_has_code: True if the base model of an adapter has custom code.
    """

    files: dict[str, Path | bytes]
    left_out: tuple[str, ...] = ()
    config: dict = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    documents: dict[str, dict] = field(default_factory=dict)
    samples: dict[str, dict] = field(default_factory=dict)
    base_has_code: bool = False

    @property
    def is_adapter(self) -> bool:
        """True for the folder of an adapter."""
        return "adapter_config.json" in self.files

    @property
    def base(self) -> tuple[str, str | None] | None:
        """Name and revision, on the Hub, of an adapter's base model, or of the backbone that an HMT points to."""
        if self.is_adapter:
            return self.config.get("base_model_name_or_path", ""), self.config.get("revision")
        if self.config.get("backbone_in_checkpoint", True):
            return None
        return self.config.get("backbone_name_or_path", ""), self.config.get("backbone_revision")

    @property
    def auto_class(self) -> str:
        """The class of transformers or PEFT that loads it, such as AutoModelForCausalLM for a FoxForCausalLM."""
        if self.is_adapter:
            return f"AutoPeftModel{PEFT_TASKS.get(self.config.get('task_type', ''), 'ForCausalLM')}"
        (name, *_) = self.config.get("architectures") or ["ForCausalLM"]
        if name.endswith("Model") and not name.endswith("LMHeadModel"):
            return "AutoModel"
        task = name.rpartition("For")[2]
        return "AutoModelForCausalLM" if task == name else f"AutoModelFor{task}"  # HMTWrapper, GPT2LMHeadModel

    @property
    def has_code(self) -> bool:
        """True if loading needs trust_remote_code: for code in the repository, or in that of an adapter's base."""
        return self.base_has_code or any(path.endswith(".py") for path in self.files)

    def text(self, path: str, errors: str = "strict") -> str:
        """Return a file as text, without the byte order mark of some editors; "" if there is no such file.

        Raises:
            ValueError: the file is not UTF-8, and `errors`, as in `bytes.decode`, is "strict".
        """
        content = self.files.get(path, b"")
        try:
            return (content if isinstance(content, bytes) else content.read_bytes()).decode("utf-8-sig", errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error}).") from error


def build_bundle(folder: str | os.PathLike) -> Bundle:
    """Collect the files of a model's or an adapter's folder that are pushed.

    These are known files: config, weights, tokenizer, card, figures and results of the metrics. The code is what
    `auto_map` names, with everything that it imports: the package's own files, byte for byte, and others from the
    folder. A FoX or HMT without `auto_map` gets one. Unknown files are left out.

    Raises:
        ValueError: a file must not be published (a pickle, the state of a training run, a hidden file, a link out of
            the folder); weights are missing, damaged, incomplete or NaN; code is missing or in another repository;
            the base model of an adapter or HMT has no name on the Hub; a file is not JSON.
        FileNotFoundError, NotADirectoryError: the folder does not exist.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.name not in LEFT_BY_TOOLS)
    check_names(folder, names)
    files: dict[str, Path | bytes] = {}
    results, documents, samples, base_has_code = {}, {}, {}, False
    for path in (folder / name for name in names if (folder / name).is_file()):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in KNOWN):
            files[path.name] = path
        elif MEASUREMENT.fullmatch(path.name):
            read_measurement(path, results, documents, samples)
    files |= {name: folder / name for name in (*documents, *samples)}
    if {"config.json", "adapter_config.json"} <= set(names):
        raise ValueError(
            f"{folder} holds an adapter and its base model, and a repository holds one of the two. Merge them by "
            "`hf_longctx.training.merge(RUN, MODEL)`, and push the folder that it writes."
        )
    if "config.json" in names:
        config, checkpoint = read_json(folder / "config.json"), Checkpoint(folder)
        files |= auto_map_and_code(folder, config) | {path.name: path for path in checkpoint.files.values()}
        index = transformers.utils.SAFE_WEIGHTS_INDEX_NAME
        files |= {name: folder / name for name in (index,) if name in names}
        tensors = {name: math.prod(shape) for name, shape in checkpoint.shapes.items()}
    elif "adapter_config.json" in names:
        config, checkpoint = read_json(folder / "adapter_config.json"), None
        tensors = check_safetensors(folder / ADAPTER)
        files |= {name: folder / name for name in ("adapter_config.json", ADAPTER, BASE) if name in names}
        base_has_code = BASE in names and read_json(folder / BASE).get("model_type") in AUTO_MAPS
    else:
        raise ValueError(f"{folder} has no config.json or adapter_config.json; give the folder of a saved model.")
    left_out = tuple(name for name in names if name not in (*files, CONTENTS))
    bundle = Bundle(files, left_out, config, tensors, results, documents, samples, base_has_code)
    if bundle.base is not None:
        check_base(folder, bundle)
    if checkpoint is not None:
        check_weights(folder, checkpoint, config, bundle.auto_class)
    return with_contents(bundle)


def check_base(folder: Path, bundle: Bundle) -> None:
    """Raise ValueError if the base model of an adapter or HMT does not have a name on the Hub."""
    base, _ = bundle.base or ("", None)
    is_name = isinstance(base, str) and not base.startswith(("/", ".", "~")) and not Path(base).exists()
    try:
        validate_repo_id(str(base) if is_name else "")
    except ValueError as error:
        key = "base_model_name_or_path" if bundle.is_adapter else "backbone_name_or_path"
        raise ValueError(
            f"{folder} needs {base}, which is not a name on the Hub. Push that model first, and put its name into {key} of "
            "the config."
        ) from error


def check_names(folder, names):
    """Raise ValueError for files that must not be pushed, and for links that leave the folder."""
    errors = []
    for path in (folder / name for name in names):
        if path.is_symlink() and leads_outside(path, folder):
            errors.append(f"{path.name} is a link to {path.resolve()}, outside of the folder: remove it")
        for patterns, reason in FORBIDDEN.items():
            if any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in patterns):
                errors.append(f"{path.name} is {reason}")
                break
    if errors:
        raise ValueError(f"{folder} cannot be pushed. {'. '.join(errors)}.")


def read_measurement(path, results, documents, samples):
    """Add the content of a JSON file that a metric, a benchmark or scripts.sample has written."""
    try:
        document = read_json(path)
        if not isinstance(document.get("settings", {}), dict):
            return
        if all(isinstance(document.get(name), str) for name in ("prompt", "text")):
            samples[path.name] = document
            return
        types = {"command": str, "machine": dict, "versions": dict, "rows": list}
        if not all(isinstance(document.get(name), kind) for name, kind in types.items()):
            results[path.name] = read_result(path)
        documents[path.name] = document
    except ValueError:  # another file
        return


def auto_map_and_code(folder, config):
    """Return config.json, with an auto_map where FoX or HMT lacks one, and the files of code that it needs.

    A file comes from the package if the package has it, otherwise from the folder.
    """
    files = {"config.json": folder / "config.json"}
    auto_map = config.get("auto_map") or AUTO_MAPS.get(config.get("model_type"), {})
    if not config.get("auto_map") and auto_map:
        files["config.json"] = (json.dumps(config | {"auto_map": auto_map}, indent=2, sort_keys=True) + "\n").encode()
    tokenizer = folder / "tokenizer_config.json"
    tokenizer_map = read_json(tokenizer).get("auto_map", {}) if tokenizer.is_file() else {}
    modules = module_names("config.json", auto_map) | module_names(tokenizer.name, tokenizer_map)
    while modules:
        name = f"{modules.pop()}.py"
        if name in files:
            continue
        path = folder / name
        if not (name == BACKBONE_CODE and path.is_file()):
            path = PACKAGE_CODE.get(name, path)
        if not path.is_file():
            raise ValueError(
                f"{folder} lacks {name}, which its auto_map needs; save the model again with save_pretrained."
            )
        files[name] = path
        modules |= set(get_relative_imports(path))
    return files


def module_names(file, auto_map):
    """Return the modules that an auto_map names; raise ValueError for modules of another repository."""
    classes = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    modules = set()
    for name in [name for value in classes for name in (value if isinstance(value, list) else [value])]:
        if name is None:  # there is no slow tokenizer
            continue
        module, _, class_name = str(name).partition(".")
        if not (module.isidentifier() and class_name.isidentifier()):
            raise ValueError(
                f"auto_map of {file} has {name!r}; it must name a class of a file in the same folder, such as "
                "'modeling_fox.FoxForCausalLM', because code in another repository changes without this one."
            )
        modules.add(module)
    return modules


def with_contents(bundle: Bundle, files: Mapping[str, Path | bytes] | None = None) -> Bundle:
    """Return the bundle with new contents of some files, and with the versions and the sha256 of every file."""
    hashes = {} if files is None else json.loads(bundle.text(CONTENTS))["sha256"]  # weights are hashed once
    for path, content in (bundle.files if files is None else files).items():
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
            hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
    versions = {"hf_longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    contents = {"versions": versions, "commit": commit(Path(__file__).parents[2])}
    text = json.dumps(contents | {"sha256": dict(sorted(hashes.items()))}, indent=2) + "\n"
    return replace(bundle, files={**bundle.files, **(files or {}), CONTENTS: text.encode()})
