"""The counts of a forgetting curve at one length, and the memory lengths that the paper derives from them.

A length passes as fine if its copy accuracy is above 99 %. It passes as coarse if its copy accuracy is at least 1
percentage point above its LM accuracy. With many lengths, a length may pass by chance, even if the model does not
remember anything. For significance tests, see intervals.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from ..checks import as_int
from ..overlap import separate
from .protocol import scored_tokens


METHODS = ("fine", "coarse")


def margins(copy_correct: Sequence[int], lm_correct: Sequence[int], scored_tokens: int, method: str) -> np.ndarray:
    """Return the margin of each repeat above the threshold of a method, (R,) float64.

    The margin is copy accuracy - 0.99 for "fine", and copy accuracy - LM accuracy - 0.01 for "coarse".

    Raises:
        ValueError: the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}.")
    copy, lm = (np.array(counts) / scored_tokens for counts in (copy_correct, lm_correct))
    return copy - 0.99 if method == "fine" else copy - lm - 0.01


@dataclass(frozen=True)
class CurvePoint:
    """The counts at one length.

    Attributes:
        length: number of tokens in the target.
        copy_correct: number of correctly predicted tokens in the copy input, for each repeat.
        lm_correct: number of correctly predicted tokens in the LM input with the same target, for each repeat.
        begin_locs: start of each target in the corpus; None for random data.
        whole: whether all tokens of the target were scored, instead of its second half.
    """

    length: int
    copy_correct: Sequence[int]
    lm_correct: Sequence[int]
    begin_locs: Sequence[int] | None = None
    whole: bool = False

    def __post_init__(self):
        length = as_int("length", self.length, 1)
        scored = scored_tokens(length, self.whole)
        object.__setattr__(self, "length", length)
        for name in ("copy_correct", "lm_correct", *["begin_locs"] * (self.begin_locs is not None)):
            counts = tuple(as_int(f"{name} at length {length}", value, 0) for value in getattr(self, name))
            if name != "begin_locs" and max(counts, default=0) > scored:
                raise ValueError(f"{name} at length {length} must be at most {scored}, got {max(counts)}.")
            object.__setattr__(self, name, counts)
        if not 0 < len(self.copy_correct) == len(self.lm_correct) == len(self.begin_locs or self.lm_correct):
            raise ValueError(
                "copy_correct, lm_correct and begin_locs must have one entry per repeat, got "
                f"{len(self.copy_correct)} copy counts, {len(self.lm_correct)} LM counts and "
                f"begin_locs={self.begin_locs} at length {length}."
            )

    def first(self, repeats: int) -> CurvePoint:
        """Return a copy of the point with only the first `repeats` repeats (at least 1)."""
        begins = self.begin_locs and self.begin_locs[:repeats]
        return CurvePoint(self.length, self.copy_correct[:repeats], self.lm_correct[:repeats], begins, self.whole)

    @property
    def repeats(self) -> int:
        return len(self.copy_correct)

    @property
    def scored_tokens(self) -> int:
        """Number of scored tokens per repeat."""
        return scored_tokens(self.length, self.whole)

    @property
    def copy_mean(self) -> float:
        """Copy accuracy, mean over repeats, 0 to 1."""
        return sum(self.copy_correct) / (self.repeats * self.scored_tokens)

    @property
    def copy_worst(self) -> float:
        """The lowest copy accuracy of all repeats, 0 to 1."""
        return min(self.copy_correct) / self.scored_tokens

    @property
    def places(self) -> list[tuple[int, int]] | None:
        """Span [first, stop) of the scored tokens in the corpus, for each repeat; None for random data."""
        if self.begin_locs is None:
            return None
        return [(begin + self.length - self.scored_tokens, begin + self.length) for begin in self.begin_locs]

    @property
    def texts(self) -> list[int]:
        """Indices of repeats that count as separate passages: they do not share scored tokens."""
        return [*range(self.repeats)] if self.places is None else sorted(separate(self.places))

    @property
    def copied(self) -> int:
        """Number of repeats with a copy accuracy above 99 %."""
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
        """The p value of a two-sided paired t test of copy accuracy against LM accuracy over repeats.

        It is 1 if there is only one repeat, or if the accuracies are equal in all repeats.
        """
        # Counts give the same t as accuracies, and differences of integers are exact.
        difference = np.subtract(self.copy_correct, self.lm_correct)
        if self.repeats < 2 or not difference.any():
            return 1.0
        error = difference.std(ddof=1) / self.repeats**0.5
        return 0.0 if error == 0 else float(2 * scipy.special.stdtr(self.repeats - 1, -abs(difference.mean()) / error))

    def margins(self, method: str) -> np.ndarray:
        """Return the margins of the repeats, (R,) float64; see the function `margins`."""
        return margins(self.copy_correct, self.lm_correct, self.scored_tokens, method)

    def passes(self, method: str) -> bool:
        """Return whether the mean accuracy passes as "fine" or "coarse", in exact integer arithmetic."""
        copy, lm, scored = sum(self.copy_correct), sum(self.lm_correct), self.repeats * self.scored_tokens
        return 100 * copy > 99 * scored if method == "fine" else 100 * (copy - lm) >= scored


class MemoryLength(int):
    """A memory length in tokens: a tested length that passes, or 0 if no length passes.

    Attributes:
        open_ended: whether this is the longest tested length. The true length may then be larger. An open-ended length
            is printed as ">1400".
        next_tested: the next longer tested length; None if open-ended. The true length lies in [self, next_tested).

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
    """Compute the memory length of a curve under five definitions.

    Args:
        points: points of the curve, in ascending order of length.

    Returns:
        `fine_max`, `coarse_max`: the longest length that passes (Table 3 of the paper).
        `fine_first_run`, `coarse_first_run`: the last length of the first uninterrupted run of passing lengths.
        Lengths before this run may fail, because a very short target does not show the model that it should copy
        (footnote 7).
        `coarse_max_significant`: the longest length that passes as coarse with p < 0.05.

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
