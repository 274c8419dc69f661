"""Rows of unequal length: each row has segment borders of its own, and is read as if it stood alone.

The tokens of a call are moved to the left of each row, behind those of the row's open segment, and padding to the
right. There a causal backbone never sees it, with or without an attention mask, be it attention, a recurrence or a
convolution. `PackedSegments` holds the tokens, `Chunk` those of the n-th segment that each row reads in the call.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .state_hmt import HMTState


def align(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Move what `mask` (B, n) marks to the left of each row, in order, and cut off the columns without any.

    Returns:
        the moved mask and tensors, (B, n', ...), zero where the mask is False.
    """
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]
    mask, moved = mask.gather(1, order), []
    for x in tensors:
        over = (..., *[None] * (x.dim() - 2))
        moved.append(x.gather(1, order[over].expand(-1, -1, *x.shape[2:])).masked_fill(~mask[over], 0))
    return mask, *moved


class Chunk(NamedTuple):
    """The n-th segment that each row reads in a call. Lists have an entry for each of the B rows.

    ids, mask, targets: (B, l); tokens stand at the left. targets is None without labels.
    segments: index of the segment in the row's text.
    counts, read: its tokens so far; how many of them earlier calls read.
    returned: the first token whose logits the call returns.
    first: the first token whose logits are computed, because they are returned or scored.
    before: (B, L'), the segment before; (B, 0) for the first of a call.
    """

    n: int
    ids: Tensor
    mask: Tensor
    targets: Tensor | None
    segments: list[int]
    counts: list[int]
    read: list[int]
    returned: list[int]
    first: list[int]
    before: Tensor

    def of_rows(self, rows: list[int]) -> "Chunk":
        """Return the chunk of some rows."""
        values: list[Any] = list(self)
        for i, x in enumerate(values):
            if isinstance(x, Tensor):
                values[i] = x[rows]
            elif isinstance(x, list):
                values[i] = [x[row] for row in rows]
        return Chunk(*values)

    @property
    def new(self) -> Tensor:
        """The places in `ids` of the tokens that no earlier call read, (B, n), in rows with equally many."""
        tokens = torch.arange(self.counts[0] - self.read[0], device=self.ids.device)
        return torch.tensor(self.read, device=self.ids.device)[:, None] + tokens


@dataclass
class PackedSegments:
    """The tokens of a call behind those of the open segments.

    ids, mask, targets: (B, W); the tokens of each row stand at the left, but for the paper mode, which reads padding
        where it stands.
    begun: tokens of each row before its open segment.
    opened, lengths: tokens of each row's open segment that earlier calls read, and all its tokens here.
    padding: columns of padding that stood before the new tokens.
    """

    ids: Tensor
    mask: Tensor
    targets: Tensor | None
    begun: list[int]
    opened: list[int]
    lengths: list[int]
    padding: list[int]

    @classmethod
    def pack(
        cls, state: HMTState, input_ids: Tensor, mask: Tensor | None, targets: Tensor | None, segment_length: int
    ) -> "PackedSegments":
        """Pack a call's tokens, (B, T); their mask is None where all columns are tokens."""
        batch, tokens = input_ids.shape
        opened = [n % segment_length for n in state.lengths]
        begun = [n - m for n, m in zip(state.lengths, opened)]
        new, padding = [tokens] * batch, [0] * batch
        padded = state.open_mask is not None
        if mask is not None and not padded:
            new, padding = mask.sum(1).tolist(), mask.long().argmax(1).tolist()
        mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
        ids, opened_ids = torch.cat([state.open_ids, input_ids], 1), state.open_ids
        if state.open_mask is None:
            columns = torch.arange(opened_ids.shape[1], device=mask.device)
            mask = torch.cat([columns < torch.tensor(opened, device=mask.device)[:, None], mask], 1)
        else:
            mask = torch.cat([state.open_mask, mask], 1)
        if targets is not None:
            targets = torch.cat([torch.full_like(opened_ids, -100), targets], 1)
        lengths = [m + n for m, n in zip(opened, new)]
        if min(lengths) < ids.shape[1] and not padded:
            aligned, ids = align(mask, ids)
            targets = None if targets is None else align(mask, targets)[1].masked_fill(~aligned, -100)
            mask = aligned
        return cls(ids, mask, targets, begun, opened, lengths, padding)

    def chunks(self, segment_length: int, first: int) -> list[Chunk]:
        """Cut the rows at their borders; `first` is the first position of the call whose logits are returned."""
        starts = [m + max(0, first - padding) for m, padding in zip(self.opened, self.padding)]
        chunks = []
        for n, a in enumerate(range(0, max(self.lengths), segment_length)):
            counts = [min(max(length - a, 0), segment_length) for length in self.lengths]
            part, read = slice(a, a + segment_length), self.opened if n == 0 else [0] * len(counts)
            returned = [min(max(start - a, 0), count) for start, count in zip(starts, counts)]
            chunks.append(
                Chunk(
                    n,
                    self.ids[:, part],
                    self.mask[:, part],
                    None if self.targets is None else self.targets[:, part],
                    [begun // segment_length + n for begun in self.begun],
                    counts,
                    read,
                    returned,
                    returned if self.targets is None else read,
                    self.ids[:, max(0, a - segment_length) : a],
                )
            )
        return chunks

    def open_segments(self, segment_length: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of each row's open segment after the call, (B, l), and their mask."""
        counts = torch.tensor([length % segment_length for length in self.lengths], device=self.ids.device)[:, None]
        starts = torch.tensor([length - length % segment_length for length in self.lengths], device=self.ids.device)
        column = torch.arange(max(length % segment_length for length in self.lengths), device=self.ids.device)
        place = (starts[:, None] + column).clamp(max=self.ids.shape[1] - 1)
        inside = column < counts
        return self.ids.gather(1, place).masked_fill(~inside, 0), self.mask.gather(1, place) & inside

    def unpack(self, pieces: list[list[Tensor]], first: int, tokens: int, like: Tensor) -> Tensor:
        """Put logits at the places of the call, (B, T - first, V), with zeros on padding.

        Args:
            pieces: for each row a list of (n, V), in order.
            first, tokens: the first position of the call that gets logits, and T.
            like: some logits, (., V).
        """
        parts = []
        for row, padding in zip(pieces, self.padding):
            before = max(0, padding - first)
            after = tokens - first - before - sum(map(len, row))
            parts += [like.new_zeros(before, like.shape[1]), *row, like.new_zeros(after, like.shape[1])]
        return torch.cat(parts).view(len(pieces), tokens - first, like.shape[1])


__all__ = ["Chunk", "PackedSegments", "align"]
