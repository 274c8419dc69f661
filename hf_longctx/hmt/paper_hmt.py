"""The layout of the paper: a segment takes two passes.

    pass       input                                 result
    summary    summary token, x[:j], summary token   recall query: the last hidden state
    segment    prompt, sensory tokens, x, prompt     logits, and the memory: the hidden states of the closing prompt

Without recall, a segment takes only the segment pass, and the prompt is the latest memory. Padding is read as tokens,
so all rows of a batch have the same length.

If `use_cache` is False, a closing prompt is also added to an incomplete last segment. As in the official code, the
memory of this segment is reported but not stored. If `use_cache` is True, a later call reads the incomplete segment
again.
"""

from itertools import groupby

from torch import Tensor
from torch.nn import functional as F

from .call_hmt import Call
from .output_hmt import Report
from .packing_hmt import Part, join_parts
from .state_hmt import HMTState


def read(call: Call, state: HMTState, use_cache: bool) -> HMTState:
    """Read the tokens of a call, and return `state` with the memory after the call.

    `use_cache` says whether a later call may continue an incomplete last segment.
    """
    parts = [part for (part,) in call.rows.parts()]
    queries = recall_queries(call, parts)
    for part in parts:
        state = read_part(call, state, part, queries.get(part.segments[0]), use_cache)
    return state


def recall_queries(call: Call, parts: list[Part]) -> dict[int, Tensor]:
    """Return the recall queries (B, 1, d), keyed by segment index. Several segments share one pass of the backbone."""
    recalling = [part for part in parts if call.reader.config.recall and part.segments[0]]
    size = call.segments_per_batch(parts)
    queries = {}
    for _, group in groupby(recalling, key=lambda part: min(part.stop, call.reader.j)):
        same = list(group)
        for i in range(0, len(same), size):
            batch = same[i : i + size]
            found = summarize(call, join_parts(batch)).chunk(len(batch))
            queries |= {part.segments[0]: query for part, query in zip(batch, found)}
    return queries


def summarize(call: Call, part: Part) -> Tensor:
    """Compute H^sum (paper, sec. 3.2), (B, 1, d). It is the last hidden state of [H^T, E(x[:j]), H^T]."""
    token = call.reader.memory.summary_token[None]
    stop = min(part.stop, call.reader.j)
    mask = None if part.mask is None else F.pad(part.mask[:, :stop], (1, 1), value=True)
    hidden, _ = call.run(part, 0, stop, prefix=token, closing=token, logits_from=stop, mask=mask)
    return hidden[:, -1:].clone()


def read_part(call: Call, state: HMTState, part: Part, query: Tensor | None, use_cache: bool) -> HMTState:
    """Read one segment of each row (paper, sec. 3.2 and 3.3). Segments may be incomplete. No query: no recall."""
    reader = call.reader
    is_full = part.stop == reader.length
    start = 0
    recall = None
    prompt = reader.memory.initial[None] if part.segments[0] == 0 else None
    if prompt is None:
        start = -reader.k
        recall = reader.retrievers.retrieve(state.memory, query, part.ids[:, reader.k : reader.k + reader.j])
        prompt = recall.embeds
    m, ends = prompt.shape[1], is_full or not use_cache
    mask = None if part.mask is None else F.pad(part.mask, (m - start, m * ends), value=True)
    hidden, _ = call.run(part, start, part.stop, prefix=prompt, closing=prompt if ends else None, mask=mask)
    embedding = hidden[:, -m:].clone() if ends else None  # a view would retain all hidden states
    if is_full and embedding is not None:
        state = call.close(state, part, embedding)
    if call.output_recall:
        call.reports.append([Report(part, None if part.read else recall, embedding)])
    return state
