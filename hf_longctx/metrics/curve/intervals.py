"""Confidence intervals for the memory lengths of a forgetting curve, from tests over targets.

For each method ("fine" or "coarse"), the margin of a target is how far it exceeds the threshold. A length n passes as
coarse if the mean margin over all possible targets is positive; we use a t test. It passes as fine if the median
target passes, i.e. more than half of all targets are copied above 99 %; we use a sign test. The paper takes the mean
here as well, which a few repeats cannot establish: if 97 of 100 targets are copied perfectly and the others not at
all, the mean is below 99 %, and ten targets rarely show it. A distribution-free bound on the mean takes 368 perfect
targets; for the median, six of six suffice.

If memory only fades as targets grow, it reaches n if n passes, and ends before n if n fails. The claim "reaches n"
thus implies the same claim for all shorter lengths, and "ends before n" implies it for all longer ones. Testing nested
claims in this order, and stopping at the first test that does not reject, keeps the error rate of a single test for
any number of lengths (closed testing, Marcus, Peritz and Gabriel 1976).

All targets from n upwards are evidence that memory reaches n; all targets up to n are evidence that it ends before n.
Each test therefore pools windows of 1, 2, 4, 8 ... lengths starting at n, and takes the window with the smallest p
value after a Bonferroni correction for their number. This detects a long tail in which copying is as good as guessing
(1 % below the threshold), even if no single length shows it. The unit of a test is the target, not the token, because
the tokens of a target are correlated. Targets that share scored tokens share errors too, so a test uses the largest
subset of its window's targets without shared tokens.

The adaptive protocol measures until single lengths are significant, so its windows would contain few lengths. The
interval of an adaptive curve tests single lengths only, in any order, with a Bonferroni correction for their number
and for repeated looks: a test after 3, 5, 7 and 10 repeats that stops when it rejects has four chances to err.

`scripts/evidence/curve_coverage.py` counts how often the intervals of simulated curves miss the true length. This file
works on plain sequences of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy  # imports scipy.special lazily, so `--help` does not wait for it

from ..overlap import separate


STAGES = (3, 5, 7, 10)  # repeats after which the adaptive protocol tests a length
SEPARATE = 0.75  # below this share of non-overlapping repeats, a longer corpus helps more than further repeats
ENOUGH, ALONE = 6, 0.64  # targets for a sign test of one length, and its share of the risk of 2.5 %


# For each length, the span [first, stop) of each repeat's scored tokens in the corpus.
Places = Sequence[Sequence[tuple[int, int]] | None]


def centre(margins: np.ndarray, method: str) -> float:
    """Return a number that is above 0 if a length passes: the mean margin, or the share of passing targets - 1/2."""
    return ((margins > 0) - 0.5 if method == "fine" else margins).mean()


def p_value(margins: Sequence[np.ndarray], scored: Sequence[int], direction: int, method: str) -> np.ndarray:
    """Return the one-sided p value of a window of lengths, (...): by a sign test for "fine", a t test for "coarse".

    The t test is of the mean margin per scored token. Its standard error is robust to heteroscedasticity, and at least
    one token in total: three perfect repeats of four tokens do not show an accuracy above 99 %.

    Args:
        margins: for each length of the window, margins of its repeats, (..., R); R may differ between lengths.
        scored: for each length, number of scored tokens per repeat.
        direction: 1 to show that the window passes, -1 to show that it fails.
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
    """Return 1 if a length passes significantly, -1 if it fails significantly, else 0: one-sided tests at this level.

    Args:
        margins: margins of the repeats, (R,).
        scored_tokens: number of scored tokens per repeat.
    """
    side = 1 if centre(margins, method) > 0 else -1
    return side if p_value([margins], [scored_tokens], side, method) < level else 0


def windows(lengths: int) -> list[int]:
    """Return the window sizes, i.e. how many neighbouring lengths are tested together: 1, 2, 4 ... up to all.

    >>> windows(5)
    [1, 2, 4]
    """
    return [2**i for i in range(lengths.bit_length()) if 2**i <= lengths]


def risk_shares(windows: int, method: str) -> list[float]:
    """Return each window's share of the error rate, smallest window first.

    >>> risk_shares(4, "coarse"), risk_shares(3, "fine")
    ([0.25, 0.25, 0.25, 0.25], [0.64, 0.18, 0.18])
    """
    if method == "coarse" or windows == 1:
        return [1 / windows] * windows
    return [ALONE] + [(1 - ALONE) / (windows - 1)] * (windows - 1)


