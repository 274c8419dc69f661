"""Collect the files that a push uploads: model files, the code that the model needs, and hashes of both."""

import fnmatch
import hashlib
import io
import json
import math
import os
import re
import tempfile
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
from .tokenizer import check_text_files
from .weights import check_adapter, check_safetensors, check_weights


CONTENTS = "hf_longctx.json"  # versions of the libraries, and the sha256 of every pushed file
NOTES = "card_notes.md"  # hand-written sections of the model card
ADAPTER = "adapter_model.safetensors"
BASE = "base.json"  # name and hash of an adapter's base weights, written by `hf-longctx finetune`
TRAINING = ("training.txt", "training.yaml", "training_log.jsonl")  # commands, settings and losses of training
KNOWN = ("README.md", NOTES, "LICENSE", "LICENSE.md", "LICENSE.txt", "*.png", "*.svg", *TRAINING, *TOKENIZER_FILES)
# File name patterns that a push rejects, with the reason.
FORBIDDEN = {
    ("training_args.bin",): "a pickle of the training arguments (it can contain a token): remove it",
    ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*"): "the state of a training run: push the model's folder",
    ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt"): "a pickle (loading it can run code): "
    "load the model, and save it as safetensors with save_pretrained",
    (".*",): "a hidden file (it can contain a secret): remove it",
}
LEFT_BY_TOOLS = (".git", ".gitattributes", ".cache", ".eval_results")  # of git, `hf download` and the Hub; ignored
MEASUREMENT = re.compile(r"[\w.-]+\.json")  # file names that a card can link to
PACKAGE_CODE = {
    path.name: path
    for package, suffix in ((fox, "fox"), (hmt, "hmt"))
    for path in Path(package.__path__[0]).glob(f"*_{suffix}.py")
}
# `HMTConfig.save_pretrained` writes the classes of a custom backbone into this file.
BACKBONE_CODE = "custom_backbone_hmt.py"
PEFT_TASKS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}  # CAUSAL_LM is the default
AUTO_MAPS = {
    "fox": {"AutoConfig": "configuration_fox.FoxConfig", **AUTO_MAP},
    "hmt": {"AutoConfig": "configuration_hmt.HMTConfig", "AutoModelForCausalLM": "modeling_hmt.HMTWrapper"},
}


@dataclass(frozen=True)
class Bundle:
    """The files that a push uploads, and the information that we parsed from them.

    Attributes:
        files: content or local path of each file, keyed by path in the repository.
        left_out: names of files in the folder that are not pushed.
        config: parsed config of the model or adapter; empty for a Space.
        tensors: number of elements of each tensor, keyed by tensor name.
        results: results of metrics, keyed by file name.
        documents: parsed JSON files with results of metrics or benchmarks, keyed by file name.
        samples: parsed JSON files with a prompt and the generated text, keyed by file name.
        base_has_code: whether the repository of an adapter's base model contains code.
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
        """Whether the bundle contains an adapter instead of a complete model."""
        return "adapter_config.json" in self.files

    @property
    def base(self) -> tuple[str, str | None] | None:
        """Hub name and revision of an adapter's base model or an HMT's backbone. None if the bundle needs neither."""
        if self.is_adapter:
            return self.config.get("base_model_name_or_path", ""), self.config.get("revision")
        if self.config.get("backbone_in_checkpoint", True):
            return None
        return self.config.get("backbone_name_or_path", ""), self.config.get("backbone_revision")

    @property
    def auto_class(self) -> str:
        """The Auto class of transformers or PEFT that loads the bundle, such as AutoModelForCausalLM."""
        if self.is_adapter:
            return f"AutoPeftModel{PEFT_TASKS.get(self.config.get('task_type', ''), 'ForCausalLM')}"
        (name, *_) = self.config.get("architectures") or ["ForCausalLM"]
        if name.endswith("Model") and not name.endswith("LMHeadModel"):
            return "AutoModel"
        task = name.rpartition("For")[2]
        return "AutoModelForCausalLM" if task == name else f"AutoModelFor{task}"  # HMTWrapper, GPT2LMHeadModel

    @property
    def has_code(self) -> bool:
        """Whether the files or the base model's repository contain code. Loading then needs trust_remote_code."""
        return self.base_has_code or any(path.endswith(".py") for path in self.files)

    def text(self, path: str, errors: str = "strict") -> str:
        """Return a file as text, without a byte order mark. If the file does not exist, return "".

        Args:
            errors: error handler of `bytes.decode`, such as "replace".

        Raises:
            ValueError: the file is not UTF-8, and `errors` is "strict".
        """
        content = self.files.get(path, b"")
        try:
            return (content if isinstance(content, bytes) else content.read_bytes()).decode("utf-8-sig", errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error}).") from error


