"""A needle in a haystack: one sentence hidden in a long text, and a question that only it answers.

In the standard mode the sentence is alone; in the easy mode the question precedes it, as at the end of the
prompt, which suits models without instruction tuning. The answer is known, so no judge is needed; see `answers`.

Source: Lin et al. 2025, "Forgetting Transformer", section 4.3 and appendix B.3 (arXiv 2503.02130), after Kamradt 2023
and Qin et al. 2024. Unlike those programs, a prompt has exactly the tokens that its length says, sentences end at any
token that ends with a full stop, and the needle stays where it is if no sentence ends before it. This file knows no
model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from ..checks import entries
from ..result import Table, plural
from .answers import SCORES, SUMMARY, Answer, Answers, Retrieval
from .wording import Frame, Wording


DEPTHS = tuple(i / 10 for i in range(11))


class Pieces(NamedTuple):
    """The texts around the haystack, as ids, each (n,) int64."""

    bos: np.ndarray  # in a chat, all that stands before the words of the user
    needle: np.ndarray
    question: np.ndarray
    answer: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens of all pieces together."""
        return sum(map(len, self))


def needle_pieces(
    encode: Callable[[str], Sequence[int]], bos: int, words: Wording, frame: Frame | None = None
) -> Pieces:
    """Encode the needle, question and answer.

    Args:
        encode: text to ids, without special tokens.
        bos: first token, where there is no frame.
        words: see `wording`.
        frame: of a chat; see `chat_frame`.

    Raises:
        ValueError: the tokenizer makes one id of the whole answer.
    """
    if frame is None:
        before, prompt, answer = [bos], words.prompt, words.answer
    else:
        before, prompt = encode(frame.head), words.question + frame.tail + words.begin
        answer = words.answer if words.begin else words.answer.strip()
    question, answer_ids = split_encoding(encode, prompt, answer)
    if len(set(answer_ids)) < min(2, len(answer.split())):
        raise ValueError(
            f"the tokenizer turns {answer!r} into the ids {answer_ids}: it does not know this language, so that nothing "
            "can be asked. Give the tokenizer of the model."
        )
    pieces = (before, encode(words.needle), question, answer_ids)
    return Pieces(*(np.array(ids, dtype=np.int64) for ids in pieces))


