"""The adaptive protocol: find the fine and the coarse length of a forgetting curve from few measured lengths.

The search first measures the longest length of a grid. It then halves the length repeatedly, to see the shape of the
curve. Next, it bisects between a length that passes and a length that fails, until they are neighbours on the grid.
Both neighbours get more repeats until a test places each above or below the threshold. This file does not run a model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from .intervals import STAGES, adaptive_tests, centre, test_result
from .lengths import METHODS, CurvePoint
from .protocol import input_tokens


# Maximum cost in inputs of the longest length; the reference protocol with 32 lengths costs 330
BUDGET = 64


def locate(
    lengths: Sequence[int],
    measure: Callable[[int, int, int], CurvePoint],
    *,
    repeats: int = 10,
    confidence: float = 0.95,
) -> list[CurvePoint]:
    """Measure the lengths that determine the fine and the coarse length.

    The search assumes that memory never improves as targets grow. It misses a dip between two measured lengths.

    Args:
        lengths: the grid, ascending.
        measure: function `measure(length, first, stop)`. It measures repeats `first` to `stop - 1`, and returns the
            `CurvePoint` with repeats 0 to `stop - 1`.
        repeats: maximum number of repeats per point.
        confidence: confidence level of the tests that end the search.

    Returns:
        The measured points, in ascending order of length.
    """
    search = _Search(lengths, measure, repeats, confidence)
    length = lengths[-1]
    while search.evaluate(length) and length > lengths[0]:
        length = lengths[max(bisect_right(lengths, length // 2) - 1, 0)]
    # the two methods take turns, because they share the budget
    while True in [search.step(method) for method in METHODS]:
        pass
    return [search.points[length] for length in sorted(search.points)]


class _Search:
    def __init__(self, lengths, measure, repeats, confidence):
        self.lengths, self.measure = lengths, measure
        self.stages = [n for n in STAGES if n < repeats] + [repeats]
        self.level = 0.5 * (1 - confidence)  # error rate at each end of the interval, as in `length_interval`
        self.budget = BUDGET * input_tokens(lengths[-1])
        self.points: dict[int, CurvePoint] = {}

    def evaluate(self, length):
        """Measure more repeats of a length. If all repeats are measured or the budget is used up, return False."""
        done = self.points[length].repeats if length in self.points else 0
        following = [n for n in self.stages if n > done]
        cost = 2 * (following[0] - done) * input_tokens(length) if following else 0
        if not following or cost > self.budget:
            return False
        self.budget -= cost
        self.points[length] = self.measure(length, done, following[0])
        return True

    def step(self, method):
        """Take one step of a method's search. If nothing was measured, return False.

        A step measures a new length, or adds repeats to a known length.
        """
        low, high = self.interval(method)
        if high - low > 1:
            return self.evaluate(self.lengths[(low + high) // 2])
        return self.narrow(method, low, -1) or self.narrow(method, high, 1)

    def interval(self, method):
        """Return the grid indices of the longest length that passes, and of the next measured length.

        To decide which lengths pass, we fit a non-increasing curve to the `centre` of each measured length.
        """
        from scipy.optimize import isotonic_regression  # slow to import (0.5 s), so imported only when needed

        measured = sorted(self.points)
        values = [centre(self.points[n].margins(method), method) for n in measured]
        weights = [self.points[n].repeats * self.points[n].scored_tokens for n in measured]
        fit = isotonic_regression(values, weights=weights, increasing=False).x
        passing = sum(1 for value in fit if value > 0 or (value == 0 and method == "coarse"))
        low = self.lengths.index(measured[passing - 1]) if passing else -1
        return low, self.lengths.index(measured[passing]) if passing < len(measured) else len(self.lengths)

    def narrow(self, method, end, direction):
        """Measure once at one end of the interval. If nothing was measured, return False.

        With direction -1, `end` is the lower end. This length and all shorter lengths should pass. With direction 1,
        `end` is the upper end. This length and all longer lengths should fail. Starting at `end`, we visit the
        measured lengths in this direction. If a length is not significant, we add repeats. When we reach a significant
        length, we measure a new length halfway between this length and the one visited before it.
        """
        level = self.level / adaptive_tests(len(self.points), self.stages[-1], method, self.level)
        indices = sorted(map(self.lengths.index, self.points), reverse=direction < 0)
        # measured lengths outside the interval, starting from `end`
        outside = [i for i in indices if (i - end) * direction >= 0]
        for position, i in enumerate(outside):
            point = self.points[self.lengths[i]]
            if test_result(point.margins(method)[point.texts], point.scored_tokens, level, method) == -direction:
                middle = (i + outside[position - 1]) // 2 if position else i
                return middle not in indices and self.evaluate(self.lengths[middle])
            if self.evaluate(self.lengths[i]):
                return True
        return False
