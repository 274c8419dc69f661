"""Attention of each group of key heads to the keys inside its window."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .cache import NewKeys, ReadKeys
from .flash import flash_windows, supports_flash
from .groups import Extent, LayerWindows
from .masks import CallMask, indexed_mask


NAME = "head_windows"  # of the attention implementation
# Queries that are read together. A longer band reads more keys that its queries do not attend to.
SHORTEST_BAND, LONGEST_BAND = 128, 512


def windowed_attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to the keys inside each head's window, as an attention function of transformers.

    Args:
        module: the attention layer, with its `LayerWindows` as `head_windows`.
        query: (B, H, T, D).
        key, value: (B, Hkv, n, D), or the `NewKeys` of a cache of `HeadWindows` and the new values.
        attention_mask: see masks.py.
        dropout: rate of dropout. It is the sixth argument, as in transformers: kvpress passes it by position.
        sliding_window: the layer's own window.
        s_aux: a logit of each query head that takes part in the softmax without a value, (H,).
        kwargs: the other arguments of transformers' SDPA.

    Returns:
        (B, T, H, D), and None in place of the attention weights.
    """
    windows: LayerWindows = module.head_windows
    check_call(windows, key, value, kwargs)
    tokens, key_heads = query.shape[2], value.shape[1]
    layer, keys = (key.layer, key.keys) if isinstance(key, NewKeys) else (None, key)
    if layer is not None:
        key.stored = True
    if layer is None and attention_mask is None and tokens > 1:
        keys, value = keys[:, :, :tokens], value[:, :, :tokens]  # a static cache also returns free slots
    first = keys.shape[2] - tokens if layer is None else key.first
    mask = CallMask(attention_mask, first, tokens, query.device, sliding_window)
    if module.layer_idx == 0:
        mask.check_indices()
    queries = query.unflatten(1, (key_heads, -1))  # (B, Hkv, G, T, D)
    logits = None if s_aux is None else s_aux.view(1, key_heads, -1)
    outputs = []
    for group in windows.groups:
        extent = windows.extent(group, sliding_window)
        k, v = take_heads(keys, group.heads), take_heads(value, group.heads)
        if layer is not None:
            read = (
                layer.append(group, sliding_window, k, v, mask)
                if extent is None
                else layer.append_to_ring(group, extent, k, v, mask)
            )
        elif extent is None:
            read = ReadKeys(k, v, None, True)
        else:
            new_last = not mask.indexed or k.shape[2] == tokens  # other caches may have free slots after the new keys
            read = ReadKeys(k, v, torch.arange(k.shape[2], device=k.device), True, new_last)
        extent = extent or Extent(sliding_window or 0, 0)
        q = take_heads(queries, group.heads).flatten(1, 2)
        extra = None if logits is None else take_heads(logits, group.heads).flatten()
        bands = attend(module, q, read, mask, extent, dropout=dropout, s_aux=extra, **kwargs)  # (B, band, h G, D)
        outputs.append(torch.cat([*bands], 1).unflatten(2, (len(group.heads), -1)))
    order = [head for group in windows.groups for head in group.heads]
    inverse = tuple(sorted(range(key_heads), key=order.__getitem__))
    output = outputs[0] if len(outputs) == 1 else take_heads(torch.cat(outputs, 2), inverse, 2)
    return output.flatten(2, 3), None


def check_call(windows: LayerWindows, key: Any, value: Tensor, kwargs: dict[str, Any]) -> None:
    """Raise an error if the result would be wrong."""
    if isinstance(key, NewKeys) and key.layer.windows != windows:
        raise ValueError(
            "`cache` must have the windows that were applied to the model, got a cache of other windows. Create one "
            "with the cache() of the windows that were applied last."
        )
    if isinstance(key, NewKeys) and key.stored:
        raise NotImplementedError("head windows do not support attention that reads the keys of a cache twice.")
    if value.shape[1] != len(windows.windows):
        raise NotImplementedError(
            f"head windows require all {len(windows.windows)} key heads on each device, got {value.shape[1]}. Load the "
            "model without tensor parallelism."
        )
    check_options(kwargs)


def check_options(kwargs: dict[str, Any]) -> None:
    """Raise an error for options of attention that would have no effect."""
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "head windows do not return attention weights. Leave out output_attentions, or call windows.remove(model)."
        )
    if kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
        raise NotImplementedError("head windows do not support capped attention logits or position biases.")


def attend(
    module: Any, query: Tensor, read: ReadKeys, mask: CallMask, extent: Extent, **kwargs: Any
) -> Iterator[Tensor]:
    """Yield the output of one band of queries after the other, (B, band, h G, D).

    query: the queries of one group of heads, (B, h G, T, D).
    """
    tokens, n = query.shape[2], read.keys.shape[2]
    if read.slots is None:
        yield attention(module, query, read.keys, read.values, mask.of_model(n), **kwargs)
        return
    mask.check()
    window, sinks = extent
    reach = sinks + window - mask.first  # before this query, no key is outside of the window
    if read.ordered and not mask.indexed and tokens <= reach:
        yield attention(module, query, read.keys, read.values, mask.of_model(n), **kwargs)
        return
    if (
        read.ordered
        and mask.mask is None
        and not kwargs.get("dropout")
        and supports_flash(query, read.keys, read.values)
    ):
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        yield flash_windows(query, read.keys, read.values, window, sinks, scale, kwargs["s_aux"])
        return
    band = tokens if torch.compiler.is_compiling() else min(max(window, SHORTEST_BAND), LONGEST_BAND)
    end = 0
    while end < tokens:
        begin, causal = end, end == 0 and read.ordered and mask.mask is None and reach > 0
        end = min(begin + (max(band, reach) if causal else band), tokens)
        stop = n - tokens + end if read.new_last else n
        k, v, slots = read.keys[:, :, :stop], read.values[:, :, :stop], read.slots[..., :stop]
        low = n - tokens + begin + 1 - window  # the first key inside the window
        if not mask.indexed and low > sinks and (read.ordered or low >= n - tokens):
            k, v = (torch.cat([x[:, :, :sinks], x[:, :, low:]], 2) for x in (k, v))
            slots = torch.cat([slots[..., :sinks], slots[..., low:]], -1)
        allowed = None if causal and end <= reach else mask.allowed(begin, end, slots, window, sinks)
        yield attention(module, query[:, :, begin:end], k, v, allowed, **kwargs)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return softmax attention: (B, H, T, D) -> (B, T, H, D).

    mask: bool, or as for SDPA. None: causal, or one query that attends to all keys.
    s_aux: see `windowed_attention`, (H,).
    """
    if s_aux is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    scores = query.unflatten(1, (key.shape[1], -1)) @ key[:, :, None].mT * kwargs["scaling"]  # (B, h, G, T, n)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=key.device).tril()[None, None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    extra = s_aux.to(scores).view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    weights = torch.dropout(weights, kwargs.get("dropout", 0.0), module.training)
    return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2)


def take_heads(x: Tensor, heads: tuple[int, ...], dim: int = 1) -> Tensor:
    """Select heads along a dimension. Contiguous heads are not copied."""
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        return x.narrow(dim, heads[0], len(heads))
    index = torch.tensor if torch.compiler.is_compiling() else index_tensor
    return x.index_select(dim, index(heads, device=x.device))


@functools.cache
def index_tensor(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the heads as a tensor. Copying them to a GPU in each call would wait for it."""
    with torch.inference_mode(False):
        return torch.tensor(heads, device=device)


AttentionInterface.register(NAME, windowed_attention)
AttentionMaskInterface.register(NAME, indexed_mask)
