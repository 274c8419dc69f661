"""Corpora for evaluation and training: a file, a folder, a dataset, PG-19, or the English text shipped with CPython.

A corpus is a sequence of documents. They are read lazily.
"""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from huggingface_hub import HfApi, is_offline_mode

from .tokenization import encode_text


PG19 = "emozilla/pg19"  # `datasets` no longer runs loading scripts, such as deepmind/pg19
STDLIB = "stdlib"
# Preferred splits of a dataset, in this order. If none of them exists, we read the first split.
SPLITS = {"held_out": ("test", "validation"), "train": ("train",)}
PLAIN, TABLES = (".txt", ".md"), {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# Columns of conversations and of their options, named as in TRL, and columns that select what is scored
CONVERSATIONS = (("messages",), ("prompt", "completion"))
CHAT_OPTIONS = (
    *("tools", "chat_template_kwargs", "weight", "train", "trainable", "masked", "loss_mask", "completion_mask"),
    *("assistant_masks", "loss_weight", "sample_weight", "loss_scale"),
)
SUFFIXES = (*PLAIN, *TABLES)  # by priority: in a folder, we read only the files with the first suffix found
HUB_TIMEOUT_S = 3.0
# The first bytes of compressed files, as regular expressions
COMPRESSIONS = {
    "gzip": rb"\x1f\x8b",
    "xz": rb"\xfd7zXZ\x00",
    "bzip2": rb"BZh\d1AY&",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "lz4": rb"\x04\x22\x4d\x18",
    "zip": rb"PK\x03\x04",
    "7-Zip": rb"7z\xbc\xaf\x27\x1c",
}


class Corpus(NamedTuple):
    """A tokenized corpus."""

    tokens: np.ndarray  # (N,) int64, concatenated documents without special tokens
    name: str  # the source's name


def split_mixture(data: str) -> list[tuple[str, float | None]]:
    """Parse a mixture into (source, share) pairs. Shares sum to 1. If a share is None, its source is read once.

    >>> split_mixture("books=3,web.jsonl=1")
    [('books', 0.75), ('web.jsonl', 0.25)]

    Raises:
        ValueError: a share is not a positive number, or only some sources have a share.
    """
    if Path(data).exists() or not re.search("[,=]", data):
        return [(data, None)]
    parts = [part.strip() for part in data.split(",")]
    if "=" not in data and all(parts):
        return [(part, None) for part in parts]
    matches = [re.fullmatch(r"(.+)=(\d*\.?\d+)", part) for part in parts]
    shares = [float(match[2]) for match in matches if match]
    if len(shares) < len(parts) or min(shares) == 0:
        raise ValueError(
            f"Give every source of {data} a share above 0, as in books=0.7,web.jsonl=0.3, or give no shares."
        )
    return [(match[1], share / sum(shares)) for match, share in zip(matches, shares) if match]


def load_tokens(tokenizer: Any, source: str | None = None, *, at_least: int | None = None) -> Corpus:
    """Read a corpus as token ids. Each document is tokenized separately, without special tokens.

    Special tokens that a document contains literally, such as `</s>`, are split; see `encode_text`.

    Args:
        tokenizer: a transformers tokenizer.
        source: as for `load_text`. Default: PG-19 if the Hub responds within seconds, else `stdlib_text`.
        at_least: minimum number of tokens to read. The last document is read whole. Default: read all documents.

    Raises:
        ValueError: as for `load_text`, or the tokenizer encodes the whole corpus with a single id.
        ImportError, FileNotFoundError: as for `load_text`.
    """
    name, documents = open_source(source)
    parts, count = [], 0
    for document in documents:
        ids = encode_text(tokenizer, document)
        parts.append(np.asarray(ids, dtype=np.int64))
        count += len(ids)
        if at_least is not None and count >= at_least:
            break
    tokens = np.concatenate(parts)
    distinct = len(np.unique(tokens))
    if distinct < 2:
        raise ValueError(
            f"The tokenizer must encode {name} with at least two distinct ids, got {distinct} in {len(tokens)} "
            "tokens. The tokenizer does not seem to support this language; choose another corpus or tokenizer."
        )
    return Corpus(tokens, name)


def load_text(source: str | None = None) -> str:
    """Read a whole corpus.

    Args:
        source: one of

            - a file: a table (.jsonl, .json, .parquet, .csv) with a "text" column, or plain text (any other suffix).
              The file may be compressed (.gz).
            - a folder: its files of one type, including nested files, in alphabetical order. The type is the first of
              these that occurs: .txt, .md, .jsonl, .json, .parquet, .csv.
            - a dataset for `datasets.load_dataset`. We read the "text" column of one split: "test" if it exists, else
              "validation", else the first split.
            - "pg19": the test books of PG-19.
            - "stdlib" or None: the held-out part of `stdlib_text`.

    Returns:
        the documents, separated by blank lines.

    Raises:
        ValueError: the corpus is empty or not in UTF-8, or the table or dataset does not have a "text" column.
        ImportError: the source is a table or a dataset, and `datasets` is not installed.
        FileNotFoundError: the source is neither a path nor a dataset.
    """
    return "\n\n".join(open_source(source or STDLIB)[1])


def open_source(
    source: str | None, part: str = "held_out", column: str | None = None, conversations: bool = False
) -> tuple[str, Iterator[Any]]:
    """Return the name of a source and its nonblank documents; see `load_tokens` and `load_text`.

    Args:
        part: part to read, "held_out" or "train". This applies to a dataset, to "pg19" and to "stdlib".
        column: table column to read. Default: "text".
        conversations: whether to read a table of conversations as dicts. Each dict has "messages", or "prompt" and
            "completion". Each dict also has the columns in `CHAT_OPTIONS`, which may be None. If `column` is set,
            `conversations` has no effect.
    """
    if source is None:
        with suppress(Exception):  # `datasets` is missing or the Hub does not respond
            # one short request first, because `datasets` retries a dead connection several times
            HfApi().dataset_info(PG19, timeout=HUB_TIMEOUT_S)
            return open_source(PG19)
        source = STDLIB
    if source == STDLIB:
        return f"Python language reference, {part.replace('_', '-')} part", iter([stdlib_text(part)])
    source = PG19 if source == "pg19" else source
    return str(source), _documents(source, part, column, conversations)


def _documents(source, part, column, conversations):
    """Yield the nonblank documents of a source. If there are none, raise ValueError."""
    path = Path(source)
    is_empty = True
    for file in _files(path) if path.is_dir() else [path]:
        for document in _read(file, source, part, column, conversations):
            if document and (isinstance(document, dict) or document.strip()):
                is_empty = False
                yield document
    if is_empty:
        raise ValueError(f"{source} does not contain text; a corpus needs at least a few hundred words.")


def _files(folder):
    """Return a folder's files of one type, without hidden files.

    The type is the first suffix in `SUFFIXES` that occurs.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    for suffix in SUFFIXES:
        if found := [file for file in files if file.name.lower().removesuffix(".gz").endswith(suffix)]:
            return found
    kinds = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
    raise ValueError(
        f"{folder} does not contain any of these files: {kinds} (or with .gz). Add one, or give a single file."
    )


def _read(path, source, part, column, conversations):
    """Yield the documents of a file or a dataset: the rows of a table, or the whole text."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if path.is_file():
        _check_compression(path)
    if path.is_file() and suffix not in TABLES:
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
            text = content.decode("utf-8-sig")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is an incomplete or damaged gzip file ({error}). Fetch it again.") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} cannot be read as UTF-8 text: {error}. Convert other encodings, for example with iconv."
            ) from error
        if "\0" in text:
            raise ValueError(f"{path} is a binary file (it contains NUL bytes); give a text file.")
        yield text.replace("\r\n", "\n")
        return
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{path} needs the datasets library: pip install 'hf-longctx[training]'") from None
    try:
        if path.is_file():
            files = glob.escape(str(path))
            splits = datasets.load_dataset(TABLES[suffix], data_files=files, streaming=True)
        else:  # offline, read the dataset from the cache
            splits = datasets.load_dataset(str(source), streaming=not is_offline_mode())
        rows = splits[next(split for split in (*SPLITS[part], *splits) if split in splits)]
        columns = rows.column_names or list(next(iter(rows), {}))  # a streamed dataset may lack column names
    except Exception as error:  # many types: `datasets` is offline, or the dataset is unknown, gated or damaged
        if path.is_file():
            raise _unreadable(path, suffix, error) from error
        raise FileNotFoundError(
            f"{source} is neither a file nor a folder, and load_dataset failed: {error}"
        ) from error
    found = next((names for names in CONVERSATIONS if set(names) <= set(columns)), None)
    if conversations and found and column is None:
        if path.is_file() and TABLES[suffix] == "json":
            written = _json_rows(path)
        else:
            written = (_without_added_nulls(row, rows.features) for row in rows)
        written = _rows(written, path, suffix) if path.is_file() else written
        yield from ({name: row.get(name) for name in (*found, *CHAT_OPTIONS)} for row in written)
        return
    column = column or "text"
    if column not in columns:
        raise ValueError(
            f'{path} must have a column "{column}", got {columns}. Rename your text column. The commands train '
            "and finetune also accept --text_column. They also accept conversations: a column "
            '"messages" with lists of {"role", "content"}, or the columns "prompt" and "completion".'
        )
    for row in _rows(rows, path, suffix) if path.is_file() else rows:
        if not isinstance(row[column], str | None):
            raise ValueError(
                f'The column "{column}" of {path} must contain strings, got {type(row[column]).__name__}.'
            )
        yield row[column]


