"""Needle in a haystack: one sentence is hidden in a long document, and only this sentence answers the question.

`retrieval.haystack` describes the protocol and builds the prompts. `retrieval.wording` contains their wording.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..function import function
from ..result import Table, plural
from ..retrieval.answers import RATES, Answer, Answers, Retrieval, contains_text
from ..retrieval.haystack import (
    DEPTHS,
    draw_begins,
    ends_sentence,
    haystack_length,
    hide_needle,
    insertion_point,
    needle_pieces,
)
from ..retrieval.wording import MODES, RetrievalTask, wording
from ..run.journal import content_hash
from ..task import option


@dataclass(frozen=True)
class NeedleCell(Answers):
    """The answers at one length and depth.

    Attributes:
        length: number of tokens in prompt and answer.
        depth: requested depth of the needle, from 0 (beginning of the haystack) to 1 (end).
        positions: number of tokens before the needle in each prompt, including BOS.
        begins: start of each haystack in the corpus; None if unknown.
    """

    key = "length", "depth"

    length: int
    depth: float
    positions: Sequence[int]
    begins: Sequence[int] | None = None


@dataclass(frozen=True)
class NeedleGrid(Retrieval):
    """The result of the needle in a haystack. The scores are keyed by (length, depth)."""

    kind = "needle"
    title = "Needle in a haystack"
    part = NeedleCell
    question = "One sentence is hidden in a long document, at several depths, and asked for at the end."
    hidden, verb = "a sentence hidden in a document", "finds"
    same_texts = ("mode", "seed", "repeats", "corpus_sha256", "pieces_sha256")

    @property
    def cells(self) -> tuple[NeedleCell, ...]:
        """One `NeedleCell` for each measured length and depth, in ascending order of length."""
        return self.parts

    def span(self, keys):
        lengths = sorted({length for length, _ in keys})
        return f"{lengths[0]} tokens" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"

    def units(self, size: int) -> list[list[Answer]]:
        """Return the answers at a length, grouped by haystack (by repeat if haystacks are unknown)."""
        answers: dict[int, list[Answer]] = {}
        for cell in self.cells:
            if cell.length == size:
                for name, answer in zip(cell.begins or range(len(cell.answers)), cell.answers):
                    answers.setdefault(name, []).append(answer)
        return [*answers.values()]

    def places(self):
        cells = self.cells
        return {n: [(c.depth, *c.positions, c.begins) for c in cells if c.length == n] for n in self.lengths}

    @property
    def lengths(self) -> list[int]:
        """The measured lengths in ascending order."""
        return sorted({cell.length for cell in self.cells})

    @property
    def depths(self) -> list[float]:
        """The measured depths in ascending order."""
        return sorted({cell.depth for cell in self.cells})

    def grid(self, score: str = "match_rate") -> np.ndarray:
        """Return a rate at each depth and length, (depths, lengths) float64. NaN means not measured.

        Args:
            score: name of the rate: "match_rate", "exact_rate" or "probability"; see `answers.Answers`.
        """
        lengths, depths = self.lengths, self.depths
        grid = np.full((len(depths), len(lengths)), np.nan)
        for cell in self.cells:
            grid[depths.index(cell.depth), lengths.index(cell.length)] = getattr(cell, score)
        return grid

    def in_words(self) -> str:
        rates = ", ".join(f"{rate:.0%} of {length} tokens" for length, rate in self.rates().items())
        units = sorted({len(self.units(length)) for length in self.lengths})
        drawn = plural(units[0], self.drawn) if len(units) == 1 else f"{units[0]} to {units[-1]} {self.drawn}s"
        depths = plural(len(self.depths), "depth")
        return f"{RATES[self.rates_measured[0]]}: {rates}; {depths}, {drawn} for each length"

    def table(self) -> Table:
        rows = [
            (cell.length, f"{cell.depth:.0%}", *(f"{rate:.1%}" for rate in cell.rates().values()), len(cell.answers))
            for cell in self.cells
        ]
        return Table(("length", "depth", *self.score_columns(), "haystacks"), rows)

    def draw(self, figure, title, train_length):
        mode = self.settings.get("mode")
        title = title.replace(self.title, f"{self.title}, {mode} mode") if mode else title
        draw_grid(figure, self, title, train_length)


@dataclass(frozen=True)
class Needle(RetrievalTask):
    """Hide one sentence in long documents, and check whether the model finds it (needle in a haystack).

    We do not use a judge model. If the corpus is long enough, each question is about a different part of the corpus.
    """

    name, result = "needle", NeedleGrid
    examples = """
  needle gpt2 --text book.txt
  needle MODEL --mode standard --lengths 4096 8192 16384 --depths 5
  needle MODEL --chat-template --text buch.txt --needle "Die Kuh Berta steht auf der Alm." --question "Wo steht die Kuh Berta? Antwort: auf der" --answer "Alm"
  needle model_cards/fox-demo --lengths 400 500 --depths 3 --no-replies --text stdlib"""

    lengths: list[int] | None = option(
        None,
        "total lengths of prompt and answer in tokens (default: 8 evenly spaced lengths up to the claimed context, "
        "without lengths that are too short)",
        least=1,
        selects=True,
    )
    depths: list[float] = option(
        [*DEPTHS], "depths of the needle, from 0 (beginning) to 1 (end); or the number of depths (at least 2)", least=0
    )
    mode: str | None = option(
        None,
        "wording of the needle. easy: the needle contains the question, for models without instruction tuning; "
        "standard: the needle does not contain the question (default: easy, or standard if --needle is given)",
        choices=MODES,
    )
    needle: str | None = option(None, "sentence to hide, in the language of the corpus")
    question: str | None = option(None, "question at the end of the prompt; requires --answer")
    answer: str | None = option(None, "expected answer to --question")
    repeats: int = option(1, "number of haystacks per length and depth", least=1)

    def __post_init__(self):
        super().__post_init__()
        depths = self.depths
        if len(depths) == 1 and depths[0] >= 2 and depths[0] == int(depths[0]):
            depths = [i / (int(depths[0]) - 1) for i in range(int(depths[0]))]
        if depths[-1] > 1:
            raise ValueError(f"depths must be numbers from 0 to 1, or a single integer of at least 2, got {depths}.")
        mode = self.mode or ("easy" if self.needle is None else "standard")
        self.fill(depths=depths, mode=mode, words=wording(mode, self.needle, self.question, self.answer))

    def prepare(self):
        super().prepare()
        subject = self.subject
        for name, text in zip(self.words._fields, self.words) if self.frame else ():
            if not set(subject.tokenizer.all_special_ids).isdisjoint(self.encode(text)):
                raise ValueError(
                    f"{name} must not contain special tokens of the tokenizer, got {text.strip()!r}. With a chat "
                    "template, they would end the message. Reword it, or measure without --chat-template."
                )
        pieces = needle_pieces(self.encode, subject.bos, self.words, self.frame)
        for piece, ids in zip(pieces._fields, pieces):
            self.check_ids(piece, ids)
        lengths = self.lengths
        if lengths is None:
            longest = subject.context - self.reply_room
            lengths = [n for n in (longest * i // 8 for i in range(1, 9)) if n > pieces.tokens]
            if not lengths:
                raise ValueError(
                    f"the context must have at least {pieces.tokens + 1 + self.reply_room} tokens, got "
                    f"{subject.context}. Measure a longer context, or choose a shorter needle."
                )
        questions = [(depth, repeat) for repeat in range(self.repeats) for depth in self.depths]
        begins = {}
        for length in lengths:
            room = haystack_length(length, pieces)
            for (depth, _), begin in zip(questions, draw_begins(len(subject.text), room, len(questions), self.seed)):
                begins.setdefault((length, depth), []).append(begin)
        self.fill(lengths=lengths, pieces=pieces, begins=begins, sentence_ends={})

    def facts(self):
        return {"pieces_sha256": content_hash(np.concatenate(self.pieces))}

    def trials(self, scores):
        answer = len(self.pieces.answer)
        return [self.trial(key, [(key[0] - answer, answer)] * self.repeats) for key in self.begins]

    def prompt(self, length: int, depth: float, begin: int) -> tuple[np.ndarray, int]:
        """Return the ids of a prompt, and the number of tokens before the needle.

        The haystack starts at token `begin` of the corpus.
        """
        haystack = self.subject.text[begin : begin + haystack_length(length, self.pieces)]
        for i in set(haystack.tolist()) - self.sentence_ends.keys():
            self.sentence_ends[i] = ends_sentence(self.subject.tokenizer.decode([i]))
        at = insertion_point(np.array([self.sentence_ends[i] for i in haystack.tolist()]), depth)
        return hide_needle(haystack, at, self.pieces), len(self.pieces.bos) + at

    def requests(self, key):
        prompts = [self.prompt(*key, begin)[0] for begin in self.begins[key]]
        return [self.ask(prompt, self.pieces.answer, len(prompt) - len(self.pieces.question)) for prompt in prompts]

    def score(self, key, responses):
        matches, tokens = partial(contains_text, expected=self.words.answer), len(self.pieces.answer)
        answers = [self.answer_of(response, tokens, matches) for response in responses]
        positions = [self.prompt(*key, begin)[1] for begin in self.begins[key]]
        return NeedleCell(answers, *key, positions, self.begins[key]).score()[1]


needle_in_a_haystack = function(Needle)


def draw_grid(figure: Any, result: NeedleGrid, title: str, train_length: int | None = None) -> None:
    """Draw the rate of correct answers as a heat map of length and depth, from red (0) to blue (1).

    Each cell contains the number of correct answers. White cells were not measured.
    """
    from .. import style

    shown = result.rates_measured[0]
    rates = result.grid(shown)
    lengths = result.lengths
    depths = result.depths
    figure.set_size_inches(max(style.WIDTH, 1.8 + 0.55 * len(lengths)), max(3.4, 2 + 0.34 * len(depths)))
    axes = figure.add_subplot()
    image = axes.imshow(rates, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")  # a palette for colour-blind readers
    for cell in result.cells:
        rate, answers = getattr(cell, shown), len(cell.answers)
        colour = "white" if abs(rate - 0.5) > 0.35 else style.INK  # white text in dark cells
        at, words = (lengths.index(cell.length), depths.index(cell.depth)), f"{round(rate * answers)}/{answers}"
        axes.text(*at, words, ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    style.strip_frame(axes, "length of prompt and answer (tokens)", "depth of the needle", labelsize=9)
    if train_length is not None and train_length < lengths[-1]:
        style.mark_training(axes, bisect_right(lengths, train_length) - 0.5, width=1.6)
    bar = figure.colorbar(image, ax=axes, format=style.PercentFormatter(1))
    bar.set_label(style.RATES[shown][0], color=style.INK, fontsize=10)
    bar.outline.set_visible(False)
    style.draw_title(figure, title)
    haystacks = sorted({len(cell.answers) for cell in result.cells})
    notes = [f"{' or '.join(map(str, haystacks))} haystack{'s' if haystacks != [1] else ''} in each cell"]
    if train_length is not None:
        notes.append(f"training context: {train_length:,} tokens")
    style.small_print(figure, *notes)
