"""What the forgetting curve asks of a model: lengths, samples and inputs.

A model reads a target S of n tokens twice, `[bos] S [bos] S [eos]`, or once after an unrelated text of the same
length, `[bos] I [bos] S [eos]`. With teacher forcing, the share of tokens it predicts right in the second half of the
last S is its copy accuracy in the first case and its language-modelling (LM) accuracy in the second. As n grows,
copying is at first exact (fine-grained memory), then only better than guessing from the text (coarse-grained memory),
and at last no better (amnesia).

Source: Liu et al. 2024, "Forgetting Curve: A Reliable Method for Evaluating Memorization Capability for Long-context
Models", section 3. This file knows no model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..checks import positive_int


SHORTEST = 8  # first length of the two standard grids


def linear_lengths(max_length: int, n: int) -> list[int]:
    """About `n` evenly spaced lengths from 8 to `max_length` tokens, truncated to integers, without duplicates.

    >>> linear_lengths(128, 4)
    [8, 48, 88, 128]
    """
    return _grid(np.linspace, max_length, n)


def log_lengths(max_length: int, n: int) -> list[int]:
    """At most `n` geometrically spaced lengths from 8 to `max_length` tokens, truncated, without duplicates.

    >>> log_lengths(700, 4)
    [8, 35, 157, 700]
    """
    return _grid(np.geomspace, max_length, n)


def _grid(space, max_length, n):
    n, max_length = positive_int("n", n, -math.inf), positive_int("max_length", max_length, -math.inf)
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
) -> list[int]:
    """A grid of `n` lengths up to those whose input fills the claimed context, as far as the corpus reaches.

    Args:
        claimed_context: in tokens; None if the model claims none.
        corpus_tokens: None for random data.

    Raises:
        ValueError: neither says how far to measure.

    >>> default_lengths(131, None, 3)
    [8, 36, 64]
    """
    ends = [] if claimed_context is None else [longest_length(claimed_context)]
    ends += [] if corpus_tokens is None else [corpus_tokens // 3]
    if not ends:
        raise ValueError(
            "the model claims no context and there is no corpus; say how far to measure: lengths=[...], or --lengths "
            "or --max-length."
        )
    return grid(min(ends), n)


class Sample(NamedTuple):
    """One repeat at one length n. The same target serves the copy and the LM input."""

    target: np.ndarray  # S, (n,) int64
    irrelevant: np.ndarray  # I, (n,) int64
    begin: int | None  # where S starts in the corpus; None for random data


def order_samples(
    corpus: np.ndarray, lengths: Sequence[int], repeats: int, seed: int, irrelevant: np.ndarray | None = None
) -> Iterator[list[Sample]]:
    """Per length, `repeats` stretches of `corpus`; the irrelevant text is the end of `irrelevant` or of the corpus.

    Lengths are drawn in the order given, so a grid that is cut short keeps the samples of its beginning.

    Raises:
        ValueError: the corpus is shorter than three times the longest length, or `irrelevant` than the longest length.
    """
    irrelevant = _check_corpus(corpus, lengths, irrelevant)

    def draw():
        rng = random.Random(seed)
        for n in lengths:
            begins = [rng.randint(0, len(corpus) - 3 * n) for _ in range(repeats)]
            yield [Sample(corpus[b : b + n], irrelevant[-n:], b) for b in begins]

    return draw()


def nested_order_samples(
    corpus: np.ndarray, lengths: Sequence[int], repeats: int, seed: int, irrelevant: np.ndarray | None = None
) -> Iterator[list[Sample]]:
    """As `order_samples`, but all lengths share their beginnings: each target is the start of the next longer one.

    Repeat i starts at the same place at every length, drawn as for the longest. The irrelevant text, too, is the start
    of one stretch: of the last tokens, as many as the longest length has.
    """
    irrelevant = _check_corpus(corpus, lengths, irrelevant)
    longest, rng = max(lengths), random.Random(seed)
    begins = [rng.randint(0, len(corpus) - 3 * longest) for _ in range(repeats)]
    block = irrelevant[-longest:]
    return ([Sample(corpus[b : b + n], block[:n], b) for b in begins] for n in lengths)


def _check_corpus(corpus, lengths, irrelevant):
    """The text that irrelevant tokens come from: `irrelevant`, or else the corpus."""
    longest = max(lengths)
    if len(corpus) < 3 * longest:
        raise ValueError(
            f"the corpus has {len(corpus)} tokens; length {longest} needs {3 * longest}, three times as many, so that "
            f"target and irrelevant text keep apart. The longest possible length is {len(corpus) // 3}: drop the "
            "lengths above it or give more text."
        )
    if irrelevant is None:
        irrelevant = corpus
    elif len(irrelevant) < longest:
        raise ValueError(
            f"irrelevant_tokens has {len(irrelevant)} ids, fewer than length {longest} needs. The longest possible "
            f"length is {len(irrelevant)}: drop the lengths above it or give more text."
        )
    return irrelevant


def random_samples(
    id_range: tuple[int, int], lengths: Sequence[int], repeats: int, seed: int, skip: frozenset[int] = frozenset()
) -> Iterator[list[Sample]]:
    """Per length, `repeats` pairs of independent uniform id sequences.

    Args:
        id_range: lowest and highest id, both included.
        skip: special ids, never drawn.

    Raises:
        ValueError: the range holds no id that may be drawn.
    """
    sequence = _random_ids(id_range, seed, skip)
    return ([Sample(sequence(n), sequence(n), None) for _ in range(repeats)] for n in lengths)


def nested_random_samples(
    id_range: tuple[int, int], lengths: Sequence[int], repeats: int, seed: int, skip: frozenset[int] = frozenset()
) -> Iterator[list[Sample]]:
    """As `random_samples`, but each target is the start of the next longer one, and all share one irrelevant text."""
    sequence, longest = _random_ids(id_range, seed, skip), max(lengths)
    targets, block = [sequence(longest) for _ in range(repeats)], sequence(longest)
    return ([Sample(target[:n], block[:n], None) for target in targets] for n in lengths)


def _random_ids(id_range, seed, skip):
    """A function that draws n ids, (n,) int64."""
    low, high = id_range
    skipped = sum(low <= i <= high for i in skip)
    if high - low < skipped:
        raise ValueError(
            f"id_range=({low}, {high}) leaves no choice of random ids: {skipped} of them are special ids or no tokens. "
            "Give a wider range: id_range=(lowest, highest), both included."
        )
    rng = random.Random(seed)

    def sequence(n):
        ids = []
        while len(ids) < n:
            drawn = rng.randint(low, high)
            if drawn not in skip:
                ids.append(drawn)
        return np.array(ids, dtype=np.int64)

    return sequence


def model_input(prefix: np.ndarray, target: np.ndarray, bos: int, eos: int) -> np.ndarray:
    """`[bos] prefix [bos] target [eos]`, (2n + 3,) int64: prefix is the target (copy) or the irrelevant text (LM)."""
    return np.concatenate([[bos], prefix, [bos], target, [eos]])


def input_tokens(length: int) -> int:
    """Tokens the model reads at this length: 2n + 3."""
    return 2 * length + 3


def longest_length(max_tokens: int) -> int:
    """The longest length whose input fits into `max_tokens` (0 if none does)."""
    return max((max_tokens - 3) // 2, 0)


def scored_tokens(length: int) -> int:
    """Tokens that count: the second half of the target, rounded up. The first half shows that the task is to copy."""
    return (length + 1) // 2


def scored_logits(length: int) -> range:
    """The input positions whose logits predict the scored tokens: one before each of them; never the last two."""
    end = input_tokens(length) - 2
    return range(end - scored_tokens(length), end)
