"""Documents as sequences of tokens: packed once into a file, or packed as they are read.

A document ends with the tokenizer's EOS, so a file of tokens alone holds the boundaries of its documents, also a file
that somebody else has made (`.npy`, one or two dimensions of integers). No label crosses a boundary, and positions
start again at each.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..corpus import open_conversations, open_source
from .conversations import FIRST, SCORED, encode_conversations


FLAGS = ".flags.npy"  # in the place of .npy: the name of the flags of conversations beside their tokens
SECONDS_BETWEEN_LINES = 10
DOCUMENTS_AT_ONCE = 256  # a fast tokenizer encodes a batch in parallel


class TokenDataset(torch.utils.data.Dataset):
    """Rows of `length` tokens from a file of tokens; what is left at the end is not used.

    Args:
        path: `.npy` file of integers, read through a memory map. A file of flags beside it, `FLAGS`, says where its
            documents begin and which labels are scored.
        length: tokens of a row, T.
        eos_token_id: ends a document. None: the file holds one document.
        vocab_size: tokens are below it.

    A row is {"input_ids", "position_ids", "labels"}, each (T,), int64; see `make_row`.

    Raises:
        ValueError: the file holds no integers, less than one sequence, or a token beyond the vocabulary.
    """

    def __init__(self, path: str | Path, length: int, eos_token_id: int | None, vocab_size: int):
        try:
            tokens = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a whole file of numpy ({error}); write one by np.save.") from error
        if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
            raise ValueError(
                f"{path} holds {tokens.dtype} of {tokens.ndim} dimensions; a file of tokens holds integers, such as "
                "uint16, in one dimension or two."
            )
        self.path, self.tokens = Path(path), tokens.reshape(-1)
        self.length, self.eos_token_id = length, eos_token_id
        flags = self.path.with_suffix(FLAGS)
        self.flags = np.load(flags, mmap_mode="r") if flags.exists() else None
        if not len(self):
            raise ValueError(
                f"{path} holds {self.tokens.size} tokens; one sequence needs {length}. Give more text, or lower "
                "--max_length."
            )
        lowest, highest = int(self.tokens.min()), int(self.tokens.max())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"{path} holds tokens from {lowest} to {highest}; the tokenizer has {vocab_size}. Name the tokenizer "
                "that made the file."
            )

    def __len__(self):
        return self.tokens.size // self.length

    def __getitem__(self, row):
        place = slice(row * self.length, (row + 1) * self.length)
        return make_row(self.tokens[place], self.eos_token_id, None if self.flags is None else self.flags[place])


class DocumentDataset(TokenDataset):
    """Chunks of at most `length` tokens of one document each, padded on the right; arguments as of `TokenDataset`.

    A row is {"input_ids", "attention_mask", "labels"}, each (T,), int64.
    """

    def __init__(self, *args):
        super().__init__(*args)
        tokens, length = self.tokens, self.length
        if self.flags is not None:
            starts = np.flatnonzero(self.flags & FIRST)
        else:
            starts = np.concatenate([[0], np.flatnonzero(tokens[:-1] == self.eos_token_id) + 1])
        ends = np.append(starts[1:], len(tokens))
        chunks = [(i, min(i + length, end)) for start, end in zip(starts, ends) for i in range(start, end, length)]
        self.chunks = np.array(chunks)

    def __len__(self):
        return len(self.chunks) if hasattr(self, "chunks") else super().__len__()

    def __getitem__(self, row):
        place = slice(*self.chunks[row])
        ids = torch.from_numpy(self.tokens[place].astype(np.int64))
        labels = ids
        if self.flags is not None:
            labels = ids.masked_fill(torch.from_numpy(self.flags[place] & SCORED == 0), -100)
        padding = (0, self.length - len(ids))
        return {
            "input_ids": F.pad(ids, padding),
            "attention_mask": F.pad(torch.ones_like(ids), padding),
            "labels": F.pad(labels, padding, value=-100),
        }


class StreamedTokenDataset(torch.utils.data.IterableDataset):
    """The same rows without a file: documents are read, encoded and packed again and again, in their order.

    A resumed run replays the stream up to its step.
    """

    def __init__(self, source: str, tokenizer, length: int, eos_token_id: int | None, column: str | None = None):
        self.source, self.tokenizer, self.length, self.eos_token_id = source, tokenizer, length, eos_token_id
        self.column = column
        if column is None and open_conversations(source) is not None:
            raise ValueError(
                f"{source} must hold text to be streamed, got conversations. Leave --streaming out: they are then packed."
            )
        open_source(source, "train", column)  # raises if it cannot be read

    def __iter__(self):
        rest = np.zeros(0, np.int64)
        while True:
            for ids in encode(self.source, self.tokenizer, column=self.column):
                rest = np.concatenate([rest, ids])
                whole = len(rest) // self.length * self.length
                for row in rest[:whole].reshape(-1, self.length):
                    yield make_row(row, self.eos_token_id)
                rest = rest[whole:]


def make_row(tokens: np.ndarray, eos_token_id: int | None, flags: np.ndarray | None = None) -> dict[str, torch.Tensor]:
    """Make one row for a causal language model.

    Args:
        tokens: (T,), any integer dtype.
        eos_token_id: ends a document; None: the row is one document.
        flags: of conversations, (T,), uint8: where one begins, and which labels are scored. None: all labels are.

    Returns:
        input_ids; position_ids, which start at 0 in every document and in every row; labels, equal to input_ids, but
        -100 at the first token of a document, which nothing before it predicts. Each (T,), int64.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))
    index = torch.arange(len(ids))
    first = torch.zeros(len(ids), dtype=torch.bool)
    first[0] = True
    if eos_token_id is not None and flags is not None:
        first[1:] = torch.from_numpy(flags[1:] & FIRST > 0)  # turns may end with an EOS
    elif eos_token_id is not None:
        first[1:] = ids[:-1] == eos_token_id
    unscored = first if flags is None else first | torch.from_numpy(flags & SCORED == 0)
    positions = index - torch.where(first, index, 0).cummax(0).values
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(unscored, -100)}


