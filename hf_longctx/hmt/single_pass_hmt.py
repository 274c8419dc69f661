"""The layout with one pass: `recall_mode="single_pass"`.

The backbone reads each position of a segment once, in this order:

    column     0        1 .. k          1+k .. k+j   1+k+j          2+k+j   3+k+j .. 2+k+L'   3+k+L'
    position   initial  sensory tokens  x[:j]        summary token  prompt  x[j:]             summary token
               query pass: sees no memory                           recall pass, below the keys of the query pass

The summary token is one learned embedding. Its hidden state is the recall query at the end of the query pass, and the
memory of the segment at the end of the recall pass: query and memory are the same function of a text. The prompt is
recalled between the two. The query must not see a memory, or it looks like that memory in place of the segment; hence
the query pass begins with the constant `initial`. Query passes depend on no recall, so those of several segments go
through the backbone together; the recall passes follow one another.

The recall pass sees the prompt, the sensory tokens and x[:j]; `initial` and the first summary token are hidden from
it, and the prompt sees only itself. This takes an attention mask of four dimensions. Backbones that cannot follow one
(`Backbone.takes_masks`) read the same columns under plain causality; `config.recall_mask` keeps which it is. Backbones
that cannot continue a cache, and rows whose borders differ, read the beginning once for its query, and again in the
recall pass.
"""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .backbone_hmt import split
from .memory_hmt import HMTState, where_rows
from .packing_hmt import Chunk, Span, align
from .segments_hmt import Pass, PassOutput, SegmentOutput, Segments


PADDING, TOKEN, HIDDEN, PROMPT, AFTER_RECALL = range(5)  # roles of positions; the prompt is not AFTER_RECALL


class Columns(NamedTuple):
    """Neighbouring columns of the table above.

    known: how many tokens of the segment must be known before each of them is read.
    """

    source: str
    role: int
    known: list[int] | range


class QueryOutput(NamedTuple):
    """The recall query of a segment, (B, 1, d), and what its query pass leaves; None where the tokens are read again.

    output: the logits of the tokens before j.
    kv_cache: below which the recall pass continues.
    """

    query: Tensor
    output: PassOutput | None = None
    kv_cache: Cache | None = None


class Layout(NamedTuple):
    """The input of a recall pass over a segment.

    embeds: (B, n, d).
    spans: the tokens in them.
    roles: of all P positions that the pass sees: (B, P), long, or where all rows are alike a list of P.
    mask: (B, P), or None without padding before a token.
    kv_cache: the cache to continue, or None.
    """

    embeds: Tensor
    spans: tuple[Span, ...]
    roles: Tensor | list[int]
    mask: Tensor | None
    kv_cache: Cache | None


