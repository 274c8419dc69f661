"""Simulate models of known fine and coarse length, and count how often the intervals of a curve contain them.

    python -m scripts.evidence.curve_coverage [--curves 1000] [--adaptive 80]

The models copy each token at random, with one accuracy for all passages or one that differs between passages
(beta-binomial, correlation rho), or copy a passage completely or not at all (q is the share copied; the others are
guessed). The package's statistical tests are applied to the counts; no language model runs. The true fine length is
the last at which more than half of all passages are copied above 99 %. The true coarse length is the last at which the
mean copy accuracy is at least 1 percentage point above guessing. The last column reports how often the paper's
definition exceeds the true coarse length.
"""

from functools import partial

import numpy as np
from scipy import stats

from hf_longctx.metrics import CurvePoint, ForgettingCurve, linear_lengths
from hf_longctx.metrics.curve.adaptive import locate
from hf_longctx.metrics.curve.intervals import p_values, rejected
from hf_longctx.metrics.curve.lengths import METHODS, margins
from hf_longctx.metrics.curve.protocol import scored_tokens
from scripts.bench import common


GUESSED = 0.3  # LM accuracy of all models


def until(length, before, after):
    return lambda n: before if n <= length else after


# name: (accuracy or share of passages by length, rho; None: passages are copied completely or not at all)
MODELS = {
    "no memory": (lambda n: GUESSED, 0),
    "no memory, rho .03": (lambda n: GUESSED, 0.03),
    "no memory, rho .10": (lambda n: GUESSED, 0.1),
    "1 to 963 tokens, then guessing, rho .05": (until(963, 1, GUESSED), 0.05),
    ".998 to 963, then .98, rho .02": (until(963, 0.998, 0.98), 0.02),
    ".991 to 963, then .989": (until(963, 0.991, 0.989), 0),
    ".991 to 963, then .989, rho .05": (until(963, 0.991, 0.989), 0.05),
    ".985, rho .2": (lambda n: 0.985, 0.2),
    "fades evenly to 1200, rho .03": (lambda n: max(GUESSED, 1 - 0.7 * n / 1200), 0.03),
    "q 1 to 500, then .97": (until(500, 1, 0.97), None),
    "q 1 to 500, then .90": (until(500, 1, 0.9), None),
    "q 1 to 500, then .70": (until(500, 1, 0.7), None),
    "q 1 to 500, then .50": (until(500, 1, 0.5), None),
    "q .97": (lambda n: 0.97, None),
    "q 1 - n/1600": (lambda n: max(0, 1 - n / 1600), None),
    "q 1 - n/16000": (lambda n: max(0, 1 - n / 16000), None),
    ".97 to 114, then 1": (until(114, 0.97, 1), 0),
}
GRIDS = {
    "16 lengths to 1600": linear_lengths(1600, 16),
    "8 lengths to 8192": [64 * 2**i for i in range(8)],
    "3 lengths to 384": [64, 192, 384],
}
ADAPTIVE = "adaptive, 32 lengths to 1600"
TABLE = """
| lengths | fine, 3 repeats | 5 | 10 | 20 | coarse, 3 repeats | 5 | 10 | 20 | paper's coarse length too long |
| {grid} | {fine3} | {fine5} | {fine10} | {fine20} | {coarse3} | {coarse5} | {coarse10} | {coarse20} | {paper} |
"""


def spread(rng, accuracy, rho, shape):
    """Draw accuracies of passages with this mean and correlation of tokens, in an array of this shape."""
    if not rho or accuracy in (0, 1):
        return np.full(shape, accuracy)
    return rng.beta(accuracy * (1 / rho - 1), (1 - accuracy) * (1 / rho - 1), shape)


def draw(rng, model, length, shape):
    """Draw copy and LM counts of passages of one length, each an array of integers of this shape."""
    at, rho = model
    scored = scored_tokens(length)
    guess = rng.binomial(scored, spread(rng, GUESSED, rho, shape))
    if rho is not None:
        return rng.binomial(scored, spread(rng, at(length), rho, shape)), guess
    copied = rng.random(shape) < at(length)
    return np.where(copied, scored, rng.binomial(scored, GUESSED, shape)), guess


def passes(model, length, method):
    """Return whether a length passes, by exact probabilities."""
    (at, rho), scored = model, scored_tokens(length)
    share, below = at(length), (99 * scored) // 100  # the largest token count not above 99 %
    if method == "coarse":
        return (share if rho is not None else share + (1 - share) * GUESSED) >= GUESSED + 0.01 - 1e-12
    if rho is None:
        return share + (1 - share) * stats.binom.sf(below, scored, GUESSED) > 0.5
    if not rho or share == 1:
        return stats.binom.sf(below, scored, share) > 0.5
    return stats.betabinom.sf(below, scored, share * (1 / rho - 1), (1 - share) * (1 / rho - 1)) > 0.5


