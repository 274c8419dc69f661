"""Effective length: the longest context with enough correct answers, under three rules, with a confidence interval.

The effective length is the largest tested length at which the share of correct answers reaches a threshold:

- "ours": 85 %.
- "RULER": 85.6 %, the score of Llama-2-7B at 4,096 tokens (Hsieh et al. 2024).
- "NoLiMa": 85 % of the base score (Modarressi et al. 2025). The base score is the best share at lengths up to 1,000
  tokens. If all lengths are longer, it is the share at the shortest length.

RULER and NoLiMa do not report confidence intervals. We compute confidence limits for the share at each length. We
correct them for multiple lengths, so the interval has a confidence level of 95 %:

- If each sample has one answer, we use the exact Clopper-Pearson limits of the share.
- If each sample has several dependent answers (a target, or a haystack with several questions), we use the median
  over samples. Its confidence limits come from a sign test.
- The lower end of the interval is the largest length at which the share is significantly above the threshold. The
  error rate is split between the lengths. If the test at a length is significant, its part of the error rate is
  added to that of the next length (fallback procedure, Wiens 2003).
- The upper end is the smallest length such that the shares at this and all longer lengths are significantly below the
  threshold. We test from the longest length down.
- Under NoLiMa's rule, half of the error rate is spent on the base score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import bdtr, betaincinv

from ..result import plural
from ..task import Counts, TaskResult
from .units import sizes_in_bytes


RULES = {"ours": 0.85, "RULER": 0.856, "NoLiMa": 0.85}
BASE_LENGTH = 1000  # in tokens; NoLiMa's base score is measured up to this length
MOST_SAMPLES = 1000  # largest number of samples per length that we recommend


class EffectiveLength(NamedTuple):
    """The effective length under one rule, with its confidence interval.

    Attributes:
        tokens: the largest tested length with enough correct answers. 0 if there is no such length.
        low: the largest tested length with a share significantly above the threshold. 0 if there is no such length.
        high: the smallest tested length such that the shares at this and all longer lengths are significantly below
            the threshold. None if there is no such length.
        threshold: required share of correct answers, from 0 to 1.
    """

    tokens: int
    low: int
    high: int | None
    threshold: float

    @property
    def known(self) -> bool:
        """Whether the confidence interval has an end."""
        return self.low > 0 or self.high is not None

    def times(self, size: float) -> EffectiveLength:
        """Return the length in another unit, of which a token has `size`."""
        high = None if self.high is None else round(self.high * size)
        return self._replace(tokens=round(self.tokens * size), low=round(self.low * size), high=high)

    @property
    def interval(self) -> str:
        """Describe the confidence interval in words.

        >>> EffectiveLength(8192, 4096, 16384, 0.85).interval, EffectiveLength(64, 0, None, 0.85).interval
        ('4,096 to below 16,384', 'unknown: more answers are needed')
        """
        if self.high is None:
            return f"at least {self.low:,}" if self.low else "unknown: more answers are needed"
        return f"{self.low:,} to below {self.high:,}" if self.low else f"below {self.high:,}"


def share_limit(at: Counts, level: float, direction: int) -> float:
    """Return the lower (direction=-1) or upper (direction=1) confidence limit of the share of correct answers.

    The share lies beyond this limit with a probability of at most `level`.
    """
    n = len(at.shares)
    if at.questions == 1:
        right = int(at.right)
        if direction < 0:
            return float(betaincinv(right, n - right + 1, level)) if right else 0.0
        return float(betaincinv(right + 1, n - right, 1 - level)) if right < n else 1.0
    beyond = int((bdtr(np.arange(n), n, 0.5) <= level).sum())  # number of samples beyond the limit
    if not beyond:
        return 0.0 if direction < 0 else 1.0
    return float(np.sort(at.shares)[beyond - 1 if direction < 0 else n - beyond])


def share(at: Counts) -> float:
    """Return the share of correct answers. For samples with several answers, return the median over samples."""
    return float(np.mean(at.shares) if at.questions == 1 else np.median(at.shares))


def counts_by_length(counts: TaskResult | Sequence[tuple[int, int, int]]) -> list[Counts]:
    """Return the counts at each length, in ascending order of length in tokens.

    Raises:
        ValueError: counts are missing or impossible, or a length occurs twice.
    """
    if isinstance(counts, TaskResult):
        found = counts.by_length()
        questions = max((at.questions for at in found), default=1)  # one kind of limit for all lengths
        found = [at._replace(questions=questions) for at in found]
    else:
        found = []
        for row in counts:
            if len(row) != 3:
                raise ValueError(f"counts must be rows of (length, correct answers, answers), got {row!r}.")
            length, right, answers = int(row[0]), int(row[1]), int(row[2])
            if [length, right, answers] != [*row] or not (length > 0 and 0 <= right <= answers and answers > 0):
                raise ValueError(
                    f"counts must be whole numbers with 0 <= correct answers <= answers, got {row[1]} correct of "
                    f"{row[2]} answers at length {row[0]}."
                )
            found.append(Counts(length, np.arange(answers) < right, 1, length, answers, right))
    lengths = [at.tokens for at in found]
    if not found or len(set(lengths)) < len(lengths):
        raise ValueError(f"counts must not be empty and must have exactly one row per length, got lengths {lengths}.")
    return sorted(found, key=lambda at: at.tokens)


def effective_length(
    counts: TaskResult | Sequence[tuple[int, int, int]], rule: str = "ours", confidence: float = 0.95
) -> EffectiveLength:
    """Return the longest context with enough correct answers, and its confidence interval.

    Args:
        counts: result of a forgetting curve, needle or line retrieval. For other benchmarks, rows of (length in
            tokens, correct answers, answers).
        rule: "ours", "RULER" or "NoLiMa"; see the module docstring.
        confidence: confidence level, between 0 and 1.

    Raises:
        ValueError: the rule is unknown, or the counts are impossible.

    >>> effective_length([(4096, 480, 500), (8192, 455, 500), (16384, 430, 500), (32768, 300, 500)], "RULER")[:3]
    (16384, 8192, 32768)
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    return effective_length_of(counts_by_length(counts), rule, confidence)


