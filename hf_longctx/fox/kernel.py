"""The Triton kernels as a kernel of the Hub: what `attn_implementation="hf-longctx/forgetting-attention"` loads.

`hf_longctx.hub.build_kernel` copies this file as the kernel's `__init__.py`, and beside it the files that it imports.
A FoX calls the functions imported here in place of those in its own triton_fox.py; see `GatedKernels` in
backend_fox.py. Any other model of transformers gets plain causal attention, by `flash_attn_forward`.
"""

import torch

from .attention_fox import autocast_inputs
from .key_ranges_fox import VisibleKeys, count_pruned_blocks, find_visible_keys
from .triton_fox import (
    FOX_INTERFACE,
    attention_from_sums,
    is_decoding,
    triton_attention,
    triton_decode,
    why_not,
)


supports_flash_attn = True  # transformers registers `flash_attn_forward` of a kernel that has this name


def flash_attn_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Compute causal attention without gates, as an attention function of transformers.

    Args:
        module: the attention layer, from which only `is_causal` is read.
        query: (B, Hq, Tq, D). The Tq queries are the last of the Tk positions, or of a static cache's filled slots.
        key, value: (B, Hkv, Tk, D).
        attention_mask: the mask for SDPA, (B, 1, Tq, Tk) bool, True for what a query sees; or None.
        scaling: factor on q.k. Default D ** -0.5.

    Returns:
        (B, Tq, Hq, D), and None in place of attention weights.

    Raises:
        ImportError, NotImplementedError, ValueError: the kernels cannot run on this device, dtype or head size, or
            under this mask; dtypes or head sizes differ; or dropout, attention weights, attention in both directions,
            soft-capped logits or sinks are requested.
    """
    query, key, value = autocast_inputs(query, key, value)
    if (reason := why_not(query.shape[-1], query.dtype, query.device)) is not None:
        raise reason
    if not query.dtype == key.dtype == value.dtype or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        raise NotImplementedError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}, with heads of {query.shape[-1]}, "
            f"{key.shape[-1]} and {value.shape[-1]} dimensions; forgetting attention takes one dtype and one head size. Use "
            "attn_implementation='sdpa'."
        )
    if dropout > 0 or kwargs.get("output_attentions"):
        raise ValueError(
            f"forgetting attention has neither dropout nor attention weights to return, but dropout={dropout}, "
            f"output_attentions={kwargs.get('output_attentions')}. Use attn_implementation='eager'."
        )
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"forgetting attention has no {name}. Use attn_implementation='eager'.")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("forgetting attention is causal here. Use attn_implementation='sdpa'.")
    visible = None
    if attention_mask is not None:
        visible = visible_keys(attention_mask)
        key, value = key[:, :, : visible.end], value[:, :, : visible.end]
    log_f = query.new_zeros(query.shape[0], query.shape[1], key.shape[2], dtype=torch.float32)
    return triton_attention(query, key, value, log_f, visible, scale=scaling).transpose(1, 2), None


def visible_keys(mask) -> VisibleKeys:
    """Read a mask, (B, 1, Tq, Tk) bool, as one number per query, which sees its own key and a span before it.

    A query that does not see its own key is padding, whose output nobody reads, and sees nothing here.

    `end` of the result is below Tk for a static cache, whose free slots no query sees.

    Raises:
        ValueError: the mask is not boolean.
        NotImplementedError: another mask.
    """
    if mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask of four dimensions is {mask.dtype}; it must be boolean, True for what a query sees. Convert a "
            "mask that is added to logits: mask == 0."
        )
    Tq, Tk = mask.shape[-2:]
    if not mask.diagonal(Tk - Tq, -2, -1).any():  # free slots of a static cache follow the queries' own keys
        slots = torch.arange(Tk, device=mask.device)
        Tk = max(Tq, 1 + int(torch.where(mask, slots, -1).max()))
        mask = mask[..., :Tk]
    keys = torch.arange(Tk, device=mask.device)
    last = keys[Tk - Tq :, None]  # (Tq, 1)
    real = mask.diagonal(Tk - Tq, -2, -1)  # (B, 1, Tq)
    first = torch.where(real, mask.int().argmax(-1), Tk)
    first = first.flip(-1).cummin(-1).values.flip(-1)  # `VisibleKeys` does not decrease along a row
    span = (keys >= first[..., None]) & (keys <= last)
    if not torch.equal(mask & real[..., None], span & real[..., None]):
        raise NotImplementedError(
            "forgetting attention knows causal masks with padding on one side, packed documents or a window, but not this "
            "attention_mask. Use attn_implementation='sdpa'."
        )
    return VisibleKeys(first.int(), Tk)


__all__ = [
    "FOX_INTERFACE",
    "VisibleKeys",
    "attention_from_sums",
    "count_pruned_blocks",
    "find_visible_keys",
    "flash_attn_forward",
    "is_decoding",
    "supports_flash_attn",
    "triton_attention",
    "triton_decode",
    "why_not",
]
