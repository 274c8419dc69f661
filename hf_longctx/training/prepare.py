"""The sequences of a run: packed in its folder, or found there, and mixed."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import PartialState

from ..corpus import split_mixture
from .config import RunConfig
from .data import FLAGS, DocumentDataset, StreamedTokenDataset, TokenDataset, digest, pack, source_digest
from .mixture import Mixture, StreamedMixture
from .run_folder import digest_of, last_checkpoint


class Datasets(NamedTuple):
    """Sequences to train on, sequences to evaluate on, and a hash of the former."""

    train: Any
    evaluation: Any | None
    digest: str


def prepare_datasets(args: RunConfig, tokenizer, is_one_document: bool) -> Datasets:
    """Read or pack the data.

    Args:
        is_one_document: a sequence is one document, as for a model with memory, which reads across boundaries.

    Raises:
        ValueError: the data hold fewer sequences than an optimizer step, or are not those of the run.
    """
    eos = None if is_one_document and args.packing else tokenizer.eos_token_id
    parts = [
        prepare_rows(args, source, f"tokens_{number}", tokenizer, eos, streaming=args.streaming)
        for number, (source, _) in enumerate(split_mixture(str(args.data)), 1)
    ]
    sources, shares = zip(*split_mixture(str(args.data)))
    packed = [part for part in parts if isinstance(part, TokenDataset)]  # all, or none
    hashes = [hash_of(part) for part in packed] or [source_digest(source) for source in sources]
    rows = mix(parts, shares)
    if packed and len(rows) < args.sequences_per_step:
        raise ValueError(
            f"{args.data} holds {len(rows)} sequences of {args.max_length} tokens, fewer than the "
            f"{args.sequences_per_step} of an optimizer step. Give more data, or lower --gradient_accumulation_steps."
        )
    evaluation = None
    if args.eval_data is not None:  # never streamed, because a stream has no end
        sources, shares = zip(*split_mixture(args.eval_data))
        evaluation = mix(
            [
                prepare_rows(args, source, f"eval_tokens_{number}", tokenizer, eos, part="held_out")
                for number, source in enumerate(sources, 1)
            ],
            shares,
        )
    return Datasets(rows, evaluation, digest_of([hashes, shares if len(parts) > 1 else None]))


def prepare_rows(
    args: RunConfig, source: str, name: str, tokenizer, eos: int | None, part: str = "train", streaming: bool = False
) -> Any:
    """Return the sequences of a token file, of a source that is packed into RUN/data/`name`.npy first, or of a stream.

    A resumed run does not need the source again.
    """
    kind = TokenDataset if args.packing else DocumentDataset
    if source.endswith(".npy"):
        return kind(source, args.max_length, eos, len(tokenizer))
    if streaming:
        return StreamedTokenDataset(source, tokenizer, args.max_length, eos, args.text_column)
    path = Path(str(args.output_dir), "data", f"{name}.npy")
    packed_from, is_resumed = path.with_suffix(".source"), last_checkpoint(Path(str(args.output_dir))) is not None
    state = f"{digest_of(tokenizer.get_vocab())}\n{source_digest(source)}\n{args.text_column}"
    is_packed = path.exists() and packed_from.exists() and packed_from.read_text() == state
    if not is_packed and is_resumed and path.exists() and Path(source).exists():
        raise ValueError(
            f"{source} is not the data that the run in {args.output_dir} has packed. Resume with --data {path}, or give "
            "another --output_dir."
        )
    if not is_packed and is_resumed and path.exists():
        if PartialState().is_main_process:
            print(f"{source} does not exist; the run resumes with the tokens in {path}", file=sys.stderr)
    elif not is_packed:
        packed_from.unlink(missing_ok=True)
        pack(source, tokenizer, path, part, args.text_column)
        packed_from.write_text(state)
    return kind(path, args.max_length, eos, len(tokenizer))


def hash_of(rows: TokenDataset) -> str:
    """Return the hash of the tokens and flags of a file."""
    return digest(rows.path) + ("" if rows.flags is None else digest(rows.path.with_suffix(FLAGS)))


def mix(parts: list[Any], shares: tuple[float | None, ...]) -> Any:
    """Return the sequences of all sources in their shares; None: of each, all are read once."""
    if len(parts) == 1:
        return parts[0]
    given = [share for share in shares if share is not None]
    if isinstance(parts[0], StreamedTokenDataset):
        if not given:
            raise ValueError("A stream has no end, so a mixture of streams needs shares: --data a=0.5,b=0.5.")
        return StreamedMixture(parts, given)
    return Mixture(parts, given or None)


__all__ = ["Datasets", "prepare_datasets"]
