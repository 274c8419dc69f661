"""Softmax attention with a weighted sum of windows. The gradient of a weight is the effect of its window.

Head h attends with each window w, and adds the outputs:

    o_i = sum_w a[h, w] o_iw,    o_iw = sum_j exp(s_ij) v_j / sum_j exp(s_ij),    j in window w of query i

A window contains the first keys of the sequence (sinks) and the last keys up to i. A head may have an extra logit,
whose exponential is added to the denominator.

In each head, one weight is 1 and the others are 0, so the forward pass computes one window. The gradients of all
weights are exact: the gradient of o_i times o_iw, summed over the queries. There is one exception: if exp(s_ij)
underflows for all keys of a window, relative to the largest one of the query, the window does not count for this
query.

Logits and the gradients of probabilities are float32 if the weights are, also under autocast: bfloat16 would round
them before they cancel.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


BLOCK = 256  # queries whose attention matrix is in memory at the same time


def mixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    sizes: Tensor,
    *,
    sinks: int,
    scale: float,
    extra_logits: Tensor | None = None,
) -> Tensor:
    """Attend to earlier keys with one window in each key head.

    Args:
        q: queries, (B, H, T, D).
        k, v: keys and values, (B, Hkv, T, D). Hkv divides H.
        weights: (Hkv, W) float32. Each row contains 1 once, and zeros.
        sizes: number of last keys in each window, (W,) int64.
        sinks: number of first keys in all windows.
        scale: factor on q.k.
        extra_logits: a logit of each query head that takes part in the softmax without a value, (H,). It has no
            gradient.

    Returns:
        (B, H, T, D) in v.dtype. The backward pass computes each block of queries again, so its memory grows with T.
    """
    with torch.autocast(q.device.type, enabled=False):
        return MixedAttention.apply(q, k, v, weights, sizes, sinks, scale, extra_logits)


class MixedAttention(torch.autograd.Function):
    """Compute the attention tile by tile: for a block of queries, in the query heads that share a key head."""

    @staticmethod
    def forward(ctx: Any, q, k, v, weights, sizes, sinks, scale, extra_logits):
        output = v.new_empty(*q.shape[:3], v.shape[3])
        for head, part, keys, dropped in tiles(q, weights, sizes, sinks):
            s = logits(q[part], k[:, head, keys], scale, weights.dtype)
            p = probabilities(s, dropped, extra_of(extra_logits, part))
            output[part] = (p.to(v.dtype).flatten(1, 2) @ v[:, head, keys]).view_as(output[part])
        ctx.save_for_backward(q, k, v, weights, sizes, extra_logits)
        ctx.sinks, ctx.scale = sinks, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient):
        q, k, v, weights, sizes, extra_logits = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv, dweights = (torch.zeros_like(x, dtype=weights.dtype) for x in (k, v, weights))
        for head, part, keys, dropped in tiles(q, weights, sizes, ctx.sinks):
            do, extra = gradient[part].flatten(1, 2), extra_of(extra_logits, part)
            earlier = slice(part[2].stop)
            s = logits(q[part], k[:, head, earlier], ctx.scale, weights.dtype)
            dp = (do.to(s.dtype) @ v[:, head, earlier].mT.to(s.dtype)).view_as(s)  # gradients of the probabilities
            dweights[head] += effects(s, dp, sizes, ctx.sinks, extra)
            p, dp = probabilities(s[..., keys], dropped, extra), dp[..., keys]
            dv[:, head, keys] += p.to(v.dtype).flatten(1, 2).mT @ do
            ds = dp.sub_(p.mul(dp).sum(-1, keepdim=True)).mul_(p).mul_(ctx.scale).to(q.dtype).flatten(1, 2)
            dq[part] = (ds @ k[:, head, keys]).view_as(q[part])
            dk[:, head, keys] += ds.mT @ q[part].flatten(1, 2)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dweights, None, None, None, None


def probabilities(s: Tensor, dropped: Tensor, extra: Tensor | None) -> Tensor:
    """Replace the logits by probabilities."""
    s.masked_fill_(dropped, -torch.inf)
    total = s.logsumexp(-1, keepdim=True)
    return s.sub_(total if extra is None else total.logaddexp(extra)).exp_()


def effects(s: Tensor, dp: Tensor, sizes: Tensor, sinks: int, extra: Tensor | None) -> Tensor:
    """Return the product of the output's gradient and the output of each window, summed over the queries, (W,).

    Args:
        s, dp: logits of all earlier keys, and the gradients of their probabilities, (B, heads, n, keys).
    """
    count, key = s.shape[3], torch.arange(s.shape[3], device=s.device)
    after = torch.arange(s.shape[2] - 1, -1, -1, device=s.device)[:, None]  # number of keys after each query
    s = s.masked_fill(key >= count - after, -torch.inf)
    top = s.amax(-1, keepdim=True)
    top = top if extra is None else top.maximum(extra)
    e = s.sub_(top).exp_()
    products = e * dp
    first = [x[..., :sinks].sum(-1, keepdim=True) for x in (e, products)]
    # The sums begin with the newest key, so none is a difference of larger sums. Keys after a query are 0 in its row.
    place = (after + sizes.clamp(max=count) - 1).clamp(max=count - 1).expand(*s.shape[:2], -1, -1)
    last = []
    for x in (e, products):
        x[..., :sinks] = 0
        last.append(x.flip(-1).cumsum(-1).gather(-1, place))
    total, product = (a + b for a, b in zip(first, last))
    if extra is not None:
        total = total + (extra - top).exp()
    return (product / total.clamp(min=torch.finfo(total.dtype).tiny)).sum((0, 1, 2))


def tiles(q: Tensor, weights: Tensor, sizes: Tensor, sinks: int) -> Iterator[tuple[int, tuple, Tensor, Tensor]]:
    """Yield each tile: its key head, its queries, the keys in their windows, and a mask of dropped keys."""
    tokens, queries = q.shape[2], q.shape[1] // len(weights)
    windows = sizes[weights.argmax(-1)].tolist()
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        query, every = torch.arange(begin, end, device=q.device)[:, None], torch.arange(end, device=q.device)
        for head, size in enumerate(windows):
            first = max(begin + 1 - size, 0)
            keys = torch.cat([every[: min(sinks, first)], every[first:]])
            part = slice(None), slice(head * queries, (head + 1) * queries), slice(begin, end)
            yield head, part, keys, (keys > query) | ((keys <= query - size) & (keys >= sinks))


def logits(q: Tensor, k: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale q.k, (B, heads, n, keys), of q (B, heads, n, D) and k (B, keys, D)."""
    return (q.flatten(1, 2).to(dtype) @ k.mT.to(dtype)).mul_(scale).unflatten(1, q.shape[1:3])


def extra_of(extra_logits: Tensor | None, part: tuple) -> Tensor | None:
    """Return the extra logits of a tile's query heads, (heads, 1, 1)."""
    return None if extra_logits is None else extra_logits[part[1], None, None]


__all__ = ["mixed_attention"]
