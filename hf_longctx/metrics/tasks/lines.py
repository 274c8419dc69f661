"""Line retrieval: the model reads many lines with names and numbers, and is asked for one of the numbers.

This is the line task of LongEval (Li et al. 2023). Our prompt also contains the beginning of the answer, so that the
task works for models without instruction tuning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..function import function
from ..result import Table, plural
from ..retrieval.answers import RATES, Answer, Answers, Retrieval, contains_number, wilson
from ..retrieval.haystack import split_encoding
from ..retrieval.wording import Frame, RetrievalTask
from ..task import option


LARGEST = 50_000  # largest number in a line, as in LongEval

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
    """A record of lines, and a question about one of the lines."""

    text: str
    question: str
    answer: str  # expected continuation of the question
    number: int
    asked_line: int  # index (from 0) of the line in question


def draw_record(lines: int, seed: int, repeat: int) -> Record:
    """Draw a random record of `lines` lines. The same arguments always give the same record.

    >>> print(draw_record(2, 0, 0).text.splitlines()[-1].split()[2:4])
    ['REGISTER_CONTENT', 'is']
    """
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
    """The answers to questions about records with the same number of lines.

    Attributes:
        lines: number of lines in a record.
        tokens: number of tokens in prompt and answer, for each repeat.
        asked_lines: index (from 0) of the line in question, for each repeat.
    """

    key = ("lines",)

    lines: int
    tokens: Sequence[int]
    asked_lines: Sequence[int]

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens in prompt and answer."""
        return sum(self.tokens) / len(self.tokens)


@dataclass(frozen=True)
class LineRetrieval(Retrieval):
    """The result of line retrieval. The scores are keyed by the number of lines."""

    kind = "lines"
    title = "Line retrieval"
    part = LinesPoint
    question = "The model is asked for the number in one of many lines."
    size_unit, drawn, hidden = "lines", "record", "one of many lines"
    verb, same_texts = "answers", ("seed",)

    @property
    def points(self) -> tuple[LinesPoint, ...]:
        """One `LinesPoint` for each number of lines, in ascending order."""
        return self.parts

    def tokens(self, size: int) -> int:
        return round(next(p.mean_tokens for p in self.points if p.lines == size))

    def units(self, size: int) -> list[list[Answer]]:
        return [[answer] for p in self.points if p.lines == size for answer in p.answers]

    def places(self):
        return {p.lines: list(p.asked_lines) for p in self.points}

    def in_words(self) -> str:
        score = self.rates_measured[0]
        rates = ", ".join(
            f"{getattr(p, score):.0%} of {p.lines} lines ({p.mean_tokens:.0f} tokens)" for p in self.points
        )
        return f"{RATES[score]}: {rates}; {plural(len(self.points[0].answers), 'repeat')}"

    def dataset(self) -> tuple[str, str]:
        return "generated records", "line-retrieval"

    def table(self) -> Table:
        rows = [
            (p.lines, f"{p.mean_tokens:.0f}", *(f"{rate:.1%}" for rate in p.rates().values()), len(p.answers))
            for p in self.points
        ]
        return Table(("lines", "tokens", *self.score_columns(), "records"), rows)

    def draw(self, figure, title, train_length):
        """Draw the result. `train_length` is ignored, because the x axis shows lines instead of tokens."""
        draw_rates(figure, self, title)


