"""A cache that stores only the keys inside the windows of each head."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .groups import Extent, HeadGroup, LayerWindows
from .masks import CallMask
from .ragged import MapsRows, OrderedStore, RingStore


class NewKeys:
    """The new keys of a call. A cache returns this object in place of keys.

    layer: the layer that stores them.
    keys: (B, Hkv, T, D).
    first: slot of the first new key. In a static cache with cached tokens, a tensor.
    stored: whether an attention function has stored them.
    """

    def __init__(self, layer: Any, keys: Tensor, first: Any):
        self.layer, self.keys, self.first = layer, keys, first
        self.stored = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the new keys. kvpress wraps all attention functions, and compares it with that of the queries."""
        return self.keys.shape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__torch_function__()

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise an error in all functions of PyTorch."""
        raise NotImplementedError(
            "a cache of HeadWindows requires a model to which the windows are applied, and whose attention passes the "
            "cached keys to transformers' AttentionInterface unchanged. Call windows.apply(model)."
        )


class ReadKeys(NamedTuple):
    """The keys that the queries of a call may attend to.

    keys, values: (B, h, n, D).
    slots: slots of the keys, (n,) or (B, n); -1: no token. None: the mask of the model, if any, is sufficient.
    ordered: whether key i has slot i.
    new_last: whether the keys of the call come last.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor | None
    ordered: bool
    new_last: bool = True


class Tokens(NamedTuple):
    """Tokens that are not stored yet.

    keys, values: (B, h, n, D).
    indices: index of each token in its sequence, (B, n); -1 for padding.
    """

    keys: Tensor
    values: Tensor
    indices: Tensor

    def first(self, n: int) -> "Tokens":
        return Tokens(self.keys[:, :, :n], self.values[:, :, :n], self.indices[:, :n])


