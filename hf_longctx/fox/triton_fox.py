"""Launchers and gradients for the Triton kernels of kernels_fox.py.

Under tracing, the launchers run as custom operators. Three functions compute attention: `triton_attention` from log f;
`attention_from_gates` from log f or its float64 cumulative sum; and `triton_decode` from the cumulative sum in cached
keys. They do not check their arguments.
"""

import re

import torch
from torch import Tensor, library
from torch.autograd import Function, forward_ad

from .kernels_fox import (
    INTERPRETED,
    decode_kernel,
    dkdv_kernel,
    dq_kernel,
    forward_kernel,
    merge_kernel,
    prune_kernel,
    running_sum_kernel,
    split_sum_kernel,
    triton,
)
from .key_ranges_fox import bound_from_norms, bound_per_head
from .launch_fox import blocks_of, fresh, launch, processors, repeat
from .tiles_fox import DECODE_ROWS, OLDEST_GPU, Tile, capability_of, padded, prune_blocks, tiles_for
from .torch_internals_fox import (
    is_in_forward_mode,
    is_in_torch_dispatch_mode,
    is_legacy_batchedtensor,
    is_transforming,
    is_zerotensor,
)


MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MASKED_KEYS = 32  # number of keys processed at a time in masked blocks
SUM_TILE = Tile(1024, 1, 4, 1)  # tile of the cumulative sum: 1024 keys at a time


