"""The single-pass layout: `recall_mode="single_pass"`.

The backbone reads each token of a segment once:

    position    0        1 .. k            1+k .. k+j   1+k+j
    first part           sensory tokens    x[:j]        summary token
    second part prompt                                  x[j:], summary token

The hidden state of the first summary token is the recall query. Its key and value are then cropped from the cache.
Another pass extends this cache by the prompt and the second part. There, the prompt sees only itself, and the second
part sees the prompt, the sensory tokens and x[:j]. Position ids place the prompt first; the order of the cached keys
does not matter. The hidden state of the second summary token is the memory of the segment, so query and memory are the
same function of a sequence. Adjacent tokens stay adjacent, and the prompt is a recalled hidden state, not random. An
untrained HMT therefore predicts as its backbone does in a window of the same length. The first segment does not
recall, and is read in one pass.

First parts do not depend on recalls, so several segments go through the backbone together; the second parts follow
segment by segment. If the cache cannot be cropped (`Backbone.cuts`), the whole segment is read again as [prompt,
sensory tokens, x, summary token], with a mask that hides the prompt from the sensory tokens and x[:j], which is the
same function. With `reread=True`, this pass has no such mask, and x[:j] sees the prompt. That is a different function,
which every backbone supports.

Retrievers may give r more embeddings, such as re-read tokens. They follow the prompt and shift the rest by r
positions, and the whole segment is read after them. A retriever that reads hidden states gets them for a whole
segment, so a segment that was split over several calls is read again when it is full.

`recurrence=False` makes memories without their recall. The first part is then the whole segment,

    sensory tokens, x[:j], summary token, x[j:], summary token

and its last hidden state is the memory. Segments do not depend on the previous ones, so second parts go through the
backbone together too. A sequence of any length takes two calls, in groups of `summary_batch` segments times rows. A
memory does not contain what its segment recalled, so a chain of n recalls takes n readings.

Rows at the same position of their segments are read together. Other rows are read separately, except for decoding
steps, which use a joint cache.
"""

from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .caches_hmt import side_by_side, split
from .packing_hmt import Chunk
from .segments_hmt import Pass, Report, Segments
from .state_hmt import HMTState, join_memories


class FirstPart(NamedTuple):
    """The result of a first part: query and last hidden state, (B, 1, d), and a cache without the summary tokens.

    hidden: last hidden states of the tokens, (B, j, d), for retrievers that read them; else None.
    """

    query: Tensor
    end: Tensor
    kv_cache: Cache | None
    hidden: Tensor | None


