"""Fused norms, token shift and output gate of FoX, each in one pass over memory.

`fused_norm` is a norm, followed by the output gate. `fused_heads` is QK-norm, preceded by the token shift:

    z_t = x_t + a_t (x_{t-1} - x_t)          y = w * z / sqrt(mean(z^2) + eps) * act(g)

Both functions have a definition in plain PyTorch. On a GPU, one Triton kernel computes the outputs and another one
computes the gradients from the saved inputs. Sums over tokens have a fixed order. Names in the kernels follow
kernels_fox.py. Each program processes blocks of BT tokens of one head, [BT, BD], in fp32.
"""

from __future__ import annotations  # leaves tl.constexpr unevaluated if Triton is not installed

from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch.autograd import Function
from transformers.activations import ACT2FN

from .attention_fox import autocast_dtype
from .kernels_fox import jit, jit_any_length, load_tokens, store_tokens, triton
from .launch_fox import blocks_of, fresh, launch, processors, repeat
from .state_fox import shift_tokens
from .tiles_fox import DECODE_ROWS, Tile, padded
from .torch_internals_fox import is_in_forward_mode
from .triton_fox import DTYPES, MAX_HEAD_DIM, empty_output, is_traced, needs_grad, why_not


if triton is not None:
    import triton.language as tl

ELEMENTS = 2048  # number of elements in a block
PROGRAMS = 8  # number of programs per multiprocessor in the backward pass


# --- the definition --------------------------------------------------------------------------------------------------


def norm_as_defined(x, weight, eps, gate=None, activation=None):
    """Plain PyTorch implementation of `fused_norm`."""
    dtype, weight = autocast_dtype(x.device) or x.dtype, weight.to(x.dtype)
    if weight.numel() == x.shape[-1]:
        y = F.rms_norm(x, x.shape[-1:], weight, eps).to(dtype)
    else:
        y = (F.rms_norm(x, x.shape[-1:], eps=eps) * weight.view(-1, x.shape[-1])).to(dtype)
    return y if gate is None else y.flatten(2) * ACT2FN[activation](gate)


def as_defined(x, weight, gate, k, v, k_weight, share, predecessor, head_dim, eps, activation):
    """Plain PyTorch implementation of `launch_fused_norm`."""
    if k is None:
        return norm_as_defined(x, weight, eps, gate, activation), None, None
    q, k, v = (y.unflatten(-1, (-1, head_dim)) for y in (x, k, v))
    k, v = (shift_tokens(y, a, predecessor=predecessor) for y, a in zip((k, v), share.chunk(2, dim=-1)))
    return tuple(y.transpose(1, 2) for y in (norm_as_defined(q, weight, eps), norm_as_defined(k, k_weight, eps), v))


# --- the kernels -----------------------------------------------------------------------------------------------------


