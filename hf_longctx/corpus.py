"""Texts to measure and to train on: a file, a folder, a `datasets` name, or the English that ships with CPython."""

import zlib
from pathlib import Path


def load_text(source: str | None = None) -> str:
    """Read a corpus.

    Args:
        source: path of a text file or of a folder of *.txt files (joined in name order), or the name of a dataset for
            `datasets.load_dataset` (its "text" column, split "test" if there is one, else the first). None: the held-out
            part of `stdlib_text`.

    Raises:
        ValueError: the text is empty, or the dataset has no "text" column.
        ImportError: a dataset was named and `datasets` is not installed.
        FileNotFoundError: neither a path nor a dataset of that name could be found.
    """
    if source is None:
        return stdlib_text("held_out")
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(f"folder {source} holds no *.txt file; give a folder of plain text or one file.")
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        text = _dataset_text(source)
    if not text.strip():
        raise ValueError(f"{source} holds no text; a corpus needs at least a few hundred words.")
    return text


def _dataset_text(name):
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"{name} is no file or folder; reading it as a dataset needs: pip install 'hf-longctx[training]'"
        ) from None
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # offline, unknown name, gated: the library raises many kinds
        raise FileNotFoundError(f"{name} is no file or folder, and load_dataset({name!r}) failed: {error}") from error
    split = splits["test" if "test" in splits else next(iter(splits))]
    if "text" not in split.column_names:
        raise ValueError(f'dataset {name} has columns {split.column_names}; a corpus needs a column "text".')
    return "\n\n".join(split["text"])


def stdlib_text(part: str) -> str:
    """English from the Python language reference, as CPython ships it in `pydoc_data.topics` (PSF licence).

    A fifth of the topics, chosen by a hash of their names, is "held_out"; "train" is every paragraph of the others that
    occurs in none of the held-out ones, once. The text differs a little between Python versions.
    """
    from pydoc_data.topics import topics

    held_out = {name: text for name, text in topics.items() if zlib.crc32(name.encode()) % 5 == 0}
    if part == "held_out":
        return "\n\n".join(held_out[name].strip() for name in sorted(held_out))
    if part == "train":
        seen = {paragraph.strip() for text in held_out.values() for paragraph in text.split("\n\n")}
        paragraphs = []
        for name in sorted(topics.keys() - held_out.keys()):
            for paragraph in topics[name].split("\n\n"):
                if paragraph.strip() and paragraph.strip() not in seen:
                    seen.add(paragraph.strip())
                    paragraphs.append(paragraph)
        return "\n\n".join(paragraphs)
    raise ValueError(f'part is {part!r}; it must be "train" or "held_out".')
