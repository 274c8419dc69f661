"""How far to measure where nobody says so: grids that fit into the context and the text."""

from __future__ import annotations

from ..curve.result import longest_length
from ..retrieval.haystack import needle_pieces
from ..retrieval.lines import NAMES, draw_record


ROOM_FOR_REPLIES = 32  # tokens, beyond needle and question
NO_CLAIM = 4096  # context in tokens where a model claims none


def longest_target(claimed: int | None, corpus_tokens: int | None) -> int:
    """The longest target of a forgetting curve: half the claimed context, at most a third of the text.

    Args:
        claimed: the context that the model claims, in tokens.
        corpus_tokens: tokens of the text; None for random data.

    Raises:
        ValueError: both are None.

    >>> longest_target(2048, 1500)
    500
    """
    ends = [] if claimed is None else [longest_length(claimed)]
    ends += [] if corpus_tokens is None else [corpus_tokens // 3]
    if not ends:
        raise ValueError("the model claims no context, and random data have no end: say how far to measure.")
    return min(ends)


def needle_lengths(context: int, tokenizer, mode: str) -> list[int]:
    """Eight lengths up to the context, without those too short for needle and question."""
    longest = context - ROOM_FOR_REPLIES
    needed = needle_pieces(encode_by(tokenizer), 0, mode).tokens
    return [length for length in (longest * i // 8 for i in range(1, 9)) if length > needed] or [longest]


def line_counts(context: int, tokenizer) -> list[int]:
    """5, 10, 20 ... lines, as far as they are sure to fit into the context; 5 in any case."""
    counts = [5]
    while 2 * counts[-1] <= len(NAMES) and record_tokens(2 * counts[-1], tokenizer) <= context:
        counts.append(2 * counts[-1])
    return counts


def record_tokens(lines: int, tokenizer) -> float:
    """Tokens that are sure to suffice for a record of so many lines, its question and the reply."""
    return 1.1 * len(encode_by(tokenizer)(draw_record(lines, seed=0, repeat=0).text)) + 200


def encode_by(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