class WindowLayer(MapsRows, DynamicLayer):
    """One layer of a cache of `HeadWindows`.

    `update` only counts the new tokens. The attention function appends them, because its mask tells which tokens are
    padding. After `activate_past_recording`, new tokens stay in a tail until the next `crop`.

    Args:
        windows: windows of the layer.
        checker: list that all layers of a cache share. It gets the layer that checks masks.

    Attributes:
        exact_block: number of tokens that may be read in one pass with the logits of one token per pass. All.
    """

    exact_block = math.inf

    def __init__(self, windows: LayerWindows, checker: list["WindowLayer"]):
        super().__init__()
        self.windows, self.checker = windows, checker
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self.seen = 0  # slots
        self.ordered: dict[HeadGroup, OrderedStore] = {}
        self.rings: dict[HeadGroup, RingStore] = {}
        self.tails: dict[HeadGroup, Tokens] = {}
        self.cached: Tensor | None = None  # see `CallMask.check_cached`

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        if self.seen and torch.is_grad_enabled() and key_states.requires_grad:
            raise NotImplementedError(
                "a cache of HeadWindows does not propagate gradients to earlier calls. Use torch.no_grad(), or train "
                "without a cache: use_cache=False."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.seen
        self.seen += key_states.shape[2]
        return NewKeys(self, key_states, first), value_states

    def append(
        self, group: HeadGroup, sliding_window: int | None, keys: Tensor, values: Tensor, mask: CallMask
    ) -> ReadKeys:
        """Store the new tokens of heads that keep all keys of the layer's own attention, (B, h, T, D).

        Return the keys that the queries of these tokens may attend to.
        """
        store = self.ordered.get(group)
        if store is None:
            store = self.ordered[group] = OrderedStore(sliding_window, keys, values)
        self._check_complete(store.length + keys.shape[2], mask)
        first_call = store.length == 0  # its keys may require gradients
        read = store.append(keys, values, keep_all=self.record_past)
        return ReadKeys(*((keys, values) if first_call else read), None, True)

    def append_to_ring(
        self, group: HeadGroup, extent: Extent, keys: Tensor, values: Tensor, mask: CallMask
    ) -> ReadKeys:
        """Store the new tokens of heads with a window, (B, h, T, D). Return the keys that they may attend to."""
        tokens, before = keys.shape[2], self.seen - keys.shape[2]
        store = self.rings.get(group)
        if store is None:
            store = self.rings[group] = RingStore(extent.sinks, extent.window, keys, values)
        tail = self.tails[group].keys.shape[2] if group in self.tails else 0
        self._check_complete(store.length + tail + tokens, mask)
        in_place = tokens == 1 and before and not self.record_past and group not in self.tails
        if in_place and store.slots is None and not mask.indexed:
            store.append(keys, values)
            return ReadKeys(*store.stored(), None if mask.mask is None else store.stored_slots(), False)

        slots = torch.arange(self.seen, device=keys.device)
        if not self.record_past and group in self.tails:
            self._write(store, self.tails.pop(group))
        new = Tokens(keys, values, self._indices(group, slots[before:], mask))
        if group in self.tails:
            new = Tokens(*(torch.cat(pair, dim) for pair, dim in zip(zip(self.tails[group], new), (2, 2, 1))))
        if in_place:
            self._write(store, new)
            return ReadKeys(*store.stored(), store.stored_slots(), False)

        read, read_slots = (new.keys, new.values), slots[store.length :]
        ordered = store.slots is None and store.length <= store.limit
        if store.length:
            old_slots = store.stored_slots()
            old_keys, old_values = store.stored()
            read = (torch.cat([old_keys, new.keys], 2), torch.cat([old_values, new.values], 2))
            read_slots = torch.cat([old_slots, read_slots.expand(*old_slots.shape[:-1], -1)], -1)
        if self.record_past:
            self.tails[group] = new
        else:
            self._write(store, new)
        return ReadKeys(*read, read_slots, ordered)

    def _check_complete(self, length: int, mask: CallMask) -> None:
        """Raise an error unless a store will contain all tokens that the layer and the mask have seen."""
        seen = self.seen if mask.mask is None else mask.mask.shape[-1]
        if not length == seen == self.seen:
            raise ValueError(
                f"`cache` must have stored all {seen} tokens, got {length}. An earlier call has failed, or the model "
                "computes attention more than once in a layer. Create a new cache, or leave the cache out."
            )

    def _indices(self, group: HeadGroup, slots: Tensor, mask: CallMask) -> Tensor:
        """Return the index of each new token in its sequence, (B, T); -1 for padding."""
        store = self.rings[group]
        if mask.indexed:
            store.scatter()
            indices = mask.new_indices(slots)
        else:
            indices = slots.expand(store.keys.shape[0], -1)
        self.checker[:] = self.checker or [self]
        if self.checker[0] is self:  # one layer is enough, because this waits for a GPU
            self.cached = mask.check_cached(self.cached, self.seen - len(slots))
        return indices

    @staticmethod
    def _write(store: RingStore, tokens: Tokens) -> None:
        if store.slots is None:
            store.append(tokens.keys, tokens.values)
        else:
            store.append_scattered(*tokens)

    def get_seq_length(self) -> int:
        return self.seen

    def activate_past_recording(self) -> None:
        """Let the next `crop` remove all tokens added until then. It also drops keys outside of the windows."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. The argument is their number, negated.

        Raises:
            ValueError: keys that would be needed again have been dropped.
        """
        self.check_crop(tokens_to_remove)
        removed = -int(tokens_to_remove)
        self.seen -= removed
        for store, tokens in self._removed_from_stores(removed):
            store.remove_last(tokens)
        for group, tail in self.tails.items():
            if stays := max(0, tail.keys.shape[2] - removed):
                self._write(self.rings[group], tail.first(stays))
        self.tails = {}
        self.cached = None if self.cached is None else self.cached[:, : self.seen]

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise the errors of `crop`, and remove nothing."""
        removed = -int(tokens_to_remove)
        if removed < 0:
            raise ValueError(f"`tokens_to_remove` must be at most 0, got {-removed}. crop(-3) removes three tokens.")
        if removed > self.seen:
            raise ValueError(f"`tokens_to_remove` must be at least {-self.seen}, got {-removed}.")
        if not all(store.can_remove_last(tokens) for store, tokens in self._removed_from_stores(removed)):
            raise ValueError(
                f"crop cannot remove {removed} tokens, because keys that are needed again have been dropped. Call "
                "cache.activate_past_recording() before you add tokens that may be removed."
            )

    def _removed_from_stores(self, removed: int) -> list[tuple[Any, int]]:
        """Return each store, and how many of the last `removed` tokens it contains. The tails contain the others."""
        tails = {group: tail.keys.shape[2] for group, tail in self.tails.items()}
        rings = [(store, max(0, removed - tails.get(group, 0))) for group, store in self.rings.items()]
        return [(store, removed) for store in self.ordered.values()] + rings

    def stores(self) -> list[OrderedStore | RingStore]:
        """Return the stores of all groups."""
        return [*self.ordered.values(), *self.rings.values()]

    def reset(self) -> None:
        self._clear()

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        for store in self.stores():
            store.map_rows(function)
        self.tails = {group: Tokens(*map(function, tail)) for group, tail in self.tails.items()}
        self.cached = None if self.cached is None else function(self.cached)


class WindowCache(Cache):
    """A cache of `WindowLayer`s, of which `crop` changes all or none."""

    layers: list[WindowLayer]

    def __init__(self, windows: Iterable[LayerWindows]):
        checker: list[WindowLayer] = []
        super().__init__(layers=[WindowLayer(layer, checker) for layer in windows])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        check_layers(self, layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, see `WindowLayer.crop`."""
        # an assistant may leave out the last layers
        layers = [layer for layer in self.layers if layer.is_initialized] or self.layers
        for layer in layers:
            layer.check_crop(tokens_to_remove)
        for layer in layers:
            layer.crop(tokens_to_remove)


def check_layers(cache: Cache, layer_idx: int) -> None:
    """Raise an error if a cache does not have this layer."""
    if layer_idx >= len(cache.layers):
        raise ValueError(
            f"`cache` must have a layer for each layer of the model, got {len(cache.layers)} layers. Create one with the "
            "cache() of the windows that were applied last."
        )