# --- launchers: each one allocates its outputs and runs its kernels --------------------------------------------------


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the batch, head and row strides of each tensor, (B, H, T, ...)."""
    return tuple(s for x in tensors for s in x.stride()[:3])


def _unit(*tensors: Tensor) -> int:
    """Return the number of elements in 16 bytes. If it does not divide all `_strides`, return 1."""
    unit = 16 // tensors[0].itemsize
    return 1 if any(s % unit for s in _strides(*tensors)) else unit


def _readable(x: Tensor) -> Tensor:
    """Return x if the kernels can read it, else a contiguous copy.

    The kernels require a contiguous last dimension. Offsets within 128 rows must fit into 32 bits.
    """
    return x if x.stride(-1) == 1 and x.stride(-2) <= 2**24 else x.contiguous()


def _bound(bound: Tensor | None, B: int, H: int) -> tuple[Tensor | None, int, int]:
    """Return `key_start` or `query_end`, (B or 1, H or 1, T), with the strides that broadcast it to B and H."""
    if bound is None:
        return None, 0, 0
    bound = bound.contiguous()
    rows, heads = bound.expand(B, H, -1).stride()[:2]
    return bound, rows, heads


def empty_output(q: Tensor) -> Tensor:
    """Allocate (B, H, T, D) in the memory order (B, T, H, D). Projections then read it without a copy."""
    B, H, T, D = q.shape
    return fresh(q.new_empty(B, T, H, D).transpose(1, 2))


def launch_running_sum(log_f: Tensor, key_start: Tensor | None) -> Tensor:
    return _running_sum(log_f, key_start, None, fresh(log_f.new_empty(log_f.shape, dtype=torch.float64)))


def launch_running_sum_backward(dc: Tensor, log_f: Tensor, key_start: Tensor | None) -> Tensor:
    return _running_sum(log_f, key_start, dc.contiguous(), fresh(log_f.new_empty(log_f.shape)))


def _running_sum(log_f, key_start, dc, result):
    B, H, T = log_f.shape
    key_start, *s_start = _bound(key_start, B, H)
    past = 0 if key_start is None else T - key_start.shape[-1]
    launch(
        running_sum_kernel, B * H, SUM_TILE, log_f, key_start, dc, result, *log_f.stride(), *s_start, H, T, past,
        BT=SUM_TILE.BM, BOUNDED=key_start is not None, BACKWARD=dc is not None,
    )  # fmt: skip
    return result


def split_sum(c: Tensor, block: int, scale: float | None = None, key_start: Tensor | None = None):
    """Convert a float64 cumulative sum, (B, H, T), to c, e, d, g and the query ends of `split_sum_kernel`.

    Without a scale, g is None. Without `key_start`, the query ends are None.
    """
    B, H, T = c.shape
    sums = [fresh(c.new_empty(B, H, T, dtype=torch.float32)) for _ in range(3)]
    parts = None if scale is None else fresh(c.new_empty(B, H, T, 16, dtype=torch.bfloat16))
    key_start, *s_start = _bound(key_start, B, H)
    bounded, Tq = key_start is not None, T if key_start is None else key_start.shape[-1]
    query_end = fresh(c.new_empty(B, H, T, dtype=torch.int32)) if bounded else None
    launch(
        split_sum_kernel, B * H * blocks_of(SUM_TILE.BM, T), SUM_TILE,
        c.contiguous(), *sums, parts, key_start, query_end, *s_start, H, Tq, T, scale or 1.0,
        BT=SUM_TILE.BM, BN=block, PARTS=parts is not None, BOUNDED=bounded,
    )  # fmt: skip
    return [*sums, parts, query_end]


def launch_prune(
    gates: Tensor,
    key_start: Tensor | None,
    end: Tensor | None,
    bound: Tensor,
    Tq: int,
    query_block: int,
    key_block: int,
    gate_scale: float,
    bound_scale: float,
    tolerance: float,
) -> Tensor:
    """Return the first key that each query must read after pruning, (B, Hq, Tq) int32. See `prune_kernel`."""
    B, Hkv, G, Tk, parts = gates.shape
    key_start, *s_start = _bound(key_start, B, Hkv * G)
    kept, rows = fresh(gates.new_empty(B, Hkv * G, Tq, dtype=torch.int32)), B * Hkv * G * Tq
    launch(
        prune_kernel, blocks_of(128, rows), Tile(128, 1, 4, 1),
        gates, key_start, end, bound, kept, *gates.stride(), *s_start, *bound.expand(B, Hkv * G).stride(),
        Tq, Tk, Hkv * G, G, rows, gate_scale, bound_scale, tolerance,
        BR=128, BM=query_block, BN=key_block, BOUNDED=key_start is not None, P=parts, ENDS=end is not None,
    )  # fmt: skip
    return kept


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    key_start: Tensor | None,
    logit_bound: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    B, Hq, Tq, D = q.shape
    o, lse = empty_output(q), fresh(q.new_empty(B, Hq, Tq, dtype=torch.float32))
    tile = tiles_for(q.device, D, q.dtype).forward
    c, e, d, g, _ = split_sum(c, tile.BN, scale if tile.products and logit_bound is not None else None)
    key_start, *s_start = _bound(key_start, B, Hq)
    launch(
        forward_kernel, blocks_of(tile.BM, Tq) * B * Hq, tile,
        q, k, v, c, e, d, g, key_start, logit_bound, o, lse, *_strides(q, k, v, o), *s_start,
        Tq, k.shape[2], Hq, Hq // k.shape[1], scale,
        D=D, BM=tile.BM, BN=tile.BN, BD=padded(D), BOUNDED=key_start is not None, KNOWN=logit_bound is not None,
        BS=min(tile.BN, MASKED_KEYS), W=_unit(q, k, v, o), PRODUCTS=tile.products,
    )  # fmt: skip
    return o, lse


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    key_start: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, Hq, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    do = _readable(do)
    dq, dk, dv = map(empty_output, (q, k, v))
    tiles = tiles_for(q.device, D, q.dtype)
    c, e, d, _, query_end = split_sum(c, tiles.dq.BN, key_start=key_start)
    dc, rows = fresh(torch.empty_like(c)), fresh(torch.empty_like(lse, dtype=torch.int64))
    bounded = key_start is not None
    key_start, *s_start = _bound(key_start, B, Hq)
    launch(
        dq_kernel, blocks_of(tiles.dq.BM, Tq) * B * Hq, tiles.dq,
        q, k, v, c, e, d, key_start, o, lse, do, dq, dc, rows,
        *_strides(q, k, v, o, do, dq), *s_start,
        Tq, Tk, Hq, Hq // Hkv, scale,
        D=D, BM=tiles.dq.BM, BN=tiles.dq.BN, BD=padded(D), BOUNDED=bounded, BR=tiles.dkdv.BM,
        BS=min(tiles.dq.BN, MASKED_KEYS), W=_unit(q, k, v, o, do, dq),
    )  # fmt: skip
    launch(
        dkdv_kernel, blocks_of(tiles.dkdv.BN, Tk) * B * Hkv, tiles.dkdv,
        q, k, v, c, e, query_end, lse, do, rows, dk, dv, dc, *_strides(q, k, v, do, dk, dv),
        Tq, Tk, Hq, Hkv, scale,
        D=D, BM=tiles.dkdv.BM, BN=tiles.dkdv.BN, BD=padded(D), BOUNDED=bounded, BS=min(tiles.dkdv.BM, 16),
        W=_unit(q, k, v, do, dk, dv),
    )  # fmt: skip
    return dq, dk, dv, dc


def launch_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    gate_scale: float,
    key_start: Tensor | None,
    end: Tensor | None,
    scale: float,
    log_pruning_tolerance: float | None = None,
    bound: Tensor | None = None,
    bound_scale: float = 1.0,
) -> Tensor:
    """Compute `triton_attention` for up to 16 queries. The keys may be the folded keys of a cache.

    Args:
        q, k, v, scale, log_pruning_tolerance: as in `triton_attention`; any strides.
        gates, gate_scale: the cumulative sum of log f is c = gate_scale * gates.sum(-1). `gates` has shape
            (B, Hkv, Hq // Hkv, Tk, parts) and any strides. A float64 tensor must have one part.
        key_start: as in `VisibleKeys`.
        end: as in `VisibleKeys`, a tensor of one element. None: Tk.
        bound, bound_scale: |scale * q.k| <= bound_scale * bound. `bound` is fp32 and expands to (B, Hq). If it is
            None, nothing is pruned.

    Returns:
        (B, Hq, Tq, D) in q.dtype.
    """
    q, k, v = _readable(q), _readable(k), _readable(v)
    B, Hq, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    G = Hq // Hkv
    tile = tiles_for(q.device, D, q.dtype).decode
    rows = blocks_of(tile.BM, G * Tq) * B * Hkv
    # at most as many programs as run concurrently: one more would double the time
    n_split = min(max(1, 2 * processors(q.device) // max(1, rows)), blocks_of(tile.BN, Tk))
    o_split = q.new_empty(n_split, B, Hq, Tq, D, dtype=torch.float32)
    lse = q.new_empty(n_split, B, Hq, Tq, dtype=torch.float32)
    o = empty_output(q)
    parts, ends = gates.shape[-1], end is not None
    if bound is not None and log_pruning_tolerance is not None:
        options = Tq, 1, tile.BN, gate_scale, bound_scale, log_pruning_tolerance
        key_start = launch_prune(gates, key_start, end, bound, *options)
    key_start, *s_start = _bound(key_start, B, Hq)
    launch(
        decode_kernel, n_split * rows, tile,
        q, k, v, gates, key_start, end, o_split, lse, *_strides(q, k, v), *gates.stride(), *s_start,
        Tq, Tk, Hq, G, B, n_split, scale, gate_scale,
        D=D, BM=tile.BM, BN=tile.BN, BD=padded(D), BOUNDED=key_start is not None, P=parts, ENDS=ends,
        W=_unit(k, v), ONE_DECAY=Tq == 1 and (G == 1 or gates.stride(2) == 0),
    )  # fmt: skip
    launch(
        merge_kernel, B * Hq * Tq, tile._replace(warps=1),
        o_split, lse, o, *_strides(o), Tq, Hq, B * Hq * Tq, n_split, D=D, BD=padded(D),
    )  # fmt: skip
    return o


# --- operators -------------------------------------------------------------------------------------------------------


def refuse_tangents(*tensors: Tensor) -> None:
    """Raise an error if a tensor has a forward-mode derivative. The operators would return tangents of 0."""
    if is_in_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "the Triton kernels do not support forward-mode derivatives (torch.func.jvp, jacfwd). Use "
            "backend='reference' or attn_implementation='eager', or reverse mode: torch.autograd.grad."
        )


def is_traced(*tensors: Tensor) -> bool:
    """Return True if PyTorch traces the call, or if a tensor is not plain. The custom operator is then called."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or is_in_torch_dispatch_mode()
        or is_transforming()
        or not all(map(_is_plain, tensors))
    )


