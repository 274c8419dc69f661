"""Conversion of checkpoint folders, file by file, with the tables of `convert.py`."""

import json
import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from .checkpoint_files import Checkpoint, new_folder, read_json, tokenizer_files
from .configuration_fox import FoxConfig
from .convert import LAYOUTS, LLAMA_MODULES, Conversion, read_config, read_llama_config, widest, write_config
from .modeling_fox import AUTO_MAP


DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert_folder(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    source_format: str = "fox",
    destination_format: str = "fox",
    decay_time: float | None = None,
) -> None:
    """Convert a checkpoint folder to FoX, or a FoX folder to another layout.

    Weights keep their dtype. One file of the result is in memory at a time (twice while it is written), and none is
    larger than the largest of the source, but for new gates. The result appears at `destination` when it is complete,
    and not before. A FoX folder holds all that `save_pretrained` writes, the code included. Tokenizer and generation
    settings are taken along.

    Args:
        source: folder with config.json and safetensors files, sharded or not.
        destination: folder to create; it must not exist, or must be empty.
        source_format: "fox", "official" (the authors' implementation), "fla" (flash-linear-attention) or "llama" (the
            Llama, Mistral, Qwen2 and Qwen3 families).
        destination_format: "fox"; or "official" or "fla", if the source is "fox".
        decay_time: as in `from_llama`; for a "llama" only.

    Raises:
        ValueError: a file is corrupt, truncated or missing; the configuration cannot be converted; tensors are
            missing, unknown or of another shape (all are listed); the index names a file outside of the source, or a
            tokenizer file is a link that leads there; the destination is not empty.
        OSError: a file cannot be read or written.
    """
    source, destination = Path(source), Path(destination)
    with new_folder(destination) as folder:
        write_folder(source, folder, source_format, destination_format, decay_time)


def write_folder(
    source: Path, folder: Path, source_format: str, destination_format: str, decay_time: float | None
) -> None:
    """Write the result of `convert_folder`."""
    if not (source / CONFIG_NAME).is_file():
        raise ValueError(
            f"{source} is not a checkpoint folder, it has no {CONFIG_NAME}. A model on the Hub is fetched by: "
            "hf download NAME --local-dir FOLDER."
        )
    config_dict = read_json(source / CONFIG_NAME)
    try:
        config, their_config, conversion = plan(config_dict, source_format, destination_format, decay_time)
    except StrictDataclassError as error:  # which is not a ValueError
        raise ValueError(f"{source / CONFIG_NAME}: {error}") from error
    copied = tokenizer_files(source)
    checkpoint = Checkpoint(source)
    conversion.check(checkpoint.shapes, checkpoint.read)
    stored = {checkpoint.dtypes[name] for name in conversion.inputs}
    if unknown := stored - set(DTYPES.values()):
        raise ValueError(f"{source} has weights of {', '.join(map(str, unknown))}; convert the original weights.")
    dtype = DTYPES.get(str(config_dict.get("dtype", config_dict.get("torch_dtype")))) or widest(stored)
    if their_config is None:
        save_code_and_config(config, dtype, folder)
    else:
        their_config["torch_dtype"] = str(dtype).removeprefix("torch.")
        (folder / CONFIG_NAME).write_text(json.dumps(their_config, indent=2) + "\n")
    write_shards(conversion, checkpoint, dtype, folder)
    for path in copied:
        shutil.copyfile(path, folder / path.name)


def plan(
    config_dict: dict, source_format: str, destination_format: str, decay_time: float | None
) -> tuple[FoxConfig, dict | None, Conversion]:
    """Return the FoX's config, the configuration to write if the result is not a FoX, and the tensors' conversion."""
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
            raise ValueError(f"model_type is {config_dict.get('model_type')!r}, not 'fox'; name the source's format.")
        config = FoxConfig.from_dict(config_dict)
        their_config = write_config(destination_format, config)
        return config, their_config, Conversion.from_fox(config, LAYOUTS[destination_format][0].modules)
    raise ValueError(
        f"cannot convert from {source_format!r} to {destination_format!r}: from one of {formats} to 'fox', or from "
        f"'fox' to one of {tuple(LAYOUTS)}."
    )


def save_code_and_config(config: FoxConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write what `save_pretrained` writes besides the weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.architectures = [type(model).__name__]
    model.config.auto_map = dict(AUTO_MAP)
    custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def write_shards(conversion: Conversion, checkpoint: Checkpoint, dtype: torch.dtype, folder: Path) -> None:
    """Write the outputs of `conversion` into files no larger than the source's; new tensors get `dtype`."""
    empty, new = {}, 0
    for name, (shape, pieces) in conversion.outputs.items():
        stored = widest(checkpoint.dtypes[piece[0]] for piece in pieces) if pieces else dtype
        empty[name] = torch.empty(shape, dtype=stored, device="meta")
        new += 0 if pieces else empty[name].nbytes
    split = split_torch_state_dict_into_shards(empty, max_shard_size=checkpoint.largest_file + new)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: conversion.make(name, checkpoint.read).to(empty[name].dtype).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
