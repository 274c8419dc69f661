"""The forgetting curve: what a model is asked, how its answers are counted, and the lengths read off the counts.

A model reads a target S of n tokens twice, `[bos] S [bos] S [eos]`, or once after an unrelated text of the same
length, `[bos] I [bos] S [eos]`. With teacher forcing, the share of tokens it predicts right in the second half of the
last S is its copy accuracy in the first case and its language-modelling (LM) accuracy in the second. As n grows,
copying is at first exact (fine-grained memory), then only better than guessing from the text (coarse-grained memory),
and at last no better (amnesia).

Source: Liu et al. 2024, "Forgetting Curve: A Reliable Method for Evaluating Memorization Capability for Long-context
Models", section 3. This file knows no model: it needs numpy and scipy only.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtr

from ..result import Headline, Result, Table
from .lengths import READINGS, LengthInterval, length_interval


SHORTEST = 8  # first length of the two standard grids
DATA_TYPES = ("order", "random")


# ---------------------------------------------------------------------------------------------------------------------
# The protocol: lengths, samples, model inputs


def linear_lengths(max_length: int, n: int) -> list[int]:
    """About `n` evenly spaced lengths from 8 to `max_length` tokens, truncated to integers, without duplicates.

    >>> linear_lengths(128, 4)
    [8, 48, 88, 128]
    """
    return _grid(np.linspace, max_length, n)


def log_lengths(max_length: int, n: int) -> list[int]:
    """At most `n` geometrically spaced lengths from 8 to `max_length` tokens, truncated, without duplicates.

    >>> log_lengths(700, 4)
    [8, 35, 157, 700]
    """
    return _grid(np.geomspace, max_length, n)


def _grid(space, max_length, n):
    if n < 2 or max_length <= SHORTEST:
        raise ValueError(
            f"a grid of {n} lengths up to {max_length} is too small: it starts at {SHORTEST} tokens and needs n >= 2 "
            f"and max_length > {SHORTEST}. For other lengths, give the list itself: lengths=[4, 6]."
        )
    return np.unique(space(SHORTEST, max_length, n).astype(int)).tolist()


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths as a list of plain integers.

    Raises:
        ValueError: there is none, one is not an integer or below 1, or they do not strictly ascend.
    """
    try:
        lengths = [operator.index(length) for length in lengths]
    except TypeError:
        raise ValueError(f"lengths must be a list of integers (tokens), got {lengths!r}.") from None
    if not lengths or lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(
            f"lengths must be one or more token counts >= 1 in strictly ascending order, got {lengths}. "
            "Drop what is below 1 and pass sorted(set(lengths))."
        )
    return lengths


def check_ids(ids, name: str, vocab_size: int) -> np.ndarray:
    """Token ids as an int64 array of shape (N,).

    Raises:
        ValueError: empty, not one-dimensional, not integers, or an id outside 0 .. vocab_size - 1.
    """
    ids = np.asarray(ids)
    if ids.size == 0:
        raise ValueError(f"{name} is empty: there is nothing to measure on. Was the text empty?")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a flat sequence of token ids, got {ids.dtype} of shape {ids.shape}. "
            'For a text: tokenizer(text, add_special_tokens=False)["input_ids"].'
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        raise ValueError(
            f"{name}[{outside[0]}] is {ids[outside[0]]}, but the model's vocabulary has {vocab_size} ids "
            f"(0 .. {vocab_size - 1}). The text was probably encoded with the tokenizer of another model."
        )
    return ids.astype(np.int64)


class Sample(NamedTuple):
    """One repeat at one length n. The same target serves the copy and the LM input."""

    target: np.ndarray  # S, (n,) int64
    irrelevant: np.ndarray  # I, (n,) int64
    begin: int | None  # where S starts in the corpus; None for random data


def order_samples(
    corpus: np.ndarray, lengths: Sequence[int], repeats: int, seed: int, irrelevant: np.ndarray | None = None
) -> Iterator[list[Sample]]:
    """Per length, `repeats` stretches of `corpus`; the irrelevant text is the end of `irrelevant` or of the corpus.

    Lengths are drawn in the order given, so a grid that is cut short keeps the samples of its beginning.

    Raises:
        ValueError: the corpus is shorter than three times the longest length, or `irrelevant` than the longest length.
    """
    irrelevant = _check_corpus(corpus, lengths, irrelevant)

    def draw():
        rng = random.Random(seed)
        for n in lengths:
            begins = [rng.randint(0, len(corpus) - 3 * n) for _ in range(repeats)]
            yield [Sample(corpus[b : b + n], irrelevant[-n:], b) for b in begins]

    return draw()


