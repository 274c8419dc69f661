"""Paired tests of two models on the same texts."""

import numpy as np
import pytest
import scipy.stats
from examples import answers, lines

from hf_longctx.metrics import CurvePoint, ForgettingCurve, NeedleGrid, PositionLoss
from hf_longctx.metrics.report.paired import (
    conclusion,
    flip_interval,
    flip_test,
    holm,
    interval,
    p_values,
    paired_differences,
)
from hf_longctx.metrics.tasks.needle import NeedleCell


@pytest.mark.parametrize("pairs", [2, 10])
def test_sign_flips_are_those_of_scipy(pairs):
    differences = np.random.default_rng(pairs).integers(-9, 20, (5, pairs)) / 32
    test = scipy.stats.permutation_test
    options = dict(permutation_type="samples", n_resamples=np.inf, vectorized=False, alternative="two-sided")
    expected = [test((d, np.zeros(pairs)), lambda a, b: (a - b).mean(), **options).pvalue for d in differences]
    assert flip_test(differences) == pytest.approx(expected)


@pytest.mark.parametrize("pairs", [7, 40])
def test_the_t_test_is_that_of_scipy_where_it_is_the_stricter(pairs):
    """With long texts, a single token does not count. A t test treats the outlier as spread."""
    one, other = np.sort(np.random.default_rng(pairs).normal(0.5, 0.01, (2, pairs)), axis=0)
    other[0] += 1
    expected = scipy.stats.ttest_rel(other, one)
    assert p_values(other - one, 1e-9) == pytest.approx(max(expected.pvalue, flip_test(other - one)))
    assert expected.pvalue > flip_test(other - one)
    low, high = interval(other - one, 1e-9)
    t_low, t_high = expected.confidence_interval(0.95)
    flip_low, flip_high = flip_interval(other - one)
    assert (low, high) == pytest.approx((min(t_low, flip_low), max(t_high, flip_high)))


@pytest.mark.parametrize("pairs, least", [(5, 2 / 32), (6, 2 / 64)])
def test_few_pairs_show_little(pairs, least):
    """This also holds for equal differences, for which a t test assumes a spread of 0."""
    assert p_values(np.full(pairs, 0.3), 1e-3) >= least
    assert interval(np.full(pairs, 0.3), 1e-3)[0] == (-np.inf if pairs < 6 else pytest.approx(0.3, abs=1e-2))


def test_the_interval_of_sign_flips_is_the_test_turned_round():
    differences = np.random.default_rng(3).normal(0, 1, 9)
    low, high = flip_interval(differences)
    inside, outside = flip_test(differences - [[low + 1e-6], [high - 1e-6]]), flip_test(differences - [[low], [high]])
    assert (inside > 0.05).all() and (flip_test(differences - [[low - 1e-6], [high + 1e-6]]) <= 0.05).all()
    assert (outside >= 0.04).all()


# Simulations ---------------------------------------------------------------------------------------------------------

LENGTHS = np.linspace(100, 1600, 8).astype(int)


def alike(errors, scored, size, rng):
    """Counts of two models that do not differ, on texts that are hard for both or for neither."""
    if errors == "texts copied wholly or not":
        return np.where(rng.random((2, *size)) < 0.5, scored, rng.binomial(scored, 0.3, (2, *size)))
    return rng.binomial(scored, np.broadcast_to(rng.beta(2, 2, size), (2, *size)))


@pytest.mark.parametrize(
    "errors, repeats",
    [("hard texts", 20), ("texts copied wholly or not", 3), ("texts copied wholly or not", 10)],
)
def test_one_wrong_claim_in_twenty(errors, repeats):
    """Over all lengths and their mean: at most 5 % of pairs of models that do not differ, and the luck of the draw."""
    pairs, rng = 150, np.random.default_rng(0)
    differences = []
    for scored in LENGTHS // 2:
        one, other = alike(errors, scored, (pairs, repeats), rng)
        differences.append((other - one) / scored)
    p = [p_values(d, 2 / n) for d, n in zip(differences, LENGTHS)]
    p.append(p_values(np.concatenate(differences, axis=-1), 2 / LENGTHS[0]))
    wrong = (holm(np.stack(p, axis=-1)) <= 0.05).any(-1).sum()
    assert wrong <= scipy.stats.binom.ppf(0.99, pairs, 0.05)


# Results -------------------------------------------------------------------------------------------------------------

ORDER = {"data_type": "order", "corpus_sha256": "ab", "protocol": "reference"}
RANDOM = {"data_type": "random", "seed": 0, "repeats": 12, "lengths": [400, 800, 1600], "id_range": [10, 99]}


def curve(*counts, settings=ORDER, lengths=(400, 800, 1600), begins=0):
    points = [
        CurvePoint(
            n,
            c,
            [0] * len(c),
            None if settings.get("data_type") == "random" else range(begins, begins + n * len(c), n),
        )
        for n, c in zip(lengths, counts)
    ]
    return ForgettingCurve.of_points(points, settings)


RNG = np.random.default_rng(0)
SHORT, LONG = (
    [[int(n * share / 2) - lost for lost in RNG.integers(0, 2, 12)] for n, share in zip((400, 800, 1600), shares)]
    for shares in ((1, 0.4, 0.1), (1, 1, 0.5))
)


