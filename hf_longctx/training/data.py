"""Packing of documents into token sequences, and mixtures of sources.

Each document ends with the tokenizer's EOS. A file of token ids (`.npy`, 1D or 2D integers) must also mark document
boundaries by the EOS. Labels do not cross a boundary, and positions restart at 0 after each boundary.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch.utils.data import ConcatDataset, Dataset, Subset
from tqdm import tqdm

from ..corpus import open_source, split_mixture
from .config import RunConfig
from .conversations import TOKEN, encode_conversations
from .digests import digest_of, digest_of_source, digest_of_tokenizer


DOCUMENTS_AT_ONCE = 256  # fast tokenizers encode a batch in parallel


class TokenDataset(Dataset):
    """A dataset that splits a token file into sequences of `length` tokens.

    With packing, an incomplete last sequence is dropped. Sequences without a scored token are always dropped.

    Args:
        path: memory-mapped `.npy` file of token ids, or of the `TOKEN` records that `pack` writes.
        length: T, tokens per sequence.
        eos_token_id: id of the token that ends a document. None: the file is one document.
        vocab_size: exclusive upper bound on the token ids.
        packing: if False, a sequence contains tokens of one document only, and is right-padded to `length`.

    Attributes:
        unscored: number of sequences that were dropped because they do not have a scored token.

    Items are dicts of "input_ids", "position_ids" and "labels". All values are (T,), int64; see `make_sequence`.
    Without packing, "attention_mask" replaces "position_ids".

    Raises:
        ValueError: the file does not contain integers, is shorter than a sequence, or has out-of-vocabulary tokens.
    """

    def __init__(self, path: str | Path, length: int, eos_token_id: int | None, vocab_size: int, packing: bool = True):
        try:
            tokens = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a complete .npy file ({error}); write it with np.save.") from error
        if tokens.dtype != TOKEN and (tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2)):
            raise ValueError(
                f"{path} must be a 1D or 2D array of integers, got {tokens.dtype} in {tokens.ndim} dimensions. Save "
                "token ids, for example as uint16."
            )
        self.path, self.records = Path(path), tokens.reshape(-1)
        self.length, self.eos_token_id, self.packing = length, eos_token_id, packing
        self.tokens = ids = self.records["id"] if tokens.dtype == TOKEN else self.records
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"{path} has token ids from {lowest} to {highest}, but the tokenizer has {vocab_size} tokens. Give the "
                "tokenizer that encoded the file."
            )
        if len(ids) < length:
            raise ValueError(
                f"{path} has {len(ids)} tokens; one sequence needs {length}. Give more data, or lower --max_length."
            )
        self.unscored = 0
        self.begins = np.arange(0, len(ids) - length + 1, length)
        self.ends = self.begins + length
        if not packing:
            if tokens.dtype != TOKEN:
                self.records = mark_documents(ids, eos_token_id)
            bounds = np.append(np.flatnonzero(self.records["first"]), len(ids))
            self.begins = np.concatenate([np.arange(*span, length) for span in pairwise(bounds)])
            self.ends = np.append(self.begins[1:], len(ids))
        if self.records.dtype == TOKEN:
            scored = self.records["scored"][: self.ends[-1]].copy()
            scored[self.begins] = False  # the first token of a sequence is not predicted
            has_labels = np.logical_or.reduceat(scored, self.begins)
            self.unscored = int((~has_labels).sum())
            self.begins, self.ends = self.begins[has_labels], self.ends[has_labels]

    def __len__(self):
        return len(self.begins)

    def __getitem__(self, row):
        tokens = self.records[self.begins[row] : self.ends[row]]
        if tokens.dtype != TOKEN:
            tokens = mark_documents(tokens, self.eos_token_id)
        sequence = make_sequence(tokens, is_one_document=self.eos_token_id is None)
        if self.packing:
            return sequence
        ids = sequence["input_ids"]
        labels = sequence["labels"]
        padding = (0, self.length - len(tokens))
        return {
            "input_ids": F.pad(ids, padding),
            "attention_mask": F.pad(torch.ones_like(ids), padding),
            "labels": F.pad(labels, padding, value=-100),
        }


def mark_documents(ids: Any, eos_token_id: int | None) -> np.ndarray:
    """Convert token ids, (T,), to `TOKEN` records. All tokens are scored, and a document begins after each EOS."""
    tokens = np.empty(len(ids), TOKEN)
    tokens["id"] = ids
    tokens["scored"] = True
    tokens["first"] = np.append(True, tokens["id"][:-1] == (-1 if eos_token_id is None else eos_token_id))
    return tokens


def make_sequence(tokens: np.ndarray, is_one_document: bool = False) -> dict[str, torch.Tensor]:
    """Make one sequence for a causal language model.

    Args:
        tokens: (T,), `TOKEN` records.
        is_one_document: treat the tokens as one document, so that positions do not restart.

    Returns:
        three tensors, (T,), int64: input_ids; position_ids; labels. Positions restart at 0 in every document. Labels
        equal input_ids, but are -100 at unscored tokens and at the first token of each document.
    """
    ids, index = torch.from_numpy(tokens["id"].astype(np.int64)), torch.arange(len(tokens))
    first = torch.from_numpy(tokens["first"] & (not is_one_document))
    first[0] = True
    unscored = first | torch.from_numpy(~tokens["scored"])
    positions = index - torch.where(first, index, 0).cummax(0).values
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(unscored, -100)}


def encode(source: str, tokenizer, part: str = "train", column: str | None = None) -> Iterator[np.ndarray]:
    """Yield the documents of a source as `TOKEN` records, (T,).

    A document of text ends with the EOS. If the tokenizer has a BOS that differs from its EOS, a document starts with
    the BOS.

    Args:
        source: as for `hf_longctx.corpus.load_text`, or a table of conversations.
        tokenizer: a transformers tokenizer with an EOS.
        part: part to read, "train" or "held_out". This applies to sources that have both parts.
        column: table column to read. Default: the conversations if the table has any, else "text".

    Raises:
        ValueError: the source cannot be read, or the tokenizer does not have an EOS.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer must have an EOS token to end documents. Set one: tokenizer.eos_token = '</s>'."
        )
    # GPT-2's BOS is also its EOS, so prepending it would create one-token documents
    before = [] if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else [tokenizer.bos_token_id]
    documents = open_source(source, part, column, conversations=True)[1]
    for are_conversations, group in groupby(documents, key=lambda document: isinstance(document, dict)):
        if are_conversations:
            yield from encode_conversations(group, tokenizer)
        while texts := list(islice(group, DOCUMENTS_AT_ONCE)):
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                yield mark_documents([*before, *ids, tokenizer.eos_token_id], None)


