"""Split rows of unequal length into segments. The result of a row does not depend on the other rows.

Each row has its own segment boundaries. A row consists of its sensory tokens, the tokens of its open segment and its
new tokens. Rows are padded on the right. Causality hides padding on the right in every backbone (attention, recurrence
or convolution), even without an attention mask. `PackedSegments` contains all tokens of a call. A `Chunk` groups rows
that are at the same position in their segments. It contains one segment of each of these rows.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .reader_hmt import Reader
from .retriever_hmt import long_tensor
from .state_hmt import HMTState


def align(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """In each row, left-align the entries that `mask`, (B, n), selects. Drop columns that become empty.

    Returns:
        The aligned mask and the aligned tensors, (B, n'). Tensors are zero where the aligned mask is False.
    """
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]
    mask = mask.gather(1, order)
    return mask, *(x.gather(1, order).masked_fill(~mask, 0) for x in tensors)


class Chunk(NamedTuple):
    """One segment of each row. Segments may be incomplete. All B rows are at the same position in their segments.

    rows: indices of the rows in the batch.
    segments: for each row, the index of the segment in the sequence.
    returned: for each row, the first token whose logits are returned, as an index in the segment.
    ids: token ids, (B, k + count): the k tokens before the segment, then the segment so far.
    targets: target token ids, (B, count). Targets of -100 are not scored. None without labels.
    mask: (B, count), bool, False on padding. Used only in paper mode. None without padding.
    count: number of tokens of the segment so far.
    read: number of tokens of the segment that earlier calls have read.
    cuts: whether backpropagation is truncated at the end of the segment.
    """

    rows: list[int]
    segments: list[int]
    returned: list[int]
    ids: Tensor
    targets: Tensor | None
    mask: Tensor | None
    count: int
    read: int
    cuts: bool

    @property
    def first(self) -> int:
        """The first token whose logits are computed, as an index in the segment."""
        return min(self.returned) if self.targets is None else self.read


def join_chunks(chunks: list[Chunk]) -> Chunk:
    """Truncate chunks to the length of the shortest one, and concatenate them along the batch dimension."""
    if len(chunks) == 1:
        return chunks[0]
    joined, (count, read) = chunks[0]._asdict(), map(min, zip(*((chunk.count, chunk.read) for chunk in chunks)))
    for name, value in joined.items():
        values = [getattr(chunk, name) for chunk in chunks]
        if isinstance(value, list):
            joined[name] = [x for part in values for x in part]
        elif isinstance(value, Tensor):
            widths = [x.shape[1] - chunk.count + count for x, chunk in zip(values, chunks)]
            joined[name] = torch.cat([x[:, :width] for x, width in zip(values, widths)])
    return Chunk(**joined | {"count": count, "read": read})


class PackedSegments:
    """The tokens of a call, preceded by the sensory tokens and the open segment of each row.

    Args:
        reader: what the model has settled.
        state: the state before the call.
        input_ids: (B, T).
        mask: (B, T), bool; None without padding.
        labels: (B, T), or None.
        score_from: as in `HMTWrapper.forward`.
        first: first position of the call whose logits are returned.
        loss_scope, bptt_segments: as in `HMTConfig`.

    Attributes:
        ids: token ids, (B, k + W), left-aligned. Each row contains k sensory tokens, then up to W other tokens. The
            tokens of the open segment precede the tokens of this call. In paper mode, padding stays in place.
        targets, mask: as in `Chunk`, (B, W).
        segments: for each row, the index of its open segment.
        opened: for each row, the number of tokens of its open segment that earlier calls have read.
        lengths: for each row, the total number of tokens of the open segment and of this call.
        padding: for each row, the number of padding columns before the new tokens.
        n_scored: number of targets that the loss includes.
        n_labelled: number of targets, including targets that `score_from` or `loss_scope` excludes.
    """

    def __init__(
        self,
        reader: Reader,
        state: HMTState,
        input_ids: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        score_from: int | None = None,
        first: int = 0,
        loss_scope: str = "all",
        bptt_segments: int | None = None,
    ):
        length, k, (rows, tokens) = reader.length, reader.k, input_ids.shape
        self.reader, self.first, self.tokens, self.bptt_segments = reader, first, tokens, bptt_segments
        self.segments, self.opened = zip(*(divmod(n, length) for n in state.lengths))
        ids, before = torch.cat([state.tail, input_ids], 1), state.tail.shape[1]
        device, new, self.padding = ids.device, [tokens] * rows, [0] * rows
        labels = None if labels is None else F.pad(labels, (before, 0), value=-100)
        there = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
        self.mask = None
        if not reader.single_pass and (mask is not None or state.open_mask is not None):
            opened = state.open_mask
            opened = torch.ones_like(state.open_ids, dtype=torch.bool) if opened is None else opened
            self.mask = torch.cat([opened, there], 1)
        elif mask is not None or min(self.opened) < before - k:
            if mask is not None:
                new, self.padding = mask.sum(1).tolist(), mask.long().argmax(1).tolist()
            opened = torch.arange(before, device=device) < k + torch.tensor(self.opened, device=device)[:, None]
            there = torch.cat([opened, there], 1)
            aligned, ids = align(there, ids)
            labels = None if labels is None else align(there, labels)[1].masked_fill(~aligned, -100)
        self.ids, self.targets = ids, None
        self.lengths = [m + n for m, n in zip(self.opened, new)]
        if labels is not None:
            targets = F.pad(labels[:, k + 1 :], (0, 1), value=-100)
            place = torch.arange(targets.shape[1], device=device)
            targets = targets.masked_fill(place < long_tensor(self.opened, device)[:, None], -100)
            self.n_labelled = (targets != -100).sum()
            if loss_scope == "last":
                to_the_end = long_tensor(self.lengths, device)[:, None] - place
                targets = targets.masked_fill(to_the_end > length + 1, -100)
            if score_from is not None:
                targets = targets.masked_fill(place % length < score_from, -100)
            self.n_scored, self.targets = (targets != -100).sum(), targets

    def chunks(self) -> list[list[Chunk]]:
        """Split the rows at segment boundaries.

        Returns:
            Lists of chunks. List n contains the n-th segment of each row. All rows of a chunk are at the same
            position in their segments.
        """
        length, k, bptt = self.reader.length, self.reader.k, self.bptt_segments
        starts = [m + max(0, self.first - padding) for m, padding in zip(self.opened, self.padding)]
        chunks: list[list[Chunk]] = []
        for n, a in enumerate(range(0, max(self.lengths), length)):
            groups: dict[tuple, list[int]] = {}
            for row, (tokens, opened) in enumerate(zip(self.lengths, self.opened)):
                segment, count = self.segments[row] + n, min(max(tokens - a, 0), length)
                cuts = bptt is not None and (segment + 1) % bptt == 0
                groups.setdefault((segment > 0, count, 0 if n else opened, cuts), []).append(row)
            chunks.append([])
            for (_, count, *place), rows in groups.items():
                tensors = (self.ids, k + count), (self.targets, count), (self.mask, count)
                parts: list[Any] = [None if x is None else x[:, a : a + width] for x, width in tensors]
                if len(groups) > 1:
                    parts = [None if x is None else x[rows] for x in parts]
                segments = [self.segments[row] + n for row in rows]
                returned = [min(max(starts[row] - a, 0), count) for row in rows]
                chunks[-1].append(Chunk(rows, segments, returned, *parts, count, *place))
        return chunks

    def new_tokens(self) -> Chunk:
        """Return a chunk of the new tokens only. All rows must have the same number of new tokens."""
        count = self.lengths[0] - self.opened[0]
        places = long_tensor(self.opened, self.ids.device)[:, None] + torch.arange(count, device=self.ids.device)
        ids = self.ids.gather(1, places + self.reader.k)
        targets = None if self.targets is None else self.targets.gather(1, places)
        returned = [min(max(0, self.first - padding), count) for padding in self.padding]
        return Chunk([*range(len(ids))], [*self.segments], returned, ids, targets, None, count, 0, False)

    def end(self, state: HMTState) -> HMTState:
        """Return `state` with the tail and the lengths after this call. The memory of `state` is already updated."""
        k, length = self.reader.k, self.reader.length
        lengths = torch.tensor(self.lengths, device=self.ids.device)[:, None]
        opened = lengths % length
        column = torch.arange(k + int(opened.max()), device=self.ids.device)
        place = (lengths - opened + column).clamp(max=self.ids.shape[1] - 1)
        tail = self.ids.gather(1, place).masked_fill(column >= k + opened, 0)
        open_mask = None if self.mask is None else self.mask[:, -int(opened.max()) or self.mask.shape[1] :]
        total = tuple(length * segment + n for segment, n in zip(self.segments, self.lengths))
        return replace(state, tail=tail, open_mask=open_mask, lengths=total)

    def unpack(self, pieces: dict[int, dict[tuple, Tensor]], like: Tensor) -> Tensor:
        """Arrange logits in the order of the input, (B, T - first, V), with zeros on padding.

        Args:
            pieces: as in `Segments`.
            like: tensor (..., V) with the dtype and device of the logits.
        """
        parts, tokens = [], self.tokens - self.first
        for row, padding in enumerate(self.padding):
            found = [pieces[row][place] for place in sorted(pieces[row])]
            before = max(0, padding - self.first)
            after = tokens - before - sum(map(len, found))
            parts += [like.new_zeros(before, like.shape[-1]), *found, like.new_zeros(after, like.shape[-1])]
        return torch.cat(parts).view(len(self.padding), tokens, like.shape[-1])


__all__ = ["Chunk", "PackedSegments", "align", "join_chunks"]
