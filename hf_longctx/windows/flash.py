"""Sinks and a window by FlashAttention: a few kernels for a group of heads, in place of one for each band of queries.

FlashAttention supports a window, but not the sinks before it. We compute the attention to the sinks separately, and
add both outputs. Their weights follow from the sums of exponentials. Our kernel is the one in PyTorch, because the
attention functions of transformers do not return these sums.
"""

import torch
from torch import Tensor


def supports_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether FlashAttention supports these tensors, and no gradient is needed."""
    if not query.is_cuda or torch.version.hip or torch.compiler.is_compiling() or query.shape[-1] % 8:
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, True)
    return torch.backends.cuda.can_use_flash_attention(params)


def flash_windows(
    query: Tensor, key: Tensor, value: Tensor, window: int, sinks: int, scale: float, s_aux: Tensor | None = None
) -> Tensor:
    """Attend to the first `sinks` keys and to the last `window` keys: (B, H, T, D) -> (B, T, H, D).

    Args:
        query: (B, H, T, D).
        key, value: (B, Hkv, T, D), without padding.
        scale: factor on q.k.
        s_aux: a logit of each query head that takes part in the softmax without a value, (H,).
    """
    reach = sinks + window
    part, k, v = (x[:, :, :reach] for x in (query, key, value))  # these queries attend to all earlier keys
    outputs = [add_keys(*flash(part, k, v, -1, scale), part, k[:, :, :0], v[:, :, :0], scale, s_aux)]
    if reach < query.shape[2]:
        part, k, v = query[:, :, reach:], key[:, :, sinks + 1 :], value[:, :, sinks + 1 :]  # windows without sinks
        output, lse = flash(part, k, v, window - 1, scale)
        outputs.append(add_keys(output, lse, part, key[:, :, :sinks], value[:, :, :sinks], scale, s_aux))
    return torch.cat(outputs, 1)


def flash(query: Tensor, key: Tensor, value: Tensor, earlier: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return causal attention, (B, T, H, D), and the logarithms of the sums of exponentials, (B, H, T) float32.

    earlier: number of earlier keys that a query attends to. -1: all.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False,
        scale=scale, window_size_left=earlier, window_size_right=0,
    )[:2]  # fmt: skip


def add_keys(
    output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, s_aux: Tensor | None
) -> Tensor:
    """Add keys, (B, Hkv, n, D), and a logit without a value to the softmax of attention, (B, T, H, D).

    lse: logarithms of the sums of exponentials, (B, H, T).
    """
    queries = query.to(lse.dtype).unflatten(1, (key.shape[1], -1))  # (B, Hkv, G, T, D)
    scores = queries @ key[:, :, None].to(lse.dtype).mT * scale  # (B, Hkv, G, T, n)
    if s_aux is not None:
        extra = s_aux.to(lse.dtype).view(1, *scores.shape[1:3], 1, 1)
        scores = torch.cat([scores, extra.expand(*scores.shape[:-1], 1)], -1)
    if not scores.shape[-1]:
        return output
    added = scores.softmax(-1)[..., : key.shape[2]] @ value[:, :, None].to(lse.dtype)
    share = (scores.logsumexp(-1).flatten(1, 2) - lse).sigmoid().transpose(1, 2)[..., None]  # (B, T, H, 1)
    return torch.lerp(output.to(lse.dtype), added.flatten(1, 2).transpose(1, 2), share).to(output.dtype)
