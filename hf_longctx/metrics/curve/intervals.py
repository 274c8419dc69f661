"""Confidence intervals of the memory lengths of a forgetting curve: tests of targets, and the interval that follows.

A method ("fine" or "coarse") has a margin: by how much a target passes. A length n passes as coarse if the mean
margin of all possible targets is positive, which a t test shows. It passes as fine if the typical target does, that
is if more than half of them are copied above 99 %, which a sign test shows. The mean that the paper takes is out of
reach there: where 97 of 100 texts are copied without an error and the others not at all, the mean is below 99 %, and
ten texts rarely show it; to bound the mean whatever the errors take 368 perfect texts. Six of six show the typical
one.

If memory only fades as targets grow, the memory length reaches n if n passes, and ends before n if n fails. So the
claim that it reaches n holds only with the same claim for all shorter lengths, and the claim that it ends before n
only with that for all longer ones. Testing such claims in this order, up to the first test that does not reject,
keeps the risk at the level of a single test (closed testing, Marcus, Peritz and Gabriel 1976), however many lengths
there are.

That memory reaches n may be shown by all targets from n upwards, that it ends before n by all from n downwards. So
each test takes windows of 1, 2, 4, 8 ... lengths from n on, and the window that says most, after Bonferroni's
correction for their number. A long tail in which copying is as good as guessing, 1 % below the threshold, is seen in
this way, even if no length shows it alone. Targets are the unit of the tests, not tokens, as the tokens of one target
are correlated. Targets that share scored tokens share errors too: a test takes the largest set of targets of its
window that share none.

The adaptive protocol measures until single lengths are significant, and leaves few lengths to stand in a window. The
interval of its curves takes single lengths only, in any order, with Bonferroni's correction for their number and for
the looks at each of them: a test after 3, 5, 7 and 10 repeats, which stops when it rejects, has four chances to err.

`scripts/evidence/curve_coverage.py` counts how often simulated curves miss the truth. This file knows plain sequences
of counts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy  # imports scipy.special when that is first used, which the help of the command line does without

from ..overlap import separate


RESOLUTION = 0.01  # between copying exactly and the fine threshold, and between guessing and the coarse one
POWER = 0.8  # chance that the repeats of `repeats_needed` suffice
MAX_REPEATS = 1000  # repeats that it names
STAGES = (3, 5, 7, 10)  # repeats after which the adaptive protocol tests a length
SEPARATE = 0.75  # share of repeats without an overlap below which a longer text says more than further repeats
ENOUGH, ALONE = 6, 0.64  # texts for a sign test of one length, at its share of the risk of 2.5 %


# by length, where the scored tokens of each repeat stand in the corpus: the first, and the one after the last
Places = Sequence[Sequence[tuple[int, int]] | None]


class Mean(NamedTuple):
    """Mean margin of the targets in a window of lengths, per scored token.

    Attributes:
        value: over all scored tokens, (...,) float64.
        error: its standard error, robust against unequal spread, and at least one token in total: three repeats of
            four tokens, all right, do not show an accuracy above 99 %.
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


def centre(margins: np.ndarray, method: str) -> float:
    """Return a number above 0 where a length passes: the mean margin, or the share of targets beyond a half."""
    return ((margins > 0) - 0.5 if method == "fine" else margins).mean()


def p_value(margins: Sequence[np.ndarray], scored: Sequence[int], direction: int, method: str) -> np.ndarray:
    """Return the one-sided p value of a window of lengths, (...): by a sign test for "fine", a t test for "coarse".

    Args:
        margins, scored: as for `mean_margin`.
        direction: 1 to show that the window passes, -1 to show that it fails.
    """
    if method == "fine":
        passing, samples = sum((m > 0).sum(-1) for m in margins), sum(m.shape[-1] for m in margins)
        shown = passing if direction > 0 else samples - passing
        return np.where(shown > 0, scipy.special.bdtrc(np.maximum(shown - 1, 0), samples, 0.5), 1.0)
    mean = mean_margin(margins, scored)
    if mean.samples < 2:
        return np.ones(margins[0].shape[:-1])
    return scipy.special.stdtr(mean.samples - 1, -direction * mean.value / mean.error)


def test_result(margins: np.ndarray, scored_tokens: int, level: float, method: str) -> int:
    """Return 1 if a length passes significantly, -1 if it fails significantly, else 0: one-sided tests at this level.

    Args:
        margins: of the repeats, (R,).
        scored_tokens: of each repeat.
    """
    side = 1 if centre(margins, method) > 0 else -1
    return side if p_value([margins], [scored_tokens], side, method) < level else 0


def windows(lengths: int) -> list[int]:
    """Return how many neighbouring lengths are tested together: 1, 2, 4 ... up to all.

    >>> windows(5)
    [1, 2, 4]
    """
    return [2**i for i in range(lengths.bit_length()) if 2**i <= lengths]


