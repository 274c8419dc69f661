"""Does the source of the irrelevant text matter? Appendix A of the paper asks so of the LM accuracies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..tasks.curve import ForgettingCurve


class SourceTest(NamedTuple):
    """Do LM accuracies at one length differ between sources of irrelevant text? Small p-values say so.

    Attributes:
        length: tokens in the target.
        f: statistic of the one-way analysis of variance.
        anova_p: its p-value.
        h: statistic of Kruskal-Wallis, which does not assume a normal distribution.
        kruskal_p: its p-value.
    """

    length: int
    f: float
    anova_p: float
    h: float
    kruskal_p: float


def irrelevant_source_test(curves: Mapping[str, ForgettingCurve] | Sequence[ForgettingCurve]) -> list[SourceTest]:
    """Compare curves that differ in the source of their irrelevant text only (Appendix A of the paper).

    Args:
        curves: two or more, measured with different `irrelevant_text`.

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
