"""Answers to retrieval questions, and how they are scored without a judge.

Only the context tells the answer to a question, and the answer is known. Two scores need one forward pass over
question and answer: the probability of the answer, and whether every token of it is the model's first choice, which
is when greedy decoding would give it word for word. The third looks into the text that the model generates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import Any, ClassVar, Self

import numpy as np
import scipy

from ..checks import entries, integers, whole_number
from ..result import Number, plural
from ..task import Answered, Counts, TaskResult


REPLY_MARGIN = 16  # tokens that a generated text may have beyond the answer
SCORES = ("match_rate", "exact_rate", "probability")
FEWEST = 5  # haystacks or records below which a rate has no interval
SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")  # Thai to Chinese
COLUMNS = {"match_rate": "found", "exact_rate": "token for token", "probability": "probability"}
SUMMARY = {"match_rate": "found", "exact_rate": "given token for token"}
HEADLINE_SCORE = {
    "match_rate": "The score is the share of answers found in the model's replies.",
    "exact_rate": "The score is the share of answers that are the model's first choice, token for token.",
}
# What opens and closes the thoughts of a model.
THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
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
        whole_number("tokens of an answer", self.tokens, 1)
        if not self.log_prob <= 1e-3:  # NaN is not; rounding may leave a little more than 0
            raise ValueError(f"log_prob must be the logarithm of a probability, none above 0, got {self.log_prob}.")

    @classmethod
    def of(cls, response: Answered, tokens: int, matches: Callable[[str], bool], opened: str = "") -> Answer:
        """Score a response.

        Args:
            tokens: tokens of the answer.
            matches: whether a text holds it. Thoughts are not asked.
            opened: a thought that the prompt opens, see `opened_thought`.
        """
        if response.reply is None:
            return cls(response.log_prob, tokens, response.exact, None, response.exact)
        reply = opened + response.reply
        found = after_thought(reply)
        return cls(response.log_prob, tokens, response.exact, reply, found is not None and matches(found))

    @property
    def ends_in_thought(self) -> bool:
        """Return whether the response ends before the model has finished to think."""
        return self.reply is not None and after_thought(self.reply) is None

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
        """Return where the rate lies with a confidence of 95 %: Wilson's interval, or Student's of the probability.

        The answers are taken as independent. The ends are NaN for a single one.
        """
        rate, n = getattr(self, score), len(self.answers)
        if n < 2:
            return math.nan, math.nan
        if score != "probability":
            return wilson(rate, n)
        width = (
            float(scipy.special.stdtrit(n - 1, 0.975))
            * stdev(answer.probability for answer in self.answers)
            / math.sqrt(n)
        )
        return max(rate - width, 0.0), min(rate + width, 1.0)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the answers as plain JSON types."""
        return [asdict(answer) for answer in self.answers]

    @classmethod
    def from_list(cls, answers: Sequence[dict[str, Any]], *fields: Any) -> Self:
        """Return the answers that `to_list` wrote, with the fields of a subclass."""
        return cls([Answer(**answer) for answer in answers], *fields)


def rate_interval(rate: float, units: int) -> tuple[float, float] | None:
    """Return Wilson's interval of 95 % of a rate over haystacks or records, which are drawn independently.

    Of several questions about one haystack, the rate is that of the haystack: they are taken to be right or wrong
    together, so that the interval holds whatever they share. Fewer than five haystacks have none.

    >>> rate_interval(0.5, 4), [round(end, 2) for end in rate_interval(0.5, 10)]
    (None, [0.24, 0.76])
    """
    return wilson(rate, units) if units >= FEWEST else None


