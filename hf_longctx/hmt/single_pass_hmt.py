"""The layout with one pass: `recall_mode="single_pass"`.

The backbone reads each position of a segment once, in this order:

    column     0        1 .. k          1+k .. k+j   1+k+j   2+k+j   3+k+j .. 2+k+L'   3+k+L'
    position   initial  sensory tokens  x[:j]        close   prompt  x[j:]             close
               first part: sees no memory                    second part, below the keys and values of the first

`close` is one learned embedding. Its hidden state is the recall query at the end of the first part, and the memory of
the segment at the end of the second: query and memory are the same function of a text. The prompt is recalled between
the two. The query must not see a memory, or it looks like that memory in place of the segment; hence the first part
begins with the constant `initial`. First parts depend on no recall, so those of several segments go through the
backbone together; the second parts follow one another.

The second part sees the prompt, the sensory tokens and x[:j]; `initial` and the first `close` are hidden from it, and
the prompt sees only itself. This takes an attention mask of four dimensions. Backbones that cannot follow one
(`Backbone.takes_masks`) read the same columns under plain causality; `config.recall_mask` keeps which it is. Backbones
that cannot continue a cache, and rows whose borders differ, read the first part once for its query, and again before
the second part.
"""

from bisect import bisect
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from transformers import DynamicCache

from .backbone_hmt import split
from .memory_hmt import where_rows
from .packing_hmt import Span, align
from .segments_hmt import Pass, Reading, Segments


PADDING, TOKEN, HIDDEN, PROMPT, AFTER_RECALL = range(
    5
)  # roles of positions; AFTER_RECALL is the second part without its prompt


class FirstPart(NamedTuple):
    """What was read of a segment before its recall.

    query: (B, 1, d).
    reading: of the tokens before j; None if they are read again.
    kv_cache: of the first part; None if it is read again.
    """

    query: torch.Tensor
    reading: Reading | None = None
    kv_cache: object = None