def nested_order_samples(
    corpus: np.ndarray, lengths: Sequence[int], repeats: int, seed: int, irrelevant: np.ndarray | None = None
) -> Iterator[list[Sample]]:
    """As `order_samples`, but all lengths share their beginnings: each target is the start of the next longer one.

    Repeat i starts at the same place at every length, drawn as for the longest. The irrelevant text, too, is the start
    of one stretch: of the last tokens, as many as the longest length has.
    """
    irrelevant = _check_corpus(corpus, lengths, irrelevant)
    longest, rng = max(lengths), random.Random(seed)
    begins = [rng.randint(0, len(corpus) - 3 * longest) for _ in range(repeats)]
    block = irrelevant[-longest:]
    return ([Sample(corpus[b : b + n], block[:n], b) for b in begins] for n in lengths)


def _check_corpus(corpus, lengths, irrelevant):
    """The text that irrelevant tokens come from: `irrelevant`, or else the corpus."""
    longest = max(lengths)
    if len(corpus) < 3 * longest:
        raise ValueError(
            f"the corpus has {len(corpus)} tokens; length {longest} needs {3 * longest}, three times as many, so that "
            f"target and irrelevant text keep apart. The longest possible length is {len(corpus) // 3}: drop the "
            "lengths above it or give more text."
        )
    if irrelevant is None:
        irrelevant = corpus
    elif len(irrelevant) < longest:
        raise ValueError(
            f"irrelevant_tokens has {len(irrelevant)} ids, fewer than length {longest} needs. The longest possible "
            f"length is {len(irrelevant)}: drop the lengths above it or give more text."
        )
    return irrelevant


def random_samples(
    id_range: tuple[int, int], lengths: Sequence[int], repeats: int, seed: int, skip: frozenset[int] = frozenset()
) -> Iterator[list[Sample]]:
    """Per length, `repeats` pairs of independent uniform id sequences.

    Args:
        id_range: lowest and highest id, both included.
        skip: special ids, never drawn.

    Raises:
        ValueError: the range holds no id that may be drawn.
    """
    sequence = _random_ids(id_range, seed, skip)
    return ([Sample(sequence(n), sequence(n), None) for _ in range(repeats)] for n in lengths)


def nested_random_samples(
    id_range: tuple[int, int], lengths: Sequence[int], repeats: int, seed: int, skip: frozenset[int] = frozenset()
) -> Iterator[list[Sample]]:
    """As `random_samples`, but each target is the start of the next longer one, and all share one irrelevant text."""
    sequence, longest = _random_ids(id_range, seed, skip), max(lengths)
    targets, block = [sequence(longest) for _ in range(repeats)], sequence(longest)
    return ([Sample(target[:n], block[:n], None) for target in targets] for n in lengths)


def _random_ids(id_range, seed, skip):
    """A function that draws n ids, (n,) int64."""
    low, high = id_range
    if high - low < len(skip):
        raise ValueError(
            f"id_range=({low}, {high}) leaves no choice of random ids beside the special ids {sorted(skip)}. "
            "Give a wider range: id_range=(lowest, highest), both included."
        )
    rng = random.Random(seed)

    def sequence(n):
        ids = []
        while len(ids) < n:
            drawn = rng.randint(low, high)
            if drawn not in skip:
                ids.append(drawn)
        return np.array(ids, dtype=np.int64)

    return sequence


def model_input(prefix: np.ndarray, target: np.ndarray, bos: int, eos: int) -> np.ndarray:
    """`[bos] prefix [bos] target [eos]`, (2n + 3,) int64: prefix is the target (copy) or the irrelevant text (LM)."""
    return np.concatenate([[bos], prefix, [bos], target, [eos]])


def input_tokens(length: int) -> int:
    """Tokens the model reads at this length: 2n + 3."""
    return 2 * length + 3


