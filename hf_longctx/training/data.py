"""Packing of documents into token sequences, once into a file or on the fly.

Each document ends with the tokenizer's EOS, which marks document boundaries in any file of token ids (`.npy`, 1D or 2D
integers). Labels do not cross a boundary, and positions restart at each one.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..corpus import open_source
from .conversations import FIRST, SCORED, encode_conversations


FLAGS = ".flags.npy"  # suffix of the flags file next to a token file
SECONDS_BETWEEN_LINES = 10
DOCUMENTS_AT_ONCE = 256  # fast tokenizers encode a batch in parallel


class TokenDataset(torch.utils.data.Dataset):
    """A dataset of sequences of `length` tokens from a token file.

    Sequences without a scored label and an incomplete last sequence are dropped.

    Args:
        path: memory-mapped `.npy` file of integers. A flags file next to it (suffix `FLAGS`) marks where documents
            begin and which labels are scored.
        length: T, tokens per sequence.
        eos_token_id: id of the token that ends a document. None: the file is one document.
        vocab_size: exclusive upper bound on the token ids.

    An item is {"input_ids", "position_ids", "labels"}, each (T,), int64; see `make_sequence`.

    Raises:
        ValueError: the file does not contain integers, is shorter than a sequence, or has out-of-vocabulary tokens.
    """

    def __init__(self, path: str | Path, length: int, eos_token_id: int | None, vocab_size: int):
        try:
            tokens = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a complete .npy file ({error}); write it with np.save.") from error
        if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
            raise ValueError(
                f"{path} must be a 1D or 2D array of integers, such as uint16, got {tokens.dtype} in "
                f"{tokens.ndim} dimensions."
            )
        self.path, self.tokens = Path(path), tokens.reshape(-1)
        self.length, self.eos_token_id = length, eos_token_id
        flags = self.path.with_suffix(FLAGS)
        self.flags = np.load(flags, mmap_mode="r") if flags.exists() else None
        if self.tokens.size < length:
            raise ValueError(
                f"{path} has {self.tokens.size} tokens; one sequence needs {length}. Give more data, or lower "
                "--max_length."
            )
        self.begins = np.arange(0, self.tokens.size - length + 1, length)
        if self.flags is not None:
            rows = self.flags[: len(self.begins) * length].reshape(-1, length)
            self.begins = self.begins[(rows[:, 1:] & SCORED).any(1)]
        lowest, highest = int(self.tokens.min()), int(self.tokens.max())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"{path} has token ids from {lowest} to {highest}, but the tokenizer has {vocab_size} tokens. Give the "
                "tokenizer that encoded the file."
            )

    def __len__(self):
        return len(self.begins)

    def __getitem__(self, row):
        return self.read(slice(self.begins[row], self.begins[row] + self.length))

    def read(self, place: slice) -> dict[str, torch.Tensor]:
        """Return a slice of the tokens as one sequence."""
        ids = self.tokens[place]
        flags = flags_by_eos(ids, self.eos_token_id) if self.flags is None else self.flags[place]
        return make_sequence(ids, flags, is_one_document=self.eos_token_id is None)


class DocumentDataset(TokenDataset):
    """A dataset of unpacked documents in right-padded chunks of at most `length` tokens; arguments as `TokenDataset`.

    An item is {"input_ids", "attention_mask", "labels"}, each (T,), int64.
    """

    def __init__(self, *args):
        super().__init__(*args)
        flags = flags_by_eos(self.tokens, self.eos_token_id) if self.flags is None else self.flags
        bounds, step = [*np.flatnonzero(flags & FIRST), len(self.tokens)], self.length
        chunks = [(i, min(i + step, end)) for begin, end in pairwise(bounds) for i in range(begin, end, step)]
        self.chunks = [(begin, end) for begin, end in chunks if (flags[begin + 1 : end] & SCORED).any()]

    def __len__(self):
        return len(self.chunks)

    def __getitem__(self, row):
        chunk = self.read(slice(*self.chunks[row]))
        ids, labels = chunk["input_ids"], chunk["labels"]
        padding = (0, self.length - len(ids))
        return {
            "input_ids": F.pad(ids, padding),
            "attention_mask": F.pad(torch.ones_like(ids), padding),
            "labels": F.pad(labels, padding, value=-100),
        }


class StreamedTokenDataset(torch.utils.data.IterableDataset):
    """An endless stream of the same sequences: documents are read, encoded and packed in order, without files.

    A resumed run replays the stream up to its step.

    Args:
        documents: one function per source, which opens it as `encode` does.
        shares: sampling weight of each source; they sum to 1.
        length, eos_token_id: as for `TokenDataset`.
    """

    def __init__(self, documents: Sequence[Callable], shares: Sequence[float], length: int, eos_token_id: int | None):
        self.documents, self.shares = documents, shares
        self.length, self.is_one_document = length, eos_token_id is None

    def __iter__(self):
        return interleave([self.read(open_documents) for open_documents in self.documents], self.shares)

    def read(self, open_documents: Callable) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the sequences of one source, in an endless loop."""
        ids, flags = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        while True:
            for document, its_flags in open_documents():
                ids, flags = np.concatenate([ids, document]), np.concatenate([flags, its_flags])
                whole = len(ids) // self.length * self.length
                for begin in range(0, whole, self.length):
                    place = slice(begin, begin + self.length)
                    if (flags[place][1:] & SCORED).any():
                        yield make_sequence(ids[place], flags[place], self.is_one_document)
                ids, flags = ids[whole:], flags[whole:]


