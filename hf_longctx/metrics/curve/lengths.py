"""Which lengths pass by the counts of a forgetting curve, and the memory lengths of the paper that follow.

A length passes as fine if its copy accuracy is above 99 %, as coarse if that is at least 1 % above its LM accuracy.
These methods take noise for memory: where copying is as good as guessing, one of many lengths passes by chance. What
the counts show for sure is in intervals.py. This file knows plain sequences of counts only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


METHODS = ("fine", "coarse")


class MemoryLength(int):
    """A length read off a curve, in tokens: the last tested one that passes, 0 if none does.

    Attributes:
        open_ended: the longest tested length passes, so the true one may be larger; printed as ">1400".
        next_tested: the tested length after it, so that the true one lies in [self, next_tested); None if open ended.

    >>> print(MemoryLength(1400, open_ended=True), MemoryLength(767, next_tested=893) + 1)
    >1400 768
    """

    open_ended: bool
    next_tested: int | None

    def __new__(cls, tokens: int, *, open_ended: bool = False, next_tested: int | None = None):
        self = super().__new__(cls, tokens)
        self.open_ended = open_ended
        self.next_tested = next_tested
        return self

    def __str__(self):
        return f">{int(self)}" if self.open_ended else str(int(self))

    def __repr__(self):
        return f"MemoryLength({int(self)}, open_ended={self.open_ended}, next_tested={self.next_tested})"


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}.")


def passes(copy: int, lm: int, scored: int, method: str) -> bool:
    """Return whether a length passes as "fine" or as "coarse", decided in integers.

    Args:
        copy, lm, scored: correct copy tokens, correct LM tokens and scored tokens, summed over repeats.

    Raises:
        ValueError: no such method.
    """
    check_method(method)
    return 100 * copy > 99 * scored if method == "fine" else 100 * (copy - lm) >= scored


def memory_lengths(
    lengths: Sequence[int], copy: Sequence[int], lm: Sequence[int], scored: Sequence[int], p_values: Sequence[float]
) -> dict[str, MemoryLength]:
    """Five readings of "memory length" from the counts of a curve.

    Args:
        lengths: tested lengths in tokens, ascending.
        copy, lm, scored: per length, correct copy tokens, correct LM tokens and scored tokens, summed over repeats.
        p_values: per length, of the paired test of copy against LM.

    Returns:
        `fine_max`, `coarse_max`: the largest length that passes (Table 3 of the paper: the headline).
        `fine_first_run`, `coarse_first_run`: the end of the first uninterrupted stretch of passing lengths. Lengths
        that fail before it are skipped: very short targets do not show yet that the task is to copy (footnote 7).
        `coarse_max_significant`: the largest length that passes as coarse with p < 0.05.

    >>> memory_lengths([8, 64, 128], [4, 31, 50], [1, 9, 50], [4, 32, 64], [0.01, 0.01, 1])["coarse_max"]
    MemoryLength(64, open_ended=False, next_tested=128)
    """
    fine, coarse = ([passes(*counts, method) for counts in zip(copy, lm, scored, strict=True)] for method in METHODS)
    significant = [passing and p < 0.05 for passing, p in zip(coarse, p_values)]

    def largest(passing):
        return max((i for i, passed in enumerate(passing) if passed), default=-1)

    def first_run(passing):
        if True not in passing:
            return -1
        start = passing.index(True)
        return passing.index(False, start) - 1 if False in passing[start:] else len(passing) - 1

    def memory_length(i):
        following = lengths[i + 1] if i + 1 < len(lengths) else None
        return MemoryLength(
            lengths[i] if i >= 0 else 0, open_ended=i >= 0 and following is None, next_tested=following
        )

    return {
        "fine_max": memory_length(largest(fine)),
        "fine_first_run": memory_length(first_run(fine)),
        "coarse_max": memory_length(largest(coarse)),
        "coarse_first_run": memory_length(first_run(coarse)),
        "coarse_max_significant": memory_length(largest(significant)),
    }


def margins(copy_correct: Sequence[int], lm_correct: Sequence[int], scored_tokens: int, method: str) -> np.ndarray:
    """By how much each repeat is above the threshold of a method, as a share of the scored tokens; (R,) float64.

    Raises:
        ValueError: no such method.
    """
    check_method(method)
    copy, lm = (np.array(counts) / scored_tokens for counts in (copy_correct, lm_correct))
    return copy - 0.99 if method == "fine" else copy - lm - 0.01
