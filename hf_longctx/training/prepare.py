"""Preparation of a run's datasets: packed in its folder or streamed, and mixed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from ..corpus import split_mixture
from .config import RunConfig
from .data import FLAGS, DocumentDataset, StreamedTokenDataset, TokenDataset, digest, encode, pack, source_digest
from .run_folder import checkpoints, digest_of, print_once


class Datasets(NamedTuple):
    """The training sequences, the evaluation sequences, and a hash of the training data."""

    train: Any
    evaluation: Any | None
    digest: str


def prepare_datasets(args: RunConfig, tokenizer, is_one_document: bool) -> Datasets:
    """Read or pack the data.

    Args:
        is_one_document: treat each sequence as one document, for models with memory, which read across boundaries.

    Raises:
        ValueError: there are too few sequences for an optimizer step, or the data differ from the run's data.
    """
    eos = None if is_one_document and args.packing else tokenizer.eos_token_id
    sources, shares = zip(*split_mixture(str(args.data)))
    eval_sources, eval_shares = zip(*split_mixture(args.eval_data)) if args.eval_data else ((), ())
    # open every source before packing the first
    eval_readers = [open_sequences(args, source, "held_out", tokenizer, eos) for source in eval_sources]
    if args.streaming:
        if len(sources) > 1 and None in shares:
            raise ValueError("A mixture of streams needs shares, because streams do not end: --data a=0.5,b=0.5.")
        streams = [partial(encode, source, tokenizer, column=args.text_column) for source in sources]
        for stream in streams:
            stream()
        train: Any = StreamedTokenDataset(streams, [share or 1.0 for share in shares], args.max_length, eos)
        hashes = [source_digest(source) for source in sources]
    else:
        readers = [open_sequences(args, source, "train", tokenizer, eos) for source in sources]
        parts = [read() for read in readers]
        train, hashes = mix(parts, shares), [hash_of(part) for part in parts]
        if len(train) < args.sequences_per_step:
            raise ValueError(
                f"{args.data} has {len(train)} sequences of {args.max_length} tokens, fewer than the "
                f"{args.sequences_per_step} of an optimizer step. Give more data, or lower --gradient_accumulation_steps."
            )
    evaluation = mix([read() for read in eval_readers], eval_shares) if eval_readers else None
    return Datasets(train, evaluation, digest_of([hashes, shares if len(shares) > 1 else None]))


def open_sequences(args: RunConfig, source: str, part: str, tokenizer, eos: int | None) -> Callable[[], TokenDataset]:
    """Check that a source can be read, and return a function that loads its sequences.

    The function packs the source into RUN/data unless it is a token file. The packed file is named by two hashes of
    everything that it depends on, with the source's name and with its content: a moved source is found by its content,
    and a resumed run finds the tokens of a deleted source by its name.
    """
    kind, options = TokenDataset if args.packing else DocumentDataset, (args.max_length, eos, len(tokenizer))
    if source.endswith(".npy"):
        rows = kind(source, *options)
        return lambda: rows
    folder = Path(str(args.output_dir))
    settings = digest_of([tokenizer.get_vocab(), tokenizer.chat_template, args.text_column, part])
    name, content = (digest_of([settings, key])[:16] for key in (source, source_digest(source)))
    path = next((folder / "data").glob(f"*-{content}.npy"), folder / "data" / f"{name}-{content}.npy")
    if not path.exists() and checkpoints(folder) and not Path(source).exists():
        packed = [file for file in (folder / "data").glob(f"{name}-*.npy") if not file.name.endswith(FLAGS)]
        if packed:
            path = max(packed, key=lambda file: file.stat().st_mtime)
            print_once(f"{source} does not exist; the run resumes with its tokens in {path}")
    if not path.exists():
        if part == "train" and checkpoints(folder):
            raise ValueError(
                f"{source} differs from the data that the run in {folder} packed. Resume with the same data or with the "
                f"packed tokens in {folder / 'data'}, or give another --output_dir."
            )
        encode(source, tokenizer, part, args.text_column)

    def read() -> TokenDataset:
        if not path.exists():
            pack(source, tokenizer, path, part, args.text_column)
        return kind(path, *options)

    return read


def hash_of(rows: TokenDataset) -> str:
    """Return a hash of a dataset's tokens and flags."""
    return digest(rows.path) + ("" if rows.flags is None else digest(rows.path.with_suffix(FLAGS)))


def mix(parts: list[TokenDataset], shares: tuple[float | None, ...]) -> Any:
    """Mix datasets by their shares, with each sequence at least once; without shares, exactly once.

    Datasets too small for their share are repeated. Trainer shuffles all sequences.
    """
    if len(parts) == 1:
        return parts[0]
    mixed: list[Dataset] = list(parts)
    if None not in shares:
        sizes, wanted = np.array([len(part) for part in parts]), np.array(shares, dtype=float)
        counts = np.rint((sizes / wanted).max() * wanted).astype(int)
        mixed = [Subset(part, (np.arange(count) % len(part)).tolist()) for part, count in zip(parts, counts)]
    return ConcatDataset(mixed)


__all__ = ["Datasets", "mix", "prepare_datasets"]
