"""Prompts of the needle in a haystack: a sentence (the needle) is hidden in a document (the haystack).

A question at the end of the prompt asks for the needle. In standard mode, the needle is a plain sentence. In easy
mode, the needle is the question followed by the answer. This mode is for models without instruction tuning. The answer
is known, so scoring does not need a judge model; see `answers`.

Source: Lin et al. 2025, "Forgetting Transformer", section 4.3 and appendix B.3 (arXiv 2503.02130), after Kamradt 2023
and Qin et al. 2024. Our prompts differ in three ways:

- A prompt is exactly as long as requested.
- A token that ends with a full stop, exclamation mark or question mark ends a sentence.
- If no sentence ends before the requested depth, the needle is inserted exactly at this depth.

This file does not use a model.
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
    """Token ids of the answer, and of all pieces of a prompt except the haystack. Each array is (n,) int64."""

    bos: np.ndarray  # the BOS token, or all tokens before the user message of a chat
    needle: np.ndarray
    question: np.ndarray
    answer: np.ndarray

    @property
    def tokens(self) -> int:
        """Total number of tokens, including the answer."""
        return sum(map(len, self))


def needle_pieces(
    encode: Callable[[str], Sequence[int]], bos: int, words: Wording, frame: Frame | None = None
) -> Pieces:
    """Encode the needle, question and answer.

    Args:
        encode: function that encodes a string without special tokens.
        bos: id of the BOS token, for a prompt without a chat template.
        words: wording of the prompt; see `wording`.
        frame: chat prompt around the user message; see `chat_frame`.

    Raises:
        ValueError: the tokenizer encodes the answer as a single repeated id.
    """
    if frame is None:
        before = [bos]
        prompt = words.prompt
        answer = words.answer
    else:
        before, prompt = encode(frame.head), words.question + frame.tail + words.begin
        answer = words.answer if words.begin else words.answer.strip()
    question, answer_ids = split_encoding(encode, prompt, answer)
    if len(set(answer_ids)) < min(2, len(answer.split())):
        raise ValueError(
            f"the tokenizer does not cover the language of the prompts: it encodes {answer!r} as the ids "
            f"{answer_ids}. Pass the model's own tokenizer."
        )
    pieces = (before, encode(words.needle), question, answer_ids)
    return Pieces(*(np.array(ids, dtype=np.int64) for ids in pieces))


def split_encoding(encode: Callable[[str], Sequence[int]], prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Encode a prompt followed by its answer. Return the ids of each.

    We encode prompt and answer as one string, because the space between them may be part of a token. We also encode
    the prompt alone. The answer begins at the first id at which the two encodings differ. A token that spans
    the boundary thus belongs to the answer.
    """
    alone, together = encode(prompt), list(encode(prompt + answer))
    seam = next((i for i, (a, b) in enumerate(zip(alone, together)) if a != b), len(alone))
    return together[:seam], together[seam:]


def haystack_length(length: int, pieces: Pieces) -> int:
    """Return the number of tokens in the haystack for a total length of prompt and answer.

    Raises:
        ValueError: `length` is too short for a haystack.
    """
    room = length - pieces.tokens
    if room < 1:
        raise ValueError(
            f"lengths must be above {pieces.tokens} (the tokens of needle, question and answer), got {length}. Use "
            "lengths of several times that number."
        )
    return room


def draw_begins(corpus_tokens: int, room: int, questions: int, seed: int) -> list[int]:
    """Draw a haystack for each question. Return the start of each haystack in the corpus.

    Haystacks do not overlap. If the corpus is too short for one haystack per question, questions share haystacks.

    Args:
        corpus_tokens: number of tokens in the corpus.
        room: number of tokens in a haystack.
        questions: number of questions.
        seed: random seed.

    Raises:
        ValueError: the corpus is shorter than one haystack.
    """
    if corpus_tokens < room:
        raise ValueError(
            f"the corpus must have at least {room} tokens for a haystack, got {corpus_tokens}. Pass a longer corpus, "
            "or drop the longest lengths."
        )
    rng = random.Random(f"{seed} {room}")
    haystacks = min(questions, corpus_tokens // room)
    gaps = sorted(rng.randint(0, corpus_tokens - haystacks * room) for _ in range(haystacks))
    begins = [gap + i * room for i, gap in enumerate(gaps)]
    rng.shuffle(begins)
    return [begins[question % haystacks] for question in range(questions)]


def insertion_point(sentence_ends: np.ndarray, depth: float) -> int:
    """Return the number of haystack tokens before the needle.

    The needle is inserted after the last sentence that ends before `depth`. If no sentence ends before `depth`, the
    needle is inserted exactly at `depth`.

    Args:
        sentence_ends: (n,) bool, whether each token of the haystack ends a sentence.
        depth: depth of the needle, from 0 (beginning of the haystack) to 1 (end).

    >>> insertion_point(np.array([False, True, False, False]), 0.75)
    2
    """
    at = int(len(sentence_ends) * depth)
    if at in (0, len(sentence_ends)):
        return at
    ends = np.flatnonzero(sentence_ends[:at])
    return int(ends[-1]) + 1 if len(ends) else at


def hide_needle(haystack: np.ndarray, at: int, pieces: Pieces) -> np.ndarray:
    """Insert the needle after `at` tokens of the haystack. Return the ids of the prompt, (n,) int64."""
    return np.concatenate([pieces.bos, haystack[:at], pieces.needle, haystack[at:], pieces.question])


def ends_sentence(text: str) -> bool:
    """Return whether a token ends a sentence.

    >>> [ends_sentence(token) for token in ('."', ".\\n", " e.g", "!", "\u3002", ",")]
    [True, True, False, True, True, False]
    """
    return re.search(r"[.!?\u3002\uff01\uff1f]\W*$", text) is not None  # including full-width marks
