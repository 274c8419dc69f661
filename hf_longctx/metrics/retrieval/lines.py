"""Line retrieval: many lines with a name and a number each, and a question for the number of one of them.

As in the line task of LongEval (Li et al. 2023), with a prompt that ends with the beginning of the answer, so
that models without instruction tuning know what to do. This file knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from os import PathLike
from typing import Any, NamedTuple

from ..checks import entries
from ..result import Table, plural
from .answers import SUMMARY, Answers, Retrieval


LARGEST = 50_000  # numbers are from 1 to this, as in LongEval

ADJECTIVES = (
    "able amber ample arid basic bold brave brief bright broad calm cheap clean clear clever close cold cool curly damp "
    "dark deep dense dim dry dull eager early easy empty exact faint fair fast fine firm flat fresh full gentle glad grand "
    "great green happy hard heavy high honest huge idle kind large late lazy lean level light little lively local lonely "
    "long loose loud loyal lucky major mellow merry mild minor modern narrow neat new noble odd old open pale plain polite "
    "proud quick quiet rapid rare ready rich round rough royal safe sharp short shy silent simple slow small smart smooth "
    "soft solid spare steep still strict strong sunny sweet swift tall tame tidy tiny tough vast warm wide wild wise young"
)
NOUNS = (
    "anchor apple arrow autumn badge barrel basket beach bell bench bird blanket boat book bottle branch bridge brush "
    "bucket button cabin camel candle carpet castle chair cherry circle cloud coat copper corner cotton cradle crown cup "
    "desk door dragon drum eagle engine fabric feather fence field finger flag flute forest fountain garden gate glove "
    "guitar hammer harbor hat helmet hill horse house island jacket jar jungle kettle key ladder lake lamp leaf lemon "
    "letter lion lock maple market meadow mirror moon mountain needle nest oak ocean onion orange paddle paper parrot "
    "pencil pepper piano pillow planet pocket pond pumpkin rabbit ribbon river road rocket roof rope saddle sail sandal "
    "school shell ship silver sky spoon spring stable star stone table tiger tower train tree tunnel valley violin wagon"
)
NAMES = ["-".join(pair) for pair in product(ADJECTIVES.split(), NOUNS.split())]


class Record(NamedTuple):
    """One record and the question about it."""

    text: str
    question: str
    answer: str  # follows the question
    number: int
    asked_line: int  # counted from 0


def draw_record(lines: int, seed: int, repeat: int) -> Record:
    """Draw a record of `lines` lines; the same for the same three numbers.

    Raises:
        ValueError: fewer than one line, or more than there are names for.

    >>> print(draw_record(2, 0, 0).text.splitlines()[-1].split()[2:4])
    ['REGISTER_CONTENT', 'is']
    """
    if not 1 <= lines <= len(NAMES):
        raise ValueError(f"a record has from 1 to {len(NAMES)} lines, got {lines}.")
    rng = random.Random(f"{seed} {lines} {repeat}")
    names = rng.sample(NAMES, lines)
    numbers = [rng.randint(1, LARGEST) for _ in names]
    asked_line = rng.randrange(lines)
    text = "".join(f"line {name}: REGISTER_CONTENT is <{number}>\n" for name, number in zip(names, numbers))
    return Record(
        "This is a record of lines. Each has a name and a REGISTER_CONTENT, which is a number. At the end of the record "
        f"you will be asked for the REGISTER_CONTENT of one of them. The record begins:\n\n{text}",
        f"\nThe record is over. Which number is the REGISTER_CONTENT of line {names[asked_line]}?\n"
        f"Answer: line {names[asked_line]}: REGISTER_CONTENT is",
        f" <{numbers[asked_line]}>",
        numbers[asked_line],
        asked_line,
    )


@dataclass(frozen=True)
class LinesPoint(Answers):
    """The answers for one number of lines.

    Attributes:
        lines: in the record.
        tokens: of prompt and answer together, one number per repeat.
        asked_lines: the line that was asked for in each, counted from 0.
    """

    lines: int
    tokens: Sequence[int]
    asked_lines: Sequence[int]

    def __post_init__(self):
        super().__post_init__()
        self.check_one_each("tokens", 1)
        self.check_one_each("asked_lines", 0, self.lines - 1)

    @property
    def mean_tokens(self) -> float:
        """Mean of `tokens`."""
        return sum(self.tokens) / len(self.tokens)


@dataclass(frozen=True)
class LineRetrieval(Retrieval):
    """Measured line retrieval.

    Attributes:
        points: one `LinesPoint` per number of lines, ascending.
    """

    kind = "line_retrieval"
    title = "Line retrieval"
    task = "The model is asked for the number in one of many lines."
    size_unit, drawn = "lines", "record"

    points: Sequence[LinesPoint]
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        points = entries(self.points, LinesPoint, lambda point: f"{point.lines} lines")
        object.__setattr__(self, "points", points)

    @property
    def parts(self) -> Sequence[LinesPoint]:
        return self.points

    def size(self, part: LinesPoint) -> int:
        return part.lines

    def summary(self) -> str:
        if not self.points:
            return "nothing measured"
        score = self.scores[0]
        rates = ", ".join(
            f"{getattr(p, score):.0%} of {p.lines} lines ({p.mean_tokens:.0f} tokens)" for p in self.points
        )
        repeats = plural(len(self.points[0].answers), "repeat")
        return f"{SUMMARY[score]}: {rates}; {repeats}{self.interruption}"

    def dataset(self) -> tuple[str, str]:
        return "generated records", "line-retrieval"

    def table(self) -> Table:
        rows = [
            (p.lines, f"{p.mean_tokens:.0f}", *(f"{rate:.1%}" for rate in p.rates().values()), len(p.answers))
            for p in self.points
        ]
        return Table(("lines", "tokens", *self.score_columns(), "records"), rows)

    def document(self) -> dict[str, Any]:
        points = []
        for p in self.points:
            measured = {"tokens": p.tokens, "asked_lines": p.asked_lines, "answers": p.to_list()}
            points.append({"lines": p.lines, "mean_tokens": p.mean_tokens, **p.rates(), **measured})
        return {"settings": self.settings, "points": points}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> LineRetrieval:
        names = ("answers", "lines", "tokens", "asked_lines")
        points = [LinesPoint.from_list(*(point[name] for name in names)) for point in document["points"]]
        return cls(points, document["settings"])

    def plot(self, path: str | PathLike, *, train_length: int | None = None, title: str | None = None) -> None:
        """Draw the result; `train_length` is not marked, as the picture counts lines and not tokens."""
        from .plot import plot_lines

        plot_lines(self, path, title=title)
