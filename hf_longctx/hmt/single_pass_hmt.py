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
are then read one by one. If gradient checkpointing of layers disables the cache, the whole segment is read again as
[prompt, sensory tokens, x, summary token]. A mask hides the prompt from the sensory tokens and x[:j]. This computes
the same function.

With `reread=True`, the whole segment is also read again, but without this mask. x[:j] then attends to the prompt too,
so the model computes a different function. Every backbone supports `reread=True`.

Retrievers may return r embeddings in addition to the prompt, such as re-read tokens. The second pass then reads the
prompt, these embeddings and the whole segment. All positions of the segment shift by r. Some retrievers need the
hidden states of a whole segment. With such a retriever, a segment that is split over several calls is read again when
it is full.

Rows at the same position in their segments are read together. Rows at different positions are read separately.
Decoding steps are an exception: they use a joint cache.
"""

from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .caches_hmt import side_by_side, split
from .packing_hmt import Chunk, PackedSegments, join_chunks
from .retriever_hmt import long_tensor
from .segments_hmt import Pass, Report, Segments
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


class SinglePass(Segments):
    """The layout of `recall_mode="single_pass"`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.n_prefix = self.retriever.columns  # number of retrieved embeddings, including the prompt
        self.cuts = self.reader.in_two_passes
        if self.cuts and self.lm.checkpoints_layers:
            self.cuts = False
            self.lm.check_hides(self.config.positions_per_segment, extends=False)
        before_recall = 0 if self.cuts else self.n_prefix - 1 + self.k + self.j
        self.hidden_from = None if self.reader.reread else before_recall  # see `Pass.hidden_from`

    def read(self, state: HMTState, packed: PackedSegments, use_cache: bool) -> HMTState:
        """See `Segments.read`."""
        if use_cache and self.is_step(state, packed):
            return self.step(state, packed)
        for together, several in groupby(packed.chunks(), key=self.reads_first_part):
            segments = list(several)
            size = self.segments_per_batch([chunks[0] for chunks in segments])
            for i in range(0, len(segments), size):
                batch: list[list[Chunk]] = segments[i : i + size]
                firsts: list[Any] = [None] * len(batch)
                if together:
                    firsts = self.first_parts(state, [chunks[0] for chunks in batch])
                for chunks, first in zip(batch, firsts):
                    state = self.read_segment(state, chunks, first, use_cache)
        return state

    def reads_first_part(self, chunks: list[Chunk]) -> bool:
        """Return whether each row reads a whole first part in this call. The first segment is not split into parts."""
        chunk = chunks[0]
        return len(chunks) == 1 and chunk.segments[0] > 0 and chunk.read == 0 and chunk.count >= self.j

    def read_segment(self, state: HMTState, chunks: list[Chunk], first: FirstPart | None, use_cache: bool) -> HMTState:
        """Read one segment of each row. Segments may be incomplete."""
        keeps = use_cache and not torch.is_grad_enabled() and all(0 < chunk.count < self.length for chunk in chunks)
        keeps = keeps and self.lm.continues
        self.reports.append([])
        if len(chunks) == 1:
            return self.read_chunk(state, chunks[0], first, keeps)
        parts = [(chunk.rows, self.read_chunk(state.select_rows(chunk.rows), chunk, None, keeps)) for chunk in chunks]
        caches: list[Any] = [(rows, part.kv_cache) for rows, part in parts]
        kv_cache = kv_mask = None
        if all(cache is not None for _, cache in caches):
            kv_cache, kv_mask = side_by_side(caches)
        memory = join_memories([(rows, part.memory) for rows, part in parts])
        return replace(state, memory=memory, kv_cache=kv_cache, kv_mask=kv_mask)

    def is_step(self, state: HMTState, packed: PackedSegments) -> bool:
        """Return whether a call extends the caches of all rows by the same number of tokens, and does not recall."""
        if state.kv_cache is None or torch.is_grad_enabled() or not self.lm.continues:
            return False
        rows = [*zip(packed.segments, packed.opened, packed.lengths)]
        if not all(read > 0 and count < self.length for _, read, count in rows):
            return False
        recalls = any(segment and read < self.j <= count for segment, read, count in rows)
        return not recalls and len({count - read for _, read, count in rows}) == 1

    def step(self, state: HMTState, packed: PackedSegments) -> HMTState:
        """Read the new tokens of all rows in one pass that extends the cache. Rows may be at different positions."""
        chunk, mask = packed.new_tokens(), state.kv_mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(chunk.ids.shape)], 1)
        begins = [read + (self.n_prefix + self.k) * (n > 0) for n, read in zip(packed.segments, packed.opened)]
        device = chunk.ids.device
        positions = long_tensor(begins, device)[:, None] + torch.arange(chunk.count, device=device)
        one = Pass(chunk, self.embed(chunk.ids), range(chunk.count), 0, positions)
        _, kv_cache = self.run_pass(one, state.kv_cache, mask, state.memory)
        self.reports.append([])
        return replace(state, kv_cache=kv_cache, kv_mask=mask)

    # ------------------------------------------------------------------------------------- rows at the same position

    def embed_part(self, chunk: Chunk, start: int, stop: int, ends: bool) -> Tensor:
        """Embed tokens `start` to `stop` - 1. If `ends` is True, append a summary token.

        Sensory tokens have negative indices.
        """
        embeds = self.embed(chunk.ids[:, self.k + start : self.k + stop])
        if ends:
            embeds = torch.cat([embeds, self.memory.summary_token.to(embeds).expand(len(embeds), -1, -1)], 1)
        return embeds

    def build_pass(
        self, chunk: Chunk, embeds: Tensor, start: int, tokens: range, prefix: Tensor | None = None
    ) -> Pass:
        """Build a pass that reads `embeds` after a retrieved `prefix` (B, n, d). `embeds` begins at token `start`."""
        begin = start + (self.n_prefix + self.k) * (chunk.segments[0] > 0)
        positions = torch.arange(begin, begin + embeds.shape[1], device=embeds.device)[None]
        if prefix is None:
            return Pass(chunk, embeds, tokens, -start, positions)
        n = prefix.shape[1]
        positions = torch.cat([torch.arange(n, device=embeds.device)[None], positions], 1)
        return Pass(chunk, torch.cat([prefix, embeds], 1), tokens, n - start, positions, self.hidden_from)

    def first_parts(self, state: HMTState, chunks: list[Chunk]) -> list[FirstPart]:
        """Read the first parts of several segments. One pass reads successive first parts of the same shape."""
        kv_cache, start = state.kv_cache, -self.k if state.kv_cache is None else chunks[0].read
        if kv_cache is None and self.cuts:
            kv_cache = DynamicCache(config=self.lm.model.config)

        firsts = []
        for _, group in groupby(chunks, key=lambda chunk: min(chunk.first, self.j)):
            same = list(group)
            chunk = join_chunks(same)
            one = self.build_pass(
                chunk, self.embed_part(chunk, start, self.j, True), start, range(max(start, 0), self.j)
            )
            hidden, cache = self.run_pass(one, kv_cache, None, state.memory)
            caches: list[Cache | None] = [None] * len(same)
            if cache is not None and self.cuts:
                cache.crop(-1)
                caches = [*split(cache, len(same))]
            queries = hidden[:, -1:].clone().chunk(len(same))  # cloned, because a view would keep all hidden states
            tokens: Any = [None] * len(same)
            if self.retriever.reads_hidden:
                tokens = hidden[:, -start:-1].chunk(len(same))
            firsts += map(FirstPart, queries, caches, tokens)
        return firsts

    def read_chunk(self, state: HMTState, chunk: Chunk, first: FirstPart | None, keeps: bool) -> HMTState:
        """Read a chunk, and return the new state of its rows.

        Args:
            state: state of these rows.
            first: result of the first part. None: the first part has not been read yet.
            keeps: whether the new state contains a cache for a later call.
        """
        count, read, later, full = chunk.count, chunk.read, chunk.segments[0] > 0, chunk.count == self.length
        if count == read:
            return state
        recall, prefix, memory = None, None, None
        unusable = not read or state.kv_mask is not None  # only `step` reads a padded cache
        if unusable or (full and self.retriever.reads_hidden) or torch.is_grad_enabled():
            state = state.without_kv_cache()
        kv_cache, start = state.kv_cache, -self.k * later if state.kv_cache is None else read
        recalls = later and count >= self.j
        if recalls and (kv_cache is None or read < self.j):
            first = first or self.first_parts(state, [chunk])[0]
            kv_cache, start = first.kv_cache, self.j if self.cuts else -self.k
            recall = self.retriever.retrieve(state.memory, first.query, chunk.ids[:, self.k : self.k + self.j])
            prefix = recall.embeds
        if kv_cache is None and keeps:
            kv_cache = DynamicCache(config=self.lm.model.config)
        embeds = self.embed_part(chunk, start, count, full)
        one = self.build_pass(chunk, embeds, start, range(max(start, self.j * recalls, 0), count), prefix)
        hidden, kv_cache = self.run_pass(one._replace(last=full), kv_cache, None, state.memory)
        if full:
            memory = hidden[:, -1:].clone()
            if self.retriever.reads_hidden:
                hidden = hidden[:, -1 - self.length + self.j * later : -1]
                hidden = hidden if first is None or first.hidden is None else torch.cat([first.hidden, hidden], 1)
            state = self.close_segment(state, chunk, memory, hidden)
        if self.output_recall:
            self.reports[-1].append(Report(chunk, recall if read < self.j else None, memory))
        return replace(state, kv_cache=kv_cache if keeps else None, kv_mask=None)


__all__ = ["SinglePass"]