def longest_length(max_tokens: int) -> int:
    """The longest length whose input fits into `max_tokens` (0 if none does)."""
    return max((max_tokens - 3) // 2, 0)


def scored_tokens(length: int) -> int:
    """Tokens that count: the second half of the target, rounded up. The first tells the model that it may copy."""
    return (length + 1) // 2


def scored_logits(length: int) -> range:
    """The input positions whose logits predict the scored tokens: one before each of them; never the last two."""
    end = input_tokens(length) - 2
    return range(end - scored_tokens(length), end)


# ---------------------------------------------------------------------------------------------------------------------
# The result


@dataclass(frozen=True)
class CurvePoint:
    """Counts at one length.

    Attributes:
        length: tokens in the target.
        copy_correct: correctly predicted tokens of the copy input, one integer per repeat, each of `scored_tokens`.
        lm_correct: the same for the LM input. Repeat i of both has the same target.
        begin_locs: where each target starts in the corpus; None for random data.
    """

    length: int
    copy_correct: tuple[int, ...]
    lm_correct: tuple[int, ...]
    begin_locs: tuple[int, ...] | None = None

    def __post_init__(self):
        for name in ("copy_correct", "lm_correct"):
            counts = tuple(getattr(self, name))
            if not counts or not all(isinstance(c, int) and 0 <= c <= self.scored_tokens for c in counts):
                raise ValueError(
                    f"{name} at length {self.length} must hold integers from 0 to {self.scored_tokens}, got {counts}."
                )
            object.__setattr__(self, name, counts)
        if len(self.copy_correct) != len(self.lm_correct):
            raise ValueError(
                f"length {self.length} has {len(self.copy_correct)} copy counts and {len(self.lm_correct)} LM counts; "
                "they are pairs, one per repeat."
            )
        if self.begin_locs is not None:
            object.__setattr__(self, "begin_locs", tuple(self.begin_locs))

    def first(self, repeats: int) -> CurvePoint:
        """The point with its first repeats only."""
        begins = self.begin_locs and self.begin_locs[:repeats]
        return CurvePoint(self.length, self.copy_correct[:repeats], self.lm_correct[:repeats], begins)

    @property
    def repeats(self) -> int:
        return len(self.copy_correct)

    @property
    def scored_tokens(self) -> int:
        """Tokens that count in each repeat."""
        return scored_tokens(self.length)

    @property
    def copy_mean(self) -> float:
        """Copy accuracy, mean over repeats, 0 to 1."""
        return sum(self.copy_correct) / (self.repeats * self.scored_tokens)

    @property
    def lm_mean(self) -> float:
        """LM accuracy, mean over repeats, 0 to 1."""
        return sum(self.lm_correct) / (self.repeats * self.scored_tokens)

    @property
    def copy_std(self) -> float:
        """Standard deviation of the copy accuracy over repeats (population, ddof 0)."""
        return float(np.std(self.copy_correct)) / self.scored_tokens

    @property
    def lm_std(self) -> float:
        """Standard deviation of the LM accuracy over repeats (population, ddof 0)."""
        return float(np.std(self.lm_correct)) / self.scored_tokens

    @property
    def p_value(self) -> float:
        """Two-sided paired t-test of copy against LM over repeats; 1 where it is undefined (one repeat, all equal)."""
        # On counts, not accuracies: t does not change with the unit, and integers show an exactly constant difference.
        difference = np.subtract(self.copy_correct, self.lm_correct)
        if self.repeats < 2 or not difference.any():
            return 1.0
        error = difference.std(ddof=1) / self.repeats**0.5
        return 0.0 if error == 0 else float(2 * stdtr(self.repeats - 1, -abs(difference.mean()) / error))


class MemoryLength(int):
    """A length read off a curve, in tokens: the last tested one that passes, 0 if none does.

    Attributes:
        open_ended: the longest tested length passes, so the true one may be larger; printed as ">1400".
        next_tested: the tested length after it, so that the true one lies in [self, next_tested); None if open ended.

    >>> print(MemoryLength(1400, open_ended=True), MemoryLength(767, next_tested=893) + 1)
    >1400 768
    """

    open_ended: bool
    next_tested: int | None

    def __new__(cls, tokens: int, *, open_ended: bool = False, next_tested: int | None = None):
        self = super().__new__(cls, tokens)
        self.open_ended = open_ended
        self.next_tested = next_tested
        return self

    def __str__(self):
        return f">{int(self)}" if self.open_ended else str(int(self))

    def __repr__(self):
        return f"MemoryLength({int(self)}, open_ended={self.open_ended}, next_tested={self.next_tested})"


def memory_lengths(
    lengths: Sequence[int], copy: Sequence[int], lm: Sequence[int], scored: Sequence[int], p_values: Sequence[float]
) -> dict[str, MemoryLength]:
    """Five readings of "memory length" from the counts of a curve, decided in integers.

    A length passes as *fine* if copy accuracy is above 99 %, as *coarse* if it is at least 1 % above LM accuracy.

    Args:
        lengths: tested lengths in tokens, ascending.
        copy, lm, scored: per length, correct copy tokens, correct LM tokens and scored tokens, summed over repeats.
        p_values: per length, of the paired test of copy against LM.

    Returns:
        `fine_max`, `coarse_max`: the largest length that passes (Table 3 of the paper: the headline).
        `fine_first_run`, `coarse_first_run`: the end of the first uninterrupted stretch of passing lengths. Lengths
        that fail before it are skipped: very short targets do not show yet that the task is to copy (footnote 7).
        `coarse_max_significant`: the largest length that passes as coarse with p < 0.05.

    >>> memory_lengths([8, 64, 128], [4, 31, 50], [1, 9, 50], [4, 32, 64], [0.01, 0.01, 1])["coarse_max"]
    MemoryLength(64, open_ended=False, next_tested=128)
    """
    fine = [100 * c > 99 * n for c, n in zip(copy, scored)]
    coarse = [100 * (c - b) >= n for c, b, n in zip(copy, lm, scored)]
    significant = [passes and p < 0.05 for passes, p in zip(coarse, p_values)]

    def largest(passing):
        return max((i for i, passes in enumerate(passing) if passes), default=-1)

    def first_run(passing):
        if True not in passing:
            return -1
        start = passing.index(True)
        return passing.index(False, start) - 1 if False in passing[start:] else len(passing) - 1

    def reading(i):
        last = i == len(lengths) - 1
        return MemoryLength(
            lengths[i] if i >= 0 else 0, open_ended=last and i >= 0, next_tested=None if last else lengths[i + 1]
        )

    return {
        "fine_max": reading(largest(fine)),
        "fine_first_run": reading(first_run(fine)),
        "coarse_max": reading(largest(coarse)),
        "coarse_first_run": reading(first_run(coarse)),
        "coarse_max_significant": reading(largest(significant)),
    }


@dataclass(frozen=True)
class ForgettingCurve(Result):
    """A measured curve.

    Attributes:
        points: one `CurvePoint` per measured length, ascending.
        settings: how it was measured: plain JSON values, kept as they are.
        not_measured: why a length that was asked for has no point, by length.
    """

    kind = "forgetting_curve"
    title = "Forgetting curve"

    points: tuple[CurvePoint, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    not_measured: dict[int, str] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "points", tuple(self.points))

    @property
    def measured(self) -> bool:
        return bool(self.points)

    @property
    def fine_length(self) -> MemoryLength:
        """The largest measured length with a copy accuracy above 99 %."""
        return self.memory_lengths["fine_max"]

    @property
    def coarse_length(self) -> MemoryLength:
        """The largest measured length with a copy accuracy at least 1 % above the LM accuracy."""
        return self.memory_lengths["coarse_max"]

    @property
    def memory_lengths(self) -> dict[str, MemoryLength]:
        """All five readings; see the function `memory_lengths`."""
        return memory_lengths(
            [p.length for p in self.points],
            [sum(p.copy_correct) for p in self.points],
            [sum(p.lm_correct) for p in self.points],
            [p.repeats * p.scored_tokens for p in self.points],
            [p.p_value for p in self.points],
        )

    def interval(self, reading: str, confidence: float = 0.95) -> LengthInterval:
        """Where the "fine" or the "coarse" length lies, given the noise of the repeats; see `length_interval`."""
        return length_interval(self.points, reading, confidence=confidence)

    @property
    def repeats_range(self) -> str:
        """How many a point has, such as "10", or "3 to 10" of an adaptive curve."""
        counts = sorted({p.repeats for p in self.points})
        return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    def summary(self) -> str:
        """The result in one line."""
        missing = ""
        for why in dict.fromkeys(self.not_measured.values()):
            lengths = [length for length, reason in self.not_measured.items() if reason == why]
            some = f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]}"
            missing += f"; {some if len(lengths) > 1 else f'length {lengths[0]}'} not measured: {why}"
        if not self.points:
            return "no length measured" + missing

        def tell(name, length):
            after = "" if length.next_tested is None else f" (next tested: {length.next_tested})"
            return f"{name} length {length} tokens{after}"

        first, last = self.points[0], self.points[-1]
        return (
            f"{tell('fine', self.fine_length)}, {tell('coarse', self.coarse_length)}; "
            f"{len(self.points)} lengths from {first.length} to {last.length}, {self.repeats_range} repeats; "
            f"95 % sure: fine {self.interval('fine')}, coarse {self.interval('coarse')}{missing}"
        )

    def explanation(self) -> str:
        return (
            "The model copies a text that it has read (copy accuracy), and is compared with itself after an unrelated "
            "text (LM accuracy). The fine length is the longest text copied with an accuracy above 99 %, the coarse "
            "length the longest copied at least 1 % better than guessed. Lengths are in tokens."
        )

    def headlines(self) -> list[Headline]:
        """The fine and the coarse length. A value must be a number, so the name says if the length may be larger."""
        if not self.points:
            return []
        lengths = {"fine": self.fine_length, "coarse": self.coarse_length}
        more = {reading: ", more than" if length.open_ended else "" for reading, length in lengths.items()}
        return [
            Headline("forgetting_curve", f"{reading} memory length{more[reading]} (tokens)", int(length))
            for reading, length in lengths.items()
        ]

    def table(self) -> Table:
        columns = ("length", "scored tokens", "repeats", "copy", "± std", "LM", "± std", "p")
        rows = [
            (
                *(p.length, p.scored_tokens, p.repeats),
                *(f"{value:.1%}" for value in (p.copy_mean, p.copy_std, p.lm_mean, p.lm_std)),
                f"{p.p_value:.2g}",
            )
            for p in self.points
        ]
        return Table(columns, rows)

    def header(self) -> dict[str, Any]:
        return {"format": self.version}  # curves were the only results at first, and still do not name their metric

    @classmethod
    def mismatch(cls, document: dict[str, Any]) -> str | None:
        fields = {"format", "settings", "points"}
        if fields <= document.keys() and document.get("metric", cls.kind) == cls.kind:
            return None
        return "this JSON is not a forgetting curve: it lacks format, settings or points."

    def document(self) -> dict[str, Any]:
        points = [
            {
                "length": p.length,
                "scored_tokens": p.scored_tokens,
                "copy_correct": p.copy_correct,
                "lm_correct": p.lm_correct,
                "begin_locs": p.begin_locs,
                "copy_mean": p.copy_mean,
                "copy_std": p.copy_std,
                "lm_mean": p.lm_mean,
                "lm_std": p.lm_std,
                "p_value": p.p_value,
            }
            for p in self.points
        ]
        readings = {
            name: {"length": int(length), "open_ended": length.open_ended, "next_tested": length.next_tested}
            for name, length in self.memory_lengths.items()
        }
        return {
            "settings": self.settings,
            "memory_lengths": readings,
            "points": points,
            "intervals_95": {reading: self.interval(reading)._asdict() for reading in READINGS},
            "not_measured": [{"length": n, "reason": reason} for n, reason in self.not_measured.items()],
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> ForgettingCurve:
        fields = ("length", "copy_correct", "lm_correct", "begin_locs")
        points = [CurvePoint(*(p[name] for name in fields)) for p in document["points"]]
        missing = {entry["length"]: entry["reason"] for entry in document.get("not_measured", [])}
        return cls(points, document["settings"], missing)

    def draw(self, path, *, train_length: int | None, title: str | None) -> None:
        from .plot import plot_curve

        plot_curve(self, path, train_length=train_length, title=title)
