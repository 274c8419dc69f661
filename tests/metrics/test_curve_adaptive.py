"""Adaptive placement of points on recorded and made-up curves: no model runs here."""

import numpy as np
import pytest

from hf_longctx.metrics.curve.adaptive import locate
from hf_longctx.metrics.curve.lengths import CurvePoint
from hf_longctx.metrics.curve.protocol import input_tokens, linear_lengths
from hf_longctx.metrics.tasks.curve import ForgettingCurve


GRID = linear_lengths(1400, 32)
ADAPTIVE = {"protocol": "adaptive"}


def run(points, **options):
    """Locate on a full curve; returns the adaptive curve and the tokens it reads."""
    full, calls = {p.length: p for p in points}, []

    def measure(length, first, stop):
        calls.append((length, first, stop))
        return full[length].first(stop)

    curve = ForgettingCurve.of_points(locate(list(full), measure, **options), ADAPTIVE)
    assert len(calls) == len(set(calls))  # nothing twice
    return curve, sum(2 * (stop - first) * input_tokens(length) for length, first, stop in calls)


def simulate(rng, fine, steepness, tail):
    """10 repeats at each length. Copy accuracy falls around `fine` to the LM accuracy, 12 %, and `tail` more."""
    points, truth = [], {"fine": 0, "coarse": 0}
    for n in GRID:
        scored = (n + 1) // 2
        remembered = 1 / (1 + np.exp(np.log(n / fine) / steepness - 3))
        accuracy = 0.12 + tail + (0.879 - tail) * remembered
        truth |= {"fine": n} if accuracy > 0.99 else {}
        truth |= {"coarse": n} if accuracy >= 0.13 else {}
        lm = rng.binomial(scored, rng.beta(0.12 * 30, 0.88 * 30, 10))
        copy = rng.binomial(scored, rng.beta(accuracy * 200, (1 - accuracy) * 200, 10))
        shared = ((lm / scored - 0.12) * scored * (1 - remembered)).astype(int)  # a text easy to guess is so in both
        points.append(CurvePoint(n, np.clip(copy + shared, 0, scored).tolist(), lm.tolist()))
    return points, truth


CURVES = {"slow": (200, 0.4, 0), "tail-just-coarse": (150, 0.2, 0.012), "remembers-all": (9000, 0.1, 0)}
# Share of the full cost that half of the runs stay below; where memory ends clearly, less than the budget of a fifth.
SPENT = {"slow": 0.1, "remembers-all": 0.08}


@pytest.mark.parametrize("name", CURVES)
def test_simulated_curves(name):
    """The cost is at most a fifth. The interval covers the truth, and is hardly wider than with all points.

    Both by the tests of single lengths; the windows of the reference protocol need all points.
    """
    full_cost = sum(20 * input_tokens(n) for n in GRID)
    covered, widths, costs = 0, {"fine": [], "coarse": []}, []
    for seed in range(20):
        points, truth = simulate(np.random.default_rng(seed), *CURVES[name])
        curve, cost = run(points)
        assert 5 * cost <= full_cost
        costs.append(cost)
        for method in ("fine", "coarse"):
            intervals = [c.interval(method) for c in (curve, ForgettingCurve.of_points(points, ADAPTIVE))]
            ends = [(i.low, 1450 if i.high is None else i.high) for i in intervals]
            covered += ends[0][0] <= truth[method] < ends[0][1]
            widths[method].append([high - low for low, high in ends])
    assert covered >= 0.95 * 40
    for method in widths:
        adaptive, full = np.median(widths[method], axis=0)
        assert adaptive <= 1.75 * full
    assert np.median(costs) <= SPENT.get(name, 0.2) * full_cost


def test_few_repeats():
    points, _ = simulate(np.random.default_rng(0), *CURVES["slow"])
    curve, _ = run(points, repeats=2)
    assert {p.repeats for p in curve.points} == {2}
    curve, _ = run(points[:1])
    assert [p.length for p in curve.points] == [8]


@pytest.mark.parametrize("step", [8, 188, 1310])
def test_bisection_leads_to_the_neighbours_of_a_step(step):
    """Exact copies up to `step` tokens and none beyond: the two lengths around the step are measured, most are not."""
    full = [CurvePoint(n, [(n + 1) // 2 if n <= step else 0] * 10, [0] * 10) for n in GRID]
    curve, _ = run(full)
    below, above = max(n for n in GRID if n <= step), min(n for n in GRID if n > step)
    assert {below, above} <= {p.length for p in curve.points}
    assert (curve.fine_length, curve.fine_length.next_tested) == (below, above)
    assert len(curve.points) <= 14


def test_a_dip_by_chance_does_not_mislead_the_bisection():
    """322 tokens fail and 681 pass: the fit never rises and weighs tokens, so that both pass, and 726 comes next."""
    full = {n: CurvePoint(n, [(n + 1) // 2 if n <= 681 else 0] * 10, [0] * 10) for n in GRID}
    full[322] = CurvePoint(322, [157] * 10, [0] * 10)  # 97.5 % of 161
    curve, _ = run(list(full.values()))
    lengths = [p.length for p in curve.points]
    assert lengths[lengths.index(322) - 1 :][:4] == [142, 322, 681, 726]  # no look between those that pass
