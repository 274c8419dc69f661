"""Default lengths of retrieval: those that fit into the context of the model."""

from __future__ import annotations

from typing import Any

from ..retrieval.haystack import needle_pieces
from ..retrieval.lines import NAMES, draw_record
from ..retrieval.measure import encoder
from ..retrieval.wording import Frame, Wording


ROOM_FOR_REPLIES = 32  # tokens, beyond needle and question
NO_CLAIM = 4096  # context in tokens where a model claims none


def needle_lengths(context: int, tokenizer: Any, words: Wording, frame: Frame | None = None) -> list[int]:
    """Return eight lengths up to the context, without those too short for needle and question."""
    longest = context - ROOM_FOR_REPLIES
    needed = needle_pieces(encoder(tokenizer), 0, words, frame).tokens
    return [length for length in (longest * i // 8 for i in range(1, 9)) if length > needed] or [longest]


def line_counts(context: int, tokenizer: Any) -> list[int]:
    """Return 5, 10, 20 ... lines, as far as they are sure to fit into the context; 5 in any case."""
    counts = [5]
    while 2 * counts[-1] <= len(NAMES) and record_tokens(2 * counts[-1], tokenizer) <= context:
        counts.append(2 * counts[-1])
    return counts


def record_tokens(lines: int, tokenizer: Any) -> float:
    """Return tokens that are sure to suffice for a record of so many lines, its question and the reply."""
    return 1.1 * len(encoder(tokenizer)(draw_record(lines, seed=0, repeat=0).text)) + 200