def pack(source: str, tokenizer, path: Path, part: str = "train", column: str | None = None) -> None:
    """Encode all documents of a source, and write a token file atomically.

    Args:
        source, tokenizer, part, column: as for `encode`.
        path: `.npy` file to write.

    Raises:
        ValueError: as for `encode`, or the source does not contain a scored token.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    unfinished = path.with_suffix(".unfinished")
    header = {"descr": np.lib.format.dtype_to_descr(TOKEN), "fortran_order": False}
    with open(unfinished, "wb") as file:
        # numpy pads the header, so the final count fits into it
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
        for tokens in tqdm(encode(source, tokenizer, part, column), f"packing {source}", disable=None):
            file.write(tokens.data)
            count += len(tokens)
        if count == 0:
            raise ValueError(f"{source} does not contain a conversation with an assistant's turn that is scored.")
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
    os.rename(unfinished, path)


def load_datasets(args: RunConfig, tokenizer, is_one_document: bool) -> tuple[Any, Any, str]:
    """Load the datasets of a run.

    Args:
        is_one_document: treat each sequence as one document. Models with a memory need this, because they read across
            document boundaries.

    Returns:
        three objects: the training dataset; the evaluation dataset (None without `eval_data`); a hash of the training
        data.

    Raises:
        ValueError: there are too few sequences for an optimizer step.
    """
    eos = None if is_one_document and args.packing else tokenizer.eos_token_id
    loaded = {}
    hashes = []
    shares = ()
    encoding = digest_of_tokenizer(tokenizer)
    for part, data in (("held_out", args.eval_data), ("train", args.data)):
        if data is None:
            continue
        parts = []
        sources, shares = zip(*split_mixture(str(data)))
        for source in sources:
            path = Path(source)
            if path.suffix != ".npy":
                # The file name is a hash of everything that the packed tokens depend on. A suffix selects a reader.
                key = [encoding, args.text_column, part, digest_of_source(path), path.suffixes[-2:]]
                path = Path(str(args.output_dir), "data", f"{digest_of(key)[:16]}.npy")
                if not path.exists():
                    pack(source, tokenizer, path, part, args.text_column)
            dataset = TokenDataset(path, args.max_length, eos, len(tokenizer), args.packing)
            parts.append(dataset)
            if dataset.unscored:
                PartialState().print(
                    f"Dropped {dataset.unscored} of {len(dataset) + dataset.unscored} sequences of {source}, because "
                    "they do not contain a scored token.",
                    file=sys.stderr,
                )
        loaded[part] = ConcatDataset(parts) if None in shares else mix(parts, shares)
        hashes = [digest_of_source(dataset.path) for dataset in parts]
    train = loaded["train"]
    if len(train) < args.sequences_per_step:
        raise ValueError(
            f"{args.data} has {len(train)} sequences of {args.max_length} tokens, but an optimizer step "
            f"needs {args.sequences_per_step}. Give more data, or lower --gradient_accumulation_steps."
        )
    return train, loaded.get("held_out"), digest_of([hashes, shares if len(shares) > 1 else None])


def mix(parts: list[TokenDataset], shares: tuple[float, ...]) -> Any:
    """Concatenate datasets in proportion to their shares.

    Datasets that are too small for their share are repeated; no sequence is left out. Trainer shuffles all sequences.
    """
    sizes, wanted = np.array([len(part) for part in parts]), np.array(shares, dtype=float)
    counts = np.rint((sizes / wanted).max() * wanted).astype(int)
    rows = [(np.arange(count) % len(part)).tolist() for part, count in zip(parts, counts)]
    return ConcatDataset([Subset(part, indices) for part, indices in zip(parts, rows)])


def collate(
    rows: list[dict[str, torch.Tensor]], options: Mapping[str, Any] | None = None, flat: bool = False
) -> dict[str, Any]:
    """Collate sequences into model inputs, (B, T).

    Args:
        options: further model arguments to add to the batch.
        flat: concatenate the sequences to (1, B * T); FlashAttention then separates documents by position ids.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: x.view(1, -1) if flat else x for name, x in batch.items()} | dict(options or {})


__all__ = [
    "TokenDataset",
    "collate",
    "encode",
    "load_datasets",
    "make_sequence",
    "mark_documents",
    "mix",
    "pack",
]
