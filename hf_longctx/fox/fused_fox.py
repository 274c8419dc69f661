"""RMSNorm in one pass over memory, with the token shift before it or the output gate after it.

`fused_norm` is the norms, the token shift and the output gate of a FoX, and `norm_as_defined` says what it computes:

    z_t = x_t + a_t (x_{t-1} - x_t)          y = w * z / sqrt(mean(z^2) + eps) * act(g)

with each of shift, norm and gate optional. On a GPU a Triton kernel computes it, and another one its gradients from
the same inputs: only those are saved. Sums over tokens are made in a fixed order, without atomics.

Names in the kernels are those of kernels_fox.py. A program holds BT tokens of one head, [BT, BD], in fp32.
"""

from __future__ import annotations  # keeps tl.constexpr unevaluated where Triton is absent

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Function, forward_ad
from transformers.activations import ACT2FN

from .attention_fox import autocast_dtype
from .kernels_fox import jit, jit_any_length, narrow, triton, whole
from .tiles_fox import DECODE_ROWS, OLDEST_GPU, Tile, capability_of, padded
from .triton_fox import _on, blocks_of, is_traced, launch, needs_grad, processors


if triton is not None:
    import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 16384  # of a row that a program holds
ELEMENTS = 2048  # of a block
PROGRAMS = 8  # for each multiprocessor, in the backward pass


class Shift(NamedTuple):
    """The token shift of keys or values.

    share: (B, T, H) fp32, the weight of each token's predecessor.
    before: (B, 1, H, D), the token before the first one; None for zeros.
    predecessor: (1 or B, T), the token before each one, as in `Call`; None: the tokens stand one after another.
    successor: (1 or B, T), its inverse, as in `Call`; None: `predecessor` has none, as in a tree.
    """

    share: torch.Tensor
    before: torch.Tensor | None = None
    predecessor: torch.Tensor | None = None
    successor: torch.Tensor | None = None


