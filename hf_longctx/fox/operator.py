"""`forgetting_attention`: one operator in front of the backends that compute it."""

from typing import Any

import torch

from .attention_fox import (
    CLOSED_GATE,
    autocast_inputs,
    check_inputs,
    clear_padding,
    folded_attention,
    forgetting_attention_ref,
)
from .kernels_fox import INTERPRETED
from .key_ranges_fox import find_visible_keys, sequence_starts
from .triton_fox import triton_attention, why_not


BACKENDS = ("triton", "folded", "reference")


def forgetting_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    *,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    keep_first: bool = False,
    sink_bias: torch.Tensor | None = None,
    log_pruning_tolerance: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute causal softmax attention whose keys fade by a forget gate, with gradients for q, k, v and log_f.

        o_i = sum_{j <= i} softmax_j(scale * q_i.k_j + c_i - c_j) v_j,        c_t = sum_{l <= t} log f_l

    Args:
        q: queries, (B, Hq, Tq, D), any floating dtype. The Tq queries are the *last* Tq of the Tk positions.
        k: keys, (B, Hkv, Tk, D). Hkv divides Hq; query head h uses key head h // (Hq // Hkv).
        v: values, of the same shape.
        log_f: natural log of the forget gate per query head and key, (B, Hq, Tk), fp32, <= 0; -inf is a closed gate.
            The gate of position t lies between t - 1 and t: it fades every key before t, not t itself.
        scale: factor on q.k before the decay is added. Default D ** -0.5.
        attention_mask: (B, Tk), 1 = real token, 0 = padding, anywhere in a row. Padding is never attended, does not
            decay, may hold anything, NaN included, and as a query gives 0.
        cu_seqlens: (N + 1,) integers from 0 to T, borders of N sequences packed into one row (B = 1, Tq = Tk): neither
            attention nor decay crosses a border.
        window: number of most recent positions that a query sees, its own included; i - j < window.
        keep_first: the first key of a sequence, padding aside, never fades: c_i - c_j is 0 there. An attention sink
            (arXiv 2309.17453), which costs the folded form three columns, mostly of those that fill up the width.
        sink_bias: (Hq,), the logit of a key without value and decay for each query head, which a row's weights are
            shared with, as `sink_bias` of flash-linear-attention and `sinks` of GPT-OSS. It has a gradient.
        log_pruning_tolerance: permission to leave out keys whose decay bounds their weight in a row below e^tolerance,
            all together (arXiv 2504.06949; -10 there). At most 0.
        backend: default "triton" on NVIDIA GPUs of compute capability 8.0 and later, "folded" elsewhere and with
            `keep_first` or `sink_bias`, which the kernels lack.
            "triton": the kernels of kernels_fox.py; bf16, fp16 or fp32, D up to 256; memory linear in T; the decay is
            exact at any length; the only one that prunes.
            "folded": `scaled_dot_product_attention` with the decay folded into the keys (attention_fox.py), on any
            device; memory linear in T, but for a mask of Tq * Tk booleans where Tq < Tk or with a window.
            The decay is resolved to 6e-8 * -c in the exponent, and a closed gate adds 120 to -c; in fp16, -c must
            stay below 64 * scale * 65504.
            "reference": `forgetting_attention_ref`, the definition; memory grows with Tq * Tk. It has second and
            forward-mode derivatives, as "folded" has under `sdpa_kernel(SDPBackend.MATH)` of torch.

    Returns:
        (B, Hq, Tq, D) in q.dtype.

    Raises:
        ValueError: a shape, dtype or value above does not hold.
        ImportError, NotImplementedError: the backend is not installed or cannot do this.

    Source: arXiv 2503.02130, eq. 11.
    """
    q, k, v = autocast_inputs(q, k, v)
    attention_mask, cu_seqlens = (x if x is None else x.to(q.device) for x in (attention_mask, cu_seqlens))
    masks: dict[str, Any] = dict(attention_mask=attention_mask, cu_seqlens=cu_seqlens, window=window)
    sinks: dict[str, Any] = dict(keep_first=keep_first, sink_bias=sink_bias)
    check_inputs(
        q, k, v, log_f, scale=scale, **masks, log_pruning_tolerance=log_pruning_tolerance, sink_bias=sink_bias
    )
    backend = choose_backend(backend, q, log_pruning_tolerance, keep_first or sink_bias is not None)
    if backend == "reference":
        return forgetting_attention_ref(q, k, v, log_f, scale=scale, **masks, **sinks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    token_mask = None if attention_mask is None else attention_mask.bool()
    if backend == "triton":
        return _run_triton(q, k, v, log_f, scale, token_mask, cu_seqlens, window, log_pruning_tolerance)
    log_f = log_f.clamp(min=CLOSED_GATE)
    if cu_seqlens is None:
        return folded_attention(q, k, v, log_f, scale, token_mask, window, **sinks)
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    sequences = zip(*(x.split(lengths, dim=2) for x in (q, k, v, log_f)))
    options: dict[str, Any] = dict(scale=scale, window=window, **sinks)
    return torch.cat([folded_attention(*sequence, **options) for sequence in sequences], dim=2)


def _run_triton(q, k, v, log_f, scale, token_mask, cu_seqlens, window, log_pruning_tolerance):
    Tq, Tk = q.shape[2], k.shape[2]
    sequence_start = None if cu_seqlens is None else sequence_starts(cu_seqlens, Tk)
    visible = find_visible_keys(Tq, Tk, q.device, token_mask=token_mask, sequence_start=sequence_start, window=window)
    options = dict(scale=scale, log_pruning_tolerance=log_pruning_tolerance)
    if visible.order is None:
        return triton_attention(q, k, v, log_f, visible, **options)
    # With padding between real tokens, the kernels do not hide queries that are padding.
    o = triton_attention(*clear_padding(q, k, v, log_f, token_mask), visible, **options)
    return o.masked_fill(~token_mask[:, None, -Tq:, None], 0.0)


def triton_runs_well(q: torch.Tensor) -> bool:
    """Return True if the Triton kernels can run on q without the interpreter."""
    return not INTERPRETED.value and why_not(q.shape[-1], q.dtype, q.device) is None


def choose_backend(
    backend: str | None, q: torch.Tensor, log_pruning_tolerance: float | None, sinks: bool = False
) -> str:
    """Return the backend that computes a call, `backend` or the default; raise an error if that cannot compute it."""
    if backend is None:  # the default is free to prune nothing
        return "triton" if triton_runs_well(q) and not sinks else "folded"
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}, or None.")
    if backend == "triton" and sinks:
        raise NotImplementedError(
            "the Triton kernels have no keep_first and no sink_bias. Use backend='folded', or leave them out."
        )
    if backend == "triton" and (reason := why_not(q.shape[-1], q.dtype, q.device)) is not None:
        raise reason
    if backend != "triton" and log_pruning_tolerance is not None:
        raise NotImplementedError(
            f"backend={backend!r} computes every key, so it has no log_pruning_tolerance; leave one of the two out."
        )
    return backend
