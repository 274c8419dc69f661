"""Tests of sources of irrelevant text."""

import numpy as np
import pytest
import scipy.stats

from hf_longctx.metrics.curve.points import CurvePoint
from hf_longctx.metrics.curve.sources import irrelevant_source_test
from hf_longctx.metrics.tasks.curve import ForgettingCurve


def test_irrelevant_sources():
    lm = {"books": [50, 52, 49, 51, 50], "code": [48, 51, 50, 53, 49], "random": [30, 33, 31, 29, 32]}
    curves = {
        name: ForgettingCurve.of_points([CurvePoint(100, [50] * 5, [3] * 5), CurvePoint(200, [90] * 5, counts)])
        for name, counts in lm.items()
    }
    same, different = irrelevant_source_test(curves)
    assert same == (100, 0.0, 1.0, 0.0, 1.0)
    expected = scipy.stats.f_oneway(*lm.values()), scipy.stats.kruskal(*lm.values())
    assert different == pytest.approx((200, *expected[0], *expected[1]))
    assert different.anova_p < 0.001
    alike = irrelevant_source_test([curves["books"], curves["code"]])[1]
    assert min(alike.anova_p, alike.kruskal_p) > 0.3
    with pytest.raises(ValueError, match="two or more curves"):
        irrelevant_source_test([curves["books"]])


def test_sources_without_spread():
    curves = [ForgettingCurve.of_points([CurvePoint(100, [50] * 5, [count] * 5)]) for count in (3, 4)]
    (test,) = irrelevant_source_test(curves)
    assert (test.f, test.anova_p) == (np.inf, 0.0)
    assert test.kruskal_p < 0.01
