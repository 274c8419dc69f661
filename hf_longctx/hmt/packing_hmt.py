"""Rows of unequal length: each row has its own segment boundaries, and gives the result of that row alone.

The tokens of a call are left-aligned in each row, after its sensory tokens and its open segment, with padding on the
right. There, causality hides padding from every backbone (attention, recurrence or convolution), even without an
attention mask. `PackedSegments` holds all tokens of a call, and `Chunk` the tokens of the n-th segment of each row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .state_hmt import HMTState


def align(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Left-align the entries of each row where `mask` (B, n) is True, and drop columns that become empty.

    Returns:
        The moved mask and tensors, (B, n'), zero where the mask is False.
    """
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]
    mask = mask.gather(1, order)
    return mask, *(x.gather(1, order).masked_fill(~mask, 0) for x in tensors)


class Chunk(NamedTuple):
    """The n-th segment that some rows read in a call. Lists have an entry for each of these B rows.

    rows: indices of the rows in the batch.
    ids: the k tokens before the segment and its tokens so far, (B, k + l), left-aligned.
    targets: target token ids, (B, l), -100 where not scored; None without labels.
    mask: False on padding that the paper mode reads, (B, l), bool; None without padding.
    segments: index of the segment in the row's sequence.
    counts: number of tokens of the segment so far.
    read: number of these tokens that earlier calls have read.
    returned: the first token whose logits the call returns.
    """

    n: int
    rows: list[int]
    ids: Tensor
    targets: Tensor | None
    mask: Tensor | None
    segments: list[int]
    counts: list[int]
    read: list[int]
    returned: list[int]

    @property
    def first(self) -> int:
        """The first token whose logits are computed, because a row returns or scores them."""
        return min(self.returned if self.targets is None else self.read)

    def of_rows(self, rows: list[int]) -> "Chunk":
        """Return a chunk with some of the rows."""
        values: list[Any] = list(self)
        for i, x in enumerate(values):
            if isinstance(x, Tensor):
                values[i] = x[rows]
            elif isinstance(x, list):
                values[i] = [x[row] for row in rows]
        return Chunk(*values)

    def of_new_tokens(self, sensory_tokens: int) -> "Chunk":
        """Return a chunk of the tokens that earlier calls have not read; each row must have equally many."""
        tokens = torch.arange(self.counts[0] - self.read[0], device=self.ids.device)
        places = torch.tensor(self.read, device=self.ids.device)[:, None] + tokens
        return self._replace(
            ids=self.ids.gather(1, places + sensory_tokens),
            targets=None if self.targets is None else self.targets.gather(1, places),
            read=[0] * len(self.read),
            returned=[max(0, token - read) for token, read in zip(self.returned, self.read)],
        )


@dataclass
class PackedSegments:
    """The tokens of a call, after the sensory tokens and the open segment of each row.

    ids: (B, k + W); left-aligned, except for padding that the paper mode reads.
    targets, mask: as in `Chunk`, (B, W).
    begun: number of tokens before each row's open segment.
    opened: number of tokens of each row's open segment that earlier calls have read.
    lengths: number of tokens of each row, from the start of its open segment.
    padding: columns of padding before the new tokens.
    """

    ids: Tensor
    targets: Tensor | None
    mask: Tensor | None
    segment_length: int
    sensory_tokens: int
    begun: list[int]
    opened: list[int]
    lengths: list[int]
    padding: list[int]

    @classmethod
    def pack(cls, state: HMTState, input_ids: Tensor, mask: Tensor | None, targets: Tensor | None) -> "PackedSegments":
        """Pack the tokens of a call, (B, T). `mask` is None without padding."""
        length, k = state.signature["segment_length"], state.signature["sensory_tokens"]
        rows, tokens = input_ids.shape
        opened = [n % length for n in state.lengths]
        new, padding = [tokens] * rows, [0] * rows
        ids, before = torch.cat([state.tail, input_ids], 1), state.tail.shape[1]
        if targets is not None:
            targets = F.pad(targets, (before, 0), value=-100)
        if state.open_mask is not None:
            mask = torch.cat(
                [state.open_mask, torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask], 1
            )
        else:
            if mask is not None:
                new, padding = mask.sum(1).tolist(), mask.long().argmax(1).tolist()
            if mask is not None or min(opened) < before - k:
                there = torch.arange(before, device=ids.device) < k + torch.tensor(opened, device=ids.device)[:, None]
                there = torch.cat([there, torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask], 1)
                aligned, ids = align(there, ids)
                targets = None if targets is None else align(there, targets)[1].masked_fill(~aligned, -100)
            mask = None
        targets = None if targets is None else targets[:, k:]
        begun = [n - m for n, m in zip(state.lengths, opened)]
        return cls(ids, targets, mask, length, k, begun, opened, [m + n for m, n in zip(opened, new)], padding)

    def chunks(self, first: int) -> list[Chunk]:
        """Split the rows at their segment boundaries. `first` is the first position of the call with logits."""
        starts = [m + max(0, first - padding) for m, padding in zip(self.opened, self.padding)]
        chunks, length = [], self.segment_length
        for n, a in enumerate(range(0, max(self.lengths), length)):
            counts = [min(max(tokens - a, 0), length) for tokens in self.lengths]
            part = slice(a, a + length)
            chunks.append(
                Chunk(
                    n,
                    list(range(len(counts))),
                    self.ids[:, a : a + self.sensory_tokens + length],
                    None if self.targets is None else self.targets[:, part],
                    None if self.mask is None else self.mask[:, part],
                    [begun // length + n for begun in self.begun],
                    counts,
                    self.opened if n == 0 else [0] * len(counts),
                    [min(max(start - a, 0), count) for start, count in zip(starts, counts)],
                )
            )
        return chunks

    def end(self) -> dict[str, Any]:
        """Return the fields of the state after the call that depend on tokens only."""
        k, lengths = self.sensory_tokens, torch.tensor(self.lengths, device=self.ids.device)[:, None]
        opened = lengths % self.segment_length
        column = torch.arange(k + int(opened.max()), device=self.ids.device)
        place = (lengths - opened + column).clamp(max=self.ids.shape[1] - 1)
        tail = self.ids.gather(1, place).masked_fill(column >= k + opened, 0)
        open_mask = None if self.mask is None else self.mask[:, -int(opened.max()) or self.mask.shape[1] :]
        lengths = tuple(begun + n for begun, n in zip(self.begun, self.lengths))
        return {"tail": tail, "open_mask": open_mask, "lengths": lengths}

    def unpack(self, pieces: list[list[Tensor]], first: int, tokens: int, like: Tensor) -> Tensor:
        """Arrange logits by the positions of the call, (B, T - first, V), with zeros on padding.

        Args:
            pieces: for each row, a list of logits (n, V), in order.
            first: the first position of the call with logits.
            tokens: T.
            like: any logits, (..., V).
        """
        parts = []
        for row, padding in zip(pieces, self.padding):
            before = max(0, padding - first)
            after = tokens - first - before - sum(map(len, row))
            parts += [like.new_zeros(before, like.shape[1]), *row, like.new_zeros(after, like.shape[1])]
        return torch.cat(parts).view(len(pieces), tokens - first, like.shape[1])


__all__ = ["Chunk", "PackedSegments", "align"]
