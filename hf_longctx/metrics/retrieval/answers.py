"""Score answers to retrieval questions without a judge model.

The answer to a question is known, and can only be found in the prompt. One forward pass over prompt and answer gives
two scores: the probability of the answer, and whether greedy decoding gives exactly this answer. The third score is
whether the generated response contains the answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from ..result import Number, plural
from ..task import Answered, Counts, TaskResult
from .thoughts import after_thought


REPLY_MARGIN = 16  # number of tokens by which a response may be longer than the answer
FEWEST = 5  # minimum number of haystacks or records for a confidence interval
# Characters of scripts that do not separate words with spaces
SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
RATES = {"match_rate": "found", "exact_rate": "token for token", "probability": "probability"}


@dataclass(frozen=True)
class Answer:
    """The scores of one answer.

    Attributes:
        log_prob: log-probability of the correct answer after the prompt, in nats, summed over its tokens.
        tokens: number of tokens in the correct answer.
        exact: whether greedy decoding gives the correct answer: each of its tokens is the most likely token.
        reply: generated response; None if no response was generated.
        matched: whether the response contains the answer. Without a response, it is equal to `exact`.
    """

    log_prob: float
    tokens: int
    exact: bool
    reply: str | None
    matched: bool

    @classmethod
    def of(
        cls,
        response: Answered,
        tokens: int,
        matches: Callable[[str], bool],
        opened: str = "",
        special: Sequence[str] = (),
    ) -> Answer:
        """Score a response.

        Args:
            response: response of the model.
            tokens: number of tokens in the correct answer.
            matches: function that returns whether a string contains the correct answer. Before the call, we remove the
                thinking and the special tokens from the response.
            opened: end of the prompt, if it opens the model's thinking; see `opened_thought`.
            special: the tokenizer's special tokens.
        """
        if response.reply is None:
            return cls(response.log_prob, tokens, response.exact, None, response.exact)
        reply = opened + response.reply
        found = after_thought(reply)
        if found is not None and special:
            found = re.sub("|".join(map(re.escape, special)), " ", found)
        return cls(response.log_prob, tokens, response.exact, reply, found is not None and matches(found))

    @property
    def ends_in_thought(self) -> bool:
        """Whether the response ends while the model is still thinking."""
        return self.reply is not None and after_thought(self.reply) is None

    @property
    def probability(self) -> float:
        """Geometric mean of the probabilities of the answer's tokens."""
        return math.exp(self.log_prob / self.tokens)


@dataclass(frozen=True)
class Answers:
    """The answers to several prompts of one kind, e.g. of one length and depth. All rates are from 0 to 1.

    A subclass adds fields. In a result, answers are keyed by the fields listed in `key`. The other fields are saved
    with the answers.
    """

    key: ClassVar[tuple[str, ...]] = ()

    answers: Sequence[Answer]

    @classmethod
    def of_score(cls, key: Any, score: dict[str, Any]) -> Self:
        """Create the answers from a key and a score in a result; see `score`."""
        names = dict(zip(cls.key, key if isinstance(key, tuple) else (key,)))
        others = {name: tuple(values) for name, values in score.items()}
        return cls(**{**names, **others, "answers": tuple(Answer(**answer) for answer in score["answers"])})

    def score(self) -> tuple[Any, dict[str, Any]]:
        """Return the key under which a result stores these answers, and a JSON object with the answers."""
        key = tuple(getattr(self, name) for name in self.key)
        others = {field.name: getattr(self, field.name) for field in fields(self)[1:] if field.name not in self.key}
        score = {name: [*values] for name, values in others.items() if values is not None}
        return (key if len(key) > 1 else key[0]), score | {"answers": [asdict(answer) for answer in self.answers]}

    @property
    def match_rate(self) -> float:
        """Share of responses that contain the answer. Without responses, it is equal to `exact_rate`."""
        return sum(a.matched for a in self.answers) / len(self.answers)

    @property
    def exact_rate(self) -> float:
        """Share of answers that greedy decoding reproduces token for token."""
        return sum(a.exact for a in self.answers) / len(self.answers)

    @property
    def probability(self) -> float:
        """Mean of the answers' probabilities; see `Answer.probability`."""
        return sum(a.probability for a in self.answers) / len(self.answers)

    def rates(self) -> dict[str, float]:
        """Return the rates, keyed by name. "match_rate" requires responses."""
        names = tuple(RATES)[all(a.reply is None for a in self.answers) :]
        return {name: getattr(self, name) for name in names}


