"""The layout with one pass: `recall_mode="single_pass"`.

The backbone reads each token of a segment once:

    position    0        1 .. k            1+k .. k+j   1+k+j
    first part           sensory tokens    x[:j]        summary token
    second part prompt                                  x[j:], summary token

The hidden state of the first summary token is the recall query. Its key and value are dropped from the cache. Prompt
and second part are read below that cache in one pass, in which a mask lets the prompt see itself alone; the second
part sees the prompt, the sensory tokens and x[:j]. Position ids say that the prompt stands in front; the order of the
cached keys does not matter. Attention that takes no mask (FlashAttention) reads the prompt in a pass of its own, and
its key and value are put in front of the others: the same function. The hidden state of the second summary token is
the memory of the segment, so that query and memory are the same function of a text. Nothing stands between
neighbouring tokens, and what stands in front of them is not random but recalled: an untrained HMT reads as its
backbone reads a window of as many tokens. The first segment of a text has nothing to recall, and is read in one piece.

First parts depend on no recall, so those of several segments go through the backbone together; the rest follows
segment by segment. Where a cache cannot be cut (`Backbone.cuts`), the whole segment is read once more, as [prompt,
sensory tokens, x, summary token], and a mask hides the prompt from the sensory tokens and x[:j]: the same function.
With `reread=True` of the configuration there is no such mask, and x[:j] sees the prompt in this pass. That is another
function, which every backbone computes.

Where retrievers give r more embeddings, such as tokens that are read again, these stand behind the prompt, and all
that follows is r positions later. Once they are retrieved, the whole segment is read behind them, with the prompt
masked as above; without masks, a pass over [embeddings, sensory tokens, x[:j]] gives the keys and values that the
second part sees.

A retriever that reads hidden states gets those of a whole segment: one whose beginning an earlier call has read is
read again when it is full.

Rows that stand at the same place of their segments are read together. Others are read apart, but for steps below
caches that stand side by side.
"""

from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .backbone_hmt import fork, side_by_side, split
from .packing_hmt import Chunk
from .segments_hmt import Pass, PassOutput, SegmentOutput, Segments
from .state_hmt import HMTState, where_rows


class FirstPart(NamedTuple):
    """What the first part of a segment leaves: the query (B, 1, d), logits, and a cache without the summary token.

    For retrievers that read them, `hidden` are the last hidden states of its tokens, (B, j, d).
    """

    query: Tensor
    output: PassOutput
    kv_cache: Cache | None
    hidden: Tensor | None


