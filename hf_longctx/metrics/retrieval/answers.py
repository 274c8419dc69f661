"""Answers to retrieval questions, and how they are scored without a judge.

Only the context tells the answer to a question, and the answer is known. Two scores need one forward pass over
question and answer: the probability of the answer, and whether every token of it is the model's first choice, which
is when greedy decoding would give it word for word. The third looks into the text that the model generates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from ..checks import entries, integers, positive_int
from ..result import Headline, Overview, Result


SCORES = ("match_rate", "exact_rate", "probability")
SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")  # Thai to Chinese
COLUMNS = {"match_rate": "found", "exact_rate": "token for token", "probability": "probability"}
HEADLINE_SCORE = {
    "match_rate": "The score is the share of answers found in the model's replies.",
    "exact_rate": "The score is the share of answers that are the model's first choice, token for token.",
}


@dataclass(frozen=True)
class Answer:
    """The scores of one answer.

    Attributes:
        log_prob: log-probability of the right answer after the prompt, in nats, summed over its tokens.
        tokens: tokens in the right answer.
        exact: every token of it is the likeliest one.
        reply: what the model generates; None if it did not reply.
        matched: the reply holds the answer; equal to `exact` without a reply.
    """

    log_prob: float
    tokens: int
    exact: bool
    reply: str | None
    matched: bool

    def __post_init__(self):
        positive_int("tokens of an answer", self.tokens)
        if not self.log_prob <= 1e-3:  # NaN is not; rounding may leave a little more than 0
            raise ValueError(f"log_prob must be the logarithm of a probability, none above 0, got {self.log_prob}.")

    @property
    def probability(self) -> float:
        """Probability of a token of the answer, geometric mean over its tokens."""
        return math.exp(self.log_prob / self.tokens)


@dataclass(frozen=True)
class Answers:
    """The answers to questions of one kind, each rate from 0 to 1."""

    answers: Sequence[Answer]

    def __post_init__(self):
        object.__setattr__(self, "answers", entries(self.answers, Answer))
        if not self.answers:
            raise ValueError("answers are missing; give one or more.")

    def check_one_each(self, name: str, low: int, high: float = math.inf) -> None:
        """Turn a field with an integer for each answer into a tuple.

        Raises:
            ValueError: there are more or fewer, or one is not between `low` and `high`.
        """
        values = integers(getattr(self, name), name, low, high)
        if len(values) != len(self.answers):
            raise ValueError(f"{name} has {len(values)} numbers for {len(self.answers)} answers; give one for each.")
        object.__setattr__(self, name, values)

    @property
    def match_rate(self) -> float:
        """Share of the answers found in the replies; equal to `exact_rate` without replies."""
        return sum(a.matched for a in self.answers) / len(self.answers)

    @property
    def exact_rate(self) -> float:
        """Share of the answers that greedy decoding gives token for token."""
        return sum(a.exact for a in self.answers) / len(self.answers)

    @property
    def probability(self) -> float:
        """Mean over answers of the probability of a token."""
        return sum(a.probability for a in self.answers) / len(self.answers)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the rates: without replies there is no match rate."""
        return SCORES if any(a.reply is not None for a in self.answers) else SCORES[1:]

    def rates(self) -> dict[str, float]:
        """Return the rates by their names."""
        return {score: getattr(self, score) for score in self.scores}

    def interval(self, score: str) -> tuple[float, float]:
        """Return Wilson's interval, in which the rate lies with a confidence of 95 %.

        The interval is too wide for the probability, whose answers differ less than right and wrong do.
        """
        return wilson(getattr(self, score), len(self.answers))

    def to_list(self) -> list[dict[str, Any]]:
        """Return the answers as plain JSON types."""
        return [asdict(answer) for answer in self.answers]

    @classmethod
    def from_list(cls, answers: Sequence[dict[str, Any]], *fields: Any) -> Self:
        """Return the answers that `to_list` wrote, with the fields of a subclass."""
        return cls([Answer(**answer) for answer in answers], *fields)


def wilson(rate: float, answers: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a rate; z standard errors to each side, 1.96 for 95 %.

    >>> [round(end, 3) for end in (*wilson(0, 1), *wilson(0.5, 10))]
    [0.0, 0.793, 0.237, 0.763]
    """
    centre = (rate + z**2 / (2 * answers)) / (1 + z**2 / answers)
    half = z / (1 + z**2 / answers) * math.sqrt(rate * (1 - rate) / answers + z**2 / (4 * answers**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def holds_text(reply: str, expected: str) -> bool:
    """Return whether the words of `expected` follow one another in `reply`; case and punctuation do not count.

    >>> holds_text(" Eat a\\nsandwich, of course.", "eat a sandwich")
    True
    >>> holds_text("eat two sandwiches", "eat a sandwich")
    False
    >>> holds_text("\u7b54\u6848\u662f\u5317\u4eac\u3002", "\u5317\u4eac")  # Chinese has no spaces
    True
    """
    reply, expected = (" ".join(re.findall(r"\w+", text.lower())) for text in (reply, expected))
    if SPACELESS.search(expected):
        return expected.replace(" ", "") in reply.replace(" ", "")
    return f" {expected} " in f" {reply} "


def holds_number(reply: str, expected: int) -> bool:
    """Return whether the first whole number in `reply` is the expected one; commas may set off thousands.

    >>> holds_number("<4096> is the content of line 12", 4096)
    True
    """
    number = re.search(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+", reply)
    return number is not None and int(number.group().replace(",", "")) == expected


class Retrieval(Result):
    """The base class of results that keep `Answers` for each of several kinds of prompts.

    A subclass also sets `task`, the question in words, and defines `parts` and `subject`. Numbers in a few words are
    those of the first of the `scores` that were measured.
    """

    task: ClassVar[str]

    @property
    def parts(self) -> Sequence[Answers]:
        """The answers, by kind of prompt."""
        raise NotImplementedError

    @property
    def subject(self) -> str:
        """The largest prompt in words; asked for only if there are parts."""
        raise NotImplementedError

    @property
    def measured(self) -> bool:
        return bool(self.parts)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the rates that were measured."""
        return self.parts[0].scores if self.parts else SCORES[1:]

    def explanation(self) -> str:
        return f"{self.task} {HEADLINE_SCORE[self.scores[0]]}"

    def headlines(self) -> list[Headline]:
        """Return the mean over parts."""
        if not self.parts:
            return []
        score = self.scores[0]
        rate = sum(getattr(part, score) for part in self.parts) / len(self.parts)
        name = f"{self.title.lower()}, {COLUMNS[score]} {self.subject}"
        return [Headline("accuracy", name, round(rate, 4))]

    def overview(self) -> list[Overview]:
        """Return the rate over all answers, with its Wilson interval, which holds for few answers too."""
        if not self.parts:
            return []
        score = self.scores[0]
        n = sum(len(part.answers) for part in self.parts)
        rate = sum(getattr(part, score) * len(part.answers) for part in self.parts) / n
        low, high = wilson(rate, n)
        interval = f"{low:.1%} to {high:.1%}"
        return [Overview(f"{self.subject}, {COLUMNS[score]}", f"{rate:.1%}", interval, f"{n} questions")]

    def score_columns(self) -> tuple[str, ...]:
        """Return headings for the `rates` of the parts."""
        return tuple(COLUMNS[score] for score in self.scores) if self.parts else ()
