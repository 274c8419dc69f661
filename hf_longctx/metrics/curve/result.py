"""A measured forgetting curve: counts per length, and the memory lengths that they show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import stdtr

from ..checks import entries, integers, whole_number
from ..overlap import separate
from ..result import Headline, Overview, Result, Table, plural
from .intervals import ENOUGH, SEPARATE, LengthInterval, length_interval, test_result
from .lengths import METHODS, MemoryLength, margins, memory_lengths, passes
from .protocol import scored_tokens


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
    copy_correct: Sequence[int]
    lm_correct: Sequence[int]
    begin_locs: Sequence[int] | None = None

    def __post_init__(self):
        length = whole_number("length", self.length, 1)
        scored = scored_tokens(length)
        object.__setattr__(self, "length", length)
        for name, most in (("copy_correct", scored), ("lm_correct", scored), ("begin_locs", math.inf)):
            values = getattr(self, name)
            if values is not None or name != "begin_locs":
                object.__setattr__(self, name, integers(values, f"{name} at length {length}", 0, most))
        if not len(self.copy_correct) == len(self.lm_correct) == len(self.begin_locs or self.lm_correct):
            raise ValueError(
                f"length {length} has {len(self.copy_correct)} copy counts and {len(self.lm_correct)} LM counts, begin_locs "
                f"{self.begin_locs}; give one of each for every repeat."
            )

    def first(self, repeats: int) -> CurvePoint:
        """The point with its first repeats only, one or more."""
        whole_number("repeats", repeats, 1)
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
    def copy_worst(self) -> float:
        """Copy accuracy of the worst repeat, 0 to 1."""
        return min(self.copy_correct) / self.scored_tokens

    @property
    def places(self) -> list[tuple[int, int]] | None:
        """Where the scored tokens of each repeat stand in the corpus: the first, and the one after the last."""
        if self.begin_locs is None:
            return None
        return [(begin + self.length - self.scored_tokens, begin + self.length) for begin in self.begin_locs]

    @property
    def texts(self) -> list[int]:
        """Indices of the repeats that count as texts of their own: as many as share no scored token with another."""
        return [*range(self.repeats)] if self.places is None else sorted(separate(self.places))

    @property
    def copied(self) -> int:
        """How many repeats are copied with an accuracy above 99 %."""
        return sum(100 * correct > 99 * self.scored_tokens for correct in self.copy_correct)

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

    def margins(self, method: str) -> np.ndarray:
        """By how much each repeat is above the threshold of "fine" or "coarse", (R,); see `lengths.margins`."""
        return margins(self.copy_correct, self.lm_correct, self.scored_tokens, method)

    def passes(self, method: str) -> bool:
        """Return whether the counts pass as "fine" or "coarse", whatever their noise; see `lengths.passes`."""
        return passes(sum(self.copy_correct), sum(self.lm_correct), self.repeats * self.scored_tokens, method)

    def test_result(self, method: str, level: float) -> int:
        """Return 1 if the length passes at this level, -1 if it fails, else 0; see `intervals.test_result`."""
        return test_result(self.margins(method)[self.texts], self.scored_tokens, level, method)


def span(lengths: Sequence[int]) -> str:
    """Write how many lengths there are, and from where to where.

    >>> span([800]), span([8, 16, 64])
    ('length 800', '3 lengths from 8 to 64')
    """
    if len(lengths) == 1:
        return f"length {lengths[0]}"
    return f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]}"


@dataclass(frozen=True)
class ForgettingCurve(Result):
    """A measured curve.

    Attributes:
        points: one `CurvePoint` per measured length; they are sorted.
        not_measured: why a length has no point, by length.
    """

    kind = "forgetting_curve"
    title = "Forgetting curve"

    points: Sequence[CurvePoint]
    settings: dict[str, Any] = field(default_factory=dict)
    not_measured: dict[int, str] = field(default_factory=dict)

    def __post_init__(self):
        points = entries(self.points, CurvePoint, lambda point: f"length {point.length}")
        object.__setattr__(self, "points", tuple(sorted(points, key=lambda point: point.length)))

    @property
    def measured(self) -> bool:
        return bool(self.points)

    @property
    def fine_length(self) -> MemoryLength:
        """The paper's fine length: the largest measured length with a copy accuracy above 99 %."""
        return self.memory_lengths["fine_max"]

    @property
    def coarse_length(self) -> MemoryLength:
        """The paper's coarse length: the largest measured length copied at least 1 % better than guessed.

        One of many lengths passes by chance, also where nothing is remembered: `interval` says what is sure.
        """
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

    def interval(self, method: str, confidence: float = 0.95) -> LengthInterval:
        """Where the "fine" or the "coarse" length lies, given the noise of the repeats; see `length_interval`."""
        key = method, confidence
        if key not in self._intervals:
            lengths, scored = [p.length for p in self.points], [p.scored_tokens for p in self.points]
            protocol = self.settings.get("protocol", "reference")
            values, places = [p.margins(method) for p in self.points], [p.places for p in self.points]
            self._intervals[key] = length_interval(lengths, values, scored, method, confidence, protocol, places)
        return self._intervals[key]

    @cached_property
    def _intervals(self) -> dict[tuple[str, float], LengthInterval]:
        """What `interval` has computed: a card asks for it a dozen times."""
        return {}

    def first_failures(self) -> dict[str, int]:
        """By method, the first length that fails after others have passed, if there is one.

        Passing lengths beyond it are either a dip of the curve or luck.
        """
        first_runs = {method: self.memory_lengths[f"{method}_first_run"] for method in METHODS}
        return {method: run.next_tested for method, run in first_runs.items() if run and run.next_tested is not None}

    @property
    def repeats_in_words(self) -> str:
        """Return how many repeats a point has, such as "10 repeats", or "3 to 10 repeats" of an adaptive curve."""
        counts = sorted({p.repeats for p in self.points})
        return plural(counts[0], "repeat") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats"

    @property
    def overlapping(self) -> list[int]:
        """The lengths at which more than a quarter of the repeats share scored tokens with another."""
        return [p.length for p in self.points if len(p.texts) < SEPARATE * p.repeats]

    def summary(self) -> str:
        missing = ""
        for reason in dict.fromkeys(self.not_measured.values()):
            lengths = [length for length, why in self.not_measured.items() if why == reason]
            missing += f"; {span(lengths)} not measured: {reason}"
        if not self.points:
            return "no length measured" + missing

        failures = self.first_failures()

        fine = self.interval("fine")
        few = max(p.repeats for p in self.points) < ENOUGH and not fine.longest and fine.high != self.points[0].length
        advice = f"; {ENOUGH} repeats are needed for a lower end of the fine length at each length" if few else ""
        advice += self.shortage

        def read_off(method):
            length = self.memory_lengths[f"{method}_max"]
            dip = method in failures and failures[method] < length
            return f"{method} {length}" + (f" (fails first at {failures[method]})" if dip else "")

        return (
            f"95 % sure, in tokens: fine length of the typical text {fine}, coarse length {self.interval('coarse')}{advice}; "
            f"the paper's definition, of means: {read_off('fine')}, {read_off('coarse')}; {span([p.length for p in self.points])}, "
            f"{self.repeats_in_words}{missing}{self.interruption}"
        )

    @property
    def shortage(self) -> str:
        """Return the part of the summary that says where the text is too short for its passages not to overlap."""
        if not self.overlapping:
            return ""
        p = next(p for p in self.points if p.length == self.overlapping[0])
        return (
            f"; the text is too short: its passages overlap from {p.length:,} tokens on, where {p.repeats} of them count as "
            f"{plural(len(p.texts), 'text')}"
        )

    def explanation(self) -> str:
        return (
            "The model copies a text that it has read (copy accuracy), and is compared with itself after an unrelated "
            "text (LM accuracy). The fine length is the longest at which the typical text, that is more than half of all "
            "texts, is copied with an accuracy above 99 %; the coarse length the longest copied at least 1 % better than "
            "guessed, on average, in tokens. What is 95 % sure follows from tests over the repeats, if memory only fades. The "
            "paper's definition takes the longest tested length whose mean accuracy passes, even by chance."
        )

    def headlines(self) -> list[Headline]:
        """The lower ends of the intervals, where there are some: numbers that noise does not make.

        An upper end is no score, which a leaderboard would take it for.
        """
        names = {"fine": "fine memory length of the typical text", "coarse": "coarse memory length"}
        ends = {name: self.interval(method).low for method, name in names.items() if self.points}
        return [
            Headline("forgetting_curve", f"{name}, at least (tokens, 95 % sure)", end)
            for name, end in ends.items()
            if end
        ]

    def table(self) -> Table:
        columns = (
            "length",
            "scored tokens",
            "copied above 99 %",
            "worst copy",
            "mean copy",
            "± std",
            "LM",
            "± std",
            "p",
        )
        columns += ("mean passes as",)
        rows = [
            (
                *(p.length, p.scored_tokens, f"{p.copied} of {p.repeats}"),
                *(f"{value:.1%}" for value in (p.copy_worst, p.copy_mean, p.copy_std, p.lm_mean, p.lm_std)),
                f"{p.p_value:.2g}",
                next((method for method in METHODS if p.passes(method)), "-"),
            )
            for p in self.points
        ]
        return Table(columns, rows)

    def overview(self) -> list[Overview]:
        if not self.points:
            return []
        sample = f"{plural(len(self.points), 'length')}, {self.repeats_in_words}"
        names = {"fine": "fine length of the typical text, tokens", "coarse": "coarse length, tokens"}
        rows = []
        for method, name in names.items():
            interval, paper = self.interval(method), self.memory_lengths[f"{method}_max"]
            sure = f" (95 % sure{'; the longest tested' * interval.longest})" * interval.sure
            rows.append(Overview(name, interval.in_words() + sure, sample=f"{sample}; the paper's, of means: {paper}"))
        p = next((p for p in self.points if p.length >= self.interval("fine").low), self.points[-1])
        copied = f"{p.copied} of {p.repeats}, the worst to {p.copy_worst:.1%}"
        return [*rows, Overview(f"texts of {p.length:,} tokens copied above 99 %", copied)]

    def document(self) -> dict[str, Any]:
        names = ("length", "scored_tokens", "copy_correct", "lm_correct", "begin_locs")
        names += ("copied", "copy_worst", "copy_mean", "copy_std", "lm_mean", "lm_std", "p_value")
        lengths = {
            name: {"length": int(length), "open_ended": length.open_ended, "next_tested": length.next_tested}
            for name, length in self.memory_lengths.items()
        }
        return {
            "settings": self.settings,
            "memory_lengths": lengths,
            "points": [{name: getattr(p, name) for name in names} | {"texts": len(p.texts)} for p in self.points],
            "intervals_95": {method: self.interval(method)._asdict() for method in METHODS},
            "not_measured": [{"length": n, "reason": reason} for n, reason in self.not_measured.items()],
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> ForgettingCurve:
        fields = ("length", "copy_correct", "lm_correct", "begin_locs")
        points = [CurvePoint(*(p[name] for name in fields)) for p in document["points"]]
        missing = {entry["length"]: entry["reason"] for entry in document.get("not_measured", [])}
        return cls(points, document["settings"], missing)

    def plot(self, path, *, train_length: int | None = None, title: str | None = None) -> None:
        from .plot import plot_curve

        plot_curve(self, path, train_length=train_length, title=title)