def risk_shares(windows: int, method: str) -> list[float]:
    """Return the share of the risk that each window has, from the smallest on.

    >>> risk_shares(4, "coarse"), risk_shares(3, "fine")
    ([0.25, 0.25, 0.25, 0.25], [0.64, 0.18, 0.18])
    """
    if method == "coarse" or windows == 1:
        return [1 / windows] * windows
    return [ALONE] + [(1 - ALONE) / (windows - 1)] * (windows - 1)


def without_overlap(margins: Sequence[np.ndarray], places: Places) -> list[np.ndarray]:
    """Return the margins of a window without those of targets that share scored tokens with one that is kept."""
    targets = [(i, j, place) for i, row in enumerate(places) for j, place in enumerate(row or ())]
    kept = [[] if row else [*range(m.shape[-1])] for m, row in zip(margins, places)]
    for index in separate([place for *_, place in targets]):
        i, j, _ = targets[index]
        kept[i].append(j)
    return [m[..., sorted(columns)] for m, columns in zip(margins, kept)]


def p_values(
    margins: Sequence[np.ndarray], scored: Sequence[int], direction: int, method: str, places: Places | None = None
) -> np.ndarray:
    """For each length, the p value of the hypothesis that closed testing is to reject there.

    Args:
        margins: for each length, of its repeats, (..., R).
        scored: scored tokens of a repeat, for each length.
        direction: 1 to show that memory reaches a length, by the lengths from there on; -1 to show that memory ends
            before it, by the lengths up to there.
        method: "fine" or "coarse".
        places: for each length, where the scored tokens of its repeats stand in the corpus; None where none overlap.

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
    """Return how many hypotheses are rejected before the first that is not; (..., lengths) to (...)."""
    return np.logical_and.accumulate(p < level, axis=-1).sum(-1)


class LengthInterval(NamedTuple):
    """Where a fine or coarse length lies: at `low` or above it, and below `high`, in tokens.

    Attributes:
        low: the largest tested length that memory reaches significantly; 0 if none.
        high: the smallest tested length that memory does not reach, significantly; None if none.
        repeats_needed: about how many repeats would show more where `high` is missing; None where memory reaches the
            longest length, or where `MAX_REPEATS` repeats would not do.
        longest: whether `low` is the longest tested length.
        text_too_short: whether repeats overlap so much that a longer text is needed to say more.

    >>> print(LengthInterval(253, 387), LengthInterval(0, 64), LengthInterval(1400, None, longest=True))
    [253, 387) <64 >=1400 (the longest tested)
    >>> print(LengthInterval(253, None, 40), "or", LengthInterval(0, None))
    >=253 (about 40 repeats needed to say more) or unknown (the repeats differ too much)
    """

    low: int
    high: int | None
    repeats_needed: int | None = None
    longest: bool = False
    text_too_short: bool = False

    def __str__(self):
        if self.high is not None:
            return f"[{self.low}, {self.high})" if self.low else f"<{self.high}"
        if self.longest:
            return f">={self.low} (the longest tested)"
        return f">={self.low} ({self.needed} to say more)" if self.low else f"unknown ({self.needed})"

    @property
    def sure(self) -> bool:
        """Return whether either end is significant."""
        return self.low > 0 or self.high is not None

    def in_words(self) -> str:
        """Return the interval in the words of figures and tables.

        >>> LengthInterval(1400, 2048).in_words(), LengthInterval(0, 64).in_words()
        ('1,400 to 2,048', 'below 64')
        >>> LengthInterval(0, None, 40).in_words(), LengthInterval(64, None, 40).in_words()
        ('unknown; about 40 repeats needed', 'at least 64')
        """
        if self.high is not None:
            return f"{self.low:,} to {self.high:,}" if self.low else f"below {self.high:,}"
        if not self.low:
            return f"unknown; {self.needed}"
        return f"at least {self.low:,}"

    @property
    def needed(self) -> str:
        """Return what would show more, or why nothing does."""
        if self.text_too_short:
            return "a longer text is needed"
        if self.repeats_needed is None:
            return "the repeats differ too much"
        return f"about {self.repeats_needed} repeats needed"


def length_interval(
    lengths: Sequence[int],
    margins: Sequence[np.ndarray],
    scored: Sequence[int],
    method: str,
    confidence: float = 0.95,
    protocol: str = "reference",
    places: Places | None = None,
) -> LengthInterval:
    """Confidence interval of the fine or coarse length, if memory only fades as targets grow.

    Each end has half of the risk 1 - confidence.

    Args:
        lengths: tested lengths in tokens, ascending.
        margins: per length, of its repeats above the threshold; see `lengths.margins`.
        scored: per length, scored tokens of a repeat.
        method: "fine" or "coarse".
        confidence: between 0 and 1.
        protocol: how the lengths were measured; see `measure.forgetting_curve`.
        places: as for `p_values`.

    Raises:
        ValueError: the confidence is not between 0 and 1, or there is no such protocol.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    if protocol not in ("reference", "adaptive"):
        raise ValueError(f"protocol must be 'reference' or 'adaptive', got {protocol!r}.")
    count = len(lengths)
    if not count:
        return LengthInterval(0, None)
    level, sizes, places = (1 - confidence) / 2, windows(count), places or [None] * count
    alone = [without_overlap([m], [row])[0] for m, row in zip(margins, places)]  # windows of one length
    if protocol == "adaptive":
        level, sizes = level / adaptive_tests(count, max(m.shape[-1] for m in margins), method, level), [1]
        outcomes = [test_result(m, n, level, method) for m, n in zip(alone, scored)]
        reached = max((i for i, v in enumerate(outcomes, start=1) if v > 0), default=0)
        end = min((i for i, v in enumerate(outcomes) if v < 0 and i >= reached), default=count)
    else:
        reached = int(rejected(p_values(margins, scored, 1, method, places), level))
        ended = int(rejected(p_values(margins, scored, -1, method, places)[..., ::-1], level))
        end = max(count - ended, reached)  # after a dip, both may be shown of one length
    low, longest = lengths[reached - 1] if reached else 0, reached == count
    if end < count or longest:
        return LengthInterval(low, lengths[end] if end < count else None, None, longest)
    if alone[-1].shape[-1] < SEPARATE * margins[-1].shape[-1]:
        return LengthInterval(low, None, text_too_short=True)
    levels = [level * share for share in risk_shares(len(sizes), method)]
    return LengthInterval(low, None, repeats_needed(alone[reached:], scored[reached:], levels, method))


