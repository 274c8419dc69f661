"""Effective length: the longest context with enough right answers, under three rules, with a confidence interval.

The effective length is the largest tested length whose share of right answers reaches a threshold:

- "ours": 85 %.
- "RULER": 85.6 %, the score of Llama-2-7B at 4,096 tokens (Hsieh et al. 2024).
- "NoLiMa": 85 % of the base score, i.e. of the best share at lengths up to 1,000 tokens, or at the shortest length if
  all are longer (Modarressi et al. 2025).

These benchmarks do not report intervals. We compute confidence limits for the share at each length, at a level at
which all claims hold jointly with 95 % confidence, for any curve. For single answers, we use the exact Clopper-Pearson
limits. Answers about the same sample (a target, or a haystack with several questions) are dependent, so we use the
median over samples with the limits of a sign test. The lower end is the largest length significantly above the
threshold. Lengths share the error rate, and a significant length passes its share on to the next one (fallback
procedure, Wiens 2003). The upper end is the smallest length from which all lengths are significantly below the
threshold, tested from the longest down. Under NoLiMa's rule, half of the error rate is spent on the base score.
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
BASE_LENGTH = 1000  # longest length of NoLiMa's base score, in tokens


class EffectiveLength(NamedTuple):
    """The effective length under one rule.

    Attributes:
        tokens: the largest tested length that reaches the threshold; 0 if none does.
        low: the largest tested length that is significantly above the threshold; 0 if none is.
        high: the smallest tested length from which all are significantly below the threshold; None if none is.
        threshold: share of right answers, from 0 to 1.
    """

    tokens: int
    low: int
    high: int | None
    threshold: float

    @property
    def interval(self) -> str:
        """Describe the interval of the length.

        >>> EffectiveLength(8192, 4096, 16384, 0.85).interval, EffectiveLength(64, 0, None, 0.85).interval
        ('4,096 to below 16,384', 'unknown: more answers are needed')
        """
        if self.high is None:
            return f"at least {self.low:,}" if self.low else "unknown: more answers are needed"
        return f"{self.low:,} to below {self.high:,}" if self.low else f"below {self.high:,}"


class Shares(NamedTuple):
    """The share of right answers at one length.

    Attributes:
        length: length in tokens.
        share: share of right answers, or its median over samples.
        texts: shares of the samples, ascending; None for single answers.
        right: number of right single answers.
        answers: number of single answers.
    """

    length: int
    share: float
    texts: np.ndarray | None = None
    right: int = 0
    answers: int = 0

    def limit(self, level: float, direction: int) -> float:
        """Return the lower (direction -1) or upper (1) confidence limit of the share, with error rate `level`."""
        if self.texts is None:
            wrong = self.answers - self.right
            if direction < 0:
                return float(betaincinv(self.right, wrong + 1, level)) if self.right else 0.0
            return float(betaincinv(self.right + 1, wrong, 1 - level)) if wrong else 1.0
        n = len(self.texts)
        beyond = int((bdtr(np.arange(n), n, 0.5) <= level).sum())  # number of samples that may lie beyond the limit
        if not beyond:
            return 0.0 if direction < 0 else 1.0
        return float(self.texts[beyond - 1 if direction < 0 else n - beyond])


def shares_of(counts: TaskResult | Sequence[tuple[int, int, int]]) -> list[Shares]:
    """Return the shares at each length, ascending.

    Raises:
        ValueError: counts are missing, impossible, or duplicated for a length.
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
            raise ValueError(f"counts must be rows of (length, right answers, answers), got {row!r}.")
        length, right, answers = int(row[0]), int(row[1]), int(row[2])
        if [length, right, answers] != [*row] or not (length > 0 and 0 <= right <= answers and answers > 0):
            raise ValueError(
                f"length {row[0]}: {row[1]} right of {row[2]} answers is impossible; give the numbers of right answers and "
                "of all answers as whole numbers."
            )
        shares.append(Shares(length, right / answers, None, right, answers))
    lengths = [s.length for s in shares]
    if not shares or len(set(lengths)) < len(lengths):
        raise ValueError(f"counts must have one row for each of one or more lengths, got lengths {lengths}.")
    return sorted(shares)


def effective_length(
    counts: TaskResult | Sequence[tuple[int, int, int]], rule: str = "ours", confidence: float = 0.95
) -> EffectiveLength:
    """Find the longest context with enough right answers, and a confidence interval for it.

    Args:
        counts: rows of (length in tokens, right answers, answers) from any benchmark; or a forgetting curve, needle
            or line retrieval result.
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
    shares, risk = shares_of(counts), (1 - confidence) / 2
    threshold = most = least = RULES[rule]
    if rule == "NoLiMa":
        risk /= 2
        base = [s for s in shares if s.length <= BASE_LENGTH] or shares[:1]
        threshold *= max(s.share for s in base)
        most *= max(s.limit(risk, 1) for s in base)  # upper limit of the base score
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
    """Read a CSV with the columns length, correct and total, and a column model if it covers several models.

    Returns:
        rows for `effective_length`, by model name.

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
                f"{path} lacks the column {' and '.join(sorted(missing))}; its first line must be length,correct,total, "
                "or model,length,correct,total. A score in per cent (RULER's summaries) is correct = score / 100 * total, with a "
                "row for each length."
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
        raise ValueError(f"{path} has no row below its first line. Add one for each length.")
    return models


def effective_rows(
    results: Mapping[str, TaskResult] | Mapping[str, list[tuple[int, int, int]]],
) -> tuple[tuple[str, ...], list]:
    """Return the columns and rows of a table of effective lengths, with a row for each model and rule."""
    columns = ("model", "rule", "threshold", "effective length", "95 % CI", "tested")
    rows = []
    for name, counts in results.items():
        shares = shares_of(counts)
        for rule in RULES:
            length = effective_length(counts, rule)
            tested = f"{shares[0].length} to {shares[-1].length}"
            base = length.threshold / RULES[rule]  # NoLiMa's rule takes 85 % of any base score, even a low one
            tokens = f"{length.tokens} (base score {base:.0%}: cannot do the task)" if base < 0.5 else length.tokens
            rows.append((name, rule, f"{length.threshold:.1%}", tokens, length.interval, tested))
    return columns, rows
