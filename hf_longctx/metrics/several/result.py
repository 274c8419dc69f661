"""Several facts in a long text, and one question that asks for all of them: multi-needle, and variable tracking.

Both are tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654), in words of our own: scores are near to RULER's and not
the same. In multi-needle, several sentences give a name one number each, and all numbers of the name are asked for
(RULER's niah_multivalue). In variable tracking, a chain assigns a number to a variable and that variable to others,
`VAR B = VAR A`, and all variables of the number are asked for, after a solved example (RULER's vt). The score is the
share of what was asked for that the reply names; as in RULER, its case does not count, nor what else the reply says.
This file knows no model.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..checks import entries, integers
from ..result import Table, plural
from ..retrieval.answers import Retrieval, rate_interval
from ..retrieval.haystack import insertion_point
from ..retrieval.lines import NAMES


NOISE = "The rain has stopped. A bird sits on the roof. The road is wet. Nobody is in sight. It will be dark soon. "
TRACK = "Variables are assigned in the following text, some of them the value of another one. Keep track of them.\n\n"


class Asked(NamedTuple):
    """The texts of one prompt, in their order, and what its reply should name."""

    intro: str
    statements: tuple[str, ...]
    question: str
    begin: str  # of the answer: a part of the prompt, or of the reply in a chat
    answers: tuple[str, ...]


def draw_needles(rng: random.Random, needles: int) -> Asked:
    """Draw a name and its numbers, of seven digits."""
    name = rng.choice(NAMES)
    numbers = tuple(map(str, rng.sample(range(10**6, 10**7), needles)))
    return Asked(
        "Secret numbers are hidden in the following text. Remember them: you will be asked for them at the end.\n\n",
        tuple(f"One of the secret numbers of {name} is {number}." for number in numbers),
        f"\n\nQuestion: Which are all secret numbers of {name} in the text above?",
        f"The secret numbers of {name} in the text above are",
        numbers,
    )


def draw_variables(rng: random.Random, chains: int, hops: int) -> Asked:
    """Draw chains of variables, of which the first is asked for, and an example of as many hops."""
    example = assign(rng, 1, hops, letters=3)
    shown = "".join(f"{NOISE}\n{statement}\n" for statement in example.statements)
    solved = f"{shown}{example.question} Answer: {example.begin} {', '.join(example.answers)}.\n\n"
    asked = assign(rng, chains, hops, letters=5)
    return asked._replace(intro=TRACK + solved + TRACK)


def assign(rng: random.Random, chains: int, hops: int, letters: int) -> Asked:
    """Draw the statements of chains, each in its order and mixed with the others, and the question for the first."""
    if chains * (hops + 1) > 26**letters or chains > 90_000:
        raise ValueError(
            f"chains={chains} and hops={hops} need more names or numbers than there are. Give less of them."
        )
    names: dict[str, None] = {}
    while len(names) < chains * (hops + 1):
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    variables = np.array([*names]).reshape(chains, hops + 1).tolist()
    values = rng.sample(range(10_000, 100_000), chains)
    waiting = [
        [f"VAR {v[0]} = {x}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(v))] for v, x in zip(variables, values)
    ]
    order = [i for i in range(chains) for _ in range(hops + 1)]
    rng.shuffle(order)
    return Asked(
        "",
        tuple(waiting[i].pop(0) for i in order),
        f"\n\nQuestion: Which variables have the value {values[0]} in the text above?",
        f"By these assignments, {hops + 1} variables have the value {values[0]}. They are",
        tuple(variables[0]),
    )


def hide(haystack: np.ndarray, ends: np.ndarray, statements: Sequence[np.ndarray], depths: Sequence[float]) -> tuple:
    """Put statements between the sentences of a haystack.

    Args:
        haystack: (n,) ids.
        ends: (n,) bool, True where a sentence ends with this token.
        statements: ids of each, (k,), in their order.
        depths: of each, ascending, from 0 to 1.

    Returns:
        the ids, and how many of them precede each statement.
    """
    parts, positions, done, length = [], [], 0, 0
    for depth, statement in zip(depths, statements):
        at = insertion_point(ends, depth)
        parts += [haystack[done:at], statement]
        positions.append(length + at - done)
        length, done = positions[-1] + len(statement), at
    return np.concatenate([*parts, haystack[done:]]), positions


@dataclass(frozen=True)
class SeveralAnswer:
    """A reply, and which of the facts that were asked for it names.

    Attributes:
        reply: what the model generated.
        found: of each fact, whether it is named, (n,) bool.
        positions: tokens before each statement in the prompt, BOS included.
    """

    reply: str
    found: Sequence[bool]
    positions: Sequence[int]

    def __post_init__(self):
        object.__setattr__(self, "found", tuple(map(bool, integers(self.found, "found", 0, 1))))
        object.__setattr__(self, "positions", integers(self.positions, "positions", 0))

    @property
    def share(self) -> float:
        """The share of the facts that are named, from 0 to 1."""
        return sum(self.found) / len(self.found)


@dataclass(frozen=True)
class SeveralPoint:
    """The replies to prompts of one length: of prompt and reply together, in tokens."""

    length: int
    answers: Sequence[SeveralAnswer]
    scores: ClassVar[tuple[str, ...]] = ("match_rate",)

    def __post_init__(self):
        object.__setattr__(self, "answers", entries(self.answers, SeveralAnswer))
        if len({len(answer.found) for answer in self.answers}) != 1:
            raise ValueError(f"length {self.length}: give one or more answers, each about the same number of facts.")

    @property
    def facts(self) -> int:
        """How many facts each prompt asks for."""
        return len(self.answers[0].found)

    @property
    def match_rate(self) -> float:
        """Mean share of the facts that are named, from 0 to 1."""
        return sum(answer.share for answer in self.answers) / len(self.answers)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the rate by `rate_interval`, of as many units as prompts; None for few prompts."""
        return rate_interval(self.match_rate, len(self.answers))