def without_overlap(margins: Sequence[np.ndarray], places: Places) -> list[np.ndarray]:
    """Return the margins of the largest subset of a window's targets that does not share scored tokens."""
    targets = [(i, j, place) for i, row in enumerate(places) for j, place in enumerate(row or ())]
    kept = [[] if row else [*range(m.shape[-1])] for m, row in zip(margins, places)]
    for index in separate([place for *_, place in targets]):
        i, j, _ = targets[index]
        kept[i].append(j)
    return [m[..., sorted(columns)] for m, columns in zip(margins, kept)]


def p_values(
    margins: Sequence[np.ndarray], scored: Sequence[int], direction: int, method: str, places: Places | None = None
) -> np.ndarray:
    """Return for each length the p value of the hypothesis that closed testing tries to reject.

    Args:
        margins: for each length, margins of its repeats, (..., R).
        scored: for each length, number of scored tokens per repeat.
        direction: 1 to show that memory reaches a length, from windows that start there; -1 to show that memory ends
            before it, from windows that end there.
        method: "fine" or "coarse".
        places: for each length, the span of each repeat's scored tokens in the corpus; None if none overlap.

    Returns:
        (..., lengths) float64, corrected for the number of windows.
    """
    sizes, columns, places = windows(len(scored)), [], places or [None] * len(scored)
    shares = risk_shares(len(sizes), method)
    for i in range(len(scored)):
        spans = [slice(i, i + size) if direction > 0 else slice(max(i + 1 - size, 0), i + 1) for size in sizes]
        p = [
            p_value(without_overlap(margins[span], places[span]), scored[span], direction, method) / share
            for span, share in zip(spans, shares)
        ]
        columns.append(np.min(p, axis=0))
    return np.stack(columns, axis=-1)


def rejected(p: np.ndarray, level: float) -> np.ndarray:
    """Count the hypotheses that are rejected before the first one that is not; (..., lengths) to (...)."""
    return np.logical_and.accumulate(p < level, axis=-1).sum(-1)


class LengthInterval(NamedTuple):
    """The confidence interval [low, high) of a fine or coarse length, in tokens.

    Attributes:
        low: the largest tested length that memory significantly reaches; 0 if there is none.
        high: the smallest tested length that memory significantly fails to reach; None if there is none.
        longest: whether `low` is the longest tested length.
        text_too_short: whether repeats overlap so much that a tighter interval needs a longer corpus.

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
        """Return the interval in words, as figures and tables print it."""
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
    """Compute a confidence interval of the fine or coarse length, assuming that memory only fades as targets grow.

    Each end gets half of the error rate 1 - confidence.

    Args:
        lengths: tested lengths in tokens, ascending.
        margins: for each length, margins of its repeats; see `lengths.margins`.
        scored: for each length, number of scored tokens per repeat.
        method: "fine" or "coarse".
        confidence: confidence level, between 0 and 1.
        protocol: protocol by which the lengths were measured; see `tasks.curve.Curve`.
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
    alone = [without_overlap([m], [row])[0] for m, row in zip(margins, places)]  # windows of one length
    if protocol == "adaptive":
        level /= adaptive_tests(count, max(m.shape[-1] for m in margins), method, level)
        outcomes = [test_result(m, n, level, method) for m, n in zip(alone, scored)]
        reached = max((i for i, v in enumerate(outcomes, start=1) if v > 0), default=0)
        end = min((i for i, v in enumerate(outcomes) if v < 0 and i >= reached), default=count)
    else:
        reached = int(rejected(p_values(margins, scored, 1, method, places), level))
        ended = int(rejected(p_values(margins, scored, -1, method, places)[..., ::-1], level))
        end = max(count - ended, reached)  # after a dip, both claims can be significant at one length
    low, high = lengths[reached - 1] if reached else 0, lengths[end] if end < count else None
    overlapping = alone[-1].shape[-1] < SEPARATE * margins[-1].shape[-1]
    return LengthInterval(low, high, reached == count, high is None and reached < count and overlapping)


def adaptive_tests(lengths: int, repeats: int, method: str, level: float) -> int:
    """Return the number of tests in the adaptive protocol, given the number of lengths and the maximum repeats.

    Looks with too few targets for a sign test to reject cannot err, and are not counted.

    >>> adaptive_tests(6, 10, "coarse", 0.025), adaptive_tests(6, 20, "coarse", 0.025)
    (24, 30)
    >>> adaptive_tests(6, 10, "fine", 0.025), adaptive_tests(6, 20, "fine", 0.025)
    (6, 12)
    """
    looks = [*STAGES, repeats] if repeats > STAGES[-1] else STAGES
    if method == "fine":
        looks = [n for n in looks if lengths * 0.5**n < level] or looks[-1:]
    return lengths * len(looks)
