"""Conversion of checkpoint folders, tensor by tensor, with the tables of `convert.py`."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .configuration_fox import FoxConfig
from .convert import LAYOUTS, LLAMA_MODULES, Conversion, read_config, read_llama_config, widest, write_config
from .modeling_fox import AUTO_MAP


# In the order in which safetensors lays out a file.
SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Files of the tokenizer and of generation, which are copied.
COMPANIONS = (
    "tokeniz*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)


def convert_folder(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    source_format: str = "fox",
    destination_format: str = "fox",
    decay_time: float | None = None,
) -> None:
    """Convert a checkpoint folder to FoX, or a FoX folder to another layout.

    Weights keep their dtype and pass through memory one tensor at a time. The result appears at `destination` when it
    is complete, and not before. A FoX folder holds all that `save_pretrained` writes, the code included. Tokenizer and
    generation settings are taken along.

    Args:
        source: folder with config.json and safetensors files, sharded or not.
        destination: folder to create; it must not exist, or must be empty.
        source_format, destination_format: one is "fox", the other "official" (the authors' implementation), "fla"
            (flash-linear-attention) or, for the source only, "llama" (the Llama, Mistral, Qwen2 and Qwen3 families).
        decay_time: as in `from_llama`; for a "llama" only.

    Raises:
        ValueError: a file is corrupt, truncated or missing; the configuration cannot be converted; tensors are
            missing, unknown or of another shape (all are listed); the index names a file outside of the source, or a
            link among the companions leads there; the destination is not empty.
        OSError: a file cannot be read or written.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty folder; choose another name, or remove it.")
    if not (source / CONFIG_NAME).is_file():
        raise ValueError(
            f"{source} is not a checkpoint folder, it has no {CONFIG_NAME}. A model on the Hub is fetched by: "
            "hf download NAME --local-dir FOLDER."
        )
    config_dict = read_json(source / CONFIG_NAME)
    dtype_name = config_dict.get("dtype", config_dict.get("torch_dtype"))
    if dtype_name is not None and not (
        isinstance(dtype_name, str) and isinstance(getattr(torch, dtype_name, None), torch.dtype)
    ):
        raise ValueError(
            f"dtype is {dtype_name!r} in {source / CONFIG_NAME}; it must be the name of a dtype, such as 'bfloat16', or "
            "be left out."
        )
    try:
        config, their_config, conversion = plan(config_dict, source_format, destination_format, decay_time)
    except StrictDataclassError as error:  # which is no ValueError
        raise ValueError(f"{source / CONFIG_NAME}: {error}") from error
    companions = find_companions(source)
    checkpoint = Checkpoint(source)
    conversion.check(checkpoint.shapes, checkpoint.read)
    stored = {checkpoint.dtypes[name] for name in conversion.inputs}
    if not stored <= SAFETENSORS_DTYPES.keys():
        unsupported = ", ".join(sorted(map(str, stored - SAFETENSORS_DTYPES.keys())))
        raise ValueError(f"{source} has weights of {unsupported}; convert the original weights.")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_DTYPES}
    dtype = dtypes.get(dtype_name) or widest(stored)

    destination.parent.mkdir(parents=True, exist_ok=True)
    # beside the destination, because a rename is atomic within one file system only
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as temporary:
        folder = Path(temporary) / destination.name
        folder.mkdir()
        if their_config is None:
            save_code_and_config(config, dtype, folder)
        else:
            their_config["torch_dtype"] = str(dtype).removeprefix("torch.")
            (folder / CONFIG_NAME).write_text(json.dumps(their_config, indent=2) + "\n")
        write_shards(conversion, checkpoint, dtype, folder)
        for path in companions:
            shutil.copyfile(path, folder / path.name)
        if destination.exists():
            destination.rmdir()
        folder.rename(destination)


def plan(config_dict, source_format, destination_format, decay_time):
    """(config of the FoX, configuration to write if the result is not a FoX, conversion of the tensors)."""
    formats = ("llama", *LAYOUTS)
    if destination_format == "fox" and source_format in formats:
        if decay_time is not None and source_format != "llama":
            raise ValueError(f"decay_time={decay_time} opens the gates of a model without gates; leave it out.")
        if source_format == "llama":
            config, modules = read_llama_config(config_dict, decay_time), LLAMA_MODULES
        else:
            config, modules = read_config(source_format, config_dict), LAYOUTS[source_format][0].modules
        return config, None, Conversion.to_fox(config, modules)
    if source_format == "fox" and destination_format in LAYOUTS:
        if config_dict.get("model_type") != FoxConfig.model_type:
            raise ValueError(
                f"model_type is {config_dict.get('model_type')!r}, not 'fox'; what is the source's format?"
            )
        config = FoxConfig.from_dict(config_dict)
        their_config = write_config(destination_format, config)
        return config, their_config, Conversion.from_fox(config, LAYOUTS[destination_format][0].modules)
    raise ValueError(
        f"cannot convert from {source_format!r} to {destination_format!r}: from one of {formats} to 'fox', or from "
        f"'fox' to one of {tuple(LAYOUTS)}."
    )


