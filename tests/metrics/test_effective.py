"""Effective lengths and their intervals."""

import numpy as np
import pytest
import scipy.stats
from examples import answers

from hf_longctx.metrics import CurvePoint, ForgettingCurve, LineRetrieval, PositionLoss
from hf_longctx.metrics.report.effective import RULES, effective_length, share_limit
from hf_longctx.metrics.task import Counts
from hf_longctx.metrics.tasks.lines import LinesPoint


@pytest.mark.parametrize("right, asked, level", [(0, 5, 0.025), (5, 5, 0.001), (430, 500, 0.025), (17, 20, 0.001)])
def test_limits_of_answers_are_those_of_clopper_and_pearson(right, asked, level):
    at = Counts(1, np.arange(asked) < right, 1, 1, asked, right)
    expected = scipy.stats.binomtest(right, asked).proportion_ci(1 - 2 * level, method="exact")
    assert (share_limit(at, level, -1), share_limit(at, level, 1)) == pytest.approx(tuple(expected))


@pytest.mark.parametrize("texts", [5, 6, 21])
def test_limits_of_texts_are_those_of_the_sign_test(texts):
    """The median lies outside only where so few texts are beyond it as the level allows."""
    at = Counts(1, np.arange(texts, 0, -1) / 100, 2, 1, 100, 50)
    beyond = [k for k in range(texts + 1) if scipy.stats.binom.cdf(k, texts, 0.5) <= 0.025]
    low = 0 if texts == 5 else len(beyond) / 100
    assert share_limit(at, 0.025, -1) == low
    assert share_limit(at, 0.025, 1) == (1 if texts == 5 else pytest.approx((texts + 1 - len(beyond)) / 100))


COUNTS = [(512, 495, 500), (4096, 480, 500), (8192, 455, 500), (16384, 427, 500), (32768, 300, 500)]


def test_more_answers_say_more():
    tenth = [(n, right // 10, 50) for n, right, _ in COUNTS]
    assert effective_length(tenth).interval == "512 to below 32,768"
    assert effective_length(tenth, confidence=0.5).low == 4096
    assert effective_length(COUNTS[::-1]) == effective_length(COUNTS) == (16384, 8192, 32768, 0.85)
    assert effective_length([(512, 3, 4)]).interval == "unknown: more answers are needed"
    assert effective_length([(512, 1000, 1000), (1024, 999, 1000)]).interval == "at least 1,024"
    assert effective_length([(512, 0, 100)]).interval == "below 512"


def test_a_weak_model_has_a_low_base():
    weak = [(250, 300, 500), (1000, 250, 500), (8000, 290, 500), (64000, 100, 500)]
    assert effective_length(weak, "NoLiMa").tokens == 8000 and effective_length(weak, "RULER").tokens == 0
    assert effective_length(weak, "NoLiMa").threshold == pytest.approx(0.85 * 0.6)


def curve(*copied):
    return ForgettingCurve.of_points(
        [CurvePoint(n, [round(40 * c) for c in row], [0] * len(row)) for n, row in zip((79, 80), copied)]
    )


def test_of_a_curve_the_typical_text_is_judged():
    """One text of ten that is lost takes the mean below 85 %, and eight show nothing of two lengths."""
    found = effective_length(curve([1] * 10, [1] * 9 + [0.1]))
    assert found == (80, 80, None, 0.85)
    assert effective_length(curve([1] * 5, [1] * 5)) == (80, 0, None, 0.85)
    assert effective_length(curve([1] * 10, [0.8] * 10)) == (79, 79, 80, 0.85)


def test_lines_count_in_tokens():
    points = [LinesPoint(answers(*[True] * 40), 5, [90, 110] * 20, [0] * 40)]
    assert effective_length(LineRetrieval.of_parts(points))[:3] == (100, 100, None)


LENGTHS = (500, 1000, 2000, 4000, 8000, 16000)
MODELS = {
    "fades": (0.97, 0.95, 0.93, 0.88, 0.8, 0.6),
    "at the threshold": (0.95, 0.9, 0.85, 0.85, 0.849, 0.85),
    "dips": (0.95, 0.7, 0.7, 0.9, 0.84, 0.6),
    "weak": (0.6, 0.58, 0.55, 0.52, 0.5, 0.3),
}


@pytest.mark.parametrize(
    "model, rule",
    [("fades", "NoLiMa"), ("at the threshold", "ours"), ("dips", "RULER"), ("weak", "NoLiMa")],
)
def test_the_interval_holds_the_length(model, rule):
    """With single answers, the interval contains the length in 95 % of the tables, up to chance, for every curve."""
    rates, rng, tables = np.array(MODELS[model]), np.random.default_rng(0), 150
    threshold = RULES[rule] * (rates[:2].max() if rule == "NoLiMa" else 1)
    truth = max((n for n, rate in zip(LENGTHS, rates) if rate >= threshold), default=0)
    missed = 0
    for right in rng.binomial(100, rates, (tables, len(rates))):
        found = effective_length([(n, int(r), 100) for n, r in zip(LENGTHS, right)], rule)
        missed += not (found.low <= truth and (found.high is None or truth < found.high))
    assert missed <= scipy.stats.binom.ppf(0.99, tables, 0.05)


@pytest.mark.parametrize(
    "counts, options, message",
    [
        (COUNTS, {"rule": "HELMET"}, "rule must be one of ours, RULER, NoLiMa"),
        (COUNTS, {"confidence": 95}, "confidence must lie between 0 and 1"),
        ([], {}, "must not be empty and must have exactly one row per length"),
        ([COUNTS[0], COUNTS[0]], {}, r"exactly one row per length, got lengths \[512, 512\]"),
        ([(512, 6, 5)], {}, "got 6 correct of 5 answers at length 512"),
        ([(512, 0.9, 1)], {}, "whole numbers with"),
        ([(512, 5)], {}, r"rows of \(length, correct answers, answers\)"),
        (PositionLoss.of_mean([1.0], 2), {}, "must contain correct answers by length, got PositionLoss"),
    ],
)
def test_what_is_refused(counts, options, message):
    with pytest.raises(ValueError, match=message):
        effective_length(counts, **options)