def adaptive_tests(lengths: int, repeats: int, method: str, level: float) -> int:
    """Return the number of tests that the adaptive protocol makes, given the lengths and the most repeats of one.

    A look at too few texts for any sign test to reject is without risk, and not counted.

    >>> adaptive_tests(6, 10, "coarse", 0.025), adaptive_tests(6, 20, "coarse", 0.025)
    (24, 30)
    >>> adaptive_tests(6, 10, "fine", 0.025), adaptive_tests(6, 20, "fine", 0.025)
    (6, 12)
    """
    looks = [*STAGES, repeats] if repeats > STAGES[-1] else STAGES
    if method == "fine":
        looks = [n for n in looks if lengths * 0.5**n < level] or looks[-1:]
    return lengths * len(looks)


def repeats_needed(
    margins: Sequence[np.ndarray], scored: Sequence[int], levels: Sequence[float], method: str
) -> int | None:
    """About how many repeats would show on which side of the threshold the longest of these lengths is.

    That it passes is shown by its own targets, that it fails by those of a window that ends there. Margins are taken
    to be a standard error smaller than they are at hand, as the best of several windows flatters, and at least 1 %, as
    that of guessing is; shares of texts half a standard error smaller.

    The number closes about 80 % of simulated curves, but 54 % to 63 % where the truth is within one error of the
    threshold: the margin at hand then errs by its own size, and curves whose margin is too large by luck get too low a
    number. A margin that is smaller still would close these, and name many times too many for all others.

    Args:
        margins, scored: as for `p_values`.
        levels: of the one-sided tests of windows of 1, 2, 4 ... lengths.
        method: "fine" or "coarse".

    Returns:
        At most two significant digits, more than the repeats at hand; None if it takes more than `MAX_REPEATS`.
    """
    repeats = max(m.shape[-1] for m in margins)
    if method == "coarse" and repeats < 2:
        return STAGES[0]  # nothing to judge by
    more = np.arange(repeats + 1, MAX_REPEATS + 1)
    sides = [(1, 1, levels[0])] + [(-1, size, level) for size, level in zip(windows(len(scored)), levels)]
    needed = [
        more[enough.argmax()]
        for direction, size, level in sides
        for enough in [suffices(margins[-size:], scored[-size:], direction, more / repeats, level, method)]
        if enough.any()
    ]
    return int(float(f"{min(needed):.1e}")) if needed else None


def suffices(margins, scored, direction: int, factors: np.ndarray, level: float, method: str) -> np.ndarray:
    """Return which multiples of the targets in a window show a side of the threshold with probability `POWER`.

    Where the measured targets show the other side, none do.
    """
    if method == "fine":
        passing, samples = sum((m > 0).sum() for m in margins), sum(map(len, margins))
        shown = passing if direction > 0 else samples - passing
        share, targets = (shown + 0.5) / (samples + 1), (samples * factors + 1e-9).astype(int)
        share -= 0.5 * (share * (1 - share) / (samples + 1)) ** 0.5
        critical = np.ceil(scipy.special.bdtrik(1 - level, targets, 0.5)).astype(int) + 1  # as few of them as reject
        return (share > 0.5) & (critical <= targets) & (scipy.special.bdtrc(critical - 1, targets, share) >= POWER)
    mean = mean_margin(margins, scored)
    margin, freedom = direction * mean.value, np.maximum(mean.samples * factors - 1, 1)
    reach = scipy.special.stdtrit(freedom, 1 - level) + scipy.special.stdtrit(freedom, POWER)  # standard errors
    error = mean.error / np.sqrt(factors)
    return (mean.samples > 1) & (margin > -mean.error) & (max(margin - mean.error, RESOLUTION) >= reach * error)
