"""Reading one segment: what the layouts `single_pass_hmt.py`, `no_recurrence_hmt.py` and `paper_hmt.py` share.

A layout has a method `read`. It takes a state and the `Chunk`s of a call (`packing_hmt.py`), lays out embeddings as
`Pass`es, runs them (`run_passes`), asks its retriever for prompts (`recall`), shows it full segments
(`close_segment`), and returns the new state, a `PassOutput` for each pass and a `SegmentOutput` for each chunk.
`HMTWrapper.forward` puts logits, loss and the report of recalls together from these.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from .backbone_hmt import Backbone, fork, hide_prompt
from .configuration_hmt import HMTConfig
from .graphs_hmt import can_capture
from .memory_hmt import HMTMemory
from .packing_hmt import Chunk
from .retriever_hmt import Retrievers, Segment, long_tensor
from .state_hmt import HMTState, where_rows


class Pass(NamedTuple):
    """One pass of the backbone over a chunk: embeddings (B, P, d), and the tokens whose logits are computed.

    part: 0 for a pass over the beginning of a segment, whose logits stand before those of the pass of part 1.
    first, stop: for each row, the tokens `first` to `stop` - 1 of its segment get logits.
    offset: the column of token 0 of each row; it may lie before the pass.
    begins: the position id of column 0 of each row; None leaves positions to the backbone.
    memory: of the retriever, which is mixed into the logits, if anything.
    hidden_from: column 0 is a prompt, at position 0, which so many columns behind it do not see; None is no prompt.
    last: no pass reads the keys and values that this one adds to a cache.
    """

    chunk: Chunk
    part: int
    embeds: Tensor
    first: list[int]
    stop: list[int]
    offset: list[int]
    begins: list[int] | None = None
    memory: dict | None = None
    hidden_from: int | None = None
    last: bool = False

    def columns(self, least: list[int]) -> list[int]:
        """Return the columns of the tokens that get logits and do not come before `least` of their row, in order."""
        rows = zip(self.first, least, self.stop, self.offset)
        return sorted({offset + i for first, least, stop, offset in rows for i in range(max(first, least), stop)})

    def targets(self, columns: list[int]) -> Tensor:
        """Return what the tokens in `columns` predict, (B, n); -100 where a row has no token that gets logits."""
        targets = self.chunk.targets
        assert targets is not None
        first, stop, offset = (
            torch.tensor(x, device=targets.device)[:, None] for x in (self.first, self.stop, self.offset)
        )
        token = torch.tensor(columns, dtype=torch.long, device=targets.device) - offset
        outside = (token < first) | (token >= stop)
        return targets.gather(1, token.clamp(0, targets.shape[1] - 1)).masked_fill(outside, -100)

    def returned(self, logits: Tensor, columns: list[int]) -> list[Tensor]:
        """Cut the logits of `columns`, (B, n, V), into those that the call returns of each row, (n_b, V)."""
        rows, pieces = zip(self.first, self.chunk.returned, self.stop, self.offset), []
        for row, (first, least, stop, offset) in zip(logits.unbind(0), rows):
            tokens = range(max(first, least), stop)
            place = bisect(columns, offset + tokens.start - 1)
            pieces.append(row[place : place + len(tokens)])
        return pieces

    def behind(self, front: Tensor, hidden_from: int | None = None) -> "Pass":
        """Return the pass with embeddings (B, n, d) in front of it; with `hidden_from`, the first is a prompt."""
        n, begins = front.shape[1], self.begins and [begin - front.shape[1] for begin in self.begins]
        offset = [column + n for column in self.offset]
        embeds = torch.cat([front, self.embeds], 1)
        return self._replace(embeds=embeds, offset=offset, begins=begins, hidden_from=hidden_from)


class PassOutput(NamedTuple):
    """The logits and the loss of a pass.

    order: number of its chunk and its part of the segment; the outputs of a call are sorted by it.
    logits: for each row those of its tokens, (n_b, V); [] if the call returns none.
    loss: summed over the passes that ran together, in the first of them; or None.
    scored: in place of `loss`, the last hidden states (n, d) and targets (n,) of which the loss will be made.
    """

    order: tuple[int, int]
    logits: list
    loss: Tensor | None = None
    scored: tuple[Tensor, Tensor] | None = None

    def of_rows(self, rows: list[bool], place: list[int]) -> "PassOutput":
        """Return the output of a whole batch, whose `rows` stand at `place` here; the others have no logits."""
        logits = self.logits and [self.logits[i] if row else [] for row, i in zip(rows, place)]
        return self._replace(logits=logits)


class Recall(NamedTuple):
    """The memories that a segment recalled.

    weights: (B, c).
    ends: of the memories, as in `HMTState`, (B, c).
    distance: in segments, to the memory with the largest weight, (B,); 0 in a row without a recall.
    """

    weights: Tensor
    ends: Tensor
    distance: Tensor

    def of_rows(self, rows: list[bool], place: list[int] | None = None, other: "Recall | None" = None) -> "Recall":
        """Return the recall of a whole batch, whose `rows` stand at `place` here; the others are of `other`, or 0."""
        new = self if place is None else Recall(*(x[place] for x in self))
        weights, ends = (where_rows(rows, x, y) for x, y in zip(new[:2], other or (None, None)))
        old = None if other is None else other.distance[:, None]
        return Recall(weights, ends, where_rows(rows, new.distance[:, None], old)[:, 0])


class SegmentOutput(NamedTuple):
    """The recall of a chunk, and the memory (B, m, d) that it leaves; None where there is none."""

    recall: Recall | None = None
    memory: Tensor | None = None


class Segments:
    """Reads segments with a backbone and a memory.

    Args:
        config, lm, memory, retriever: of the wrapper.
        loss_function: sums the loss of logits, as in transformers.
        checkpoint: calls a function so that the backward pass computes it again, or None.
        output_recall: whether to keep each `Recall`; those of n segments have up to n * n / 2 weights.
    """

    def __init__(
        self,
        config: HMTConfig,
        lm: Backbone,
        memory: HMTMemory,
        retriever: Retrievers,
        loss_function: Callable[..., Tensor],
        checkpoint: Callable[..., Any] | None = None,
        output_recall: bool = False,
    ):
        self.config, self.lm, self.memory, self.retriever = config, lm, memory, retriever
        self.loss_function, self.output_recall, self.embed = loss_function, output_recall, lm.embed
        self.j, self.k = self.config.summary_length, self.config.sensory_tokens
        self.masks_of_prompts: dict[tuple, Tensor] = {}
        self.run: Callable[..., Any] = self.run_once
        if checkpoint is not None:
            self.run = partial(checkpoint, self.run_once)

    def read(
        self, state: HMTState, chunks: list[Chunk], use_cache: bool
    ) -> tuple[HMTState, list[PassOutput], list[SegmentOutput]]:
        """Read the segments of a call.

        Args:
            state: before the call.
            chunks: its segments, in order.
            use_cache: whether a later call continues a segment that stays open.

        Returns:
            the state after them; the outputs of all passes, in any order; the output of each chunk.
        """
        raise NotImplementedError

    def segments_per_batch(self, state: HMTState, chunks: list[Chunk]) -> int:
        """Return how many first parts go through the backbone together, which need no memory."""
        if self.retriever.mixes and any(token < self.j for chunk in chunks for token in chunk.first):
            return 1  # logits need the memory of all segments before
        return max(1, self.config.summary_batch // len(state.lengths))

    def recall(self, state: HMTState, chunk: Chunk, query: Tensor | None) -> tuple[Tensor, Recall | None]:
        """Ask the retriever for what a segment reads in front of its tokens, (B, n, d)."""
        found = self.retriever.retrieve(state.memory, query, chunk.ids[:, : self.j])
        if found.weights is None or found.ends is None or not self.output_recall:
            return found.embeds, None
        length, ends = self.config.segment_length, found.ends
        begins = length * long_tensor(chunk.segments, ends.device)[:, None]
        distance = 1 + (begins - ends.gather(1, found.weights.argmax(1, keepdim=True))).squeeze(1) // length
        return found.embeds, Recall(found.weights, ends, distance * (ends > 0).any(1))

    def close_segment(self, state: HMTState, chunk: Chunk, memory: Tensor, hidden: Tensor | None = None) -> HMTState:
        """Return the state after a segment that is full in all rows, with its sensory tokens.

        Args:
            memory: its memory embeddings, (B, m, d).
            hidden: the last hidden states of its tokens, (B, L', d), for retrievers that read them.
        """
        length, cut = self.config.segment_length, self.config.bptt_segments
        segment = Segment(chunk.ids[:, :length], memory, chunk.segments, hidden)
        memories = self.retriever.observe(state.memory, segment)
        state = replace(state, memory=memories, tail=chunk.ids[:, length - self.k : length], prompt=None)
        if cut is not None:
            state = state.detach().where_rows([(number + 1) % cut == 0 for number in chunk.segments], state)
        return state

    def run_passes(
        self, passes: Sequence[Pass], mask: Tensor | None = None, kv_cache: Cache | None = None
    ) -> tuple[list[PassOutput], Tensor, Cache | None]:
        """Run passes of one shape together: their outputs, the last hidden states (R, P, d), and the cache."""
        columns, targets, positions = sorted({c for one in passes for c in one.columns(one.first)}), None, None
        kept = sorted({c for one in passes for c in one.columns(one.chunk.returned)})
        embeds, scored, memory = torch.cat([one.embeds for one in passes]), None, passes[0].memory
        if passes[0].chunk.targets is not None:
            targets = torch.cat([one.targets(columns) for one in passes])
        if passes[0].begins is not None:
            begins = long_tensor([begin for one in passes for begin in one.begins or ()], embeds.device)
            positions = begins[:, None] + torch.arange(embeds.shape[1], device=embeds.device)
        if passes[0].hidden_from is not None:
            mask = self.mask_of_prompt(embeds, passes[0].hidden_from, kv_cache)
            assert positions is not None
            positions[:, 0] = 0
        skips = kept != columns and torch.is_grad_enabled() and memory is None
        if skips and self.lm.can_skip_logits(embeds.device):
            logits, hidden, loss, kv_cache = self.run(embeds, mask, kept, None, kv_cache, positions)
            assert targets is not None
            scored, columns = (hidden[:, columns].flatten(0, 1), targets.flatten()), kept
        else:
            # without a mask, transformers waits for the GPU, or takes other kernels in a capture
            masked = passes[0].hidden_from is not None
            captures = self.config.cuda_graphs and masked and passes[0].last and can_capture(embeds)
            arguments = (embeds, mask, columns, targets, kv_cache, positions, bool(kept), memory, captures)
            logits, hidden, loss, kv_cache = self.run(*arguments)
        rows = [[] for _ in passes]
        if logits is not None and kept:
            rows = [one.returned(x, columns) for one, x in zip(passes, logits.chunk(len(passes)))]
        outputs = [PassOutput((one.chunk.n, one.part), x) for one, x in zip(passes, rows)]
        return [outputs[0]._replace(loss=loss, scored=scored), *outputs[1:]], hidden, kv_cache

    def mask_of_prompt(self, embeds: Tensor, hidden_from: int, kv_cache: Cache | None) -> Tensor:
        """Return the mask of `hide_prompt`, which the segments of a call share."""
        cached = 0 if kv_cache is None else kv_cache.get_seq_length()
        key = (embeds.shape[1], hidden_from, cached, embeds.dtype, embeds.device)
        if key not in self.masks_of_prompts:
            self.masks_of_prompts[key] = hide_prompt(embeds, hidden_from, cached)
        return self.masks_of_prompts[key]

    def run_once(
        self,
        embeds: Tensor,
        mask: Tensor | None = None,
        columns: Sequence[int] = (),
        targets: Tensor | None = None,
        kv_cache: Cache | None = None,
        positions: Tensor | None = None,
        keep_logits: bool = True,
        memory: dict | None = None,
        captures: bool = False,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Cache | None]:
        """Run the backbone once. Arguments as in `Backbone.run` and `Pass`, but for the `columns` that get logits.

        With gradient checkpointing, `run` makes the backward pass compute it again.

        Returns:
            logits of `columns` (R, n, V) or None; last hidden state (R, P, d); summed loss over `targets` (R, n) or
            None; the continued cache or None. `kv_cache` itself stays as it is. With `captures`, the pass is a CUDA
            graph, which continues no cache.
        """
        keep = long_tensor(columns, embeds.device) if columns else None
        if captures:
            logits, hidden = self.lm.run_captured(embeds, mask, keep, kv_cache, positions)
            kv_cache = None
        else:
            kv_cache = None if kv_cache is None else fork(kv_cache)
            logits, hidden = self.lm.run(embeds, mask, keep, kv_cache, positions)
        loss = None
        if logits is not None and memory is not None:
            logits = self.retriever.mix(memory, logits, hidden[:, keep])
        if logits is not None and targets is not None:
            sizes = {"vocab_size": logits.shape[-1], "num_items_in_batch": 1}
            loss = self.loss_function(logits=logits, labels=None, shift_labels=targets, **sizes)
        return logits if keep_logits else None, hidden, loss, kv_cache


__all__ = ["Pass", "PassOutput", "Recall", "SegmentOutput", "Segments"]