@jit
def load_pairs(
    p_x, p_share, p_index, o_n, m_n, s_share, T, H,
    D: tl.constexpr, BD: tl.constexpr, SHIFT: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Load tokens x_t, the weights a_t of their predecessors, and the differences x_{t-1} - x_t."""
    b_x = load_tokens(p_x, o_n, m_n, H, D, BD)
    b_share, b_more = tl.zeros([1, 1], tl.float32), tl.zeros([1, 1], tl.float32)
    if SHIFT:
        b_share = tl.load(p_share + o_n * s_share, mask=m_n, other=0.0)[:, None]
        i_t = o_n % T
        i_previous = i_t
        if INDEXED:  # index 0 would be a cached token, but there are none
            i_previous = tl.load(p_index + o_n, mask=m_n, other=-1)
        b_more = load_tokens(p_x, o_n - i_t + i_previous - 1, m_n & (i_previous > 0), H, D, BD) - b_x
    return b_x, b_share, b_more


@jit
def inverse_norm(b_z, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(b_z * b_z, 1) / D + eps)[:, None]


@jit
def norm_backward(b_z, b_dy, b_w, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Return (gradient of z, normalized z) for y = w z / sqrt(mean(z^2) + eps)."""
    if NORM:
        b_inverse = inverse_norm(b_z, eps, D)
        b_z, b_dy = b_z * b_inverse, b_dy * b_w
        b_dy = (b_dy - b_z * (tl.sum(b_dy * b_z, 1) / D)[:, None]) * b_inverse
    return b_dy, b_z


@jit
def norm_tokens(
    p_x, p_w, p_gate, p_share, p_index, p_y, i_block, s_share, n_tokens, T, H, eps, D: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, SHIFT: tl.constexpr, INDEXED: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Apply token shift, norm and gate to one block of tokens of a head. Each of the three is optional."""
    o_d, o_n = tl.arange(0, BD), i_block * BT + tl.arange(0, BT)
    m_n = o_n < n_tokens
    b_x, b_share, b_more = load_pairs(p_x, p_share, p_index, o_n, m_n, s_share, T, H, D, BD, SHIFT, INDEXED)
    b_y = b_x + b_share * b_more
    if NORM:
        b_w = tl.load(p_w + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        b_y = b_y * inverse_norm(b_y, eps, D) * b_w[None, :]
    if GATE != "":
        b_gate = load_tokens(p_gate, o_n, m_n, H, D, BD)
        b_y *= tl.sigmoid(b_gate)
        if GATE == "silu":
            b_y *= b_gate
    store_tokens(p_y, b_y, o_n, m_n, H, D, BD)


@jit
def norm_tokens_backward(
    p_x, p_w, p_gate, p_share, p_index, p_next, p_dy, p_dx, p_dw, p_dgate, p_dshare,
    i_part, s_share, n_tokens, T, H, eps, n_blocks, n_parts, D: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, SHIFT: tl.constexpr, INDEXED: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of every n_parts-th block of a head.

    With a token shift, a token receives a second gradient through the next token.
    """
    o_d = tl.arange(0, BD)
    b_w, b_dw = tl.zeros([1, BD], tl.float32), tl.zeros([BD], tl.float32)
    if NORM:
        b_w += tl.load(p_w + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    for i_block in range(i_part, n_blocks, n_parts):
        o_n = i_block * BT + tl.arange(0, BT)
        m_n = o_n < n_tokens
        b_x, b_share, b_more = load_pairs(p_x, p_share, p_index, o_n, m_n, s_share, T, H, D, BD, SHIFT, INDEXED)
        b_dy = load_tokens(p_dy, o_n, m_n, H, D, BD)
        if GATE != "":
            b_gate = load_tokens(p_gate, o_n, m_n, H, D, BD)
            b_factor = tl.sigmoid(b_gate)
            b_dgate = b_dy * b_factor * (1 - b_factor)
            if GATE == "silu":
                b_dgate, b_factor = b_dy * b_factor + b_gate * b_dgate, b_gate * b_factor
            b_dy *= b_factor
        b_dz, b_normed = norm_backward(b_x + b_share * b_more, b_dy, b_w, eps, D, NORM)
        if NORM:
            b_dw += tl.sum(b_dy * b_normed, 0)
            b_normed *= b_w
        if GATE != "":
            store_tokens(p_dgate, b_dgate * b_normed, o_n, m_n, H, D, BD)
        if SHIFT:
            tl.store(p_dshare + o_n * s_share, tl.sum(b_dz * b_more, 1), mask=m_n)
            i_t = o_n % T
            i_next = tl.where(i_t + 1 < T, i_t + 1, -1)
            if INDEXED:
                i_next = tl.load(p_next + o_n, mask=m_n, other=-1)
            o_next, m_next = o_n - i_t + i_next, m_n & (i_next >= 0)
            b_next = load_tokens(p_x, o_next, m_next, H, D, BD)
            b_dnext = load_tokens(p_dy, o_next, m_next, H, D, BD)
            b_next_share = tl.load(p_share + o_next * s_share, mask=m_next, other=0.0)[:, None]
            b_dnext, _ = norm_backward(b_next + b_next_share * (b_x - b_next), b_dnext, b_w, eps, D, NORM)
            b_dz = b_dz * (1 - b_share) + b_next_share * b_dnext
        store_tokens(p_dx, b_dz, o_n, m_n, H, D, BD)
    if NORM:
        tl.store(p_dw + o_d, b_dw, mask=o_d < D)


@jit_any_length
def fused_norm_kernel(
    p_x, p_k, p_v, p_w, p_wk, p_gate, p_share, p_index, p_y, p_yk, p_yv, s_w, n_tokens, T, H, Hkv, eps,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SHIFT: tl.constexpr, INDEXED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Process one block of one head: x (norm and gate), k (shift and norm) or v (shift).

    All tensors are contiguous.
    """
    heads = H + 2 * Hkv
    i_block, i_h = tl.program_id(0) // heads, tl.program_id(0) % heads
    if i_h < H:
        norm_tokens(
            p_x + i_h * D, p_w + i_h * s_w, p_gate + i_h * D, None, None, p_y + i_h * D,
            i_block, 0, n_tokens, T, H, eps, D, BT, BD, False, False, True, GATE,
        )  # fmt: skip
    elif SHIFT:
        i_h, p_share = i_h - H, p_share + i_h - H
        if i_h < Hkv:
            norm_tokens(
                p_k + i_h * D, p_wk + i_h * s_w, None, p_share, p_index, p_yk + i_h * D,
                i_block, 2 * Hkv, n_tokens, T, Hkv, eps, D, BT, BD, True, INDEXED, True, "",
            )  # fmt: skip
        else:
            o_v = (i_h - Hkv) * D
            norm_tokens(
                p_v + o_v, None, None, p_share, p_index, p_yv + o_v,
                i_block, 2 * Hkv, n_tokens, T, Hkv, eps, D, BT, BD, True, INDEXED, False, "",
            )  # fmt: skip


@jit_any_length
def fused_norm_backward_kernel(
    p_x, p_k, p_v, p_w, p_wk, p_gate, p_share, p_index, p_next, p_dy, p_dyk, p_dyv,
    p_dx, p_dk, p_dv, p_dgate, p_dshare, p_dw, s_w, n_tokens, T, H, Hkv, eps, n_blocks, n_parts,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SHIFT: tl.constexpr, INDEXED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    heads = H + 2 * Hkv
    i_part, i_h = tl.program_id(0) // heads, tl.program_id(0) % heads
    p_dw += (i_part * (H + Hkv) + i_h) * D
    if i_h < H:
        o_h = i_h * D
        norm_tokens_backward(
            p_x + o_h, p_w + i_h * s_w, p_gate + o_h, None, None, None, p_dy + o_h, p_dx + o_h, p_dw, p_dgate + o_h, None,
            i_part, 0, n_tokens, T, H, eps, n_blocks, n_parts, D, BT, BD, False, False, True, GATE,
        )  # fmt: skip
    elif SHIFT:
        i_h, p_share, p_dshare = i_h - H, p_share + i_h - H, p_dshare + i_h - H
        if i_h < Hkv:
            o_k = i_h * D
            norm_tokens_backward(
                p_k + o_k, p_wk + i_h * s_w, None, p_share, p_index, p_next, p_dyk + o_k, p_dk + o_k, p_dw, None, p_dshare,
                i_part, 2 * Hkv, n_tokens, T, Hkv, eps, n_blocks, n_parts, D, BT, BD, True, INDEXED, True, "",
            )  # fmt: skip
        else:
            o_v = (i_h - Hkv) * D
            norm_tokens_backward(
                p_v + o_v, None, None, p_share, p_index, p_next, p_dyv + o_v, p_dv + o_v, None, None, p_dshare,
                i_part, 2 * Hkv, n_tokens, T, Hkv, eps, n_blocks, n_parts, D, BT, BD, True, INDEXED, False, "",
            )  # fmt: skip


# --- launches and gradients ------------------------------------------------------------------------------------------


def describe(x, weight, gate, k, predecessor, D, activation):
    """Return the tile, the number of blocks, the number of heads, the sizes and the constants for a launch."""
    B, T = x.shape[:2]
    H, Hkv, BD = x.shape[2:].numel() // D, 0 if k is None else k.shape[2] // D, padded(D)
    tile = Tile(max(1, ELEMENTS // BD), BD, 4, 1)
    constants = dict(
        D=D, BT=tile.BM, BD=BD, SHIFT=k is not None, INDEXED=predecessor is not None,
        GATE="" if gate is None else activation,
    )  # fmt: skip
    sizes = 0 if weight.numel() == D else D, B * T, T, H, Hkv
    return tile, blocks_of(tile.BM, B * T), H + 2 * Hkv, sizes, constants


def launch_fused_norm(x, weight, gate, k, v, k_weight, share, predecessor, successor, D, eps, activation, dtype):
    """Run the forward kernel. Return (y, new keys, new values). If k is None, keys and values are None.

    See `fused_norm` and, if k is not None, `fused_heads` for the shapes.
    """
    tile, blocks, heads, sizes, constants = describe(x, weight, gate, k, predecessor, D, activation)
    if k is None:
        y, new_k, new_v = fresh(torch.empty_like(x if gate is None else gate, dtype=dtype)), None, None
    else:
        y, new_k, new_v = (empty_output(z.unflatten(-1, (-1, D)).transpose(1, 2)) for z in (x, k, v))
    launch(
        fused_norm_kernel, blocks * heads, tile,
        x, k, v, weight, k_weight, x if gate is None else gate, share, predecessor, y, new_k, new_v, *sizes, eps,
        **constants,
    )  # fmt: skip
    return y, new_k, new_v


def launch_fused_norm_backward(
    dy, dy_k, dy_v, x, weight, gate, k, v, k_weight, share, predecessor, successor, D, eps, activation
):
    """Run the backward kernel. Return the gradients of x, gate, k, v and share, and those of the weights.

    For an absent tensor, the gradient is None. The gradients of the weights, (parts, (H + Hkv) * D), are not yet
    summed.
    """
    tile, blocks, heads, sizes, constants = describe(x, weight, gate, k, predecessor, D, activation)
    parts = min(blocks, blocks_of(heads, PROGRAMS * processors(x.device)))
    dx, dgate, dk, dv, dshare = (None if y is None else fresh(torch.empty_like(y)) for y in (x, gate, k, v, share))
    dw = fresh(x.new_empty(parts, sum(sizes[-2:]) * D, dtype=torch.float32))
    launch(
        fused_norm_backward_kernel, parts * heads, tile,
        x, k, v, weight, k_weight, x if gate is None else gate, share, predecessor, successor, dy, dy_k, dy_v,
        dx, dk, dv, dx if gate is None else dgate, dshare, dw, *sizes, eps, blocks, parts, **constants,
    )  # fmt: skip
    return dx, dgate, dk, dv, dshare, dw


def sum_heads(dw, weight):
    """Return the gradient of a norm weight, (H * D,) or (D,), from those of the heads, (H * D,)."""
    return dw if dw.shape == weight.shape else dw.view(-1, len(weight)).sum(0)


class FusedNorm(Function):
    """Autograd function of the fused kernels. A traced or differentiated backward pass uses `as_defined`."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, head_dim, eps, activation, _ = arguments
        ctx.save_for_backward(*tensors)
        ctx.options = head_dim, eps, activation
        return repeat(launch_fused_norm, *arguments)

    @staticmethod
    def backward(ctx, *gradients):
        saved = ctx.saved_tensors
        x, weight, _, k, _, k_weight, _, _, _ = saved
        if not (torch.is_grad_enabled() or is_traced(gradients[0])):
            if k is None:
                gradients = gradients[0].contiguous(), None, None
            else:
                gradients = (dy.transpose(1, 2).contiguous() for dy in gradients)
            dx, dgate, dk, dv, dshare, dw = repeat(launch_fused_norm_backward, *gradients, *saved, *ctx.options)
            dw, dw_k = dw.sum(0), None
            if k is not None:
                dw, dw_k = dw.tensor_split((x.shape[2],))
                dw_k = sum_heads(dw_k, k_weight)
            return dx, sum_heads(dw, weight), dgate, dk, dv, dw_k, dshare, *(None,) * 6
        with torch.enable_grad():
            outputs = [y for y in as_defined(*saved[:-1], *ctx.options) if y is not None]
        gradients, needed = [dy.to(y.dtype) for dy, y in zip(gradients, outputs)], ctx.needs_input_grad[:7]
        wanted = [x for x, is_needed in zip(saved, needed) if is_needed]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=torch.is_grad_enabled()))
        return *(next(found) if is_needed else None for is_needed in needed), *(None,) * 6


@lru_cache(maxsize=64)
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on this device. It must be an NVIDIA GPU, and `why_not` must accept it."""
    return device.type == "cuda" and why_not(1, device=device) is None


def can_fuse(head_dim: int, *tensors: torch.Tensor) -> bool:
    """Return whether the fused kernels support a call with these tensors. The first one must be (B, T, ...).

    The tensors must be on a GPU, and PyTorch must neither trace nor transform the call. For at most `DECODE_ROWS`
    tokens, the result is False: plain PyTorch is then faster than launching a kernel.
    """
    x = tensors[0]
    return (
        not torch.compiler.is_compiling()  # checked first, because `has_kernels` would break the graph
        and has_kernels(x.device)
        and x.shape[1] > DECODE_ROWS
        and head_dim <= MAX_HEAD_DIM
        and all(y.dtype in DTYPES for y in tensors)
        and not is_traced(*tensors)
        and not is_in_forward_mode()
    )


def fused_norm(x, weight, eps: float, gate=None, activation: str | None = None) -> torch.Tensor:
    """Apply RMSNorm and an optional output gate. If `can_fuse` is true, this takes one pass over memory.

    Args:
        x: (B, T, H, D). Without a gate, x may also be (..., D). This case runs in plain PyTorch.
        weight: norm weight, (D,). If each head has its own weight, it is (H * D,).
        gate: (B, T, H * D). The normalized x is multiplied by activation(gate).
        activation: "sigmoid" or "silu".

    Returns:
        A tensor of the shape of the gate, or of x, in the autocast dtype. Without autocast, it has the dtype of x.
    """
    tensors, head_dim = [y for y in (x, weight, gate) if y is not None], x.shape[-1]
    # Hidden states are not 4D. For them, PyTorch's own kernel is faster, because it has less host overhead.
    if x.ndim != 4 or weight.numel() not in (head_dim, x.shape[2] * head_dim) or not can_fuse(head_dim, *tensors):
        return norm_as_defined(x, weight, eps, gate, activation)
    gate = None if gate is None else gate.contiguous()
    run = FusedNorm.apply if needs_grad(*tensors) else partial(repeat, launch_fused_norm)
    dtype = autocast_dtype(x.device) or x.dtype
    return run(x.contiguous(), weight, gate, *(None,) * 6, head_dim, eps, activation, dtype)[0]


def fused_heads(q, k, v, q_weight, k_weight, head_dim, eps, share, predecessor=None, successor=None):
    """Shift keys and values and normalize queries and keys, in one pass over memory. `can_fuse` must be true.

    Args:
        q: (B, T, Hq * D).
        k, v: (B, T, Hkv * D), in the dtype of q.
        q_weight, k_weight: norm weights, both (D,). If each head has its own, they are (Hq * D,) and (Hkv * D,).
        share: (B, T, 2 Hkv) fp32, the weight of the previous token for each key head and each value head.
        predecessor, successor: as in `Call`. Pass both of them or neither.

    Returns:
        New queries, keys and values, (B, Hq or Hkv, T, D).
    """
    index = (y if y is None else y.expand(len(q), -1) for y in (predecessor, successor))
    q, *rest = (y if y is None else y.contiguous() for y in (q, k, v, k_weight, share, *index))
    run = FusedNorm.apply if needs_grad(q, q_weight, *rest[:4]) else partial(repeat, launch_fused_norm)
    return run(q, q_weight, None, *rest, head_dim, eps, None, q.dtype)
