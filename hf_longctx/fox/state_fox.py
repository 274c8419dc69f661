"""Description of one call, and the states that an attention layer stores in a cache of transformers.

FoX has two recurrent states. The cumulative sum of log f is folded into the last cached key (attention_fox.py). The
last unshifted keys and values are stored as a convolution state. Our cache layers reorder and crop this state together
with the keys.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from .attention_fox import unfold_decay
from .torch_internals_fox import is_exporting, is_in_forward_mode


# Number of token-shift states in a dynamic cache. All but one of them can be cropped.
SHIFT_TOKENS = 32
FREE_TOKENS = 64  # number of tokens for which an `InPlaceBuffer` allocates memory in advance


class Call(NamedTuple):
    """Description of one call, shared by all layers.

    implementation: the attention implementation, never "auto".
    mask: the attention mask in the format of the attention implementation. None: plain causal attention.
    token_mask: (B, T) bool, False at padding. None: every token is real.
    position_ids: (1 or B, T), positions for RoPE.
    position_in_sequence: (B, T) if sequences are packed. None: each row is one sequence.
    predecessor: (1 or B, T), for the token shift. It is the index of each token's previous token. 0 is the last
        cached token, 1 is the first new token, and -1 means that a token has no previous one. If `predecessor` is
        None, the tokens are consecutive.
    successor: (1 or B, T), the inverse of `predecessor`. 0 is the first new token, and -1 means that a token has no
        next one. If `successor` is None, the tokens are consecutive or form a tree.
    visible: (1 or B, 1, T, keys) bool, the keys that each token attends to. None: there is no 4D attention mask.
    flash: boundaries of the sequences, as arguments of FlashAttention.
    shard: the `SequenceShard` of hf_longctx/training/sequence_parallel.py under sequence parallelism. With a shard,
        `predecessor` describes the local part of the rows. All other fields describe whole rows.
    """

    implementation: str
    mask: Any = None
    token_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    position_in_sequence: torch.Tensor | None = None
    predecessor: torch.Tensor | None = None
    successor: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    flash: dict[str, Any] = {}
    shard: Any = None


def previous_tokens(x: torch.Tensor, before: torch.Tensor | None, predecessor: torch.Tensor | None) -> torch.Tensor:
    """Return the predecessor of each token, (B, T, H, D). For a token without a predecessor, return 0.

    before: (B, 1, H, D), the token before the first one. None: zeros.
    predecessor: as in `Call`.
    """
    if before is None:
        before = torch.zeros_like(x[:, :1])
    if predecessor is None:
        return before if x.shape[1] == 1 else torch.cat([before, x], dim=1)[:, :-1]
    index = predecessor[..., None, None]  # (1 or B, T, 1, 1)
    previous = torch.cat([before, x], dim=1).gather(1, index.clamp(min=0).expand_as(x))
    return previous.masked_fill(index < 0, 0.0)


def shift_tokens(x, share, before=None, predecessor=None):
    """Mix each token with its predecessor. `share`, (B, T, H), is the weight of the predecessor."""
    return torch.lerp(x, previous_tokens(x, before, predecessor), share[..., None].to(x.dtype))


class ShiftLayer(LinearAttentionLayer):
    """A hybrid cache layer of transformers (5.23) that also reorders and crops its convolution state.

    `attention` is the corresponding class without this state.
    """

    attention: Any
    conv_states: dict[int, Any]
    get_seq_length: Any

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.attention.batch_repeat_interleave(self, repeats)
        if self.has_previous_state[0]:
            self.conv_states[0] = self.conv_states[0].repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.attention.batch_select_indices(self, indices)
        if self.has_previous_state[0]:
            self.conv_states[0] = self.conv_states[0][indices]

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Append new tokens to the state, (B, channels, T). Unless the past is recorded, retain only the last."""
        if not self.is_conv_states_initialized[0]:
            self.lazy_initialization(conv_states=conv_states, state_idx=0, conv_kernel_size=1)
        if self.has_previous_state[0]:  # keeps each token contiguous in memory
            conv_states = torch.cat([self.conv_states[0].mT, conv_states.mT], dim=1).mT
        if not self.record_past:
            if is_exporting():  # gives the state the same shape for all lengths
                conv_states = F.pad(conv_states, (SHIFT_TOKENS, 0))
            conv_states = conv_states[..., -SHIFT_TOKENS:]
        self.conv_states[0] = conv_states
        self.has_previous_state[0] = True
        return self.conv_states[0]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. The argument is their number, negated.

        Raises:
            ValueError: the token before the removed ones is no longer cached.
        """
        removed, length = -int(tokens_to_remove), self.get_seq_length()
        kept = self.conv_states[0].shape[-1] if self.has_previous_state[0] else 0
        if kept <= removed < length:
            raise ValueError(
                f"crop cannot remove {removed} of {length} tokens: the token-shift state is cached for the last {kept} tokens "
                "only. Before you add tokens that may be removed, call cache.activate_past_recording()."
            )
        self.attention.crop(self, tokens_to_remove)
        if kept:
            self.conv_states[0] = self.conv_states[0][..., : max(kept - removed, 0)][..., -SHIFT_TOKENS:]


class DynamicShiftLayer(ShiftLayer, LinearAttentionAndFullAttentionLayer):
    attention = DynamicLayer


class DynamicShiftWindow(ShiftLayer, LinearAttentionAndSlidingWindowAttentionLayer):
    attention = DynamicSlidingWindowLayer


OURS = {layer.__bases__[1]: layer for layer in (DynamicShiftLayer, DynamicShiftWindow)}


def replace_shift_layers(cache: Cache) -> None:
    """Replace transformers' dynamic hybrid layers with ours."""
    for i, layer in enumerate(cache.layers):
        if type(layer) in OURS:
            cache.layers[i] = with_class(layer, OURS[type(layer)])


