"""Forgetting attention in Triton: checks its input, launches the kernels of kernels_fox.py, and gives them gradients.

The launchers are custom operators, which is what torch.compile and autograd see of them.

Public: `forgetting_attention_triton`; `attend` and `attend_few` for callers that have checked their input.
"""

import contextlib

import torch

from .bounds_fox import (
    bound_from_norms,
    bound_per_head,
    first_kept_key,
    first_visible_key,
    pruning_threshold,
    stop_query,
    tally_pruned,
)
from .kernels_fox import (
    INTERPRETED,
    block_decay_kernel,
    decode_kernel,
    dkdv_kernel,
    dq_kernel,
    forward_kernel,
    merge_kernel,
    prune_kernel,
    triton,
)
from .tiles_fox import Tile, padded, tiles_for


__all__ = ["forgetting_attention_triton"]


# Launchers: each allocates its outputs and calls its kernels.


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch(kernel, programs: int, tile: Tile, *args, **constants) -> None:
    kernel[(programs,)](*args, num_warps=tile.warps, num_stages=tile.stages, **constants)


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Batch, head and row strides of each tensor, (B, H, T, ...)."""
    return tuple(s for x in tensors for s in x.stride()[:3])


def _unit_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bound(bound: torch.Tensor | None, B: int, H: int) -> tuple[torch.Tensor | None, int, int]:
    """A per-row bound, (B or 1, H or 1, T), with the strides that broadcast it."""
    if bound is None:
        return None, 0, 0
    bound = bound.contiguous()
    return bound, *bound.expand(B, H, -1).stride()[:2]


def _empty_output(q: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D) in the memory order (B, T, H, D), which the output projection reads without a copy."""
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D).transpose(1, 2)


