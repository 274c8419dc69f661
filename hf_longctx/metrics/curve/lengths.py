"""The counts of a forgetting curve at one length, and the memory lengths that the paper derives from them.

A length passes as fine if its copy accuracy is above 99 %, and as coarse if it is at least 1 % above its LM accuracy.
These definitions mistake noise for memory: if copying is only as good as guessing, one of many lengths passes by
chance. For significance tests, see intervals.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from ..checks import as_int, integers
from ..overlap import separate
from .protocol import scored_tokens


METHODS = ("fine", "coarse")


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}.")


def margins(copy_correct: Sequence[int], lm_correct: Sequence[int], scored_tokens: int, method: str) -> np.ndarray:
    """Return how far each repeat is above the threshold of a method, as a share of the scored tokens; (R,) float64.

    Raises:
        ValueError: the method is unknown.
    """
    check_method(method)
    copy, lm = (np.array(counts) / scored_tokens for counts in (copy_correct, lm_correct))
    return copy - 0.99 if method == "fine" else copy - lm - 0.01


@dataclass(frozen=True)
class CurvePoint:
    """The counts at one length.

    Attributes:
        length: number of tokens in the target.
        copy_correct: correctly predicted tokens of the copy input, one integer per repeat, out of `scored_tokens`.
        lm_correct: the same for the LM input. Repeat i of both has the same target.
        begin_locs: where each target starts in the corpus; None for random data.
    """

    length: int
    copy_correct: Sequence[int]
    lm_correct: Sequence[int]
    begin_locs: Sequence[int] | None = None

    def __post_init__(self):
        length = as_int("length", self.length, 1)
        scored = scored_tokens(length)
        object.__setattr__(self, "length", length)
        for name, most in (("copy_correct", scored), ("lm_correct", scored), ("begin_locs", math.inf)):
            values = getattr(self, name)
            if values is not None or name != "begin_locs":
                object.__setattr__(self, name, integers(values, f"{name} at length {length}", 0, most))
        if not len(self.copy_correct) == len(self.lm_correct) == len(self.begin_locs or self.lm_correct):
            raise ValueError(
                f"length {length} has {len(self.copy_correct)} copy counts and {len(self.lm_correct)} LM counts, begin_locs "
                f"{self.begin_locs}; give one of each for every repeat."
            )

    def first(self, repeats: int) -> CurvePoint:
        """Return the point with only its first `repeats` repeats, at least one."""
        begins = self.begin_locs and self.begin_locs[:repeats]
        return CurvePoint(self.length, self.copy_correct[:repeats], self.lm_correct[:repeats], begins)

    @property
    def repeats(self) -> int:
        return len(self.copy_correct)

    @property
    def scored_tokens(self) -> int:
        """Number of scored tokens per repeat."""
        return scored_tokens(self.length)

    @property
    def copy_mean(self) -> float:
        """Copy accuracy, mean over repeats, 0 to 1."""
        return sum(self.copy_correct) / (self.repeats * self.scored_tokens)

    @property
    def copy_worst(self) -> float:
        """Copy accuracy of the worst repeat, 0 to 1."""
        return min(self.copy_correct) / self.scored_tokens

    @property
    def places(self) -> list[tuple[int, int]] | None:
        """Span [first, stop) of each repeat's scored tokens in the corpus."""
        if self.begin_locs is None:
            return None
        return [(begin + self.length - self.scored_tokens, begin + self.length) for begin in self.begin_locs]

    @property
    def texts(self) -> list[int]:
        """Indices of the repeats that count as separate passages: the largest set that shares no scored token."""
        return [*range(self.repeats)] if self.places is None else sorted(separate(self.places))

    @property
    def copied(self) -> int:
        """Number of repeats that are copied with an accuracy above 99 %."""
        return sum(100 * correct > 99 * self.scored_tokens for correct in self.copy_correct)

    @property
    def lm_mean(self) -> float:
        """LM accuracy, mean over repeats, 0 to 1."""
        return sum(self.lm_correct) / (self.repeats * self.scored_tokens)

    @property
    def copy_std(self) -> float:
        """Standard deviation of the copy accuracy over repeats (population, ddof 0)."""
        return float(np.std(self.copy_correct)) / self.scored_tokens

    @property
    def lm_std(self) -> float:
        """Standard deviation of the LM accuracy over repeats (population, ddof 0)."""
        return float(np.std(self.lm_correct)) / self.scored_tokens

    @property
    def p_value(self) -> float:
        """Two-sided paired t-test of copy against LM over repeats; 1 where it is undefined (one repeat, all equal)."""
        # On counts, not accuracies: t does not change with the unit, and integers show an exactly constant difference.
        difference = np.subtract(self.copy_correct, self.lm_correct)
        if self.repeats < 2 or not difference.any():
            return 1.0
        error = difference.std(ddof=1) / self.repeats**0.5
        return 0.0 if error == 0 else float(2 * scipy.special.stdtr(self.repeats - 1, -abs(difference.mean()) / error))

    def margins(self, method: str) -> np.ndarray:
        """Return how far each repeat is above the threshold of "fine" or "coarse", (R,); see `margins`."""
        return margins(self.copy_correct, self.lm_correct, self.scored_tokens, method)

    def passes(self, method: str) -> bool:
        """Return whether the mean passes as "fine" or "coarse", ignoring noise, in exact integer arithmetic."""
        copy, lm, scored = sum(self.copy_correct), sum(self.lm_correct), self.repeats * self.scored_tokens
        return 100 * copy > 99 * scored if method == "fine" else 100 * (copy - lm) >= scored


class MemoryLength(int):
    """A memory length read off a curve, in tokens: the last tested length that passes, or 0.

    Attributes:
        open_ended: whether the longest tested length passes, so the true one may be larger; printed as ">1400".
        next_tested: the next tested length; the true one lies in [self, next_tested). None if open-ended.

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


def memory_lengths(points: Sequence[CurvePoint]) -> dict[str, MemoryLength]:
    """Return five definitions of "memory length" from the points of a curve, in ascending order.

    Returns:
        `fine_max`, `coarse_max`: the largest length that passes (Table 3 of the paper).
        `fine_first_run`, `coarse_first_run`: the end of the first uninterrupted run of passing lengths. Failing
        lengths before it are skipped: very short targets do not yet show that the task is to copy (footnote 7).
        `coarse_max_significant`: the largest length that passes as coarse with p < 0.05.

    >>> memory_lengths([CurvePoint(8, [4], [1]), CurvePoint(64, [31], [9]), CurvePoint(128, [5], [5])])["coarse_max"]
    64
    """
    fine, coarse = ([p.passes(method) for p in points] for method in METHODS)
    significant = [passing and p.p_value < 0.05 for passing, p in zip(coarse, points)]

    def largest(passing):
        return max((i for i, passed in enumerate(passing) if passed), default=-1)

    def first_run(passing):
        if True not in passing:
            return -1
        start = passing.index(True)
        return passing.index(False, start) - 1 if False in passing[start:] else len(passing) - 1

    def memory_length(i):
        following = points[i + 1].length if i + 1 < len(points) else None
        tokens = points[i].length if i >= 0 else 0
        return MemoryLength(tokens, open_ended=i >= 0 and following is None, next_tested=following)

    return {
        "fine_max": memory_length(largest(fine)),
        "fine_first_run": memory_length(first_run(fine)),
        "coarse_max": memory_length(largest(coarse)),
        "coarse_first_run": memory_length(first_run(coarse)),
        "coarse_max_significant": memory_length(largest(significant)),
    }
