"""The files that are pushed: known files of a folder, the code that the model needs, and the hashes of all of them."""

import fnmatch
import hashlib
import io
import json
import math
import os
import pickletools
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_imports

from .. import __version__, fox, hmt
from ..fox.checkpoint_files import TOKENIZER_FILES, Checkpoint, leads_outside, read_json
from ..fox.modeling_fox import AUTO_MAP
from ..hmt import custom_backbone_hmt
from ..metrics import read_result
from ..metrics.result import Result, commit
from .weights import check_safetensors, check_weights


CONTENTS = "hf_longctx.json"  # versions and hashes
NOTES = "card_notes.md"  # a person's words for the card
ADAPTER = "adapter_model.safetensors"
BASE = "base.json"  # beside an adapter of `hf-longctx finetune`: which weights it was trained on
TRAINING = ("training.txt", "training.yaml", "training_log.jsonl")  # commands, settings, losses
KNOWN = ("README.md", NOTES, "LICENSE", "LICENSE.md", "LICENSE.txt", "*.png", "*.svg", *TRAINING, *TOKENIZER_FILES)
# Patterns of names that are refused, and why.
REFUSED = {
    ("training_args.bin",): "a pickle of the training's arguments, which hold a token where one was given: remove it",
    ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*"): "the state of a training: push the folder of its model",
    ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt"): "a pickle, which can run code when it is loaded: "
    "load the model, and save it with save_pretrained, which writes safetensors",
    (".*",): "a hidden file, which may hold a secret: remove it",
}
TOOLS = (".git", ".gitattributes", ".cache")  # of git and of `hf download`; not pushed
MEASUREMENT = re.compile(r"[\w.-]+\.json")  # a name that a card can link to
EVALUATIONS = ".eval_results"  # results on benchmarks that are registered at the Hub, as YAML
PACKAGE_CODE = {
    path.name: path
    for package, suffix in ((fox, "fox"), (hmt, "hmt"))
    for path in Path(package.__path__[0]).glob(f"*_{suffix}.py")
}
# What `HMTConfig.save_pretrained` writes: the classes of a backbone that transformers lacks, or none.
BACKBONE_CODE = re.compile(
    rf'"""{re.escape(custom_backbone_hmt.__doc__ or "")}"""\n\n(CONFIG_CLASS = MODEL_CLASS = None'
    r"|from \.\w+ import \w+ as CONFIG_CLASS\nfrom \.\w+ import \w+ as MODEL_CLASS)\n"
)
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
    """The files of a push, and what they say about the model.

    Attributes:
        files: the content of every file, or where it is read from, by its path in the repository.
        left_out: names in the folder that are not pushed.
        config: of the model, or of the adapter; empty for a Space.
        tensors: numbers in each tensor of the weights, by its name.
        results: results of metrics, by the name of their file.
        documents: the JSON objects of the results and of the benchmarks of scripts/bench, by the name of their file.
        samples: prompt, generated text and settings, by the name of their file.
        base_has_code: whether the base of an adapter has code of its own.
        is_adapter: whether it is an adapter, and no model.
        code_only: whether it brings only the code in a repository up to date; see `push.code_only`.
    """

    files: dict[str, Path | bytes]
    left_out: tuple[str, ...] = ()
    config: dict = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    documents: dict[str, dict] = field(default_factory=dict)
    samples: dict[str, dict] = field(default_factory=dict)
    base_has_code: bool = False
    is_adapter: bool = False
    code_only: bool = False

    @property
    def base(self) -> tuple[str, str | None] | None:
        """Name and revision, on the Hub, of the base of an adapter, or of the backbone that an HMT points to."""
        if self.is_adapter:
            return self.config.get("base_model_name_or_path", ""), self.config.get("revision")
        if self.config.get("backbone_in_checkpoint", True):
            return None
        return self.config.get("backbone_name_or_path", ""), self.config.get("backbone_revision")

    @property
    def auto_class(self) -> str:
        """The class of transformers or PEFT that loads it: AutoModelForCausalLM of a FoxForCausalLM, and so on."""
        if self.is_adapter:
            return f"AutoPeftModel{PEFT_TASKS.get(self.config.get('task_type', ''), 'ForCausalLM')}"
        (name, *_) = self.config.get("architectures") or ["ForCausalLM"]
        if name.endswith("Model") and not name.endswith("LMHeadModel"):
            return "AutoModel"
        task = name.rpartition("For")[2]
        return "AutoModelForCausalLM" if task == name else f"AutoModelFor{task}"  # HMTWrapper, GPT2LMHeadModel

    @property
    def has_code(self) -> bool:
        """Whether it needs trust_remote_code: for its own code, or for that of the FoX that it adapts."""
        return self.base_has_code or any(path.endswith(".py") for path in self.files)

    def text(self, path: str, errors: str = "strict") -> str:
        """Return one file as text, without the byte order mark of some editors; "" without such a file.

        Raises:
            ValueError: it is not UTF-8, and `errors`, as in `bytes.decode`, does not say what to do then.
        """
        content = self.files.get(path, b"")
        try:
            return (content if isinstance(content, bytes) else content.read_bytes()).decode("utf-8-sig", errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error}).") from error