def _is_plain(x: Tensor) -> bool:
    virtual = x.is_meta or x.is_neg() or is_zerotensor(x)  # without data, lazily negated or lazily zero
    # The vmap of `is_grads_batched` is not a functorch transform.
    return type(x) in (Tensor, torch.nn.Parameter) and not virtual and not is_legacy_batchedtensor(x)


# Remote code may be imported alongside the installed package. Each has its own operator namespace, named after its
# folder. The name of a folder may contain any character.
_SPACE = re.sub(r"\W", "_", (__package__ or "").removesuffix(".fox"), flags=re.ASCII)
# Inductor launches the kernels of a `triton_op` directly. This does not work in the interpreter.
_define = library.custom_op if INTERPRETED.value else library.triton_op


def _operator(launcher, backward=None, save=None):
    """Register a launcher as a custom operator. Its host overhead is several times that of its launcher.

    Args:
        backward, save: `backward` and `setup_context` as in torch.autograd.Function.
    """
    name = launcher.__name__.replace("launch", "fox")
    operator = _define(f"{_SPACE}::{name}", launcher, mutates_args=())
    operator.register_fake(launcher)
    if backward is not None:
        operator.register_autograd(backward, setup_context=save)
    return operator


def _save(ctx, inputs, output):
    *tensors, _, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _chain_rule(ctx, do, _):
    dq, dk, dv, dc = fox_backward(do, *ctx.saved_tensors, ctx.scale)
    return dq, dk, dv, dc.double(), None, None, None


