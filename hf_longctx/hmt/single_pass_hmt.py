"""The single-pass layout: `recall_mode="single_pass"`.

The backbone reads each token of a segment once:

    position    0        1 .. k            1+k .. k+j   1+k+j
    first part           sensory tokens    x[:j]        summary token
    second part prompt                                  x[j:], summary token

The hidden state of the first summary token is the recall query. The key and the value of this token are then cropped
from the cache. A second pass extends the cache with the prompt and the second part. In this pass, the prompt attends
only to itself, and the second part attends to the prompt, the sensory tokens and x[:j]. In the cache, the prompt
follows the first part, but its position id places it first. Attention does not depend on the order of the cached keys.
The hidden state of the second summary token is the memory of the segment. Queries and memories are therefore computed
by the same function. The first segment does not recall, and is read in one pass.

An untrained HMT predicts like its backbone with a window of one segment and its sensory tokens. There are two reasons.
First, adjacent tokens stay adjacent. Second, the prompt is a recalled hidden state, not a random vector.

First parts do not depend on recalls. The first parts of several segments therefore share one pass. The second parts
are then read one by one. If the attention implementation does not accept a 4D mask, another pass reads the prompt
alone, and its key and value are put before the cache.

If gradient checkpointing of layers disables the cache, the second pass reads the whole segment again, as [prompt,
sensory tokens, x, summary token]. A mask hides the prompt from the sensory tokens and x[:j]. This computes the same
function. If retrievers return r embeddings in addition to the prompt, such as re-read tokens, the second pass also
reads the whole segment. These embeddings follow the prompt, and all positions of the segment shift by r.

With `reread=True`, the whole segment is also read again, but without this mask. x[:j] then attends to the prompt too,
so the model computes a different function. Every backbone supports `reread=True`.

Rows at the same position in their segments are read together. Rows at different positions are read separately.
Decoding steps are an exception: they use a joint cache.
"""

from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .caches_hmt import side_by_side, split
from .call_hmt import Call
from .output_hmt import Report
from .packing_hmt import Part, join_parts
from .state_hmt import HMTState, join_memories


class FirstPart(NamedTuple):
    """Result of reading the first part of a segment.

    query: hidden state of the summary token, (B, 1, d).
    kv_cache: cache of the sensory tokens and x[:j], or None.
    hidden: last hidden states of the first j tokens, (B, j, d). None if no retriever reads hidden states.
    """

    query: Tensor
    kv_cache: Cache | None
    hidden: Tensor | None


def read(call: Call, state: HMTState, use_cache: bool) -> HMTState:
    """Read the tokens of a call, and return `state` with the memory after the call.

    `use_cache` says whether a later call may continue an incomplete last segment.
    """
    if use_cache and is_step(call, state):
        return step(call, state)
    for are_split, group in groupby(call.rows.parts(), key=partial(is_split, call)):
        segments = list(group)
        size = call.segments_per_batch([parts[0] for parts in segments])
        for i in range(0, len(segments), size):
            batch = segments[i : i + size]
            first_parts: list[Any] = [None] * len(batch)
            if are_split:
                first_parts = read_first_parts(call, state, [parts[0] for parts in batch], state.kv_cache)
            for parts, first_part in zip(batch, first_parts):
                state = read_segment(call, state, parts, first_part, use_cache)
    return state


def is_split(call: Call, parts: list[Part]) -> bool:
    """Return whether each row reads a whole first part in this call. The first segment is not split into parts."""
    part = parts[0]
    return len(parts) == 1 and part.segments[0] > 0 and part.read == 0 and part.stop >= call.reader.j


def is_step(call: Call, state: HMTState) -> bool:
    """Return whether a call extends the caches of all rows by the same number of tokens, and does not recall."""
    if state.kv_cache is None or torch.is_grad_enabled() or not call.reader.lm.continues:
        return False
    rows = [*zip(call.rows.segments, call.rows.opened, call.rows.lengths)]
    if not all(read > 0 and stop < call.reader.length for _, read, stop in rows):
        return False
    recalls = any(segment and read < call.reader.j <= stop for segment, read, stop in rows)
    return not recalls and len({stop - read for _, read, stop in rows}) == 1


def step(call: Call, state: HMTState) -> HMTState:
    """Read the new tokens of all rows in one pass that extends the cache. Rows may be at different positions."""
    part = call.rows.new_tokens()
    mask = state.kv_mask
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(len(mask), part.stop)], 1)
    _, kv_cache = call.run(part, 0, part.stop, kv_cache=state.kv_cache, mask=mask, remembered=state.memory)
    call.reports.append([])
    return replace(state, kv_cache=kv_cache, kv_mask=mask)


