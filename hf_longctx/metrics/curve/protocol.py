"""Lengths, samples and inputs of the forgetting curve.

A model reads a target S of n tokens twice, `[bos] S [bos] S [eos]`, or once after an unrelated passage of the same
length, `[bos] I [bos] S [eos]`. With teacher forcing, the share of tokens it predicts right in the second half of the
last S is its copy accuracy in the first case and its language-modelling (LM) accuracy in the second. As n grows,
copying is first exact (fine-grained memory), then only better than guessing (coarse-grained memory), and finally no
better than guessing (amnesia).

Source: Liu et al. 2024, "Forgetting Curve: A Reliable Method for Evaluating Memorization Capability for Long-context
Models", section 3. This file does not run a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


SHORTEST = 8  # first length of the two standard grids


def linear_lengths(max_length: int, n: int) -> list[int]:
    """Return about `n` evenly spaced lengths from 8 to `max_length` tokens, truncated to integers, without duplicates.

    >>> linear_lengths(128, 4)
    [8, 48, 88, 128]
    """
    return _grid(np.linspace, max_length, n)


def log_lengths(max_length: int, n: int) -> list[int]:
    """Return at most `n` geometrically spaced lengths from 8 to `max_length` tokens, truncated, without duplicates.

    >>> log_lengths(700, 4)
    [8, 35, 157, 700]
    """
    return _grid(np.geomspace, max_length, n)


def _grid(space, max_length, n):
    if n < 2 or max_length <= SHORTEST:
        raise ValueError(
            f"a grid of {n} lengths up to {max_length} is too small: it starts at {SHORTEST} tokens and needs n >= 2 "
            f"and max_length > {SHORTEST}. For other lengths, give the list itself: lengths=[4, 6], or --lengths 4,6."
        )
    return np.unique(space(SHORTEST, max_length, n).astype(int)).tolist()


def default_lengths(
    claimed_context: int | None,
    corpus_tokens: int | None,
    n: int = 16,
    grid: Callable[[int, int], list[int]] = linear_lengths,
    repeats: int = 10,
) -> list[int]:
    """Return a grid of `n` lengths up to the one whose input fills the claimed context, if the corpus is long enough.

    Args:
        claimed_context: claimed context in tokens; None if the model does not claim one.
        corpus_tokens: number of tokens in the corpus; None for random data.
        repeats: number of targets that must fit into the corpus without overlap.

    Raises:
        ValueError: both are None, or the corpus is too short.

    >>> default_lengths(131, None, 3), default_lengths(None, 1300, 3)
    ([8, 36, 64], [8, 54, 100])
    """
    ends = [] if claimed_context is None else [longest_length(claimed_context)]
    if corpus_tokens is not None:
        ends.append(corpus_tokens // (3 + repeats))
        if ends[-1] <= SHORTEST:
            raise ValueError(
                f"the corpus has {corpus_tokens} tokens, too few for {repeats} separate passages and an unrelated one: "
                f"give {(3 + repeats) * (SHORTEST + 1)} or more, fewer repeats, or the lengths themselves: lengths=[4, 6], "
                "or --lengths 4,6."
            )
    if not ends:
        raise ValueError(
            "the model claims no context and there is no corpus; give the lengths: lengths=[...], or --lengths "
            "or --max-length."
        )
    return grid(min(ends), n)


class Sample(NamedTuple):
    """One repeat at one length n; the copy and the LM input share the target."""

    target: np.ndarray  # S, (n,) int64
    irrelevant: np.ndarray  # I, (n,) int64
    begin: int | None  # where S starts in the corpus; None for random data


def order_samples(
    corpus: np.ndarray, lengths: Sequence[int], repeats: int, seed: int, irrelevant: np.ndarray | None = None
) -> dict[int, list[Sample]]:
    """Draw `repeats` targets from `corpus` per length.

    Irrelevant passages come from the end of `irrelevant`, or of `corpus` without it.
    Lengths are drawn in the given order, so the samples of a grid do not change if its end is cut off.

    Args:
        corpus: token ids, (N,) int64.

    Raises:
        ValueError: the corpus is shorter than three times the longest length, or `irrelevant` than the longest length.
    """
    longest = max(lengths)
    if len(corpus) < 3 * longest:
        raise ValueError(
            f"the corpus has {len(corpus)} tokens; length {longest} needs {3 * longest}, three times as many, so that "
            f"target and irrelevant text keep apart. The longest possible length is {len(corpus) // 3}: drop the "
            "lengths above it or give more text."
        )
    irrelevant = corpus if irrelevant is None else irrelevant
    if len(irrelevant) < longest:
        raise ValueError(
            f"irrelevant_text has {len(irrelevant)} ids, fewer than length {longest} needs. The longest possible "
            f"length is {len(irrelevant)}: drop the lengths above it or give more text."
        )
    rng, samples = random.Random(seed), {}
    for n in lengths:
        begins = [rng.randint(0, len(corpus) - 3 * n) for _ in range(repeats)]
        samples[n] = [Sample(corpus[b : b + n], irrelevant[-n:], b) for b in begins]
    return samples


def random_samples(
    id_range: tuple[int, int], lengths: Sequence[int], repeats: int, seed: int, skip: frozenset[int] = frozenset()
) -> dict[int, list[Sample]]:
    """Draw `repeats` pairs of independent uniform id sequences per length.

    Args:
        id_range: lowest and highest id, both included.
        skip: special ids, which are never drawn.

    Raises:
        ValueError: fewer than two ids of the range may be drawn; a sequence of a single id cannot be forgotten.
    """
    low, high = id_range
    skipped = sum(low <= i <= high for i in skip)
    if high - low <= skipped:
        raise ValueError(
            f"id_range=({low}, {high}) leaves no choice of random ids: {skipped} of them are special ids or not tokens. "
            "Give a wider range: id_range=(lowest, highest), both included."
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
    """Return the rows `[bos] S [bos] S [eos]` (kind "copy") or `[bos] I [bos] S [eos]` ("LM"), (R, 2n + 3) int64."""
    prefixes = [sample.target if kind == "copy" else sample.irrelevant for sample in samples]
    return np.stack([np.r_[bos, prefix, bos, sample.target, eos] for prefix, sample in zip(prefixes, samples)])


def input_tokens(length: int) -> int:
    """Return the number of input tokens at this length: 2n + 3."""
    return 2 * length + 3


def longest_length(max_tokens: int) -> int:
    """Return the longest length whose input fits into `max_tokens`; 0 if none does."""
    return max((max_tokens - 3) // 2, 0)


def scored_tokens(length: int) -> int:
    """Count the scored tokens: the second half of the target, rounded up. The first half introduces the copy task."""
    return (length + 1) // 2


def scored_logits(length: int) -> range:
    """Return the input positions whose logits predict the scored tokens, one before each; never the last two."""
    end = 2 * length + 1  # the input has 2n + 3 tokens
    return range(end - scored_tokens(length), end)
