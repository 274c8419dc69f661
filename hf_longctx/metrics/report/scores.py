"""Counts of each length, as shares of units that are drawn independently: targets, haystacks, records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..result import Result
from ..tasks.curve import ForgettingCurve
from ..tasks.lines import LineRetrieval
from ..tasks.needle import NeedleGrid


class Score(NamedTuple):
    """What was right at one length.

    Attributes:
        length: in tokens; of line retrieval, in lines.
        shares: of each unit, in the order in which they were drawn, (R,) float64 from 0 to 1.
        questions: in a unit, at most: scored tokens of a target, questions about a haystack, facts of a prompt, 1 of a
            record.
        tokens: the length in tokens, of line retrieval the mean over records.
        asked, right: questions in all units, and how many of them are answered right.
    """

    length: int
    shares: np.ndarray
    questions: int
    tokens: int
    asked: int
    right: float


def by_length(result: Result, replies: bool = True, overlapping: bool = False) -> list[Score]:
    """Return the scores of a forgetting curve (copied tokens), needle or line retrieval (right answers), ascending.

    Args:
        replies: count what was found in the replies, where there are some; else what is right token for token.
        overlapping: keep the targets of a curve that share scored tokens with others.

    Raises:
        ValueError: the result is of another metric.
    """
    if isinstance(result, ForgettingCurve):
        scores = []
        for p in result.points:
            right = np.array(p.copy_correct)[[*range(p.repeats)] if overlapping else p.texts]
            asked = len(right) * p.scored_tokens
            scores.append(Score(p.length, right / p.scored_tokens, p.scored_tokens, p.length, asked, right.sum()))
        return scores
    field = "matched" if replies else "exact"
    if isinstance(result, LineRetrieval):
        scores = []
        for p in result.points:
            right = np.array([getattr(a, field) for a in p.answers], float)
            scores.append(Score(p.lines, right, 1, round(p.mean_tokens), len(right), right.sum()))
        return scores
    if not isinstance(result, NeedleGrid):
        raise ValueError(f"a {type(result).__name__} has no scores by length; give curves, needle or line retrieval.")
    scores = []
    for length in result.lengths:
        units = [[getattr(answer, field) for answer in answers] for answers in result.haystacks(length).values()]
        sizes, right = [len(unit) for unit in units], sum(map(sum, units))
        scores.append(Score(length, np.array([*map(np.mean, units)]), max(sizes), length, sum(sizes), right))
    return scores


def unit(result: Result) -> str:
    """Return the unit of `Score.length` in words."""
    return "lines" if isinstance(result, LineRetrieval) else "tokens"
