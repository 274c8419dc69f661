"""Forgetting attention in both directions of time, for encoders: the causal kernels of kernels_fox.py, used twice.

    o_i = sum_j softmax_j(scale * q_i.k_j - |c_i - c_j|) v_j,        c_t = sum_{l <= t} log f_l

Lin et al. (arXiv 2503.02130, sec. 6) leave the non-causal case to future work; this is our reading of it. The gate of
token t stands on the border between t - 1 and t, and a key fades by all gates between it and the query, on either side:
F_ij = prod_{min(i, j) < l <= max(i, j)} f_l. So the decay is symmetric, no token fades for itself, reversing time (each
gate stays on its border) reverses the result, and with open gates this is plain bidirectional attention.

What lies before a query, itself included, is causal forgetting attention. So is what lies after it, in reversed time:
the queries T - 2 ... 0 beside the keys T - 1 ... 1, so that each row ends with the key next to its query. The kernel
then counts the decay from that key; the gate between the two, log f_{i+1}, is the same for the whole row and joins its
log-sum-exp. The log-sum-exps L tell how the two results mix:

    o_i = (1 - w_i) o_i^past + w_i o_i^future,        w_i = sigmoid(L_i^future + log f_{i+1} - L_i^past)
"""

import torch

from .bounds_fox import stop_query
from .kernels_fox import triton
from .triton_fox import attend, checked_call, counted_gates


__all__ = ["bidirectional_forgetting_attention"]


def bidirectional_forgetting_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    *,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    log_pruning_tolerance: float | None = None,
    logit_bound: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Non-causal softmax attention with a forget gate in O(T) memory, with gradients for all inputs; needs Triton.

    Args:
        q: queries, (B, Hq, T, D), bf16, fp16 or fp32; D from 1 to 256.
        k, v: keys and values, (B, Hkv, T, D). Query head h uses kv head h // (Hq // Hkv).
        log_f: natural log of the forget gate per query head and token, (B, Hq, T), fp32, <= 0; -inf is a closed gate. The
            gate of token t fades keys before t for queries from t on, and keys from t on for queries before t. That of
            the first token fades nothing.
        scale: factor on q.k before the decay is added. Default D ** -0.5.
        attention_mask: (B, T), nonzero for real tokens, which must be contiguous in each row. Padding is never attended
            and does not decay.
        starts, lengths: (B,) integers, the same in numbers; see `first_visible_key`.
        cu_seqlens: (N + 1,) integers 0 ... T, borders of sequences packed into a batch of one.
        window: query i sees the keys with |i - j| < window.
        log_pruning_tolerance: leave out key blocks that the decay bounds below e^tolerance of a row's weight in all (arXiv
            2504.06949; -10 there). At most 0. The past and the future each lose at most this share of their own weight,
            hence so does their sum.
        logit_bound: upper bound of |scale * q.k|, broadcastable to (B, Hq). Default: from the largest row norms of q
            and k.

    Returns:
        (B, Hq, T, D) in q.dtype, stored as (B, T, Hq, D). Rows that see no key are 0. Padding may hold anything, NaN
        included.

    Raises:
        ImportError: Triton is not installed.
        ValueError: a shape, dtype or device above does not hold.
        NotImplementedError: a head size above 256, another dtype, padding between real tokens.

    `forgetting_attention_ref(..., causal=False)` is the definition, on any device.
    """
    if triton is None:
        raise ImportError(
            "bidirectional_forgetting_attention needs triton: pip install 'hf-longctx[triton]'. Without it, "
            "forgetting_attention_ref(..., causal=False) computes the same in memory that grows with T * T."
        )
    q, k, v, scale, first_key = checked_call(
        q,
        k,
        v,
        log_f,
        scale,
        log_pruning_tolerance,
        attention_mask=attention_mask,
        starts=starts,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        window=window,
    )
    T = k.shape[2]
    if q.shape[2] != T:
        raise ValueError(f"{q.shape[2]} queries for {T} keys; in both directions, each token is query and key.")
    if q.numel() == 0:
        return q * (k.sum() + v.sum() + log_f.sum())  # nothing to compute, but gradients have a way back
    stop = None if first_key is None else stop_query(first_key, T)
    log_f = counted_gates(log_f, stop)
    c = log_f.double().cumsum(-1)
    how = scale, log_pruning_tolerance, logit_bound
    o, lse = attend(q, k, v, c, first_key, stop, *how)
    if T == 1:
        return o

    later_first = later_stop = None
    if stop is not None:
        later_first = (T - stop[..., :-1]).flip(-1)  # i sees j exactly if j sees i
        later_stop = stop_query(later_first, T - 1)
    later_q, later_k, later_v = q[:, :, :-1].flip(2), k[:, :, 1:].flip(2), v[:, :, 1:].flip(2)
    later_o, later_lse = attend(later_q, later_k, later_v, -c[..., 1:].flip(-1), later_first, later_stop, *how)
    later_o, later_lse = later_o.flip(2), later_lse.flip(-1)

    gap = later_lse + log_f[..., 1:] - lse[..., :-1]  # (B, Hq, T - 1)
    # Who sees a later token sees itself too. The others weigh it 0, and -inf - -inf reaches neither result nor gradient.
    share = gap.masked_fill(later_lse == -torch.inf, -torch.inf).sigmoid().unsqueeze(-1)
    mixed = torch.lerp(o[:, :, :-1].float(), later_o.float(), share).to(o.dtype)
    return torch.cat([mixed.transpose(1, 2), o[:, :, -1:].transpose(1, 2)], dim=1).transpose(1, 2)
