"""Read the JSON, safetensors and tokenizer files of a checkpoint folder, but never files outside the folder."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


# Patterns of the tokenizer and generation files that a conversion copies.
TOKENIZER_FILES = (
    "tokeniz*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raise ValueError if the file does not contain one."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too long a number, or too deep nesting
        raise ValueError(f"{path} is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(content).__name__}.")
    return content


def leads_outside(path: Path, folder: Path) -> bool:
    """Return whether `path` links to a file outside `folder`. In the Hub cache, the repository's blobs are allowed."""
    home = folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return not any(path.resolve().is_relative_to(home) for home in homes)


def tokenizer_files(folder: Path) -> list[Path]:
    """List the tokenizer and generation files in a folder.

    Raises:
        ValueError: a file is a link to a target outside the folder. The target could be published by mistake.
    """
    files = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()]
    for path in files:
        if leads_outside(path, folder):
            raise ValueError(
                f"{path} is a link to {path.resolve()}, outside {folder}. Remove the link, or replace it with a file."
            )
    return files


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder. If the `with` block ends without an error, rename the folder to `destination`.

    Raises:
        ValueError: `destination` exists and is not an empty folder.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty folder. Choose another name, or remove it.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    # in the same file system as the destination: otherwise the rename would not be atomic
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as temporary:
        folder = Path(temporary) / destination.name
        folder.mkdir()
        yield folder
        if destination.exists():
            destination.rmdir()
        folder.rename(destination)


@contextlib.contextmanager
def open_safetensors(file: Path) -> Iterator:
    """Open a file with `safe_open`. Raise ValueError if the file is corrupt or truncated."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a valid safetensors file ({error}). It may be truncated. Download or save it again."
        ) from error


class Checkpoint:
    """The tensors in the safetensors files of a folder.

    Attributes:
        files, shapes: map the name of each tensor to its file or shape.

    Raises:
        ValueError: a safetensors file is missing, corrupt or truncated, or two files contain the same tensor.
    """

    def __init__(self, folder: Path):
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(folder):
            with open_safetensors(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a file cannot be iterated)
                    if name in self.files:
                        raise ValueError(f"{name} is in both {self.files[name].name} and {file.name} of {folder}.")
                    self.files[name], self.shapes[name] = file, tuple(tensors.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor `name`, memory-mapped."""
        with open_safetensors(self.files[name]) as tensors:
            return tensors.get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files in the index of a folder. If there is no index, return model.safetensors."""
    names, index = [SAFE_WEIGHTS_NAME], folder / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        weight_map = read_json(index).get("weight_map", {})
        names = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(
                f"weight_map of {index} must map every tensor to the name of a file in the same folder, got {name!r}."
            )
    files = [folder / name for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        raise ValueError(
            f"{folder} lacks {', '.join(missing) or 'weights'}. Weights must be in safetensors files."
            + (f" Load and save the model to convert {', '.join(pickled)}." if pickled else "")
        )
    return files
