"""Memories that are made without their recall: `recurrence=False`.

    first call     initial, sensory tokens, x[:j], close, x[j:], close     of all segments together
    second call    below its first k+j+2 columns:  prompt, x[j:]           of all segments together

The first call gives the queries (at the first `close`), the memories (at the second) and the logits of x[:j]. All
prompts are recalled between the calls, and the second call gives the logits of x[j:]. Nothing waits for the segment
before: a text takes two calls whatever its length, in groups of `summary_batch` segments and rows. What is lost is
that a memory contains what its segment recalled: an answer that takes a chain of recalls needs as many readings.

Segments that are not read at once, or whose rows differ, go through `SinglePassSegments`, and their memory is made by
a pass of its own when they close.
"""

from dataclasses import replace
from itertools import groupby

import torch
from transformers import DynamicCache

from .backbone_hmt import can_cut, fork
from .packing_hmt import align
from .segments_hmt import Pass, Reading
from .single_pass_hmt import SinglePassSegments, pick_column


class NoRecurrenceSegments(SinglePassSegments):
    """`recall_mode` "single_pass" without recurrence."""

    def read(self, state, chunks, use_cache):
        """As `MultiPassSegments.read`."""
        late, early = [], []
        size = self.at_once(state)
        for (whole, _), several in groupby(chunks, key=lambda chunk: (self.whole(chunk), chunk.segments[0] > 0)):
            several = list(several)
            for i in range(0, len(several), size):
                read = self.read_whole if whole else super().read
                state, *readings = read(state, several[i : i + size], use_cache)
                late, early = late + readings[0], early + readings[1]
        return state, late, early

    def whole(self, chunk):
        """Whether all rows read their whole segment in this call."""
        return set(chunk.counts) == {self.length} and set(chunk.read) == {0} and self.alike(chunk)

    def embeds_without_prompt(self, state, sensory_ids, chunk):
        split = 2 + sensory_ids.shape[1] + self.j
        parts = (0, split), (split + 1, split + 2 + self.length - self.j)
        return torch.cat([self.embeds(state, sensory_ids, chunk, *part) for part in parts], 1)

    def memory_of(self, state, chunk, hidden, spans):
        """As in `SinglePassSegments`, of a pass of its own."""
        sensory_ids, sensory_mask = self.sensory(state, chunk)
        embeds = self.embeds_without_prompt(state, sensory_ids, chunk)
        present = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        present[:, 1 : 1 + sensory_ids.shape[1]] &= sensory_mask
        here, embeds = align(present, embeds)
        _, hidden, *_ = self.run(embeds)
        return pick_column(hidden, (here.sum(1) - 1).tolist())

    def read_whole(self, state, chunks, use_cache):
        """Read whole segments of one shape together, in two calls."""
        batch, state = len(state.bank), state.without_kv_cache()
        sensory_ids = [self.sensory(state, chunk)[0] for chunk in chunks]
        sensory = sensory_ids[0].shape[1]
        split = 2 + sensory + self.j
        passes = []
        for chunk, ids in zip(chunks, sensory_ids):
            span, _ = self.spans(chunk, [1 + sensory] * batch, chunk.with_logits)
            passes.append(Pass(chunk, self.embeds_without_prompt(state, ids, chunk), (span,)))
        kv_cache = DynamicCache(config=self.lm.model.config) if self.lm.continues else None
        early, hidden, kv_cache = self.run_passes(passes, kv_cache=kv_cache)
        start = split if kv_cache is not None and can_cut(kv_cache) else 0
        stop = self.readable(sensory, self.length)

        late, passes, rows = [], [], []
        for i, (chunk, ids) in enumerate(zip(chunks, sensory_ids)):
            part = slice(i * batch, (i + 1) * batch)
            query, memory = hidden[part, split - 1 : split].clone(), hidden[part, -1:].clone()
            prompt, recall = self.prompt_for(state, chunk, query if self.config.recall else None)
            late.append(Reading(chunk.n, [], recall=recall, memory=memory))
            spans = self.spans(chunk, [1 + sensory - start] * batch, [max(self.j, a) for a in chunk.with_logits])
            if any(a < b for a, b in zip(*spans[1][:2])):
                embeds = self.embeds(replace(state, prompt=prompt), ids, chunk, start, stop)
                passes.append((i, Pass(chunk, embeds, spans)))
                rows += range(part.start, part.stop)
            state = self.close(state, chunk, memory, [True] * batch)
        if passes:
            visible = self.visible(self.roles(sensory)[:stop], torch.cat([one.embeds for _, one in passes]))
            below = fork(kv_cache, torch.tensor(rows, device=hidden.device), split) if start else None
            readings, *_ = self.run_passes([one for _, one in passes], None, below, visible)
            for (i, _), reading in zip(passes, readings):
                late[i] = reading._replace(recall=late[i].recall, memory=late[i].memory)
        return state, late, early


__all__ = ["NoRecurrenceSegments"]