def effective_length_of(measured: Sequence[Counts], rule: str, confidence: float = 0.95) -> EffectiveLength:
    """Like `effective_length`, for the counts at each length in ascending order."""
    risk = (1 - confidence) / 2
    threshold = most = least = RULES[rule]
    if rule == "NoLiMa":
        risk /= 2
        base = [at for at in measured if at.tokens <= BASE_LENGTH] or measured[:1]
        threshold *= max(map(share, base))
        most *= max(share_limit(at, risk, 1) for at in base)  # upper confidence limit of the base score
        least *= max(share_limit(at, risk / len(base), -1) for at in base)
    low, high, level = 0, None, 0.0
    for at in measured:
        level += risk / len(measured)
        if share_limit(at, level, -1) >= most:
            low = at.tokens
        else:
            level = 0
    for at in reversed(measured):
        if share_limit(at, risk, 1) >= least:
            break
        high = at.tokens
    tokens = max((at.tokens for at in measured if share(at) >= threshold), default=0)
    return EffectiveLength(tokens, low, high, threshold)


def samples_needed(measured: Sequence[Counts], rule: str) -> int | None:
    """Return the number of samples per length from which an effective length would be known; None above 1,000.

    We assume that further samples have the same distribution of shares as the measured samples.
    """
    samples = max(len(at.shares) for at in measured)
    while samples < MOST_SAMPLES:
        samples += max(1, samples // 20)
        quantiles = (np.arange(samples) + 0.5) / samples
        more = [np.quantile(at.shares, quantiles, method="inverted_cdf") for at in measured]
        grown = [at._replace(shares=shares, right=shares.sum()) for at, shares in zip(measured, more)]
        if effective_length_of(grown, rule).known:
            return samples
    return None


def effective_rows(results: Mapping[str, TaskResult]) -> tuple[tuple[str, ...], list, list[str]]:
    """Return a table of effective lengths, with one row per model and rule, and sentences about unknown lengths.

    Returns:
        the columns; the rows of all lengths that are known; a sentence with the number of samples that are needed,
        for each model with unknown lengths.
    """
    sizes = sizes_in_bytes(results)
    columns = ("model", "rule", "threshold", "effective length", "95 % CI")
    columns += ("95 % CI in bytes", "tested") if sizes else ("tested",)
    rows, sentences = [], []
    for name, result in results.items():
        measured = counts_by_length(result)
        unknown = []
        for rule in RULES:
            length = effective_length_of(measured, rule)
            if not length.known:
                needed = samples_needed(measured, rule)
                unknown.append(f"{rule}: {f'more than {MOST_SAMPLES:,}' if needed is None else needed}")
                continue
            tested = f"{measured[0].tokens} to {measured[-1].tokens}"
            base = length.threshold / RULES[rule]  # with NoLiMa's rule, a low base score gives a low threshold
            tokens = f"{length.tokens} (base score {base:.0%}: cannot do the task)" if base < 0.5 else length.tokens
            in_bytes = [length.times(sizes[name]).interval] if sizes else []
            rows.append((name, rule, f"{length.threshold:.1%}", tokens, length.interval, *in_bytes, tested))
        if unknown:
            samples = plural(max(len(at.shares) for at in measured), "sample")
            sentences.append(
                f"The effective length of {name} is unknown from {samples} per length. Needed at the same shares, by "
                f"rule: {', '.join(unknown)}."
            )
    return columns, rows, sentences
