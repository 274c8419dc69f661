"""Paired tests of two models on the same targets, haystacks or records, at each length.

If both models read the same samples, we test the score difference on each sample. This removes the variation in
difficulty between samples. At each length we run two tests, and report the larger p value:

- The paired t test. The standard error of the total difference is at least one token (or question).
- The sign-flip test (Fisher 1935): if the models do not differ, each difference is as likely as its negative. The p
  value is exact for any distribution. With one question per sample, this is McNemar's exact test. The t test alone is
  not enough: it is significant after a few identical outcomes. Such outcomes are common if models copy a target either
  completely or not at all.

With the sign-flip test, a difference at one length needs at least six samples to be significant. The reported
confidence interval is the smallest interval that contains the intervals of both tests. The ends of the sign-flip
interval are means of subsets (Hartigan 1969). Holm's correction limits the familywise error rate to 5 %. This
correction covers the tests at all lengths and a test of the mean over lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from ..curve.lengths import METHODS
from ..task import TaskResult
from ..tasks.curve import ForgettingCurve
from .units import bytes_per_token, interval_in_bytes, sizes_in_bytes


RISK = 0.05
MAX_EXACT = 13  # maximum number of differences for which we enumerate all sign patterns
SIGN_DRAWS = 10_000


class Difference(NamedTuple):
    """The difference in the share of correct answers between two models at one length.

    Attributes:
        length: length in tokens or lines; None for the mean over all lengths.
        first, second: shares of correct answers of the two models, from 0 to 1.
        low, high: 95 % confidence interval for second - first. With fewer than six pairs, it is infinite.
        p: p value under the null hypothesis that the models do not differ.
        holm: p value after Holm's correction. The correction covers all lengths and the mean over lengths.
        pairs: number of samples that both models read.
    """

    length: int | None
    first: float
    second: float
    low: float
    high: float
    p: float
    holm: float
    pairs: int

    @property
    def significant(self) -> bool:
        """Return whether the difference is significant after Holm's correction."""
        return self.holm <= RISK


def signs(pairs: int) -> np.ndarray:
    """Return sign patterns for the sign-flip test, (F, pairs).

    With few pairs, we return every pattern. With many pairs, we return random patterns. The first pattern does not
    flip any sign. The sign of the first pair is never flipped, because the test is two-sided.
    """
    if pairs <= MAX_EXACT:
        return np.array([(1, *rest) for rest in itertools.product((1, -1), repeat=pairs - 1)])
    flips = np.random.default_rng(0).choice((1, -1), (SIGN_DRAWS, pairs))
    flips[0], flips[:, 0] = 1, 1
    return flips


def flip_test(differences: np.ndarray) -> np.ndarray:
    """Return the two-sided p values of the sign-flip test over the last axis of differences (..., R)."""
    flips = signs(differences.shape[-1])
    sums = np.abs(differences @ flips.T)
    return (sums >= sums[..., :1] - 1e-9).mean(-1)


def flip_interval(differences: np.ndarray) -> tuple[float, float]:
    """Return a 95 % CI for the center of R differences.

    The limits are means of subsets. If R < 6, they are infinite.
    """
    flips = signs(len(differences))
    subsets = np.concatenate([flips > 0, flips < 0]).astype(float)
    subsets = subsets[subsets.any(-1)]
    # the centre lies in each gap between sorted means with equal probability
    outside = math.floor(RISK / 2 * (len(subsets) + 1))
    if not outside:
        return -math.inf, math.inf
    means = np.sort(subsets @ differences / subsets.sum(-1))
    return float(means[outside - 1]), float(means[-outside])


def t_error(differences: np.ndarray, least: float) -> np.ndarray:
    """Return the standard error of the mean over the last axis of differences (..., R).

    Args:
        least: minimum standard error of the sum of the differences.
    """
    pairs = differences.shape[-1]
    return np.sqrt(differences.var(-1) * pairs**2 / max(pairs - 1, 1) + least**2) / pairs


def p_values(differences: np.ndarray, least: float) -> np.ndarray:
    """Run both tests over the last axis of differences (..., R). Return the larger of the two-sided p values."""
    pairs = differences.shape[-1]
    if pairs < 2:
        return np.ones(differences.shape[:-1])
    t = differences.mean(-1) / t_error(differences, least)
    return np.maximum(2 * stdtr(pairs - 1, -np.abs(t)), flip_test(differences))


