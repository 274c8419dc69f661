"""One call of a model: `Call`. It runs the passes of the backbone, and collects what they return.

The two layouts of a segment (`single_pass_hmt.py` and `paper_hmt.py`) are functions that take a `Call` and a state.
They read the segments of the call with `run`, and add full segments to the memory with `close`.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from .backbone_hmt import hide_prompt
from .caches_hmt import fork
from .graphs_hmt import PassGraphs, can_capture
from .output_hmt import HMTOutput, Report, recall_fields
from .packing_hmt import PackedRows, Part
from .reader_hmt import Reader
from .retriever_hmt import Segment, long_tensor
from .state_hmt import HMTState


@dataclass(eq=False)
class Call:
    """One call of a model.

    Attributes:
        reader: what the model has settled.
        rows: the tokens of the call.
        loss_function: computes the summed loss of logits, as in transformers.
        checkpoint: gradient checkpointing function, or None.
        cuda_graphs: as in `HMTConfig`.
        output_recall: whether to fill `reports`. The reports of n segments contain up to n * n / 2 weights per row.
        logits: for each row of the batch, the returned logits (n, V), keyed by (segment, first token).
        losses: the summed losses of the passes that compute logits.
        reports: list n contains the reports of the n-th segment of each row.
        in_two_passes: whether the second pass of a segment extends the cache of the first one.
    """

    reader: Reader
    rows: PackedRows
    loss_function: Callable[..., Tensor] | None = None
    checkpoint: Callable[..., Any] | None = None
    cuda_graphs: bool = False
    output_recall: bool = False
    logits: dict[int, dict[tuple, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    losses: list[Tensor] = field(default_factory=list)
    reports: list[list[Report]] = field(default_factory=list)

    def __post_init__(self):
        lm = self.reader.lm
        self.in_two_passes = self.reader.in_two_passes
        self.hide_prompt = cache(hide_prompt)  # the segments of a call share their masks
        if self.in_two_passes and lm.checkpoints_layers:
            lm.check_hides(self.reader.config.positions_per_segment, extends=False)
            self.in_two_passes = False
        if not self.cuda_graphs:
            lm.graphs.graphs.clear()

    @cached_property
    def graphs(self) -> PassGraphs:
        """The CUDA graphs of the model. Whether the model has changed is checked once per call."""
        return self.reader.lm.graphs.of(self.reader.lm.model)

    def segments_per_batch(self, parts: list[Part]) -> int:
        """Return how many segments can share a pass that does not depend on memories."""
        if self.reader.retrievers.mixes and any(part.needed_from < self.reader.j for part in parts):
            return 1  # the logits depend on the memory of all previous segments
        return max(1, self.reader.config.summary_batch // len(parts[0].rows))

    def run(
        self,
        part: Part,
        start: int,
        stop: int,
        *,
        prefix: Tensor | None = None,
        closing: Tensor | None = None,
        logits_from: int = 0,
        kv_cache: Cache | None = None,
        mask: Tensor | None = None,
        remembered: dict | None = None,
        last: bool = False,
    ) -> tuple[Tensor, Cache | None]:
        """Run a pass over [prefix, tokens `start` to `stop` - 1, closing], and collect its logits and losses.

        Args:
            part: the segments to which the tokens belong.
            prefix, closing: embeddings around the tokens, (B, n, d).
            logits_from: the first token that may get logits.
            kv_cache: cache that the pass continues, or None. Only a copy is extended.
            mask: (B, cached + P), bool, False on padding. In single-pass mode, another mask hides the prompt.
            remembered: memories of the retrievers, for retrievers that change logits.
            last: whether no later pass uses the cache of this pass.

        Returns:
            The last hidden states of all P positions, (B, P, d), and the extended cache or None.
        """
        reader = self.reader
        embeds = reader.embed(part.ids[:, reader.k + start : reader.k + stop])
        if self.in_two_passes and prefix is not None and kv_cache is not None and not reader.lm.takes_mask:
            kv_cache, prefix = reader.lm.read_prompt(prefix, kv_cache), None
            if start == stop:  # the call ends at the query
                return embeds, kv_cache
        n = 0 if prefix is None else prefix.shape[1]
        if prefix is not None or closing is not None:
            embeds = surround(embeds, prefix, closing)
        positions = None
        if reader.single_pass:
            positions = position_ids(part.positions, start, n, embeds)
            if prefix is not None and not reader.reread:  # tokens before the query do not attend to the prompt
                cached = 0 if kv_cache is None else kv_cache.get_seq_length()
                hidden_from = n - 1 + reader.j - start
                mask = self.hide_prompt(embeds.shape[1], hidden_from, cached, embeds.dtype, embeds.device)
        # Without a prompt, transformers inspects the mask. This synchronizes and rules out a capture.
        captures = last and self.cuda_graphs and mask is not None and can_capture(embeds)
        begin = min(max(start, logits_from, part.needed_from), stop)
        returns = max(start, logits_from, min(part.returned_from)) < stop
        targets = None if part.targets is None else part.targets[:, begin:stop].contiguous()
        columns = range(n + begin - start, n + stop - start)
        remembered = remembered if reader.retrievers.mixes else None
        arguments = (embeds, mask, columns, targets, kv_cache, positions, returns, remembered, captures)
        run_once: Any = self.run_once if self.checkpoint is None else partial(self.checkpoint, self.run_once)
        logits, hidden, loss, kv_cache = run_once(*arguments)
        if loss is not None:
            self.losses.append(loss)
        if logits is not None and returns:  # dynamo does not support a symbolic range as a condition
            for i, (row, segment, token) in enumerate(zip(part.rows, part.segments, part.returned_from)):
                self.logits[row][segment, begin] = logits[i, max(0, token - begin) :]
        return hidden, kv_cache

    def run_once(
        self,
        embeds: Tensor,
        mask: Tensor | None,
        columns: range = range(0),
        targets: Tensor | None = None,
        kv_cache: Cache | None = None,
        positions: Tensor | None = None,
        returns: bool = True,
        remembered: dict | None = None,
        captures: bool = False,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Cache | None]:
        """Run the backbone once. With gradient checkpointing, the backward pass runs this method again.

        Args:
            columns: positions of `embeds` whose logits are computed.
            returns: whether the logits are returned.
            captures: whether to run the pass as a CUDA graph. If True, the returned cache is None.

        Returns:
            The logits of `columns`, (B, n, V); the last hidden states, (B, P, d); the summed loss of `targets` (B, n);
            the extended cache. The logits, the loss and the cache may be None.
        """
        reader = self.reader
        keep = torch.arange(columns.start, columns.stop, device=embeds.device) if columns else None
        if captures:
            inputs = {"embeds": embeds, "mask": mask, "keep": keep, "positions": positions}
            logits, hidden = self.graphs.run(reader.lm.run, kv_cache, **inputs)
            kv_cache = None
        else:
            kv_cache = None if kv_cache is None else fork(kv_cache)
            logits, hidden = reader.lm.run(embeds, mask, keep, kv_cache, positions)
        loss = None
        if logits is not None and remembered is not None:
            logits = reader.retrievers.mix(remembered, logits, hidden[:, keep])
        if logits is not None and targets is not None and self.loss_function is not None:
            sizes = {"vocab_size": logits.shape[-1], "num_items_in_batch": 1}
            loss = self.loss_function(logits=logits, labels=None, shift_labels=targets, **sizes)
        return logits if returns else None, hidden, loss, kv_cache

    def close(self, state: HMTState, part: Part, embedding: Tensor, hidden: Tensor | None = None) -> HMTState:
        """Return the state after a full segment.

        Args:
            embedding: memory embeddings of the segment, (B, m, d).
            hidden: last hidden states of the segment's tokens, (B, L', d). Only some retrievers read them.
        """
        segment = Segment(part.ids[:, self.reader.k :], embedding, part.segments, hidden)
        state = replace(state, memory=self.reader.retrievers.observe(state.memory, segment))
        return state.detach() if part.ends_bptt else state

    def output(self, state: HMTState, use_cache: bool, num_items_in_batch: Tensor | int | None) -> HMTOutput:
        """Return the output of the call. `state` is the state after the call. For the others, see `HMTWrapper`."""
        reader, rows = self.reader, self.rows
        like = next((x for row in self.logits.values() for x in row.values()), None)
        if like is None:  # all requested positions are padding
            like = torch.zeros(0, reader.signature["vocab_size"], dtype=reader.dtype, device=rows.ids.device)
        fields: dict[str, Any] = {"logits": rows.unpack(self.logits, like)}
        if rows.targets is not None:
            fields["loss"] = self.mean_loss(num_items_in_batch)
        if use_cache:
            fields["state"] = fields["cache"] = rows.end(state)
        if self.output_recall:
            fields |= recall_fields(self.reports, reader.length, rows.ids)
        return HMTOutput(**fields)

    def mean_loss(self, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the mean cross entropy of the scored labels.

        With `num_items_in_batch`, return this call's share of the mean over the whole batch.
        """
        loss = torch.stack(self.losses).sum()
        loss = loss / self.rows.n_scored.clamp(min=1).to(loss)  # the loss is 0, not nan, if no label is scored
        if num_items_in_batch is not None:
            loss = loss * (self.rows.n_labelled / num_items_in_batch).to(loss)
        memory = self.reader.memory
        if memory.training and torch.distributed.is_available() and torch.distributed.is_initialized():
            # DDP needs a gradient for every parameter. A sequence of one segment does not use the recall parameters.
            loss = loss + 0 * sum(p.sum() for p in memory.parameters())
        return loss


