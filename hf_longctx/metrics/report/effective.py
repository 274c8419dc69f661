"""Effective length: the longest context with enough correct answers, under three rules, with a confidence interval.

The effective length is the largest tested length at which the share of correct answers reaches a threshold:

- "ours": 85 %.
- "RULER": 85.6 %, the score of Llama-2-7B at 4,096 tokens (Hsieh et al. 2024).
- "NoLiMa": 85 % of the base score, which is the best share at lengths up to 1,000 tokens, or the share at the shortest
  length if all lengths are longer (Modarressi et al. 2025).

RULER and NoLiMa do not report confidence intervals. We compute confidence limits for the share at each length, and
correct them for multiple lengths, so that the interval has a confidence level of 95 %:

- If each sample has one answer, we use the exact Clopper-Pearson limits of the share. If a sample has several answers
  (a target, or a haystack with several questions), they are dependent, so we use the median over samples with the
  limits of a sign test.
- The lower end of the interval is the largest length at which the share is significantly above the threshold. The
  error rate is split between the lengths, and each significant length passes its part on to the next (fallback
  procedure, Wiens 2003).
- The upper end is the smallest length from which on all shares are significantly below the threshold. We test from the
  longest length down.
- Under NoLiMa's rule, half of the error rate is spent on the base score.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import NamedTuple

import numpy as np
from scipy.special import bdtr, betaincinv

from ..task import TaskResult


RULES = {"ours": 0.85, "RULER": 0.856, "NoLiMa": 0.85}
BASE_LENGTH = 1000  # in tokens; NoLiMa's base score is measured up to this length


class EffectiveLength(NamedTuple):
    """The effective length under one rule, with its confidence interval.

    Attributes:
        tokens: the largest tested length whose share of correct answers reaches the threshold; 0 if there is none.
        low: the largest tested length whose share is significantly above the threshold; 0 if there is none.
        high: the smallest tested length from which on all shares are significantly below the threshold; None if there
            is none.
        threshold: required share of correct answers, from 0 to 1.
    """

    tokens: int
    low: int
    high: int | None
    threshold: float

    @property
    def interval(self) -> str:
        """Describe the confidence interval in words.

        >>> EffectiveLength(8192, 4096, 16384, 0.85).interval, EffectiveLength(64, 0, None, 0.85).interval
        ('4,096 to below 16,384', 'unknown: more answers are needed')
        """
        if self.high is None:
            return f"at least {self.low:,}" if self.low else "unknown: more answers are needed"
        return f"{self.low:,} to below {self.high:,}" if self.low else f"below {self.high:,}"


class Shares(NamedTuple):
    """The share of correct answers at one length.

    Attributes:
        length: length in tokens.
        share: share of correct answers, or its median over samples with several answers.
        texts: share of each sample, in ascending order; None if each sample has one answer.
        right: number of correct answers, if each sample has one answer.
        answers: number of answers, if each sample has one answer.
    """

    length: int
    share: float
    texts: np.ndarray | None = None
    right: int = 0
    answers: int = 0

    def limit(self, level: float, direction: int) -> float:
        """Return the lower (direction=-1) or upper (direction=1) confidence limit of the share.

        The share lies beyond this limit with a probability of at most `level`.
        """
        if self.texts is None:
            wrong = self.answers - self.right
            if direction < 0:
                return float(betaincinv(self.right, wrong + 1, level)) if self.right else 0.0
            return float(betaincinv(self.right + 1, wrong, 1 - level)) if wrong else 1.0
        n = len(self.texts)
        beyond = int((bdtr(np.arange(n), n, 0.5) <= level).sum())  # number of samples beyond the limit
        if not beyond:
            return 0.0 if direction < 0 else 1.0
        return float(self.texts[beyond - 1 if direction < 0 else n - beyond])


def shares_of(counts: TaskResult | Sequence[tuple[int, int, int]]) -> list[Shares]:
    """Return the share at each length, in ascending order of length.

    Raises:
        ValueError: counts are missing or impossible, or a length occurs twice.
    """
    if isinstance(counts, TaskResult):
        scores = counts.by_length()
        if any(s.questions > 1 for s in scores):
            return [Shares(s.tokens, float(np.median(s.shares)), np.sort(s.shares)) for s in scores]
        rows = [(s.tokens, s.shares.sum(), len(s.shares)) for s in scores]
    else:
        rows = list(counts)
    shares = []
    for row in rows:
        if len(row) != 3:
            raise ValueError(f"counts must be rows of (length, correct answers, answers), got {row!r}.")
        length, right, answers = int(row[0]), int(row[1]), int(row[2])
        if [length, right, answers] != [*row] or not (length > 0 and 0 <= right <= answers and answers > 0):
            raise ValueError(
                f"counts must be whole numbers with 0 <= correct answers <= answers, got {row[1]} correct of {row[2]} "
                f"answers at length {row[0]}."
            )
        shares.append(Shares(length, right / answers, None, right, answers))
    lengths = [s.length for s in shares]
    if not shares or len(set(lengths)) < len(lengths):
        raise ValueError(f"counts must have at least one row and a single row for each length, got lengths {lengths}.")
    return sorted(shares)


def effective_length(
    counts: TaskResult | Sequence[tuple[int, int, int]], rule: str = "ours", confidence: float = 0.95
) -> EffectiveLength:
    """Return the longest context with enough correct answers, and a confidence interval for it.

    Args:
        counts: a forgetting curve, needle or line retrieval result, or rows of (length in tokens, correct answers,
            answers) from any benchmark.
        rule: required share: "ours", "RULER" or "NoLiMa". See the module docstring.
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
    shares, risk = shares_of(counts), (1 - confidence) / 2
    threshold = most = least = RULES[rule]
    if rule == "NoLiMa":
        risk /= 2
        base = [s for s in shares if s.length <= BASE_LENGTH] or shares[:1]
        threshold *= max(s.share for s in base)
        most *= max(s.limit(risk, 1) for s in base)  # upper confidence limit of the base score
        least *= max(s.limit(risk / len(base), -1) for s in base)
    low, high, level = 0, None, 0.0
    for s in shares:
        level += risk / len(shares)
        if s.limit(level, -1) >= most:
            low = s.length
        else:
            level = 0
    for s in reversed(shares):
        if s.limit(risk, 1) >= least:
            break
        high = s.length
    return EffectiveLength(max((s.length for s in shares if s.share >= threshold), default=0), low, high, threshold)