class SinglePassSegments(Segments):
    """`recall_mode` "single_pass"."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.j, self.length = self.config.summary_length, self.config.segment_length
        self.masks = {}  # of rows that are alike

    def read(self, state, chunks, use_cache):
        """As `MultiPassSegments.read`."""
        late, early = [], []
        for chunk, first in zip(chunks, self.first_parts(state, chunks)):
            state, reading = self.read_segment(state, chunk, first, use_cache)
            late.append(reading)
            if first is not None and first.reading is not None:
                early.append(first.reading)
        return state, late, early

    def recalls(self, chunk):
        """Which rows make the recall of their segment in this call."""
        return [read < self.j <= count for read, count in zip(chunk.read, chunk.counts)]

    def alike(self, chunk):
        """Whether all rows are at the same place of their segments, so that no row needs padding."""
        return len({(n > 0, *numbers) for n, *numbers in zip(chunk.segments, chunk.counts, chunk.read)}) == 1

    # -------------------------------------------------------------------------------------------------- the columns

    def roles(self, sensory):
        """The role of each column of a segment with so many sensory tokens."""
        return [HIDDEN, *[TOKEN] * (sensory + self.j), HIDDEN, PROMPT, *[AFTER_RECALL] * (self.length - self.j + 1)]

    def needs(self, sensory):
        """How many tokens of the segment must be known before each column is read. The prompt waits for x[j]."""
        first, second = range(1, self.j + 1), range(self.j + 1, self.length + 1)
        close = self.length if self.config.recurrence else self.length + 1  # then the memory is made elsewhere
        return [*[0] * (1 + sensory), *first, self.j, self.j + 1, *second, close]

    def readable(self, sensory, tokens):
        """How many columns can be read when so many tokens are known."""
        return bisect(self.needs(sensory), tokens)

    def spans(self, chunk, starts, first):
        """The tokens from `first` on of each row, before j and from j on; `starts` are the columns of token 0."""
        border = [max(a, min(self.j, count)) for a, count in zip(first, chunk.counts)]
        return Span(first, border, starts), Span(border, chunk.counts, [start + 2 for start in starts])

    def present(self, sensory_mask, chunk, stop):
        """Which of the first `stop` columns each row has, (B, stop)."""
        counts = torch.tensor(chunk.counts, device=sensory_mask.device)
        present = torch.tensor(self.needs(sensory_mask.shape[1])[:stop], device=counts.device) <= counts[:, None]
        present[:, 1 : 1 + sensory_mask.shape[1]] &= sensory_mask
        return present

    def embeds(self, state, sensory_ids, chunk, start, stop):
        """Embeddings of columns `start` to `stop` - 1, (B, stop - start, d)."""
        ids, split = torch.cat([sensory_ids, chunk.ids], 1), sensory_ids.shape[1] + self.j
        initial, close = (self.prompt(x, state.bank) for x in (self.memory.initial, self.memory.summary_token))
        parts = (initial, 1), (ids[:, :split], split), (close, 1), (state.prompt, 1)
        parts += (ids[:, split:], self.length - self.j), (close, 1)
        pieces = []
        for part, width in parts:
            if max(start, 0) < min(stop, width):
                cut = part[:, max(start, 0) : min(stop, width)]
                pieces.append(self.lm.embed(cut) if cut.dim() == 2 else cut.to(state.bank))
            start, stop = start - width, stop - width
        return torch.cat(pieces, 1) if pieces else self.lm.embed(ids[:, :0])

    def visible(self, roles, embeds):
        """The mask of the new positions over all, added to attention scores: (B, 1, n, P), 0 or a minimum.

        Args:
            roles: of all positions: (B, P), long, or where all rows are alike a list of P.
            embeds: (B, n, d), of the new positions.

        Returns:
            None if plain causality is enough, or the mode goes without masks.
        """
        if not self.config.recall_mask or (isinstance(roles, list) and max(roles) < PROMPT):
            return None
        n, key = embeds.shape[1], None
        if isinstance(roles, list):
            key = (n, len(roles), roles.count(TOKEN))
            roles = None if key in self.masks else torch.tensor(roles, device=embeds.device)[None]
        if key is None or key not in self.masks:
            of_query, of_key = roles[:, -n:, None], roles[:, None]
            place = torch.arange(roles.shape[1], device=roles.device)
            before, here = place < place[-n:, None], place == place[-n:, None]
            seen = torch.where(of_query == AFTER_RECALL, of_key != HIDDEN, of_query != PROMPT) & (of_key != PADDING)
            seen = seen & before | here
            mask = torch.zeros(seen.shape, dtype=embeds.dtype, device=embeds.device)
            self.masks[key] = mask.masked_fill_(~seen, torch.finfo(embeds.dtype).min)[:, None]
        return self.masks[key].expand(len(embeds), -1, -1, -1)

    # -------------------------------------------------------------------------------------------------- first parts

    def first_parts(self, state, chunks):
        """Yield the `FirstPart` of each chunk, or None for a chunk in which no row recalls.

        First parts see no memory, so those of several segments go through the backbone together.
        """
        size, parts = self.at_once(state), {}
        pending = [chunk for chunk in chunks if any(self.recalls(chunk))]
        for chunk in chunks:
            if chunk is (pending or [None])[0]:
                group, pending = pending[:size], pending[size:]
                passes = [self.first_pass(state, one) for one in group]
                for (_, *cache), several in groupby(passes, key=lambda one: (one[0].shape, *one[1:])):
                    parts.update(self.read_first([one[0] for one in several], *cache))
            yield parts.pop(chunk.n, None)

    def sensory(self, state, chunk):
        """Its sensory tokens and which of them each row has, (B, k), both."""
        if not any(chunk.segments):  # a row may have stood beside others that have some
            return state.sensory_ids[:, :0], state.sensory_mask[:, :0]
        if chunk.n == 0:
            return state.sensory_ids, state.sensory_mask
        ids = chunk.before[:, self.length - self.config.sensory_tokens :]
        return ids, torch.ones_like(ids, dtype=torch.bool)

    def first_pass(self, state, chunk):
        """The `Pass` over the first part of a segment, whether its keys and values are kept, and those it continues.

        If they are not kept, only the query is needed.
        """
        sensory_ids, sensory_mask = self.sensory(state, chunk)
        sensory, kv_cache = sensory_ids.shape[1], self.cached(state, chunk) if chunk.n == 0 else None
        keeps, start, stop = self.lm.continues and self.alike(chunk), 0, 2 + sensory_ids.shape[1] + self.j
        if keeps and kv_cache is not None:
            start = self.readable(sensory, chunk.read[0])
        embeds = self.embeds(state, sensory_ids, chunk, start, stop)
        if not self.alike(chunk):
            _, embeds = align(self.present(sensory_mask, chunk, stop), embeds)
        starts = [1 + sensory * (segment > 0) - start for segment in chunk.segments]
        span = self.spans(chunk, starts, chunk.with_logits if keeps else chunk.counts)[0]
        return Pass(chunk, embeds, (span,)), keeps, kv_cache if keeps else None

    def read_first(self, passes, keeps, kv_cache):
        """Read first parts of one shape together; yield chunk number and `FirstPart`."""
        if keeps and kv_cache is None:
            kv_cache = DynamicCache(config=self.lm.model.config)
        readings, hidden, kv_cache = self.run_passes(passes, kv_cache=kv_cache)
        columns = [start + self.j for one in passes for start in one.spans[0].starts]
        queries = pick_column(hidden, columns).chunk(len(passes))
        caches = split(kv_cache, len(passes)) if keeps else [None] * len(passes)
        for one, query, reading, cache in zip(passes, queries, readings, caches):
            yield one.chunk.n, FirstPart(query, reading if keeps else None, cache)

    # ------------------------------------------------------------------------------------------------- a whole segment

    def cached(self, state, chunk):
        """The cache of the open segments, or None where they are read again.

        That is so after loading a state, with gradients, where the rows get unequal numbers of new tokens, and for
        rows at different places also at a border or a recall of any row.
        """
        new_tokens = {count - read for count, read in zip(chunk.counts, chunk.read)}
        if torch.is_grad_enabled() or len(new_tokens) > 1 or not all(chunk.read):
            return None
        if self.alike(chunk):
            return state.kv_cache if state.kv_mask is None else None
        at_recall = any(read <= self.j <= count for read, count in zip(chunk.read, chunk.counts))
        return None if state.kv_mask is None or at_recall else state.kv_cache

    def read_segment(self, state, chunk, first, use_cache):
        """Read one segment of each row, or its tokens so far.

        Args:
            state: before this segment.
            chunk: the segment's tokens so far.
            first: its `FirstPart`, or None.
            use_cache: whether a later call continues a segment that stays open.

        Returns:
            the state after it; the `Reading`.
        """
        rows, recall = self.recalls(chunk), None
        if any(rows):
            prompt, recall = self.prompt_for(state, chunk, first.query if self.config.recall else None)
            recall = recall and recall.of_rows(rows)
            state = replace(state, prompt=where_rows(rows, prompt, state.prompt))
        full = [count == self.length for count in chunk.counts]
        stays_open = use_cache and not any(full)
        keeps = self.lm.continues and stays_open and all(chunk.ongoing) and not torch.is_grad_enabled()
        embeds, spans, roles, mask, kv_cache = self.layout(state, chunk, first, keeps)
        reading, memory, hidden = Reading(chunk.n, []), None, None
        if embeds.shape[1]:
            visible = self.visible(roles, embeds)
            (reading,), hidden, kv_cache = self.run_passes([Pass(chunk, embeds, spans)], mask, kv_cache, visible)
        if any(full):
            memory = where_rows(full, self.memory_of(state, chunk, hidden, spans), None)
        state = replace(
            state,
            kv_cache=kv_cache if keeps else None,
            kv_mask=roles if keeps and mask is not None else None,
        )
        if any(full):
            state = self.close(state, chunk, memory, full)
        return state, reading._replace(recall=recall, memory=memory)

    def memory_of(self, state, chunk, hidden, spans):
        """The memory of a full segment, (B, 1, d), of the pass that has read it to its end."""
        return pick_column(hidden, [start + self.length for start in spans[-1].starts])

    def layout(self, state, chunk, first, keeps):
        """What is to be read of a segment.

        Returns:
            embeddings (B, n, d); spans of the tokens in them; roles of all P positions that the pass sees, as for
            `visible`; mask (B, P), or None if there is no padding before a token; the cache to continue, or None.
        """
        sensory_ids, sensory_mask = self.sensory(state, chunk)
        ids, sensory, first_returned = chunk.ids, sensory_ids.shape[1], chunk.with_logits
        kv_cache = self.cached(state, chunk)
        stop = self.readable(sensory, max(chunk.counts))
        roles = self.roles(sensory)[:stop]
        new_cache = DynamicCache(config=self.lm.model.config) if keeps else None
        if self.alike(chunk):
            start = 0
            if first is not None and first.kv_cache is not None:
                start, kv_cache = 2 + sensory + self.j, first.kv_cache
                first_returned = [max(a, self.j) for a in first_returned]
            elif kv_cache is not None:
                start = self.readable(sensory, chunk.read[0])
            embeds = self.embeds(state, sensory_ids, chunk, start, stop)
            spans = self.spans(chunk, [1 + sensory - start] * len(ids), first_returned)
            return embeds, spans, roles, None, new_cache if kv_cache is None else kv_cache
        if kv_cache is not None:
            embeds, new_roles = (
                self.lm.embed(ids.gather(1, chunk.new)),
                torch.where(chunk.new < self.j, TOKEN, AFTER_RECALL),
            )
            if self.length in chunk.counts:
                close = self.prompt(self.memory.summary_token, embeds)
                embeds, new_roles = torch.cat([embeds, close], 1), torch.cat([new_roles, new_roles[:, -1:]], 1)
            roles = torch.cat([state.kv_mask, new_roles], 1)
            span = Span(first_returned, chunk.counts, [-read for read in chunk.read])
            return embeds, (span,), roles, roles != PADDING, kv_cache
        present = self.present(sensory_mask, chunk, stop)
        embeds = self.embeds(state, sensory_ids, chunk, 0, stop)
        roles = torch.tensor(roles, device=ids.device).expand(len(ids), -1)
        here, embeds, roles = align(present, embeds, roles, left=not keeps)
        before = (embeds.shape[1] - here.sum(1)).tolist() if keeps else [0] * len(ids)
        starts = [n + 1 + sensory * (segment > 0) for n, segment in zip(before, chunk.segments)]
        return embeds, self.spans(chunk, starts, first_returned), roles, here if keeps else None, new_cache


def pick_column(hidden, columns):
    """The hidden states (B, 1, d) of one column of each row; a copy, because a view would keep all of them alive."""
    place = torch.tensor(columns, device=hidden.device).clamp(max=hidden.shape[1] - 1)
    return hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[2]))


__all__ = ["SinglePassSegments"]
