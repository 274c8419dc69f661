"""Forgetting attention in both directions of time, for encoders: the causal kernels of kernels_fox.py, used twice.

    o_i = sum_j softmax_j(scale * q_i.k_j - |c_i - c_j|) v_j,        c_t = sum_{l <= t} log f_l

Lin et al. (arXiv 2503.02130, sec. 6) leave the non-causal case to future work; this is our reading. The gate of token
t lies between t - 1 and t, and a key fades by all gates between it and the query, on either side:
F_ij = prod_{min(i, j) < l <= max(i, j)} f_l. So the decay is symmetric, no token fades for itself, reversing time
(with each gate between the same two tokens) reverses the result, and with open gates this is plain bidirectional
attention.

The past of a query, itself included, is causal forgetting attention. So is its future, in reversed time: the queries
T - 2 ... 0 beside the keys T - 1 ... 1, so that each row ends with the key next to its query. The kernel counts the
decay from that key; the gate between the two, log f_{i+1}, is the same for the whole row and is added to its
log-sum-exp. The log-sum-exps L mix the two results:

    o_i = (1 - w_i) o_i^past + w_i o_i^future,        w_i = sigmoid(L_i^future + log f_{i+1} - L_i^past)
"""

import torch

from .key_ranges_fox import VisibleKeys, find_query_end
from .triton_fox import attention_from_sums, sort_inputs


def bidirectional_attention(q, k, v, log_f, visible=None, *, scale=None, log_pruning_tolerance=None) -> torch.Tensor:
    """`forgetting_attention(..., causal=False)` of checked inputs; arguments and result as in `triton_attention`.

    visible: the keys that *causal* queries see. In the other direction, i sees j exactly if j sees i.
    """
    T = k.shape[2]
    visible = VisibleKeys(None, T) if visible is None else visible
    q, k, v, c, first, stop = sort_inputs(q, k, v, log_f, visible)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = scale, log_pruning_tolerance, None
    o, lse = attention_from_sums(q, k, v, c, first, stop, *options)
    if T == 1:
        return o

    later_first = later_end = None
    if stop is not None:
        later_first = (T - stop[..., :-1]).flip(-1)
        later_end = find_query_end(later_first, T - 1)
    later_q, later_k, later_v = q[:, :, :-1].flip(2), k[:, :, 1:].flip(2), v[:, :, 1:].flip(2)
    later_c = -c[..., 1:].flip(-1)
    later_o, later_lse = attention_from_sums(later_q, later_k, later_v, later_c, later_first, later_end, *options)
    later_o, later_lse = later_o.flip(2), later_lse.flip(-1)

    gap = later_lse + (c[..., 1:] - c[..., :-1]).float() - lse[..., :-1]  # (B, Hq, T - 1)
    # A row that sees a later token sees itself too, so its lse is finite. In the other rows the future has weight 0;
    # -inf in place of -inf - -inf keeps NaN out of result and gradient.
    share = gap.masked_fill(later_lse == -torch.inf, -torch.inf).sigmoid().unsqueeze(-1)
    mixed = torch.lerp(o[:, :, :-1].float(), later_o.float(), share).to(o.dtype)
    o = torch.cat([mixed.transpose(1, 2), o[:, :, -1:].transpose(1, 2)], dim=1).transpose(1, 2)
    return visible.unsort_queries(o)
