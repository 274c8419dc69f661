"""Which lengths the counts of a forgetting curve show, and how surely.

A length passes as fine if its copy accuracy is above 99 %, as coarse if that is at least 1 % above its LM accuracy.
Both are statements about a mean over targets, so each has a t test over the repeats; the coarse one is paired, as copy
and LM input have the same target. This file knows plain sequences of counts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr


READINGS = ("fine", "coarse")


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


def memory_lengths(
    lengths: Sequence[int], copy: Sequence[int], lm: Sequence[int], scored: Sequence[int], p_values: Sequence[float]
) -> dict[str, MemoryLength]:
    """Five readings of "memory length" from the counts of a curve, decided in integers.

    A length passes as *fine* if copy accuracy is above 99 %, as *coarse* if it is at least 1 % above LM accuracy.

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
    fine = [100 * c > 99 * n for c, n in zip(copy, scored)]
    coarse = [100 * (c - b) >= n for c, b, n in zip(copy, lm, scored)]
    significant = [passes and p < 0.05 for passes, p in zip(coarse, p_values)]

    def largest(passing):
        return max((i for i, passes in enumerate(passing) if passes), default=-1)

    def first_run(passing):
        if True not in passing:
            return -1
        start = passing.index(True)
        return passing.index(False, start) - 1 if False in passing[start:] else len(passing) - 1

    def reading(i):
        following = lengths[i + 1] if i + 1 < len(lengths) else None
        return MemoryLength(
            lengths[i] if i >= 0 else 0, open_ended=i >= 0 and following is None, next_tested=following
        )

    return {
        "fine_max": reading(largest(fine)),
        "fine_first_run": reading(first_run(fine)),
        "coarse_max": reading(largest(coarse)),
        "coarse_first_run": reading(first_run(coarse)),
        "coarse_max_significant": reading(largest(significant)),
    }


def margins(copy_correct: Sequence[int], lm_correct: Sequence[int], scored_tokens: int, reading: str) -> np.ndarray:
    """By how much each repeat is above the threshold of a reading, as a share of the scored tokens; (R,) float64.

    Raises:
        ValueError: the reading is neither "fine" nor "coarse".
    """
    if reading not in READINGS:
        raise ValueError(f"reading must be one of {READINGS}, got {reading!r}.")
    copy, lm = (np.array(counts) / scored_tokens for counts in (copy_correct, lm_correct))
    return copy - 0.99 if reading == "fine" else copy - lm - 0.01


def verdict(margins: np.ndarray, scored_tokens: int, level: float) -> int:
    """1 if a length passes for sure, -1 if it fails for sure, 0 if either may be: one-sided t tests at this level.

    The standard error is not taken to be below one token in all that were scored: three repeats of four tokens, all
    right, do not show an accuracy above 99 %.

    Args:
        margins: of the repeats, (R,).
        scored_tokens: of each repeat.
    """
    repeats = len(margins)
    if repeats < 2:
        return 0
    error = np.hypot(margins.std(ddof=1) / repeats**0.5, 1 / (repeats * scored_tokens))
    return int(np.sign(margins.mean())) if stdtr(repeats - 1, -abs(margins.mean()) / error) < level else 0


class LengthInterval(NamedTuple):
    """Where a fine or coarse length lies: at `low` or above it, and below `high`, in tokens.

    Attributes:
        low: the largest tested length that passes for sure; 0 if none does.
        high: the smallest tested length above it that fails for sure; None if none does.

    >>> print(LengthInterval(253, 387), LengthInterval(1400, None))
    [253, 387) >=1400
    """

    low: int
    high: int | None

    def __str__(self):
        return f">={self.low}" if self.high is None else f"[{self.low}, {self.high})"


def length_interval(
    lengths: Sequence[int], margins: Sequence[np.ndarray], scored: Sequence[int], confidence: float = 0.95
) -> LengthInterval:
    """Confidence interval of the fine or coarse length, if memory only fades as targets grow.

    The two ends share the risk 1 - confidence, and each divides its half among all lengths (Bonferroni), so that
    a long flat tail, of which some point is always lucky, does not widen the risk. Conservative.

    Args:
        lengths: tested lengths in tokens, ascending.
        margins: per length, of its repeats above the threshold; see `margins`.
        scored: per length, scored tokens of a repeat.
        confidence: between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}.")
    level = (1 - confidence) / (2 * max(len(lengths), 1))
    verdicts = {length: verdict(m, n, level) for length, m, n in zip(lengths, margins, scored)}
    low = max((length for length, v in verdicts.items() if v > 0), default=0)
    return LengthInterval(low, min((length for length, v in verdicts.items() if v < 0 and length > low), default=None))