def read_segment(
    call: Call, state: HMTState, parts: list[Part], first_part: FirstPart | None, use_cache: bool
) -> HMTState:
    """Read one segment of each row. Segments may be incomplete."""
    is_open = all(0 < part.stop < call.reader.length for part in parts)
    keeps = use_cache and is_open and not torch.is_grad_enabled() and call.reader.lm.continues
    call.reports.append([])
    if len(parts) == 1:
        return read_part(call, state, parts[0], first_part, keeps)
    states = [(part.rows, read_part(call, state.select_rows(part.rows), part, None, keeps)) for part in parts]
    caches: list[Any] = [(rows, after.kv_cache) for rows, after in states]
    kv_cache = kv_mask = None
    if all(cache is not None for _, cache in caches):
        kv_cache, kv_mask = side_by_side(caches)
    memory = join_memories([(rows, after.memory) for rows, after in states])
    return replace(state, memory=memory, kv_cache=kv_cache, kv_mask=kv_mask)


# --------------------------------------------------------------------------------------- rows at the same position


def read_first_parts(call: Call, state: HMTState, parts: list[Part], kv_cache: Cache | None) -> list[FirstPart]:
    """Read the first parts of several segments. One pass reads successive first parts of the same shape.

    Args:
        kv_cache: cache of the first part of a single segment, which earlier calls began to read. None: nothing was
            read, or it is read again.
    """
    reader = call.reader
    start = -reader.k if kv_cache is None else parts[0].read
    if kv_cache is None and call.in_two_passes:
        kv_cache = DynamicCache(config=reader.lm.model.config)
    first_parts: list[FirstPart] = []
    for _, group in groupby(parts, key=lambda part: min(part.needed_from, reader.j)):
        same = list(group)
        token = reader.memory.summary_token[None]
        part = join_parts(same)
        options: dict[str, Any] = {"kv_cache": kv_cache, "remembered": state.memory}
        hidden, extended = call.run(part, start, reader.j, closing=token, **options)
        caches: list[Cache | None] = [None] * len(same)
        if extended is not None and call.in_two_passes:
            extended.crop(-1)  # the slot of the summary token
            caches = [*split(extended, len(same))]
        queries = hidden[:, -1:].clone().chunk(len(same))  # cloned, because a view would keep all hidden states
        tokens: Any = [None] * len(same)
        if reader.retrievers.reads_hidden:
            tokens = hidden[:, -start:-1].chunk(len(same))
        first_parts += map(FirstPart, queries, caches, tokens)
    return first_parts


def read_part(call: Call, state: HMTState, part: Part, first_part: FirstPart | None, keeps: bool) -> HMTState:
    """Read the tokens of a part that earlier calls have not read, and return the new state of its rows.

    Args:
        state: state of these rows.
        first_part: result of the first part. None: the first part has not been read yet.
        keeps: whether the new state contains a cache for a later call.
    """
    if part.stop == part.read:
        return state
    reader = call.reader
    is_full = part.stop == reader.length
    is_later = part.segments[0] > 0
    kv_cache = None if starts_again(call, state, part) else state.kv_cache
    start = part.read if kv_cache is not None else -reader.k * is_later
    recall = None
    around: dict[str, Any] = {}
    if is_later and start < reader.j <= part.stop:
        first_part = first_part or read_first_parts(call, state, [part], kv_cache)[0]
        query_ids = part.ids[:, reader.k : reader.k + reader.j]
        recall = reader.retrievers.retrieve(state.memory, first_part.query, query_ids)
        around |= {"prefix": recall.embeds, "logits_from": reader.j}
        kv_cache = first_part.kv_cache
        start = reader.j if call.in_two_passes else -reader.k
    if is_full:
        around |= {"closing": reader.memory.summary_token[None], "last": True}
    if kv_cache is None and keeps:
        kv_cache = DynamicCache(config=reader.lm.model.config)
    hidden, kv_cache = call.run(part, start, part.stop, kv_cache=kv_cache, remembered=state.memory, **around)
    embedding = None
    if is_full:
        embedding = hidden[:, -1:].clone()
        of_tokens = hidden_of_tokens(call, first_part, hidden) if reader.retrievers.reads_hidden else None
        state = call.close(state, part, embedding, of_tokens)
    if call.output_recall:
        call.reports[-1].append(Report(part, recall if part.read < reader.j else None, embedding))
    return replace(state, kv_cache=kv_cache if keeps else None, kv_mask=None)


def starts_again(call: Call, state: HMTState, part: Part) -> bool:
    """Return whether a part is read without the cache of the state, from its first sensory token."""
    if part.read == 0 or state.kv_mask is not None or torch.is_grad_enabled():  # only `step` reads a padded cache
        return True
    return part.stop == call.reader.length and call.reader.retrievers.reads_hidden  # of the whole segment


def hidden_of_tokens(call: Call, first_part: FirstPart | None, hidden: Tensor) -> Tensor:
    """Return the last hidden states of a full segment, (B, L', d). `hidden`: of the pass that ended the segment."""
    if first_part is None or first_part.hidden is None:
        return hidden[:, -1 - call.reader.length : -1]
    return torch.cat([first_part.hidden, hidden[:, -1 - call.reader.length + call.reader.j : -1]], 1)
