"""What an attention layer reads back from a cache of transformers, and what it stores there.

A FoX carries two states from token to token, and transformers' caches have a place for both. The running sum of log f
is part of the last cached key, into which it was folded (attention_fox.py). The last keys and values before the token
shift are the state of a convolution, in layers that take it along wherever rows or tokens of the keys go.

A cache of transformers copies all of its tokens to append one. On a CPU, where that is much of a decoding step, a
token is written into free places behind the last one instead, and a view that is one place longer replaces the old.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from .attention_fox import fold_token, unfold_decay
from .call_fox import Call, is_exporting
from .fused_fox import previous_tokens


# Tokens before the token shift that a growing cache keeps. All but one of them can be taken back.
KEPT = 32
FREE = 64  # places, for which a cache takes memory in advance


class Growing:
    """The free places behind a tensor of (..., tokens, numbers) or (..., numbers, tokens).

    Only the tensor that was returned last grows into them. One that has been cut, reordered or loaded, or that of a
    copied cache, is copied first, so no two tensors write to one place.
    """

    latest: Callable[[], Any] = staticmethod(lambda: None)
    free = 0

    def __reduce__(self):  # a copy shares no memory
        return Growing, ()

    def append(self, x: torch.Tensor, new: torch.Tensor, dim: int = -2, most: int | None = None) -> torch.Tensor:
        """Return x with one more token, or its last `most` tokens; without derivatives.

        new: the first numbers of the new token, like x. The others are those of the token before.
        dim: -2 or -1, where the tokens are. The numbers of a token lie together in memory.
        """
        shape = list(x.shape)
        length = shape[dim]
        if self.latest() is not x or self.free == 0 or (x.is_inference() and not torch.is_inference_mode_enabled()):
            rows = x.transpose(dim, -2)
            memory = rows.new_empty(*rows.shape[:-2], length + FREE, rows.shape[-1]).transpose(dim, -2)
            memory.narrow(dim, length, FREE).copy_(x.narrow(dim, length - 1, 1))
            x, self.free = memory.narrow(dim, 0, length).copy_(x), FREE
        self.free -= 1
        strides, begin = x.stride(), x.storage_offset()
        x.as_strided(new.shape, strides, begin + length * strides[dim]).copy_(new)
        first = 0 if most is None else max(length + 1 - most, 0)
        shape[dim] = length + 1 - first
        longer = x.as_strided(shape, strides, begin + first * strides[dim])
        self.latest = weakref.ref(longer)
        return longer


class ShiftLayer(LinearAttentionLayer):
    """What transformers' layers of attention beside a convolution lack (5.23); `attention` is theirs without one."""

    attention: Any
    conv_states: dict[int, Any]
    get_seq_length: Any

    def get_max_length(self) -> int:
        return self.attention.get_max_length(self)