def find_companions(source: Path) -> list[Path]:
    """The files to copy. A link that leaves the folder is refused, as the copy may be published with the weights."""
    companions = [path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()]
    for path in companions:
        if leads_outside(path, source):
            raise ValueError(
                f"{path} is a link to {path.resolve()}, outside of {source}, and would be copied into the result. Remove "
                "it, or put the file itself in its place."
            )
    return companions


def leads_outside(path: Path, folder: Path) -> bool:
    """Whether a path within a folder is a link to something outside. In the Hub's cache, links lead to the blobs."""
    home = folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return not any(path.resolve().is_relative_to(home) for home in homes)


def save_code_and_config(config, dtype, folder):
    """What `save_pretrained` writes besides the weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.architectures = [type(model).__name__]
    model.config.auto_map = dict(AUTO_MAP)
    custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def write_shards(conversion, checkpoint, dtype, folder):
    """Write the outputs of `conversion` into files no larger than the source's; new tensors get `dtype`."""
    shells, new = {}, 0
    for name, (shape, pieces) in conversion.outputs.items():
        stored = widest(checkpoint.dtypes[piece[0]] for piece in pieces) if pieces else dtype
        shells[name] = torch.empty(shape, dtype=stored, device="meta")
        new += 0 if pieces else shells[name].nbytes
    split = split_torch_state_dict_into_shards(shells, max_shard_size=checkpoint.largest_file + new)
    for file, names in split.filename_to_tensors.items():
        write_safetensors(
            folder / file,
            {name: shells[name] for name in names},
            lambda name: conversion.make(name, checkpoint.read).to(shells[name].dtype),
        )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_safetensors(file: Path, shells: dict[str, torch.Tensor], make: Callable[[str], torch.Tensor]) -> None:
    """Write byte for byte what `safetensors.torch.save_file` writes, with one tensor in memory instead of all.

    Args:
        shells: tensors without data, by name.
        make: gives the tensor for a name, of the same shape and dtype.
    """
    order = list(SAFETENSORS_DTYPES)
    names = sorted(shells, key=lambda name: (order.index(shells[name].dtype), name))
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        begin, end = end, end + shells[name].nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[shells[name].dtype],
            "shape": list(shells[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            out.write(make(name).contiguous().view(torch.uint8).numpy())


class Checkpoint:
    """The tensors in the safetensors files of a folder, read by rows.

    Attributes:
        shapes, dtypes: of every tensor, by name. Scalars have no entry in `dtypes`.
        largest_file: bytes.

    Raises:
        ValueError: there are no safetensors files, one is missing, corrupt or truncated, or two hold the same tensor.
    """

    def __init__(self, folder: Path):
        self.files, self.shapes, self.dtypes = {}, {}, {}
        files = self.find_files(folder)
        for file in files:
            with self.open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a file, not a dictionary)
                    if name in self.files:
                        raise ValueError(f"{name} is in {self.files[name].name} and in {file.name} of {folder}.")
                    rows = tensors.get_slice(name)
                    self.files[name] = file
                    self.shapes[name] = tuple(rows.get_shape())
                    if self.shapes[name]:
                        self.dtypes[name] = rows[:0].dtype
        self.largest_file = max(file.stat().st_size for file in files)

    @staticmethod
    def find_files(folder):
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if index.exists():
            weight_map = read_json(index).get("weight_map", {})
            names = weight_map.values() if isinstance(weight_map, dict) else [weight_map]
            for name in names:
                if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
                    raise ValueError(
                        f"weight_map of {index} leads to {name!r}; it must map every tensor to the name of a file in "
                        "the same folder."
                    )
            files = [folder / name for name in sorted(set(names))]
        else:
            files = [folder / SAFE_WEIGHTS_NAME]
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
            raise ValueError(
                f"{folder} lacks {', '.join(missing) or 'weights'}; weights must be in safetensors files."
                + (f" It has {', '.join(pickled)}: load and save the model once to convert them." if pickled else "")
            )
        return files

    @staticmethod
    @contextlib.contextmanager
    def open(file):
        try:
            with safe_open(file, framework="pt") as tensors:
                yield tensors
        except SafetensorError as error:
            raise ValueError(
                f"{file} is not a sound safetensors file ({error}); it may be truncated. Fetch or save it again."
            ) from error

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor. The file is closed again at once, because its pages count as memory while it is mapped."""
        with self.open(self.files[name]) as tensors:
            return tensors.get_slice(name)[start:stop]


def read_json(path):
    try:
        content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a JSON object.")
    return content