def encode(source: str, tokenizer, part="train", column: str | None = None) -> Iterator[np.ndarray]:
    """Encode documents, several at a time: a BOS if the tokenizer has one of its own, the text, and an EOS.

    Args:
        source: as for `hf_longctx.corpus.load_text`.
        tokenizer: of transformers, with an EOS.
        part: of a source that has several, "train" or "held_out".
        column: of a table, with the text. Default: "text".

    Raises:
        ValueError: the tokenizer has no EOS.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no EOS, which ends a document in a row. Give it one: tokenizer.eos_token = '</s>'."
        )
    # GPT-2's BOS is its EOS, and would be a document of one token
    before = [] if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else [tokenizer.bos_token_id]
    documents = open_source(source, part, column)[1]
    while texts := list(islice(documents, DOCUMENTS_AT_ONCE)):
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        yield np.concatenate([[*before, *ids, tokenizer.eos_token_id] for ids in encoded]).astype(np.int64)


def pack(source: str, tokenizer, path: Path, part="train", column: str | None = None) -> None:
    """Encode all documents of a source into a file of tokens, `path`, which appears when it is complete.

    Conversations, which are read unless a column is named, have a file of flags in the same folder, `FLAGS`.

    Progress is printed on stderr every few seconds.

    Args:
        source, tokenizer, part, column: as for `encode`.
        path: `.npy` file to write.
    """
    rows = open_conversations(source, part) if column is None else None
    if rows is None:
        pieces: Iterator = encode(source, tokenizer, part, column)
    else:
        pieces = encode_conversations(rows, tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(FLAGS).unlink(missing_ok=True)
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    count, documents, printed = 0, 0, time.monotonic()
    with GrowingArray(path, dtype) as tokens, GrowingArray(path.with_suffix(FLAGS), np.dtype(np.uint8)) as flags:
        for piece in pieces:
            ids, flag = piece if isinstance(piece, tuple) else (piece, None)
            tokens.append(ids)
            count += len(ids)
            if flag is None:
                documents += int((ids == tokenizer.eos_token_id).sum())
            else:
                flags.append(flag)
                documents += 1
            if time.monotonic() > printed + SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                print(f"packing {source}: {documents} documents, {count} tokens", file=sys.stderr)
    if count == 0:
        raise ValueError(f"{source} holds no conversation in which an assistant answers.")
    print(f"packed {source}: {documents} documents, {count} tokens", file=sys.stderr)


class GrowingArray:
    """A .npy file of one dimension that is written piece by piece, and appears when it is complete and not empty."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype, self.count = path, dtype, 0

    def __enter__(self):
        self.file = open(self.path.with_suffix(".unfinished"), "wb")
        _write_header(self.file, self.dtype, 0)
        return self

    def append(self, values: np.ndarray) -> None:
        self.file.write(values.astype(self.dtype).data)  # numpy's `tofile` does not say that the disk is full
        self.count += len(values)

    def __exit__(self, kind, *error):
        with self.file as file:
            file.seek(0)
            _write_header(file, self.dtype, self.count)  # numpy leaves room for the number of tokens to grow
            file.flush()
            os.fsync(file.fileno())
        if kind is None and self.count:
            os.rename(file.name, self.path)
        else:
            os.unlink(file.name)


def _write_header(file, dtype, count):
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    )


def digest(path: Path) -> str:
    """Return the hash of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_digest(source: str) -> str:
    """Return the hash of the files of a local source, in their order; of a dataset, its name."""
    path = Path(source)
    if not path.exists():
        return source
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()


def stack(rows: list[dict[str, torch.Tensor]], without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Collate rows to a batch whose entries are (B, T), without the entries that the model does not take."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name not in without}


def collate(
    rows: list[dict[str, torch.Tensor]],
    without: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
    add: Callable[[torch.Tensor], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Collate rows to the arguments of a model.

    Args:
        without: entries that the model does not take.
        options: other arguments of the model.
        add: makes more arguments of the position ids.
    """
    batch = stack(rows, without)
    return batch | (add(batch["position_ids"]) if add and "position_ids" in batch else {}) | dict(options or {})


__all__ = [
    "FLAGS",
    "DocumentDataset",
    "StreamedTokenDataset",
    "TokenDataset",
    "collate",
    "digest",
    "encode",
    "make_row",
    "pack",
    "source_digest",
    "stack",
]
