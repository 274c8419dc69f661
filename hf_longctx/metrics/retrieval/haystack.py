"""Needle in a haystack: one sentence is hidden in a long document, and only this sentence answers the question.

In standard mode, the needle is a plain sentence. In easy mode, the needle repeats the question before the answer, for
models without instruction tuning. The answer is known, so scoring does not need a judge model; see `answers`.

Source: Lin et al. 2025, "Forgetting Transformer", section 4.3 and appendix B.3 (arXiv 2503.02130), after Kamradt 2023
and Qin et al. 2024. Unlike their programs, we make prompts exactly as long as requested, end sentences at any token
that ends with a full stop, and leave the needle at its depth if no sentence ends before it. This file does not use a
model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .wording import Frame, Wording


DEPTHS = tuple(i / 10 for i in range(11))


class Pieces(NamedTuple):
    """The parts of a prompt around the haystack, as ids, each (n,) int64."""

    bos: np.ndarray  # in a chat, everything before the user message
    needle: np.ndarray
    question: np.ndarray
    answer: np.ndarray

    @property
    def tokens(self) -> int:
        """Total number of tokens in all pieces."""
        return sum(map(len, self))


def needle_pieces(
    encode: Callable[[str], Sequence[int]], bos: int, words: Wording, frame: Frame | None = None
) -> Pieces:
    """Encode the needle, question and answer.

    Args:
        encode: function that encodes a string without special tokens.
        bos: first token of a prompt without a chat template.
        words: wording of the prompt, see `wording`.
        frame: chat frame, see `chat_frame`.

    Raises:
        ValueError: the tokenizer encodes the answer as a single repeated id.
    """
    if frame is None:
        before, prompt, answer = [bos], words.prompt, words.answer
    else:
        before, prompt = encode(frame.head), words.question + frame.tail + words.begin
        answer = words.answer if words.begin else words.answer.strip()
    question, answer_ids = split_encoding(encode, prompt, answer)
    if len(set(answer_ids)) < min(2, len(answer.split())):
        raise ValueError(
            f"the tokenizer encodes {answer!r} as the ids {answer_ids}, so it does not cover this language. Pass the "
            "model's own tokenizer."
        )
    pieces = (before, encode(words.needle), question, answer_ids)
    return Pieces(*(np.array(ids, dtype=np.int64) for ids in pieces))


def split_encoding(encode: Callable[[str], Sequence[int]], prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Encode a prompt and its answer jointly, because tokens may begin with a space.

    The answer begins where the encoding differs from the encoding of the prompt alone. A token that spans both belongs
    to the answer.
    """
    alone, together = encode(prompt), list(encode(prompt + answer))
    seam = next((i for i, (a, b) in enumerate(zip(alone, together)) if a != b), len(alone))
    return together[:seam], together[seam:]


def haystack_length(length: int, pieces: Pieces) -> int:
    """Return the number of haystack tokens if prompt and answer take `length` tokens.

    Raises:
        ValueError: `length` does not leave room for a haystack.
    """
    room = length - pieces.tokens
    if room < 1:
        raise ValueError(
            f"length {length} is too short: needle, question and answer take {pieces.tokens} tokens with this tokenizer. "
            f"Start at {pieces.tokens + 1} or, better, at several times that."
        )
    return room


def draw_begins(corpus_tokens: int, room: int, questions: int, seed: int) -> list[int]:
    """Draw the starts of non-overlapping haystacks of one length in the corpus, one for each question.

    If the corpus is too short for all, the questions share the haystacks that fit, in turn.

    Raises:
        ValueError: the corpus is shorter than one haystack.
    """
    if corpus_tokens < room:
        raise ValueError(
            f"the corpus has {corpus_tokens} tokens, and a haystack needs {room}. Give a longer corpus or drop the longest "
            "lengths."
        )
    rng = random.Random(f"{seed} {room}")
    haystacks = min(questions, corpus_tokens // room)
    gaps = sorted(rng.randint(0, corpus_tokens - haystacks * room) for _ in range(haystacks))
    begins = [gap + i * room for i, gap in enumerate(gaps)]
    rng.shuffle(begins)
    return [begins[question % haystacks] for question in range(questions)]


def insertion_point(sentence_ends: np.ndarray, depth: float) -> int:
    """Return how many tokens of the haystack precede the needle, which follows the last full sentence before `depth`.

    If no sentence ends before that depth, the needle goes exactly there. Depths 0 and 1 are the beginning and the end.

    Args:
        sentence_ends: (n,) bool, True where a token of the haystack ends a sentence.

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
    """Return whether a token ends a sentence.

    >>> [ends_sentence(token) for token in ('."', ".\\n", " e.g", "!", "\u3002", ",")]
    [True, True, False, True, True, False]
    """
    return re.search(r"[.!?\u3002\uff01\uff1f]\W*$", text) is not None  # the last three are full-width
