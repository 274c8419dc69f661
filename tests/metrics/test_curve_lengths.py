"""Memory lengths read off counts, and their confidence intervals."""

import doctest
import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats

from hf_longctx.metrics.curve import lengths as core
from hf_longctx.metrics.curve.lengths import MemoryLength, length_interval, margins, verdict
from hf_longctx.metrics.curve.protocol import scored_tokens
from hf_longctx.metrics.curve.result import CurvePoint, ForgettingCurve


def test_examples_in_docstrings():
    assert doctest.testmod(core) == (0, 3)


def plain(readings):
    return {name: {"length": int(x), "open_ended": x.open_ended} for name, x in readings.items()}


def test_memory_lengths_of_made_up_curves(golden):
    cases = json.loads((golden / "forgetting_curve" / "edge_cases.json").read_text())["derived_length_cases"]
    for case in cases:
        total = 10_000
        copy, lm = ([int(Fraction(x) * total) for x in case[name]] for name in ("copy", "lm"))
        lengths = case["lengths"]
        found = core.memory_lengths(lengths, copy, lm, [total] * len(lengths), case["p_value"])
        assert plain(found) == case["expected"], case["name"]


def test_memory_lengths_of_published_llama3(golden):
    published = json.loads((golden / "forgetting_curve" / "published_llama3.json").read_text())
    lengths, copy, lm, p_values = zip(*published["rows"])
    scored = [10 * scored_tokens(n) for n in lengths]
    counts = ([round(mean * n) for mean, n in zip(means, scored)] for means in (copy, lm))
    found = core.memory_lengths(lengths, *counts, scored, p_values)
    assert plain(found) == published["derived"]
    assert found["fine_max"].next_tested == 4650


@pytest.mark.parametrize(
    "copy, next_tested",
    [([0, 0, 0, 0], 8), ([4, 0, 0, 0], 16), ([4, 0, 16, 0], 40), ([4, 8, 16, 20], None)],
    ids=["none", "first", "after-a-dip", "open"],
)
def test_next_tested(copy, next_tested):
    fine = core.memory_lengths([8, 16, 32, 40], copy, [0] * 4, [4, 8, 16, 20], [0.0] * 4)["fine_max"]
    assert fine.next_tested == next_tested
    assert fine.open_ended == (next_tested is None)


def test_memory_length_is_an_int():
    length = MemoryLength(1400, open_ended=True)
    assert length == 1400
    assert length + 1 == 1401
    assert (str(length), f"{length}", f"{length:6d}", json.dumps(length)) == (">1400", ">1400", "  1400", "1400")
    again = pickle.loads(pickle.dumps(length))
    assert (again, again.open_ended, again.next_tested) == (1400, True, None)
    assert str(MemoryLength(767, next_tested=893)) == "767"


def test_verdict_is_a_paired_t_test():
    point = CurvePoint(2000, [990, 985, 995, 980, 992], [950, 960, 955, 940, 955])
    values = margins(point.copy_correct, point.lm_correct, 1000, "coarse")
    assert np.allclose(values, [0.03, 0.015, 0.03, 0.03, 0.027])
    p = scipy.stats.ttest_1samp(values, 0, alternative="greater").pvalue
    assert verdict(values, 1000, 1.1 * p) == point.verdict("coarse", 1.1 * p) == 1
    assert verdict(values, 1000, 0.9 * p) == 0
    assert CurvePoint(2000, point.lm_correct, point.copy_correct).verdict("coarse", 0.001) == -1


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
    assert point.verdict("fine", 0.01) == expected


def step_curve(fine, lengths=(8, 100, 200, 400, 800)):
    return [CurvePoint(n, [(n + 1) // 2 if n <= fine else n // 4] * 10, [0] * 10) for n in lengths]


@pytest.mark.parametrize(
    "fine, expected", [(0, "[0, 8)"), (100, "[100, 200)"), (400, "[400, 800)"), (800, ">=800")], ids=str
)
def test_length_interval(fine, expected):
    assert str(ForgettingCurve(step_curve(fine)).interval("fine")) == expected
    assert ForgettingCurve(step_curve(fine)).interval("coarse") == (800, None)


@pytest.mark.parametrize("risk, low", [(1.1, 2000), (0.9, 0)], ids=["enough risk", "too little"])
def test_both_ends_and_all_lengths_share_the_risk(risk, low):
    """Two lengths and two ends of the interval: each one-sided test has a quarter of the risk."""
    values = np.array([0.03, 0.015, 0.03, 0.03, 0.027])
    p = scipy.stats.ttest_1samp(values, 0, alternative="greater").pvalue
    assert length_interval([1000, 2000], [values, values], [1000, 1000], confidence=1 - risk * 4 * p) == (low, None)


def test_noise_widens_the_interval():
    points = step_curve(200)
    points[2] = CurvePoint(200, [100, 100, 95, 100, 98] * 2, [0] * 10)
    assert ForgettingCurve(points).interval("fine") == (100, 400)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"reading must be one of .*'middle'"):
        margins([1], [0], 2, "middle")
    with pytest.raises(ValueError, match="between 0 and 1, got 95"):
        length_interval([], [], [], confidence=95)