def surround(embeds: Tensor, prefix: Tensor | None, closing: Tensor | None) -> Tensor:
    """Return [prefix, embeds, closing], (B, P, d). The arguments have shapes (B or 1, n, d)."""
    parts = {id(x): x.to(embeds).expand(len(embeds), -1, -1) for x in (prefix, closing) if x is not None}
    around = [[] if x is None else [parts[id(x)]] for x in (prefix, closing)]
    return torch.cat([*around[0], embeds, *around[1]], 1)


def position_ids(of_token_0: list[int], start: int, n: int, embeds: Tensor) -> Tensor:
    """Return the position ids of a pass over `embeds`, (B, P).

    Args:
        of_token_0: for each row, the position id of token 0. They may differ only in a pass without a prefix.
        start: the first token of the pass.
        n: number of embeddings before this token. They have the first position ids.
    """
    first, stop = of_token_0[0] + start, of_token_0[0] + start + embeds.shape[1] - n
    positions = torch.arange(first, stop, device=embeds.device)[None]
    if n:
        positions = torch.cat([torch.arange(n, device=embeds.device)[None], positions], 1)
    if min(of_token_0) < max(of_token_0):
        positions = (
            positions + long_tensor([position - of_token_0[0] for position in of_token_0], embeds.device)[:, None]
        )
    return positions.expand(len(embeds), -1).contiguous()
