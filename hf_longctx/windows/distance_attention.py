"""Softmax attention in which a key's distance from the query gives it a weight: windows that have a gradient.

Query i of head h attends to key j with the weight w[h, i - j]:

    o_i = sum_j w[h, i - j] exp(s_ij) v_j / sum_j w[h, i - j] exp(s_ij)

Weights of 0 and 1 are a window. The gradient also exists at 0: it is the effect of a key that the window drops. This
effect is bounded: the logit of a dropped key counts as at most the largest logit of all other keys. A head may have an
extra logit, whose exponential is added to the denominator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


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
        weights: (Hkv, T) float32, weight of the keys at distance 0, ..., T - 1. The weight at distance 0 must be 1.
        scale: factor on q.k.
        extra_logits: a logit of each query head that takes part in the softmax without a value, (H,).

    Returns:
        (B, H, T, D) in v.dtype. The backward pass computes each block of queries again, so its memory grows with T.
    """
    blocks = []
    for end in range(BLOCK, q.shape[2] + BLOCK, BLOCK):
        end = min(end, q.shape[2])
        part = (q[:, :, len(blocks) * BLOCK : end], k[:, :, :end], v[:, :, :end], weights, sinks, scale, extra_logits)
        blocks.append(checkpoint(attend_last, *part, use_reentrant=False))
    return torch.cat(blocks, 2)


def attend_last(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, sinks: int, scale: float, extra_logits: Tensor | None
) -> Tensor:
    """Compute the attention of a block of queries, (B, H, n, D), which are the last tokens of k and v."""
    (B, H, n, D), (_, Hkv, keys, _) = q.shape, k.shape
    column = torch.arange(keys, device=q.device)
    distance = column[keys - n :, None] - column  # (n, keys)
    w = by_distance(weights, n, keys).masked_fill((column < sinks) & (distance >= 0), 1.0)  # (Hkv, n, keys)
    w = w[:, None]  # the query heads of a key head share its weights
    s = scale * (q.reshape(B, Hkv, -1, D) @ k.mT).float().unflatten(2, (H // Hkv, n))  # (B, Hkv, H / Hkv, n, keys)
    largest = s.detach().masked_fill(w.detach() == 0, -torch.inf).amax(-1, keepdim=True)
    p = (
        w * (s - largest).clamp(max=0.0).exp()
    )  # bounds the effect of a dropped key with a larger logit than all others
    total = p.sum(-1, keepdim=True)
    if extra_logits is not None:
        extra = (extra_logits.float().view(Hkv, -1, 1, 1) - largest).exp()
        total = total + extra
    p = p / total
    return (p.to(v.dtype).flatten(2, 3) @ v).view(B, H, n, D)


def by_distance(weights: Tensor, queries: int, keys: int) -> Tensor:
    """Expand weights of distances, (H, T), to a matrix (H, queries, keys). The queries are the last of the keys.

    The entry of query i and key j is `weights[:, keys - queries + i - j]`, and 0 for a later key.

    >>> by_distance(torch.tensor([[1.0, 0.5, 0.25]]), 2, 3)
    tensor([[[0.5000, 1.0000, 0.0000],
             [0.2500, 0.5000, 1.0000]]])
    """
    # A row is the flipped weights, shifted by one entry compared with the next row. Reading rows of one entry more
    # than they have shifts each of them, and the backward pass is a sum instead of a scatter.
    row = F.pad(weights[:, :keys].flip(-1), (0, queries))  # (H, keys + queries)
    shifted = row[:, None].expand(-1, queries, -1).flatten(1)
    shifted = F.pad(shifted, (0, queries)).view(len(weights), queries, -1)  # (H, queries, keys + queries + 1)
    return shifted[..., :keys].flip(1)