def interleave(streams: Sequence[Iterator], shares: Sequence[float]) -> Iterator:
    """Interleave streams deterministically by always yielding from the stream furthest behind its share."""
    counts = np.zeros(len(streams))
    while True:
        number = int(((counts + 1) / shares).argmin())
        counts[number] += 1
        yield next(streams[number])


def flags_by_eos(ids: np.ndarray, eos_token_id: int | None) -> np.ndarray:
    """Return flags, (T,), uint8, that score every label and begin a document after each EOS."""
    flags = np.full(len(ids), SCORED, np.uint8)
    flags[0] |= FIRST
    flags[1:][ids[:-1] == eos_token_id] |= FIRST
    return flags


def make_sequence(ids: np.ndarray, flags: np.ndarray, is_one_document: bool = False) -> dict[str, torch.Tensor]:
    """Make one sequence for a causal language model.

    Args:
        ids: (T,), any integer dtype.
        flags: (T,), uint8: `FIRST` where a document begins, `SCORED` where the label is scored.
        is_one_document: do not restart the positions within the sequence.

    Returns:
        input_ids; position_ids, which restart at 0 in every document; labels, equal to input_ids, with -100 at
        unscored tokens and at the first token of each document. Each (T,), int64.
    """
    tokens, index = torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids))
    first = torch.from_numpy((flags & FIRST > 0) & (not is_one_document))
    first[0] = True
    unscored = first | torch.from_numpy(flags & SCORED == 0)
    positions = index - torch.where(first, index, 0).cummax(0).values
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(unscored, -100)}


def encode(
    source: str, tokenizer, part: str = "train", column: str | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Open a source and yield its documents as token ids, (T,), int64, and flags, (T,), uint8; see `make_sequence`.

    A text document starts with the BOS, if the tokenizer has one that differs from its EOS, and ends with the EOS.

    Args:
        source: as for `hf_longctx.corpus.load_text`, or a table of conversations.
        tokenizer: a transformers tokenizer with an EOS.
        part: "train" or "held_out", for a source that has both.
        column: table column to read. Default: conversations if there are any, else "text".

    Raises:
        ValueError: the source cannot be read or has no scored token, or the tokenizer does not have an EOS.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer must have an EOS token to end documents. Set one: tokenizer.eos_token = '</s>'."
        )
    documents = open_source(source, part, column, conversations=True)[1]
    groups = groupby(documents, key=lambda document: isinstance(document, dict))

    def read():
        encoded = None
        for are_conversations, group in groups:
            for encoded in (encode_conversations if are_conversations else encode_texts)(group, tokenizer):
                yield encoded
        if encoded is None:
            raise ValueError(f"{source} does not contain a conversation with an assistant's turn.")

    return read()


