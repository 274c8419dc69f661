"""The counts of a forgetting curve at one length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from ..checks import integers, whole_number
from ..overlap import separate
from .intervals import test_result
from .lengths import margins, passes
from .protocol import scored_tokens


@dataclass(frozen=True)
class CurvePoint:
    """Counts at one length.

    Attributes:
        length: tokens in the target.
        copy_correct: correctly predicted tokens of the copy input, one integer per repeat, each of `scored_tokens`.
        lm_correct: the same for the LM input. Repeat i of both has the same target.
        begin_locs: where each target starts in the corpus; None for random data.
    """

    length: int
    copy_correct: Sequence[int]
    lm_correct: Sequence[int]
    begin_locs: Sequence[int] | None = None

    def __post_init__(self):
        length = whole_number("length", self.length, 1)
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
        """The point with its first repeats only, one or more."""
        whole_number("repeats", repeats, 1)
        begins = self.begin_locs and self.begin_locs[:repeats]
        return CurvePoint(self.length, self.copy_correct[:repeats], self.lm_correct[:repeats], begins)

    @property
    def repeats(self) -> int:
        return len(self.copy_correct)

    @property
    def scored_tokens(self) -> int:
        """Tokens that count in each repeat."""
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
        """Where the scored tokens of each repeat stand in the corpus: the first, and the one after the last."""
        if self.begin_locs is None:
            return None
        return [(begin + self.length - self.scored_tokens, begin + self.length) for begin in self.begin_locs]

    @property
    def texts(self) -> list[int]:
        """Indices of the repeats that count as texts of their own: as many as share no scored token with another."""
        return [*range(self.repeats)] if self.places is None else sorted(separate(self.places))

    @property
    def copied(self) -> int:
        """How many repeats are copied with an accuracy above 99 %."""
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
        """By how much each repeat is above the threshold of "fine" or "coarse", (R,); see `lengths.margins`."""
        return margins(self.copy_correct, self.lm_correct, self.scored_tokens, method)

    def passes(self, method: str) -> bool:
        """Return whether the counts pass as "fine" or "coarse", whatever their noise; see `lengths.passes`."""
        return passes(sum(self.copy_correct), sum(self.lm_correct), self.repeats * self.scored_tokens, method)

    def test_result(self, method: str, level: float) -> int:
        """Return 1 if the length passes at this level, -1 if it fails, else 0; see `intervals.test_result`."""
        return test_result(self.margins(method)[self.texts], self.scored_tokens, level, method)
