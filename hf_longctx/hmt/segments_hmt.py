"""The base class of the layouts in `single_pass_hmt.py` and `paper_hmt.py`, which read the segments of a call.

The method `read` of a layout takes a state and the `Chunk`s of a call (`packing_hmt.py`), arranges embeddings as
`Pass`es, runs them (`run_passes`), requests prompts from its retriever (`recall`), passes it full segments
(`close_segment`), and returns the new state. Logits, losses and recalls are collected in `outputs`, `losses`, `scored`
and `reports`, from which `HMTWrapper.forward` builds its output.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from .backbone_hmt import Backbone, hide_prompt
from .caches_hmt import fork
from .configuration_hmt import HMTConfig
from .graphs_hmt import PassGraphs, can_capture
from .memory_hmt import HMTMemory
from .packing_hmt import Chunk
from .retriever_hmt import Retrieved, Retrievers, Segment, long_tensor
from .state_hmt import HMTState


class Pass(NamedTuple):
    """A pass of the backbone over a chunk: embeddings (B, P, d), and the location of the segment's tokens in them.

    part: 0 for the first part of a segment, 1 for the second. Logits are sorted by part.
    tokens: tokens of the segment that may get logits.
    column: column of token 0, which may be negative.
    begins: position id of column 0 of each row. None: the backbone's own positions.
    hidden_from: column 0 is a prompt at position 0, which the next `hidden_from` columns do not see. None: no prompt.
    last: whether no later pass extends the cache of this one.
    """

    chunk: Chunk
    part: int
    embeds: Tensor
    tokens: range
    column: int
    begins: list[int] | None = None
    hidden_from: int | None = None
    last: bool = False

    def from_token(self, token: int) -> range:
        """Return the tokens that get logits if those before `token` do not."""
        return range(min(max(self.tokens.start, token), self.tokens.stop), self.tokens.stop)

    def with_prefix(self, prefix: Tensor, hidden_from: int | None = None) -> "Pass":
        """Return the pass with `prefix` (B, n, d) prepended; with `hidden_from`, the first embedding is a prompt."""
        n, begins = prefix.shape[1], self.begins and [begin - prefix.shape[1] for begin in self.begins]
        embeds = torch.cat([prefix, self.embeds], 1)
        return self._replace(embeds=embeds, column=self.column + n, begins=begins, hidden_from=hidden_from)


class PassOutput(NamedTuple):
    """The returned logits of a pass, (n_b, V) for each of `rows`. `order` sorts the outputs of a call."""

    order: tuple[int, int]
    rows: list[int]
    logits: list[Tensor]


class Report(NamedTuple):
    """The recall of the n-th segment of a call in `rows`, or None, and its new memory (B, m, d), or None."""

    n: int
    rows: list[int]
    recall: Retrieved | None
    memory: Tensor | None


class Segments:
    """A layout that reads the segments of one call with a backbone and a memory.

    Args:
        config, lm, memory, retriever: from the wrapper.
        loss_function: computes the summed loss of logits, as in transformers.
        checkpoint: gradient checkpointing function, or None.
        output_recall: whether to fill `reports`. Reports of n segments have up to n * n / 2 weights.
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
        self.length, self.j, self.k = config.segment_length, config.summary_length, config.sensory_tokens
        self.run: Callable[..., Any] = self.run_once
        if checkpoint is not None:
            self.run = partial(checkpoint, self.run_once)
        self.hide_prompt = cache(hide_prompt)  # the segments of a call share masks
        self.outputs: list[PassOutput] = []
        self.losses: list[Tensor] = []  # summed losses
        self.scored: list[tuple[Tensor, Tensor]] = []  # hidden states (n, d) and targets (n,) of losses to compute
        self.reports: list[Report] = []

    @cached_property
    def graphs(self) -> PassGraphs:
        """The CUDA graphs of the backbone in its current state."""
        return self.lm.graphs.of(self.lm.model)

    def read(self, state: HMTState, chunks: list[Chunk], use_cache: bool) -> HMTState:
        """Read the segments of a call, and return the state with the memory after them.

        Args:
            state: state before the call.
            chunks: segments of the call, in order.
            use_cache: whether a later call may continue an incomplete segment.
        """
        raise NotImplementedError

    def segments_per_batch(self, chunks: list[Chunk]) -> int:
        """Return the number of segments whose memory-independent passes go through the backbone together."""
        if self.retriever.mixes and any(chunk.first < self.j for chunk in chunks):
            return 1  # logits depend on the memory of all previous segments
        return max(1, self.config.summary_batch // len(chunks[0].rows))

    def recall(self, state: HMTState, chunk: Chunk, query: Tensor | None) -> Retrieved:
        """Return the embeddings that a segment reads before its tokens, from the retriever."""
        return self.retriever.retrieve(state.memory, query, chunk.ids[:, self.k : self.k + self.j])

    def close_segment(self, state: HMTState, chunk: Chunk, memory: Tensor, hidden: Tensor | None = None) -> HMTState:
        """Return the state after a segment that is full in all rows.

        Args:
            memory: memory embeddings of the segment, (B, m, d).
            hidden: last hidden states of its tokens, (B, L', d), for retrievers that read them.
        """
        segment = Segment(chunk.ids[:, self.k :], memory, chunk.segments, hidden)
        state = replace(state, memory=self.retriever.observe(state.memory, segment))
        return state.detach() if self.cuts_gradient(chunk.segments[0]) else state

    def cuts_gradient(self, segment: int) -> bool:
        """Return whether backpropagation is truncated at the end of a segment."""
        return self.config.bptt_segments is not None and (segment + 1) % self.config.bptt_segments == 0

    def run_passes(
        self, passes: Sequence[Pass], kv_cache: Cache | None = None, mask: Tensor | None = None, memory: Any = None
    ) -> tuple[Tensor, Cache | None]:
        """Run passes of one shape together.

        Args:
            kv_cache: cache to extend; a copy is extended, not the argument.
            mask: (B, cached + P), bool, False on padding.
            memory: memory of the retriever, for logits that it changes.

        Returns:
            The last hidden states, (R, P, d), and the extended cache.
        """
        one, embeds, targets, positions = passes[0], torch.cat([x.embeds for x in passes]), None, None
        tokens = one.from_token(min(x.chunk.first for x in passes))
        kept = one.from_token(min(min(x.chunk.returned) for x in passes))
        columns, kept_columns = ([one.column + i for i in part] for part in (tokens, kept))
        all_targets = [x.chunk.targets for x in passes if x.chunk.targets is not None]
        if all_targets:
            targets = torch.cat([x[:, tokens.start : tokens.stop] for x in all_targets])
        if one.begins is not None:
            begins = long_tensor([begin for x in passes for begin in x.begins or ()], embeds.device)
            positions = begins[:, None] + torch.arange(embeds.shape[1], device=embeds.device)
        prompted = one.hidden_from is not None
        if one.hidden_from is not None:
            assert positions is not None
            positions[:, 0] = 0
            cached = 0 if kv_cache is None else kv_cache.get_seq_length()
            mask = self.hide_prompt(embeds.shape[1], one.hidden_from, cached, embeds.dtype, embeds.device)
        memory = memory if self.retriever.mixes else None
        skips = kept != tokens and torch.is_grad_enabled() and memory is None
        if skips and self.lm.can_skip_logits():
            logits, hidden, loss, kv_cache = self.run(embeds, mask, kept_columns, None, kv_cache, positions)
            assert targets is not None
            self.scored.append((hidden[:, columns].flatten(0, 1), targets.flatten()))
            tokens = kept
        else:
            # without a prompt, transformers synchronizes with the GPU to inspect the mask
            captures = self.config.cuda_graphs and prompted and one.last and can_capture(embeds)
            options = (bool(kept), memory, captures)
            arguments = (embeds, mask, columns, targets, kv_cache, positions)
            logits, hidden, loss, kv_cache = self.run(*arguments, *options)
        if loss is not None:
            self.losses.append(loss)
        for x, of_pass in zip(
            passes, () if logits is None or not kept else logits.split([len(x.embeds) for x in passes])
        ):
            starts = [max(0, token - tokens.start) for token in x.chunk.returned]
            rows = [row[start:] for row, start in zip(of_pass, starts)]
            self.outputs.append(PassOutput((x.chunk.n, x.part), x.chunk.rows, rows))
        return hidden, kv_cache

    def run_once(
        self,
        embeds: Tensor,
        mask: Tensor | None,
        columns: Sequence[int] = (),
        targets: Tensor | None = None,
        kv_cache: Cache | None = None,
        positions: Tensor | None = None,
        keep_logits: bool = True,
        memory: Any = None,
        captures: bool = False,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Cache | None]:
        """Run the backbone once. With gradient checkpointing, `run` recomputes this in the backward pass.

        Args:
            columns: columns of `embeds` with logits.
            captures: run the pass as a CUDA graph, which does not return a cache.

        The other arguments are as in `Backbone.run` and `run_passes`.

        Returns:
            Logits of `columns`, (R, n, V), or None; last hidden states, (R, P, d); summed loss over `targets` (R, n),
            or None; the extended cache, or None.
        """
        keep = long_tensor(columns, embeds.device) if columns else None
        if captures:
            inputs = {"embeds": embeds, "mask": mask, "keep": keep, "positions": positions}
            logits, hidden = self.graphs.run(self.lm.run, kv_cache, **inputs)
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


__all__ = ["Pass", "PassOutput", "Report", "Segments"]