@dataclass(frozen=True)
class Lines(RetrievalTask):
    """Ask for the number in one of many lines (LongEval), and count correct answers for each record size."""

    name = "lines"
    result = LineRetrieval
    reads_text = False
    examples = """
  lines gpt2
  lines model_cards/fox-demo --lines 5 10 --repeats 2 --no-replies"""

    lines: list[int] | None = option(
        None,
        "record sizes in lines (default: 5, 10, 20 ... up to the claimed context)",
        least=1,
        most=len(NAMES),
        selects=True,
    )
    repeats: int = option(10, "number of records of each size, with one question per record", least=1)

    def prepare(self):
        super().prepare()
        free = self.subject.context - (self.reply_tokens or 0)
        lines, limit = self.lines or line_counts(free, self.subject.encode), self.subject.limit
        if self.lines is None and limit is not None and record_tokens(lines[0], self.subject.encode) > limit:
            raise ValueError(f"{limit} tokens are too few for a record of {lines[0]} lines. Raise the context length.")
        self.fill(lines=lines, questions={n: [self.draw(n, i) for i in range(self.repeats)] for n in lines})

    def facts(self):
        text = draw_record(20, seed=0, repeat=0).text  # always the same record, so that a journal accepts more sizes
        return {"bytes_per_token": round(len(text.encode()) / len(self.subject.encode(text)), 2)}

    def draw(self, n: int, repeat: int) -> tuple[Record, np.ndarray, np.ndarray]:
        """Draw the record of a repeat. Return the record, the ids of the prompt, and the ids of the answer."""
        record, subject = draw_record(n, self.seed, repeat), self.subject
        prompt, answer = split_encoding(self.encode, record_prompt(record, self.frame), record.answer)
        prompt = self.check_ids("record", [*([] if self.frame else [subject.bos]), *prompt])
        if len(set(prompt[1:].tolist())) < 2:
            raise ValueError(
                "the tokenizer does not cover the language of the prompts: it encodes a record of lines as a single "
                "repeated id. Pass the model's own tokenizer."
            )
        return record, prompt, self.check_ids("answer", answer)

    def trials(self, scores):
        return [
            self.trial(n, [(len(prompt), len(answer)) for _, prompt, answer in drawn])
            for n, drawn in self.questions.items()
        ]

    def requests(self, n):
        return [self.ask(prompt, answer, self.context(record)) for record, prompt, answer in self.questions[n]]

    def context(self, record: Record) -> int:
        """Return the number of prompt tokens before the question."""
        prompt = record_prompt(record, self.frame)
        before = prompt[: prompt.index(record.text) + len(record.text)]
        ids, _ = split_encoding(self.encode, before, prompt.removeprefix(before))
        return len(ids) + (self.frame is None)  # without a chat template, a prompt begins with BOS

    def score(self, n, responses):
        records, prompts, right = zip(*self.questions[n])
        answers = [
            self.answer_of(response, len(answer), partial(contains_number, expected=record.number))
            for record, answer, response in zip(records, right, responses)
        ]
        tokens = [len(prompt) + len(answer) for prompt, answer in zip(prompts, right)]
        return LinesPoint(answers, n, tokens, [record.asked_line for record in records]).score()[1]


line_retrieval = function(Lines)


def record_prompt(record: Record, frame: Frame | None) -> str:
    """Return the prompt: record, question, and first words of the answer. A chat response begins with these words."""
    if frame is None:
        return record.text + record.question
    question, _, begin = record.question.rpartition("\nAnswer: ")
    return frame.head + record.text + question + frame.tail + begin


def line_counts(context: int, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Return the numbers of lines per record: 5, 10, 20 and so on.

    Records of more than 5 lines must fit into the context.
    """
    counts = [5]
    while 2 * counts[-1] <= len(NAMES) and record_tokens(2 * counts[-1], encode) <= context:
        counts.append(2 * counts[-1])
    return counts


def record_tokens(lines: int, encode: Callable[[str], Sequence[int]]) -> float:
    """Return an upper bound on the number of tokens in record, question and response."""
    return 1.1 * len(encode(draw_record(lines, seed=0, repeat=0).text)) + 200


def draw_rates(figure: Any, result: LineRetrieval, title: str) -> None:
    """Plot each rate against the number of lines, with 95 % CIs. The upper axis shows the length in tokens."""
    from .. import style

    axes = figure.add_subplot()
    scores, places = result.rates_measured, np.arange(len(result.points))  # even spacing
    for score, shift in zip(scores, np.linspace(-0.1, 0.1, len(scores))):  # shifted, to show equal rates
        label, colour, marker, dashes = style.RATES[score]
        rates = np.array([getattr(point, score) for point in result.points])
        bars: dict[str, Any] = dict(capsize=3, elinewidth=1)
        if score != "probability":
            low, high = np.transpose([wilson(rate, len(p.answers)) for rate, p in zip(rates, result.points)])
            bars["yerr"] = [np.maximum(rates - low, 0), np.maximum(high - rates, 0)]
        line: dict[str, Any] = dict(color=colour, marker=marker, linestyle=dashes, linewidth=1.6, label=label)
        axes.errorbar(places + shift, rates, **bars, **line)
    style.percent_axis(axes)
    style.grid(axes)
    style.strip_frame(axes, "lines in the record", "questions answered")
    axes.set_xlim(-0.4, len(places) - 0.6)
    axes.set_xticks(places, [f"{point.lines:,}" for point in result.points])
    reads = axes.twiny()
    reads.set_xlim(axes.get_xlim())
    reads.set_xticks(places, [f"{point.mean_tokens:,.0f}" for point in result.points])
    style.strip_frame(reads, "tokens the model reads", colour=style.QUIET)
    style.titled_legend(figure, axes.get_legend_handles_labels()[0], title, columns=1)
    repeats = sorted({len(point.answers) for point in result.points})
    style.small_print(
        figure, f"{' or '.join(map(str, repeats))} records of each number of lines, bars: 95 % intervals"
    )
