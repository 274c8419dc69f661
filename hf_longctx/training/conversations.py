"""Conversations as tokens, of which only those of the assistant are scored."""

from collections.abc import Iterator
from typing import Any

import numpy as np


SCORED, FIRST = 1, 2  # bits of a flag: the label counts; a conversation begins


def encode_conversation(row: dict[str, Any], tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Encode one conversation, or a prompt and its completion, as TRL does.

    Args:
        row: {"messages"}, a list of {"role", "content"}; or {"prompt", "completion"}, two texts or two such lists.
        tokenizer: of transformers; messages need its chat template.

    Returns:
        ids, (T,), int64; and a flag of each, (T,), uint8. Scored are the assistant's turns, of a prompt and its
        completion those of the completion. A template says by `{% generation %}` which tokens these are; else they are
        what a turn adds to the turns before it and the header of an answer.

    Raises:
        ValueError: the tokenizer has no chat template, or one that writes earlier turns otherwise when others follow.
    """
    if "messages" not in row and isinstance(row["prompt"], str):
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]
        differing = [i for i, (a, b) in enumerate(zip(prompt, ids)) if a != b]  # a token over the border
        scored = np.arange(len(ids)) >= (differing[0] if differing else len(prompt))
    else:
        before = [] if "messages" in row else row["prompt"]
        turns = row["messages"] if "messages" in row else [*before, *row["completion"]]
        ids, scored = encode_turns(turns, len(before), tokenizer)
    flags = np.where(scored, SCORED, 0).astype(np.uint8)
    flags[0] |= FIRST
    return np.asarray(ids, np.int64), flags


def encode_turns(turns: list[dict], first: int, tokenizer) -> tuple[list[int], np.ndarray]:
    """Return the ids of turns, and which of them are of the assistant, from turn `first` on."""

    def encode(count: int, **options) -> list[int]:
        return tokenizer.apply_chat_template(turns[:count], return_dict=False, **options) if count else []

    if first == 0 and "{% generation" in (tokenizer.get_chat_template() or ""):
        encoded = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        return encoded["input_ids"], np.asarray(encoded["assistant_masks"], bool)
    ids = encode(len(turns))
    scored = np.zeros(len(ids), bool)
    for number, turn in enumerate(turns):
        if number >= first and turn["role"] == "assistant":
            before, after = encode(number, add_generation_prompt=True), encode(number + 1)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise ValueError(
                    "the chat template writes a turn otherwise when another one follows, so its tokens cannot be told from "
                    "others. Mark the assistant's in the template by {% generation %}."
                )
            scored[len(before) : len(after)] = True
    return ids, scored


def encode_conversations(rows: Iterator[dict], tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Encode conversations one by one, and leave out those in which nothing is scored."""
    for row in rows:
        ids, flags = encode_conversation(row, tokenizer)
        if (flags & SCORED).any():
            yield ids, flags


__all__ = ["FIRST", "SCORED", "encode_conversation", "encode_conversations"]
