"""How sure the lengths read off a forgetting curve are, and whether the source of the irrelevant text matters.

A length passes as fine if its copy accuracy is above 99 %, as coarse if that is at least 1 % above its LM accuracy. Both
are statements about a mean over targets, so each has a t test over the repeats; the coarse one is paired, as copy and
LM input have the same target. This file knows no model: it needs numpy and scipy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import stdtr


if TYPE_CHECKING:
    from .result import CurvePoint, ForgettingCurve


READINGS = ("fine", "coarse")


def margins(point: CurvePoint, reading: str) -> np.ndarray:
    """By how much each repeat is above the threshold of a reading, as a share of the scored tokens; (R,) float64."""
    copy, lm = (np.array(counts) / point.scored_tokens for counts in (point.copy_correct, point.lm_correct))
    return copy - 0.99 if reading == "fine" else copy - lm - 0.01


def verdict(point: CurvePoint, reading: str, level: float) -> int:
    """1 if the point passes for sure, -1 if it fails for sure, 0 if either may be: one-sided t tests at this level.

    The standard error is not taken to be below one token in all that were scored: three repeats of four tokens, all
    right, do not show an accuracy above 99 %.
    """
    values = margins(point, reading)
    if len(values) < 2:
        return 0
    error = np.hypot(values.std(ddof=1) / len(values) ** 0.5, 1 / (len(values) * point.scored_tokens))
    return int(np.sign(values.mean())) if stdtr(len(values) - 1, -abs(values.mean()) / error) < level else 0


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


def length_interval(points: Sequence[CurvePoint], reading: str, *, confidence: float = 0.95) -> LengthInterval:
    """Confidence interval of the fine or coarse length, if memory only fades as targets grow.

    The two ends share the risk 1 - confidence, and each divides its half among all points (Bonferroni), so that
    a long flat tail, of which some point is always lucky, does not widen the risk. Conservative.

    Args:
        points: of a curve, ascending.
        reading: "fine" or "coarse".
    """
    if reading not in READINGS:
        raise ValueError(f"reading must be one of {READINGS}, got {reading!r}.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}.")
    level = (1 - confidence) / (2 * max(len(points), 1))
    verdicts = {point.length: verdict(point, reading, level) for point in points}
    low = max((length for length, v in verdicts.items() if v > 0), default=0)
    return LengthInterval(low, min((length for length, v in verdicts.items() if v < 0 and length > low), default=None))


class SourceTest(NamedTuple):
    """Do LM accuracies at one length differ between sources of irrelevant text? Small p-values say so.

    Attributes:
        length: tokens in the target.
        f, anova_p: one-way analysis of variance.
        h, kruskal_p: Kruskal-Wallis, which asks for no normal distribution.
    """

    length: int
    f: float
    anova_p: float
    h: float
    kruskal_p: float


def irrelevant_source_test(curves: Mapping[str, ForgettingCurve] | Sequence[ForgettingCurve]) -> list[SourceTest]:
    """Compare curves that differ in the source of their irrelevant text only (Appendix A of the paper).

    Args:
        curves: two or more, measured with different `irrelevant_tokens`.

    Returns:
        One test for each length that all of them have.

    Raises:
        ValueError: fewer than two curves, no common length, or fewer than two repeats.
    """
    from scipy.stats import f_oneway, kruskal

    curves = list(curves.values() if isinstance(curves, Mapping) else curves)
    groups = [{p.length: np.array(p.lm_correct) / p.scored_tokens for p in curve.points} for curve in curves]
    common = sorted(set.intersection(*map(set, groups))) if groups else []
    if len(curves) < 2 or not common or any(len(group[n]) < 2 for group in groups for n in common):
        raise ValueError(
            f"comparing sources needs two or more curves with common lengths and at least two repeats; got "
            f"{len(curves)} with {len(common)} common lengths."
        )
    tests = []
    for length in common:
        values = [group[length] for group in groups]
        if len(np.unique(np.concatenate(values))) == 1:  # the tests divide by a variance
            tests.append(SourceTest(length, 0.0, 1.0, 0.0, 1.0))
            continue
        spread = any(np.ptp(v) for v in values)
        f, anova_p = f_oneway(*values) if spread else (np.inf, 0.0)
        tests.append(SourceTest(length, float(f), float(anova_p), *map(float, kruskal(*values))))
    return tests