def read_counts(path: str | PathLike) -> dict[str, list[tuple[int, int, int]]]:
    """Read a CSV file with the columns length, correct and total, and optionally model.

    Returns:
        rows of (length, correct answers, answers) for `effective_length`, keyed by model name.

    Raises:
        ValueError: a column is missing, or a value is not a whole number; the message names the line.
    """
    models: dict[str, list[tuple[int, int, int]]] = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file, skipinitialspace=True)
        table.fieldnames = [name.strip().lower() for name in table.fieldnames or ()]
        missing = {"length", "correct", "total"} - {*table.fieldnames}
        if missing:
            raise ValueError(
                f"the first line of {path} must be length,correct,total or model,length,correct,total, but lacks "
                f"{' and '.join(sorted(missing))}. For scores in per cent, as in RULER's summaries, compute "
                "correct = score / 100 * total for each length."
            )
        for row in table:
            try:
                counts = (int(row["length"]), int(row["correct"]), int(row["total"]))
            except (TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {table.line_num}: length, correct and total must be whole numbers, got {row}."
                ) from None
            models.setdefault(row.get("model") or "the model", []).append(counts)
    if not models:
        raise ValueError(f"{path} does not contain rows below its first line. Add a row for each length.")
    return models


def effective_rows(
    results: Mapping[str, TaskResult] | Mapping[str, list[tuple[int, int, int]]],
) -> tuple[tuple[str, ...], list]:
    """Return the column names and rows of a table of effective lengths, with one row per model and rule."""
    columns = ("model", "rule", "threshold", "effective length", "95 % CI", "tested")
    rows = []
    for name, counts in results.items():
        shares = shares_of(counts)
        for rule in RULES:
            length = effective_length(counts, rule)
            tested = f"{shares[0].length} to {shares[-1].length}"
            base = length.threshold / RULES[rule]  # with NoLiMa's rule, a low base score gives a low threshold
            tokens = f"{length.tokens} (base score {base:.0%}: cannot do the task)" if base < 0.5 else length.tokens
            rows.append((name, rule, f"{length.threshold:.1%}", tokens, length.interval, tested))
    return columns, rows
