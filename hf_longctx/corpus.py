"""Texts to measure and to train on: a file, a folder, a dataset name, PG-19, or the English that ships with CPython.

A text is a sequence of documents, which are read one by one and only as far as needed.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np


PG19 = "emozilla/pg19"  # deepmind/pg19 is a loading script, which `datasets` no longer runs
STDLIB = "stdlib"
PATIENCE = 3.0  # seconds for an answer of the hub; five times as many for the first book of PG-19


class Corpus(NamedTuple):
    """A tokenised corpus."""

    tokens: np.ndarray  # (N,) int64, the documents one after another, without special tokens
    name: str  # of the source


def load_tokens(tokenizer, source: str | None = None, *, at_least: int | None = None) -> Corpus:
    """Read a corpus as token ids; documents are tokenised one by one, without special tokens.

    Args:
        tokenizer: of transformers.
        source: as for `load_text`; None is PG-19 if the hub answers within seconds, else the standard library's text.
        at_least: stop after the document that completes so many tokens. Default: read all documents.

    Raises:
        ValueError: the text is empty or not in UTF-8, the dataset has no "text" column, or the tokenizer maps
            everything to one id.
        ImportError, FileNotFoundError: as for `load_text`.
    """
    name, documents = open_source(source)
    parts, count = [], 0
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(np.asarray(ids, dtype=np.int64))
        count += len(ids)
        if at_least is not None and count >= at_least:
            break
    tokens = np.concatenate(parts)
    distinct = len(np.unique(tokens))
    if distinct < 2:
        raise ValueError(
            f"the tokenizer turns {name} into {len(tokens)} tokens with {distinct} distinct ids; it must have at "
            "least two. The tokenizer does not seem to know this language: choose another text, or another tokenizer."
        )
    return Corpus(tokens, name)


def load_text(source: str | None = None) -> str:
    """Read a whole corpus.

    Args:
        source: path of a text file or of a folder of *.txt files (in name order); the name of a dataset for
            `datasets.load_dataset` (its "text" column, split "test" if there is one, else the first); "pg19" for
            the test books of PG-19; "stdlib" or None for the held-out part of `stdlib_text`.

    Returns:
        The documents with an empty line between them.

    Raises:
        ValueError: the text is empty or not in UTF-8, or the dataset has no "text" column.
        ImportError: a dataset was named and `datasets` is not installed.
        FileNotFoundError: neither a path nor a dataset of that name could be found.
    """
    return "\n\n".join(open_source(source or STDLIB)[1])


def open_source(source: str | None) -> tuple[str, Iterator[str]]:
    """Name and documents of a source, none of them empty; see `load_tokens` and `load_text`."""
    if source is None:
        with suppress(Exception):  # no `datasets`, or no hub that answers in time: fall back to the standard library
            import datasets  # noqa: F401 - a slow import, which must not count as waiting for the hub
            from huggingface_hub import HfApi

            # one short request first: `datasets` retries a dead connection several times
            _in_time(lambda: HfApi().dataset_info(PG19, timeout=PATIENCE), PATIENCE)
            return PG19, _in_time(lambda: _filled(PG19, _dataset(PG19)), 5 * PATIENCE)
        source = STDLIB
    if source == STDLIB:
        return "Python language reference, held-out part", iter([stdlib_text("held_out")])
    if source == "pg19":
        source = PG19
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(f"folder {source} holds no *.txt file; give a folder of plain text or one file.")
        return source, _filled(source, map(_read, files))
    if path.is_file():
        return source, _filled(source, map(_read, [path]))
    return source, _filled(source, _dataset(source))


def _read(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 ({error}). Convert the file, with iconv for example."
        ) from error


def _filled(source, documents):
    """The documents that are not blank. The first one is read at once, so that an empty source raises here."""
    documents = (document for document in documents if document.strip())
    first = next(documents, None)
    if first is None:
        raise ValueError(f"{source} holds no text; a corpus needs at least a few hundred words.")

    def resume():
        yield first
        yield from documents

    return resume()


def _dataset(name):
    """The texts of a dataset, streamed from the hub, or offline from the cache of `datasets`."""
    from huggingface_hub import is_offline_mode

    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"{name} is no file or folder; reading it as a dataset needs: pip install 'hf-longctx[training]'"
        ) from None
    try:
        splits = datasets.load_dataset(name, streaming=not is_offline_mode())
    except Exception as error:  # offline, unknown name, gated: `datasets` raises many types
        raise FileNotFoundError(f"{name} is no file or folder, and load_dataset({name!r}) failed: {error}") from error
    split = splits["test" if "test" in splits else next(iter(splits))]
    columns = split.column_names or list(next(iter(split), {}))  # a stream may not know its columns
    if "text" not in columns:
        raise ValueError(f'dataset {name} has columns {columns}; a corpus needs a column "text".')
    return (row["text"] for row in split)


def _in_time(work, seconds):
    """What `work()` returns or raises; TimeoutError if it takes longer than `seconds`.

    The hub's own timeouts do not suffice: where a network drops packets, calls were seen to hang beyond them.
    """
    outcome = {}

    def run():
        try:
            outcome["result"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)  # a thread that hangs must not keep Python alive
    thread.start()
    thread.join(seconds)
    if "result" in outcome:
        return outcome["result"]
    raise outcome.get("error") or TimeoutError(f"no answer within {seconds} seconds")


def stdlib_text(part: str) -> str:
    """English from the Python language reference, as CPython ships it in `pydoc_data.topics` (PSF licence).

    A fifth of the topics, chosen by a hash of their names, is "held_out". "train" has every other paragraph once,
    without those that also occur in a held-out topic. The text differs a little between Python versions.

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
    raise ValueError(f'part is {part!r}; it must be "train" or "held_out".')
