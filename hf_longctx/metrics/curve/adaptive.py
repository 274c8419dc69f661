"""Choose where, and how often, to measure a forgetting curve when only its two lengths and its shape matter.

The grid of lengths sets the resolution. A few lengths, each half as long as the previous one, show the shape.
Bisection between a length that passes and one that fails leads to two neighbours on the grid. Both get more repeats
until a test shows on which side of the threshold each lies. This file does not run a model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from .intervals import STAGES, adaptive_tests, centre, test_result
from .lengths import METHODS, CurvePoint
from .protocol import input_tokens


BUDGET = 64  # maximum cost, in inputs of the longest length; 32 points of 10 repeats on a linear grid cost 330


def locate(
    lengths: Sequence[int],
    measure: Callable[[int, int, int], CurvePoint],
    *,
    repeats: int = 10,
    confidence: float = 0.95,
) -> list[CurvePoint]:
    """Measure the lengths that decide the fine and the coarse length.

    Assumes that memory only fades as targets grow: a dip between two measured lengths goes unnoticed.

    Args:
        lengths: the grid, ascending.
        measure: `measure(length, first, stop)` measures the repeats from first to stop - 1 and returns the point with
            the repeats 0 to stop - 1.
        repeats: maximum number of repeats per point.
        confidence: confidence level at which the two neighbours on the grid must differ from the threshold.

    Returns:
        The measured points, ascending.
    """
    search = _Search(lengths, measure, repeats, confidence)
    length = lengths[-1]
    while search.evaluate(length) and length > lengths[0]:
        length = lengths[max(bisect_right(lengths, length // 2) - 1, 0)]
    while True in [search.step(method) for method in METHODS]:  # alternate, because the methods share the budget
        pass
    return [search.points[length] for length in sorted(search.points)]


class _Search:
    def __init__(self, lengths, measure, repeats, confidence):
        self.lengths, self.measure = lengths, measure
        self.stages = [n for n in STAGES if n < repeats] + [repeats]
        self.level = 0.5 * (1 - confidence)  # shared by all tests, as in length_interval
        self.budget = BUDGET * input_tokens(lengths[-1])
        self.points: dict[int, CurvePoint] = {}

    def evaluate(self, length):
        """Measure more repeats of a length; return False if it already has all, or the budget does not allow more."""
        done = self.points[length].repeats if length in self.points else 0
        following = [n for n in self.stages if n > done]
        cost = 2 * (following[0] - done) * input_tokens(length) if following else 0
        if not following or cost > self.budget:
            return False
        self.budget -= cost
        self.points[length] = self.measure(length, done, following[0])
        return True

    def step(self, method):
        """Add repeats where a method needs them most; return False if nothing was added."""
        low, high = self.interval(method)
        if high - low > 1:
            return self.evaluate(self.lengths[(low + high) // 2])
        return self.narrow(method, low, -1) or self.narrow(method, high, 1)

    def interval(self, method):
        """Return grid indices of the last length that passes a non-increasing fit, and of the next measured one."""
        from scipy.optimize import isotonic_regression  # slow to import (0.5 s), and only this protocol needs it

        measured = sorted(self.points)
        values = [centre(self.points[n].margins(method), method) for n in measured]
        weights = [self.points[n].repeats * self.points[n].scored_tokens for n in measured]
        fit = isotonic_regression(values, weights=weights, increasing=False).x
        passing = sum(1 for value in fit if value > 0 or (value == 0 and method == "coarse"))
        low = self.lengths.index(measured[passing - 1]) if passing else -1
        return low, self.lengths.index(measured[passing]) if passing < len(measured) else len(self.lengths)

    def narrow(self, method, end, direction):
        """Add repeats that bring the nearest length with a significant result nearer to this end of the interval.

        Below the interval (direction -1) lengths should pass; above it (1) they should fail.
        """
        level = self.level / adaptive_tests(len(self.points), self.stages[-1], method, self.level)
        indices = sorted(map(self.lengths.index, self.points), reverse=direction < 0)
        outside = [i for i in indices if (i - end) * direction >= 0]  # measured lengths, from the end outwards
        for position, i in enumerate(outside):
            point = self.points[self.lengths[i]]
            if test_result(point.margins(method)[point.texts], point.scored_tokens, level, method) == -direction:
                middle = (i + outside[position - 1]) // 2 if position else i
                return middle not in indices and self.evaluate(self.lengths[middle])
            if self.evaluate(self.lengths[i]):
                return True
        return False