def wilson(rate: float, answers: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval for a rate over `answers` answers.

    >>> wilson(0, 11)[0], wilson(1, 11)[1]
    (0.0, 1.0)
    """
    z = 1.96
    centre = (rate + z**2 / (2 * answers)) / (1 + z**2 / answers)
    half = z / (1 + z**2 / answers) * math.sqrt(rate * (1 - rate) / answers + z**2 / (4 * answers**2))
    # for rates of 0 and 1, the formula would add a rounding error to the bounds 0 and 1
    return 0.0 if rate == 0 else centre - half, 1.0 if rate == 1 else centre + half


def contains_text(reply: str, expected: str) -> bool:
    """Return whether `reply` contains the words of `expected` consecutively, ignoring case and punctuation.

    >>> contains_text(" Eat a\\nsandwich, of course.", "eat a sandwich")
    True
    >>> contains_text("eat two sandwiches", "eat a sandwich")
    False
    >>> contains_text("\u7b54\u6848\u662f\u5317\u4eac\u3002", "\u5317\u4eac")  # Chinese has no spaces
    True
    """
    reply, expected = (" ".join(re.findall(r"\w+", text.lower())) for text in (reply, expected))
    if SPACELESS.search(expected):
        return expected.replace(" ", "") in reply.replace(" ", "")
    return f" {expected} " in f" {reply} "


def contains_number(reply: str, expected: int) -> bool:
    """Return whether the first integer in `reply` is `expected`. Commas may separate thousands.

    >>> contains_number("<4096> is the content of line 12", 4096)
    True
    """
    number = re.search(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+", reply)
    return number is not None and int(number.group().replace(",", "")) == expected


class Retrieval(TaskResult):
    """The base class of retrieval results. A result contains `Answers` for each prompt size.

    A subclass sets the attributes and defines `units`. Summaries show the first rate in `rates_measured`.

    Attributes:
        part: subclass of `Answers` for the answers at one size.
        question: sentence that describes the question.
        drawn: noun for the randomly drawn part of a prompt, such as "record".
        hidden: description of the information that the model has to find, such as "one of many lines".
    """

    part: ClassVar[type[Any]]
    question: ClassVar[str]
    drawn: ClassVar[str] = "haystack"
    hidden: ClassVar[str]

    @classmethod
    def of_parts(cls, parts: Sequence[Answers], settings: dict[str, Any] | None = None) -> Self:
        """Create a result from answers."""
        return cls(dict(part.score() for part in parts), settings or {})

    def __post_init__(self):
        assert self.parts is not None  # computed now: an incomplete score raises an error

    @cached_property
    def parts(self) -> tuple[Any, ...]:
        """The `Answers` at each size."""
        return tuple(self.part.of_score(key, score) for key, score in self.scores.items())

    @property
    def rates_measured(self) -> tuple[str, ...]:
        """Names of the rates that were measured."""
        return tuple(self.parts[0].rates()) if self.parts else ()

    def explanation(self) -> str:
        return (
            f"{self.question} The score is the share of answers found in the model's responses. If it does not generate "
            "responses, the score is the share of answers that greedy decoding gives token for token."
        )

    def units(self, size: int) -> list[list[Answer]]:
        """Return the answers at a size, grouped by haystack or record."""
        raise NotImplementedError

    def tokens(self, size: int) -> int:
        """Convert a prompt size from `size_unit` to tokens."""
        return size

    def by_length(self, replies=True, overlapping=False):
        counts = []
        field = "matched" if replies else "exact"
        for size in sorted({getattr(part, part.key[0]) for part in self.parts}):
            units = [[float(getattr(answer, field)) for answer in unit] for unit in self.units(size)]
            asked, right = [len(unit) for unit in units], sum(map(sum, units))
            shares = np.array([*map(np.mean, units)])
            counts.append(Counts(size, shares, max(asked), self.tokens(size), sum(asked), right))
        return counts

    def rates(self) -> dict[int, float]:
        """Return a rate for each size: the first rate in `rates_measured`."""
        return {counts.length: counts.right / counts.asked for counts in self.by_length()}

    def numbers(self):
        """Return the rate at each size with its confidence interval.

        For the interval, all questions about a haystack count as one sample, because the answers are correlated.
        """
        numbers = []
        for counts in self.by_length():
            rate = counts.right / counts.asked
            units = len(counts.shares)
            asked = plural(counts.asked, "question")
            sample = asked if units == counts.asked else f"{asked} about {plural(units, self.drawn)}"
            name = f"{self.title.lower()}, {RATES[self.rates_measured[0]]}: {counts.length} {self.size_unit}"
            low, high = wilson(rate, units) if units >= FEWEST else (None, None)
            numbers.append(Number("accuracy", name, round(rate, 4), low, high, sample))
        return numbers

    def with_gaps(self, text: str) -> str:
        """Append the number of responses that ended while the model was still thinking."""
        answers = [answer for part in self.parts for answer in part.answers]
        thinking = sum(answer.ends_in_thought for answer in answers)
        if thinking:
            text += (
                f"; {thinking} of {plural(len(answers), 'response')} ended while the model was thinking, and count as wrong: "
                """try --chat-template-kwargs '{"enable_thinking": false}', or more --reply-tokens"""
            )
        return super().with_gaps(text)

    def score_columns(self) -> tuple[str, ...]:
        """Return the table headings of the rates in `rates_measured`."""
        return tuple(RATES[score] for score in self.rates_measured)
