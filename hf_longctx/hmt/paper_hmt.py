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

import torch
from torch import Tensor
from torch.nn import functional as F

from .packing_hmt import Chunk, PackedSegments, join_chunks
from .segments_hmt import Pass, Report, Segments
from .state_hmt import HMTState


class Paper(Segments):
    """The layout of `recall_mode="paper"`."""

    def read(self, state: HMTState, packed: PackedSegments, use_cache: bool) -> HMTState:
        """See `Segments.read`."""
        chunks = [chunk for (chunk,) in packed.chunks()]
        queries = self.recall_queries(chunks)
        for chunk in chunks:
            state = self.read_segment(state, chunk, queries.get(chunk.segments[0]), use_cache)
        return state

    def recall_queries(self, chunks: list[Chunk]) -> dict[int, Tensor]:
        """Return the recall queries (B, 1, d) of the chunks that recall, keyed by segment index.

        Summary passes do not depend on memories, so several segments share one pass of the backbone.
        """
        recalling, queries = [chunk for chunk in chunks if self.config.recall and chunk.segments[0]], {}
        size = self.segments_per_batch(chunks)
        for _, group in groupby(recalling, key=lambda chunk: min(chunk.count, self.j)):
            same = list(group)
            for i in range(0, len(same), size):
                batch = same[i : i + size]
                found = self.summarize(join_chunks(batch)).chunk(len(batch))
                queries |= {chunk.segments[0]: query for chunk, query in zip(batch, found)}
        return queries

    def summarize(self, chunk: Chunk) -> Tensor:
        """Compute H^sum (paper, sec. 3.2), (B, 1, d). It is the last hidden state of [H^T, E(x[:j]), H^T]."""
        tokens = self.embed(chunk.ids[:, self.k : self.k + self.j])
        prompt = self.memory.summary_token.to(tokens).expand(len(tokens), -1, -1)
        mask = None if chunk.mask is None else F.pad(chunk.mask[:, : self.j], (1, 1), value=True)
        _, hidden, *_ = self.run(torch.cat([prompt, tokens, prompt], 1), mask)
        return hidden[:, -1:].clone()

    def read_segment(self, state: HMTState, chunk: Chunk, query: Tensor | None, use_cache: bool) -> HMTState:
        """Read one segment of each row (paper, sec. 3.2 and 3.3). Segments may be incomplete.

        Args:
            state, use_cache: as in `read`.
            chunk: the tokens of the segment.
            query: recall query of the chunk, (B, 1, d). None: no recall.
        """
        count, later, m = chunk.count, chunk.segments[0] > 0, self.config.memory_tokens
        full, recall, memory = count == self.length, None, None
        tokens = self.embed(chunk.ids[:, self.k * (not later) :])
        if later:
            recall = self.retriever.retrieve(state.memory, query, chunk.ids[:, self.k : self.k + self.j])
            prompt = recall.embeds.to(tokens)
        else:
            prompt = self.memory.initial.to(tokens).expand(len(tokens), -1, -1)
        ends, mask = full or not use_cache, None
        if chunk.mask is not None:
            mask = F.pad(chunk.mask, (m + self.k * later, m * ends), value=True)
        embeds = torch.cat([prompt, tokens, prompt] if ends else [prompt, tokens], 1)
        hidden, _ = self.run_pass(Pass(chunk, embeds, range(count), m + self.k * later), mask=mask)
        if ends:
            memory = hidden[:, -m:].clone()  # a view would retain all hidden states
        if full:
            assert memory is not None
            state = self.close_segment(state, chunk, memory)
        if self.output_recall:
            self.reports.append([Report(chunk, None if chunk.read else recall, memory)])
        return state


__all__ = ["Paper"]
