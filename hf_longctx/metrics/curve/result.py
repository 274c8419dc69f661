"""A measured forgetting curve: counts per length, and the memory lengths that they show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import stdtr

from ..result import Headline, Result, Table
from .lengths import READINGS, LengthInterval, MemoryLength, length_interval, margins, memory_lengths, verdict
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

    def margins(self, reading: str) -> np.ndarray:
        """By how much each repeat is above the threshold of "fine" or "coarse"; see `lengths.margins`."""
        return margins(self.copy_correct, self.lm_correct, self.scored_tokens, reading)

    def verdict(self, reading: str, level: float) -> int:
        """Whether the length passes (1), fails (-1), or may do either (0) at this level; see `lengths.verdict`."""
        return verdict(self.margins(reading), self.scored_tokens, level)


@dataclass(frozen=True)
class ForgettingCurve(Result):
    """A measured curve.

    Attributes:
        points: one `CurvePoint` per measured length, ascending.
        not_measured: why a length has no point, by length.
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
        lengths, scored = [p.length for p in self.points], [p.scored_tokens for p in self.points]
        return length_interval(lengths, [p.margins(reading) for p in self.points], scored, confidence)

    @property
    def repeats_range(self) -> str:
        """How many repeats a point has, such as "10", or "3 to 10" of an adaptive curve."""
        counts = sorted({p.repeats for p in self.points})
        return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    def summary(self) -> str:
        missing = ""
        for reason in dict.fromkeys(self.not_measured.values()):
            lengths = [length for length, why in self.not_measured.items() if why == reason]
            several = f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]}"
            missing += f"; {several if len(lengths) > 1 else f'length {lengths[0]}'} not measured: {reason}"
        if not self.points:
            return "no length measured" + missing

        def describe(name, length):
            following = "" if length.next_tested is None else f" (next tested: {length.next_tested})"
            return f"{name} length {length} tokens{following}"

        first, last = self.points[0], self.points[-1]
        return (
            f"{describe('fine', self.fine_length)}, {describe('coarse', self.coarse_length)}; "
            f"{len(self.points)} lengths from {first.length} to {last.length}, {self.repeats_range} repeats; "
            f"95 % sure: fine {self.interval('fine')}, coarse {self.interval('coarse')}{missing}{self.interruption}"
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
        names = ("length", "scored_tokens", "copy_correct", "lm_correct", "begin_locs")
        names += ("copy_mean", "copy_std", "lm_mean", "lm_std", "p_value")
        readings = {
            name: {"length": int(length), "open_ended": length.open_ended, "next_tested": length.next_tested}
            for name, length in self.memory_lengths.items()
        }
        return {
            "settings": self.settings,
            "memory_lengths": readings,
            "points": [{name: getattr(p, name) for name in names} for p in self.points],
            "intervals_95": {reading: self.interval(reading)._asdict() for reading in READINGS},
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