def build_bundle(folder: str | os.PathLike) -> Bundle:
    """Collect what is pushed of the folder of a model or of an adapter.

    Known files are taken: configuration, weights, tokenizer, card, pictures, results of the metrics. The code is what
    `auto_map` names, with all that it imports: the package's own files, byte for byte, and others from the folder. A
    FoX or HMT without `auto_map` gets one. Unknown files are left out; what should never be public is refused.

    Raises:
        ValueError: a file is refused (a pickle, state of a training, a hidden file, a link that leaves the folder);
            weights are missing, damaged, incomplete or NaN; code is missing or in another repository; the base of an
            adapter or of an HMT has no name on the Hub; a file is not JSON.
        FileNotFoundError, NotADirectoryError: there is no such folder.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.name not in TOOLS)
    evaluations = [f"{EVALUATIONS}/{path.name}" for path in sorted((folder / EVALUATIONS).glob("*.yaml"))]
    check_names(folder, [*names, *evaluations])
    files: dict[str, Path | bytes] = {name: folder / name for name in evaluations}
    results, documents, samples, base_has_code, checkpoint = {}, {}, {}, False, None
    for path in (folder / name for name in names if (folder / name).is_file()):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in KNOWN):
            files[path.name] = path
        elif MEASUREMENT.fullmatch(path.name) and path.name not in (
            "config.json",
            "adapter_config.json",
            BASE,
            CONTENTS,
        ):
            read_measurement(path, results, documents, samples)
    files |= {name: folder / name for name in (*documents, *samples)}
    if {"config.json", "adapter_config.json"} <= set(names):
        raise ValueError(
            f"{folder} holds an adapter and its base, and a repository one of the two. Merge them by "
            "`hf_longctx.training.merge(RUN, MODEL)`, and push the folder that it writes."
        )
    if "config.json" in names:
        config, checkpoint = read_config(folder / "config.json"), Checkpoint(folder)
        files |= auto_map_and_code(folder, config) | {path.name: path for path in checkpoint.files.values()}
        index = transformers.utils.SAFE_WEIGHTS_INDEX_NAME
        files |= {name: folder / name for name in (index,) if name in names}
        tensors = {name: math.prod(shape) for name, shape in checkpoint.shapes.items()}
    elif "adapter_config.json" in names:
        config = read_config(folder / "adapter_config.json")
        tensors = check_safetensors(folder / ADAPTER)
        files |= {name: folder / name for name in ("adapter_config.json", ADAPTER, BASE) if name in names}
        base_has_code = BASE in names and read_json(folder / BASE).get("model_type") in AUTO_MAPS
    else:
        raise ValueError(f"{folder} lacks config.json or adapter_config.json; give the folder of a saved model.")
    left_out = tuple(name for name in names if name not in files and name not in (CONTENTS, EVALUATIONS))
    bundle = Bundle(files, left_out, config, tensors, results, documents, samples, base_has_code, checkpoint is None)
    if bundle.base is not None:
        adapter = "base_model_name_or_path of adapter_config.json"
        field = adapter if bundle.is_adapter else "backbone_name_or_path of config.json"
        check_base(folder, bundle.base[0], f"put its name into {field}")
    if checkpoint is not None:
        check_weights(folder, checkpoint, config, bundle.auto_class)
    return with_contents(bundle)


def read_config(path):
    """Read a configuration; raise ValueError where what names its classes is no name."""
    config = read_json(path)
    classes = config.get("architectures") or ["none"]
    names = [config.get(name) for name in ("model_type", "task_type")]
    if not isinstance(classes, list) or not all(isinstance(name, str | None) for name in (*names, *classes)):
        raise ValueError(
            f"{path} has a model_type, task_type or architectures that are no names; save the model again."
        )
    return config


def check_base(path: Path, base: object, remedy: str) -> None:
    """Raise ValueError if what a folder or file needs has no name on the Hub. `remedy`: to do once it has one."""
    is_name = isinstance(base, str) and not base.startswith(("/", ".", "~")) and not Path(base).exists()
    try:
        validate_repo_id(str(base) if is_name else "")
    except ValueError as error:
        raise ValueError(
            f"{path} needs {base}, which is not a name on the Hub. Push that model first, and {remedy}."
        ) from error


def check_names(folder, names):
    """Raise ValueError for files that must not be pushed, and for links that leave the folder."""
    errors = []
    for path in (folder / name for name in names):
        reasons = [
            why for patterns, why in REFUSED.items() if any(fnmatch.fnmatch(path.name.lower(), p) for p in patterns)
        ]
        if EVALUATIONS in (path.name, path.parent.name):
            reasons.clear()
        if path.exists() and not (path.is_file() or path.is_dir()):
            reasons.append("a pipe or device, and no file: remove it")
        elif path.is_symlink() and leads_outside(path, folder):
            reasons.append(f"a link to {path.resolve()}, outside of the folder: remove it")
        elif path.is_file() and any(fnmatch.fnmatch(path.name, p) for p in TOKENIZER_FILES):
            content = path.read_bytes()
            with suppress(ValueError):  # no opcode; a zip file is a pickle of PyTorch
                if content.startswith(b"PK\x03\x04") or list(pickletools.genops(content)):
                    reasons.append("a pickle, which can run code when it is loaded: remove it")
        errors += [f"{path.name} is {why}" for why in reasons[:1]]
    if errors:
        raise ValueError(f"{folder} cannot be pushed. {'. '.join(errors)}.")


def read_measurement(path, results, documents, samples):
    """Add what a JSON file holds, if a metric, a benchmark or scripts.sample has written it."""
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
        elif not all(isinstance(row, dict) for row in document["rows"]):
            return
        documents[path.name] = document
    except ValueError:
        return


def auto_map_and_code(folder, config):
    """Return config.json, with an auto_map where FoX or HMT lacks one, and the files of code that it needs.

    They are the package's own, else the folder's, which alone says what the backbone of an HMT is.
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
        if name == "custom_backbone_hmt.py" and path.is_file():
            if not BACKBONE_CODE.fullmatch(path.read_text()):
                raise ValueError(f"{path} is not what save_pretrained writes there; save the model again with it.")
        else:
            path = PACKAGE_CODE.get(name, path)
        if not path.is_file():
            raise ValueError(
                f"{folder} lacks {name}, which its auto_map needs; save the model again with save_pretrained."
            )
        files[name] = path
        modules |= set(get_relative_imports(path))
    return files


def module_names(file, auto_map):
    """Return the modules of an auto_map; ValueError for those of another repository."""
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


def with_contents(bundle: Bundle, files: Mapping[str, Path | bytes] | None = None) -> Bundle:
    """Return the bundle with other contents of some files, and a file of versions and the sha256 of every file."""
    hashes = {} if files is None else json.loads(bundle.text(CONTENTS))["sha256"]  # weights are hashed once
    for path, content in (bundle.files if files is None else files).items():
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
            hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
    versions = {"hf_longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    contents = {"versions": versions, "commit": commit(Path(__file__).parents[2])}
    text = json.dumps(contents | {"sha256": dict(sorted(hashes.items()))}, indent=2) + "\n"
    return replace(bundle, files={**bundle.files, **(files or {}), CONTENTS: text.encode()})
