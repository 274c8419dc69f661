"""A cache of head windows whose tensors have constant shapes, so that a decoding step compiles to one graph."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer

from .cache import NewKeys, ReadKeys, check_layers
from .groups import Extent, HeadGroup, LayerWindows
from .masks import CallMask
from .ragged import FixedStore, MapsRows, write_scattered


class StaticWindowLayer(MapsRows, StaticLayer):
    """One layer of a cache of `HeadWindows` with `max_cache_len`.

    Heads that keep all keys have `max_cache_len` entries. Other heads have as many as their window and the sinks.

    Args:
        windows: windows of the layer.
        max_cache_len: number of tokens that the cache can store.
        checker: list that all layers of a cache share. It gets the layer that checks masks.
    """

    is_croppable = False

    def __init__(self, windows: LayerWindows, max_cache_len: int, checker: list["StaticWindowLayer"]):
        super().__init__(max_cache_len)
        self.windows, self.checker = windows, checker
        self.is_empty = True
        self.full: dict[HeadGroup, StaticLayer] = {}
        self.rings: dict[HeadGroup, FixedStore] = {}
        self.cached: Tensor | None = None  # see `CallMask.check_cached`

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, key_states.shape[0]
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.cumulative_length)
        self.full, self.rings, self.cached = {}, {}, None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        if not self.is_initialized or (self.is_empty and self.batch_size != key_states.shape[0]):
            self.lazy_initialization(key_states, value_states)
        first = 0 if self.is_empty else self.cumulative_length.clone()
        self.is_empty = False
        self.cumulative_length.add_(key_states.shape[2])
        return NewKeys(self, key_states, first), value_states

    def append(
        self, group: HeadGroup, sliding_window: int | None, keys: Tensor, values: Tensor, mask: CallMask
    ) -> ReadKeys:
        """Store the new tokens of heads that keep all keys of the layer's own attention, (B, h, T, D).

        Return the keys that the queries of these tokens may attend to.
        """
        if sliding_window is not None and sliding_window < self.max_cache_len:
            slots = mask.first + torch.arange(keys.shape[2], device=keys.device)
            return self._write(group, Extent(sliding_window, 0), keys, values, slots.expand(len(keys), -1), mask)
        if group not in self.full:
            self.full[group] = StaticLayer(self.max_cache_len)
        stored = self.full[group].update(keys.detach(), values.detach())
        return ReadKeys(*(stored if mask.mask is not None else (keys, values)), None, True)

    def append_to_ring(
        self, group: HeadGroup, extent: Extent, keys: Tensor, values: Tensor, mask: CallMask
    ) -> ReadKeys:
        """Store the new tokens of heads with a window, (B, h, T, D). Return the keys that they may attend to."""
        if sum(extent) >= self.max_cache_len:  # nothing is ever dropped
            return self.append(group, None, keys, values, mask)
        slots = mask.first + torch.arange(keys.shape[2], device=keys.device)
        indices = mask.new_indices(slots) if mask.indexed else slots.expand(len(keys), -1)
        if not torch.compiler.is_compiling():
            self.checker[:] = self.checker or [self]
            if self.checker[0] is self:  # one layer is enough, because this waits for a GPU
                # compiled calls leave no record
                known = slots.new_zeros(len(keys), 0) if self.cached is None else self.cached
                self.cached = mask.check_cached(known, int(mask.first))
        return self._write(group, extent, keys, values, indices, mask)

    def _write(
        self, group: HeadGroup, extent: Extent, keys: Tensor, values: Tensor, indices: Tensor, mask: CallMask
    ) -> ReadKeys:
        slots = mask.first + torch.arange(keys.shape[2], device=keys.device)
        if group not in self.rings:
            self.rings[group] = FixedStore(extent.sinks, extent.window, keys, values)
        store = self.rings[group]
        if keys.shape[2] == 1:
            write_scattered(store, keys, values, indices, slots)
            return ReadKeys(*store.stored(), False)
        read = ReadKeys(keys, values, slots, True)
        if isinstance(mask.first, Tensor):  # something is cached
            old_keys, old_values, old_slots = store.stored()
            old_slots = torch.cat([old_slots, slots.expand(len(keys), -1)], 1)
            read = ReadKeys(torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2), old_slots, False)
        write_scattered(store, keys, values, indices, slots)
        return read

    def reset(self) -> None:
        """Empty the cache. Its tensors stay where they are, unless the next call has another batch size."""
        self.is_empty = True
        self.cumulative_length.zero_()
        self.cached = None
        for store in self.stores():
            store.reset()

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "a cache of HeadWindows with max_cache_len cannot remove tokens. Leave max_cache_len out: windows.cache()."
        )

    def stores(self) -> list[StaticLayer | FixedStore]:
        """Return the stores of all groups."""
        return [*self.full.values(), *self.rings.values()]

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        for layer in self.full.values():
            for name in ("keys", "values"):
                setattr(layer, name, function(getattr(layer, name)))
        for store in self.rings.values():
            store.map_rows(function)
        if self.is_initialized:
            self.batch_size = len(function(torch.arange(self.batch_size, device=self.device)))
            self.cached = None if self.cached is None else function(self.cached)


class StaticWindowCache(Cache):
    """A cache of `StaticWindowLayer`s."""

    layers: list[StaticWindowLayer]

    def __init__(self, windows: Iterable[LayerWindows], max_cache_len: int):
        checker: list[StaticWindowLayer] = []
        super().__init__(layers=[StaticWindowLayer(layer, max_cache_len, checker) for layer in windows])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        check_layers(self, layer_idx)
        layer = self.layers[0]
        if layer_idx == 0 and not torch.compiler.is_compiling():
            tokens = int(layer.get_seq_length()) + key_states.shape[2]
            if tokens > layer.max_cache_len:
                raise ValueError(
                    f"`max_cache_len` must be at least {tokens} to store all tokens, got {layer.max_cache_len}. Create a "
                    "larger cache, or one that grows: windows.cache()."
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