class GrowingShiftLayer(ShiftLayer):
    """The same where tokens can be appended: the state follows the keys when rows are chosen and tokens taken back."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.attention.batch_repeat_interleave(self, repeats)
        if self.has_previous_state[0]:
            self.conv_states[0] = self.conv_states[0].repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.attention.batch_select_indices(self, indices)
        if self.has_previous_state[0]:
            self.conv_states[0] = self.conv_states[0][indices]

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Append to the state, (B, channels, T), and keep its last tokens, or all while the past is recorded."""
        if not self.is_conv_states_initialized[0]:
            self.lazy_initialization(conv_states=conv_states, state_idx=0, conv_kernel_size=1)
        if self.has_previous_state[0]:  # numbers of a token stay together in memory
            conv_states = torch.cat([self.conv_states[0].mT, conv_states.mT], dim=1).mT
        if not self.record_past:
            if is_exporting():  # one shape for all lengths; what precedes a text is 0
                conv_states = F.pad(conv_states, (KEPT, 0))
            conv_states = conv_states[..., -KEPT:]
        self.conv_states[0] = conv_states
        self.has_previous_state[0] = True
        return self.conv_states[0]

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back, given as a negative number.

        Raises:
            ValueError: the token before them is no longer kept.
        """
        removed, length = -int(tokens_to_remove), self.get_seq_length()
        kept = self.conv_states[0].shape[-1] if self.has_previous_state[0] else 0
        if kept <= removed < length:
            raise ValueError(
                f"crop takes {removed} of {length} tokens back, but the token shift of this FoX is kept for the last {kept} "
                "only. Call cache.activate_past_recording() before more tokens that may be taken back."
            )
        self.attention.crop(self, tokens_to_remove)
        if kept:
            self.conv_states[0] = self.conv_states[0][..., : max(kept - removed, 0)][..., -KEPT:]


class GrowingLayer(GrowingShiftLayer, LinearAttentionAndFullAttentionLayer):
    attention = DynamicLayer


class GrowingWindow(GrowingShiftLayer, LinearAttentionAndSlidingWindowAttentionLayer):
    attention = DynamicSlidingWindowLayer


class StaticShiftLayer(ShiftLayer, LinearAttentionAndStaticFullAttentionLayer):
    attention = StaticLayer


class StaticShiftWindow(ShiftLayer, LinearAttentionAndStaticSlidingWindowAttentionLayer):
    attention = StaticLayer


OURS = {layer.__bases__[1]: layer for layer in (GrowingLayer, GrowingWindow, StaticShiftLayer, StaticShiftWindow)}


def keep_token_shift(cache: Cache) -> None:
    """Put our layers in the place of transformers' layers of attention beside a convolution."""
    for i, layer in enumerate(cache.layers):
        if type(layer) in OURS:
            cache.layers[i] = OURS[type(layer)].__new__(OURS[type(layer)])
            vars(cache.layers[i]).update(vars(layer))


class AttendingCache(Cache):
    """A cache that calls the attention function itself, because its heads hold different numbers of keys."""

    def wrap_attention(self, attention_function):
        """Return an attention function of the same arguments and results, over all keys of the cache."""
        raise NotImplementedError


