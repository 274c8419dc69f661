"""Lengths, samples and inputs of the forgetting curve.

The copy input `[bos] S [bos] S [eos]` contains a target S of n tokens twice. The LM input `[bos] I [bos] S [eos]`
contains S after an unrelated passage I of n tokens. With teacher forcing, we score the second half of the last S. The
share of correctly predicted tokens is called copy accuracy for the copy input, and language-modelling (LM) accuracy
for the LM input. As n grows, copying is first exact (fine-grained memory), then only better than guessing
(coarse-grained memory), and finally no better than guessing (amnesia).

Source: Liu et al. 2024, "Forgetting Curve: A Reliable Method for Evaluating Memorization Capability for Long-context
Models", section 3. This file does not run a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


SHORTEST = 8  # first length of a linear or logarithmic grid


def linear_lengths(max_length: int, n: int) -> list[int]:
    """Return at most `n` evenly spaced lengths from 8 to `max_length` tokens, truncated to integers.

    >>> linear_lengths(128, 4)
    [8, 48, 88, 128]
    """
    return _grid(np.linspace, max_length, n)


def log_lengths(max_length: int, n: int) -> list[int]:
    """Return at most `n` geometrically spaced lengths from 8 to `max_length` tokens, truncated to integers.

    >>> log_lengths(700, 4)
    [8, 35, 157, 700]
    """
    return _grid(np.geomspace, max_length, n)


def _grid(space, max_length, n):
    if n < 2 or max_length <= SHORTEST:
        raise ValueError(
            f"a grid of lengths must have at least 2 points and max_length above {SHORTEST}, got {n} points and "
            f"max_length={max_length}. For shorter lengths, list them: lengths=[4, 6], or --lengths 4,6."
        )
    return np.unique(space(SHORTEST, max_length, n).astype(int)).tolist()


def default_lengths(
    claimed_context: int | None,
    corpus_tokens: int | None,
    n: int = 16,
    grid: Callable[[int, int], list[int]] = linear_lengths,
    repeats: int = 10,
) -> list[int]:
    """Return a grid of at most `n` lengths.

    The longest input fills the claimed context. If the corpus is too short for `repeats` targets of the longest
    length, this length is reduced.

    Args:
        claimed_context: claimed context in tokens; None if the model does not claim one.
        corpus_tokens: number of tokens in the corpus; None for random data.
        n: maximum number of lengths.
        grid: `linear_lengths` or `log_lengths`.
        repeats: number of targets that must fit into the corpus without overlap.

    Raises:
        ValueError: `claimed_context` and `corpus_tokens` are None, or the corpus is too short.

    >>> default_lengths(131, None, 3), default_lengths(None, 1300, 3)
    ([8, 36, 64], [8, 54, 100])
    """
    ends = [] if claimed_context is None else [(claimed_context - 3) // 2]
    if corpus_tokens is not None:
        ends.append(corpus_tokens // (3 + repeats))
        if ends[-1] <= SHORTEST:
            raise ValueError(
                f"the corpus must have at least {(3 + repeats) * (SHORTEST + 1)} tokens for {repeats} repeats, got "
                f"{corpus_tokens}. Pass a longer corpus, fewer repeats, or a list of lengths: lengths=[4, 6], or "
                "--lengths 4,6."
            )
    if not ends:
        raise ValueError(
            "the lengths cannot be chosen: the model does not claim a context, and there is no corpus. Pass "
            "lengths=[...], or --lengths or --max-length."
        )
    return grid(min(ends), n)


class Sample(NamedTuple):
    """The target S and the unrelated passage I of one repeat at length n."""

    target: np.ndarray  # S, (n,) int64
    irrelevant: np.ndarray  # I, (n,) int64
    begin: int | None  # start of S in the corpus; None for random data


def order_samples(
    corpus: np.ndarray, lengths: Sequence[int], repeats: int, seed: int, irrelevant: np.ndarray | None = None
) -> dict[int, list[Sample]]:
    """Draw `repeats` targets per length from a corpus.

    We draw targets in the order of `lengths`, so the samples of a length do not depend on the lengths after it.

    Args:
        corpus: token ids, (N,) int64.
        irrelevant: token ids; the unrelated passage is taken from their end (default: `corpus`).

    Raises:
        ValueError: the corpus is shorter than three times the longest length, or `irrelevant` is shorter than the
            longest length.
    """
    longest = max(lengths)
    if len(corpus) < 3 * longest:
        raise ValueError(
            f"the corpus must have at least {3 * longest} tokens (three times the longest length), got "
            f"{len(corpus)}. Drop the lengths above {len(corpus) // 3}, or pass a longer corpus."
        )
    irrelevant = corpus if irrelevant is None else irrelevant
    if len(irrelevant) < longest:
        raise ValueError(
            f"irrelevant_text must have at least {longest} ids (the longest length), got {len(irrelevant)}. "
            f"Drop the lengths above {len(irrelevant)}, or pass more ids."
        )
    rng = random.Random(seed)
    samples = {}
    for n in lengths:
        begins = [rng.randint(0, len(corpus) - 3 * n) for _ in range(repeats)]
        samples[n] = [Sample(corpus[b : b + n], irrelevant[-n:], b) for b in begins]
    return samples


def random_samples(
    id_range: tuple[int, int], lengths: Sequence[int], repeats: int, seed: int, skip: frozenset[int] = frozenset()
) -> dict[int, list[Sample]]:
    """Draw `repeats` samples per length. Target and unrelated passage are independent, uniformly random ids.

    Args:
        id_range: lowest and highest id, both included.
        skip: special ids that are never drawn.

    Raises:
        ValueError: fewer than two ids can be drawn. A sequence of a single repeated id does not test memory.
    """
    low, high = id_range
    skipped = sum(low <= i <= high for i in skip)
    if high - low <= skipped:
        raise ValueError(
            f"id_range must contain at least two ordinary tokens, got ({low}, {high}) with {skipped} special or "
            "unused ids. Pass a wider range: id_range=(lowest, highest), with both ends included."
        )
    rng = random.Random(seed)

    def draw(n):
        ids = []
        while len(ids) < n:
            drawn = rng.randint(low, high)
            if drawn not in skip:
                ids.append(drawn)
        return np.array(ids, dtype=np.int64)

    return {n: [Sample(draw(n), draw(n), None) for _ in range(repeats)] for n in lengths}


def model_inputs(kind: str, samples: Sequence[Sample], bos: int, eos: int) -> np.ndarray:
    """Build the inputs: `[bos] S [bos] S [eos]` for "copy", `[bos] I [bos] S [eos]` for "LM".

    Returns:
        ids (R, 2n + 3), int64.
    """
    prefixes = [sample.target if kind == "copy" else sample.irrelevant for sample in samples]
    return np.stack([np.r_[bos, prefix, bos, sample.target, eos] for prefix, sample in zip(prefixes, samples)])


def input_tokens(length: int) -> int:
    """Return the number of input tokens at this length: 2n + 3."""
    return 2 * length + 3


def scored_tokens(length: int, whole: bool = False) -> int:
    """Return the number of scored tokens: half of the target, rounded up. The first half introduces the copy task.

    If `whole` is True, all tokens are scored. Otherwise, a cache with only the second half of S would copy perfectly.
    """
    return length if whole else (length + 1) // 2


def scored_logits(length: int, whole: bool = False) -> range:
    """Return the positions of the logits that predict the scored tokens: one position before each token."""
    end = 2 * length + 1  # the last scored token is at position 2n + 1, followed by [eos]
    return range(end - scored_tokens(length, whole), end)
