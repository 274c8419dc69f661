"""Conversion of checkpoint folders, using the tables of names in `convert.py`."""

import json
import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from .checkpoint_files import Checkpoint, new_folder, read_json, tokenizer_files
from .configuration_fox import FoxConfig
from .convert import (
    LAYOUTS,
    LLAMA_MODULES,
    common_dtype,
    read_config,
    read_llama_config,
    tensors_of_fox,
    tensors_of_others,
    write_config,
)


FORMATS = ("llama", *LAYOUTS)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert_folder(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    source_format: str = "fox",
    destination_format: str = "fox",
    decay_time: float | None = None,
) -> None:
    """Convert a checkpoint folder to FoX, or a FoX folder to another format.

    Weights keep their dtype. Source files are memory-mapped, and weights are written file by file. `destination` is
    created only when the conversion is complete. A FoX folder contains everything that `save_pretrained` writes,
    including the code. Tokenizer files and generation settings are copied.

    Args:
        source: folder with config.json and safetensors files, sharded or not.
        destination: folder to create. If it exists, it must be empty.
        source_format: "fox", "official" (the authors' implementation), "fla" (flash-linear-attention) or "llama" (the
            Llama, Mistral, Qwen2 and Qwen3 families).
        destination_format: "fox". If `source_format` is "fox": "official" or "fla".
        decay_time: as in `from_llama`. Requires `source_format="llama"`.

    Raises:
        ValueError: a file is corrupt, truncated or missing; the configuration cannot be converted; tensors are
            missing, are unknown or have another shape; the index names a file outside the source folder; a tokenizer
            file links to a file outside this folder; or the destination is not empty.
        OSError: a file cannot be read or written.
    """
    source, destination = Path(source), Path(destination)
    with new_folder(destination) as folder:
        if not (source / CONFIG_NAME).is_file():
            raise ValueError(
                f"{source} is not a checkpoint folder: {CONFIG_NAME} is missing. Download a model from the Hub with: "
                "hf download NAME --local-dir FOLDER."
            )
        config_dict = read_json(source / CONFIG_NAME)
        copied = tokenizer_files(source)
        try:
            write_folder(config_dict, source, folder, source_format, destination_format, decay_time)
        except StrictDataclassError as error:  # is not a subclass of ValueError
            raise ValueError(f"{source / CONFIG_NAME}: {error}") from error
        for path in copied:
            shutil.copyfile(path, folder / path.name)


def write_folder(
    config_dict: dict,
    source: Path,
    folder: Path,
    source_format: str,
    destination_format: str,
    decay_time: float | None,
) -> None:
    """Write the converted weights and configuration to `folder`. Arguments are as in `convert_folder`."""
    if destination_format == "fox" and source_format in FORMATS:
        if decay_time is not None and source_format != "llama":
            raise ValueError(f"decay_time={decay_time} requires a model without gates ('llama'). Leave it out.")
        if source_format == "llama":
            config, modules = read_llama_config(config_dict, decay_time), LLAMA_MODULES
        else:
            config, modules = read_config(source_format, config_dict), LAYOUTS[source_format][0].modules
        tensors, largest_file = load(source)
        tensors = tensors_of_fox(config, modules, tensors)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype_of(config_dict, tensors))
        new = sum(x.nbytes for name, x in tensors.items() if source_format == "llama" and "f_proj" in name)
        model.save_pretrained(folder, state_dict=tensors, max_shard_size=largest_file + new)
    elif source_format == "fox" and destination_format in LAYOUTS:
        if config_dict.get("model_type") != FoxConfig.model_type:
            raise ValueError(
                f"model_type must be 'fox', got {config_dict.get('model_type')!r}. Set the source format."
            )
        config = FoxConfig.from_dict(config_dict)
        their_config = write_config(destination_format, config)
        tensors, largest_file = load(source)
        tensors = tensors_of_others(config, LAYOUTS[destination_format][0].modules, tensors)
        their_config["torch_dtype"] = str(dtype_of(config_dict, tensors)).removeprefix("torch.")
        (folder / CONFIG_NAME).write_text(json.dumps(their_config, indent=2) + "\n")
        pattern = SAFE_WEIGHTS_NAME.replace(".", "{suffix}.")
        save_torch_state_dict(tensors, folder, filename_pattern=pattern, max_shard_size=largest_file)
    else:
        raise ValueError(
            f"cannot convert from {source_format!r} to {destination_format!r}. Convert one of {FORMATS} to 'fox', or "
            f"'fox' to one of {tuple(LAYOUTS)}."
        )


def load(source: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Return the memory-mapped tensors of a folder by name, and the size of the largest file in bytes."""
    checkpoint = Checkpoint(source)
    tensors = {name: checkpoint.read(name) for name in checkpoint.files}
    if unknown := {x.dtype for x in tensors.values() if x.ndim} - set(DTYPES.values()):
        raise ValueError(f"weights in {', '.join(map(str, unknown))} are not supported. Use the original checkpoint.")
    return tensors, max(file.stat().st_size for file in checkpoint.files.values())


def dtype_of(config_dict: dict, tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype in the configuration. If there is none, return the `common_dtype` of the tensors."""
    name = str(config_dict.get("dtype", config_dict.get("torch_dtype")))
    return DTYPES.get(name) or common_dtype(x.dtype for x in tensors.values())
