"""The segments of the paper: a summary pass, and one pass between two prompts; in the three-pass mode a third pass.

    summary      summary token, x[:j], summary token         its last hidden state is the query
    first half   opening prompt, sensory tokens, x[:j]       three-pass mode only: logits before token j
    segment      prompt, sensory tokens, x, prompt           logits (from token j on in three passes), the memory

`modeling_hmt.py` says why. Without recall there is the third line alone, and the prompt is the latest memory.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from transformers import DynamicCache

from .memory_hmt import HMTState, where_rows
from .packing_hmt import Chunk, align
from .segments_hmt import Pass, PassOutput, Recall, SegmentOutput, Segments


class MultiPassSegments(Segments):
    """`recall_mode` "paper" and "three_pass"."""

    def read(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """See `Segments.read`."""
        passes, segments, first_halves = [], [], []
        for chunk, query in zip(chunks, self.recall_queries(state, chunks)):
            state, output, segment, first_half = self.read_segment(state, chunk, query, use_cache)
            passes.append(output)
            segments.append(segment)
            first_halves += first_half
            if len(first_halves) == self.segments_per_batch(state) or chunk is chunks[-1]:
                for _, alike in groupby(first_halves, key=lambda one: (one.embeds.shape, one.columns(one.first))):
                    passes += self.run_passes(list(alike))[0]
                first_halves = []
        return state, passes, segments

    def prompt_for(self, state: HMTState, chunk: Chunk, query: Tensor | None) -> tuple[Tensor, Recall | None]:
        """Return the prompt of a segment, (B, m, d), and its `Recall` or None.

        Without memories the prompt is `initial`, without a query the latest memory, and there is no recall. In a
        query (B, 1, d), zeros are a row that has none.
        """
        if state.bank.shape[1] == 0:
            # a copy: an optimizer step must not change a state
            return self.memory.initial.to(state.bank).repeat(len(state.bank), 1, 1), None
        latest, valid = state.latest(self.config.memory_tokens)
        latest = self.memory.or_initial(latest, valid)
        if query is None:
            return latest, None
        prompt, recall = self.recall(state, chunk, query)
        return torch.where(query.any(2, keepdim=True) & valid[..., None], prompt, latest), recall

    def recall_queries(self, state: HMTState, chunks: list[Chunk]) -> Iterator[Tensor | None]:
        """Yield the recall query of each chunk, (B, 1, d), or None for a chunk in which no row recalls.

        Summary passes see no memory, so those of several segments go through the backbone together.
        """
        j, queries = self.j, {}
        pending = [chunk.n for chunk in chunks if any(self.recalls(chunk))]
        for n in range(len(chunks)):
            if pending[:1] == [n]:
                group = [i for i in pending[: self.segments_per_batch(state)] if i == n or chunks[i].ids.shape[1] >= j]
                del pending[: len(group)]
                ids = torch.cat([chunks[i].ids[:, :j] for i in group])
                mask = torch.cat([chunks[i].mask[:, :j] for i in group]) if state.padded else None
                queries.update(zip(group, self.summarize(ids, mask).chunk(len(group))))
            yield queries.pop(n, None)

    def recalls(self, chunk: Chunk) -> list[bool]:
        """Say which rows make the recall of their segment in this call."""
        numbers = zip(chunk.segments, chunk.counts, chunk.read)
        return [self.has_recall(n, count) and not self.has_recall(n, read) for n, count, read in numbers]

    def has_recall(self, segment: int, tokens: int) -> bool:
        """Say whether `segment` of a text makes a recall when its first `tokens` tokens are known."""
        if not self.config.recall or segment == 0:
            return False
        if self.config.recall_mode == "paper":
            return tokens > 0
        # Logits before token j do not need the recall. Only a full segment leaves a memory, which does.
        return tokens > self.j or tokens == self.config.segment_length

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
    ) -> tuple[HMTState, PassOutput, SegmentOutput, list[Pass]]:
        """Read one segment of each row, or its tokens so far: sections 3.2 and 3.3 of the paper.

        Args:
            state, chunk, use_cache: as in `read`.
            query: of the chunk, (B, 1, d), or None.

        Returns:
            the state after it; the outputs of its pass and of the chunk; the `Pass` that gives the logits before
            token j, or [].
        """
        config, j, recall = self.config, self.j, None
        begins = [ongoing and not read for ongoing, read in zip(chunk.ongoing, chunk.read)]
        if any(begins):
            opening, _ = self.prompt_for(state, chunk, state.query)  # no query: none has recalled
            prompts = {
                name: where_rows(begins, opening, getattr(state, name)) for name in ("opening_prompt", "prompt")
            }
            state = replace(state, **prompts)
        if query is not None:
            rows = self.recalls(chunk)
            recalled, recall = self.prompt_for(state, chunk, query)
            prompt, query = where_rows(rows, recalled, state.prompt), where_rows(rows, query, state.query)
            state = replace(state, prompt=prompt, query=query).without_kv_cache()
            recall = recall and recall.of_rows(rows)

        first, first_half = chunk.first, []
        if config.recall_mode == "three_pass":
            # segment 1 has one memory, so both prompts are equal: one pass is enough
            recalled = [n > 1 and self.has_recall(n, count) for n, count in zip(chunk.segments, chunk.counts)]
            stop = [max(a, min(j, n)) if behind else a for a, n, behind in zip(first, chunk.counts, recalled)]
            if stop != first:
                counts = [min(j, count) for count in chunk.counts]
                embeds, _, offset = self.layout(state, state.opening_prompt, chunk, counts)
                first_half.append(Pass(chunk, 0, embeds, first, stop, offset))
            first = stop

        full = [count == config.segment_length for count in chunk.counts]
        stays_open = use_cache and not any(full)
        if self.cached_positions(state, chunk):
            kv_cache = state.kv_cache
            embeds, mask, offset = self.continue_layout(state, chunk, ends=not stays_open)
        else:
            new_cache = self.lm.continues and stays_open and all(chunk.ongoing) and not torch.is_grad_enabled()
            kv_cache = DynamicCache(config=self.lm.model.config) if new_cache else None
            layout = (state, state.prompt, chunk, chunk.counts)
            embeds, mask, offset = self.layout(*layout, ends=not stays_open, left=not new_cache)
        one = Pass(chunk, 1, embeds, first, chunk.counts, offset, last=not stays_open)
        (output,), hidden, kv_cache = self.run_passes([one], mask, kv_cache)

        memory = None
        if not stays_open:
            # indexing copies: a view would keep all hidden states alive
            end = torch.tensor([column + count for column, count in zip(offset, chunk.counts)], device=embeds.device)
            place = end[:, None] + torch.arange(config.memory_tokens, device=embeds.device)
            memory = hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[2]))
            memory = where_rows(full if use_cache else [count > 0 for count in chunk.counts], memory, None)
        if stays_open and kv_cache is not None:
            state = replace(state, kv_cache=kv_cache, kv_mask=mask)
        else:
            state = state.without_kv_cache()
        if memory is not None and any(full):
            state = self.close_segment(state, chunk, memory, full)
        return state, output, SegmentOutput(recall, memory), first_half

    def layout(
        self,
        state: HMTState,
        prompt: Tensor | None,
        chunk: Chunk,
        counts: list[int],
        ends: bool = False,
        left: bool = True,
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Lay out [prompt, sensory tokens, tokens], and with `ends` the prompt again.

        Args:
            state, prompt, chunk: of a segment, before it is read.
            counts: how many of its tokens each row reads.
            left: rows of unequal length stand at the left, where nothing sees the padding behind them; else at the
                right, so that a cache can grow.

        Returns:
            embeddings (B, P, d); mask (B, P), or None if no position sees padding; the column of each row's token 0.
        """
        config, width = self.config, max(counts)
        assert prompt is not None
        tokens, mask = self.embed(chunk.ids[:, :width]), chunk.mask[:, :width]
        prompt, visible = prompt.to(tokens), mask.new_ones(len(tokens), config.memory_tokens)
        parts = 4 if ends else 3
        embeds = torch.cat([prompt, self.embed(state.sensory_ids), tokens, prompt][:parts], 1)
        mask = torch.cat([visible, state.sensory_mask, mask, visible][:parts], 1)
        offset = [config.memory_tokens + config.sensory_tokens * (segment > 0) for segment in chunk.segments]
        if state.padded:
            return embeds, mask, offset
        if set(counts) == {width} and set(offset) == {config.memory_tokens + state.sensory_ids.shape[1]}:
            return embeds, None, offset
        mask, embeds = align(mask, embeds, left=left)
        if left:
            return embeds, None, offset
        return embeds, mask, [embeds.shape[1] - count for count in counts]

    def continue_layout(self, state: HMTState, chunk: Chunk, ends: bool) -> tuple[Tensor, Tensor | None, list[int]]:
        """Lay out the tokens behind those in the cache, as `layout` does; the mask covers the cache too."""
        embeds, mask = self.embed(chunk.ids.gather(1, chunk.new)), None
        if state.kv_mask is not None:
            mask = torch.cat([state.kv_mask, chunk.mask.gather(1, chunk.new)], 1)
        if ends:
            assert state.prompt is not None
            prompt = state.prompt.to(embeds)
            embeds = torch.cat([embeds, prompt], 1)
            mask = None if mask is None else torch.cat([mask, mask.new_ones(prompt.shape[:2])], 1)
        return embeds, mask, [-n for n in chunk.read]

    def cached_positions(self, state: HMTState, chunk: Chunk) -> int:
        """Count the positions in the cache of the open segments; 0 where these are read again.

        That is so after loading a state, with gradients, with backbones that cannot continue, after a recall or a
        border in any row, and where the rows get unequal numbers of new tokens.
        """
        if torch.is_grad_enabled() or len({n - m for n, m in zip(chunk.counts, chunk.read)}) > 1:
            return 0
        return 0 if state.kv_cache is None else state.kv_cache.get_seq_length()


__all__ = ["MultiPassSegments"]
