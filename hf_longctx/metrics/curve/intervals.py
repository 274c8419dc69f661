"""Confidence intervals for the memory lengths of a forgetting curve, from tests over targets.

For each method ("fine" or "coarse"), the margin of a target is its accuracy minus the threshold. A length n passes as
coarse if the mean margin over all possible targets is positive. We test this with a t test. A length passes as fine if
more than half of all targets are copied with an accuracy above 99 %. We test this with a sign test. The paper uses the
mean for the fine length too, but a few repeats are not enough to test the mean. Suppose that 97 of 100 targets are
copied perfectly, and 3 not at all. The mean is then below 99 %, but a sample of ten targets rarely shows a failure. A
distribution-free bound on the mean requires 368 perfect targets. The sign test requires six.

We assume that memory never improves as targets grow. A model that reaches a length n then also reaches all shorter
lengths. Memory that ends before n also ends before all longer lengths. We test such nested hypotheses in order, up to
the first test that does not reject. The total error rate is then the error rate of a single test, regardless of the
number of lengths (closed testing, Marcus, Peritz and Gabriel 1976).

Targets longer than n are also evidence that memory reaches n. Shorter targets are also evidence that memory ends
before n. Each test therefore pools the targets of a window: 1, 2, 4, 8 ... consecutive lengths. If we test whether
memory reaches n, the window starts at n. If we test whether memory ends before n, the window ends at n. We take the
smallest p value of all windows, with a Bonferroni correction. Over many long lengths, pooling can show that copying is
no better than guessing, even if no single length is significant. The unit of a test is the target, not the token,
because the tokens of a target are correlated. Targets that share scored tokens are also correlated. A test therefore
uses the largest subset of targets without shared tokens.

For the adaptive protocol, we test single lengths only. This protocol measures few lengths, and repeats each length
until the result is significant. In this protocol, the Bonferroni correction covers the number of lengths and the
number of tests per length. At each length, we test after 3, 5, 7 and 10 repeats, and stop at the first rejection. This
gives four chances to err.

`scripts/evidence/curve_coverage.py` counts how often the intervals miss the true length of simulated curves. This file
does not run a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy  # scipy only imports scipy.special on first use, so `--help` stays fast

from ..overlap import separate


STAGES = (3, 5, 7, 10)  # repeats after which the adaptive protocol tests a length
SEPARATE = 0.75  # minimum share of repeats without overlap; below it, we report that the corpus is too short
ENOUGH = 6  # minimum number of targets for a significant sign test of one length
ALONE = 0.64  # share of the error rate for the sign test of a single length


# The span [first, stop) of the scored tokens in the corpus, for each length and repeat
Places = Sequence[Sequence[tuple[int, int]] | None]


def centre(margins: np.ndarray, method: str) -> float:
    """Return a number that is positive if a length passes.

    For "coarse", it is the mean margin. For "fine", it is the share of targets that pass, minus 1/2.
    """
    return ((margins > 0) - 0.5 if method == "fine" else margins).mean()


def p_value(margins: Sequence[np.ndarray], scored: Sequence[int], direction: int, method: str) -> np.ndarray:
    """Return the one-sided p value of a window of lengths.

    "fine" uses a sign test. "coarse" uses a t test of the mean margin per scored token. Its standard error is robust
    to heteroscedasticity. We add 1 to the variance of the total margin (in tokens). Otherwise, identical margins in a
    few short repeats would be significant.

    Args:
        margins: margins (..., R) of the repeats, for each length of the window; R may differ between lengths.
        scored: number of scored tokens per repeat, for each length.
        direction: 1 to test whether the window passes, -1 to test whether it fails.

    Returns:
        array (...). Its shape is the leading shape of `margins`.
    """
    samples = sum(m.shape[-1] for m in margins)
    if method == "fine":
        passing = sum((m > 0).sum(-1) for m in margins)
        shown = passing if direction > 0 else samples - passing
        return np.where(shown > 0, scipy.special.bdtrc(np.maximum(shown - 1, 0), samples, 0.5), 1.0)
    if samples < 2:
        return np.ones(margins[0].shape[:-1])
    tokens = np.concatenate([np.full(m.shape[-1], n, dtype=np.float64) for m, n in zip(margins, scored)])
    surplus = np.concatenate([m * n for m, n in zip(margins, scored)], axis=-1)
    total = surplus.sum(-1)
    residual = surplus - total[..., None] / tokens.sum() * tokens
    variance = (residual**2).sum(-1) * samples / (samples - 1)
    return scipy.special.stdtr(samples - 1, -direction * total / np.sqrt(variance + 1))


def test_result(margins: np.ndarray, scored_tokens: int, level: float, method: str) -> int:
    """Test a single length. Return 1 if it passes significantly, -1 if it fails significantly, otherwise 0.

    Args:
        margins: margins of the repeats, (R,).
        scored_tokens: number of scored tokens per repeat.
        level: significance level of the one-sided test.
    """
    side = 1 if centre(margins, method) > 0 else -1
    return side if p_value([margins], [scored_tokens], side, method) < level else 0


def windows(lengths: int, method: str) -> dict[int, float]:
    """Divide the allowed error rate among window sizes, which are powers of two up to the number of lengths.

    >>> windows(9, "coarse"), windows(5, "fine")
    ({1: 0.25, 2: 0.25, 4: 0.25, 8: 0.25}, {1: 0.64, 2: 0.18, 4: 0.18})
    """
    sizes = [2**i for i in range(lengths.bit_length())]
    if method == "coarse" or lengths == 1:
        return dict.fromkeys(sizes, 1 / len(sizes))
    return dict.fromkeys(sizes, (1 - ALONE) / (len(sizes) - 1)) | {1: ALONE}


def without_overlap(margins: Sequence[np.ndarray], places: Places) -> list[np.ndarray]:
    """Return the margins of the largest subset of targets in which no two targets share scored tokens."""
    targets = [(i, j, place) for i, row in enumerate(places) for j, place in enumerate(row or ())]
    kept = [[] if row else [*range(m.shape[-1])] for m, row in zip(margins, places)]
    for index in separate([place for *_, place in targets]):
        i, j, _ = targets[index]
        kept[i].append(j)
    return [m[..., sorted(columns)] for m, columns in zip(margins, kept)]


def p_values(
    margins: Sequence[np.ndarray], scored: Sequence[int], direction: int, method: str, places: Places | None = None
) -> np.ndarray:
    """Return the p value of each length, corrected for the number of windows.

    Args:
        margins: margins (..., R) of the repeats, for each length.
        scored: number of scored tokens per repeat, for each length.
        direction: if 1, test whether memory reaches a length, with windows that start at the length. If -1, test
            whether memory ends before a length, with windows that end at the length.
        method: "fine" or "coarse".
        places: span of the scored tokens in the corpus, for each length and repeat; None if no two repeats overlap.

    Returns:
        (..., lengths) float64.
    """
    columns = []
    places = places or [None] * len(scored)
    for i in range(len(scored)):
        p = []
        for size, share in windows(len(scored), method).items():
            span = slice(i, i + size) if direction > 0 else slice(max(i + 1 - size, 0), i + 1)
            p.append(p_value(without_overlap(margins[span], places[span]), scored[span], direction, method) / share)
        columns.append(np.min(p, axis=0))
    return np.stack(columns, axis=-1)


def rejected(p: np.ndarray, level: float) -> np.ndarray:
    """Count the lengths before the first length with a p value >= level.

    Args:
        p: p values, (..., lengths).
        level: significance level.

    Returns:
        counts, (...).
    """
    return np.logical_and.accumulate(p < level, axis=-1).sum(-1)


class LengthInterval(NamedTuple):
    """The confidence interval [low, high) of a fine or coarse length, in tokens.

    Attributes:
        low: the longest tested length that memory significantly reaches; 0 if there is no such length.
        high: the shortest tested length that is significantly beyond the reach of memory. None if there is no such
            length.
        longest: whether `low` is the longest tested length.
        text_too_short: whether too many repeats overlap; a tighter interval then needs a longer corpus.

    >>> print(LengthInterval(1400, 2048), LengthInterval(0, 64), LengthInterval(64, None), sep=", ")
    1,400 to 2,048, below 64, at least 64
    >>> print(LengthInterval(0, None))
    unknown; more repeats are needed
    """

    low: int
    high: int | None
    longest: bool = False
    text_too_short: bool = False

    @property
    def significant(self) -> bool:
        """Return whether either end is significant."""
        return self.low > 0 or self.high is not None

    def in_words(self) -> str:
        """Return the interval in words, for figures and tables."""
        if self.high is not None:
            return f"{self.low:,} to {self.high:,}" if self.low else f"below {self.high:,}"
        if self.low:
            return f"at least {self.low:,}"
        return f"unknown; {'a longer corpus is' if self.text_too_short else 'more repeats are'} needed"

    __str__ = in_words


def length_interval(
    lengths: Sequence[int],
    margins: Sequence[np.ndarray],
    scored: Sequence[int],
    method: str,
    confidence: float = 0.95,
    protocol: str = "reference",
    places: Places | None = None,
) -> LengthInterval:
    """Compute a confidence interval of the fine or coarse length.

    We assume that memory never improves as targets grow. The error rate of each end of the interval is (1 -
    confidence) / 2.

    Args:
        lengths: tested lengths in tokens, ascending.
        margins: margins of the repeats, for each length; see `lengths.margins`.
        scored: number of scored tokens per repeat, for each length.
        method: "fine" or "coarse".
        confidence: confidence level, between 0 and 1.
        protocol: protocol that chose the lengths: "reference" or "adaptive".
        places: see `p_values`.

    Raises:
        ValueError: the confidence is not between 0 and 1, or the protocol is unknown.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    if protocol not in ("reference", "adaptive"):
        raise ValueError(f"protocol must be 'reference' or 'adaptive', got {protocol!r}.")
    count = len(lengths)
    if not count:
        return LengthInterval(0, None)
    level, places = (1 - confidence) / 2, places or [None] * count
    # margins of the repeats that do not overlap, for each length
    alone = [without_overlap([m], [row])[0] for m, row in zip(margins, places)]
    if protocol == "adaptive":
        level /= adaptive_tests(count, max(m.shape[-1] for m in margins), method, level)
        outcomes = [test_result(m, n, level, method) for m, n in zip(alone, scored)]
        reached = max((i for i, v in enumerate(outcomes, start=1) if v > 0), default=0)
        end = min((i for i, v in enumerate(outcomes) if v < 0 and i >= reached), default=count)
    else:
        reached = int(rejected(p_values(margins, scored, 1, method, places), level))
        ended = int(rejected(p_values(margins, scored, -1, method, places)[..., ::-1], level))
        end = max(count - ended, reached)  # if the curve has a dip, a length can be significant in both directions
    low, high = lengths[reached - 1] if reached else 0, lengths[end] if end < count else None
    overlapping = alone[-1].shape[-1] < SEPARATE * margins[-1].shape[-1]
    return LengthInterval(low, high, reached == count, high is None and reached < count and overlapping)


def adaptive_tests(lengths: int, repeats: int, method: str, level: float) -> int:
    """Return the maximum number of tests in the adaptive protocol, for the Bonferroni correction.

    We do not count sign tests that cannot be significant because they have too few targets.

    Args:
        lengths: number of lengths.
        repeats: maximum number of repeats per length.
        method: "fine" or "coarse".
        level: significance level before the correction.

    >>> adaptive_tests(6, 10, "coarse", 0.025), adaptive_tests(6, 20, "coarse", 0.025)
    (24, 30)
    >>> adaptive_tests(6, 10, "fine", 0.025), adaptive_tests(6, 20, "fine", 0.025)
    (6, 12)
    """
    looks = [*STAGES, repeats] if repeats > STAGES[-1] else STAGES
    if method == "fine":
        looks = [n for n in looks if lengths * 0.5**n < level] or looks[-1:]
    return lengths * len(looks)