class SinglePassSegments(Segments):
    """`recall_mode` "single_pass"."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.length = self.config.segment_length
        self.front = self.retriever.columns  # a prompt, and what stands behind it
        reread, positions = self.config.reread, self.config.positions_per_segment
        self.masks = not reread and self.lm.takes_mask(positions)
        self.cuts = not reread and not (self.masks and self.front > 1) and self.lm.cuts(positions)
        if not reread and not self.cuts:
            self.lm.check_mask(positions)
        before_recall = 0 if self.cuts else self.front - 1 + self.k + self.j
        self.hidden_from = before_recall if self.masks else None  # of the columns behind a prompt

    def read(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """See `Segments.read`."""
        passes, segments = [], []
        for together, group in groupby(chunks, key=self.reads_first_part):
            several = list(group)
            size = self.segments_per_batch(state, several) if together else 1
            for i in range(0, len(several), size):
                batch = several[i : i + size]
                firsts = self.first_parts(state, batch) if together else [None]
                for chunk, first in zip(batch, firsts):
                    state, outputs, segment = self.read_chunk(state, chunk, first, use_cache)
                    passes += outputs
                    segments.append(segment)
        return state, passes, segments

    def reads_first_part(self, chunk: Chunk) -> bool:
        """Say whether all rows read the whole first part of their segment in this call."""
        alike = len({(n > 0, *numbers) for n, *numbers in zip(chunk.segments, chunk.counts, chunk.read)}) == 1
        return alike and chunk.segments[0] > 0 and chunk.read[0] == 0 and chunk.counts[0] >= self.j

    # ------------------------------------------------------------------------------------------------ rows of a chunk

    def read_chunk(
        self, state: HMTState, chunk: Chunk, first: FirstPart | None, use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], SegmentOutput]:
        """Read one segment of each row, or its tokens so far."""
        keeps = use_cache and self.lm.continues and not torch.is_grad_enabled()
        keeps = keeps and all(0 < count < self.length for count in chunk.counts)
        if keeps and self.is_step(state, chunk):
            return self.step(state, chunk)
        groups, batch = {}, len(chunk.counts)
        for row, (segment, count, read) in enumerate(zip(chunk.segments, chunk.counts, chunk.read)):
            if count:
                groups.setdefault((segment > 0, count, read), []).append(row)
        if [*map(len, groups.values())] == [batch]:
            return self.read_rows(state, chunk, first, keeps)
        before, passes, recall, memory, caches = state, [], None, None, []
        for rows in groups.values():
            part, row = before.select_rows(rows), rows[0]
            if before.kv_cache is not None and not torch.is_grad_enabled() and chunk.read[row]:
                columns = chunk.read[row]
                if chunk.segments[row]:
                    columns += self.k + self.front * (columns >= self.j)
                part.kv_cache = fork(before.kv_cache, rows, -columns)
            if chunk.counts[row] == chunk.read[row]:  # no new tokens
                caches.append((rows, part.kv_cache))
                continue
            part, outputs, segment = self.read_rows(part, chunk.of_rows(rows), None, keeps)
            caches.append((rows, part.kv_cache))
            chosen = [row in rows for row in range(batch)]
            place = [rows.index(row) if row in rows else 0 for row in range(batch)]  # of each row in its group
            state = part.select_rows(place).where_rows(chosen, state)
            passes += [output.of_rows(chosen, place) for output in outputs]
            if segment.recall is not None:
                recall = segment.recall.of_rows(chosen, place, recall)
            if segment.memory is not None:
                memory = where_rows(chosen, segment.memory[place], memory)
        keeps = keeps and all(cache is not None for _, cache in caches)
        kv_cache, kv_mask = side_by_side(caches) if keeps else (None, None)
        state = replace(state, lengths=before.lengths, kv_cache=kv_cache, kv_mask=kv_mask)
        return state, passes, SegmentOutput(recall, memory)

    def is_step(self, state: HMTState, chunk: Chunk) -> bool:
        """Say whether all rows read equally many new tokens below a cache, and none makes a recall."""
        if state.kv_cache is None or len({n - m for n, m in zip(chunk.counts, chunk.read)}) > 1 or not all(chunk.read):
            return False
        rows = zip(chunk.segments, chunk.read, chunk.counts)
        return not any(segment and read < self.j <= count for segment, read, count in rows)

    def step(self, state: HMTState, chunk: Chunk) -> tuple[HMTState, list[PassOutput], SegmentOutput]:
        """Read new tokens below the caches of the rows, in one pass."""
        embeds, mask = self.embed(chunk.ids.gather(1, chunk.new)), None
        if state.kv_mask is not None:
            mask = torch.cat([state.kv_mask, state.kv_mask.new_ones(embeds.shape[:2])], 1)
        begins = [read + (self.front + self.k) * (n > 0) for n, read in zip(chunk.segments, chunk.read)]
        offset = [-read for read in chunk.read]
        memory = state.memory if self.retriever.mixes else None
        one = Pass(chunk, 1, embeds, chunk.first, chunk.counts, offset, begins, memory)
        outputs, _, kv_cache = self.run_passes([one], mask, state.kv_cache)
        return replace(state, kv_cache=kv_cache, kv_mask=mask), outputs, SegmentOutput()

    # ------------------------------------------------------------------------------------- rows at the same place

    def lay_out(self, state: HMTState, chunk: Chunk, start: int, stop: int, part: int, ends: bool) -> Pass:
        """Lay out the tokens `start` to `stop` - 1, where those before 0 are sensory, and with `ends` a summary token.

        A part 1 computes no logits of a first part, which another pass has computed.
        """
        sensory_ids = chunk.ids[:, :0]
        if start < 0:
            sensory_ids = chunk.before[:, self.length + start :] if chunk.n else state.sensory_ids
        embeds = self.embed(torch.cat([sensory_ids, chunk.ids[:, max(start, 0) : stop]], 1))
        rows, later = len(embeds), chunk.segments[0] > 0
        if ends:
            embeds = torch.cat([embeds, self.memory.summary_token.to(embeds).expand(rows, -1, -1)], 1)
        first = [min(stop, max(self.j * part * later, token)) for token in chunk.first]
        begin = start + (self.front + self.k) * later
        memory = state.memory if self.retriever.mixes else None
        return Pass(chunk, part, embeds, first, [stop] * rows, [-start] * rows, [begin] * rows, memory)

    def new_cache(self) -> Cache:
        """Make an empty cache."""
        return DynamicCache(config=self.lm.model.config)

    def first_parts(self, state: HMTState, chunks: list[Chunk]) -> list[FirstPart]:
        """Read the first parts of segments whose rows are alike, those of one shape together."""
        count, read, start = chunks[0].counts[0], chunks[0].read[0], -self.k
        ends, kv_cache = count >= self.j, None
        if read and state.kv_cache is not None and not torch.is_grad_enabled():
            kv_cache, start = state.kv_cache, read
        elif self.cuts if ends else self.lm.continues and not torch.is_grad_enabled():
            kv_cache = self.new_cache()
        passes = [self.lay_out(state, chunk, start, min(self.j, count), 0, ends) for chunk in chunks]
        firsts = []
        for _, group in groupby(passes, key=lambda one: (one.embeds.shape, one.columns(one.first))):
            alike = list(group)
            outputs, hidden, cache = self.run_passes(alike, None, kv_cache)
            if cache is not None and ends:
                cache = cache if self.cuts else None
                if cache is not None:
                    cache.crop(-1)
            caches = [None] * len(alike) if cache is None else split(cache, len(alike))
            queries = hidden[:, -1:].clone().chunk(len(alike))  # a view would keep all hidden states alive
            tokens = [None] * len(alike)
            if self.retriever.reads_hidden:
                tokens = hidden[:, -start : self.j - start].chunk(len(alike))
            firsts += map(FirstPart, queries, outputs, caches, tokens)
        return firsts

    def again(self, state: HMTState, chunk: Chunk) -> list[Pass]:
        """Lay out the first part of a segment for `below`; [] where no tokens are read again."""
        return [self.lay_out(state, chunk, -self.k, self.j, 1, False)] if self.front > 1 else []

    def below(self, prompt: Tensor, passes: list[Pass], kv_cache: Cache) -> Cache:
        """Make the cache that the second parts of segments continue: a prompt, read alone, in front of the first part.

        Args:
            prompt: prompts and the tokens that are read again, (R, 1 + r, d).
            passes: those of `again`, which are read behind these tokens.
            kv_cache: that of the first parts without these tokens.
        """
        if passes:
            tokens = prompt[:, 1:].chunk(len(passes))
            passes = [one.behind(x) for one, x in zip(passes, tokens)]
            _, _, behind = self.run_passes(passes, None, self.new_cache())
            assert behind is not None
            kv_cache = behind
        positions = torch.zeros(len(prompt), 1, dtype=torch.long, device=prompt.device)
        # a copy: CTRL writes into its embeddings
        _, hidden, _, front = self.run(prompt[:, :1].clone(), None, (), None, self.new_cache(), positions)
        if hidden.requires_grad:  # FSDP gathers the weights of a layer when a gradient of its output arrives
            front.layers[-1].keys = front.layers[-1].keys + 0 * hidden.sum()
        behind_prompt: Any = kv_cache
        for i, layer in enumerate(behind_prompt.layers):
            if layer.get_seq_length():  # layers may share those of another
                front.update(layer.keys, layer.values, i)
        return front

    def read_rows(
        self, state: HMTState, chunk: Chunk, first: FirstPart | None, keeps: bool
    ) -> tuple[HMTState, list[PassOutput], SegmentOutput]:
        """Read one segment of rows that are alike, or its tokens so far.

        Args:
            state, chunk: as in `read`.
            first: the first part, if it has been read.
            keeps: whether a later call continues the cache.
        """
        count, read, later = chunk.counts[0], chunk.read[0], chunk.segments[0] > 0
        full, outputs, recall, memory, hidden = count == self.length, [], None, None, None
        whole = full and self.retriever.reads_hidden
        state = state.without_kv_cache() if whole else state
        kv_cache = state.kv_cache if read and not torch.is_grad_enabled() else None
        if later and (read < self.j or (kv_cache is None and (self.cuts or whole))):
            first = first or self.first_parts(state, [chunk])[0]
            outputs, kv_cache = [first.output], first.kv_cache if count < self.j else None
            if read < self.j <= count:
                prompt, recall = self.recall(state, chunk, first.query)
                state = replace(state, prompt=prompt)
        if not later or count >= self.j:
            prompt = state.prompt if later else None
            start, in_front = -self.k * later, None
            if kv_cache is not None:
                start = read
            elif first is not None and self.cuts:
                start, kv_cache = self.j, first.kv_cache
                if self.masks:
                    in_front = prompt
                elif prompt is not None and kv_cache is not None:
                    kv_cache = self.below(prompt, self.again(state, chunk), kv_cache)
            else:
                in_front, kv_cache = prompt, self.new_cache() if keeps else None
            one = self.lay_out(state, chunk, start, count, 1, full and (self.config.recurrence or not later))
            one = one if in_front is None else one.behind(in_front, self.hidden_from)
            one = one._replace(last=full)
            if one.embeds.shape[1]:
                output, hidden, kv_cache = self.run_passes([one], None, kv_cache)
                outputs, memory = outputs + output, hidden[:, -1:].clone()
        if full:
            memory = memory if self.config.recurrence or not later else self.memory_of(state, chunk)
            assert memory is not None
            if whole:
                assert hidden is not None
                hidden = hidden[:, -1 - self.length + self.j * later : -1]
                if first is not None and first.hidden is not None:
                    hidden = torch.cat([first.hidden, hidden], 1)
            state = self.close_segment(state, chunk, memory, hidden)
        kept = kv_cache if keeps else None
        return replace(state, kv_cache=kept, kv_mask=None), outputs, SegmentOutput(recall, memory if full else None)

    def memory_of(self, state: HMTState, chunk: Chunk) -> Tensor:
        """Make the memory of a full segment, (B, 1, d), in a pass of its own."""
        raise NotImplementedError


__all__ = ["SinglePassSegments"]