class SinglePassSegments(Segments):
    """`recall_mode` "single_pass"."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.j, self.length = self.config.summary_length, self.config.segment_length
        self.masks = {}  # of rows that are alike

    def read(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """See `Segments.read`."""
        passes, segments = [], []
        for chunk, query in zip(chunks, self.queries(state, chunks)):
            state, output, segment = self.read_segment(state, chunk, query, use_cache)
            segments.append(segment)
            passes += [x for x in (output, query and query.output) if x is not None]
        return state, passes, segments

    def recalls(self, chunk: Chunk) -> list[bool]:
        """Say which rows make the recall of their segment in this call."""
        return [read < self.j <= count for read, count in zip(chunk.read, chunk.counts)]

    def rows_are_alike(self, chunk: Chunk) -> bool:
        """Say whether all rows are at the same place of their segments, so that no row needs padding."""
        return len({(n > 0, *numbers) for n, *numbers in zip(chunk.segments, chunk.counts, chunk.read)}) == 1

    # -------------------------------------------------------------------------------------------------- the columns

    def columns(self, sensory: int) -> list[Columns]:
        """Return the table above, of a segment with so many sensory tokens."""
        # without recurrence the memory is made elsewhere
        end = self.length if self.config.recurrence else self.length + 1
        return [
            Columns("initial", HIDDEN, [0]),
            Columns("tokens", TOKEN, [0] * sensory + [*range(1, self.j + 1)]),
            Columns("summary_token", HIDDEN, [self.j]),
            Columns("prompt", PROMPT, [self.j + 1]),  # it waits for x[j]
            Columns("tokens", AFTER_RECALL, range(self.j + 1, self.length + 1)),
            Columns("summary_token", AFTER_RECALL, [end]),
        ]

    def roles(self, sensory: int) -> list[int]:
        """Return the role of each column."""
        return [columns.role for columns in self.columns(sensory) for _ in columns.known]

    def known(self, sensory: int) -> list[int]:
        """Return how many tokens must be known before each column is read."""
        return [tokens for columns in self.columns(sensory) for tokens in columns.known]

    def readable(self, sensory: int, tokens: int) -> int:
        """Return how many columns can be read when so many tokens are known."""
        return bisect(self.known(sensory), tokens)

    def spans(self, chunk: Chunk, offset: list[int], first: list[int]) -> tuple[Span, Span]:
        """Return the tokens from `first` on of each row, before j and from j on; `offset` is the column of token 0."""
        border = [max(a, min(self.j, count)) for a, count in zip(first, chunk.counts)]
        return Span(first, border, offset), Span(border, chunk.counts, [column + 2 for column in offset])

    def present(self, sensory_mask: Tensor, chunk: Chunk, stop: int) -> Tensor:
        """Say which of the first `stop` columns each row has, (B, stop)."""
        counts = torch.tensor(chunk.counts, device=sensory_mask.device)
        present = torch.tensor(self.known(sensory_mask.shape[1])[:stop], device=counts.device) <= counts[:, None]
        present[:, 1 : 1 + sensory_mask.shape[1]] &= sensory_mask
        return present

    def embeds(self, state: HMTState, sensory_ids: Tensor, chunk: Chunk, start: int, stop: int) -> Tensor:
        """Embed columns `start` to `stop` - 1, (B, stop - start, d)."""
        prompts = {name: self.prompt(getattr(self.memory, name), state.bank) for name in ("initial", "summary_token")}
        if state.prompt is not None:
            prompts["prompt"] = state.prompt
        ids, pieces, token = torch.cat([sensory_ids, chunk.ids], 1), [], 0
        for columns in self.columns(sensory_ids.shape[1]):
            width = len(columns.known)
            first, last = max(start, 0), min(stop, width)
            if columns.source == "tokens":
                token += width
            if first < last:
                if columns.source == "tokens":
                    piece = self.lm.embed(ids[:, token - width : token][:, first:last])
                else:
                    piece = prompts[columns.source].to(state.bank)
                pieces.append(piece)
            start, stop = start - width, stop - width
        return torch.cat(pieces, 1) if pieces else self.lm.embed(ids[:, :0])

    def visible(self, roles: Tensor | list[int], embeds: Tensor) -> Tensor | None:
        """Build the mask of the new positions over all, added to attention scores: (B, 1, n, P), 0 or a minimum.

        Args:
            roles: as in `Layout`.
            embeds: (B, n, d), of the new positions.

        Returns:
            None if plain causality is enough, or the mode goes without masks.
        """
        if not self.config.recall_mask or (isinstance(roles, list) and max(roles) < PROMPT):
            return None
        n, key = embeds.shape[1], None
        if isinstance(roles, list):
            key = (n, len(roles), roles.count(TOKEN))
            roles = torch.tensor(roles, device=embeds.device)[None]
        if key is None or key not in self.masks:
            of_query, of_key = roles[:, -n:, None], roles[:, None]
            place = torch.arange(roles.shape[1], device=roles.device)
            before, here = place < place[-n:, None], place == place[-n:, None]
            seen = torch.where(of_query == AFTER_RECALL, of_key != HIDDEN, of_query != PROMPT) & (of_key != PADDING)
            seen = seen & before | here
            mask = torch.zeros(seen.shape, dtype=embeds.dtype, device=embeds.device)
            self.masks[key] = mask.masked_fill_(~seen, torch.finfo(embeds.dtype).min)[:, None]
        return self.masks[key].expand(len(embeds), -1, -1, -1)

    # -------------------------------------------------------------------------------------------------- query passes

    def queries(self, state: HMTState, chunks: list[Chunk]) -> Iterator[QueryOutput | None]:
        """Yield the `QueryOutput` of each chunk, or None for a chunk in which no row recalls.

        Query passes see no memory, so those of several segments go through the backbone together.
        """
        size, outputs = self.segments_per_batch(state), {}
        pending = [chunk for chunk in chunks if any(self.recalls(chunk))]
        for chunk in chunks:
            if pending and chunk is pending[0]:
                group, pending = pending[:size], pending[size:]
                passes = [self.query_pass(state, one) for one in group]
                for (_, keeps, cache), several in groupby(passes, key=lambda one: (one[0].shape, one[1], one[2])):
                    outputs.update(self.run_query_passes([one[0] for one in several], keeps, cache))
            yield outputs.pop(chunk.n, None)

    def sensory(self, state: HMTState, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the sensory tokens of a segment and which of them each row has, (B, k), both."""
        if not any(chunk.segments):  # a row may have stood beside others that have some
            return state.sensory_ids[:, :0], state.sensory_mask[:, :0]
        if chunk.n == 0:
            return state.sensory_ids, state.sensory_mask
        ids = chunk.before[:, self.length - self.config.sensory_tokens :]
        return ids, torch.ones_like(ids, dtype=torch.bool)

    def query_pass(self, state: HMTState, chunk: Chunk) -> tuple[Pass, bool, Cache | None]:
        """Lay out the query pass of a segment.

        Returns:
            the pass; whether its keys, values and logits are kept, or only the query; the cache that it continues.
        """
        sensory_ids, sensory_mask = self.sensory(state, chunk)
        sensory, kv_cache = sensory_ids.shape[1], self.cached(state, chunk) if chunk.n == 0 else None
        keeps, start, stop = self.lm.continues and self.rows_are_alike(chunk), 0, 2 + sensory + self.j
        if keeps and kv_cache is not None:
            start = self.readable(sensory, chunk.read[0])
        embeds = self.embeds(state, sensory_ids, chunk, start, stop)
        if not self.rows_are_alike(chunk):
            _, embeds = align(self.present(sensory_mask, chunk, stop), embeds)
        offset = [1 + sensory * (segment > 0) - start for segment in chunk.segments]
        span = self.spans(chunk, offset, chunk.with_logits if keeps else chunk.counts)[0]
        return Pass(chunk, 0, embeds, (span,)), keeps, kv_cache if keeps else None

    def run_query_passes(
        self, passes: list[Pass], keeps: bool, kv_cache: Cache | None
    ) -> Iterator[tuple[int, QueryOutput]]:
        """Run query passes of one shape together; yield chunk number and `QueryOutput`."""
        if keeps and kv_cache is None:
            kv_cache = DynamicCache(config=self.lm.model.config)
        outputs, hidden, kv_cache = self.run_passes(passes, kv_cache=kv_cache)
        queries = pick_column(hidden, [column + self.j for one in passes for column in one.spans[0].offset])
        caches = split(kv_cache, len(passes)) if kv_cache is not None else [None] * len(passes)
        for one, query, output, cache in zip(passes, queries.chunk(len(passes)), outputs, caches):
            yield one.chunk.n, QueryOutput(query, output if keeps else None, cache)

    # ------------------------------------------------------------------------------------------------- a whole segment

    def cached(self, state: HMTState, chunk: Chunk) -> Cache | None:
        """Return the cache of the open segments, or None where they are read again.

        That is so after loading a state, with gradients, where the rows get unequal numbers of new tokens, and for
        rows at different places also at a border or a recall of any row.
        """
        new_tokens = {count - read for count, read in zip(chunk.counts, chunk.read)}
        if torch.is_grad_enabled() or len(new_tokens) > 1 or not all(chunk.read):
            return None
        if self.rows_are_alike(chunk):
            return state.kv_cache if state.kv_mask is None else None
        at_recall = any(read <= self.j <= count for read, count in zip(chunk.read, chunk.counts))
        return None if state.kv_mask is None or at_recall else state.kv_cache

    def read_segment(
        self, state: HMTState, chunk: Chunk, query: QueryOutput | None, use_cache: bool
    ) -> tuple[HMTState, PassOutput | None, SegmentOutput]:
        """Read one segment of each row, or its tokens so far. Arguments as in `read`, but for the chunk's `query`."""
        rows, recall = self.recalls(chunk), None
        if query is not None:
            prompt, recall = self.prompt_for(state, chunk, query.query if self.config.recall else None)
            recall = recall and recall.of_rows(rows)
            state = replace(state, prompt=where_rows(rows, prompt, state.prompt))
        full = [count == self.length for count in chunk.counts]
        stays_open = use_cache and not any(full)
        keeps = self.lm.continues and stays_open and all(chunk.ongoing) and not torch.is_grad_enabled()
        layout = self.layout(state, chunk, query and query.kv_cache, keeps)
        output, memory, hidden, kv_cache = None, None, layout.embeds, layout.kv_cache
        if layout.embeds.shape[1]:
            visible = self.visible(layout.roles, layout.embeds)
            recall_pass = Pass(chunk, 1, layout.embeds, layout.spans)
            (output,), hidden, kv_cache = self.run_passes([recall_pass], layout.mask, kv_cache, visible)
        if any(full):
            memory = where_rows(full, self.memory_of(state, chunk, hidden, layout.spans), None)
        kv_mask = layout.roles if keeps and isinstance(layout.roles, Tensor) else None
        state = replace(state, kv_cache=kv_cache if keeps else None, kv_mask=kv_mask)
        if memory is not None:
            state = self.close_segment(state, chunk, memory, full)
        return state, output, SegmentOutput(recall, memory)

    def memory_of(self, state: HMTState, chunk: Chunk, hidden: Tensor, spans: tuple[Span, ...]) -> Tensor:
        """Return the memory of a full segment, (B, 1, d), from the pass that has read it to its end."""
        return pick_column(hidden, [column + self.length for column in spans[-1].offset])

    def layout(self, state: HMTState, chunk: Chunk, below: Cache | None, keeps: bool) -> Layout:
        """Lay out the recall pass of a segment, or its columns so far.

        Args:
            state, chunk: as in `read`.
            below: the cache of the query pass, if this call has run one and kept it.
            keeps: whether a later call continues the cache of this pass.
        """
        sensory_ids, sensory_mask = self.sensory(state, chunk)
        ids, sensory, first = chunk.ids, sensory_ids.shape[1], chunk.with_logits
        kv_cache = self.cached(state, chunk)
        stop = self.readable(sensory, max(chunk.counts))
        roles = self.roles(sensory)[:stop]
        new_cache = DynamicCache(config=self.lm.model.config) if keeps else None
        if self.rows_are_alike(chunk):
            start = 0
            if below is not None:
                start, kv_cache, first = 2 + sensory + self.j, below, [max(a, self.j) for a in first]
            elif kv_cache is not None:
                start = self.readable(sensory, chunk.read[0])
            embeds = self.embeds(state, sensory_ids, chunk, start, stop)
            spans = self.spans(chunk, [1 + sensory - start] * len(ids), first)
            return Layout(embeds, spans, roles, None, new_cache if kv_cache is None else kv_cache)
        if kv_cache is not None:
            embeds = self.lm.embed(ids.gather(1, chunk.new))
            new_roles = torch.where(chunk.new < self.j, TOKEN, AFTER_RECALL)
            if self.length in chunk.counts:
                summary_token = self.prompt(self.memory.summary_token, embeds)
                embeds, new_roles = torch.cat([embeds, summary_token], 1), torch.cat([new_roles, new_roles[:, -1:]], 1)
            assert state.kv_mask is not None
            all_roles = torch.cat([state.kv_mask, new_roles], 1)
            span = Span(first, chunk.counts, [-read for read in chunk.read])
            return Layout(embeds, (span,), all_roles, all_roles != PADDING, kv_cache)
        embeds = self.embeds(state, sensory_ids, chunk, 0, stop)
        all_roles = torch.tensor(roles, device=ids.device).expand(len(ids), -1)
        here, embeds, all_roles = align(self.present(sensory_mask, chunk, stop), embeds, all_roles, left=not keeps)
        before = (embeds.shape[1] - here.sum(1)).tolist() if keeps else [0] * len(ids)
        offset = [n + 1 + sensory * (segment > 0) for n, segment in zip(before, chunk.segments)]
        spans = self.spans(chunk, offset, first)
        return Layout(embeds, spans, all_roles, here if keeps else None, new_cache)


def pick_column(hidden: Tensor, columns: list[int]) -> Tensor:
    """Copy the hidden states (B, 1, d) of one column of each row; a view would keep all of them alive."""
    place = torch.tensor(columns, device=hidden.device).clamp(max=hidden.shape[1] - 1)
    return hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[2]))


__all__ = ["SinglePassSegments"]
