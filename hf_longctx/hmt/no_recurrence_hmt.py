"""Memories that are made without their recall: `recurrence=False`.

    first call     sensory tokens, x[:j], summary token, x[j:], summary token     of all segments together
    second call    prompt, x[j:]                                                  of all segments together

The first call gives the queries (at the first summary token), the memories (at the second) and the logits of x[:j].
The summary token between x[:j] and x[j:] is seen by x[j:] in this call alone. All prompts are recalled behind it, and
the second call gives the logits of x[j:], which see the prompt, the sensory tokens and x[:j]. Nothing waits for the
segment before: a text takes two calls whatever its length, in groups of `summary_batch` segments and rows. The cost is
that a memory lacks what its segment recalled: an answer that takes a chain of recalls needs as many readings.

Segments that are not read at once, or whose rows differ, go through `SinglePassSegments`, and their memory is made by
a pass of its own when they close.
"""

from itertools import groupby

import torch
from torch import Tensor

from .backbone_hmt import fork
from .packing_hmt import Chunk
from .segments_hmt import Pass, PassOutput, SegmentOutput
from .single_pass_hmt import SinglePassSegments
from .state_hmt import HMTState


class NoRecurrenceSegments(SinglePassSegments):
    """`recall_mode` "single_pass" without recurrence."""

    def read(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """See `Segments.read`."""
        passes, segments = [], []
        size = self.segments_per_batch(state, chunks)
        for together, group in groupby(chunks, key=self.is_complete):
            several = list(group)
            for i in range(0, len(several), size):
                read = self.read_complete if together else super().read
                state, *outputs = read(state, several[i : i + size], use_cache)
                passes, segments = passes + outputs[0], segments + outputs[1]
        return state, passes, segments

    def is_complete(self, chunk: Chunk) -> bool:
        """Say whether all rows read their whole segment in this call, and it is not the first of a text."""
        return self.reads_first_part(chunk) and chunk.counts[0] == self.length

    def memory_pass(self, state: HMTState, chunk: Chunk) -> Pass:
        """Lay out the columns of the first call."""
        first = self.lay_out(state, chunk, -self.k, self.j, 0, True)
        second = self.lay_out(state, chunk, self.j, self.length, 1, True)
        return first._replace(embeds=torch.cat([first.embeds, second.embeds], 1))

    def memory_of(self, state: HMTState, chunk: Chunk) -> Tensor:
        """Make the memory of a full segment, (B, 1, d), in a pass of its own."""
        _, hidden, _ = self.run_passes([self.memory_pass(state, chunk)._replace(stop=[0] * len(chunk.counts))])
        return hidden[:, -1:].clone()

    def read_complete(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """Read whole segments together, in two calls. See `Segments.read`."""
        batch, split = len(state.lengths), self.k + self.j
        passes = [self.memory_pass(state, chunk) for chunk in chunks]
        outputs, hidden, kv_cache = self.run_passes(passes, None, self.new_cache() if self.cuts else None)
        queries, memories = (hidden[:, i].clone()[:, None].chunk(len(chunks)) for i in (split, -1))
        passes, again, segments, prompts, rows = [], [], [], [], []
        for i, (chunk, query, memory) in enumerate(zip(chunks, queries, memories)):
            prompt, recall = self.recall(state, chunk, query)
            segments.append(SegmentOutput(recall, memory))
            if any(token < self.length for token in chunk.first):
                one = self.lay_out(state, chunk, self.j if self.cuts else -self.k, self.length, 1, False)
                one = one._replace(last=True)
                passes.append(one if self.cuts and not self.masks else one.behind(prompt, self.hidden_from))
                again += self.again(state, chunk)
                prompts.append(prompt)
                rows += range(i * batch, (i + 1) * batch)
            state = self.close_segment(state.without_kv_cache(), chunk, memory)
        if passes:
            below = kv_cache and fork(kv_cache, rows, split)
            if below is not None and not self.masks:
                below = self.below(torch.cat(prompts), again, below)
            outputs += self.run_passes(passes, None, below)[0]
        return state, outputs, segments


__all__ = ["NoRecurrenceSegments"]
