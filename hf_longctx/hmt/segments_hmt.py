"""The base class of the layouts in `single_pass_hmt.py` and `paper_hmt.py`. A layout reads the segments of a call.

The `read` method of a layout takes a state and the tokens of a call (`packing_hmt.py`). It arranges embeddings as
passes, and runs these passes (`run_pass`). The retriever provides prompts and observes full segments
(`close_segment`). `read` returns the state with the updated memory. The layout collects logits, losses and recalls
in `pieces`, `losses` and `reports`. `HMTWrapper.forward` builds its output from them.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor
from transformers import Cache

from .backbone_hmt import hide_prompt
from .caches_hmt import fork
from .graphs_hmt import can_capture
from .packing_hmt import Chunk, PackedSegments
from .reader_hmt import Reader
from .retriever_hmt import Retrieved, Segment, long_tensor
from .state_hmt import HMTState


class Pass(NamedTuple):
    """A pass of the backbone over a chunk.

    embeds: embeddings that the pass reads, (B, P, d).
    tokens: tokens that may get logits, as a range in the segment.
    column: index of the segment's token 0 in `embeds`. It may be negative, because a pass can start at a later token.
    positions: position ids, (1 or B, P), long. None: the backbone's default.
    hidden_from: number of columns after the prompt in column 0 that do not attend to the prompt. None: all columns
        attend to column 0.
    last: whether no later pass uses the cache of this pass.
    """

    chunk: Chunk
    embeds: Tensor
    tokens: range
    column: int
    positions: Tensor | None = None
    hidden_from: int | None = None
    last: bool = False

    def from_token(self, token: int) -> range:
        """Return the part of the range `tokens` that starts at `token`."""
        return range(min(max(self.tokens.start, token), self.tokens.stop), self.tokens.stop)


class Report(NamedTuple):
    """Report of a chunk for `output_recall`.

    recall: result of the recall. None: no recall to report.
    memory: memory embeddings, (B, m, d). None: no memory was computed.
    """

    chunk: Chunk
    recall: Retrieved | None
    memory: Tensor | None


class Segments:
    """Base class of the layouts. A layout reads the segments of one call with a backbone and a memory.

    Args:
        reader: what the model has settled.
        loss_function: computes the summed loss of logits, as in transformers.
        checkpoint: gradient checkpointing function, or None.
        cuda_graphs: as in `HMTConfig`.
        output_recall: whether to fill `reports`. The reports of n segments contain up to n * n / 2 weights per row.

    Attributes:
        pieces: for each row of the batch, the returned logits (n, V), keyed by (segment, first token).
        losses: the summed losses of the passes that compute logits.
        reports: lists of reports. List n contains the reports of the n-th segment of each row.
    """

    def __init__(
        self,
        reader: Reader,
        loss_function: Callable[..., Tensor],
        checkpoint: Callable[..., Any] | None = None,
        cuda_graphs: bool = False,
        output_recall: bool = False,
    ):
        self.reader, self.lm, self.memory, self.retriever = reader, reader.lm, reader.memory, reader.retrievers
        self.config, self.embed, self.cuda_graphs = reader.config, reader.lm.embed, cuda_graphs
        self.loss_function, self.output_recall = loss_function, output_recall
        self.length, self.j, self.k = reader.length, reader.j, reader.k
        self.run: Callable[..., Any] = self.run_once if checkpoint is None else partial(checkpoint, self.run_once)
        self.hide_prompt = cache(hide_prompt)  # the segments of a call share their masks
        self.graphs = cache(reader.lm.graphs.of)
        self.pieces: dict[int, dict[tuple, Tensor]] = defaultdict(dict)
        self.losses: list[Tensor] = []
        self.reports: list[list[Report]] = []

    def read(self, state: HMTState, packed: PackedSegments, use_cache: bool) -> HMTState:
        """Read the tokens of a call, and return `state` with the memory after the call.

        Args:
            state: state before the call.
            packed: tokens of the call.
            use_cache: whether a later call may continue an incomplete last segment.
        """
        raise NotImplementedError

    def segments_per_batch(self, chunks: list[Chunk]) -> int:
        """Return how many segments can share a pass that does not depend on memories."""
        if self.retriever.mixes and any(chunk.first < self.j for chunk in chunks):
            return 1  # the logits depend on the memory of all previous segments
        return max(1, self.config.summary_batch // len(chunks[0].rows))

    def close_segment(self, state: HMTState, chunk: Chunk, memory: Tensor, hidden: Tensor | None = None) -> HMTState:
        """Return the state after a full segment.

        Args:
            memory: memory embeddings of the segment, (B, m, d).
            hidden: last hidden states of the segment's tokens, (B, L', d). Only some retrievers read them.
        """
        segment = Segment(chunk.ids[:, self.k :], memory, chunk.segments, hidden)
        state = replace(state, memory=self.retriever.observe(state.memory, segment))
        return state.detach() if chunk.cuts else state

    def run_pass(
        self, one: Pass, kv_cache: Cache | None = None, mask: Tensor | None = None, memory: Any = None
    ) -> tuple[Tensor, Cache | None]:
        """Run a pass, and collect its logits and losses.

        Args:
            kv_cache: cache that the pass continues, or None. Only a copy is extended.
            mask: (B, cached + P), bool, False on padding.
            memory: the retriever's memory. It is used only if the retriever changes logits.

        Returns:
            The last hidden states, (B, P, d), and the extended cache. The cache may be None.
        """
        chunk, embeds, targets, positions = one.chunk, one.embeds, one.chunk.targets, one.positions
        tokens, kept = one.from_token(chunk.first), one.from_token(min(chunk.returned))
        columns = [one.column + i for i in tokens]
        targets = None if targets is None else targets[:, tokens.start : tokens.stop].contiguous()
        positions = None if positions is None else positions.expand(len(embeds), -1).contiguous()
        if one.hidden_from is not None:
            cached = 0 if kv_cache is None else kv_cache.get_seq_length()
            mask = self.hide_prompt(embeds.shape[1], one.hidden_from, cached, embeds.dtype, embeds.device)
        memory = memory if self.retriever.mixes else None
        # Without a prompt, transformers inspects the mask. This synchronizes and rules out a capture.
        captures = self.cuda_graphs and one.hidden_from is not None and one.last and can_capture(embeds)
        arguments = (embeds, mask, columns, targets, kv_cache, positions)
        logits, hidden, loss, kv_cache = self.run(*arguments, kept.stop > kept.start, memory, captures)
        if loss is not None:
            self.losses.append(loss)
        if logits is not None and kept.stop > kept.start:  # dynamo does not support a symbolic range as a condition
            for row, segment, token, of_row in zip(chunk.rows, chunk.segments, chunk.returned, logits):
                self.pieces[row][segment, tokens.start] = of_row[max(0, token - tokens.start) :]
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
        """Run the backbone once. With gradient checkpointing, the backward pass runs this method again.

        Args:
            columns: columns of `embeds` whose logits are computed.
            captures: whether to run the pass as a CUDA graph. If True, the returned cache is None.

        For the other arguments, see `Backbone.run` and `run_pass`.

        Returns:
            The logits of `columns`, (B, n, V); the last hidden states, (B, P, d); the summed loss of `targets` (B, n);
            the extended cache. The logits, the loss and the cache may be None.
        """
        keep = long_tensor(columns, embeds.device) if columns else None
        if captures:
            inputs = {"embeds": embeds, "mask": mask, "keep": keep, "positions": positions}
            logits, hidden = self.graphs(self.lm.model).run(self.lm.run, kv_cache, **inputs)
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


__all__ = ["Pass", "Report", "Segments"]