# --- the definition --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def cached_number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute RMSNorm over the last dimension, weight (1 or H, D), in the dtype of x or of autocast."""
    plain = x.dtype == torch.float32 and x.is_cpu and type(x) is torch.Tensor
    if plain and not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")):
        # PyTorch has no kernel for it on a CPU, and its composition takes more passes over memory
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(cached_number(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)
    dtype, weight = autocast_dtype(x.device) or x.dtype, weight.to(x.dtype)
    if len(weight) == 1:
        return F.rms_norm(x, x.shape[-1:], weight[0], eps).to(dtype)
    return (F.rms_norm(x, x.shape[-1:], eps=eps) * weight).to(dtype)


def previous_tokens(x: torch.Tensor, before: torch.Tensor | None, predecessor: torch.Tensor | None) -> torch.Tensor:
    """Return the predecessor of each token, 0 where it has none: (B, T, H, D); arguments as in `Shift`."""
    if before is None:
        before = torch.zeros_like(x[:, :1])
    if predecessor is None:
        return before if x.shape[1] == 1 else torch.cat([before, x[:, :-1]], dim=1)
    index = predecessor[..., None, None]  # (1 or B, T, 1, 1)
    previous = torch.cat([before, x], dim=1).gather(1, index.clamp(min=0).expand_as(x))
    return previous.masked_fill(index < 0, 0.0)


def norm_as_defined(x, weight, eps, shift=None, gate=None, activation=None):
    """Compute `fused_norm` in plain PyTorch."""
    if shift is not None:
        previous = previous_tokens(x, shift.before, shift.predecessor)
        x = torch.lerp(x, previous, shift.share[..., None].to(x.dtype))
    if weight is not None:
        x = rms_norm(x, weight.view(-1, x.shape[-1]), eps)
    return x if gate is None else x * ACT2FN[activation](gate).view(x.shape)


# --- the kernels -----------------------------------------------------------------------------------------------------


@jit
def load_tokens(p_x, i_b, i_t, m_t, s_b, s_t, D: tl.constexpr, BD: tl.constexpr):
    """Tokens i_t of rows i_b, [BT, BD] fp32; 0 where m_t is false."""
    o_d = tl.arange(0, BD)
    p_block = p_x + (i_b.to(tl.int64) * s_b + i_t.to(tl.int64) * s_t)[:, None] + o_d[None, :]
    return tl.load(p_block, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)


@jit
def load_pairs(
    p_x, p_share, p_index, i_b, i_t, m_t, s_b, s_t, s_ib, T, H,
    D: tl.constexpr, BD: tl.constexpr, SHIFT: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Tokens, the weights of their predecessors, and what those have more than they."""
    b_x = load_tokens(p_x, i_b, i_t, m_t, s_b, s_t, D, BD)
    b_share, b_more = tl.zeros([1, 1], tl.float32), tl.zeros([1, 1], tl.float32)
    if SHIFT:
        b_share = tl.load(p_share + (i_b * T + i_t) * H, mask=m_t, other=0.0)[:, None]
        i_previous = i_t
        if INDEXED:  # counts from a cached token, of which there is none here
            i_previous = tl.load(p_index + i_b * s_ib + i_t, mask=m_t, other=-1)
        b_more = load_tokens(p_x, i_b, i_previous - 1, m_t & (i_previous > 0), s_b, s_t, D, BD) - b_x
    return b_x, b_share, b_more


@jit
def store_tokens(p_y, b_y, i_row, m_t, D: tl.constexpr, BD: tl.constexpr):
    """Writes an fp32 block to rows i_row of a contiguous (rows, D) matrix."""
    o_d = tl.arange(0, BD)
    p_block = p_y + i_row.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_block, narrow(b_y, p_y.dtype.element_ty), mask=m_t[:, None] & (o_d < D)[None, :])


@jit
def inverse_norm(b_z, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(b_z * b_z, 1) / D + eps)[:, None]


@jit
def norm_backward(b_z, b_dy, b_w, eps, D: tl.constexpr, NORM: tl.constexpr):
    """The gradient of z, and z normalized, where y = w z / sqrt(mean(z^2) + eps)."""
    if NORM:
        b_inverse = inverse_norm(b_z, eps, D)
        b_z, b_dy = b_z * b_inverse, b_dy * b_w
        b_dy = (b_dy - b_z * (tl.sum(b_dy * b_z, 1) / D)[:, None]) * b_inverse
    return b_dy, b_z


@jit_any_length
def fused_norm_kernel(
    p_x, p_w, p_gate, p_share, p_index, p_y,
    s_xb, s_xt, s_xh, s_gb, s_gt, s_gh, s_ib, s_w, n_tokens, T, H, eps,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, W: tl.constexpr,
    SHIFT: tl.constexpr, INDEXED: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    i_h, o_d = tl.program_id(0) % H, tl.arange(0, BD)
    o_n = tl.program_id(0) // H * BT + tl.arange(0, BT)
    m_t, i_b, i_t = o_n < n_tokens, o_n // T, o_n % T
    s_xb, s_xt, s_xh = whole(s_xb, s_xt, s_xh, W)
    p_x += i_h.to(tl.int64) * s_xh
    b_x, b_share, b_more = load_pairs(
        p_x, p_share + i_h, p_index, i_b, i_t, m_t, s_xb, s_xt, s_ib, T, H, D, BD, SHIFT, INDEXED
    )
    b_y = b_x + b_share * b_more
    if NORM:
        b_w = tl.load(p_w + i_h * s_w + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        b_y = b_y * inverse_norm(b_y, eps, D) * b_w[None, :]
    if GATE != "":
        s_gb, s_gt, s_gh = whole(s_gb, s_gt, s_gh, W)
        b_gate = load_tokens(p_gate + i_h.to(tl.int64) * s_gh, i_b, i_t, m_t, s_gb, s_gt, D, BD)
        b_y *= tl.sigmoid(b_gate)
        if GATE == "silu":
            b_y *= b_gate
    store_tokens(p_y, b_y, o_n * H + i_h, m_t, D, BD)


@jit_any_length
def fused_norm_backward_kernel(
    p_x, p_w, p_gate, p_share, p_index, p_next, p_dy, p_dx, p_dw, p_dgate, p_dshare,
    s_xb, s_xt, s_xh, s_gb, s_gt, s_gh, s_dyb, s_dyt, s_dyh, s_ib, s_w, n_tokens, T, H, eps, n_blocks, n_parts,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, W: tl.constexpr,
    SHIFT: tl.constexpr, INDEXED: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Every n_parts-th block of one head. A token has gradients through itself and through its successor."""
    i_part, i_h, o_d = tl.program_id(0) // H, tl.program_id(0) % H, tl.arange(0, BD)
    s_xb, s_xt, s_xh = whole(s_xb, s_xt, s_xh, W)
    s_dyb, s_dyt, s_dyh = whole(s_dyb, s_dyt, s_dyh, W)
    s_gb, s_gt, s_gh = whole(s_gb, s_gt, s_gh, W)
    p_x, p_dy, p_share = p_x + i_h.to(tl.int64) * s_xh, p_dy + i_h.to(tl.int64) * s_dyh, p_share + i_h
    b_w, b_dw = tl.zeros([1, BD], tl.float32), tl.zeros([BD], tl.float32)
    if NORM:
        b_w += tl.load(p_w + i_h * s_w + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    for i_block in range(i_part, n_blocks, n_parts):
        o_n = i_block * BT + tl.arange(0, BT)
        m_t, i_b, i_t = o_n < n_tokens, o_n // T, o_n % T
        b_x, b_share, b_more = load_pairs(
            p_x, p_share, p_index, i_b, i_t, m_t, s_xb, s_xt, s_ib, T, H, D, BD, SHIFT, INDEXED
        )
        b_dy = load_tokens(p_dy, i_b, i_t, m_t, s_dyb, s_dyt, D, BD)
        if GATE != "":
            b_gate = load_tokens(p_gate + i_h.to(tl.int64) * s_gh, i_b, i_t, m_t, s_gb, s_gt, D, BD)
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
            store_tokens(p_dgate, b_dgate * b_normed, o_n * H + i_h, m_t, D, BD)
        if SHIFT:
            tl.store(p_dshare + o_n * H + i_h, tl.sum(b_dz * b_more, 1), mask=m_t)
            i_next = tl.where(i_t + 1 < T, i_t + 1, -1)
            if INDEXED:
                i_next = tl.load(p_next + i_b * s_ib + i_t, mask=m_t, other=-1)
            m_next = m_t & (i_next >= 0)
            b_next = load_tokens(p_x, i_b, i_next, m_next, s_xb, s_xt, D, BD)
            b_dnext = load_tokens(p_dy, i_b, i_next, m_next, s_dyb, s_dyt, D, BD)
            b_next_share = tl.load(p_share + (i_b * T + i_next) * H, mask=m_next, other=0.0)[:, None]
            b_dnext, _ = norm_backward(b_next + b_next_share * (b_x - b_next), b_dnext, b_w, eps, D, NORM)
            b_dz = b_dz * (1 - b_share) + b_next_share * b_dnext
        store_tokens(p_dx, b_dz, o_n * H + i_h, m_t, D, BD)
    if NORM:
        tl.store(p_dw + (i_part * H + i_h) * D + o_d, b_dw, mask=o_d < D)


# --- launches and gradients ------------------------------------------------------------------------------------------


def describe(x, weight, gate, shift, activation, dy=None):
    """Return the tile of a launch, and what both kernels take: tensors, strides and sizes, and constants."""
    (B, T, H, D), BD = x.shape, padded(x.shape[-1])
    tile = Tile(max(1, ELEMENTS // BD), BD, 4 if BD <= ELEMENTS else 8, 1)
    share, _, predecessor, _ = shift or (None,) * 4
    tensors = x, weight, gate, x if share is None else share, predecessor
    strides = [s for y in (x, x if gate is None else gate, dy) if y is not None for s in y.stride()[:3]]
    row_stride = 0 if predecessor is None or len(predecessor) == 1 else T
    head_stride = 0 if weight is None or len(weight) == 1 else D
    unit = 16 // x.itemsize  # elements of a load
    constants = dict(
        D=D, BT=tile.BM, BD=BD, W=1 if any(s % unit for s in strides) else unit, NORM=weight is not None,
        SHIFT=shift is not None, INDEXED=predecessor is not None, GATE="" if gate is None else activation,
    )  # fmt: skip
    return tile, tensors, (*strides, row_stride, head_stride, B * T, T, H), constants


def launch_fused_norm(x, weight, gate, shift, eps, activation, dtype):
    y = x.new_empty(x.shape, dtype=dtype)
    tile, tensors, sizes, constants = describe(x, weight, gate, shift, activation)
    programs = blocks_of(tile.BM, x.shape[0] * x.shape[1]) * x.shape[2]
    with _on(x.device):
        launch(fused_norm_kernel, programs, tile, *tensors, y, *sizes, eps, **constants)
    return y


def launch_fused_norm_backward(dy, x, weight, gate, shift, eps, activation):
    """Return the gradients of x, weight, gate and share, None for what is not there."""
    B, T, H, D = x.shape
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    tile, tensors, sizes, constants = describe(x, weight, gate, shift, activation, dy)
    blocks = blocks_of(tile.BM, B * T)
    parts = min(blocks, blocks_of(H, PROGRAMS * processors(x.device)))
    dx = x.new_empty(x.shape)
    dw = None if weight is None else x.new_empty(parts, H, D, dtype=torch.float32)
    dgate = None if gate is None else gate.new_empty(gate.shape)
    dshare = None if shift is None else torch.empty_like(shift.share)
    with _on(x.device):
        launch(
            fused_norm_backward_kernel, parts * H, tile,
            *tensors, shift and shift.successor, dy, dx, dw, dgate, dshare, *sizes, eps, blocks, parts, **constants,
        )  # fmt: skip
    if dw is not None:
        dw = dw.sum((0, 1) if len(weight) == 1 else 0).view(weight.shape).to(weight.dtype)
    return dx, dw, dgate, dshare


class FusedNorm(Function):
    """The launches with gradients; where those are differentiated or traced in turn, the definition's."""

    @staticmethod
    def forward(ctx, x, weight, gate, share, predecessor, successor, eps, activation, dtype):
        shift = None if share is None else Shift(share, None, predecessor, successor)
        ctx.save_for_backward(x, weight, gate, share, predecessor, successor)
        ctx.options = eps, activation
        return launch_fused_norm(x, weight, gate, shift, eps, activation, dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, gate, share, *neighbors = ctx.saved_tensors
        shift, (eps, activation) = None if share is None else Shift(share, None, *neighbors), ctx.options
        if not (torch.is_grad_enabled() or is_traced(dy)):
            return *launch_fused_norm_backward(dy, x, weight, gate, shift, eps, activation), *(None,) * 5
        inputs = [x, weight, gate, share]
        wanted = [y for y, needed in zip(inputs, ctx.needs_input_grad) if needed]
        with torch.enable_grad():
            y = norm_as_defined(x, weight, eps, shift, gate, activation).to(dy.dtype)
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=torch.is_grad_enabled()))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:4]), *(None,) * 5


@lru_cache(maxsize=64)
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on a device: an NVIDIA GPU for which Triton compiles."""
    available = triton is not None and device.type == "cuda" and torch.version.hip is None
    return available and capability_of(device) >= OLDEST_GPU


def fused_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    shift: Shift | None = None,
    gate: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Shift, normalize and gate heads, each if asked to, in one pass over memory where the kernels run.

    They do on a GPU, in training and prefill; not where torch traces or transforms a call, for a few tokens, which are
    bound by the host, after a cached token, or where a token has several successors.

    Args:
        x: (B, T, H, D), or (B, T, D) without shift and gate.
        weight: of the norm, (D,), or (H * D,) with a part for each head; None for no norm.
        eps: of the norm.
        shift: the token shift before the norm, or None.
        gate: (B, T, H * D), whose activation is a factor after the norm, or None.
        activation: "sigmoid" or "silu".

    Returns:
        x's shape; in the dtype of x, or of autocast with a norm.
    """
    share, before, predecessor, successor = shift or (None,) * 4
    tensors = [y for y in (x, weight, gate, share) if y is not None]
    heads = x if x.ndim == 4 else x[..., None, :]
    if not (
        len(tensors) > 1
        and has_kernels(x.device)
        and x.shape[1] > DECODE_ROWS
        and x.shape[-1] <= MAX_WIDTH
        and heads.ndim == 4
        and (weight is None or weight.numel() in (x.shape[-1], heads.shape[2] * x.shape[-1]))
        and all(y.stride(-1) == 1 and y.dtype in DTYPES for y in tensors)
        and before is None
        and (predecessor is None) == (successor is None)
        and not is_traced(*tensors)
        and forward_ad._current_level < 0
    ):
        return norm_as_defined(x, weight, eps, shift, gate, activation)
    weight = None if weight is None else weight.view(-1, x.shape[-1])
    gate = None if gate is None else gate.view(heads.shape)
    share, predecessor, successor = (y if y is None else y.contiguous() for y in (share, predecessor, successor))
    dtype = x.dtype if weight is None else autocast_dtype(x.device) or x.dtype
    if needs_grad(*tensors):
        y = FusedNorm.apply(heads, weight, gate, share, predecessor, successor, eps, activation, dtype)
    else:
        shift = None if share is None else Shift(share, None, predecessor, successor)
        y = launch_fused_norm(heads, weight, gate, shift, eps, activation, dtype)
    return y.view(x.shape)