def split_encoding(encode: Callable[[str], Sequence[int]], prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Encode a prompt and the answer after it together, because tokens may begin with a space.

    The answer is what differs from the encoding of the prompt alone. If a token reaches over the seam, it belongs to
    the answer.
    """
    alone, together = encode(prompt), list(encode(prompt + answer))
    seam = next((i for i, (a, b) in enumerate(zip(alone, together)) if a != b), len(alone))
    return together[:seam], together[seam:]


def haystack_length(length: int, pieces: Pieces) -> int:
    """Return how many tokens of haystack a prompt has, whose length with its answer is `length`.

    Raises:
        ValueError: there is not room for one.
    """
    room = length - pieces.tokens
    if room < 1:
        raise ValueError(
            f"length {length} is too short: needle, question and answer take {pieces.tokens} tokens with this tokenizer. "
            f"Start at {pieces.tokens + 1} or, better, at several times that."
        )
    return room


def draw_begins(corpus_tokens: int, room: int, questions: int, seed: int) -> list[int]:
    """Draw where the haystacks of one length start in the corpus: one for each question, none overlapping another.

    Where the corpus does not have room for all, questions share as many as fit, in turn.

    Raises:
        ValueError: the corpus is too short for one.
    """
    if corpus_tokens < room:
        raise ValueError(
            f"the corpus has {corpus_tokens} tokens, and a haystack needs {room}. Give more text or drop the longest "
            "lengths."
        )
    rng = random.Random(f"{seed} {room}")
    haystacks = min(questions, corpus_tokens // room)
    gaps = sorted(rng.randint(0, corpus_tokens - haystacks * room) for _ in range(haystacks))
    begins = [gap + i * room for i, gap in enumerate(gaps)]
    rng.shuffle(begins)
    return [begins[question % haystacks] for question in range(questions)]


def insertion_point(sentence_ends: np.ndarray, depth: float) -> int:
    """Return how many tokens of the haystack precede the needle: up to the last end of a sentence before `depth`.

    Where no sentence ends before it, the needle stays at its depth. At 0 and 1 it comes first and last.

    Args:
        sentence_ends: (n,) bool, True where a sentence ends with this token of the haystack.

    >>> insertion_point(np.array([False, True, False, False]), 0.75)
    2
    """
    at = int(len(sentence_ends) * depth)
    if at in (0, len(sentence_ends)):
        return at
    ends = np.flatnonzero(sentence_ends[:at])
    return int(ends[-1]) + 1 if len(ends) else at


def hide_needle(haystack: np.ndarray, at: int, pieces: Pieces) -> np.ndarray:
    """Join BOS, the haystack with the needle after its first `at` tokens, and the question, (n,) int64."""
    return np.concatenate([pieces.bos, haystack[:at], pieces.needle, haystack[at:], pieces.question])


def ends_sentence(text: str) -> bool:
    """Return whether a sentence ends with this token.

    >>> [ends_sentence(token) for token in ('."', ".\\n", " e.g", "!", "\u3002", ",")]
    [True, True, False, True, True, False]
    """
    return re.search(r"[.!?\u3002\uff01\uff1f]\W*$", text) is not None  # the last three are Chinese and Japanese


@dataclass(frozen=True)
class NeedleCell(Answers):
    """The answers at one length and depth.

    Attributes:
        length: tokens of prompt and answer together.
        depth: intended place of the needle, 0 (begin) to 1 (end of the haystack).
        positions: tokens before the needle in each prompt, BOS included.
        begins: where each haystack starts in the corpus; None in results of former versions, all of whose depths have
            the same haystacks.
    """

    length: int
    depth: float
    positions: Sequence[int]
    begins: Sequence[int] | None = None

    def __post_init__(self):
        super().__post_init__()
        self.check_one_each("positions", 0)
        if self.begins is not None:
            self.check_one_each("begins", 0)


@dataclass(frozen=True)
class NeedleGrid(Retrieval):
    """A measured grid of lengths and depths.

    Attributes:
        cells: one `NeedleCell` per length and depth that was measured, length by length.
    """

    kind = "needle"
    title = "Needle in a haystack"
    task = "One sentence is hidden in a long text, at several depths, and asked for at the end."

    cells: Sequence[NeedleCell]
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        cells = entries(self.cells, NeedleCell, lambda cell: f"length {cell.length} and depth {cell.depth}")
        object.__setattr__(self, "cells", cells)

    @property
    def parts(self) -> Sequence[NeedleCell]:
        return self.cells

    def haystacks(self, length: int) -> dict[int, list[Answer]]:
        """Return the answers at a length by their haystacks, each named by where it starts, or by its repeat."""
        answers: dict[int, list[Answer]] = {}
        for cell in self.cells:
            if cell.length == length:
                for name, answer in zip(cell.begins or range(len(cell.answers)), cell.answers):
                    answers.setdefault(name, []).append(answer)
        return answers

    def independent(self, size: int) -> int:
        return len(self.haystacks(size))

    @property
    def lengths(self) -> list[int]:
        """The lengths that were measured, ascending."""
        return sorted({cell.length for cell in self.cells})

    @property
    def depths(self) -> list[float]:
        """The depths that were measured, ascending."""
        return sorted({cell.depth for cell in self.cells})

    def grid(self, score: str = "match_rate") -> np.ndarray:
        """Return one score as (depths, lengths) float64, NaN where it was not measured.

        Args:
            score: "match_rate", "exact_rate" or "probability"; see `answers.Answers`.

        Raises:
            ValueError: the score is unknown.
        """
        if score not in SCORES:
            raise ValueError(f"score must be one of {SCORES}, got {score!r}.")
        lengths, depths = self.lengths, self.depths
        grid = np.full((len(depths), len(lengths)), np.nan)
        for cell in self.cells:
            grid[depths.index(cell.depth), lengths.index(cell.length)] = getattr(cell, score)
        return grid

    def summary(self) -> str:
        if not self.cells:
            return "no length measured"
        rates = ", ".join(f"{rate:.0%} of {length} tokens" for length, rate in self.rates().items())
        units = sorted({self.independent(length) for length in self.lengths})
        drawn = plural(units[0], self.drawn) if len(units) == 1 else f"{units[0]} to {units[-1]} {self.drawn}s"
        depths = plural(len(self.depths), "depth")
        return f"{SUMMARY[self.scores[0]]}: {rates}; {depths}, {drawn} for each length{self.interruption}"

    def table(self) -> Table:
        rows = [
            (cell.length, f"{cell.depth:.0%}", *(f"{rate:.1%}" for rate in cell.rates().values()), len(cell.answers))
            for cell in self.cells
        ]
        return Table(("length", "depth", *self.score_columns(), "haystacks"), rows)

    def document(self) -> dict[str, Any]:
        cells = [
            {"length": c.length, "depth": c.depth, **c.rates(), "positions": c.positions, "answers": c.to_list()}
            | ({} if c.begins is None else {"begins": c.begins})
            for c in self.cells
        ]
        return {"settings": self.settings, "cells": cells}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> NeedleGrid:
        names = ("answers", "length", "depth", "positions")
        cells = [
            NeedleCell.from_list(*(cell[name] for name in names), cell.get("begins")) for cell in document["cells"]
        ]
        return cls(cells, document["settings"])

    def plot(
        self,
        path: str | PathLike,
        *,
        train_length: int | None = None,
        title: str | None = None,
        score: str | None = None,
    ) -> None:
        from .plot import plot_needle

        plot_needle(self, path, score=score, train_length=train_length, title=title)