def encode_texts(texts: Iterator[str], tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Encode plain-text documents in batches."""
    # GPT-2's BOS is also its EOS, so prepending it would create one-token documents
    before = [] if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else [tokenizer.bos_token_id]
    while batch := list(islice(texts, DOCUMENTS_AT_ONCE)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            ids = np.array([*before, *ids, tokenizer.eos_token_id])
            yield ids, flags_by_eos(ids, None)


def pack(source: str, tokenizer, path: Path, part: str = "train", column: str | None = None) -> None:
    """Encode all documents of a source into a token file and a flags file next to it (suffix `FLAGS`).

    Both are written atomically. Progress is printed on stderr every few seconds.

    Args:
        source, tokenizer, part, column: as for `encode`.
        path: `.npy` file to write.

    Raises:
        ValueError: as for `encode`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype, documents, printed = np.uint16 if len(tokenizer) <= 2**16 else np.uint32, 0, time.monotonic()
    with GrowingArray(path, dtype) as tokens, GrowingArray(path.with_suffix(FLAGS), np.uint8) as flags:
        for documents, (ids, its_flags) in enumerate(encode(source, tokenizer, part, column), 1):
            tokens.append(ids)
            flags.append(its_flags)
            if time.monotonic() > printed + SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                print(f"packing {source}: {documents} documents, {tokens.count} tokens", file=sys.stderr)
    print(f"packed {source}: {documents} documents, {tokens.count} tokens", file=sys.stderr)


class GrowingArray:
    """A 1D .npy file that is appended to, then renamed to its final path unless an error occurred."""

    def __init__(self, path: Path, dtype: type[np.unsignedinteger]):
        self.path, self.dtype, self.count = path, dtype, 0

    def __enter__(self):
        self.file = open(self.path.with_suffix(".unfinished"), "wb")
        self.write_header()
        return self

    def append(self, values: np.ndarray) -> None:
        self.file.write(values.astype(self.dtype).data)  # numpy's `tofile` does not report a full disk
        self.count += len(values)

    def __exit__(self, kind, *error):
        with self.file as file:
            file.seek(0)
            self.write_header()
            file.flush()
            os.fsync(file.fileno())
        if kind is None:
            os.rename(file.name, self.path)
        else:
            os.unlink(file.name)

    def write_header(self) -> None:
        """Write the .npy header; numpy pads it to leave room for a larger count."""
        header = np.lib.format.header_data_from_array_1_0(np.empty(0, self.dtype)) | {"shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)


def digest(path: Path) -> str:
    """Return a file's SHA-256 hash."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_digest(source: str) -> str:
    """Return a hash of a local source's files, or the name of a dataset."""
    path = Path(source)
    if not path.exists():
        return source
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()


def collate(
    rows: list[dict[str, torch.Tensor]],
    without: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
    flat: bool = False,
) -> dict[str, Any]:
    """Collate sequences into model inputs, (B, T).

    Args:
        without: entries that the model does not accept.
        options: other arguments of the model.
        flat: concatenate the sequences to (1, B * T); FlashAttention then separates documents by position ids.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name not in without}
    return {name: x.view(1, -1) if flat else x for name, x in batch.items()} | dict(options or {})


__all__ = [
    "FLAGS",
    "DocumentDataset",
    "StreamedTokenDataset",
    "TokenDataset",
    "collate",
    "digest",
    "encode",
    "interleave",
    "make_sequence",
    "pack",
    "source_digest",
]
