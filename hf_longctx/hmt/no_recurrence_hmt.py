"""Memories that are made without their recall: `recurrence=False`.

    first call     initial, sensory tokens, x[:j], summary token, x[j:], summary token     of all segments together
    second call    below its first k+j+2 columns:  prompt, x[j:]                           of all segments together

The first call gives the queries (at the first summary token), the memories (at the second) and the logits of x[:j].
All prompts are recalled between the calls, and the second call gives the logits of x[j:]. Nothing waits for the
segment before: a text takes two calls whatever its length, in groups of `summary_batch` segments and rows. The cost is
that a memory lacks what its segment recalled: an answer that takes a chain of recalls needs as many readings.

Segments that are not read at once, or whose rows differ, go through `SinglePassSegments`, and their memory is made by
a pass of its own when they close.
"""

from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from transformers import DynamicCache

from .backbone_hmt import can_cut, fork
from .memory_hmt import HMTState
from .packing_hmt import Chunk, Span, align
from .segments_hmt import Pass, PassOutput, SegmentOutput
from .single_pass_hmt import SinglePassSegments, pick_column


class NoRecurrenceSegments(SinglePassSegments):
    """`recall_mode` "single_pass" without recurrence."""

    def read(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """See `Segments.read`."""
        passes, segments = [], []
        size = self.segments_per_batch(state)
        for (complete, _), group in groupby(chunks, key=lambda chunk: (self.complete(chunk), chunk.segments[0] > 0)):
            several = list(group)
            for i in range(0, len(several), size):
                read = self.read_complete if complete else super().read
                state, *outputs = read(state, several[i : i + size], use_cache)
                passes, segments = passes + outputs[0], segments + outputs[1]
        return state, passes, segments

    def complete(self, chunk: Chunk) -> bool:
        """Say whether all rows read their whole segment in this call."""
        return set(chunk.counts) == {self.length} and set(chunk.read) == {0} and self.rows_are_alike(chunk)

    def embeds_without_prompt(self, state: HMTState, sensory_ids: Tensor, chunk: Chunk) -> Tensor:
        """Embed all columns but the prompt, (B, k + L' + 3, d)."""
        split = 2 + sensory_ids.shape[1] + self.j
        parts = (0, split), (split + 1, split + 2 + self.length - self.j)
        return torch.cat([self.embeds(state, sensory_ids, chunk, *part) for part in parts], 1)

    def memory_of(self, state: HMTState, chunk: Chunk, hidden: Tensor, spans: tuple[Span, ...]) -> Tensor:
        """Make the memory of a full segment, (B, 1, d), by a pass of its own."""
        sensory_ids, sensory_mask = self.sensory(state, chunk)
        embeds = self.embeds_without_prompt(state, sensory_ids, chunk)
        present = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        present[:, 1 : 1 + sensory_ids.shape[1]] &= sensory_mask
        here, embeds = align(present, embeds)
        _, hidden, *_ = self.run(embeds)
        return pick_column(hidden, (here.sum(1) - 1).tolist())

    def read_complete(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """Read whole segments of one shape together, in two calls. See `Segments.read`."""
        batch, state = len(state.bank), state.without_kv_cache()
        sensory_ids = [self.sensory(state, chunk)[0] for chunk in chunks]
        sensory = sensory_ids[0].shape[1]
        split = 2 + sensory + self.j
        passes = []
        for chunk, ids in zip(chunks, sensory_ids):
            span, _ = self.spans(chunk, [1 + sensory] * batch, chunk.with_logits)
            passes.append(Pass(chunk, 0, self.embeds_without_prompt(state, ids, chunk), (span,)))
        kv_cache = DynamicCache(config=self.lm.model.config) if self.lm.continues else None
        outputs, hidden, kv_cache = self.run_passes(passes, kv_cache=kv_cache)
        start = split if kv_cache is not None and can_cut(kv_cache) else 0
        stop = self.readable(sensory, self.length)

        segments, passes, rows = [], [], []
        for i, (chunk, ids) in enumerate(zip(chunks, sensory_ids)):
            part = slice(i * batch, (i + 1) * batch)
            query, memory = hidden[part, split - 1 : split].clone(), hidden[part, -1:].clone()
            prompt, recall = self.prompt_for(state, chunk, query if self.config.recall else None)
            segments.append(SegmentOutput(recall, memory))
            spans = self.spans(chunk, [1 + sensory - start] * batch, [max(self.j, a) for a in chunk.with_logits])
            if any(a < b for a, b in zip(*spans[1][:2])):
                embeds = self.embeds(replace(state, prompt=prompt), ids, chunk, start, stop)
                passes.append(Pass(chunk, 1, embeds, spans))
                rows += range(part.start, part.stop)
            state = self.close_segment(state, chunk, memory, [True] * batch)
        if passes:
            visible = self.visible(self.roles(sensory)[:stop], torch.cat([one.embeds for one in passes]))
            below = None
            if kv_cache is not None and start:
                below = fork(kv_cache, torch.tensor(rows, device=hidden.device), split)
            outputs += self.run_passes(passes, None, below, visible)[0]
        return state, outputs, segments


__all__ = ["NoRecurrenceSegments"]