def _decay_in_block(c: torch.Tensor, e: torch.Tensor, block: int) -> torch.Tensor:
    """Decay from each key to the last key of its aligned block, in units of log 2; (B, H, T)."""
    d, T = torch.empty_like(c), c.shape[-1]
    with _on(c.device):
        launch(
            block_decay_kernel, triton.cdiv(T, block) * (c.numel() // T), Tile(1, block, 1, 1), c, e, d, T, BN=block
        )
    return d


def launch_forward(q, k, v, c, e, first_key, stop_query, logit_bound, scale):
    B, Hq, Tq, D = q.shape
    o, lse = _empty_output(q), q.new_empty(B, Hq, Tq, dtype=torch.float32)
    tile = tiles_for(q.device, D, q.dtype).forward
    d = _decay_in_block(c, e, tile.BN)
    first_key, *s_first = _bound(first_key, B, Hq)
    with _on(q.device):
        launch(
            forward_kernel, triton.cdiv(Tq, tile.BM) * B * Hq, tile,
            q, k, v, c, e, d, first_key, logit_bound, o, lse, *_strides(q, k, v, o), *s_first,
            Tq, k.shape[2], Hq, Hq // k.shape[1], scale,
            D=D, BM=tile.BM, BN=tile.BN, BD=padded(D), BOUNDED=first_key is not None, KNOWN=logit_bound is not None,
        )  # fmt: skip
    return o, lse


def launch_backward(do, dlse, q, k, v, c, e, first_key, stop_query, o, lse, scale):
    B, Hq, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    do, dlse = _unit_last(do), dlse.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dc, delta, fade = torch.zeros_like(c), torch.empty_like(lse), torch.empty_like(lse)
    tiles = tiles_for(q.device, D, q.dtype)
    d = _decay_in_block(c, e, tiles.dq.BN)
    bounded = first_key is not None
    first_key, *s_first = _bound(first_key, B, Hq)
    stop_query, *s_stop = _bound(stop_query, B, Hq)
    with _on(q.device):
        launch(
            dq_kernel, triton.cdiv(Tq, tiles.dq.BM) * B * Hq, tiles.dq,
            q, k, v, c, e, d, first_key, o, lse, do, dlse, dq, dc, delta, fade,
            *_strides(q, k, v, o, do, dq), *s_first,
            Tq, Tk, Hq, Hq // Hkv, scale,
            D=D, BM=tiles.dq.BM, BN=tiles.dq.BN, BD=padded(D), BOUNDED=bounded, BR=tiles.dkdv.BM,
        )  # fmt: skip
        launch(
            dkdv_kernel, triton.cdiv(Tk, tiles.dkdv.BN) * B * Hkv, tiles.dkdv,
            q, k, v, c, e, stop_query, lse, do, delta, fade, dk, dv, dc, *_strides(q, k, v, do, dk, dv), *s_stop,
            Tq, Tk, Hq, Hq // Hkv, scale,
            D=D, BM=tiles.dkdv.BM, BN=tiles.dkdv.BN, BD=padded(D), BOUNDED=bounded, BS=min(tiles.dkdv.BM, 16),
        )  # fmt: skip
    return dq, dk, dv, dc


def launch_decode(q, k, v, gates, first_key, end, bound, scale, unit, bound_unit, tolerance):
    B, Hq, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    G = Hq // Hkv
    tile = tiles_for(q.device, D, q.dtype).decode
    rows = triton.cdiv(G * Tq, tile.BM) * B * Hkv
    blocks = triton.cdiv(Tk, tile.BN)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 4
    n_split = min(triton.cdiv(2 * processors, rows), blocks)
    o_split = q.new_empty(n_split, B, Hq, Tq, D, dtype=torch.float32)
    lse = q.new_empty(n_split, B, Hq, Tq, dtype=torch.float32)
    o = _empty_output(q)
    first_key, *s_first = _bound(first_key, B, Hq)
    parts, ends = gates.shape[-1], end is not None
    with _on(q.device):
        if bound is not None:
            bound, kept = bound.expand(B, Hq), q.new_empty(B, Hq, Tq, dtype=torch.int32)
            launch(
                prune_kernel, triton.cdiv(B * Hq * Tq, tile.BM), tile._replace(warps=1),
                gates, first_key, end, bound, kept, *gates.stride(), *s_first, *bound.stride(),
                Tq, Tk, Hq, G, B * Hq * Tq, blocks.bit_length(), unit, bound_unit, tolerance,
                BM=tile.BM, BN=tile.BN, BOUNDED=first_key is not None, P=parts, ENDS=ends,
            )  # fmt: skip
            first_key, *s_first = _bound(kept, B, Hq)
        launch(
            decode_kernel, n_split * rows, tile,
            q, k, v, gates, first_key, end, o_split, lse, *_strides(q, k, v), *gates.stride(), *s_first,
            Tq, Tk, Hq, G, B, n_split, scale, unit,
            D=D, BM=tile.BM, BN=tile.BN, BD=padded(D), BOUNDED=first_key is not None, P=parts, ENDS=ends,
            W=1 if any(s % 8 for s in _strides(k, v)) else 8,
        )  # fmt: skip
        launch(
            merge_kernel, B * Hq * Tq, tile._replace(warps=1),
            o_split, lse, o, *_strides(o), Tq, Hq, B * Hq * Tq, n_split, D=D, BD=padded(D),
        )  # fmt: skip
    return o


if triton is not None:
    # Remote code may be imported beside the installed package, or twice: each copy has operators of its own.
    _SPACE = __name__.removesuffix(".fox.triton_fox").replace(".", "_")
    _INPUTS = "Tensor q, Tensor k, Tensor v, Tensor c, Tensor e, Tensor? first_key, Tensor? stop_query"
    fox_forward = torch.library.custom_op(
        f"{_SPACE}::fox_forward",
        launch_forward,
        mutates_args=(),
        schema=f"({_INPUTS}, Tensor? logit_bound, float scale) -> (Tensor, Tensor)",
    )
    fox_backward = torch.library.custom_op(
        f"{_SPACE}::fox_backward",
        launch_backward,
        mutates_args=(),
        schema=f"(Tensor do, Tensor dlse, {_INPUTS}, Tensor o, Tensor lse, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    )
    fox_decode = torch.library.custom_op(
        f"{_SPACE}::fox_decode",
        launch_decode,
        mutates_args=(),
        schema="(Tensor q, Tensor k, Tensor v, Tensor gates, Tensor? first_key, Tensor? end, Tensor? bound, "
        "float scale, float unit, float bound_unit, float tolerance) -> Tensor",
    )

    @fox_forward.register_fake
    def _(q, k, v, c, e, first_key, stop_query, logit_bound, scale):
        return _empty_output(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    @fox_backward.register_fake
    def _(do, dlse, q, k, v, c, e, first_key, stop_query, o, lse, scale):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(c)

    @fox_decode.register_fake
    def _(q, k, v, gates, first_key, end, bound, scale, unit, bound_unit, tolerance):
        return _empty_output(q)

    def _save(ctx, inputs, output):
        *tensors, _, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)

    def _chain_rule(ctx, do, dlse):
        dq, dk, dv, dc = fox_backward(do, dlse, *ctx.saved_tensors, ctx.scale)  # dlse: zeros where lse is not used
        return dq, dk, dv, dc, None, None, None, None, None  # e is the rounding of c, not an input of its own

    fox_forward.register_autograd(_chain_rule, setup_context=_save)


MAX_HEAD_DIM = 256
DECODE_ROWS = 16  # up to so many queries without gradients take the split-KV kernel
GATE_FLOOR = -1e5  # stands for log 0 in the running sum; exp(-1e5) is 0 beside any other weight


def why_not(head_dim: int, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Exception | None:
    """The error that a call on such heads, dtype and device would raise; None if the kernels can run."""
    if triton is None:
        return ImportError(
            "The Triton backend of forgetting attention needs triton: pip install 'hf-longctx[triton]'."
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return NotImplementedError(
            f"head size {head_dim}; the kernels hold heads of 1 to {MAX_HEAD_DIM} dimensions on chip. Use another backend."
        )
    if dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        return NotImplementedError(f"q, k, v are {dtype}; the kernels are written for bfloat16, float16 and float32.")
    if device is not None and device.type != "cuda" and not (INTERPRETED.value and device.type == "cpu"):
        return ValueError(
            f"q is on {device}; Triton compiles for GPUs. Move the tensors to one, choose another backend, or set "
            "TRITON_INTERPRET=1 before the first import of triton to run the kernels slowly on CPU."
        )
    return None


def _check_inputs(q, k, v, log_f, log_pruning_tolerance) -> None:
    if triton is None:
        raise why_not(1)
    if not (q.dim() == k.dim() == v.dim() == 4 and log_f.dim() == 3):
        raise ValueError(
            f"q, k, v are {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and log_f is {tuple(log_f.shape)}; "
            "they must be (B, H, T, D) and (B, Hq, Tk)."
        )
    B, Hq, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D or Hkv == 0 or Hq % Hkv:
        raise ValueError(
            f"k is {tuple(k.shape)}, v {tuple(v.shape)}, q {tuple(q.shape)}; k and v must have one shape, share batch "
            "and head size with q, and have a number of heads that divides that of q."
        )
    if Tq > Tk:
        raise ValueError(f"{Tq} queries for {Tk} keys; the queries are the last of the positions that the keys cover.")
    if log_f.shape != (B, Hq, Tk):
        raise ValueError(f"log_f is {tuple(log_f.shape)}; it must be {(B, Hq, Tk)}: one gate per query head and key.")
    if log_f.dtype != torch.float32:
        raise ValueError(
            f"log_f is {log_f.dtype}; it must be torch.float32, because its running sum reaches thousands. Cast "
            "before the log: F.logsigmoid(gate.float())."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; they must share one dtype. Cast them.")
    if not q.device == k.device == v.device == log_f.device:
        raise ValueError(
            f"q, k, v, log_f are on {q.device}, {k.device}, {v.device}, {log_f.device}; move them together."
        )
    if log_pruning_tolerance is not None and log_pruning_tolerance > 0:
        raise ValueError(f"log_pruning_tolerance is {log_pruning_tolerance}; it is the log of a share, so at most 0.")
    if (reason := why_not(D, q.dtype, q.device)) is not None:
        raise reason


def _check_first_key(first_key, q) -> None:
    B, Hq, Tq, _ = q.shape
    if (
        first_key.dim() != 3
        or first_key.shape[0] not in (1, B)
        or first_key.shape[1] not in (1, Hq)
        or first_key.shape[2] != Tq
        or first_key.dtype != torch.int32
        or first_key.device != q.device
    ):
        raise ValueError(
            f"first_key is {tuple(first_key.shape)}, {first_key.dtype}, on {first_key.device}; it must be ({B} or 1, "
            f"{Hq} or 1, {Tq}), torch.int32, on {q.device}. A mask or starts of another batch size end here too."
        )


def checked_call(q, k, v, log_f, scale, log_pruning_tolerance, first_key=None, **described):
    """What `forgetting_attention_triton` was given, or one clear error: q, k, v as autocast wants them, scale, and the
    bound of each row, which is `first_key` or `first_visible_key` of what is `described`.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    _check_inputs(q, k, v, log_f, log_pruning_tolerance)
    bound = first_visible_key(q.shape[2], k.shape[2], device=q.device, **described)
    if described["cu_seqlens"] is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens with a batch of {q.shape[0]}; packed sequences form a batch of one.")
    if first_key is not None and bound is not None:
        raise ValueError("Got first_key and another description of the sequences; first_key already holds it all.")
    bound = bound if first_key is None else first_key
    if bound is not None:
        _check_first_key(bound, q)
    return q, k, v, q.shape[-1] ** -0.5 if scale is None else float(scale), bound


def counted_gates(log_f, stop) -> torch.Tensor:
    """log f as it is summed: finite, and 0 where `stop_query` tells that nobody looks across, padding among it."""
    if stop is not None:
        log_f = log_f.masked_fill(stop <= torch.arange(log_f.shape[-1], device=log_f.device), 0.0)
    return log_f.clamp(min=GATE_FLOOR)


def forgetting_attention_triton(
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
    first_key: torch.Tensor | None = None,
    log_pruning_tolerance: float | None = None,
    logit_bound: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Softmax attention with a forget gate (arXiv 2503.02130, eq. 11) in O(T) memory, with gradients for all inputs.

    Args:
        q: queries, (B, Hq, Tq, D), bf16, fp16 or fp32; D from 1 to 256. The queries are the *last* Tq of Tk positions.
        k, v: keys and values, (B, Hkv, Tk, D). Query head h uses kv head h // (Hq // Hkv).
        log_f: natural log of the forget gate per query head and key, (B, Hq, Tk), fp32, <= 0; -inf is a closed gate.
        scale: factor on q.k before the decay is added. Default D ** -0.5.
        attention_mask, starts, lengths, cu_seqlens, window: which keys a query sees; see `first_visible_key`.
        first_key: the result of `first_visible_key` instead of these five: int32, (B or 1, Hq or 1, Tq).
        log_pruning_tolerance: leave out key blocks that the decay bounds below e^tolerance of a row's weight in all
            (arXiv 2504.06949; -10 there). At most 0. None computes everything.
        logit_bound: upper bound of |scale * q.k|, broadcastable to (B, Hq). QK-norm gives one for free; otherwise pruning
            takes it from the largest row norms of q and k, except in decoding (up to 16 queries without gradients):
            there these norms would cost what pruning saves, and everything is computed. Heads whose bound is at most 29
            need no running maximum in the softmax, which is faster (bf16 and fp32). A bound that does not hold makes
            the result wrong.

    Returns:
        (B, Hq, Tq, D) in q.dtype, stored as (B, Tq, Hq, D). Rows that see no key are 0. Padding may hold anything, NaN
        included.

    Raises:
        ImportError: Triton is not installed.
        ValueError: a shape, dtype, device or bound above does not hold.
        NotImplementedError: a head size above 256, another dtype, padding between real tokens.
    """
    q, k, v, scale, first_key = checked_call(
        q,
        k,
        v,
        log_f,
        scale,
        log_pruning_tolerance,
        first_key,
        attention_mask=attention_mask,
        starts=starts,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        window=window,
    )
    if q.numel() == 0:
        return q * (k.sum() + v.sum() + log_f.sum())  # nothing to compute, but gradients have a way back
    Tk = k.shape[2]
    stop = None if first_key is None else stop_query(first_key, Tk)
    c = counted_gates(log_f, stop).double().cumsum(-1)  # with dtype=float64, its gradient would be summed in float32
    if is_decoding(q, k, v, log_f):
        gates = torch.stack([c.float(), (c - c.float()).float()], dim=-1)  # (B, Hq, Tk, 2)
        gates = gates.unflatten(1, (k.shape[1], -1))
        bound = None if logit_bound is None else bound_per_head(q, logit_bound)
        return attend_few(q, k, v, gates, 1.0, first_key, None, scale, log_pruning_tolerance, bound)
    return attend(q, k, v, c, first_key, stop, scale, log_pruning_tolerance, logit_bound)[0]


def is_decoding(*tensors: torch.Tensor) -> bool:
    """Whether the split-KV kernel takes a call: up to 16 queries (the first tensor) and no gradient wanted."""
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return tensors[0].shape[2] <= DECODE_ROWS and not wants_grad


def attend(q, k, v, c, first_key, stop, scale, tolerance, logit_bound) -> tuple[torch.Tensor, torch.Tensor]:
    """`forgetting_attention_triton` of checked inputs, from the float64 running sum c of log f, (B, Hq, Tk).

    Returns:
        The output, and the log of each row's softmax denominator, (B, Hq, Tq) fp32; -inf for rows that see nothing.
        Both have gradients.
    """
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    high = c.float()
    with torch.no_grad():
        low = (c - high).float()
        if logit_bound is not None:
            logit_bound = bound_per_head(q, logit_bound)
        elif tolerance is not None:
            logit_bound = bound_from_norms(q, k, scale, first_key, stop)
        if tolerance is not None:
            Tq, Tk, tile = q.shape[2], k.shape[2], tiles_for(q.device, q.shape[-1], q.dtype).forward
            kept = first_kept_key(c, pruning_threshold(q, Tk, tolerance, logit_bound), Tq, tile.BM, tile.BN)
            kept = kept.int().repeat_interleave(tile.BM, -1)[..., :Tq]
            pruned = kept if first_key is None else torch.maximum(kept, first_key)
            tally_pruned(first_key, pruned, Tk, tile)
            first_key, stop = pruned, stop_query(pruned, Tk)
        if q.dtype == torch.float16:  # its weights cannot be that small beside a bound: it keeps the running maximum
            logit_bound = None
    return fox_forward(q, k, v, high, low, first_key, stop, logit_bound, scale)


def attend_few(
    q, k, v, gates, unit, first_key, end, scale, tolerance=None, bound=None, bound_unit=1.0
) -> torch.Tensor:
    """Up to 16 queries without gradients, whose keys may be the folded keys of a cache.

    Args:
        q, k, v, scale: as in `forgetting_attention_triton`; any strides.
        gates, unit: the running sum of log f, c = unit * gates.sum(-1); (B, Hkv, Hq // Hkv, Tk, parts), any strides.
        first_key: result of `first_visible_key`, or None.
        end: int tensor of one element: the queries are the last Tq of so many keys, and the rest is unused. None: Tk.
        tolerance: `log_pruning_tolerance` there.
        bound, bound_unit: |scale * q.k| <= bound_unit * bound; fp32, of a shape that expands to (B, Hq). Without it nothing
            is left out.

    Returns:
        (B, Hq, Tq, D) in q.dtype.
    """
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    bound = None if tolerance is None else bound
    return fox_decode(q, k, v, gates, first_key, end, bound, scale, unit, bound_unit, tolerance or 0.0)