def wilson(rate: float, answers: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a rate; z standard errors to each side, 1.96 for 95 %.

    >>> [round(end, 3) for end in (*wilson(0, 1), *wilson(0.5, 10))]
    [0.0, 0.793, 0.237, 0.763]
    >>> wilson(0, 11)[0], wilson(1, 11)[1]
    (0.0, 1.0)
    """
    centre = (rate + z**2 / (2 * answers)) / (1 + z**2 / answers)
    half = z / (1 + z**2 / answers) * math.sqrt(rate * (1 - rate) / answers + z**2 / (4 * answers**2))
    # exactly 0 and 1 at these rates, where both terms have rounding errors
    return 0.0 if rate == 0 else centre - half, 1.0 if rate == 1 else centre + half


def opened_thought(prompt: str) -> str:
    """Return the marker that opens a thought at the end of a prompt and is not closed there, or an empty text.

    >>> opened_thought("<|assistant|><think>"), opened_thought("<|assistant|><think></think>")
    ('<think>', '')
    """
    opened = [mark for mark, end in THOUGHTS.items() if prompt.rfind(mark) > prompt.rfind(end)]
    return opened[0] if opened else ""


def after_thought(response: str) -> str | None:
    """Return what follows the thoughts in a response; None if it ends inside of one.

    >>> after_thought("<think>The cow ...</think> Alm"), after_thought("Alm"), after_thought("<think>The cow")
    (' Alm', 'Alm', None)
    """
    if opened_thought(response):
        return None
    ends = [response.rfind(end) + len(end) for end in THOUGHTS.values() if end in response]
    return response[max(ends, default=0) :]


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


class Retrieval(TaskResult):
    """The base class of results that keep `Answers` for each of several kinds of prompts.

    A subclass also sets `question`, the question in words, and defines `parts` and `units`. Numbers in a few words are
    those of the first of the `rates_measured`.

    Attributes:
        drawn: what is drawn at random for a prompt.
        hidden: what is looked for, in words.
    """

    question: ClassVar[str]
    drawn: ClassVar[str] = "haystack"
    hidden: ClassVar[str]

    @property
    def parts(self) -> Sequence[Answers]:
        """The answers, by kind of prompt."""
        raise NotImplementedError

    def __post_init__(self):
        assert self.parts is not None  # whose numbers are checked when they are made

    @property
    def rates_measured(self) -> tuple[str, ...]:
        """Names of the rates that were measured."""
        return self.parts[0].scores if self.parts else SCORES[1:]

    def explanation(self) -> str:
        return f"{self.question} {HEADLINE_SCORE[self.rates_measured[0]]}"

    def size(self, part: Any) -> int:
        """Return the length of a part in tokens, or in what `size_unit` names."""
        return part.length

    def tokens(self, size: int) -> int:
        """Return a size in tokens."""
        return size

    def units(self, size: int) -> list[list[Answer]]:
        """Return the answers about each prompt of this size that was drawn independently."""
        raise NotImplementedError

    def questions(self, size: int) -> int:
        """Return how many questions there were about prompts of this size."""
        return sum(map(len, self.units(size)))

    def by_length(self, replies=True, overlapping=False):
        counts, field = [], "matched" if replies else "exact"
        for size in sorted({self.size(part) for part in self.parts}):
            units = [[float(getattr(answer, field)) for answer in unit] for unit in self.units(size)]
            asked, right = [len(unit) for unit in units], sum(map(sum, units))
            shares = np.array([*map(np.mean, units)])
            counts.append(Counts(size, shares, max(asked), self.tokens(size), sum(asked), right))
        return counts

    def rates(self) -> dict[int, float]:
        """Return the first of the `rates_measured` for each size, over all questions."""
        right: dict[int, float] = {}
        for part in self.parts:
            size = self.size(part)
            right[size] = right.get(size, 0) + getattr(part, self.rates_measured[0]) * len(part.answers)
        return {size: right[size] / self.questions(size) for size in sorted(right)}

    def numbers(self):
        """Return the rate of each size with its interval: sizes differ too much for a mean."""
        numbers = []
        for n, rate in self.rates().items():
            units = len(self.units(n))
            asked = plural(self.questions(n), "question")
            sample = asked if units == self.questions(n) else f"{asked} about {plural(units, self.drawn)}"
            name = f"{self.title.lower()}, {COLUMNS[self.rates_measured[0]]}: {n} {self.size_unit}"
            low, high = rate_interval(rate, units) or (None, None)
            numbers.append(Number("accuracy", name, round(rate, 4), low, high, sample))
        return numbers

    def with_gaps(self, text: str) -> str:
        """Return the text with how many responses end inside of a thought, which holds no answer."""
        answers = [answer for part in self.parts for answer in part.answers]
        thinking = sum(answer.ends_in_thought for answer in answers)
        if thinking:
            text += (
                f"; {thinking} of {plural(len(answers), 'response')} ended while the model was thinking, and count as wrong: "
                """try --chat-template-kwargs '{"enable_thinking": false}'"""
            )
        return super().with_gaps(text)

    def score_columns(self) -> tuple[str, ...]:
        """Return headings for the `rates` of the parts."""
        return tuple(COLUMNS[score] for score in self.rates_measured) if self.parts else ()


def check_replies(reader: Any, replies: bool) -> None:
    """Raise ValueError if the model is to generate and cannot."""
    if replies and not reader.can_reply:
        raise ValueError(
            f"{reader.settings()['model']} has no generate method; measure without replies: replies=False, or --no-replies."
        )
