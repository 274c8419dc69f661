"""Paired tests of two models on the same targets, haystacks or records, length by length.

If both models read the same texts, the difference on each text does not depend on how hard the text is. Two tests are
made of the differences of a length, and the larger p value counts:

- The paired t test, with a standard error of at least one token (or question) in total.
- The sign-flip test (Fisher 1935): if the models do not differ, each difference is equally likely with the other sign.
  Its p value is exact for any distribution. If texts are copied wholly or not at all, three identical outcomes are
  common, yet a t test calls them significant. For single questions it is McNemar's exact test.

So fewer than six texts never show a difference at one length. The interval is the smallest that holds the intervals of
both tests; that of the sign-flip test lies between means of subsets (Hartigan 1969). With Holm's correction, the risk
of one or more wrong claims over all lengths and their mean is 5 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from ..curve.lengths import METHODS
from ..task import TaskResult
from ..tasks.curve import ForgettingCurve


RISK = 0.05
MAX_EXACT = 13  # differences of which all signs are tried; for more, `SIGN_DRAWS` signs are drawn
SIGN_DRAWS = 10_000


class Difference(NamedTuple):
    """How many more answers of one model are right than of another, at one length.

    Attributes:
        length: in tokens, or lines; None for the mean over all lengths.
        first, second: shares of right answers of the two models, from 0 to 1.
        low, high: 95 % confidence interval of second - first; infinite for fewer than six pairs.
        p: p value of the hypothesis that the models do not differ there.
        holm: the same, corrected for all lengths and their mean.
        pairs: number of texts.
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
        """Return whether the difference is significant over all lengths together."""
        return self.holm <= RISK


def signs(pairs: int) -> np.ndarray:
    """Return signs to multiply differences by, (F, pairs): all up to a common sign, or drawn ones.

    The first row flips none, and the first column is never flipped.
    """
    if pairs <= MAX_EXACT:
        return np.array([(1, *rest) for rest in itertools.product((1, -1), repeat=pairs - 1)])
    flips = np.random.default_rng(0).choice((1, -1), (SIGN_DRAWS, pairs))
    flips[0], flips[:, 0] = 1, 1
    return flips


def flip_test(differences: np.ndarray) -> np.ndarray:
    """Return the two-sided p value of the sign-flip test, for differences (..., R) to (...)."""
    flips = signs(differences.shape[-1])
    sums = np.abs(differences @ flips.T)
    return (sums >= sums[..., :1] - 1e-9).mean(-1)


def flip_interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the centre of differences (R,) from means of subsets; infinite for R < 6."""
    flips = signs(len(differences))
    subsets = np.concatenate([flips > 0, flips < 0]).astype(float)
    subsets = subsets[subsets.any(-1)]
    outside = math.floor(RISK / 2 * (len(subsets) + 1))  # the subset means divide the line into equally likely parts
    if not outside:
        return -math.inf, math.inf
    means = np.sort(subsets @ differences / subsets.sum(-1))
    return float(means[outside - 1]), float(means[-outside])


def t_error(differences: np.ndarray, least: float) -> np.ndarray:
    """Return the standard error of the mean of differences (..., R); that of their sum is at least `least`."""
    pairs = differences.shape[-1]
    return np.sqrt(differences.var(-1) * pairs**2 / max(pairs - 1, 1) + least**2) / pairs


def p_values(differences: np.ndarray, least: float) -> np.ndarray:
    """Return the larger p value of t test and sign-flip test, two-sided, for differences (..., R) to (...)."""
    pairs = differences.shape[-1]
    if pairs < 2:
        return np.ones(differences.shape[:-1])
    t = differences.mean(-1) / t_error(differences, least)
    return np.maximum(2 * stdtr(pairs - 1, -np.abs(t)), flip_test(differences))


def interval(differences: np.ndarray, least: float) -> tuple[float, float]:
    """Return the smallest interval that contains the intervals of both tests, for differences (R,)."""
    low, high = flip_interval(differences)
    if low == -math.inf:
        return low, high
    width = stdtrit(len(differences) - 1, 1 - RISK / 2) * t_error(differences, least)
    return min(low, float(differences.mean() - width)), max(high, float(differences.mean() + width))


def holm(p: np.ndarray) -> np.ndarray:
    """Correct p values (..., m) for their number (Holm 1979).

    >>> holm(np.array([0.01, 0.04, 0.03])).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p, axis=-1)
    steps = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    corrected = np.empty_like(p)
    np.put_along_axis(corrected, order, np.maximum.accumulate(np.minimum(steps, 1), axis=-1), -1)
    return corrected


