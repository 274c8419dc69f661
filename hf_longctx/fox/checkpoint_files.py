"""Readers for the JSON, safetensors and tokenizer files of a checkpoint folder, never of files outside it."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


# Tokenizer and generation files to copy.
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
    """Read a JSON object; raise ValueError for anything else."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too long a number or nesting
        raise ValueError(f"{path} is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(content).__name__}.")
    return content


def leads_outside(path: Path, folder: Path) -> bool:
    """Return True if a path links to a file that is neither in its folder nor in the blobs of the Hub cache."""
    home = folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return not any(path.resolve().is_relative_to(home) for home in homes)


def tokenizer_files(folder: Path) -> list[Path]:
    """List the files to copy; raise ValueError for links out of the folder, as copies may be published."""
    files = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()]
    for path in files:
        if leads_outside(path, folder):
            raise ValueError(
                f"{path} is a link to {path.resolve()}, outside {folder}, and would be copied into the result. Remove the "
                "link, or replace it with the file."
            )
    return files


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Create a folder that appears at `destination` only if the block ends without an error.

    Raises:
        ValueError: `destination` exists and is not an empty folder.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty folder. Choose another name, or remove it.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    # next to the destination, because a rename is atomic only within one file system
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as temporary:
        folder = Path(temporary) / destination.name
        folder.mkdir()
        yield folder
        if destination.exists():
            destination.rmdir()
        folder.rename(destination)


@contextlib.contextmanager
def open_safetensors(file: Path) -> Iterator:
    """Open a file with `safe_open`; raise ValueError if it is corrupt or truncated."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a valid safetensors file ({error}); it may be truncated. Download or save it again."
        ) from error


class Checkpoint:
    """The tensors in the safetensors files of a folder.

    Attributes:
        files, shapes, dtypes: file, shape and dtype of each tensor, by name. `dtypes` omits scalars.
        largest_file: size of the largest file in bytes.

    Raises:
        ValueError: there are no safetensors files, one is missing, corrupt or truncated, or two hold the same tensor.
    """

    def __init__(self, folder: Path):
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        files = weight_files(folder)
        for file in files:
            with open_safetensors(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a file, not a dictionary)
                    if name in self.files:
                        raise ValueError(f"{name} is in both {self.files[name].name} and {file.name} of {folder}.")
                    rows = tensors.get_slice(name)
                    self.files[name], self.shapes[name] = file, tuple(rows.get_shape())
                    if self.shapes[name]:
                        self.dtypes[name] = rows[:0].dtype
        self.largest_file = max(file.stat().st_size for file in files)

    def read(self, name: str) -> torch.Tensor:
        """Return a memory-mapped tensor."""
        with open_safetensors(self.files[name]) as tensors:
            return tensors.get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder, from its index if present."""
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
            + (f" It has {', '.join(pickled)}: load and save the model to convert them." if pickled else "")
        )
    return files
