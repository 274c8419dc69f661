"""Two stores of the keys and values of a group of heads. Appending and dropping tokens does not move the others.

`OrderedStore` contains the last tokens in order. Each append writes into free memory behind them.

`RingStore` contains the first `sinks` tokens and the last `window` tokens of each sequence. The *index* of a token is
its number in the sequence. The first `sinks` tokens are in the first entries. The other entries are a ring, in which a
token replaces the token that is `window` tokens older:

    entry = index                                  if index < sinks
    entry = sinks + (index - sinks) % window       otherwise

In a batch without padding, all rows contain the same indices, and the number of tokens determines them. With padding,
the rows differ. A store is then *scattered*: `slots` contains the slot of each entry, i.e. the token's position in the
row, and padding is written to an additional last entry, which is never read.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


SPARE = 64  # tokens for which memory is allocated in advance; a sixteenth of the length is added


class OrderedStore:
    """Keys and values of the last tokens, (B, h, tokens, D), in order.

    Args:
        window: number of tokens that a query attends to, its own included. None: all.
        keys, values: tensors that determine the number of rows and heads, the widths, dtype and device.
    """

    def __init__(self, window: int | None, keys: Tensor, values: Tensor):
        self.window = window
        self.first = self.length = 0  # tokens first:length are stored
        self.keys, self.values = (x.detach()[:, :, :0].clone() for x in (keys, values))

    def append(self, keys: Tensor, values: Tensor, keep_all: bool) -> tuple[Tensor, Tensor]:
        """Append tokens, (B, h, T, D), and return the keys and values that their queries may attend to.

        keep_all: whether to drop no token, because `remove_last` may be called.
        """
        tokens = keys.shape[2]
        if self.first + self.keys.shape[2] < self.length + tokens or is_frozen(self.keys):
            self._move(tokens, keep_all)
        begin = self.length - self.first
        self.keys[:, :, begin : begin + tokens] = keys.detach()
        self.values[:, :, begin : begin + tokens] = values.detach()
        self.length += tokens
        visible = slice(0 if self.window is None else max(0, begin + 1 - self.window), begin + tokens)
        return self.keys[:, :, visible], self.values[:, :, visible]

    def _move(self, tokens: int, keep_all: bool) -> None:
        """Copy the tokens that are needed to larger memory."""
        stays = self.length - self.first
        if self.window is not None and not keep_all:
            stays = min(stays, self.window - 1)
        entries = slice(self.length - stays - self.first, self.length - self.first)
        capacity = stays + tokens + SPARE + (stays + tokens) // 16
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            new[:, :, :stays] = old[:, :, entries]
            setattr(self, name, new)
        self.first = self.length - stays

    def can_remove_last(self, tokens: int) -> bool:
        needed = self.length - tokens if self.window is None else self.window - 1
        return self.first == 0 or self.length - tokens - self.first >= needed

    def remove_last(self, tokens: int) -> None:
        self.length -= tokens

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to all tensors. Their first dimension is that of the rows."""
        self.keys, self.values = function(self.keys), function(self.values)


