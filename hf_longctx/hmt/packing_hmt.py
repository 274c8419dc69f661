"""Split rows of unequal length into segments. The result of a row does not depend on the other rows.

Each row has its own segment boundaries. Rows are padded on the right, because causality hides this padding in every
backbone (attention, recurrence or convolution), even without an attention mask. `PackedRows` contains all tokens of a
call. A `Part` contains one segment of each row that is at the same position in its segment.

A token has one coordinate: its index in the segment. Sensory tokens have the indices -k to -1.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .reader_hmt import Reader
from .retriever_hmt import long_tensor
from .state_hmt import HMTState


class Part(NamedTuple):
    """One segment of each row. Segments may be incomplete. All B rows are at the same position in their segments.

    rows: indices of the rows in the batch.
    segments: for each row, the index of the segment in the sequence.
    returned_from: for each row, the first token whose logits are returned.
    positions: for each row, the position id of token 0 in single-pass mode.
    ids: ids of the tokens -k to `stop` - 1, (B, k + stop).
    targets: target ids of the tokens 0 to `stop` - 1, (B, stop). Targets of -100 are not scored. None without labels.
    mask: (B, stop), bool, False on padding. Used only in paper mode. None without padding.
    stop: number of tokens of the segment so far.
    read: number of tokens of the segment that earlier calls have read.
    ends_bptt: whether backpropagation is truncated at the end of the segment.
    """

    rows: list[int]
    segments: list[int]
    returned_from: list[int]
    positions: list[int]
    ids: Tensor
    targets: Tensor | None
    mask: Tensor | None
    stop: int
    read: int
    ends_bptt: bool

    @property
    def needed_from(self) -> int:
        """The first token whose logits are computed."""
        return min(self.returned_from) if self.targets is None else self.read


def join_parts(parts: list[Part]) -> Part:
    """Truncate parts to the length of the shortest one, and concatenate them along the batch dimension."""
    if len(parts) == 1:
        return parts[0]
    stop = min(part.stop for part in parts)
    joined: dict[str, Any] = {"stop": stop, "read": min(part.read for part in parts)}
    for name, value in parts[0]._asdict().items():
        values = [getattr(part, name) for part in parts]
        if isinstance(value, list):
            joined[name] = [x for of_part in values for x in of_part]
        elif isinstance(value, Tensor):
            joined[name] = torch.cat([x[:, : x.shape[1] - part.stop + stop] for x, part in zip(values, parts)])
    return parts[0]._replace(**joined)


class PackedRows:
    """The tokens of a call, preceded by the sensory tokens and the open segment of each row.

    Args:
        state: the state before the call.
        input_ids, mask: as in `HMTWrapper.forward`. The mask is bool, or None without padding.

    Attributes:
        ids: token ids, (B, k + W), left-aligned. Each row contains k sensory tokens, the tokens of the open segment
            and the tokens of this call. In paper mode, padding stays in place.
        mask, targets: as in `Part`, (B, W).
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
        logits_to_keep: int | Tensor = 0,
        bptt_segments: int | None = None,
    ):
        self.reader = reader
        self.logits_to_keep = logits_to_keep
        self.bptt_segments = bptt_segments
        self.offset = reader.n_prefix + reader.k  # position id of token 0, except in the first segment
        rows, self.tokens = input_ids.shape
        self.returned_from = 0  # the first position of the call whose logits are returned
        if not isinstance(logits_to_keep, Tensor) and logits_to_keep:
            self.returned_from = max(0, self.tokens - logits_to_keep)
        self.segments, self.opened = zip(*(divmod(n, reader.length) for n in state.lengths))
        self.lengths = [opened + self.tokens for opened in self.opened]
        self.padding = [0] * rows
        self.ids = torch.cat([state.tail, input_ids], 1)
        self.before = state.tail.shape[1]  # number of columns before the tokens of this call
        self.mask = self.targets = self.order = None
        if not reader.single_pass:
            if mask is not None or state.open_mask is not None:
                there = [torch.ones_like(x, dtype=torch.bool) for x in (state.open_ids, input_ids)]
                given = (state.open_mask, mask)
                self.mask = torch.cat([x if own is None else own for own, x in zip(given, there)], 1)
        elif mask is not None or min(self.opened) < self.before - reader.k:
            if mask is not None:
                self.lengths = [opened + n for opened, n in zip(self.opened, mask.sum(1).tolist())]
                self.padding = mask.long().argmax(1).tolist()
            self.left_align(torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask)

    def left_align(self, mask: Tensor) -> None:
        """Left-align the tokens of each row. `mask`: (B, T), bool, False on padding of this call."""
        place = torch.arange(self.before, device=mask.device)
        of_state = place < self.reader.k + long_tensor(self.opened, mask.device)[:, None]
        there = torch.cat([of_state, mask], 1)
        order = (~there).to(torch.uint8).argsort(dim=1, stable=True)
        self.order = order[:, : self.reader.k + max(self.lengths)]
        self.there = there.gather(1, self.order)
        self.ids = self.aligned(self.ids, 0)

    def aligned(self, x: Tensor, fill: int) -> Tensor:
        """Align columns (B, before + T) like the ids. Padding becomes `fill`."""
        return x if self.order is None else x.gather(1, self.order).masked_fill(~self.there, fill)

    def add_targets(self, labels: Tensor, loss_scope: str, score_from: int | None) -> None:
        """Set `targets`, `n_labelled` and `n_scored`. For the arguments, see `HMTWrapper.forward`."""
        labels = self.aligned(F.pad(labels, (self.before, 0), value=-100), -100)
        targets = F.pad(labels[:, self.reader.k + 1 :], (0, 1), value=-100)
        place = torch.arange(targets.shape[1], device=targets.device)
        targets = targets.masked_fill(place < long_tensor(self.opened, targets.device)[:, None], -100)
        self.n_labelled = (targets != -100).sum()
        if loss_scope == "last":
            to_the_end = long_tensor(self.lengths, targets.device)[:, None] - place
            targets = targets.masked_fill(to_the_end > self.reader.length + 1, -100)
        if score_from is not None:
            targets = targets.masked_fill(place % self.reader.length < score_from, -100)
        self.n_scored = (targets != -100).sum()
        self.targets = targets

    def parts(self) -> list[list[Part]]:
        """Split the rows at segment boundaries. List n contains the n-th segment of each row."""
        length, k, bptt = self.reader.length, self.reader.k, self.bptt_segments
        returned_from = [
            opened + max(0, self.returned_from - padding) for opened, padding in zip(self.opened, self.padding)
        ]
        parts: list[list[Part]] = []
        for n, begin in enumerate(range(0, max(self.lengths), length)):
            groups: dict[tuple, list[int]] = {}
            for row, (tokens, opened) in enumerate(zip(self.lengths, self.opened)):
                segment = self.segments[row] + n
                stop = min(max(tokens - begin, 0), length)
                ends_bptt = bptt is not None and (segment + 1) % bptt == 0
                groups.setdefault((segment > 0, stop, 0 if n else opened, ends_bptt), []).append(row)
            parts.append([])
            for (_, stop, read, ends_bptt), rows in groups.items():
                widths = (self.ids, k + stop), (self.targets, stop), (self.mask, stop)
                tensors: list[Any] = [None if x is None else x[:, begin : begin + width] for x, width in widths]
                if len(groups) > 1:
                    tensors = [None if x is None else x[rows] for x in tensors]
                segments = [self.segments[row] + n for row in rows]
                returned = [min(max(returned_from[row] - begin, 0), stop) for row in rows]
                positions = [self.offset * (segment > 0) for segment in segments]
                parts[-1].append(Part(rows, segments, returned, positions, *tensors, stop, read, ends_bptt))
        return parts

    def new_tokens(self) -> Part:
        """Return a part that begins at each row's first new token. All rows must have equally many new tokens."""
        count = self.lengths[0] - self.opened[0]
        ids = window(self.ids, self.opened, self.reader.k + count)
        targets = None if self.targets is None else window(self.targets, self.opened, count)
        returned = [min(max(0, self.returned_from - padding), count) for padding in self.padding]
        positions = [opened + self.offset * (segment > 0) for opened, segment in zip(self.opened, self.segments)]
        rows = [*range(len(ids))]
        return Part(rows, [*self.segments], returned, positions, ids, targets, None, count, 0, False)

    def end(self, state: HMTState) -> HMTState:
        """Return `state` with the tail and the lengths after this call. The memory of `state` is already updated."""
        k, length = self.reader.k, self.reader.length
        opened = [n % length for n in self.lengths]
        longest = max(opened)
        tail = window(self.ids, [n - m for n, m in zip(self.lengths, opened)], k + longest).clone()
        if min(opened) < longest:
            column = torch.arange(k + longest, device=tail.device)
            tail = tail.masked_fill(column >= k + long_tensor(opened, tail.device)[:, None], 0)
        open_mask = None if self.mask is None else self.mask[:, -longest or self.mask.shape[1] :]
        lengths = tuple(length * segment + n for segment, n in zip(self.segments, self.lengths))
        return replace(state, tail=tail, open_mask=open_mask, lengths=lengths)

    def unpack(self, logits: dict[int, dict[tuple, Tensor]], like: Tensor) -> Tensor:
        """Return the logits (see `Call`) of `logits_to_keep` in the order of the input, (B, n, V), with 0 on padding.

        `like` is a tensor (..., V) with the dtype and device of the logits.
        """
        tokens = self.tokens - self.returned_from
        pieces = []
        for row, padding in enumerate(self.padding):
            found = [logits[row][place] for place in sorted(logits[row])]
            before = max(0, padding - self.returned_from)
            after = tokens - before - sum(map(len, found))
            pieces += [like.new_zeros(before, like.shape[-1])] if before else []
            pieces += found
            pieces += [like.new_zeros(after, like.shape[-1])] if after else []
        packed = torch.cat(pieces).view(len(self.padding), tokens, like.shape[-1])
        return packed[:, self.logits_to_keep.to(packed.device)] if isinstance(self.logits_to_keep, Tensor) else packed


def window(x: Tensor, starts: Sequence[int], width: int) -> Tensor:
    """Return x[row, start : start + width] of each row, (B, width). Columns after the end repeat the last one."""
    if min(starts) == max(starts):
        return x[:, starts[0] : starts[0] + width]
    place = long_tensor(starts, x.device)[:, None] + torch.arange(width, device=x.device)
    return x.gather(1, place.clamp(max=x.shape[1] - 1))