class CachedLayer:
    """The layer of a cache that belongs to one attention module.

    Args:
        attention: the `FoxAttention`.
        cache: its cache, which inputs_fox.py has accepted.
        device: that of the new tokens.
    """

    def __init__(self, attention, cache: Cache, device: torch.device):
        self.attention, self.cache = attention, cache
        self.layer: Any = None  # until the first token, a cache may lack it
        if attention.layer_idx < len(cache.layers):
            self.layer = cache.layers[attention.layer_idx]
            if cache.offloading:
                # `cache.update` waits until the layer is back from the CPU, but its states are read before that.
                torch.cuda.current_stream(device).wait_stream(cache.prefetch_stream)
                self.layer.prefetch()

    def token_before(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return key and value of the last cached token before the token shift, (B, 1, Hkv, D) each; None if none is.

        k: the new keys, (B, T, Hkv, D), for their dtype and device.
        """
        if not self.cache.has_previous_state(self.attention.layer_idx):
            return None
        state = self.layer.conv_states[0]  # (B, 2 Hkv D, tokens)
        if state.shape[-1] == 0:  # the cache was cropped to nothing
            return None
        last = state[..., -1].to(k).unflatten(1, (1, -1, self.attention.head_dim))
        return last[:, :, : k.shape[2]], last[:, :, k.shape[2] :]

    def keep_tokens(self, k: torch.Tensor, v: torch.Tensor, before, call: Call) -> None:
        """Store the last of these keys and values before the token shift, (B, T, Hkv, D), for the next call.

        before: `tokens_before` of them.
        """
        kept = [k, v]
        if call.token_mask is not None:  # a padded position repeats the last real one
            previous = [previous_tokens(y, x, call.predecessor) for y, x in zip(kept, before)]
            kept = [torch.where(call.token_mask[..., None, None], *pair) for pair in zip(kept, previous)]
        if not (self.layer.record_past or is_exporting()):
            kept = [y[:, -KEPT:] for y in kept]
        states = torch.cat(kept, dim=2).flatten(2).mT  # (B, 2 Hkv D, T)
        self.cache.update_conv_state(states, self.attention.layer_idx, conv_kernel_size=1)

    def can_trade_token(self, k: torch.Tensor) -> bool:
        """Return whether the layer has a token for `trade_token`, of the dtype of k, if `appends_in_place`."""
        layer = self.layer
        if not isinstance(layer, GrowingShiftLayer) or not layer.has_previous_state[0]:
            return False
        return layer.conv_states[0].dtype == k.dtype and layer.conv_states[0].numel() > 0

    def trade_token(self, kv: torch.Tensor) -> torch.Tensor:
        """Return key and value of the last token before the shift, (B, 1, 2 Hkv, D), and store those of the next."""
        layer, state = self.layer, self.layer.conv_states[0]
        most = None if layer.record_past else KEPT
        layer.conv_states[0] = self.grow("state", state, kv.flatten(2).mT, dim=-1, most=most)
        return state[..., -1].view(kv.shape)

    def decay(self, c: torch.Tensor) -> torch.Tensor:
        """Return c of the last cached token, (B, H, 1), 0 if there is none; `c` (B, H, T) gives heads and device."""
        layer = self.layer
        if layer is None or not layer.is_initialized or layer.keys.numel() == 0:
            return torch.zeros_like(c[..., :1])
        if not hasattr(layer, "max_cache_len"):  # a growing cache ends with its last token
            last = layer.keys[:, :, -1:]
        elif isinstance(length := layer.get_seq_length(), torch.Tensor):  # a free slot is 0, and so is its decay
            last = layer.keys.index_select(2, (length - 1).clamp(min=0).view(1))
        elif length == 0:
            return torch.zeros_like(c[..., :1])
        else:  # a static sliding window
            length = min(length, layer.max_cache_len)
            last = layer.keys[:, :, length - 1 : length]
        attention = self.attention
        return unfold_decay(last.to(c.device), attention.head_dim, attention.gates_per_key, attention.scaling)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens, cached and new, (B, Hkv, all, D')."""
        return self.cache.update(k, v, self.attention.layer_idx)

    def grow(self, name: str, x: torch.Tensor, new: torch.Tensor, **options) -> torch.Tensor:
        """Return the state x of the layer with one more token; as in `Growing.append`."""
        return vars(self.layer).setdefault("growing", defaultdict(Growing))[name].append(x, new, **options)

    def can_append_token(self, k: torch.Tensor) -> bool:
        """Return whether the layer takes a key, (B, Hkv, 1, D), as `append_token` does, if `appends_in_place`."""
        layer = self.layer
        return (
            type(layer) in (DynamicLayer, GrowingLayer)
            and layer.is_initialized
            and layer.keys.numel() > 0
            and layer.keys.dtype == k.dtype
        )

    def append_token(self, q, k, v, log_f) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the folded query of one new token, and keys and values of all; arguments as in `fold_token`."""
        layer = self.layer
        q, k = fold_token(q, k, log_f, self.attention.scaling, layer.keys)
        layer.keys, layer.values = self.grow("keys", layer.keys, k), self.grow("values", layer.values, v)
        return q, layer.keys, layer.values


def appends_in_place(cache: Any, x: torch.Tensor) -> bool:
    """Return whether a call of embedded tokens x, (B, T, hidden), may write behind what a cache holds.

    It may for one token of each row on a CPU, where small operations are much of a step, if nothing is differentiated,
    traced or offloaded, and the cache appends as transformers does.
    """
    return (
        x.shape[1] == 1
        and x.device.type == "cpu"
        and type(x) is torch.Tensor
        and type(cache) is DynamicCache
        and not cache.offloading
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0  # of derivatives
    )


def tokens_before(k, v, call: Call, past: CachedLayer | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return key and value before the first new token and before the token shift, (B, 1, Hkv, D); None for zeros."""
    if call.shard is not None:
        return call.shard.token_before(k), call.shard.token_before(v)
    cached = None if past is None else past.token_before(k)
    return cached or (None, None)