def interval(differences: np.ndarray, least: float) -> tuple[float, float]:
    """Return the smallest interval that contains the confidence intervals of both tests."""
    low, high = flip_interval(differences)
    if low == -math.inf:
        return low, high
    width = stdtrit(len(differences) - 1, 1 - RISK / 2) * t_error(differences, least)
    return min(low, float(differences.mean() - width)), max(high, float(differences.mean() + width))


def holm(p: np.ndarray) -> np.ndarray:
    """Apply Holm's correction (1979) along the last axis of p values (..., m).

    >>> holm(np.array([0.01, 0.04, 0.03])).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p, axis=-1)
    steps = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    corrected = np.empty_like(p)
    np.put_along_axis(corrected, order, np.maximum.accumulate(np.minimum(steps, 1), axis=-1), -1)
    return corrected


def paired_differences(first: TaskResult, second: TaskResult) -> list[Difference]:
    """Test at each length whether the shares of correct answers of two models differ on the same samples.

    Args:
        first: result of the first model: a forgetting curve (share of tokens copied), needle or line retrieval.
        second: result of the second model on the same metric.

    Returns:
        a `Difference` for each common length. For several lengths, a `Difference` for the mean over lengths follows.

    Raises:
        ValueError: the results are from different metrics or samples. The message names the setting that differs.
    """
    if type(first) is not type(second):
        raise ValueError(f"both results must be from one metric, got {first.kind} and {second.kind}.")
    reason = first.unlike(second)
    if reason is not None:
        raise ValueError(f"the differences cannot be paired: {reason}.")
    replies = all("match_rate" in getattr(result, "rates_measured", ()) for result in (first, second))
    one, other = ({counts.length: counts for counts in r.by_length(replies, True)} for r in (first, second))
    places = first.places(), second.places()
    lengths = [n for n in one if n in other]
    tests, units = [], []
    for n in lengths:
        pairs = min(len(one[n].shares), len(other[n].shares))
        a, b = (place[n][:pairs] if first.kind != "needle" else place[n] for place in places)
        if a != b:
            raise ValueError(f"the differences cannot be paired: the samples of length {n} are not the same.")
        kept = first.distinct(n, pairs)  # of several overlapping samples, keep one
        shares = one[n].shares[kept], other[n].shares[kept]
        units.append(shares[1] - shares[0])
        tests.append((n, shares, units[-1], 1 / one[n].questions))
    if not tests:
        raise ValueError("the differences cannot be paired: the results do not have a common length.")
    if len(tests) > 1:
        means = tuple(np.array([np.mean(shares[i]) for _, shares, *_ in tests]) for i in (0, 1))
        weights = [len(tests) ** -1 * sum(map(len, units)) / len(d) for d in units]  # equal weight for each length
        together = np.concatenate([d * weight for d, weight in zip(units, weights)])
        least = max(weight * test[-1] for weight, test in zip(weights, tests))
        tests.append((None, means, together, least))
    p = np.array([p_values(d, least) for *_, d, least in tests])
    return [
        Difference(n, float(a.mean()), float(b.mean()), *interval(d, least), float(p), float(corrected), len(d))
        for (n, (a, b), d, least), p, corrected in zip(tests, p, holm(p))
    ]


def forgotten(name: str, other: str, first: TaskResult, second: TaskResult, differences: Sequence[Difference]) -> str:
    """State what a model forgets of the longest common length with the second cache, compared with the first cache.

    If the results are from different models or from the same cache, return an empty string.
    """
    default: dict[str, Any] = {"cache": "full"}
    before, after = default | first.settings, default | second.settings
    if before["cache"] == after["cache"] or any(before.get(x) != after.get(x) for x in ("model", "weights_sha256")):
        return ""
    longest = [d for d in differences if d.length is not None][-1]
    verb, sign = ("forgets", 100) if longest.first >= longest.second else ("retains", -100)
    than = "" if before["cache"] == "full" and sign > 0 else f" more than {name}"
    low, high = sorted(round(-sign * end, 1) + 0.0 for end in (longest.low, longest.high))  # 0.0 instead of -0.0
    interval = f"95 % CI {low:.1f} to {high:.1f}" if high < math.inf else "6 repeats are needed for a 95 % CI"
    size = ""
    if before.get("cache_tokens") == after.get("cache_tokens") is not None:  # the sizes of other lengths are unknown
        size = f", with {100 * after['cache_bytes'] / before['cache_bytes']:.0f} % of the bytes"
    points = f"{sign * (longest.first - longest.second):.1f} points{than} of {longest.length:,} {first.size_unit}"
    return f"{other} {verb} {points} ({interval}){size}."


def conclusion(name: str, other: str, first: TaskResult, second: TaskResult, differences: Sequence[Difference]) -> str:
    """State in one or two sentences which model is significantly better, and at which lengths."""
    verb, size = first.verb, first.size_unit
    sentences = further(name, other, first, second)
    claims = []
    for better, worse, sign in ((other, name, 1), (name, other, -1)):
        tested = [d.length for d in differences if d.length is not None]
        where = [d.length for d in differences if d.significant and (d.second - d.first) * sign > 0]
        lengths = [n for n in where if n is not None]
        if where:
            at = f"at {len(lengths)} of {len(tested)} lengths, {spans(tested, lengths)} {size}"
            at = at if lengths else "in the mean over all lengths"
            claims.append(f"{better} {verb} more than {worse} {at}")
    if claims:
        sentences.append(f"{'; '.join(claims)}, significant.")
    elif not sentences:
        needed = math.ceil(math.log2(2 * len(differences) / RISK))
        pairs = max(d.pairs for d in differences)
        few = f"; {needed} repeats are needed to show one at a single length" if pairs < needed else ""
        sentences.append(f"No difference between {name} and {other} is significant{few}.")
        sentences += [] if few else longest_copied(first, second)
    return " ".join([forgotten(name, other, first, second, differences), *sentences]).strip()


def spans(tested: Sequence[int], lengths: Sequence[int]) -> str:
    """Format a selection of the tested lengths, with consecutive lengths as a range.

    >>> spans([8, 16, 32, 64, 128], [8, 32, 64, 128])
    '8 and 32 to 128'
    """
    words = []
    for found, run in itertools.groupby(tested, lambda n: n in lengths):
        first, *rest = run
        words += [f"{first:,}" + (f" to {rest[-1]:,}" if rest else "")] * found
    return " and ".join(words)


def further(name: str, other: str, first: TaskResult, second: TaskResult) -> list[str]:
    """Compare the fine lengths and the coarse lengths of two models. Describe significant differences.

    The results need not be paired. Unless a token of one result is a token of the other (`TaskResult.same_tokens`), we
    compare lengths in bytes. The error rate of 5 % is split between two methods, two models and two directions.
    """
    sentences = []
    if not (isinstance(first, ForgettingCurve) and isinstance(second, ForgettingCurve)):
        return sentences
    same = first.same_tokens(second)
    sizes = [1.0, 1.0] if same else [bytes_per_token(curve) for curve in (first, second)]
    for method in METHODS:
        ends = [curve.interval(method, 1 - RISK / 4) for curve in (first, second)]
        lows = [end.low * size for end, size in zip(ends, sizes)]
        highs = [math.inf if end.high is None else end.high * size for end, size in zip(ends, sizes)]
        for better, worse, ahead in ((other, name, lows[1] >= highs[0]), (name, other, lows[0] >= highs[1])):
            if ahead:
                unit = "" if same else " in bytes"
                sentences.append(
                    f"{better} copies further than {worse}: its {method} length is larger{unit}, significant."
                )
    return sentences


def unpaired_conclusion(name: str, other: str, first: TaskResult, second: TaskResult) -> str:
    """State which of two curves is significantly longer, if their passages cannot be paired; "" for other metrics."""
    if not (isinstance(first, ForgettingCurve) and isinstance(second, ForgettingCurve)):
        return ""
    if first.whole != second.whole:
        return f"{name} and {other} cannot be compared: {first.unlike(second)}."
    curves = {name: first, other: second}
    sizes = sizes_in_bytes(curves)
    if sizes is None and not first.same_tokens(second):
        return (
            f"The lengths of {name} and {other} cannot be compared: their tokenizers may be different, and the bytes per "
            "token are unknown. Measure both again."
        )
    sentences = further(name, other, first, second)
    if not sentences:
        sentences = [f"Neither {name} nor {other} copies significantly further than the other."]
        sentences += longest_copied(first, second)
    if sizes:
        for method in METHODS:
            ends = [f"{key} {interval_in_bytes(c.interval(method), sizes[key])}" for key, c in curves.items()]
            sentences.append(f"{method.capitalize()} length in bytes (95 % CI): {', '.join(ends)}.")
    return " ".join(sentences)


def longest_copied(first: TaskResult, second: TaskResult) -> list[str]:
    """Return advice if both models copied the longest tested length, so that no difference can be significant."""
    curves = [curve for curve in (first, second) if isinstance(curve, ForgettingCurve)]
    if len(curves) == 2 and all(curve.interval("coarse").longest for curve in curves):
        return ["Both copied the longest length: measure longer ones."]
    return []
