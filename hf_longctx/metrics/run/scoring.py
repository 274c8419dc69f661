"""Losses of texts and answers to questions, scored with a `Reader`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..retrieval.answers import Answer
from .engine import OutOfMemory
from .reader import Reader


OVERFLOW = "A common cause is float16 overflow: load the model in torch.bfloat16 or torch.float32."
REPLY_MARGIN = 16  # tokens that a reply may have beyond the answer


def token_losses(reader: Reader, ids: np.ndarray, targets: np.ndarray, where: str) -> np.ndarray:
    """Return the loss of each target after the id before it, in nats, (T,) float64; ids and targets are (T,) int64.

    Raises:
        ValueError: a loss is NaN or infinite; `where` names the input.
        OutOfMemory: see `next_tokens`.
    """
    log_probs, _ = next_tokens(reader, ids, targets, range(len(ids)), where)
    bad = np.flatnonzero(~np.isfinite(log_probs))
    if len(bad):
        raise ValueError(
            f"{where}: the loss of token {bad[0] + 1} of {len(ids)} is {-log_probs[bad[0]]}: the logits at position "
            f"{bad[0]} are not finite. {OVERFLOW}"
        )
    return -log_probs


def score_answer(
    reader: Reader,
    tokenizer,
    prompt: np.ndarray,
    answer: np.ndarray,
    matches: Callable[[str], bool],
    generate: bool,
    where: str,
) -> Answer:
    """Ask a question, and score the model's answer.

    Args:
        prompt, answer: ids, (T,) and (n,) int64.
        matches: whether a reply holds the answer.
        generate: let the model reply, if its likeliest tokens are not the answer anyway.

    Raises:
        ValueError: a logit is NaN; `where` names the question.
        OutOfMemory: see `next_tokens`.
    """
    positions = range(len(prompt) - 1, len(prompt) - 1 + len(answer))
    log_probs, best = next_tokens(reader, np.concatenate([prompt, answer[:-1]]), answer, positions, where)
    bad = np.flatnonzero(np.isnan(log_probs))
    if len(bad):
        raise ValueError(f"{where}: the logits at position {positions[bad[0]]} are NaN. {OVERFLOW}")
    exact, reply = bool((best == answer).all()), None
    if generate and exact:
        reply = tokenizer.decode(answer)
    elif generate:
        reply = reader.reply(prompt, len(answer) + REPLY_MARGIN, tokenizer)
    return Answer(
        log_prob=float(max(log_probs.sum(), -1e9)),  # JSON has no infinity
        tokens=len(answer),
        exact=exact,
        reply=reply,
        matched=exact if reply is None else matches(reply),
    )


def next_tokens(reader, ids, targets, positions, where):
    """Call `reader.score`, and name the input in its OutOfMemory."""
    try:
        return reader.score(ids, targets, positions)
    except OutOfMemory as error:
        raise OutOfMemory(
            f"{where}: {len(ids)} tokens do not fit into memory, even in the smallest passes."
        ) from error