def _json_rows(path):
    """Yield the rows of a JSON file as they were written: lines (.jsonl), or an array or several objects (.json).

    Arrow would add null fields and convert strings that look like dates.
    """
    decode = json.JSONDecoder().raw_decode
    blank: Any = re.compile(r"\s*")  # matches everywhere
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
        has_lines = path.name.lower().removesuffix(".gz").endswith(".jsonl")
        for number, text in enumerate(file if has_lines else [file.read()], 1):
            position = blank.match(text).end()
            while position < len(text):
                try:
                    rows, position = decode(text, position)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number}: {error}" if has_lines else str(error)) from error
                position = blank.match(text, position).end()
                yield from rows if isinstance(rows, list) else [rows]


def _without_added_nulls(value, feature):
    """Remove null fields at any depth. Arrow adds them where rows have different fields.

    A field that the author of the table set to null looks the same. In a column of JSON, nulls are the author's.
    """
    import datasets

    if isinstance(feature, getattr(datasets, "Json", ())):  # older versions of datasets do not have this type
        return value
    if isinstance(value, dict):
        kinds = feature if isinstance(feature, dict) else {}
        return {
            name: _without_added_nulls(entry, kinds.get(name)) for name, entry in value.items() if entry is not None
        }
    if isinstance(value, list):
        kind = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_without_added_nulls(entry, kind) for entry in value]
    return value


