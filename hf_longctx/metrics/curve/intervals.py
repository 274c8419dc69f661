"""Confidence intervals of the memory lengths of a forgetting curve: t tests, and the interval that follows from them.

A method ("fine" or "coarse") has a margin: by how much a target passes, with mean mu_n at length n. If memory only
fades as targets grow, the memory length reaches n if mu_n > 0, and ends before n if mu_n < 0. So the claim that it
reaches n holds only with the same claim for all shorter lengths, and the claim that it ends before n only with that
for all longer ones. Testing such claims in this order, up to the first test that does not reject, keeps the risk at
the level of a single test (closed testing, Marcus, Peritz and Gabriel 1976), however many lengths there are.

That memory reaches n may be shown by all targets from n upwards, that it ends before n by all from n downwards. So
each test takes windows of 1, 2, 4, 8 ... lengths from n on, and the window that says most, after Bonferroni's
correction for their number. A long tail in which copying is as good as guessing, 1 % below the threshold, is seen in
this way, even if no length shows it alone. Targets are the unit of the tests, not tokens, as the tokens of one
target are alike.

The adaptive protocol measures until single lengths are sure, and leaves few lengths to stand in a window. The interval
of its curves takes single lengths only, in any order, with Bonferroni's correction for their number and for the looks
at each of them: whoever tests after 3, 5, 7 and 10 repeats, and stops when a test rejects, has four chances to err.

A t test does not foresee what none of its repeats shows: where errors come in rare bursts around 1 % on average, the
fine length claims too much more often than the level says. This file knows plain sequences of counts only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtr


RESOLUTION = 0.01  # between copying exactly and the fine threshold, and between guessing and the coarse one
POWER = 0.8  # chance that the repeats of `repeats_needed` suffice
STAGES = (3, 5, 7, 10)  # repeats after which the adaptive protocol tests a length


class Mean(NamedTuple):
    """Mean margin of the targets in a window of lengths, per scored token.

    Attributes:
        value: over all scored tokens, (...,) float64.
        error: its standard error, robust against unequal spread, and at least one token in all: three repeats of four
            tokens, all right, do not show an accuracy above 99 %.
        samples: how many targets.
    """

    value: np.ndarray
    error: np.ndarray
    samples: int


def mean_margin(margins: Sequence[np.ndarray], scored: Sequence[int]) -> Mean:
    """Return the mean margin of a window of lengths.

    Args:
        margins: for each length of the window, of its repeats, (..., R); R may differ between lengths.
        scored: scored tokens of a repeat, for each length.
    """
    tokens = np.concatenate([np.full(m.shape[-1], n, dtype=np.float64) for m, n in zip(margins, scored)])
    surplus = np.concatenate([m * n for m, n in zip(margins, scored)], axis=-1)
    total, samples = tokens.sum(), len(tokens)
    value = surplus.sum(-1) / total
    residual = surplus - value[..., None] * tokens
    variance = (residual**2).sum(-1) * samples / max(samples - 1, 1)
    return Mean(value, np.sqrt(variance + 1) / total, samples)


def test_result(margins: np.ndarray, scored_tokens: int, level: float) -> int:
    """1 if a length passes for sure, -1 if it fails for sure, 0 if either may be: one-sided t tests at this level.

    Args:
        margins: of the repeats, (R,).
        scored_tokens: of each repeat.
    """
    mean = mean_margin([margins], [scored_tokens])
    if mean.samples < 2:
        return 0
    return int(np.sign(mean.value)) if stdtr(mean.samples - 1, -abs(mean.value) / mean.error) < level else 0


def windows(lengths: int) -> list[int]:
    """Return how many neighbouring lengths are tested together: 1, 2, 4 ... up to all.

    >>> windows(5)
    [1, 2, 4]
    """
    return [2**i for i in range(lengths.bit_length()) if 2**i <= lengths]


def p_values(margins: Sequence[np.ndarray], scored: Sequence[int], direction: int) -> np.ndarray:
    """For each length, the p value of the hypothesis that closed testing is to reject there.

    Args:
        margins: for each length, of its repeats, (..., R).
        scored: scored tokens of a repeat, for each length.
        direction: 1 to show that memory reaches a length, by the lengths from there on; -1 to show that memory ends
            before it, by the lengths up to there.

    Returns:
        (..., lengths) float64, corrected for the number of windows.
    """
    sizes, columns = windows(len(scored)), []
    for i in range(len(scored)):
        spans = [slice(i, i + size) if direction > 0 else slice(max(i + 1 - size, 0), i + 1) for size in sizes]
        means = [mean_margin(margins[span], scored[span]) for span in spans]
        p = [stdtr(m.samples - 1, -direction * m.value / m.error) for m in means if m.samples > 1]
        columns.append(len(sizes) * np.min(p, axis=0) if p else np.ones(margins[i].shape[:-1]))
    return np.stack(columns, axis=-1)


def rejected(p: np.ndarray, level: float) -> np.ndarray:
    """Return how many hypotheses are rejected before the first that is not; (..., lengths) to (...)."""
    return np.logical_and.accumulate(p < level, axis=-1).sum(-1)


class LengthInterval(NamedTuple):
    """Where a fine or coarse length lies: at `low` or above it, and below `high`, in tokens.

    Attributes:
        low: the largest tested length that memory reaches for sure; 0 if none.
        high: the smallest tested length that memory does not reach for sure; None if none.
        repeats_needed: about how many repeats would show more where `high` is missing; None where memory reaches the
            longest length, or there are too few repeats to judge by.

    >>> print(LengthInterval(253, 387), LengthInterval(0, 64), LengthInterval(1400, None))
    [253, 387) <64 >=1400
    >>> print(LengthInterval(253, None, 40), "or", LengthInterval(0, None, 40))
    >=253 (about 40 repeats needed to say more) or unknown (about 40 repeats needed)
    """

    low: int
    high: int | None
    repeats_needed: int | None = None

    def __str__(self):
        if self.high is not None:
            return f"[{self.low}, {self.high})" if self.low else f"<{self.high}"
        if not self.low:
            return f"unknown ({self._needed})"
        return f">={self.low}" if self.repeats_needed is None else f">={self.low} ({self._needed} to say more)"

    def in_words(self) -> str:
        """Return what is sure, in the words of pictures and tables.

        >>> LengthInterval(1400, 2048).in_words(), LengthInterval(0, 64).in_words()
        ('1,400 to 2,048', 'below 64')
        >>> LengthInterval(0, None, 40).in_words(), LengthInterval(64, None, 40).in_words()
        ('about 40 repeats needed', 'at least 64')
        """
        if self.high is not None:
            return f"{self.low:,} to {self.high:,}" if self.low else f"below {self.high:,}"
        return f"at least {self.low:,}" if self.low else self._needed

    @property
    def _needed(self) -> str:
        return f"{'more' if self.repeats_needed is None else f'about {self.repeats_needed}'} repeats needed"


def length_interval(
    lengths: Sequence[int],
    margins: Sequence[np.ndarray],
    scored: Sequence[int],
    confidence: float = 0.95,
    protocol: str = "reference",
) -> LengthInterval:
    """Confidence interval of the fine or coarse length, if memory only fades as targets grow.

    Each end has half of the risk 1 - confidence.

    Args:
        lengths: tested lengths in tokens, ascending.
        margins: per length, of its repeats above the threshold; see `lengths.margins`.
        scored: per length, scored tokens of a repeat.
        confidence: between 0 and 1.
        protocol: how the lengths were measured; see `measure.forgetting_curve`.

    Raises:
        ValueError: the confidence is not between 0 and 1, there is no such protocol, or the arguments are not of one
            length.
    """
    if not (isinstance(confidence, Real) and 0 < confidence < 1):
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    if protocol not in ("reference", "adaptive"):
        raise ValueError(f"protocol must be 'reference' or 'adaptive', got {protocol!r}.")
    count = len(lengths)
    if not count == len(margins) == len(scored):
        raise ValueError(
            f"{count} lengths, {len(margins)} margins and {len(scored)} scored: give one for each length."
        )
    if not count:
        return LengthInterval(0, None)
    level = (1 - confidence) / 2
    if protocol == "adaptive":
        tests = adaptive_tests(count, max(m.shape[-1] for m in margins))
        outcomes = [test_result(m, n, level / tests) for m, n in zip(margins, scored)]
        reached = max((i for i, v in enumerate(outcomes, start=1) if v > 0), default=0)
        end = min((i for i, v in enumerate(outcomes) if v < 0 and i >= reached), default=count)
    else:
        reached = int(rejected(p_values(margins, scored, 1), level))
        ended = int(rejected(p_values(margins, scored, -1)[..., ::-1], level))
        end = max(count - ended, reached)  # after a dip, both may be shown of one length
    needed = None
    if reached < count and end == count:
        needed = repeats_needed(margins[reached:], scored[reached:], level / len(windows(count)))
    return LengthInterval(lengths[reached - 1] if reached else 0, lengths[end] if end < count else None, needed)


def adaptive_tests(lengths: int, repeats: int) -> int:
    """Return how many tests the adaptive protocol makes of so many lengths, which have up to so many repeats.

    >>> adaptive_tests(6, 10), adaptive_tests(6, 20)
    (24, 30)
    """
    return lengths * (len(STAGES) + (repeats > STAGES[-1]))


def repeats_needed(margins: Sequence[np.ndarray], scored: Sequence[int], level: float) -> int | None:
    """About how many repeats would show on which side of the threshold the longest of these lengths are.

    The mean margin is taken to be 1 %, as that of guessing and of exact copying is; if the repeats at hand would show
    as much, then it is the margin that they have.

    Args:
        margins, scored: as for `p_values`.
        level: of a one-sided test of one window.

    Returns:
        Two significant digits, more than the repeats at hand; None if there is no spread to judge by.
    """
    reach = ndtri(1 - level) + ndtri(POWER)  # standard errors
    repeats, needed = max(m.shape[-1] for m in margins), math.inf
    for size in windows(len(scored)):
        mean = mean_margin(margins[-size:], scored[-size:])
        if mean.samples > 1:
            shown = reach * mean.error
            margin = RESOLUTION if shown > RESOLUTION else max(abs(mean.value), 1e-9)
            needed = min(needed, repeats * (shown / margin) ** 2)
    return None if needed == math.inf else int(float(f"{max(needed, repeats + 1):.1e}"))
