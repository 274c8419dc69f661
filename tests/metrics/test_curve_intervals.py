"""Confidence intervals of the memory lengths, on made-up counts."""

import numpy as np
import pytest
import scipy.stats
from examples import step_curve

from hf_longctx.metrics.curve.intervals import length_interval, p_values
from hf_longctx.metrics.curve.intervals import test_result as t_test
from hf_longctx.metrics.curve.lengths import CurvePoint, margins
from hf_longctx.metrics.tasks.curve import ForgettingCurve


def shown(point, method, level):
    return t_test(point.margins(method), point.scored_tokens, level, method)


def test_the_test_result_is_a_paired_t_test():
    point = CurvePoint(2000, [990, 985, 995, 980, 992], [950, 960, 955, 940, 955])
    values = margins(point.copy_correct, point.lm_correct, 1000, "coarse")
    assert np.allclose(values, [0.03, 0.015, 0.03, 0.03, 0.027])
    p = scipy.stats.ttest_1samp(values, 0, alternative="greater").pvalue
    assert shown(point, "coarse", 1.1 * p) == 1 and shown(point, "coarse", 0.9 * p) == 0
    assert shown(CurvePoint(2000, point.lm_correct, point.copy_correct), "coarse", 0.001) == -1


@pytest.mark.parametrize(
    "point, expected",
    [
        (CurvePoint(8, [2] * 3, [2] * 3), 0),  # 12 tokens that are guessed as well
        (CurvePoint(2000, [500] * 3, [0] * 3), 1),
        (CurvePoint(2000, [500] * 3, [500] * 3), -1),
        (CurvePoint(2000, [500], [0]), 0),  # one repeat gives no interval
        (CurvePoint(2000, [510] * 10, [500] * 10), 0),  # exactly 1 % better
    ],
    ids=["few-tokens", "many", "fails", "one-repeat", "at-the-threshold"],
)
def test_result_without_spread(point, expected):
    assert shown(point, "coarse", 0.01) == expected


@pytest.mark.parametrize("good, bad", [(6, 0), (9, 1), (1, 7), (14, 6)])
def test_the_fine_length_is_a_sign_test_of_texts(good, bad):
    """A text counts as a whole, however many of its tokens are right; 99 % exactly is not above 99 %."""
    point = CurvePoint(2000, [991, 1000] * (good // 2) + [991] * (good % 2) + [990] * bad, [0] * (good + bad))
    side = 1 if good > bad else -1
    p = scipy.stats.binomtest(max(good, bad), good + bad, alternative="greater").pvalue
    assert (point.copied, point.copy_worst) == (good, 0.99 if bad else 0.991)
    assert shown(point, "fine", 1.01 * p) == side and shown(point, "fine", 0.99 * p) == 0


def test_six_perfect_texts_of_one_length_suffice_and_five_do_not():
    """This also holds with other lengths, which share the risk."""
    lower = {n: step_curve(100, lengths=(100, 8000), repeats=n).interval("fine").low for n in (5, 6)}
    assert lower == {5: 0, 6: 100}
    assert "; 6 repeats are needed for a lower end of the fine length" in step_curve(100, repeats=5).summary()
    assert "repeats are needed" not in step_curve(100, repeats=6).summary()


def test_a_few_texts_that_are_not_copied_do_not_hide_behind_the_others():
    """Ten perfect texts show no mean above 99 %, as 3 of 100 may be lost; and the typical text is what is claimed."""
    curve = step_curve(800)
    assert curve.interval("fine").low == 800 and "above 99 %; 95 % CI: at least 800)" in curve.summary()
    lost = ForgettingCurve.of_points([CurvePoint(800, [400] * 9 + [100], [0] * 10)])
    assert lost.interval("fine").low == 800 and lost.fine_length == 0
    assert lost.table().rows[0][2:5] == ("9 of 10", "25.0%", "92.5%")


@pytest.mark.parametrize("protocol", ["reference", "adaptive"])
@pytest.mark.parametrize("fine, expected", [(0, "below 100"), (400, "400 to 600"), (800, "at least 800")], ids=str)
def test_a_step_is_located(fine, expected, protocol):
    curve = step_curve(fine, protocol=protocol)
    assert str(curve.interval("fine")) == expected
    assert curve.interval("coarse") == (800, None, True, False)


@pytest.mark.parametrize("risk, expected", [(1.1, (1000, None)), (0.9, (0, None))], ids=["enough risk", "too little"])
def test_the_two_ends_share_the_risk(risk, expected):
    """One length has one window, so each one-sided test has half of the risk."""
    values = np.array([0.03, 0.015, 0.03, 0.03, 0.027])
    p = scipy.stats.ttest_1samp(values, 0, alternative="greater").pvalue
    assert length_interval([1000], [values], [1000], "coarse", confidence=1 - risk * 2 * p)[:2] == expected


@pytest.mark.parametrize("risk, low", [(1.1, 2000), (0.9, 0)], ids=["enough risk", "too little"])
def test_lengths_and_looks_of_an_adaptive_curve_share_the_risk(risk, low):
    """Two ends of two lengths, looked at four times."""
    values = np.array([0.03, 0.015, 0.03, 0.03, 0.027])
    p = scipy.stats.ttest_1samp(values, 0, alternative="greater").pvalue
    options = dict(confidence=1 - risk * 16 * p, protocol="adaptive")
    assert length_interval([1000, 2000], [values, values], [1000, 1000], "coarse", **options)[:2] == (low, None)


def test_a_window_is_tested_by_its_targets():
    """The p value equals that of a t test with a cluster-robust standard error (CR1), written in full here."""
    rng = np.random.default_rng(0)
    scored, values = [50, 100], [rng.normal(0.05, 0.04, 5), rng.normal(0.02, 0.03, 7)]

    def p(surplus, tokens):
        samples, mean = len(tokens), surplus.sum() / tokens.sum()
        error = np.sqrt(samples / (samples - 1) * ((surplus - mean * tokens) ** 2).sum() + 1) / tokens.sum()
        return scipy.stats.t.sf(mean / error, samples - 1)

    surplus, tokens = np.concatenate([values[0] * 50, values[1] * 100]), np.repeat([50, 100], [5, 7])
    expected = [min(p(surplus[:5], tokens[:5]), p(surplus, tokens)), p(surplus[5:], tokens[5:])]
    assert p_values(values, scored, 1, "coarse") == pytest.approx(2 * np.array(expected))


def test_a_length_that_fails_ends_what_is_sure_below():
    """200 tokens fail. Longer passages that pass do not show that memory reaches 200, because memory fades."""
    accuracies = {100: 1, 200: 0.5, 400: 1, 600: 1, 800: 0}
    points = [CurvePoint(n, [int(n // 2 * share)] * 10, [0] * 10) for n, share in accuracies.items()]
    curve = ForgettingCurve.of_points(points)
    assert curve.interval("fine").low == 100
    assert "up to 100 tokens word for word (accuracy above 99 %; 95 % CI: 100 to 800). Measured" in curve.summary()
