"""Tokenization of conversations. Only the assistant's tokens are scored, i.e. contribute to the loss."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template


TOKEN: Any = np.dtype([("id", np.uint32), ("first", bool), ("scored", bool)])  # `first` marks a document's first token
PROBE = "hf-longctx-probe"  # placeholder content that locates a turn in the rendered conversation
QUESTION = {"role": "user", "content": "Who?"}
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython", "environment"}
# Fields of a turn that select whether it is scored: `weight` (OpenAI, mistral-finetune), `train` and `training`
# (axolotl), `trainable` and `loss_mask` (verl), `loss` (ms-swift), `step_loss_mask` (slime), `masked` (torchtune)
SELECTING = ("weight", "train", "training", "trainable", "loss_mask", "step_loss_mask", "loss", "masked")
# Columns that select whole conversations; the other names are also names of statistics and of parts of a dataset
SELECTING_ROW = ("weight", "train", "trainable", "masked")
# Fields that score parts of a turn or conversation, or weigh them
UNSUPPORTED_IN_TURN = ("train_detail", "training_detail", "loss_scale", "loss_weight", "mask")
UNSUPPORTED_IN_ROW = ("loss_mask", "completion_mask", "assistant_masks", "loss_weight", "sample_weight", "loss_scale")


def encode_conversation(row: dict[str, Any], tokenizer) -> np.ndarray:
    """Encode a conversation, or a prompt and its completion, as TRL does.

    Args:
        row: one of: {"messages": turns}; {"prompt": turns, "completion": turns}; {"prompt": string, "completion":
            string}. `turns` is a list of {"role", "content"}. A turn or row with {"weight": 0}, or with another field
            in `SELECTING` or `SELECTING_ROW`, is not scored. If the row has turns, its "tools" and
            "chat_template_kwargs" are passed to the chat template.
        tokenizer: a fast transformers tokenizer; messages require a chat template.

    Returns:
        `TOKEN` records, (T,). A token is scored if it overlaps an assistant's turn or the completion. The template's
        `{% generation %}` marks give the assistant's turns. If there are no marks, `find_answer` finds the turns.

    Raises:
        ValueError: the tokenizer does not have a chat template; the turns are malformed; the assistant's turns cannot
            be found in the rendered conversation; or a field weighs turns, or scores parts of a turn.
    """
    for name in UNSUPPORTED_IN_ROW:
        if row.get(name) is not None:
            raise ValueError(f"the column `{name}` is not supported. Give single turns a `weight` of 0 or 1.")
    is_excluded = selects(row, SELECTING_ROW, "the conversation") is False
    if "messages" not in row and isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        text = row["prompt"] + row["completion"]
        ids, scored = encode_spans(text, [(len(row["prompt"]), len(text))], tokenizer, add_special_tokens=True)
        if not len(ids) or ids[-1] != tokenizer.eos_token_id:
            ids, scored = np.append(ids, tokenizer.eos_token_id), np.append(scored, False)
        scored[-1] = True
    else:
        turns, first = turns_of(row)
        excluded = excluded_turns(turns, first)
        turns = [{n: field for n, field in turn.items() if n not in SELECTING and field is not None} for turn in turns]
        tools = [parse_json(tool) for tool in parse_json(row.get("tools")) or []]
        options = {**(parse_json(row.get("chat_template_kwargs")) or {}), "tools": tools or None}
        text, spans = render_turns(turns, first, excluded, tokenizer, options)
        ids, scored = encode_spans(text, spans, tokenizer, add_special_tokens=False)
    tokens = np.zeros(len(ids), TOKEN)
    tokens["id"] = ids
    tokens["scored"] = scored & (not is_excluded)
    tokens["first"][0] = True
    return tokens


def turns_of(row: dict[str, Any]) -> tuple[list[dict], int]:
    """Return the turns of a conversation, and the index of the first turn that may be scored."""
    if "messages" in row:
        turns = row["messages"]
        first = 0
    else:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) or isinstance(completion, str):
            kinds = ["a string" if isinstance(part, str) else type(part).__name__ for part in (prompt, completion)]
            raise ValueError(
                f"`prompt` and `completion` must both be strings, or both be lists of turns, got {' and '.join(kinds)}. "
                'To make a turn of a prompt: [{"role": "user", "content": prompt}].'
            )
        first = len(prompt or [])
        turns = [*(prompt or []), *(completion or [])]
    are_turns = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns
    )
    if not (turns and are_turns):
        raise ValueError(
            f'turns must be a list of {{"role", "content"}}, got {str(turns)[:80]}. For ShareGPT, rename '
            'the fields "from" and "value" to "role" and "content", and the roles "human" and "gpt" to "user" and '
            '"assistant".'
        )
    return turns, first


def selects(fields: dict[str, Any], names: Sequence[str], place: str) -> bool | None:
    """Return whether a turn or row is selected for the loss. Return None if it does not have a field that selects it.

    Raises:
        ValueError: a field has another value than 0, 1, false or true.
    """
    selected = None
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f"`{name}` of {place} must be 0, 1, false or true, got {value!r}. All scored tokens have the same weight."
            )
        selected = (selected is not False) and bool(value) != (name == "masked")
    return selected


def excluded_turns(turns: list[dict], first: int) -> set[int]:
    """Return the indices of the turns that the data exclude from the loss.

    Raises:
        ValueError: a turn that cannot be scored is selected, or a field is not supported.
    """
    excluded = set()
    for number, turn in enumerate(turns):
        place = f"turn {number + 1}"
        parts = turn["content"] if isinstance(turn.get("content"), list) else []
        unsupported = [name for name in UNSUPPORTED_IN_TURN if turn.get(name) is not None]
        unsupported += [
            name for part in parts if isinstance(part, dict) for name in SELECTING if part.get(name) is not None
        ]
        if unsupported:
            raise ValueError(
                f"`{unsupported[0]}` of {place} is not supported. Only whole turns can be selected, by a `weight` of 0 or 1."
            )
        selected = selects(turn, SELECTING, place)
        if selected and (turn["role"] != "assistant" or number < first):
            (name, *_) = [name for name in SELECTING if turn.get(name) is not None]
            raise ValueError(
                f"`{name}` selects {place}, but the loss covers only the assistant's turns"
                f"{' of the completion' if first else ''}. Remove this field from the turn, whose role is {turn['role']!r}."
            )
        if selected is False:
            excluded.add(number)
    return excluded


def parse_json(value: Any) -> Any:
    """Parse a JSON string; some tables store such strings. Return other values unchanged."""
    return json.loads(value) if isinstance(value, str) else value


def encode_spans(text: str, spans: list[tuple[int, int]], tokenizer, **options) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a text, and a boolean mask of the tokens that overlap the character spans."""
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False, **options)
    starts, ends = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
    starts = np.minimum(starts, np.append(0, ends[:-1]))  # some tokenizers exclude spaces from their offsets
    scored = np.zeros(len(ends), bool)
    for start, end in spans:
        scored |= (ends > start) & (starts < end)
    return np.asarray(encoded["input_ids"], np.int64), scored


