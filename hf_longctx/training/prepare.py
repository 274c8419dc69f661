"""The sequences of a run: packed in its folder, or found there, and mixed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import PartialState

from ..corpus import open_conversations, open_source, split_mixture
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
    mixture = split_mixture(str(args.data))
    if args.streaming and len(mixture) > 1 and None in dict(mixture).values():
        raise ValueError("A stream has no end, so a mixture of streams needs shares: --data a=0.5,b=0.5.")
    eval_mixture = [] if args.eval_data is None else split_mixture(args.eval_data)
    readers = [
        open_rows(args, source, f"tokens_{number}", tokenizer, eos, streaming=args.streaming)
        for number, (source, _) in enumerate(mixture, 1)
    ]
    eval_readers = [  # never streamed, because a stream has no end
        open_rows(args, source, f"eval_tokens_{number}", tokenizer, eos, part="held_out")
        for number, (source, _) in enumerate(eval_mixture, 1)
    ]
    parts = [read() for read in readers]
    sources, shares = zip(*mixture)
    packed = [part for part in parts if isinstance(part, TokenDataset)]  # all, or none
    hashes = [hash_of(part) for part in packed] or [source_digest(source) for source in sources]
    rows = mix(parts, shares)
    if packed and len(rows) < args.sequences_per_step:
        raise ValueError(
            f"{args.data} holds {len(rows)} sequences of {args.max_length} tokens, fewer than the "
            f"{args.sequences_per_step} of an optimizer step. Give more data, or lower --gradient_accumulation_steps."
        )
    evaluation = None
    if eval_mixture:
        evaluation = mix([read() for read in eval_readers], tuple(share for _, share in eval_mixture))
    return Datasets(rows, evaluation, digest_of([hashes, shares if len(parts) > 1 else None]))


def open_rows(
    args: RunConfig, source: str, name: str, tokenizer, eos: int | None, part: str = "train", streaming: bool = False
) -> Callable[[], Any]:
    """Check that a source can be read, and return a function that returns its sequences.

    The sequences are those of a token file, of a stream, or of a source that the function first packs into
    RUN/data/`name`.npy. A resumed run does not need the source again.
    """
    kind = TokenDataset if args.packing else DocumentDataset
    if source.endswith(".npy"):
        tokens = kind(source, args.max_length, eos, len(tokenizer))
        return lambda: tokens
    if streaming:
        stream = StreamedTokenDataset(source, tokenizer, args.max_length, eos, args.text_column)
        return lambda: stream
    path = Path(str(args.output_dir), "data", f"{name}.npy")
    packed_from, is_resumed = path.with_suffix(".source"), last_checkpoint(Path(str(args.output_dir))) is not None
    state = (
        f"{digest_of([tokenizer.get_vocab(), tokenizer.chat_template])}\n{source_digest(source)}\n{args.text_column}"
    )
    is_packed = path.exists() and packed_from.exists() and packed_from.read_text() == state
    if not is_packed and is_resumed and path.exists():
        if Path(source).exists():
            raise ValueError(
                f"{source} is not the data that the run in {args.output_dir} has packed. Resume with --data {path}, or "
                "give another --output_dir."
            )
        if PartialState().is_main_process:
            print(f"{source} does not exist; the run resumes with the tokens in {path}", file=sys.stderr)
        is_packed = True
    if not is_packed and (args.text_column is not None or open_conversations(source, part) is None):
        open_source(source, part, args.text_column)  # raises if it cannot be read

    def read() -> TokenDataset:
        if not is_packed:
            packed_from.unlink(missing_ok=True)
            pack(source, tokenizer, path, part, args.text_column)
            packed_from.write_text(state)
        return kind(path, args.max_length, eos, len(tokenizer))

    return read


def hash_of(rows: TokenDataset) -> str:
    """Return the hash of the tokens and flags of a file."""
    return digest(rows.path) + ("" if rows.flags is None else digest(rows.path.with_suffix(FLAGS)))


def mix(parts: list[Any], shares: tuple[float | None, ...]) -> Any:
    """Return the sequences of all sources in their shares; None: of each, all are read once."""
    if len(parts) == 1:
        return parts[0]
    given = [share for share in shares if share is not None]
    if isinstance(parts[0], StreamedTokenDataset):
        return StreamedMixture(parts, given)
    return Mixture(parts, given or None)


__all__ = ["Datasets", "prepare_datasets"]
