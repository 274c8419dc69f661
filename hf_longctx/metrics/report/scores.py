"""Counts of each length, as shares of units that are drawn independently: targets, haystacks, records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..curve.result import ForgettingCurve
from ..result import Result
from ..retrieval.haystack import NeedleGrid
from ..retrieval.lines import LineRetrieval


class Score(NamedTuple):
    """What was right at one length.

    Attributes:
        length: in tokens; of line retrieval, in lines.
        shares: of each unit, in the order in which they were drawn, (R,) float64 from 0 to 1.
        questions: in a unit: scored tokens of a target, depths of a haystack, 1 of a record.
        tokens: the length in tokens, of line retrieval the mean over records.
    """

    length: int
    shares: np.ndarray
    questions: int
    tokens: int


def by_length(result: Result, replies: bool = True, overlapping: bool = False) -> list[Score]:
    """Return the scores of a forgetting curve (copied tokens), needle or line retrieval (right answers), ascending.

    Args:
        replies: count what was found in the replies, where there are some; else what is right token for token.
        overlapping: keep the targets of a curve that share scored tokens with others.

    Raises:
        ValueError: the result is of another metric.
    """
    if isinstance(result, ForgettingCurve):
        return [
            Score(p.length, np.array(p.copy_correct)[kept] / p.scored_tokens, p.scored_tokens, p.length)
            for p in result.points
            for kept in [[*range(p.repeats)] if overlapping else p.texts]
        ]
    field = "matched" if replies else "exact"
    if isinstance(result, LineRetrieval):
        shares = ((p.lines, np.array([getattr(a, field) for a in p.answers], float)) for p in result.points)
        return [Score(*share, 1, round(p.mean_tokens)) for share, p in zip(shares, result.points)]
    if not isinstance(result, NeedleGrid):
        raise ValueError(f"a {type(result).__name__} has no scores by length; give curves, needle or line retrieval.")
    scores = []
    for length in result.lengths:
        cells = [[getattr(answer, field) for answer in c.answers] for c in result.cells if c.length == length]
        repeats = min(map(len, cells))  # all depths of a repeat are questions about one haystack
        scores.append(Score(length, np.mean([cell[:repeats] for cell in cells], axis=0), len(cells), length))
    return scores


def unit(result: Result) -> str:
    """Return the unit of `Score.length` in words."""
    return "lines" if isinstance(result, LineRetrieval) else "tokens"