def paired_differences(first: TaskResult, second: TaskResult) -> list[Difference]:
    """Test length by length how much more the second model has right than the first, on the same texts.

    Args:
        first: a forgetting curve (share of tokens copied), needle or line retrieval (share of right answers).
        second: one of the same kind.

    Returns:
        one `Difference` for each length that both have, and one for their mean if there are several.

    Raises:
        ValueError: they are of two metrics, or did not get the same texts; the setting that differs is named.
    """
    if type(first) is not type(second):
        raise ValueError(f"{first.kind} and {second.kind} are two metrics; give two results of one.")
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
            raise ValueError(f"the differences cannot be paired: the texts of length {n} are not the same.")
        kept = first.distinct(n, pairs)  # of overlapping texts, one is enough
        shares = one[n].shares[kept], other[n].shares[kept]
        units.append(shares[1] - shares[0])
        tests.append((n, shares, units[-1], 1 / one[n].questions))
    if not tests:
        raise ValueError("the differences cannot be paired: the results have no length in common.")
    if len(tests) > 1:
        means = tuple(np.array([np.mean(shares[i]) for _, shares, *_ in tests]) for i in (0, 1))
        weights = [len(tests) ** -1 * sum(map(len, units)) / len(d) for d in units]  # each length counts the same
        together = np.concatenate([d * weight for d, weight in zip(units, weights)])
        least = max(weight * test[-1] for weight, test in zip(weights, tests))
        tests.append((None, means, together, least))
    p = np.array([p_values(d, least) for *_, d, least in tests])
    return [
        Difference(n, float(a.mean()), float(b.mean()), *interval(d, least), float(p), float(corrected), len(d))
        for (n, (a, b), d, least), p, corrected in zip(tests, p, holm(p))
    ]


def conclusion(name: str, other: str, first: TaskResult, second: TaskResult, differences: Sequence[Difference]) -> str:
    """Return one or two sentences on which of two models is right more often, and where that is significant."""
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
    return " ".join(sentences)


def spans(tested: Sequence[int], lengths: Sequence[int]) -> str:
    """Name some of the tested lengths, and runs of neighbours by their ends.

    >>> spans([8, 16, 32, 64, 128], [8, 32, 64, 128])
    '8 and 32 to 128'
    """
    words = []
    for found, run in itertools.groupby(tested, lambda n: n in lengths):
        first, *rest = run
        words += [f"{first:,}" + (f" to {rest[-1]:,}" if rest else "")] * found
    return " and ".join(words)


def further(name: str, other: str, first: TaskResult, second: TaskResult) -> list[str]:
    """Return whose fine and whose coarse length is larger, where that is significant; the results need not be paired.

    Lengths of different tokenizers are compared in bytes. The risk of 5 % is shared by two methods, two models and
    which of them is ahead.
    """
    sentences = []
    if not (isinstance(first, ForgettingCurve) and isinstance(second, ForgettingCurve)):
        return sentences
    same = any(first.settings.get(key) == second.settings.get(key) for key in ("tokenizer", "corpus_sha256"))
    sizes = [1.0, 1.0] if same else [float(c.settings.get("bytes_per_token") or "nan") for c in (first, second)]
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