@dataclass(frozen=True)
class SeveralRetrieval(Retrieval):
    """The base class of both tasks.

    Attributes:
        points: one `SeveralPoint` per length, ascending.
    """

    points: Sequence[SeveralPoint]
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        points = entries(self.points, SeveralPoint, lambda point: f"length {point.length}")
        object.__setattr__(self, "points", points)

    @property
    def parts(self) -> Sequence[Any]:
        return self.points

    def explanation(self) -> str:
        return f"{self.task} The score is the share of them that the model's reply names."

    def summary(self) -> str:
        if not self.points:
            return "no length measured"
        found = ", ".join(f"{p.match_rate * p.facts:.3g} of {p.facts} at {p.length} tokens" for p in self.points)
        return f"found: {found}; {plural(len(self.points[0].answers), 'repeat')}{self.interruption}"

    def table(self) -> Table:
        rows = []
        for p in self.points:
            words = f"{p.interval[0]:.1%} to {p.interval[1]:.1%}" if p.interval else ""
            found = f"{p.match_rate * p.facts:.3g} of {p.facts}"
            rows.append((p.length, found, f"{p.match_rate:.1%}", words, len(p.answers)))
        return Table(("length", "found in the mean", "share", "95 % interval", "prompts"), rows)

    def document(self) -> dict[str, Any]:
        points = [
            {"length": p.length, "match_rate": p.match_rate, "answers": [vars(answer) for answer in p.answers]}
            for p in self.points
        ]
        return {"settings": self.settings, "points": points}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> SeveralRetrieval:
        points = [SeveralPoint(p["length"], [SeveralAnswer(**a) for a in p["answers"]]) for p in document["points"]]
        return cls(points, document["settings"])

    def plot(self, path: str | PathLike, *, train_length: int | None = None, title: str | None = None) -> None:
        from .plot import plot_several

        plot_several(self, path, train_length=train_length, title=title)


class MultiNeedle(SeveralRetrieval):
    """Measured multi-needle: numbers of one name, which lie at several places of a text."""

    kind = "multi_needle"
    title = "Multi-needle"
    task = "Several numbers are hidden in a long text, and all are asked for at the end."


class VariableTracking(SeveralRetrieval):
    """Measured variable tracking: variables that have a number, most of them by way of others."""

    kind = "variable_tracking"
    title = "Variable tracking"
    task = "Variables are assigned to one another in a long text, and all that have a value are asked for at the end."
