"""The segments of the paper: a summary pass, and one pass between two prompts.

    summary      summary token, x[:j], summary token     its last hidden state is the query
    segment      prompt, sensory tokens, x, prompt       logits; the hidden states of the second prompt are the memory

Without recall there is the second line alone, and the prompt is the latest memory. Rows of a batch have the same
length, as padding is read where it stands. A segment that a call ends is read in full, and leaves a memory, which is
reported and not kept: so does the official code.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache

from .packing_hmt import Chunk
from .segments_hmt import Pass, PassOutput, SegmentOutput, Segments
from .state_hmt import HMTState


class PaperSegments(Segments):
    """`recall_mode` "paper"."""

    def read(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """See `Segments.read`."""
        passes, segments = [], []
        for chunk, query in zip(chunks, self.recall_queries(state, chunks)):
            state, output, segment = self.read_segment(state, chunk, query, use_cache)
            passes.append(output)
            segments.append(segment)
        return state, passes, segments

    def recall_queries(self, state: HMTState, chunks: list[Chunk]) -> Iterator[Tensor | None]:
        """Yield the recall query of each chunk, (B, 1, d), or None for a chunk that does not recall.

        Summary passes see no memory, so those of several segments go through the backbone together.
        """
        j, queries = self.j, {}
        pending = [chunk.n for chunk in chunks if self.config.recall and chunk.segments[0] and not chunk.read[0]]
        for n in range(len(chunks)):
            if pending[:1] == [n]:
                group = [
                    i
                    for i in pending[: self.segments_per_batch(state, chunks)]
                    if i == n or chunks[i].ids.shape[1] >= j
                ]
                del pending[: len(group)]
                ids = torch.cat([chunks[i].ids[:, :j] for i in group])
                mask = None
                if state.open_mask is not None:
                    mask = torch.cat([chunks[i].mask[:, :j] for i in group])
                queries.update(zip(group, self.summarize(ids, mask).chunk(len(group))))
            yield queries.pop(n, None)

    def summarize(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute H^sum (paper, sec. 3.2): the backbone on [H^T, E(ids), H^T], last position. (R, j) -> (R, 1, d)."""
        tokens = self.embed(ids)
        prompt = self.memory.summary_token.to(tokens).expand(len(ids), -1, -1)
        if mask is not None:
            visible = mask.new_ones(len(ids), 1)
            mask = torch.cat([visible, mask, visible], 1)
        _, hidden, *_ = self.run(torch.cat([prompt, tokens, prompt], 1), mask)
        return hidden[:, -1:].clone()

    def read_segment(
        self, state: HMTState, chunk: Chunk, query: Tensor | None, use_cache: bool
    ) -> tuple[HMTState, PassOutput, SegmentOutput]:
        """Read one segment of each row, or its tokens so far: sections 3.2 and 3.3 of the paper.

        Args:
            state, chunk, use_cache: as in `read`.
            query: of the chunk, (B, 1, d), or None.
        """
        count, read, later, m = chunk.counts[0], chunk.read[0], chunk.segments[0] > 0, self.config.memory_tokens
        recall = memory = None
        if not read and later:
            prompt, recall = self.recall(state, chunk, query)
            state = replace(state, prompt=prompt)
        elif not read:  # a copy: an optimizer step must not change a state
            prompt = self.memory.initial.to(self.embed(chunk.ids[:, :1])).repeat(len(chunk.ids), 1, 1)
            state = replace(state, prompt=prompt)
        assert state.prompt is not None
        full = count == self.config.segment_length
        stays_open = use_cache and not full
        sensory_ids = state.sensory_ids[:, : self.k * later]

        kv_cache = state.kv_cache if read and not torch.is_grad_enabled() else None
        start = read if kv_cache is not None else 0
        tokens, mask = self.embed(chunk.ids[:, start:count]), chunk.mask[:, start:count]
        prompt, visible = state.prompt.to(tokens), mask.new_ones(len(tokens), m)
        embeds, masks = [tokens], [mask]
        if kv_cache is None:
            embeds = [prompt, self.embed(sensory_ids), tokens]
            masks = [visible, mask.new_ones(sensory_ids.shape), mask]
            if self.lm.continues and stays_open and not torch.is_grad_enabled():
                kv_cache = DynamicCache(config=self.lm.model.config)
        elif state.kv_mask is not None:
            masks = [state.kv_mask, mask]
        if not stays_open:
            embeds, masks = [*embeds, prompt], [*masks, visible]
        all_masks = None if state.open_mask is None else torch.cat(masks, 1)
        offset = -start if start else m + sensory_ids.shape[1]
        rows = len(tokens)
        one = Pass(chunk, 1, torch.cat(embeds, 1), chunk.first, chunk.counts, [offset] * rows, last=not stays_open)
        (output,), hidden, kv_cache = self.run_passes([one], all_masks, kv_cache)

        state = state.without_kv_cache()
        if stays_open:
            if kv_cache is not None:
                state = replace(state, kv_cache=kv_cache, kv_mask=all_masks)
        else:
            memory = hidden[:, -m:].clone()  # a view would keep all hidden states alive
        if full:
            assert memory is not None
            state = self.close_segment(state, chunk, memory)
        return state, output, SegmentOutput(recall, memory)


__all__ = ["PaperSegments"]