def build_bundle(folder: str | os.PathLike) -> Bundle:
    """Collect the files to push from the folder of a model or an adapter.

    The config, weights, tokenizer, card, figures and results of metrics are pushed; unknown files are left out, and so
    are results of a cache (`--cache`), because they are not results of the model itself. The modules in `auto_map`
    and their relative imports are pushed; see `code_files`. If the config of a FoX or HMT does not have an `auto_map`,
    we add it.

    Raises:
        ValueError: a file must not be published (a pickle, the state of a training run, a hidden file, a symbolic
            link to a file outside the folder); the files do not work together (`check_weights`, `check_text_files`);
            code is missing or in another repository; or the base model is not the name of a Hub repository.
        FileNotFoundError, NotADirectoryError: the folder does not exist.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.name not in LEFT_BY_TOOLS)
    check_names(folder, names)
    files: dict[str, Path | bytes] = {}
    results = {}
    documents = {}
    samples = {}
    compressed = set()
    base_has_code = False
    for path in (folder / name for name in names if (folder / name).is_file()):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in KNOWN):
            files[path.name] = path
        elif MEASUREMENT.fullmatch(path.name):
            read_measurement(path, results, documents, samples, compressed)
    files = {name: file for name, file in files.items() if Path(name).stem not in compressed}  # their figures
    files |= {name: folder / name for name in (*documents, *samples)}
    if {"config.json", "adapter_config.json"} <= set(names):
        raise ValueError(
            f"{folder} contains an adapter and its base model, but a repository can contain only one of them. Push a "
            "merged model: train with `--merge true`, or merge the adapter with PEFT's `merge_and_unload`."
        )
    if "config.json" in names:
        config, checkpoint = read_config(folder / "config.json"), Checkpoint(folder)
        auto_map = config.get("auto_map") or {}
        files["config.json"] = folder / "config.json"
        if not auto_map and config.get("model_type") in AUTO_MAPS:
            auto_map = AUTO_MAPS[config["model_type"]]
            text = json.dumps(config | {"auto_map": auto_map}, indent=2, sort_keys=True) + "\n"
            files["config.json"] = text.encode()
        files |= code_files(folder, auto_map) | {path.name: path for path in checkpoint.files.values()}
        index = transformers.utils.SAFE_WEIGHTS_INDEX_NAME
        files |= {name: folder / name for name in (index,) if name in names}
        tensors = {name: math.prod(shape) for name, shape in checkpoint.shapes.items()}
    elif "adapter_config.json" in names:
        config = read_config(folder / "adapter_config.json")
        checkpoint = None
        weights = check_safetensors(folder / ADAPTER)
        check_adapter(folder, config, weights)
        tensors = {name: tensor.numel() for name, tensor in weights.items()}
        files |= {name: folder / name for name in ("adapter_config.json", ADAPTER, BASE) if name in names}
        files |= code_files(folder, {})
        base_has_code = BASE in names and read_json(folder / BASE).get("model_type") in AUTO_MAPS
    else:
        raise ValueError(
            f"{folder} does not contain config.json or adapter_config.json. Give the folder of a saved model."
        )
    left_out = tuple(name for name in names if name not in (*files, CONTENTS))
    bundle = Bundle(files, left_out, config, tensors, results, documents, samples, base_has_code)
    if bundle.base is not None:
        check_base(folder, bundle)
    check_loading(folder, bundle, checkpoint)
    return with_contents(bundle)


def check_loading(folder: Path, bundle: Bundle, checkpoint: Checkpoint | None) -> None:
    """Load the files of a bundle as a user who has downloaded them. Raise ValueError if they do not work together."""
    with tempfile.TemporaryDirectory() as temporary:
        downloaded = Path(temporary)
        for name, content in bundle.files.items():
            if isinstance(content, bytes):
                (downloaded / name).write_bytes(content)
            elif name != "adapter_config.json":  # transformers would look for the base model
                (downloaded / name).symlink_to(content.resolve())
        try:
            values = {
                name: read_json(downloaded / name) for name in sorted(os.listdir(downloaded)) if name.endswith(".json")
            }
            embeddings = None
            if checkpoint is not None:
                embeddings = check_weights(downloaded, checkpoint, bundle.config, bundle.auto_class)
                text_config = bundle.config.get("text_config", bundle.config)
                embeddings = text_config.get("vocab_size") if embeddings is None else embeddings
            check_text_files(downloaded, values, embeddings)
        except ValueError as error:
            raise ValueError(str(error).replace(temporary, str(folder))) from error


def read_config(path: Path) -> dict:
    """Read a config. Raise ValueError if its model type, task type or architectures are not strings."""
    config = read_json(path)
    classes = config.get("architectures") or []
    names = [config.get(name) for name in ("model_type", "task_type")]
    if not isinstance(classes, list) or not all(isinstance(name, str | None) for name in (*names, *classes)):
        raise ValueError(
            f"model_type and task_type in {path} must be strings, and architectures must be a list of strings. "
            "Save the model again."
        )
    return config


def check_base(folder: Path, bundle: Bundle) -> None:
    """Raise ValueError if the base model in the config is not the name of a Hub repository."""
    base, _ = bundle.base or ("", None)
    is_name = isinstance(base, str) and not base.startswith(("/", ".", "~")) and not Path(base).exists()
    try:
        validate_repo_id(str(base) if is_name else "")
    except ValueError as error:
        key = "base_model_name_or_path" if bundle.is_adapter else "backbone_name_or_path"
        raise ValueError(
            f"{key} in {folder} must be the name of a repository on the Hub, got {base!r}. Push the base model first, "
            "and set this field to its name."
        ) from error


def check_names(folder, names):
    """Raise ValueError for files that must not be pushed, and for symbolic links to files outside the folder."""
    errors = []
    for path in (folder / name for name in names):
        if path.is_symlink() and leads_outside(path, folder):
            errors.append(f"{path.name} is a link to {path.resolve()}, outside the folder: remove it")
        for patterns, reason in FORBIDDEN.items():
            if any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in patterns):
                errors.append(f"{path.name} is {reason}")
                break
    if errors:
        raise ValueError(f"{folder} cannot be pushed. {'. '.join(errors)}.")


def read_measurement(path, results, documents, samples, compressed):
    """Parse the JSON file of a metric, a benchmark or scripts.sample, and add it to the matching dictionaries.

    If a metric was measured with a cache, add its name to `compressed` instead. Other files are skipped.
    """
    try:
        document = read_json(path)
        if not isinstance(document.get("settings", {}), dict):
            return
        if all(isinstance(document.get(name), str) for name in ("prompt", "text")):
            samples[path.name] = document
            return
        types = {"command": str, "machine": dict, "versions": dict, "rows": list}
        if not all(isinstance(document.get(name), kind) for name, kind in types.items()):
            result = read_result(path)
            if result.settings.get("cache") is not None:  # a compressed cache: not the model's own result
                compressed.add(path.stem)
                return
            results[path.name] = result
        elif not all(isinstance(row, dict) for row in document["rows"]):
            return
        documents[path.name] = document
    except ValueError:  # the file does not contain a measurement
        return


def code_files(folder, auto_map):
    """Return the modules in the auto_maps of the model and its tokenizer, and the modules that these import.

    If this package has a file with a module's name, we take the package's file. Otherwise, we take the folder's file.
    """
    files = {}
    tokenizer = folder / "tokenizer_config.json"
    tokenizer_map = read_json(tokenizer).get("auto_map", {}) if tokenizer.is_file() else {}
    modules = module_names("config.json", auto_map) | module_names(tokenizer.name, tokenizer_map)
    while modules:
        module = modules.pop()
        name = f"{module}.py"
        if name in files:
            continue
        path = folder / name
        if not (name == BACKBONE_CODE and path.is_file()):
            path = PACKAGE_CODE.get(name, path)
        # get_relative_imports also matches text in docstrings, such as `from ./home/x import y`.
        if not (module.isidentifier() and path.is_file()):
            raise ValueError(
                f"{folder} does not contain {name}, but its auto_map needs this file. Save the model again with "
                "save_pretrained."
            )
        files[name] = path
        modules |= set(get_relative_imports(path))
    return files


def module_names(file, auto_map):
    """Return the names of the modules in an auto_map. Raise ValueError for a module of another repository."""
    classes = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    modules = set()
    for name in [name for value in classes for name in (value if isinstance(value, list) else [value])]:
        if name is None:  # None stands for a missing slow tokenizer
            continue
        module, _, class_name = str(name).partition(".")
        if not (module.isidentifier() and class_name.isidentifier()):
            raise ValueError(
                f"auto_map in {file} must name classes from the same folder, got {name!r}. Code in "
                "another repository is not supported, because it can change at any time. A valid name is "
                "'modeling_fox.FoxForCausalLM'."
            )
        modules.add(module)
    return modules


def with_contents(bundle: Bundle, files: Mapping[str, Path | bytes] | None = None) -> Bundle:
    """Add or replace `files` in a bundle, and update the hashes and library versions in hf_longctx.json."""
    hashes = {} if files is None else json.loads(bundle.text(CONTENTS))["sha256"]  # avoids hashing the weights twice
    for path, content in (bundle.files if files is None else files).items():
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
            hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
    versions = {"hf_longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    contents = {"versions": versions, "commit": commit(Path(__file__).parents[2])}
    text = json.dumps(contents | {"sha256": dict(sorted(hashes.items()))}, indent=2) + "\n"
    return replace(bundle, files={**bundle.files, **(files or {}), CONTENTS: text.encode()})