def _rows(rows, path, suffix):
    """Yield the rows of a file. Any row may raise an error, because a file is read in parts."""
    try:
        yield from rows
    except Exception as error:  # of `datasets`, pyarrow, gzip or zlib
        raise _unreadable(path, suffix, error) from error


def _unreadable(path, suffix, error):
    return ValueError(f"{path} cannot be read as {TABLES[suffix]}: {error}")


def _check_compression(path):
    """Raise ValueError if a file is compressed, unless it is a gzip file with the suffix .gz."""
    with path.open("rb") as file:
        begin = file.read(8)
    found = next((name for name, magic in COMPRESSIONS.items() if re.match(magic, begin)), None)
    if path.suffix.lower() == ".gz":
        if found != "gzip":
            what = f"compressed with {found}" if found else "not compressed with gzip"
            raise ValueError(f"{path} is {what}, although its name ends in .gz. Rename the file.")
    elif found == "gzip":
        raise ValueError(f"{path} is compressed with gzip, but its name does not end in .gz. Rename the file.")
    elif found is not None:
        raise ValueError(f"{path} is compressed with {found}. Decompress it first; only gzip (.gz) is supported.")


def stdlib_text(part: str) -> str:
    """Return English text from the Python language reference, from CPython's `pydoc_data.topics` (PSF licence).

    "held_out" contains a fifth of the topics, selected by a hash of their names. "train" contains the other topics,
    without duplicate paragraphs. It also excludes paragraphs that occur in a held-out topic. The text differs slightly
    between Python versions.

    Raises:
        ValueError: `part` is neither "train" nor "held_out".
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
    raise ValueError(f'`part` must be "train" or "held_out", got {part!r}.')
