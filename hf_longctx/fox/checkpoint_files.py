"""Files of a checkpoint folder: JSON, safetensors and the tokenizer's files, none of them outside of the folder."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


# Files of the tokenizer and of generation, which are copied.
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
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number or a nesting without end
        raise ValueError(f"{path} is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a JSON object.")
    return content


def leads_outside(path: Path, folder: Path) -> bool:
    """Return True if a path within a folder links to a file outside. In the Hub's cache, links lead to the blobs."""
    home = folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return not any(path.resolve().is_relative_to(home) for home in homes)


def tokenizer_files(folder: Path) -> list[Path]:
    """List the files to copy; refuse a link that leaves the folder, as the copy may be published with the weights."""
    files = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()]
    for path in files:
        if leads_outside(path, folder):
            raise ValueError(
                f"{path} is a link to {path.resolve()}, outside of {folder}, and would be copied into the result. Remove "
                "it, or put the file itself in its place."
            )
    return files


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Make a folder that appears at `destination` when the block has ended without an error, and not before.

    Raises:
        ValueError: there is something already.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty folder; choose another name, or remove it.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    # beside the destination, because a rename is atomic within one file system only
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as temporary:
        folder = Path(temporary) / destination.name
        folder.mkdir()
        yield folder
        if destination.exists():
            destination.rmdir()
        folder.rename(destination)


@contextlib.contextmanager
def open_safetensors(file: Path) -> Iterator:
    """Open a file as `safe_open` does; a corrupt or truncated one is a ValueError."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a sound safetensors file ({error}); it may be truncated. Fetch or save it again."
        ) from error


class Checkpoint:
    """The tensors in the safetensors files of a folder.

    Attributes:
        files, shapes, dtypes: of every tensor, by name. Scalars have no entry in `dtypes`.
        largest_file: bytes.

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
                        raise ValueError(f"{name} is in {self.files[name].name} and in {file.name} of {folder}.")
                    rows = tensors.get_slice(name)
                    self.files[name], self.shapes[name] = file, tuple(rows.get_shape())
                    if self.shapes[name]:
                        self.dtypes[name] = rows[:0].dtype
        self.largest_file = max(file.stat().st_size for file in files)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, mapped from its file."""
        with open_safetensors(self.files[name]) as tensors:
            return tensors.get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder, those of its index where it has one."""
    names, index = [SAFE_WEIGHTS_NAME], folder / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        weight_map = read_json(index).get("weight_map", {})
        names = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(
                f"weight_map of {index} leads to {name!r}; it must map every tensor to the name of a file in the same folder."
            )
    files = [folder / name for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        raise ValueError(
            f"{folder} lacks {', '.join(missing) or 'weights'}; weights must be in safetensors files."
            + (f" It has {', '.join(pickled)}: load and save the model once to convert them." if pickled else "")
        )
    return files