def common_length(a: str, b: str) -> int:
    """Return the length of the common prefix of two strings."""
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 (these are not paths)


def render_turns(
    turns: list[dict], first: int, excluded: set[int], tokenizer, options: dict
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation. Return the text, and the character spans of the assistant's turns.

    The spans of turns before index `first`, and of `excluded` turns, are left out.

    Raises:
        ValueError: a turn cannot be found in the text.
    """
    answers = [number for number, turn in enumerate(turns) if number >= first and turn["role"] == "assistant"]
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    words = [token[1:] for token in Environment().lex(template) if token[1] != "whitespace"]
    if any(word[0] == "block_begin" and follower[1] == "generation" for word, follower in pairwise(words)):
        options = {**tokenizer.special_tokens_map, **options, "chat_template": template}
        return render_marked_turns(turns, first, answers, excluded.intersection(answers), options)

    def render(turns: list[dict], **more) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, **options, **more)

    special = "|".join(map(re.escape, special_tokens(tokenizer)))
    text = render(turns)
    spans = []
    after = 0
    for number in answers:
        span = find_answer(text, turns, number, after, render, special)
        after = span[1]
        if number not in excluded:
            spans.append(span)
    return text, spans


def render_marked_turns(
    turns: list[dict], first: int, answers: list[int], excluded: set[int], options: dict
) -> tuple[str, list[tuple[int, int]]]:
    """Like `render_turns`, for a template that marks the assistant's turns by `{% generation %}`.

    Args:
        answers: indices of the assistant's turns, from `first` on.
        excluded: the `answers` to leave out.
    """

    def render(turns: list[dict]) -> tuple[str, list[tuple[int, int]]]:
        rendered: Any = render_jinja_template([turns], return_assistant_tokens_mask=True, **options)
        (text,), (spans,) = rendered
        return text, spans

    def begin_of(answer: int) -> int:
        probed = [with_probe(turn) if number == answer else turn for number, turn in enumerate(turns)]
        return common_length(text, render(probed)[0])

    text, spans = render(turns)
    if first > 0:
        begin = begin_of(answers[0]) if answers else len(text)
        spans = [span for span in spans if span[1] > begin]
    if not excluded:
        return text, spans
    marked = dict(zip(answers, spans))
    if len(spans) != len(answers) or any(not marked[n][0] <= begin_of(n) <= marked[n][1] for n in excluded):
        raise ValueError(
            f"Turn {min(excluded) + 1} is excluded from the loss, but cannot be found: the chat template marks "
            f"{len(spans)} spans for {len(answers)} assistant's turns. Mark each assistant's turn with its own "
            "{% generation %}...{% endgeneration %}."
        )
    return text, [span for number, span in marked.items() if number not in excluded]


def special_tokens(tokenizer) -> list[str]:
    """Return the tokenizer's special tokens as strings, longest first."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added.union(tokenizer.all_special_tokens), key=len, reverse=True)


def with_probe(turn: dict) -> dict:
    """Replace a turn's content with `PROBE`. If the content is a list, the new content is a list too."""
    return {**turn, "content": [{"type": "text", "text": PROBE}] if isinstance(turn.get("content"), list) else PROBE}


def find_answer(
    text: str, turns: list[dict], number: int, after: int, render: Callable[..., str], special: str
) -> tuple[int, int]:
    """Return the character span of the assistant's turn `number` in the rendered text.

    We render the conversation again with `PROBE` as the content of this turn. The header is the text that
    `add_generation_prompt` adds. The answer begins after the last header before the probe. If there is no header, it
    begins at the probe. The answer includes the end-of-turn text, unless the template omits this text after the last
    turn of a conversation. Outside the answer, both renderings must be equal.

    Args:
        text: rendered text of all turns.
        after: character index of the end of the assistant's previous turn.
        render: function that renders turns.
        special: regular expression that matches special tokens.
    """
    before, turn = turns[:number], turns[number]
    asked = before if any(earlier["role"] == "user" for earlier in before) else [*before, QUESTION]
    probe = with_probe({"role": "assistant", "content": turn.get("content")})
    prompt, alone = render(asked, add_generation_prompt=True), render([*asked, probe])
    header = prompt[common_length(prompt, render(asked)) : common_length(prompt, alone)]
    lead, _, last_ending = alone[common_length(prompt, alone) :].partition(PROBE)
    last_ending = last_ending.rstrip(" ")
    end_token = re.compile(rf"\s*(?:{special})\s*")
    for later in ([], turns[number + 1 :]):
        try:
            head, tail = render([*before, probe, *later]).split(PROBE)
            written = render([*before, turn, *later])
            other = render([*before, turn, with_probe(later[0]), *later[1:]]) if later else text
        except (TemplateError, ValueError):
            continue  # the template requires a tool call before a tool response, but the probe is not a tool call
        if header and header in head[after:]:
            begin = head.rfind(header, after)
            stop = begin + len(header)
        else:  # the answer may have leading spaces
            begin = stop = len(head.removesuffix("" if lead.strip(" ") else lead))
        start = common_length(written, head[:stop])
        ending = len(last_ending) if tail.startswith(last_ending) else 0
        if not ending and end_token.match(last_ending) and (token := end_token.match(tail)):
            ending = token.end()
        end = len(written) - len(tail) + ending
        is_same = start >= min(begin + 1, stop) and written.endswith(tail[ending:])
        if is_same and after <= start <= end and text.startswith(written[:end]) and other.startswith(written[:end]):
            return start, end
    raise ValueError(
        f"The assistant's turn {number + 1} cannot be found in the rendered chat template. Either this turn changes "
        "how other turns are rendered, or the template rewrites the turn's content. Mark assistant turns in the "
        "template with {% generation %}...{% endgeneration %}."
    )


def reason_to_drop(row: dict) -> str:
    """Return why a conversation does not have a scored token."""
    for name in SELECTING_ROW:
        if selects(row, (name,), "the conversation") is False:
            return f"with a `{name}` of {row[name]}"
    if "messages" not in row and isinstance(row["prompt"], str):
        return "without a scored token"
    turns, first = turns_of(row)
    answers = [turn for turn in turns[first:] if turn["role"] == "assistant"]
    if not answers:
        roles = sorted({str(turn["role"]) for turn in turns[first:]})
        return (
            f"without an assistant's turn{' in the completion' if first else ''} (roles: {', '.join(roles) or 'none'})"
        )
    if all(selects(turn, SELECTING, "a turn") is False for turn in answers):
        return "whose assistant's turns are all excluded from the loss"
    return "without a scored token"


def encode_conversations(rows: Iterator[dict], tokenizer) -> Iterator[np.ndarray]:
    """Encode conversations, and drop conversations without a scored token.

    At the end, prints to stderr how many conversations were dropped and why, and which roles are unknown. Prints one
    warning if an answer does not end with a special token.
    """
    special = set(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer)))
    is_reported = False
    dropped, unknown = Counter(), Counter()
    number = 0
    for number, row in enumerate(rows, 1):
        try:
            tokens = encode_conversation(row, tokenizer)
        except (TemplateError, TypeError) as error:  # TypeError: a field has an unexpected type
            raise ValueError(
                f"The chat template raises an error for conversation {number}: {error}. Remove or correct this conversation."
            ) from error
        except ValueError as error:
            raise ValueError(f"Conversation {number}: {error}") from error
        for part in ("messages", "prompt", "completion"):
            if isinstance(row.get(part), list):
                unknown.update(turn["role"] for turn in row[part] if turn["role"] not in ROLES)
        scored = tokens["id"][tokens["scored"]].tolist()
        if not scored:
            dropped[reason_to_drop(row)] += 1
            continue
        written = (token for token in reversed(scored) if token in special or tokenizer.decode([token]).strip())
        if not is_reported and next(written, None) not in special:
            is_reported = True
            print(
                "The last scored token of an answer is not a special token, so the model does not learn to end its "
                "turn. In the chat template, add a special token after the assistant's content, such as "
                "{{ eos_token }}.",
                file=sys.stderr,
            )
        yield tokens
    if dropped:
        reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        print(f"Dropped {dropped.total()} of {number} conversations: {reasons}.", file=sys.stderr)
    for role, count in unknown.most_common():
        print(
            f"{count} turns have the unknown role {role!r}, and are not scored. If this is the assistant's role, rename "
            "it to 'assistant'.",
            file=sys.stderr,
        )


__all__ = ["TOKEN", "encode_conversation", "encode_conversations"]
