"""Softmax attention in which a key's distance from the query gives it a weight: windows that have a gradient.

Query i of head h attends to key j with the weight w[h, i - j]:

    o_i = sum_j w[h, i - j] exp(s_ij) v_j / sum_j w[h, i - j] exp(s_ij)

Weights of 0 and 1 are a window. The gradient also exists at 0: it is the effect of a key that the window drops. This
effect is bounded: the logit of a dropped key counts as at most the largest logit of the keys with a weight. A head may
have an extra logit, whose exponential is added to the denominator.

Logits and the gradients of probabilities are float32 if the weights are: bfloat16 would round them before they cancel.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


BLOCK = 256  # queries whose attention matrix is in memory at the same time


def distance_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    *,
    sinks: int,
    scale: float,
    extra_logits: Tensor | None = None,
) -> Tensor:
    """Attend to all earlier keys, each with the weight of its distance. The first `sinks` keys have the weight 1.

    Args:
        q: queries, (B, H, T, D).
        k, v: keys and values, (B, Hkv, T, D). Hkv divides H.
        weights: (Hkv, T) float32, weight of the keys at distance 0, ..., T - 1. The weight at distance 0 must be 1. If
            all weights from a distance d on are 0, those from 2d on have no gradient, and their keys are not computed.
        scale: factor on q.k.
        extra_logits: a logit of each query head that takes part in the softmax without a value, (H,). It has no
            gradient.

    Returns:
        (B, H, T, D) in v.dtype. The backward pass computes each block of queries again, so its memory grows with T.
    """
    return DistanceAttention.apply(q, k, v, weights, sinks, scale, extra_logits)


class DistanceAttention(torch.autograd.Function):
    """Compute the attention tile by tile: for a block of queries, in the query heads that share a key head."""

    @staticmethod
    def forward(ctx: Any, q, k, v, weights, sinks, scale, extra_logits):
        output = v.new_empty(*q.shape[:3], v.shape[3])
        largest, total = weights.new_empty(2, *q.shape[:3], 1)
        for head, part, columns, index in tiles(q, weights, sinks):
            s = logits(q[part], k[:, head, columns], scale, weights.dtype)
            w = table(weights[head])[index]
            m = s.masked_fill(w == 0, -torch.inf).amax(-1, keepdim=True)
            p = s.sub_(m).clamp_(max=0).exp_().mul_(w)
            divisor = p.sum(-1, keepdim=True)
            if extra_logits is not None:
                divisor += (extra_logits[part[1], None, None] - m).exp()
            output[part] = (p.div_(divisor).to(v.dtype).flatten(1, 2) @ v[:, head, columns]).view_as(output[part])
            largest[part], total[part] = m, divisor
        ctx.save_for_backward(q, k, v, weights, largest, total)
        ctx.sinks, ctx.scale = sinks, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient):
        q, k, v, weights, largest, total = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=weights.dtype) for x in (k, v))
        dweights = F.pad(torch.zeros_like(weights), (0, 2))  # see `table`
        for head, part, columns, index in tiles(q, weights, ctx.sinks):
            key, value, do = k[:, head, columns], v[:, head, columns], gradient[part].flatten(1, 2)
            s = logits(q[part], key, ctx.scale, weights.dtype)
            unweighted = s.sub_(largest[part]).clamp_(max=0).exp_().div_(total[part])
            w = table(weights[head])[index]
            p = unweighted * w
            dv[:, head].index_add_(1, columns, (p.to(v.dtype).flatten(1, 2).mT @ do).to(dv.dtype))
            ds = (do.to(p.dtype) @ value.mT.to(p.dtype)).view_as(s)  # of the probabilities
            ds.sub_(p.mul_(ds).sum(-1, keepdim=True)).mul_(unweighted)
            dweights[head].index_add_(0, index.flatten(), ds.sum((0, 1)).flatten())
            ds = ds.mul_(w * ctx.scale).to(q.dtype).flatten(1, 2)
            dq[part] = (ds @ key).view_as(q[part])
            dk[:, head].index_add_(1, columns, (ds.mT @ q[part].flatten(1, 2)).to(dk.dtype))
        return dq, dk.to(k.dtype), dv.to(v.dtype), dweights[:, :-2], None, None, None


def tiles(q: Tensor, weights: Tensor, sinks: int) -> Iterator[tuple[int, tuple, Tensor, Tensor]]:
    """Yield each tile: its key head, the indices of its queries in q, its keys, and their entries in `table`."""
    tokens, queries = q.shape[2], q.shape[1] // len(weights)
    farthest = torch.arange(1, tokens + 1, device=q.device).mul(weights != 0).amax(-1).tolist()
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        column = torch.arange(end, device=q.device)
        for head, last in enumerate(farthest):
            columns = column[(column < sinks) | (column > begin - 2 * last)]
            index = column[begin:, None] - columns
            dropped = (index < 0) | (index >= 2 * last)
            index = index.masked_fill(dropped, tokens).masked_fill_((columns < sinks) & (index >= 0), tokens + 1)
            part = slice(None), slice(head * queries, (head + 1) * queries), slice(begin, end)
            yield head, part, columns, index


def table(weights: Tensor) -> Tensor:
    """Return the weights of all distances, (T,), then those of keys that are not computed and of the first keys."""
    return torch.cat([weights, weights.new_tensor([0.0, 1.0])])


def logits(q: Tensor, k: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale q.k, (B, heads, n, keys), of q (B, heads, n, D) and k (B, keys, D)."""
    return (q.flatten(1, 2).to(dtype) @ k.mT.to(dtype)).mul_(scale).unflatten(1, q.shape[1:3])


__all__ = ["distance_attention"]