class SinglePass(Segments):
    """The layout of `recall_mode="single_pass"`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.n_prefix = self.retriever.columns  # a prompt, and the embeddings after it
        reread, positions = self.config.reread, self.config.positions_per_segment
        self.cuts = not reread and self.n_prefix == 1 and self.lm.cuts(positions)
        if not reread:
            self.lm.check_hides(positions)
        before_recall = 0 if self.cuts else self.n_prefix - 1 + self.k + self.j
        self.hidden_from = None if reread else before_recall  # number of columns that do not see the prompt
        self.pending: list[tuple[Pass, Cache | None]] = []  # second parts, and the caches that they extend

    def read(self, state: HMTState, chunks: list[Chunk], use_cache: bool) -> HMTState:
        """See `Segments.read`."""
        for together, group in groupby(chunks, key=self.reads_first_part):
            several = list(group)
            size = self.segments_per_batch(several)
            for i in range(0, len(several), size):
                batch = several[i : i + size]
                firsts = self.first_parts(state, batch) if together else [None] * len(batch)
                for chunk, first in zip(batch, firsts):
                    state = self.read_chunk(state, chunk, first, use_cache)
                self.run_pending()
        return state

    def run_pending(self) -> None:
        """Read the pending second parts together; the memories of their segments are already stored."""
        if self.pending:
            passes, parts, kv_cache = [one for one, _ in self.pending], [], None
            for one, cache in self.pending:
                begin = len(parts) and parts[-1][0][-1] + 1
                parts.append(([*range(begin, begin + len(one.embeds))], cache))
            if self.cuts:
                kv_cache, _ = side_by_side(parts)
            self.run_passes(passes, kv_cache)
            self.pending = []

    # ------------------------------------------------------------------------------------------------ rows of a chunk

    def places(self, chunk: Chunk) -> list[tuple]:
        """Return the position of each row in its segment; rows at the same position are read together."""
        rows = zip(chunk.segments, chunk.counts, chunk.read)
        return [(segment > 0, self.cuts_gradient(segment), count, read) for segment, count, read in rows]

    def reads_first_part(self, chunk: Chunk) -> bool:
        """Return whether all rows read the whole first part of their segment in this call."""
        together = len(set(self.places(chunk))) == 1
        return together and chunk.segments[0] > 0 and chunk.read[0] == 0 and chunk.counts[0] >= self.j

    def read_chunk(self, state: HMTState, chunk: Chunk, first: FirstPart | None, use_cache: bool) -> HMTState:
        """Read one segment of each row, or its tokens so far."""
        keeps = use_cache and not torch.is_grad_enabled() and all(0 < count < self.length for count in chunk.counts)
        keeps = keeps and self.lm.continues
        groups: dict[tuple, list[int]] = {}
        for row, place in enumerate(self.places(chunk)):
            groups.setdefault(place, []).append(row)
        if len(groups) == 1:
            return self.read_aligned(state, chunk, first, keeps)
        if keeps and self.is_step(state, chunk):
            return self.step(state, chunk)
        parts = []
        for rows in groups.values():
            part, of_rows = state.select_rows(rows), chunk.of_rows(rows)
            if of_rows.counts[0] > of_rows.read[0]:
                part = self.read_aligned(part, of_rows, None, keeps)
            parts.append((rows, part))
        caches: list[Any] = [(rows, part.kv_cache) for rows, part in parts]
        kv_cache = kv_mask = None
        if all(cache is not None for _, cache in caches):
            kv_cache, kv_mask = side_by_side(caches)
        memory = join_memories([(rows, part.memory) for rows, part in parts])
        return replace(state, memory=memory, kv_cache=kv_cache, kv_mask=kv_mask)

    def is_step(self, state: HMTState, chunk: Chunk) -> bool:
        """Return whether all rows extend a cache by equally many new tokens, without a recall."""
        if state.kv_cache is None or len({n - m for n, m in zip(chunk.counts, chunk.read)}) > 1 or not all(chunk.read):
            return False
        rows = zip(chunk.segments, chunk.read, chunk.counts)
        return not any(segment and read < self.j <= count for segment, read, count in rows)

    def step(self, state: HMTState, chunk: Chunk) -> HMTState:
        """Extend a joint cache of rows at different positions by new tokens, in one pass."""
        begins = [read + (self.n_prefix + self.k) * (n > 0) for n, read in zip(chunk.segments, chunk.read)]
        chunk, mask = chunk.of_new_tokens(self.k), state.kv_mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(chunk.ids.shape)], 1)
        one = Pass(chunk, 1, self.embed(chunk.ids), range(chunk.ids.shape[1]), 0, begins)
        _, kv_cache = self.run_passes([one], state.kv_cache, mask, state.memory)
        return replace(state, kv_cache=kv_cache, kv_mask=mask)

    # ------------------------------------------------------------------------------------- rows at the same place

    def build_pass(self, chunk: Chunk, start: int, stop: int, part: int, ends: bool) -> Pass:
        """Embed the tokens `start` to `stop` - 1 (negative: sensory tokens), and a summary token if `ends`."""
        embeds, later = self.embed(chunk.ids[:, self.k + start : self.k + stop]), chunk.segments[0] > 0
        rows = len(embeds)
        if ends:
            embeds = torch.cat([embeds, self.memory.summary_token.to(embeds).expand(rows, -1, -1)], 1)
        begin, tokens = start + (self.n_prefix + self.k) * later, range(max(start, self.j * part * later), stop)
        return Pass(chunk, part, embeds, tokens, -start, [begin] * rows)

    def new_cache(self) -> Cache:
        """Return an empty cache."""
        return DynamicCache(config=self.lm.model.config)

    def first_parts(self, state: HMTState, chunks: list[Chunk]) -> list[FirstPart]:
        """Read the first parts of segments whose rows are at the same position; parts of one shape share a pass."""
        count, start = chunks[0].counts[0], -self.k
        ends, kv_cache = count >= self.j, None
        if state.kv_cache is not None:
            kv_cache, start = state.kv_cache, chunks[0].read[0]
        elif self.cuts if ends else not torch.is_grad_enabled() and self.lm.continues:
            kv_cache = self.new_cache()
        passes, firsts = [], []
        for chunk in chunks:
            one = self.build_pass(chunk, start, min(self.j, count), 0, ends)
            if chunk.counts[0] == self.length and not self.config.recurrence:
                rest = self.build_pass(chunk, self.j, self.length, 1, True)
                one = one._replace(embeds=torch.cat([one.embeds, rest.embeds], 1))
            passes.append(one)
        for _, group in groupby(passes, key=lambda one: (one.embeds.shape, one.from_token(one.chunk.first))):
            same = list(group)
            hidden, cache = self.run_passes(same, kv_cache, None, state.memory)
            caches: list[Cache | None] = [None] * len(same)
            if cache is not None and ends and self.cuts:
                cache.crop(self.k + self.j - cache.get_seq_length())
                caches = [*split(cache, len(same))]
            elif cache is not None and not ends:
                caches = [cache]
            query = self.j - start if ends else -1
            copies = (hidden[:, i].clone()[:, None].chunk(len(same)) for i in (query, -1))  # views would retain all
            tokens: Any = [None] * len(same)
            if self.retriever.reads_hidden:
                tokens = hidden[:, -start : self.j - start].chunk(len(same))
            firsts += map(FirstPart, *copies, caches, tokens)
        return firsts

    def read_aligned(self, state: HMTState, chunk: Chunk, first: FirstPart | None, keeps: bool) -> HMTState:
        """Read one segment, or its tokens so far, of rows that are at the same position in it.

        Args:
            state, chunk: as in `read`.
            first: the first part, if it has been read.
            keeps: whether to retain the cache for a later call.
        """
        count, read, later = chunk.counts[0], chunk.read[0], chunk.segments[0] > 0
        full, recall, memory, hidden = count == self.length, None, None, None
        made_before = later and not self.config.recurrence
        again = full and (self.retriever.reads_hidden or made_before)
        if again or not read or torch.is_grad_enabled():
            state = state.without_kv_cache()
        kv_cache, start, prefix = state.kv_cache, read if state.kv_cache is not None else -self.k * later, None
        if later and (kv_cache is None or read < self.j):
            first = first or self.first_parts(state, [chunk])[0]
            kv_cache, start = first.kv_cache, self.j if self.cuts else -self.k
            if count >= self.j:
                recall = self.recall(state, chunk, first.query)
                prefix = recall.embeds
        if not later or count >= self.j:
            kv_cache = self.new_cache() if kv_cache is None and keeps else kv_cache
            one = self.build_pass(chunk, start, count, 1, full and not made_before)
            one = one if prefix is None else one.with_prefix(prefix, self.hidden_from)
            one = one._replace(last=full)
            if full and made_before:
                assert first is not None
                memory, hidden = first.end, None
                if one.from_token(chunk.first):
                    self.pending.append((one, kv_cache))
            else:
                hidden, kv_cache = self.run_passes([one], kv_cache, None, state.memory)
                memory = hidden[:, -1:].clone()
        if full:
            assert memory is not None
            if self.retriever.reads_hidden and hidden is not None:
                hidden = hidden[:, -1 - self.length + self.j * later : -1]
                hidden = hidden if first is None or first.hidden is None else torch.cat([first.hidden, hidden], 1)
            state = self.close_segment(state, chunk, memory, hidden)
        if self.output_recall:
            recalled = recall if read < self.j else None
            self.reports.append(Report(chunk.n, chunk.rows, recalled, memory if full else None))
        return replace(state, kv_cache=kv_cache if keeps else None, kv_mask=None)


__all__ = ["SinglePass"]
