"""A cache whose heads retain different numbers of keys: a suffix of all keys.

Heads that retain similar numbers of keys are a group and share two tensors. Attention runs once for each group, with
the model's attention function and the last columns of the attention mask. pruning.py decides what is dropped.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .attention_fox import GATE_PARTS, GATE_QUERY, MASKED, folded_width
from .backend_fox import eager_attention_forward, sdpa_without_cudnn
from .key_ranges_fox import VisibleKeys
from .state_fox import AttendingCache, AttendingLayer, DynamicShiftLayer
from .torch_internals_fox import mark_static


class HeadGroup:
    """A group of key heads whose keys and values are stored in two tensors, (B, h, capacity, D').

    heads: indices of the h key heads in the group.
    dropped: number of tokens that each of these heads has dropped.
    """

    def __init__(self, heads: list[int], dropped: list[int], like: torch.Tensor, capacity: int, queries_per_key: int):
        self.heads, self.dropped = heads, dropped
        self.keys, self.values = (like.new_zeros(like.shape[0], len(heads), capacity, like.shape[3]) for _ in range(2))
        self.key_heads = torch.tensor(heads, device=like.device)
        queries = self.key_heads[:, None] * queries_per_key + torch.arange(queries_per_key, device=like.device)
        self.query_heads = queries.flatten()
        self.first = torch.tensor(dropped, device=like.device)[:, None]  # position of the first slot, (h, 1)


def group_heads(available, needed, short):
    """Split heads into groups that retain the same number of tokens: [(tokens, heads), ...], largest first.

    A head retains at least `needed` tokens. It retains at most min(available, max(2 * needed, short)) tokens.

    >>> group_heads(available=[1000, 1000, 40, 1000], needed=[900, 30, 40, 500], short=16)
    [(900, [0, 3]), (40, [1, 2])]
    """
    groups = []
    rest = sorted(range(len(needed)), key=lambda head: -needed[head])
    while rest:
        length = needed[rest[0]]
        fits = [h for h in rest if available[h] >= length and (2 * needed[h] >= length or length <= short)]
        groups.append((length, sorted(fits)))
        rest = [h for h in rest if h not in fits]
    return groups


def total_slots(groups):
    """Return the number of slots of all heads in groups, [(slots of a head, heads), ...]."""
    return sum(slots * len(heads) for slots, heads in groups)


class RaggedLayer(AttendingLayer, DynamicLayer):
    """One layer of a `RaggedCache`, for a `FoxAttention`. Its `Pruning` decides what is dropped.

    `groups` store all retained tokens. `keys` and `values` store the last token only. Its key contains the latest c.
    The layer is pruned before a call if `prune_every` tokens have been added since the last pruning.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, attention, pruning, prune_every):
        super().__init__()
        self.head_dim, self.gates_per_key = attention.head_dim, attention.gates_per_key
        self.kv_heads = attention.config.num_key_value_heads
        self.queries_per_key = attention.num_key_value_groups
        self.pruning, self.prune_every = pruning, prune_every
        self._clear()

    def _clear(self):
        self.groups: list[HeadGroup] = []
        self.order = None  # index of each query head in the concatenated groups; None for a single group
        self.length: int | torch.Tensor = 0  # tokens seen
        self.dropped_at = 0  # `length` when tokens were last dropped: `crop` must leave at least as many
        self.pruned_at = 0  # `length` at the last pruning, even if it did not drop tokens
        self.pruning.clear()

    def update(self, key_states, value_states, *args, **kwargs):
        """Append new tokens, (B, Hkv, T, D'). Return only these, because `attend` reads all tokens from `groups`."""
        width = folded_width(self.head_dim, self.gates_per_key, key_states.device)
        if key_states.shape[1] != self.kv_heads or key_states.shape[3] != width:
            raise ValueError(
                f"this PrunedCache was made for another model. Keys must have {self.kv_heads} heads of width {width}, got "
                f"{key_states.shape[1]} of width {key_states.shape[3]}. Create one for this model: PrunedCache(model)."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (torch.zeros_like(x[:, :, -1:]) for x in (key_states, value_states))
        tokens = key_states.shape[2]
        if not self.groups:
            heads, capacity = list(range(self.kv_heads)), self._capacity(tokens)
            self._set_groups([HeadGroup(heads, [0] * self.kv_heads, self.keys, capacity, self.queries_per_key)])
        self.length += tokens
        for group in self.groups:
            self._append(group, key_states[:, group.key_heads], value_states[:, group.key_heads])
        self.keys.copy_(key_states[:, :, -1:])
        self.values.copy_(value_states[:, :, -1:])
        return key_states, value_states

    def _capacity(self, length):
        return length + self.prune_every

    def _set_groups(self, groups: list[HeadGroup]) -> None:
        self.groups = groups
        self.order = torch.cat([group.query_heads for group in groups]).argsort() if len(groups) > 1 else None

    def _append(self, group, keys, values):
        """Append new tokens, (B, h, T, D'), to a group. If necessary, increase its capacity."""
        end = self.length - group.dropped[0]
        begin = end - keys.shape[2]
        if end > group.keys.shape[2]:
            more = (0, 0, 0, self._capacity(end) - group.keys.shape[2])
            group.keys, group.values = (nn.functional.pad(x, more) for x in (group.keys, group.values))
        group.keys[:, :, begin:end] = keys
        group.values[:, :, begin:end] = values

    def attend(self, attention_function, module, query, key, value, attention_mask, **kwargs):
        """Return output and weights of the attention function for the tokens in the cache.

        Weights are None if the function does not return them, or if the cache is static. A dropped token has weight 0.
        """
        if attention_mask is not None and not isinstance(attention_mask, torch.Tensor | VisibleKeys):
            raise NotImplementedError(
                "a PrunedCache does not support masks of flex_attention. Use another backend: "
                "model.set_attn_implementation('sdpa')."
            )
        self.pruning.observe(query, key)
        outputs, weights = [], []
        for group in self.groups:
            queries = query if self.order is None else query[:, group.query_heads]
            keys, values, mask = self._read(group, query.shape[2], attention_mask)
            output, weight = attention_function(module, queries, keys, values, mask, **kwargs)
            outputs.append(output)
            if weight is not None and not self.is_compileable:
                weights.append(nn.functional.pad(weight, (self.length - weight.shape[-1], 0)))
        if self.order is None:
            return outputs[0], weights[0] if weights else None
        return torch.cat(outputs, 2)[:, :, self.order], torch.cat(weights, 1)[:, self.order] if weights else None

    def _read(self, group, tokens, mask):
        """Return the keys and values of a group, and the columns of the mask for these keys."""
        length = self.length - group.dropped[0]
        if mask is not None:
            mask = mask.last(length) if isinstance(mask, VisibleKeys) else mask[..., self.length - length :]
        return group.keys[:, :, :length], group.values[:, :, :length], mask

    @property
    def exact_block(self) -> int:
        """The number of tokens that a call may add before the layer would prune between single tokens."""
        added = int(self.length) - self.pruned_at
        return self.prune_every - added if added < self.prune_every else self.prune_every

    def make_room(self, tokens: int, length: int) -> None:
        """Prune before a call with `tokens` tokens, if `prune_every` tokens have been added since the last pruning.

        length: the value of `self.length`. All layers share one read of it, because reading waits for the GPU.
        """
        if length - self.pruned_at >= self.prune_every:
            self.prune(tokens)

    @torch.no_grad()
    def prune(self, tokens: int = 0) -> None:
        """Drop what `pruning` allows, before a call with `tokens` tokens. All rows drop equally many."""
        self.pruned_at = int(self.length)
        if self.pruned_at:
            self.pruning.prune(self, tokens)

    def regroup(self, needed: list[int], tokens: int, read) -> list[int]:
        """Form new groups. Return the number of tokens that each head drops.

        Args:
            needed: number of tokens that each head must retain.
            tokens: number of tokens that the next call will add.
            read: a function of a head and a number n. It returns the last n keys, (B, n, D'), and values of the head.
        """
        length = int(self.length)
        before = self.dropped()
        groups = []
        for capacity, lengths in self._plan([length - n for n in before], needed, tokens):
            dropped = [length - kept for kept in lengths.values()]
            group = HeadGroup(list(lengths), dropped, self.keys, capacity, self.queries_per_key)
            for i, (head, kept) in enumerate(lengths.items()):
                group.keys[:, i, :kept], group.values[:, i, :kept] = read(head, kept)
            groups.append(group)
        self._set_groups(groups)
        dropped = [after - n for after, n in zip(self.dropped(), before)]
        if any(dropped):
            self.dropped_at = length
        return dropped

    def _plan(self, available, needed, tokens):
        """Return a pair for each new group: its capacity, and {head: number of retained tokens}."""
        groups = group_heads(available, needed, short=self.prune_every)
        return [(self._capacity(length), dict.fromkeys(heads, length)) for length, heads in groups]

    def dropped(self) -> list[int]:
        """Return the number of dropped tokens of each key head."""
        dropped = {head: n for group in self.groups for head, n in zip(group.heads, group.dropped)}
        return [dropped.get(head, 0) for head in range(self.kv_heads)]

    def get_seq_length(self):
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        removed = abs(int(tokens_to_remove))  # transformers 5.17 passes a tensor
        if removed and self.length - removed < self.dropped_at:
            raise ValueError(
                f"crop must leave at least {self.dropped_at} tokens, got {self.length - removed}. Tokens were "
                f"last dropped at length {self.dropped_at}. Crop fewer tokens, or use a DynamicCache."
            )
        super().crop(tokens_to_remove)
        if not removed or not self.is_initialized:
            return
        self.length -= removed
        self.pruned_at = min(self.pruned_at, self.length)
        last = [slice(self.length - group.dropped[0] - 1, self.length - group.dropped[0]) for group in self.groups]
        ends = [(group.keys[:, :, slot], group.values[:, :, slot]) for group, slot in zip(self.groups, last)]
        order = torch.cat([group.key_heads for group in self.groups]).argsort()
        self.keys, self.values = (torch.cat(parts, 1)[:, order] for parts in zip(*ends))

    def reset(self) -> None:
        super().reset()
        self.is_initialized = False  # the next batch may have another size
        self.keys = self.values = cast(Any, None)  # transformers before 5.24 retains them
        self._clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(cast(torch.LongTensor, beam_idx))
        rows = beam_idx.to(self.device) if self.is_initialized else beam_idx
        for group in self.groups:
            group.keys, group.values = (x.index_select(0, rows) for x in (group.keys, group.values))
        self.pruning.select_rows(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.groups:
            self.reorder_cache(torch.arange(self.groups[0].keys.shape[0]).repeat_interleave(repeats))


class RaggedHybridLayer(RaggedLayer, DynamicShiftLayer):
    """A `RaggedLayer` that also stores the state of the token shift."""


class StaticRaggedLayer(RaggedLayer):
    """A `RaggedLayer` with constant shapes and addresses of tensors, like a `StaticLayer` of transformers.

    The index of the next slot is a tensor on the device. In free slots and padding, the column `marker` of the keys is
    0. This masks them. The number of slots of a group is `max_cache_len`, or a half, a quarter, ... of it. Pruning
    changes the groups in two cases: a head no longer fits, or new groups save a quarter of the memory.
    """

    is_compileable = True
    is_croppable = False
    length: torch.Tensor

    def __init__(self, *args, max_cache_len):
        self.slots = max_cache_len
        super().__init__(*args)
        self.marker = self.head_dim + GATE_PARTS * self.gates_per_key  # a column that is constant in all folded keys

    def _clear(self):
        super()._clear()
        self.length = torch.tensor(0)
        self.visible: torch.Tensor | None = None  # last attention mask, (B, tokens) bool; only in the first layer

    def update(self, key_states, value_states, *args, **kwargs):
        self.is_first_call = not self.groups
        self.length = self.length.to(key_states.device)
        return super().update(key_states, value_states)

    def _capacity(self, length):
        return self.slots

    def _set_groups(self, groups):
        if [(group.heads, group.keys.shape) for group in groups] != [(x.heads, x.keys.shape) for x in self.groups]:
            super()._set_groups(groups)
            mark_static(self.keys, self.values, self.length, *(x for y in groups for x in (y.keys, y.values)))
            return
        for old, new in zip(self.groups, groups):
            old.dropped = new.dropped
            for name in ("keys", "values", "first"):
                getattr(old, name).copy_(getattr(new, name))

    def _slots(self, group, tokens):
        """Return two index tensors: the heads, (h, 1), and the slots of the last `tokens` tokens, (h, T)."""
        slots = self.length - tokens - group.first + torch.arange(tokens, device=self.device)
        return torch.arange(len(group.heads), device=self.device)[:, None], slots

    def _append(self, group, keys, values):
        heads, slots = self._slots(group, keys.shape[2])
        group.keys[:, heads, slots] = keys
        group.values[:, heads, slots] = values

    def attend(self, attention_function, module, query, key, value, attention_mask, **kwargs):
        if attention_function not in (eager_attention_forward, sdpa_attention_forward, sdpa_without_cudnn):
            raise NotImplementedError(
                "a PrunedCache with max_cache_len supports the attention implementations 'sdpa' and 'eager' only. "
                "Call model.set_attn_implementation('sdpa')."
            )
        if attention_mask is not None:  # it covers the new tokens: a key that is masked for all queries is padding
            visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > MASKED
            real = visible.any(2)  # (B, 1, T)
            for group in self.groups:
                heads, slots = self._slots(group, key.shape[2])
                group.keys[:, heads, slots, self.marker] = GATE_QUERY * real.to(key.dtype)
        return super().attend(attention_function, module, query, key, value, attention_mask, **kwargs)

    def _read(self, group, tokens, mask):
        if self.is_first_call:
            return group.keys[:, :, :tokens], group.values[:, :, :tokens], mask
        slots = torch.arange(group.keys.shape[2], device=self.device)
        visible = (slots <= self._slots(group, tokens)[1][..., None])[None]  # (1, h, T, slots)
        if mask is not None:
            visible = visible & (group.keys[:, :, None, :, self.marker] != 0)
        return group.keys, group.values, visible.repeat_interleave(self.queries_per_key, dim=1)

    def mark(self, visible):
        """Mark the cached tokens that queries attend to. `visible` is (B, cached tokens) bool."""
        for group in self.groups:
            positions = group.first + torch.arange(group.keys.shape[2], device=self.device)  # (h, slots)
            is_filled = positions < visible.shape[1]
            marks = visible[:, positions.clamp(max=visible.shape[1] - 1)] & is_filled
            group.keys[..., self.marker] = GATE_QUERY * marks.to(group.keys.dtype)

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        if self.visible is not None:
            self.visible = self.visible.index_select(0, beam_idx.to(self.visible.device))

    def make_room(self, tokens, length):
        super().make_room(tokens, length)
        length += tokens
        if any(length - min(group.dropped) > group.keys.shape[2] for group in self.groups):
            self.prune(tokens)
        needed = length - min(self.dropped())
        if needed > self.slots:
            raise ValueError(
                f"max_cache_len must be at least {needed}, got {self.slots}. A head retains {needed - tokens} tokens, and "
                f"{tokens} are new. Increase max_cache_len or the tolerance, or read a long prompt in chunks: "
                "generate(..., prefill_chunk_size=...)."
            )

    def crop(self, tokens_to_remove):
        raise NotImplementedError("a PrunedCache with max_cache_len cannot remove tokens. Leave max_cache_len out.")

    def _plan(self, available, needed, tokens):
        room = max(tokens, self.prune_every)
        current = [(group.keys.shape[2], {head: needed[head] for head in group.heads}) for group in self.groups]
        smaller: dict[int, dict[int, int]] = {}
        for head, length in enumerate(needed):
            smaller.setdefault(self._fewest_slots(length, room), {})[head] = length
        fits = all(slots == self.slots or slots >= max(lengths.values()) + room for slots, lengths in current)
        # compiled steps use the tensors of the current groups, so new ones must save a quarter of the memory
        if fits and total_slots(smaller.items()) > 0.75 * total_slots(current):
            return current
        return list(smaller.items())

    def _fewest_slots(self, length, room):
        """Halve the slots while they hold `length` tokens, a quarter more, and `room`."""
        slots = self.slots
        while length < int(self.length) and slots % 2 == 0 and slots // 2 >= length + length // 4 + room:
            slots //= 2
        return slots


class StaticRaggedHybridLayer(StaticRaggedLayer, LinearAttentionAndFullAttentionLayer):
    """A `StaticRaggedLayer` that also stores the state of the token shift. transformers updates it in place."""

    def reset(self):
        super().reset()
        self.is_conv_states_initialized[0] = False


class RaggedCache(AttendingCache):
    """A cache of `RaggedLayer`s."""

    layers: list[RaggedLayer]

    def make_room(self, tokens: int, attention_mask: torch.Tensor | None) -> None:
        if not torch.compiler.is_compiling():
            length = int(self.layers[0].length)
            if attention_mask is not None and attention_mask.shape[1] != length + tokens:
                raise ValueError(
                    f"attention_mask must have {length + tokens} columns, got {attention_mask.shape[1]}. It has a column "
                    f"for each of the {length} cached and {tokens} new tokens: 1 for real tokens, 0 for padding."
                )
            for layer in self.layers:
                layer.make_room(tokens, length)
        layers: Any = self.layers
        if self.is_compileable and attention_mask is not None:
            mask, before = attention_mask.bool(), layers[0].visible
            if before is None:
                before = mask.new_ones(len(mask), 0)
            visible = mask[:, :-tokens]
            before = nn.functional.pad(before, (0, visible.shape[1] - before.shape[1]), value=True)
            if torch.compiler.is_compiling() or not torch.equal(visible, before):
                for layer in layers:
                    layer.mark(visible)
            layers[0].visible = mask

    def prune(self) -> None:
        """Drop all tokens that can be dropped now. Call it after a long prompt, or between compiled steps."""
        for layer in self.layers:
            layer.prune()

    @property
    def dropped(self) -> torch.Tensor:
        """Number of tokens that each key head of each layer has dropped, (layers, Hkv).

        `get_seq_length()` includes these tokens.
        """
        return torch.tensor([layer.dropped() for layer in self.layers])
