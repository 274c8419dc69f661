"""Confidence intervals of the two lengths, and tests of sources of irrelevant text."""

import doctest

import numpy as np
import pytest
import scipy.stats

from hf_longctx.metrics.curve import lengths as module
from hf_longctx.metrics.curve.lengths import irrelevant_source_test, length_interval, margins, verdict
from hf_longctx.metrics.curve.result import CurvePoint, ForgettingCurve


def test_examples_in_docstrings():
    assert doctest.testmod(module) == (0, 1)


def test_verdict_is_a_paired_t_test():
    point = CurvePoint(2000, [990, 985, 995, 980, 992], [950, 960, 955, 940, 955])
    values = margins(point, "coarse")
    assert np.allclose(values, [0.03, 0.015, 0.03, 0.03, 0.027])
    p = scipy.stats.ttest_1samp(values, 0, alternative="greater").pvalue
    assert verdict(point, "coarse", 1.1 * p) == 1
    assert verdict(point, "coarse", 0.9 * p) == 0
    assert verdict(CurvePoint(2000, point.lm_correct, point.copy_correct), "coarse", 0.001) == -1


@pytest.mark.parametrize(
    "point, expected",
    [
        (CurvePoint(8, [4] * 3, [0] * 3), 0),  # 12 tokens, all right, may come from an accuracy of 95 %
        (CurvePoint(2000, [1000] * 3, [0] * 3), 1),  # 3000 do not
        (CurvePoint(2000, [500] * 3, [0] * 3), -1),
        (CurvePoint(2000, [1000], [0]), 0),  # one repeat tells nothing
        (CurvePoint(2000, [990] * 10, [0] * 10), 0),  # exactly 99 %
    ],
    ids=["few-tokens", "many", "fails", "one-repeat", "at-the-threshold"],
)
def test_verdict_without_spread(point, expected):
    assert verdict(point, "fine", 0.01) == expected


def step_curve(fine, lengths=(8, 100, 200, 400, 800)):
    return [CurvePoint(n, [(n + 1) // 2 if n <= fine else n // 4] * 10, [0] * 10) for n in lengths]


@pytest.mark.parametrize(
    "fine, expected", [(0, "[0, 8)"), (100, "[100, 200)"), (400, "[400, 800)"), (800, ">=800")], ids=str
)
def test_length_interval(fine, expected):
    assert str(length_interval(step_curve(fine), "fine")) == expected
    assert length_interval(step_curve(fine), "coarse") == (800, None)


def test_noise_widens_the_interval():
    points = step_curve(200)
    points[2] = CurvePoint(200, [100, 100, 95, 100, 98] * 2, [0] * 10)
    assert length_interval(points, "fine") == (100, 400)
    assert ForgettingCurve(points).interval("fine") == (100, 400)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"reading must be one of .*'middle'"):
        length_interval([], "middle")
    with pytest.raises(ValueError, match="between 0 and 1, got 95"):
        length_interval([], "fine", confidence=95)


def test_irrelevant_sources():
    lm = {"books": [50, 52, 49, 51, 50], "code": [48, 51, 50, 53, 49], "random": [30, 33, 31, 29, 32]}
    curves = {
        name: ForgettingCurve([CurvePoint(100, [50] * 5, [3] * 5), CurvePoint(200, [90] * 5, counts)])
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
    curves = [ForgettingCurve([CurvePoint(100, [50] * 5, [count] * 5)]) for count in (3, 4)]
    (test,) = irrelevant_source_test(curves)
    assert (test.f, test.anova_p) == (np.inf, 0.0)
    assert test.kruskal_p < 0.01