def with_class(layer: Any, kind: Any) -> Any:
    """Return a layer of another class that shares the layer's tensors."""
    other = kind.__new__(kind)
    vars(other).update(vars(layer))
    return other


class InPlaceBuffer:
    """Spare memory after a tensor, (..., tokens, numbers). With it, appending a token does not copy the others.

    Only the most recently returned tensor is extended in place. Cropped, reordered and loaded tensors, and tensors of
    a copied cache, are copied first. Two tensors are therefore never extended into the same memory.
    """

    latest: Callable[[], Any] = staticmethod(lambda: None)
    free = 0

    def __reduce__(self):  # a copy shares no memory
        return InPlaceBuffer, ()

    def append(self, x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Append the token `new`, (..., 1, numbers), to x. The result does not propagate gradients."""
        *rows, length, numbers = x.shape
        if self.latest() is not x or self.free == 0 or (x.is_inference() and not torch.is_inference_mode_enabled()):
            memory = x.new_empty(*rows, length + FREE_TOKENS, numbers)
            x = memory[..., :length, :].copy_(x)
            self.free = FREE_TOKENS
        self.free -= 1
        longer = x.as_strided((*rows, length + 1, numbers), x.stride(), x.storage_offset())
        longer[..., length:, :] = new
        self.latest = weakref.ref(longer)
        return longer


class AttendingLayer:
    """A layer of an `AttendingCache`."""

    def attend(self, attention_function, module, query, key, value, attention_mask, **kwargs):
        """Run an attention function of transformers on the cached tokens, in place of all keys and values."""
        raise NotImplementedError


class AttendingCache(Cache):
    """A cache that attends to its tokens itself, because its heads retain different tokens.

    This is all that the model knows of a `PrunedCache`. Such a cache may be static (`is_compileable`): its `make_room`
    then stores which of its tokens a mask hides, and the mask of its layers covers the new tokens only.
    """

    layers: list[Any]  # of `AttendingLayer`

    def check_weights(self, decoder_layers) -> None:
        """Raise ValueError if the cache does not fit the weights of the model. Compiled calls do not call this."""

    def make_room(self, tokens: int, attention_mask: torch.Tensor | None) -> None:
        """Prepare a call with `tokens` tokens and a mask (B, past + tokens). Compiled calls must not drop tokens."""
        raise NotImplementedError


class CachedLayer:
    """One layer of a cache.

    All layers can share a compiled step, because it reads neither `index` nor the number of layers.

    Args:
        cache: the cache, as checked by inputs_fox.py.
        index: index of the layer.
        device: device of the new tokens.
    """

    def __init__(self, cache: Cache, index: int, device: torch.device):
        self.cache, self.index = cache, index
        self.layer: Any = None  # a cache may create it with the first token
        if index < len(cache.layers):
            self.layer = cache.layers[index]
            if cache.offloading:
                # `cache.update` would wait until the layer is back from the CPU, but its states are read earlier.
                torch.cuda.current_stream(device).wait_stream(cache.prefetch_stream)
                self.layer.prefetch()

    def token_before(self, k: torch.Tensor, head_dim: int) -> torch.Tensor | None:
        """Return the unshifted key and value of the last cached token, (B, 1, 2 Hkv, D). Without one, return None.

        k: the new keys. They determine dtype and device.
        """
        state = self.layer.conv_states[0] if self.layer.has_previous_state[0] else None  # (B, 2 Hkv D, tokens)
        if state is None or state.shape[-1] == 0:  # the cache was cropped to nothing
            return None
        return state[..., -1:].to(k).mT.unflatten(2, (-1, head_dim))

    def keep_tokens(self, kv: torch.Tensor, before: torch.Tensor | None, call: Call) -> None:
        """Store the last tokens for the next call.

        kv: unshifted keys and values of the new tokens, (B, T, 2 Hkv, D).
        before: the result of `token_before`.
        """
        if call.token_mask is not None:  # a padded position repeats the last real token
            kv = torch.where(call.token_mask[..., None, None], kv, previous_tokens(kv, before, call.predecessor))
        if not (self.layer.record_past or is_exporting()):
            kv = kv[:, -SHIFT_TOKENS:]
        self.layer.update_conv_state(kv.flatten(2).mT, conv_kernel_size=1)

    def decay(self, c: torch.Tensor, module) -> torch.Tensor:
        """Return the c of the last cached token, (B, H, 1). Without one, return 0.

        c: the new cumulative sum, (B, H, T). It determines heads and device.
        """
        layer = self.layer
        if layer is None or not layer.is_initialized or layer.keys.numel() == 0:
            return torch.zeros_like(c[..., :1])
        if not hasattr(layer, "max_cache_len"):  # a dynamic cache ends with its last token
            last = layer.keys[:, :, -1:]
        elif isinstance(length := layer.get_seq_length(), torch.Tensor):  # free slots contain 0: their decay is 0
            last = layer.keys.index_select(2, (length - 1).clamp(min=0).view(1))
        elif length == 0:
            return torch.zeros_like(c[..., :1])
        else:  # a static sliding window
            length = min(length, layer.max_cache_len)
            last = layer.keys[:, :, length - 1 : length]
        return unfold_decay(last.to(c.device), module.head_dim, module.gates_per_key, module.scaling)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values to the cache. Return the keys and values of all tokens, (B, Hkv, all, D')."""
        layer = self.layer
        if torch.compiler.is_compiling() and layer is not None and not self.cache.offloading:
            return layer.update(k, v)
        in_place = (  # without a copy of the earlier tokens
            k.shape[2] == 1
            and k.device.type == "cpu"
            and type(k) is torch.Tensor
            and type(self.cache) is DynamicCache
            and type(layer) in (DynamicLayer, DynamicShiftLayer)
            and layer.is_initialized
            and layer.keys.numel() > 0
            and layer.keys.dtype == k.dtype
            and not torch.is_grad_enabled()
            and not torch.jit.is_tracing()
            and not is_in_forward_mode()
        )
        if not in_place:
            return self.cache.update(k, v, self.index)
        buffers = vars(layer).setdefault("buffers", (InPlaceBuffer(), InPlaceBuffer()))
        layer.keys = buffers[0].append(layer.keys, k)
        layer.values = buffers[1].append(layer.values, v)
        return layer.keys, layer.values