def test_curves_on_the_same_targets():
    short, long = curve(*SHORT), curve(*LONG)
    rows = paired_differences(short, long)
    assert [(d.length, d.pairs) for d in rows] == [(400, 12), (800, 12), (1600, 12), (None, 36)]
    expected = scipy.stats.ttest_rel(LONG[0], SHORT[0])
    assert rows[0].p >= expected.pvalue and not rows[0].significant
    assert rows[1].second - rows[1].first == pytest.approx(np.subtract(LONG[1], SHORT[1]).mean() / 400)
    assert rows[1].low < 0.6 < rows[1].high and rows[1].significant and rows[2].significant and rows[3].significant
    assert rows[3].second == pytest.approx(np.mean([d.second for d in rows[:3]]))
    words = conclusion("a", "b", short, long, rows)
    assert words.endswith("b copies more than a at 2 of 3 lengths, 800 to 1,600 tokens, significant.")
    assert words.startswith("b copies further than a: its fine length is larger, significant. ")
    back = paired_differences(long, short)
    assert [d.p for d in back] == [d.p for d in rows]
    assert [d.low for d in back] == pytest.approx([-d.high for d in rows])
    assert "a copies more than b" not in words and "b copies more" in conclusion("b", "a", long, short, back)


def test_too_few_repeats_say_so():
    short, long = (curve(*(c[:3] for c in counts)) for counts in (SHORT[:2], LONG[:2]))
    rows = paired_differences(short, long)
    assert not any(d.significant for d in rows[:2]) and rows[1].low == -np.inf
    same = conclusion("a", "b", short, short, paired_differences(short, short))
    assert same == "No difference between a and b is significant; 7 repeats are needed to show one at a single length."


def test_the_pairs_are_those_that_both_have():
    rows = paired_differences(curve(*SHORT), curve(LONG[0][:8], LONG[1], lengths=(400, 1600)))
    assert [(d.length, d.pairs) for d in rows] == [(400, 8), (1600, 12), (None, 20)]


def needle(right, settings=None, position=3):
    """Two depths of as many haystacks as there are columns."""
    cells = [
        NeedleCell(answers(*map(bool, row)), 500, depth, [position] * len(row)) for depth, row in zip((0, 1), right)
    ]
    return NeedleGrid.of_parts(cells, {"mode": "easy", "seed": 0, "repeats": len(right[0])} | (settings or {}))


def test_the_depths_of_a_haystack_are_one_observation():
    (row,) = paired_differences(needle(np.zeros((2, 8))), needle([[1] * 8, [1] * 4 + [0] * 4]))
    assert (row.first, row.second, row.pairs) == (0, 0.75, 8) and row.p == pytest.approx(2 / 2**8)


@pytest.mark.parametrize(
    "one, other, message",
    [
        (curve(*SHORT), lines([True]), "must be from one metric, got forgetting_curve and lines"),
        (curve(*SHORT), curve(*LONG, settings=ORDER | {"corpus_sha256": "cd"}), "they differ in corpus_sha256"),
        (curve(*SHORT, settings={}), curve(*LONG, settings={}), "a corpus without a hash may be a different corpus"),
        (curve(*SHORT), curve(*LONG, begins=1), "the samples of length 400 are not the same"),
        (curve(*SHORT), curve(LONG[0], lengths=(16384,)), "do not have a common length"),
        (curve(*SHORT), curve(*LONG, settings=ORDER | {"protocol": "adaptive"}), "with the reference protocol"),
        (curve(*SHORT, settings=RANDOM), curve(*LONG, settings=RANDOM | {"seed": 1}), "they differ in seed"),
        (curve(*SHORT, settings=RANDOM), curve(*LONG), "they differ in data_type"),
        (
            curve(*SHORT, settings=RANDOM | {"tokenizer": "model", "tokenizer_sha256": "12"}),
            curve(*LONG, settings=RANDOM | {"tokenizer": "model", "tokenizer_sha256": "34"}),
            "the same random ids are different tokens",
        ),
        (
            curve(*SHORT, settings=RANDOM | {"tokenizer": "model"}),
            curve(*LONG, settings=RANDOM | {"tokenizer": "model"}),
            "the same random ids are different tokens",
        ),
        (lines([True] * 8), lines([True] * 8, asked=2), "the samples of length 5 are not the same"),
        (needle([[1]]), needle([[1]], {"pieces_sha256": "cd"}), "they differ in pieces_sha256"),
        (needle([[1]]), needle([[1]], position=4), "the samples of length 500 are not the same"),
        (PositionLoss.of_mean([1.0], 2), PositionLoss.of_mean([2.0], 2), "keep the mean over sequences only"),
    ],
)
def test_what_did_not_get_the_same_texts_is_not_paired(one, other, message):
    with pytest.raises(ValueError, match=message):
        paired_differences(one, other)


def test_random_data_are_the_same_by_their_settings():
    assert len(paired_differences(curve(*SHORT, settings=RANDOM), curve(*LONG, settings=RANDOM))) == 4
