"""Run a model over the per-token loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from ..checks import check_token_ids, numbers, tokenizer_name, whole_number
from ..run.distributed import Run, labels, run_distributed
from ..run.journal import content_hash
from ..run.reader import Reader, check_positions, reader_for, special_ids
from ..run.scoring import token_losses
from .result import PositionLoss, window_starts


def position_loss(
    model: nn.Module | Reader,
    tokens: Sequence[int] | np.ndarray,
    *,
    context_length: int,
    sequences: int | None = None,
    starts: Sequence[int] | None = None,
    bos_token_id: int | None = None,
    tokenizer: Any = None,
    corpus_name: str | None = None,
    train_length: int | None = None,
    run: Run | None = None,
) -> PositionLoss:
    """Measure the loss of each token of a text, given those before it (Lin et al. 2025, section 4.2).

    A sequence of T tokens is read as `[bos]` and all of them but the last. Logits are made in parts, never (T, V).

    Args:
        model: a causal language model, which runs in its own dtype, on its own device, in eval mode; or a reader, such
            as `ServedModel`.
        tokens: the corpus, a flat sequence of ids, encoded without special tokens.
        context_length: T, tokens per sequence.
        sequences: how many stretches of the corpus are read, evenly spaced. Default: as many as fit side by side, but
            at most 32.
        starts: where the sequences start in the corpus, in place of `sequences`: the beginnings of documents, say.
        bos_token_id: defaults to that of the model's configuration, or its EOS.
        tokenizer: name it, or give it, to have its name in the settings.
        corpus_name, train_length: name of the corpus and context length of the training, in tokens, for the settings.
        run: journal, memory budget and progress bar; see `Run`, also for several processes and interruptions.

    Raises:
        ValueError: an argument does not fit, the model's positions do not reach; raised before the model runs. Or the
            journal is of another run, or a loss is not finite.
        RuntimeError: memory runs out even in the smallest passes.
    """
    reader = reader_for(model)
    corpus = check_token_ids(tokens, "tokens", reader.vocab_size)
    bos, _ = special_ids(reader, bos_token_id, None)
    context_length = whole_number("context_length", context_length, 1)
    sequences = sequences if sequences is None else whole_number("sequences", sequences, 1)
    starts = check_starts(starts, sequences, len(corpus), context_length)
    check_positions(reader, context_length, "context_length")
    names = labels(corpus_name, train_length)
    settings = reader.settings() | {
        "tokenizer": None if tokenizer is None else tokenizer_name(tokenizer, or_name=True),
        "bos_token_id": bos,
        "context_length": context_length,
        "starts": starts,
        "corpus_tokens": len(corpus),
        "corpus_sha256": content_hash(corpus),
    }

    def sequence(start: int) -> tuple[np.ndarray, np.ndarray]:
        targets = corpus[start : start + context_length]
        return np.concatenate([[bos], targets[:-1]]), targets

    def measure(start: int) -> list[float]:
        return token_losses(reader, *sequence(start), f"sequence from {start}").tolist()

    def name(start: int) -> str:
        return f"{context_length:,} tokens from {start:,}"

    def result(entries: dict[int, list[float]]) -> PositionLoss | None:
        if not entries:
            return None
        read = [start for start in starts if start in entries]
        losses = [entries[start] for start in read]
        return PositionLoss.of_sequences(losses, settings | names, read)

    return run_distributed(
        reader,
        "position loss",
        lambda worker: worker.measure(dict.fromkeys(starts, context_length), measure, name),
        result,
        depends_on={"metric": PositionLoss.kind, **settings},
        trial=sequence(starts[0])[0],
        run=run,
    )


def check_starts(
    starts: Sequence[int] | None, sequences: int | None, corpus_tokens: int, context_length: int
) -> list[int]:
    """Return where the sequences start, ascending.

    Raises:
        ValueError: both starts and sequences came, or a sequence does not fit into the corpus.
    """
    if starts is None:
        return sorted(set(window_starts(corpus_tokens, context_length, sequences)))
    if sequences is not None:
        raise ValueError("give sequences or starts, not both: starts says how many there are.")
    starts = sorted({whole_number("a start", start) for start in numbers("starts", starts)})
    if not starts or starts[0] < 0 or starts[-1] + context_length > corpus_tokens:
        raise ValueError(
            f"starts must lie between 0 and {corpus_tokens - context_length}, so that {context_length} tokens follow each "
            f"in a corpus of {corpus_tokens}; got {starts}."
        )
    return starts
