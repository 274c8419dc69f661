"""What an attention layer reads back from a cache of transformers, and what it stores there.

A FoX carries two states from token to token, and transformers' caches have a place for both. The running sum of log f
is part of the last cached key, into which it was folded (attention_fox.py). The last keys and values before the token
shift are the state of a convolution, in layers that take it along wherever rows or tokens of the keys go.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from .attention_fox import unfold_decay
from .call_fox import Call, is_exporting
from .fused_fox import previous_tokens


# Tokens before the token shift that a growing cache keeps. All but one of them can be taken back.
KEPT = 32


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


class CachedLayer:
    """One layer of a cache.

    A compiled step depends on nothing that differs between layers: it reads neither `index` nor the number of layers.

    Args:
        cache: the cache, which inputs_fox.py has accepted.
        index: index of the layer.
        device: device of the new tokens.
    """

    def __init__(self, cache: Cache, index: int, device: torch.device):
        self.cache, self.index = cache, index
        self.layer: Any = None  # until the first token, a cache may lack it
        if index < len(cache.layers):
            self.layer = cache.layers[index]
            if cache.offloading:
                # `cache.update` waits until the layer is back from the CPU, but its states are read before that.
                torch.cuda.current_stream(device).wait_stream(cache.prefetch_stream)
                self.layer.prefetch()

    def token_before(self, k: torch.Tensor) -> torch.Tensor | None:
        """Return key and value of the last cached token before the token shift, (B, 1, 2 Hkv, D); None if none is.

        k: the new keys, (B, T, Hkv, D), for their dtype and device.
        """
        state = self.layer.conv_states[0] if self.layer.has_previous_state[0] else None  # (B, 2 Hkv D, tokens)
        if state is None or state.shape[-1] == 0:  # the cache was cropped to nothing
            return None
        return state[..., -1:].to(k).mT.unflatten(2, (-1, k.shape[3]))

    def keep_tokens(self, kv: torch.Tensor, before: torch.Tensor | None, call: Call) -> None:
        """Store the last of these keys and values before the token shift, (B, T, 2 Hkv, D), for the next call.

        before: `token_before` of them.
        """
        if call.token_mask is not None:  # a padded position repeats the last real one
            kv = torch.where(call.token_mask[..., None, None], kv, previous_tokens(kv, before, call.predecessor))
        if not (self.layer.record_past or is_exporting()):
            kv = kv[:, -KEPT:]
        self.layer.update_conv_state(kv.flatten(2).mT, conv_kernel_size=1)

    def decay(self, c: torch.Tensor, module) -> torch.Tensor:
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
        return unfold_decay(last.to(c.device), module.head_dim, module.gates_per_key, module.scaling)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens, cached and new, (B, Hkv, all, D')."""
        if torch.compiler.is_compiling() and self.layer is not None and not self.cache.offloading:
            return self.layer.update(k, v)
        return self.cache.update(k, v, self.index)


def drops_tokens(cache) -> bool:
    """Return whether a cache's layers run the attention function themselves, as those of a `PrunedCache` do."""
    return cache is not None and any(hasattr(layer, "attend") for layer in cache.layers)