def truth(model, lengths, method):
    """Return the number of lengths up to the last one that passes."""
    return max((i for i, n in enumerate(lengths, start=1) if passes(model, n, method)), default=0)


def fixed(rng, model, lengths, repeats, curves):
    """Yield each method's number of lengths reached: lower bound, upper bound, and the paper's."""
    counts = [draw(rng, model, n, (curves, repeats)) for n in lengths]
    scored = [scored_tokens(n) for n in lengths]
    for method in METHODS:
        values = [margins(copy, lm, n, method) for (copy, lm), n in zip(counts, scored)]
        low = rejected(p_values(values, scored, 1, method), 0.025)
        ended = rejected(p_values(values, scored, -1, method)[..., ::-1], 0.025)
        passing = np.stack([value.mean(-1) > (0 if method == "fine" else -1e-12) for value in values])
        paper = (passing * np.arange(1, 1 + len(lengths))[:, None]).max(0)
        yield method, low, np.maximum(len(lengths) - ended, low), paper


def more_repeats(rng, model, counts, length, first, stop):
    """Draw the repeats from `first` to `stop` - 1 into `counts`, and return the point of all of them."""
    counts[length] = np.hstack([counts[length], np.stack(draw(rng, model, length, stop - first))])
    return CurvePoint(length, *counts[length].tolist())


def adaptive(rng, model, lengths, repeats, curves):
    """Yield the same as `fixed`, for curves of the adaptive protocol."""
    ends = {method: [] for method in METHODS}
    for _ in range(curves):
        counts = {n: np.empty((2, 0), dtype=int) for n in lengths}
        points = locate(lengths, partial(more_repeats, rng, model, counts), repeats=repeats)
        curve = ForgettingCurve.of_points(points, {"protocol": "adaptive"})
        places = {0: 0, None: len(lengths)} | {n: i for i, n in enumerate(lengths, start=1)}
        for method in METHODS:
            low, high = curve.interval(method)[:2]
            end = places[high] - (high is not None)  # lengths below `high`
            ends[method].append((places[low], end, places[int(getattr(curve, f"{method}_length"))]))
    for method in METHODS:
        yield method, *np.array(ends[method]).T


def measure(args):
    rng = np.random.default_rng(args.seed)
    grids = {grid: (fixed, lengths, args.curves) for grid, lengths in GRIDS.items()}
    grids[ADAPTIVE] = (adaptive, linear_lengths(1600, 32), args.adaptive)
    for grid, (simulate, lengths, curves) in grids.items():
        for name, model in MODELS.items():
            for repeats in args.repeats:
                for method, low, high, paper in simulate(rng, model, lengths, repeats, curves):
                    true = truth(model, lengths, method)
                    yield {
                        "model": name,
                        "lengths": grid,
                        "method": method,
                        "repeats": repeats,
                        "curves": curves,
                        "truth": lengths[true - 1] if true else 0,
                        "median_low": [0, *lengths][int(np.median(low))],
                        "low_too_high": round(float((low > true).mean()), 4),
                        "high_too_low": round(float((high < true).mean()), 4),
                        "covered": round(float(((low <= true) & (true <= high)).mean()), 4),
                        "open": round(float(((high == len(lengths)) & (low < len(lengths))).mean()), 4),
                        "paper_too_long": round(float((paper > true).mean()), 4),
                    }


def table(result):
    lines = []
    for grid in dict.fromkeys(row["lengths"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["lengths"] == grid]
        line = {"grid": grid, "paper": f"{max(r['paper_too_long'] for r in rows if r['method'] == 'coarse'):.1%}"}
        for row in rows:
            key = f"{row['method']}{row['repeats']}"
            line[key] = min(line.get(key, 1.0), row["covered"])
        lines.append({key: f"{x:.1%}" if isinstance(x, float) else x for key, x in line.items()})
    return (
        f"The share of simulated curves whose interval contains the truth, for the worst of {len(MODELS)} models.\n\n"
        + common.markdown(lines, TABLE)
    )


def main(arguments=None):
    options = {"curves": 1000, "adaptive": 80, "repeats": [3, 5, 10, 20], "seed": 0}
    common.run(common.make_parser(__spec__.name, __doc__, "curve_coverage", **options), measure, table, arguments)


if __name__ == "__main__":
    main()