fox_running_sum_backward = _operator(launch_running_sum_backward)
fox_running_sum = _operator(
    launch_running_sum,
    backward=lambda ctx, dc: (fox_running_sum_backward(dc, *ctx.saved_tensors), None),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
fox_prune = _operator(launch_prune)
fox_backward = _operator(launch_backward)
fox_forward = _operator(launch_forward, backward=_chain_rule, save=_save)
fox_decode = _operator(launch_decode)


# --- attention: the caller has checked the arguments -----------------------------------------------------------------


def forward_pass(q, k, v, gates, key_start, logit_bound, scale, log_pruning_tolerance, traced=False):
    """Run the forward pass with the launchers, or with the operators if it is traced.

    Returns:
        (o, lse, c, the first key of each query after pruning).
    """
    run_sum, run = (fox_running_sum, fox_forward) if traced else (launch_running_sum, launch_forward)
    c = gates if gates.dtype == torch.float64 else run_sum(gates, key_start)
    if log_pruning_tolerance is not None:
        prune, blocks = fox_prune if traced else launch_prune, prune_blocks(tiles_for(q.device, q.shape[-1], q.dtype))
        options = q.shape[2], *blocks, 1.0, 1.0, log_pruning_tolerance
        key_start = prune(c.detach()[:, :, None, :, None], key_start, None, logit_bound, *options)
    if q.dtype == torch.float16:  # fp16 cannot represent weights far below a bound, so use the running maximum
        logit_bound = None
    return *run(q, k, v, c, key_start, logit_bound, scale), c, key_start


def backward_pass(do, q, k, v, gates, key_start, c, kept, o, lse, scale, traced=False):
    """Run the backward pass of `forward_pass`. Return the gradients of q, k, v and gates."""
    run, run_sum = launch_backward, launch_running_sum_backward
    if traced:
        run, run_sum = fox_backward, fox_running_sum_backward
    dq, dk, dv, dc = run(do, q, k, v, c, kept, o, lse, scale)
    return dq, dk, dv, dc if gates.dtype == torch.float64 else run_sum(dc, gates, key_start)


class Attention(Function):
    """`forward_pass` with gradients. If a backward pass is traced or differentiated, it runs the operators."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, _, ctx.scale, _ = arguments
        o, lse, c, kept = repeat(forward_pass, *arguments)
        ctx.save_for_backward(*tensors, c, kept, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        refuse_tangents(do)
        arguments = *ctx.saved_tensors, ctx.scale
        if torch.is_grad_enabled() or is_traced(do):
            dq, dk, dv, dgates = backward_pass(do, *arguments, traced=True)
        else:
            dq, dk, dv, dgates = repeat(backward_pass, _readable(do), *arguments)
        return dq, dk, dv, dgates.to(arguments[3].dtype), None, None, None, None


def triton_decode(q, k, v, *args) -> Tensor:
    """Run `launch_decode`, or its operator."""
    tensors = [x for x in (q, k, v, *args) if isinstance(x, Tensor)]
    refuse_tangents(*tensors)
    run = fox_decode if is_traced(*tensors) or needs_grad(*tensors) else launch_decode  # the operator has no gradient
    return run(q, k, v, *args)


def why_not(head_dim: int, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Exception | None:
    """Return the exception to raise. If the kernels support this head_dim, dtype and device, return None."""
    if triton is None:
        return ImportError("the kernels of forgetting attention require Triton: pip install triton.")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return NotImplementedError(
            f"head_dim must be 1 to {MAX_HEAD_DIM} for the Triton kernels, got {head_dim}. Use another backend."
        )
    if dtype not in (None, *DTYPES):
        return NotImplementedError(f"q, k and v must be bfloat16, float16 or float32 for Triton, got {dtype}.")
    if device is not None and device.type == "cuda":
        if torch.version.hip is not None:
            return NotImplementedError(
                f"the Triton kernels do not support AMD GPUs (ROCm {torch.version.hip}). Use another backend."
            )
        if (capability := capability_of(device)) < OLDEST_GPU:
            return NotImplementedError(
                f"the Triton kernels require compute capability {OLDEST_GPU / 10} (Ampere) or later, got compute "
                f"capability {capability / 10}. Use another backend."
            )
    elif device is not None and not (INTERPRETED.value and device.type == "cpu"):
        return ValueError(
            f"q must be on a GPU for Triton, got {device}. Move the tensors, use another backend, or set "
            "TRITON_INTERPRET=1 before the first import of triton to run the kernels slowly on a CPU."
        )
    return None


def needs_grad(*tensors: Tensor) -> bool:
    """Return whether gradients are enabled and a tensor requires them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def is_decoding(*tensors: Tensor) -> bool:
    """Return whether the split-KV kernel supports a call. It needs at most 16 queries, and does not compute gradients.

    The first tensor contains the queries.
    """
    return tensors[0].shape[2] <= DECODE_ROWS and not needs_grad(*tensors)


def triton_attention(
    q, k, v, log_f, visible=None, *, scale=None, log_pruning_tolerance=None, logit_bound=None
) -> Tensor:
    """Compute causal forgetting attention (arXiv 2503.02130, eq. 11) with the kernels, without checking arguments.

    Args:
        q, k, v, log_f, scale, log_pruning_tolerance: as in `forgetting_attention`.
        visible: result of `find_visible_keys`. None: every query attends to all keys up to its own.
        logit_bound: upper bound of |scale * q.k|, a number or a tensor that broadcasts to (B, Hq). QK-norm implies a
            bound. If the bound does not hold, the result is wrong. In bf16 and fp32, heads with a bound of at most 29
            are faster, because their softmax does not need a running maximum. Without a bound, pruning computes one
            from the largest norms of q and k. Decoding (up to 16 queries, no gradients) does not prune without a
            bound: computing the norms would cost as much time as pruning saves.

    Returns:
        (B, Hq, Tq, D) in q.dtype, stored as (B, Tq, Hq, D). In 16 bits, the rounding of the output causes an error in
        the gradients of q and k, as in every flash attention. The error grows if the gates forget faster.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    key_start = None if visible is None else visible.key_start
    if not is_decoding(q, k, v, log_f):
        return attention_from_gates(q, k, v, log_f, key_start, scale, log_pruning_tolerance, logit_bound)
    refuse_tangents(log_f)
    run_sum = fox_running_sum if is_traced(log_f) else launch_running_sum
    gates = run_sum(log_f, key_start).unflatten(1, (k.shape[1], -1)).unsqueeze(-1)
    bound = None if logit_bound is None else bound_per_head(q, logit_bound)
    return triton_decode(q, k, v, gates, 1.0, key_start, None, scale, log_pruning_tolerance, bound)


def attention_from_gates(q, k, v, gates, key_start, scale, log_pruning_tolerance, logit_bound):
    """Compute `triton_attention` from log f, fp32, or from its cumulative sum c, float64: (B, Hq, Tk)."""
    q, k, v = _readable(q), _readable(k), _readable(v)
    with torch.no_grad():
        if logit_bound is not None:
            logit_bound = bound_per_head(q, logit_bound)
        elif log_pruning_tolerance is not None:
            logit_bound = bound_from_norms(q, k, scale, key_start)
    tensors = [x for x in (q, k, v, gates, key_start, logit_bound) if x is not None]
    refuse_tangents(*tensors)
    arguments = q, k, v, gates, key_start, logit_bound, scale, log_pruning_tolerance
    if is_traced(*tensors):
        return forward_pass(*arguments, traced=True)[0]
    return Attention.apply(*arguments) if needs_grad(*tensors) else repeat(forward_pass, *arguments)[0]
