"""What an attention layer reads back from a cache of transformers, and what it stores there.

A FoX carries two states from token to token, and transformers' caches have a place for both. The running sum of log f
is part of the last cached key, into which it was folded (attention_fox.py). The last key and value before the token
shift are the state of a convolution that reaches back one token.
"""

import torch
from transformers.cache_utils import Cache
from transformers.utils import is_torchdynamo_exporting

from .attention_fox import GATE_PARTS, GATE_QUERY, autocast_dtype, folded_width, unfold_decay


NO_QUANTIZED_CACHE = (
    "FoX cannot use a quantized cache: the running sum of its gates is stored in the keys and would be rounded with "
    "them. Leave cache_implementation out, or use 'static' or 'offloaded'."
)


class AttendingCache(Cache):
    """A cache that calls the attention function itself, because its heads hold different numbers of keys."""

    def wrap_attention(self, attention_function):
        """An attention function of the same arguments and results, over all keys of the cache."""
        raise NotImplementedError


class CachedLayer:
    """The layer of a cache that belongs to one attention module. Without a cache every state is 0 and nothing is kept.

    Args:
        attention: the `FoxAttention`.
        cache: a `Cache` or None.
        k: keys of the new tokens before token shift, norm and folding, (B, T, Hkv, D).

    Raises:
        ValueError: the layer cannot have been filled by this model.
        NotImplementedError: `torch.export` is running, and the cache is static.
    """

    def __init__(self, attention, cache: Cache | None, k: torch.Tensor):
        self.attention, self.cache, self.layer = attention, cache, None
        if cache is None:
            return
        if attention.layer_idx < len(cache.layers):
            self.layer = cache.layers[attention.layer_idx]
            if cache.offloading:
                # `cache.update` waits until the layer is back from the CPU, but its states are read before that.
                torch.cuda.current_stream(k.device).wait_stream(cache.prefetch_stream)
                self.layer.prefetch()
        if hasattr(self.layer, "max_cache_len") and is_torchdynamo_exporting():
            raise NotImplementedError(
                "FoX cannot be exported with a static cache: exporters make its keys too narrow for the decay and leave "
                "the token shift out. Export without a cache: use_cache=False."
            )
        self.check_keys(k)

    def token_before(self, k):
        """Key and value of the last cached token before the token shift, (B, 1, Hkv, D) each; 0 if there is none."""
        nothing = torch.zeros_like(k[:, :1])
        if self.cache is None:
            return nothing, nothing
        if not hasattr(self.layer, "conv_states"):
            raise ValueError(
                f"this {type(self.cache).__name__} has no place for the token shift; make it for this model: "
                "DynamicCache(config=model.config)."
            )
        if not self.cache.has_previous_state(self.attention.layer_idx):
            return nothing, nothing
        state = self.layer.conv_states[0]  # (B, 2 Hkv D, 1 or more if the cache records the past)
        if state.shape[-1] == 0:  # the cache was cropped to nothing
            return nothing, nothing
        if state.shape[0] != k.shape[0]:
            raise ValueError(
                f"this {type(self.cache).__name__} has a token shift of {state.shape[0]} rows and keys of {k.shape[0]}: "
                "batch_repeat_interleave and batch_select_indices of transformers leave the token shift out. Use "
                "cache.reorder_cache(indices), which may repeat and leave out rows too."
            )
        return state[..., -1:].mT.to(k).unflatten(2, (-1, self.attention.head_dim)).chunk(2, dim=2)

    def keep_tokens(self, k, v):
        """Store the last of these keys and values before the token shift, (B, T, Hkv, D), for the next call."""
        if self.cache is not None:
            states = torch.cat([k, v], dim=2).flatten(2).mT  # (B, 2 Hkv D, T)
            self.cache.update_conv_state(states, self.attention.layer_idx, conv_kernel_size=1)

    def decay(self, c):
        """c of the last cached token, (B, H, 1), 0 if there is none; `c` (B, H, T) gives heads and device."""
        layer = self.layer
        if hasattr(layer, "_quantize"):
            raise NotImplementedError(NO_QUANTIZED_CACHE)
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

    def append(self, k, v):
        """Keys and values of all tokens, cached and new, (B, Hkv, all, D')."""
        return (k, v) if self.cache is None else self.cache.update(k, v, self.attention.layer_idx)

    def check_keys(self, k) -> None:
        """Raise ValueError unless this model, with this batch and dtype, can have written the cached keys."""
        layer, attention = self.layer, self.attention
        if torch.compiler.is_compiling() or layer is None or not layer.is_initialized or layer.keys.ndim != 4:
            return
        keys, gated = layer.keys, attention.f_proj is not None
        width = folded_width(attention.head_dim, attention.gates_per_key, k.device) if gated else attention.head_dim
        dtype = autocast_dtype(k.device)
        if dtype is None:
            dtype = k.dtype
        elif not gated:  # norms and RoPE decide
            dtype = keys.dtype
        cached = (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype)
        expected = (k.shape[0], k.shape[2], width, dtype)
        if cached != expected:
            raise ValueError(
                f"this {type(self.cache).__name__} holds keys of (rows, heads, width, dtype) = {cached}; those of "
                f"this model and input are {expected}. It was filled by another model, in another dtype or for "
                "another batch. Make one for this model: DynamicCache(config=model.config)."
            )
        readable = gated and attention.layer_idx == 0 and keys.device.type == "cpu" and keys.shape[2] > 0
        marker = attention.head_dim + GATE_PARTS * attention.gates_per_key  # of a key into which the decay was folded
        if readable and layer.get_seq_length() > 0 and keys[0, 0, 0, marker] != GATE_QUERY:
            raise ValueError(
                f"the keys in this {type(self.cache).__name__} carry no decay, so another model has filled it. Make "
                "one for this model: DynamicCache(config=model.config)."
            )