class RingStore:
    """Keys and values of the first and of the last tokens, (B, h, entries, D). See the module docstring.

    Args:
        sinks, window: numbers of first and of last tokens.
        keys, values: tensors that determine the number of rows and heads, the widths, dtype and device.
    """

    def __init__(self, sinks: int, window: int, keys: Tensor, values: Tensor):
        self.sinks, self.window, self.limit = sinks, window, sinks + window
        self.length = 0  # number of tokens so far, including padding
        self.longest = 0  # the largest length so far. Since then, tokens may have been removed.
        self.slots: Tensor | None = None  # (B, entries + 1); -1: the entry is empty
        self.counts: Tensor | None = None  # (B,): number of tokens so far, without padding
        self.most: Tensor | None = None  # (B,): the largest count so far
        self.keys, self.values = (x.detach()[:, :, :0].clone() for x in (keys, values))

    def stored(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, (B, h, n, D)."""
        entries = min(self.length, self.limit) if self.slots is None else self.slots.shape[1] - 1
        return self.keys[:, :, :entries], self.values[:, :, :entries]

    def stored_slots(self) -> Tensor:
        """Return the slots of the stored tokens, (n,) or (B, n); -1: the entry is empty."""
        if self.slots is not None:
            return self.slots[:, :-1]
        entries = torch.arange(min(self.length, self.limit), device=self.keys.device)
        last = self.length - 1
        newest = last - (last - entries) % self.window
        return torch.where(entries < self.sinks, entries, newest) if self.length > self.limit else entries

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens, (B, h, T, D), to rows without padding."""
        begin, end = self.length, self.length + keys.shape[2]
        self._make_room(end)
        for start, stop in ((begin, min(end, self.sinks)), (max(begin, self.sinks, end - self.window), end)):
            while start < stop:
                entry = start if start < self.sinks else self.sinks + (start - self.sinks) % self.window
                tokens = min(stop - start, self.limit - entry)
                new = slice(start - begin, start - begin + tokens)
                self.keys[:, :, entry : entry + tokens] = keys.detach()[:, :, new]
                self.values[:, :, entry : entry + tokens] = values.detach()[:, :, new]
                start += tokens
        self.length, self.longest = end, max(end, self.longest)

    def scatter(self) -> None:
        """Let the rows contain different tokens from now on."""
        if self.slots is None:
            rows, slots = self.keys.shape[0], self.stored_slots()
            self.keys, self.values = (F.pad(x, (0, 0, 0, 1)) for x in self.stored())
            self.slots = F.pad(slots.expand(rows, -1), (0, 1), value=-1)
            self.counts, self.most = slots.new_full((rows,), self.length), slots.new_full((rows,), self.longest)

    def append_scattered(self, keys: Tensor, values: Tensor, indices: Tensor) -> None:
        """Append tokens, (B, h, T, D), to rows with padding.

        indices: index of each token in its sequence, (B, T); -1 for padding.
        """
        begin, end = self.length, self.length + keys.shape[2]
        self._make_room(end)
        assert self.counts is not None and self.most is not None
        slots = torch.arange(begin, end, device=keys.device)
        write_scattered(self, keys, values, indices, slots)
        self.counts = self.counts + (indices >= 0).sum(1)
        self.most = self.most.maximum(self.counts)
        self.length = end

    def _make_room(self, length: int) -> None:
        """Allocate entries for `length` tokens, if necessary."""
        if is_frozen(self.keys):
            self.map_rows(torch.clone)
        extra = 0 if self.slots is None else 1
        needed = min(length, self.limit) + extra
        if needed > self.keys.shape[2]:
            free = min(needed + SPARE + needed // 16, self.limit + extra) - self.keys.shape[2]
            self.keys, self.values = (F.pad(x, (0, 0, 0, free)) for x in (self.keys, self.values))
            if self.slots is not None:
                self.slots = F.pad(self.slots, (0, free), value=-1)

    def can_remove_last(self, tokens: int) -> bool:
        """A full ring has one token more than the next query needs, unless it has been removed already."""
        if tokens == 0:
            return True
        if self.counts is None or self.most is None:
            return self.longest <= self.limit or self.length - tokens >= self.longest - 1
        return bool(((self.most <= self.limit) | (self.counts - tokens >= self.most - 1)).all())

    def remove_last(self, tokens: int) -> None:
        self.length -= tokens
        if self.slots is not None and self.counts is not None:
            removed = self.slots >= self.length
            self.counts = self.counts - removed.sum(1)
            self.slots = self.slots.masked_fill(removed, -1)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to all tensors. Their first dimension is that of the rows."""
        self.keys, self.values = function(self.keys), function(self.values)
        if self.slots is not None and self.counts is not None and self.most is not None:
            self.slots, self.counts, self.most = map(function, (self.slots, self.counts, self.most))


class FixedStore:
    """Keys and values of a scattered ring whose tensors have constant shapes and addresses.

    Args:
        sinks, window: numbers of first and of last tokens.
        keys, values: tensors that determine the number of rows and heads, the widths, dtype and device.
    """

    def __init__(self, sinks: int, window: int, keys: Tensor, values: Tensor):
        self.sinks, self.window = sinks, window
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], sinks + window + 1, x.shape[3]) for x in (keys.detach(), values.detach())
        )
        self.slots = torch.full((keys.shape[0], sinks + window + 1), -1, device=keys.device)
        for x in (self.keys, self.values, self.slots):
            torch._dynamo.mark_static_address(x)

    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all keys and values, (B, h, n, D), and their slots, (B, n); -1: the entry is empty."""
        return self.keys[:, :, :-1], self.values[:, :, :-1], self.slots[:, :-1]

    def reset(self) -> None:
        self.slots.fill_(-1)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to all tensors. Their first dimension is that of the rows."""
        for name in ("keys", "values", "slots"):
            setattr(self, name, function(getattr(self, name)))


def write_scattered(
    store: RingStore | FixedStore, keys: Tensor, values: Tensor, indices: Tensor, slots: Tensor
) -> None:
    """Write those of the tokens, (B, h, T, D), that stay. The others, and padding, go to the last entry.

    indices: index of each token in its sequence, (B, T); -1 for padding.
    slots: (T,).
    """
    assert store.slots is not None
    stays = (indices >= 0) & ((indices < store.sinks) | (indices > indices.amax(1, keepdim=True) - store.window))
    ring = store.sinks + (indices - store.sinks) % store.window
    entries = torch.where(indices < store.sinks, indices, ring)
    entries = torch.where(stays, entries, store.keys.shape[2] - 1)  # (B, T)
    store.slots.scatter_(1, entries, slots.expand_as(entries))
    store.slots[:, -1] = -1
    for buffer, new in ((store.keys, keys), (store.values, values)):
        buffer.scatter_(2, entries[:, None, :, None].expand_as(new), new.detach())


def is_frozen(x: Tensor) -> bool:
    """Return whether a tensor of torch.inference_mode must be copied before it is written to."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


class MapsRows:
    """The operations on the rows of a layer's stores, in terms of `_map_rows`."""

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor of the layer by a function of it. The first dimension is the rows."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda x: x.repeat_interleave(repeats, 0))
