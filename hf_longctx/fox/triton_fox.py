"""Forgetting attention in Triton: forward, backward and decoding kernels (arXiv 2503.02130, sec. 3 and App. E).

    o_i = sum_{first_i <= j <= i} softmax_j(scale * q_i.k_j + c_i - c_j) v_j,        c_t = sum_{l <= t} log f_l

Three ideas carry the file.

* **One bound per query.** Causality, padding on either side, packed sequences, a sliding window and adaptive
  computation pruning all say the same thing: query i sees the keys first_i ... i. The kernels read that one integer
  per row (its transpose, one past the last query that sees a key, in the dk/dv pass) and know no other mask.
* **The decay is exact at any length.** c is summed in float64 and handed over as the fp32 pair c + e. Only differences
  are ever formed from it, so c_i - c_j carries the rounding of the difference, not that of c.
* **One program, one output block.** No atomics: the same inputs give the same bits.

Public: `forgetting_attention_triton`, `first_visible_key`, `count_pruned_blocks`, `TILES`.
"""

from __future__ import annotations  # keeps tl.constexpr unevaluated where Triton is absent

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

import torch


try:
    import triton
    import triton.language as tl

    jit = triton.jit
    # T changes from call to call: a kernel specialised on it, or on what follows from it, would be compiled again and
    # again, in the middle of a generation for instance.
    jit_any_length = triton.jit(do_not_specialize=["Tq", "Tk", "n_split", "n_halvings"])
    LOG2E = tl.constexpr(1.4426950408889634)
    # Logits bounded by so many powers of two need no running maximum: a row holds its own key, of 2^-42 or more beside the
    # bound 2^42, and all that fp32 loses below 2^-126 is less than 2^-24 of that up to 2^18 keys.
    MAX_FIXED = tl.constexpr(42.0)
    # The interpreter multiplies bf16 operands as if their bits were integers and truncates fp32 to bf16 (triton 3.3
    # to 3.9); `dot` and `narrow` do both by hand there.
    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"))
except ImportError:  # CPU wheel or Windows: importing this file works, calling it is a clear error
    triton = None

    def jit(fn):
        return fn

    jit_any_length = jit


__all__ = ["TILES", "Tile", "Tiles", "count_pruned_blocks", "first_visible_key", "forgetting_attention_triton"]


class Tile(NamedTuple):
    """Launch parameters of one kernel: query rows and keys per block, warps, depth of the software pipeline."""

    BM: int
    BN: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """One Tile per kernel. Pruning works in blocks of the forward tile."""

    forward: Tile
    dq: Tile
    dkdv: Tile
    decode: Tile


# TILES[capability, bytes per element][smallest power of two >= head size]. Chosen from compiled resources: hardly
# a spill in the unmasked loops, 16 or more rows of the score block per warp, shared memory within the device's limit.
TILES: dict[tuple[int, int], dict[int, Tiles]] = {
    (80, 2): {
        16: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)),
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(16, 64, 4, 3)),
        256: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2), Tile(16, 32, 4, 2)),
    },
    (86, 2): {  # 8.6, 8.9: 99 KiB of shared memory per block
        16: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)),
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 4, 2), Tile(32, 64, 8, 2), Tile(16, 32, 4, 3)),
        256: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 2)),
    },
    (90, 2): {
        16: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
        256: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2), Tile(16, 32, 4, 3)),
    },
    (100, 2): {  # with 64 keys of 256 dimensions, the dk/dv pass no longer fits tensor memory and compiles to a trap
        16: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        32: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
        256: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 3)),
    },
    # an fp32 product is three tf32 products (`dot`) of operands split in registers: this spills, and is for checking
    (80, 4): {
        16: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2)),
        32: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2)),
        64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 8, 2), Tile(16, 32, 4, 2)),
        128: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 4, 2)),
        256: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),
    },
    # the interpreter: several blocks even in a small test
    (0, 2): dict.fromkeys(
        (16, 32, 64, 128, 256), Tiles(Tile(32, 32, 1, 1), Tile(32, 16, 1, 1), Tile(32, 32, 1, 1), Tile(16, 32, 1, 1))
    ),
}
TILES[0, 4] = TILES[0, 2]


def nearest_key(capability: int, itemsize: int) -> tuple[int, int]:
    """The key of `TILES` for a capability such as 90, or for the nearest one below it; 12.x has the memory of 8.6."""
    return max(key for key in TILES if key[1] == itemsize and key[0] <= (86 if capability >= 120 else capability))


def capability_of(device: torch.device) -> int:
    """90 for compute capability 9.0; the CPU is the interpreter, 0."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


def tiles_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> Tiles:
    """The tile sizes of a launch."""
    return TILES[nearest_key(capability_of(device), dtype.itemsize)][padded(head_dim)]


def padded(head_dim: int) -> int:
    """The power of two that holds a head; dot products need 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


# Kernels. p_ pointer, o_ offsets, m_ mask, b_ block in registers, i_ index, s_ stride. Rows are counted by their
# position among the keys, so query pointers are moved back by Tk - Tq rows. Logits are in units of log 2, so that the
# exponential is one hardware exp2. D is the head size, BD the power of two that holds it.


@jit
def dot(b_a, b_b):
    if INTERPRETED:
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    return tl.dot(b_a, b_b, input_precision="tf32x3")  # concerns fp32 operands only: three tensor-core products


@jit
def narrow(b_x, dtype: tl.constexpr):
    """An fp32 block in the dtype of the inputs, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.uint32, bitcast=True)
        b_x = ((b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@jit
def load_rows(
    p_x, i_row, begin, stop, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Rows i_row ... of a (T, D) matrix as [BT, BD]. MASKED: rows outside [begin, stop) are 0, unread."""
    o_t, o_d = tl.arange(0, BT), tl.arange(0, BD)
    # The row's address is one 64-bit scalar; offsets inside the block fit 32 bits and do not change along a loop.
    p_block = p_x + tl.cast(i_row, tl.int64) * stride + (o_t[:, None] * stride + o_d[None, :])
    if MASKED:
        m_t = (i_row + o_t >= begin) & (i_row + o_t < stop)
        b_x = tl.load(p_block, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
    elif D < BD:
        b_x = tl.load(p_block, mask=(o_d < D)[None, :], other=0.0)
    else:
        b_x = tl.load(p_block)
    return b_x


@jit
def store_rows(p_x, b_x, i_row, stop, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Writes the rows below stop of an fp32 block to rows i_row ... of a (T, D) matrix."""
    o_t, o_d = tl.arange(0, BT), tl.arange(0, BD)
    p_block = p_x + tl.cast(i_row, tl.int64) * stride + (o_t[:, None] * stride + o_d[None, :])
    m_block = (i_row + o_t < stop)[:, None] & (o_d < D)[None, :]
    tl.store(p_block, narrow(b_x, p_x.dtype.element_ty), mask=m_block)


@jit
def decay(c_i, e_i, c_j, e_j):
    """(c_i - c_j) / log 2 with the rounding error of the difference: the fp32 pair c + e holds about 48 bits."""
    return ((c_i - c_j) + (e_i - e_j)) * LOG2E


@jit
def decay_of_rows(p_c, p_e, c_row, e_row, i_row, Tk, BM: tl.constexpr):
    """The decay from row i_row, whose c is c_row + e_row, to each of the rows i_row ... i_row + BM, [BM]."""
    o_i = i_row + tl.arange(0, BM)
    m_i = o_i < Tk
    return decay(tl.load(p_c + o_i, mask=m_i, other=0.0), tl.load(p_e + o_i, mask=m_i, other=0.0), c_row, e_row)


@jit
def key_range(p_first, i_row, Tk, BM: tl.constexpr, BN: tl.constexpr, BOUNDED: tl.constexpr):
    """The keys [begin, end) that queries i_row ... i_row + BM see, and first_i, [BM].

    Blocks of BN keys in [full, diagonal) are seen by every row and need no mask.
    """
    o_i = i_row + tl.arange(0, BM)
    if BOUNDED:
        b_first = tl.load(p_first + o_i, mask=o_i < Tk, other=0)
        m_i = (b_first <= o_i) & (o_i < Tk)  # rows that see anything at all
        begin = tl.min(tl.where(m_i, b_first, Tk), 0)
        end = tl.max(tl.where(m_i, o_i + 1, 0), 0)
        full = tl.cdiv(tl.minimum(tl.max(b_first, 0), end), BN) * BN
    else:
        b_first = tl.zeros([BM], tl.int32)
        begin, full = 0, 0
        end = tl.minimum(i_row + BM, Tk)
    diagonal = tl.maximum(full, tl.minimum(i_row + 1, end) // BN * BN)
    return b_first, begin, full, diagonal, end


@jit_any_length
def block_decay_kernel(p_c, p_e, p_d, Tk, BN: tl.constexpr):
    """The decay from each key to the last one of its block of BN keys."""
    n_n = tl.cdiv(Tk, BN)
    i_bh, i_col = tl.cast(tl.program_id(0) // n_n, tl.int64), tl.program_id(0) % n_n * BN
    o_j, last = i_bh * Tk + i_col + tl.arange(0, BN), i_bh * Tk + tl.minimum(i_col + BN, Tk) - 1
    m_j = i_col + tl.arange(0, BN) < Tk
    b_cj, b_ej = tl.load(p_c + o_j, mask=m_j), tl.load(p_e + o_j, mask=m_j)  # [BN]
    tl.store(p_d + o_j, decay(tl.load(p_c + last), tl.load(p_e + last), b_cj, b_ej), mask=m_j)


@jit
def forward_span(
    b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_d, c_row, e_row, i_from, i_to, s_kt, s_vt, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Softmax over key blocks i_from ... i_to, which all rows see; b_m and b_l: maximum and sum, from the first row.

    Every key is older than every row, so the decay is a sum of terms of one sign: from the key to the end of its block
    (p_d), to the first row (a scalar), to row i. The last one is the same for a whole row and waits until the end.

    FIXED: b_m is a bound of all logits instead of the largest so far. This saves a third of the work on each logit,
    and a block no longer waits for the one before it.
    """
    for i_k in range(i_from, i_to, BN):
        b_k = load_rows(p_k, i_k, 0, 0, s_kt, D, BN, BD, False)  # [BN, BD]
        c_end, e_end = tl.load(p_c + i_k + BN - 1), tl.load(p_e + i_k + BN - 1)
        b_d = tl.load(p_d + i_k + tl.arange(0, BN)) + decay(c_row, e_row, c_end, e_end)  # [BN]
        if FIXED:
            b_p = tl.exp2(dot(b_q, tl.trans(b_k)) * scale2 + (b_d - b_m)[None, :])  # [BM, BN]
        else:
            b_s = dot(b_q, tl.trans(b_k)) * scale2 + b_d[None, :]  # [BM, BN]
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_alpha = tl.exp2(b_m - b_m_new)
            b_p = tl.exp2(b_s - b_m_new[:, None])
            b_l, b_o, b_m = b_l * b_alpha, b_o * b_alpha[:, None], b_m_new
        b_v = load_rows(p_v, i_k, 0, 0, s_vt, D, BN, BD, False)  # [BN, BD]
        b_l += tl.sum(b_p, 1)
        b_o += dot(narrow(b_p, b_v.dtype), b_v)
    return b_o, b_l, b_m


@jit
def forward_masked_span(
    b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_first, i_row, i_from, i_to, begin, end, Tk,
    s_kt, s_vt, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Online softmax over key blocks i_from ... i_to, some of which some rows do not see; b_m and b_l from each row."""
    o_i = i_row + tl.arange(0, BM)  # what only this part needs is loaded here, and takes no registers before
    b_ci, b_ei = tl.load(p_c + o_i, mask=o_i < Tk, other=0.0), tl.load(p_e + o_i, mask=o_i < Tk, other=0.0)  # [BM]
    if BOUNDED:
        b_first = tl.load(p_first + o_i, mask=o_i < Tk, other=0)  # [BM]
    for i_k in range(i_from, i_to, BN):
        o_j = i_k + tl.arange(0, BN)
        m_j = (o_j >= begin) & (o_j < end)
        b_k = load_rows(p_k, i_k, begin, end, s_kt, D, BN, BD, True)  # [BN, BD]
        b_cj = tl.load(p_c + o_j, mask=m_j, other=0.0)  # [BN]
        b_ej = tl.load(p_e + o_j, mask=m_j, other=0.0)  # [BN]
        b_s = dot(b_q, tl.trans(b_k)) * scale2  # [BM, BN]
        b_s += decay(b_ci[:, None], b_ei[:, None], b_cj[None, :], b_ej[None, :])
        m_s = (o_j[None, :] <= o_i[:, None]) & m_j[None, :]
        if BOUNDED:
            m_s = m_s & (o_j[None, :] >= b_first[:, None])
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)  # rows that have seen no key yet
        b_alpha = tl.exp2(b_m - b_shift)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_v = load_rows(p_v, i_k, begin, end, s_vt, D, BN, BD, True)  # [BN, BD]
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_o = b_o * b_alpha[:, None] + dot(narrow(b_p, b_v.dtype), b_v)
        b_m = b_m_new
    return b_o, b_l, b_m


@jit_any_length
def forward_kernel(
    p_q, p_k, p_v, p_c, p_e, p_d, p_first, p_bound, p_o, p_lse,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_ob, s_oh, s_ot, s_fb, s_fh,
    Tq, Tk, Hq, G, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """o and lse (natural log of the softmax denominator, -inf for rows that see nothing) of one block of queries.

    KNOWN: p_bound holds an upper bound of |scale * q.k| for each head.
    """
    n_m = tl.cdiv(Tq, BM)
    i_bh = tl.program_id(0) // n_m
    i_b, i_h = tl.cast(i_bh // Hq, tl.int64), tl.cast(i_bh % Hq, tl.int64)
    i_row = Tk - Tq + (n_m - 1 - tl.program_id(0) % n_m) * BM  # the longest rows start first
    past = tl.cast(Tk - Tq, tl.int64)
    p_q += i_b * s_qb + i_h * s_qh - past * s_qt
    p_o += i_b * s_ob + i_h * s_oh - past * s_ot
    p_k += i_b * s_kb + i_h // G * s_kh
    p_v += i_b * s_vb + i_h // G * s_vh
    p_c += (i_b * Hq + i_h) * Tk
    p_e += (i_b * Hq + i_h) * Tk
    p_d += (i_b * Hq + i_h) * Tk
    p_lse += (i_b * Hq + i_h) * Tq - past
    if BOUNDED:
        p_first += i_b * s_fb + i_h * s_fh - past
    _, begin, full, diagonal, end = key_range(p_first, i_row, Tk, BM, BN, BOUNDED)

    b_q = load_rows(p_q, i_row, i_row, Tk, s_qt, D, BM, BD, True)  # [BM, BD]
    c_row, e_row = tl.load(p_c + i_row), tl.load(p_e + i_row)
    scale2 = scale * LOG2E
    b_o = tl.zeros([BM, BD], tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    fixed = False
    if KNOWN:
        bound2 = tl.load(p_bound + i_bh) * LOG2E
        fixed = bound2 <= MAX_FIXED
    if fixed:
        b_o, b_l, bound2 = forward_span(
            b_o, b_l, bound2, b_q, p_k, p_v, p_c, p_e, p_d, c_row, e_row, full, diagonal, s_kt, s_vt, scale2,
            D, BM, BN, BD, FIXED=True)  # fmt: skip
        b_fade = decay_of_rows(p_c, p_e, c_row, e_row, i_row, Tk, BM)
        b_l, b_o = b_l * tl.exp2(b_fade), b_o * tl.exp2(b_fade)[:, None]
        b_m = tl.zeros([BM], tl.float32) + bound2
    else:
        b_m = tl.full([BM], float("-inf"), tl.float32)
        b_o, b_l, b_m = forward_span(
            b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_d, c_row, e_row, full, diagonal, s_kt, s_vt, scale2,
            D, BM, BN, BD, FIXED=False)  # fmt: skip
        b_m += decay_of_rows(p_c, p_e, c_row, e_row, i_row, Tk, BM)
    if BOUNDED:
        b_o, b_l, b_m = forward_masked_span(
            b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_first, i_row, begin // BN * BN, full, begin, end, Tk,
            s_kt, s_vt, scale2, D, BM, BN, BD, BOUNDED)  # fmt: skip
    b_o, b_l, b_m = forward_masked_span(
        b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_first, i_row, diagonal, end, begin, end, Tk,
        s_kt, s_vt, scale2, D, BM, BN, BD, BOUNDED)  # fmt: skip
    o_i = i_row + tl.arange(0, BM)
    b_o = b_o / tl.where(b_l == 0.0, 1.0, b_l)[:, None]  # a row that sees nothing gives 0
    store_rows(p_o, b_o, i_row, Tk, s_ot, D, BM, BD)
    tl.store(p_lse + o_i, (b_m + tl.log2(b_l)) / LOG2E, mask=o_i < Tk)


@jit
def dq_span(
    b_dq, b_dc, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, p_e, p_d, b_ci, b_ei, c_row, e_row, b_first, i_row,
    i_from, i_to, begin, end, s_kt, s_vt, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds dS k and the row sums of dS over key blocks i_from ... i_to. The decay is split as in `forward_span`."""
    o_i = i_row + tl.arange(0, BM)
    b_fade = decay(b_ci, b_ei, c_row, e_row) - b_lse  # [BM]
    for i_k in range(i_from, i_to, BN):
        o_j = i_k + tl.arange(0, BN)
        b_k = load_rows(p_k, i_k, begin, end, s_kt, D, BN, BD, MASKED)  # [BN, BD]
        b_v = load_rows(p_v, i_k, begin, end, s_vt, D, BN, BD, MASKED)  # [BN, BD]
        if MASKED:
            m_j = (o_j >= begin) & (o_j < end)
            b_cj = tl.load(p_c + o_j, mask=m_j, other=0.0)  # [BN]
            b_ej = tl.load(p_e + o_j, mask=m_j, other=0.0)  # [BN]
            b_s = dot(b_q, tl.trans(b_k)) * scale2  # [BM, BN]
            b_s += decay(b_ci[:, None], b_ei[:, None], b_cj[None, :], b_ej[None, :]) - b_lse[:, None]
            m_s = (o_j[None, :] <= o_i[:, None]) & m_j[None, :]
            if BOUNDED:
                m_s = m_s & (o_j[None, :] >= b_first[:, None])
            b_ds = tl.exp2(b_s) * (dot(b_do, tl.trans(b_v)) - b_delta[:, None])  # [BM, BN]
            b_ds = tl.where(m_s, b_ds, 0.0)  # a row that sees nothing may hold NaN
        else:
            c_end, e_end = tl.load(p_c + i_k + BN - 1), tl.load(p_e + i_k + BN - 1)
            b_d = tl.load(p_d + o_j)  # [BN]
            b_row = b_fade + decay(c_row, e_row, c_end, e_end)
            b_p = tl.exp2(dot(b_q, tl.trans(b_k)) * scale2 + (b_d[None, :] + b_row[:, None]))  # [BM, BN]
            b_ds = b_p * (dot(b_do, tl.trans(b_v)) - b_delta[:, None])
        b_dc += tl.sum(b_ds, 1)
        b_dq += dot(narrow(b_ds, b_k.dtype), b_k)
    return b_dq, b_dc


@jit_any_length
def dq_kernel(
    p_q, p_k, p_v, p_c, p_e, p_d, p_first, p_o, p_lse, p_do, p_dlse, p_dq, p_dc, p_delta, p_fade,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_ob, s_oh, s_ot, s_dob, s_doh, s_dot, s_dqb, s_dqh, s_dqt,
    s_fb, s_fh,
    Tq, Tk, Hq, G, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dq and the queries' share of dc for one block of queries; also what the dk/dv pass needs to know of each row:
    delta = rowsum(do * o) - dlse, and the decay since the start of its aligned block of BR queries minus lse.

    dS = p * (do.v - delta), because d lse_i / dS_ij = p_ij. The queries' share of dc, the row sums of dS, is dlse in
    exact arithmetic. It is summed all the same because delta carries the rounding of o: so, an error in row i reaches
    only the gates that row i remembers, and not all before i.
    """
    n_m = tl.cdiv(Tq, BM)
    i_bh = tl.program_id(0) // n_m
    i_b, i_h = tl.cast(i_bh // Hq, tl.int64), tl.cast(i_bh % Hq, tl.int64)
    i_row = Tk - Tq + (n_m - 1 - tl.program_id(0) % n_m) * BM
    past = tl.cast(Tk - Tq, tl.int64)
    p_q += i_b * s_qb + i_h * s_qh - past * s_qt
    p_o += i_b * s_ob + i_h * s_oh - past * s_ot
    p_do += i_b * s_dob + i_h * s_doh - past * s_dot
    p_dq += i_b * s_dqb + i_h * s_dqh - past * s_dqt
    p_k += i_b * s_kb + i_h // G * s_kh
    p_v += i_b * s_vb + i_h // G * s_vh
    p_c += (i_b * Hq + i_h) * Tk
    p_e += (i_b * Hq + i_h) * Tk
    p_d += (i_b * Hq + i_h) * Tk
    p_dc += (i_b * Hq + i_h) * Tk
    p_lse += (i_b * Hq + i_h) * Tq - past
    p_dlse += (i_b * Hq + i_h) * Tq - past
    p_delta += (i_b * Hq + i_h) * Tq - past
    p_fade += (i_b * Hq + i_h) * Tq - past
    if BOUNDED:
        p_first += i_b * s_fb + i_h * s_fh - past
    b_first, begin, full, diagonal, end = key_range(p_first, i_row, Tk, BM, BN, BOUNDED)

    o_i = i_row + tl.arange(0, BM)
    m_i = o_i < Tk
    b_do = load_rows(p_do, i_row, i_row, Tk, s_dot, D, BM, BD, True)  # [BM, BD]
    b_o = load_rows(p_o, i_row, i_row, Tk, s_ot, D, BM, BD, True)  # [BM, BD]
    b_dlse = tl.load(p_dlse + o_i, mask=m_i, other=0.0)  # [BM]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1) - b_dlse  # [BM]
    b_ci, b_ei = tl.load(p_c + o_i, mask=m_i, other=0.0), tl.load(p_e + o_i, mask=m_i, other=0.0)  # [BM]
    b_lse = tl.load(p_lse + o_i, mask=m_i, other=0.0) * LOG2E  # [BM]
    o_r = o_i // BR * BR
    b_cr, b_er = tl.load(p_c + o_r, mask=m_i, other=0.0), tl.load(p_e + o_r, mask=m_i, other=0.0)  # [BM]
    tl.store(p_delta + o_i, b_delta, mask=m_i)
    tl.store(p_fade + o_i, decay(b_ci, b_ei, b_cr, b_er) - b_lse, mask=m_i)
    b_q = load_rows(p_q, i_row, i_row, Tk, s_qt, D, BM, BD, True)  # [BM, BD]
    c_row, e_row = tl.load(p_c + i_row), tl.load(p_e + i_row)
    scale2 = scale * LOG2E
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_dc = tl.zeros([BM], tl.float32)
    b_dq, b_dc = dq_span(
        b_dq, b_dc, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, p_e, p_d, b_ci, b_ei, c_row, e_row, b_first, i_row,
        full, diagonal, begin, end, s_kt, s_vt, scale2, D, BM, BN, BD, BOUNDED, MASKED=False)  # fmt: skip
    if BOUNDED:
        b_dq, b_dc = dq_span(
            b_dq, b_dc, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, p_e, p_d, b_ci, b_ei, c_row, e_row, b_first, i_row,
            begin // BN * BN, full, begin, end, s_kt, s_vt, scale2, D, BM, BN, BD, BOUNDED, MASKED=True)  # fmt: skip
    b_dq, b_dc = dq_span(
        b_dq, b_dc, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, p_e, p_d, b_ci, b_ei, c_row, e_row, b_first, i_row,
        diagonal, end, begin, end, s_kt, s_vt, scale2, D, BM, BN, BD, BOUNDED, MASKED=True)  # fmt: skip
    store_rows(p_dq, b_dq * scale, i_row, Tk, s_dqt, D, BM, BD)
    tl.store(p_dc + o_i, b_dc, mask=m_i)


@jit
def dkdv_span(
    b_dk, b_dv, b_dc, b_k, b_v, p_q, p_do, p_c, p_e, p_lse, p_delta, p_fade, b_cj, b_ej, c_col, e_col, b_stop, i_col,
    i_from, i_to, begin, end, s_qt, s_dot, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds dS^T q, P^T do and minus the column sums of dS over query blocks i_from ... i_to, as [keys, queries]."""
    o_j = i_col + tl.arange(0, BN)
    b_fade = decay(c_col, e_col, b_cj, b_ej)  # [BN], to the block's last key
    for i_q in range(i_from, i_to, BM):
        o_i = i_q + tl.arange(0, BM)
        b_q = load_rows(p_q, i_q, begin, end, s_qt, D, BM, BD, MASKED)  # [BM, BD]
        b_do = load_rows(p_do, i_q, begin, end, s_dot, D, BM, BD, MASKED)  # [BM, BD]
        if MASKED:
            m_i = (o_i >= begin) & (o_i < end)
            b_ci, b_ei = tl.load(p_c + o_i, mask=m_i, other=0.0), tl.load(p_e + o_i, mask=m_i, other=0.0)  # [BM]
            b_lse = tl.load(p_lse + o_i, mask=m_i, other=0.0) * LOG2E  # [BM]
            b_delta = tl.load(p_delta + o_i, mask=m_i, other=0.0)  # [BM]
            b_s = dot(b_k, tl.trans(b_q)) * scale2  # [BN, BM]
            b_s += decay(b_ci[None, :], b_ei[None, :], b_cj[:, None], b_ej[:, None]) - b_lse[None, :]
            m_s = (o_j[:, None] <= o_i[None, :]) & (o_i[None, :] < b_stop[:, None]) & m_i[None, :]
            b_p = tl.where(m_s, tl.exp2(b_s), 0.0)
            b_ds = b_p * (dot(b_v, tl.trans(b_do)) - b_delta[None, :])  # [BN, BM]
            b_ds = tl.where(m_s, b_ds, 0.0)  # a key that nobody sees may hold NaN
        else:
            # key to the end of its block, to the start of the query block (a scalar), to row i
            c_start, e_start = tl.load(p_c + i_q), tl.load(p_e + i_q)
            b_row, b_delta = tl.load(p_fade + o_i), tl.load(p_delta + o_i)  # [BM]
            b_col = b_fade + decay(c_start, e_start, c_col, e_col)  # [BN]
            b_p = tl.exp2(dot(b_k, tl.trans(b_q)) * scale2 + (b_row[None, :] + b_col[:, None]))  # [BN, BM]
            b_ds = b_p * (dot(b_v, tl.trans(b_do)) - b_delta[None, :])
        b_dv += dot(narrow(b_p, b_do.dtype), b_do)
        b_dk += dot(narrow(b_ds, b_q.dtype), b_q)
        b_dc -= tl.sum(b_ds, 1)
    return b_dk, b_dv, b_dc


@jit_any_length
def dkdv_kernel(
    p_q, p_k, p_v, p_c, p_e, p_stop, p_lse, p_do, p_delta, p_fade, p_dk, p_dv, p_dc,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_dob, s_doh, s_dot, s_dkb, s_dkh, s_dkt,
    s_dvb, s_dvh, s_dvt, s_sb, s_sh,
    Tq, Tk, Hq, G, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """dk, dv of one block of keys, summed over the G query heads that share it; the keys' share of each head's dc.

    Where it masks, it takes BS queries at a time: the exact decay of every pair needs more registers per query.
    """
    n_n = tl.cdiv(Tk, BN)
    i_bh = tl.program_id(0) // n_n
    Hkv = Hq // G
    i_b, i_hk = tl.cast(i_bh // Hkv, tl.int64), tl.cast(i_bh % Hkv, tl.int64)
    i_col = tl.program_id(0) % n_n * BN  # the oldest keys, seen by most queries, start first
    i_last = tl.minimum(i_col + BN, Tk) - 1
    past = tl.cast(Tk - Tq, tl.int64)
    o_j = i_col + tl.arange(0, BN)
    b_k = load_rows(p_k + i_b * s_kb + i_hk * s_kh, i_col, i_col, Tk, s_kt, D, BN, BD, True)  # [BN, BD]
    b_v = load_rows(p_v + i_b * s_vb + i_hk * s_vh, i_col, i_col, Tk, s_vt, D, BN, BD, True)  # [BN, BD]
    scale2 = scale * LOG2E
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    for i_g in range(G):
        i_h = i_hk * G + i_g
        p_qh = p_q + i_b * s_qb + i_h * s_qh - past * s_qt
        p_doh = p_do + i_b * s_dob + i_h * s_doh - past * s_dot
        i_key, i_query = (i_b * Hq + i_h) * Tk, (i_b * Hq + i_h) * Tq - past
        p_ch, p_eh = p_c + i_key, p_e + i_key
        p_lseh, p_deltah, p_fadeh = p_lse + i_query, p_delta + i_query, p_fade + i_query
        b_cj, b_ej = tl.load(p_ch + o_j, mask=o_j < Tk, other=0.0), tl.load(p_eh + o_j, mask=o_j < Tk, other=0.0)
        c_col, e_col = tl.load(p_ch + i_last), tl.load(p_eh + i_last)
        # Queries [begin, end) see some of these keys; blocks of BM queries in [full, ragged) see all of them.
        if BOUNDED:
            b_stop = tl.load(p_stop + i_b * s_sb + i_h * s_sh + o_j, mask=o_j < Tk, other=0)  # [BN]
            m_j = b_stop > o_j  # keys that anybody sees
            begin = tl.maximum(tl.min(tl.where(m_j, o_j, Tk), 0), Tk - Tq)
            end = tl.max(tl.where(m_j, b_stop, 0), 0)
            until = tl.min(tl.where(o_j < Tk, b_stop, Tk), 0)
        else:
            b_stop = tl.zeros([BN], tl.int32) + Tk
            begin = tl.maximum(i_col, Tk - Tq)
            end, until = Tk, Tk
        full = tl.cdiv(tl.minimum(tl.maximum(i_last, begin), end), BM) * BM
        ragged = tl.maximum(full, tl.minimum(until, end) // BM * BM)
        b_dc = tl.zeros([BN], tl.float32)
        b_dk, b_dv, b_dc = dkdv_span(
            b_dk, b_dv, b_dc, b_k, b_v, p_qh, p_doh, p_ch, p_eh, p_lseh, p_deltah, p_fadeh, b_cj, b_ej, c_col, e_col,
            b_stop, i_col, begin // BS * BS, full, begin, end, s_qt, s_dot, scale2,
            D, BS, BN, BD, MASKED=True)  # fmt: skip
        b_dk, b_dv, b_dc = dkdv_span(
            b_dk, b_dv, b_dc, b_k, b_v, p_qh, p_doh, p_ch, p_eh, p_lseh, p_deltah, p_fadeh, b_cj, b_ej, c_col, e_col,
            b_stop, i_col, full, ragged, begin, end, s_qt, s_dot, scale2, D, BM, BN, BD, MASKED=False)  # fmt: skip
        b_dk, b_dv, b_dc = dkdv_span(
            b_dk, b_dv, b_dc, b_k, b_v, p_qh, p_doh, p_ch, p_eh, p_lseh, p_deltah, p_fadeh, b_cj, b_ej, c_col, e_col,
            b_stop, i_col, ragged, end, begin, end, s_qt, s_dot, scale2, D, BS, BN, BD, MASKED=True)  # fmt: skip
        p_dch = p_dc + i_key + o_j
        tl.store(p_dch, tl.load(p_dch, mask=o_j < Tk) + b_dc, mask=o_j < Tk)  # dq_kernel has left the queries' share
    store_rows(p_dk + i_b * s_dkb + i_hk * s_dkh, b_dk * scale, i_col, Tk, s_dkt, D, BN, BD)
    store_rows(p_dv + i_b * s_dvb + i_hk * s_dvh, b_dv, i_col, Tk, s_dvt, D, BN, BD)


@jit
def decay_parts(p_i, p_j, s_xp, unit, m_i, m_ij, P: tl.constexpr):
    """The decay between positions as a sum of P stored parts; each difference is small where the sums are large."""
    b_d = (tl.load(p_i, mask=m_i, other=0.0).to(tl.float32) - tl.load(p_j, mask=m_ij, other=0.0).to(tl.float32)) * unit
    for i_p in tl.static_range(1, P):
        b_xi = tl.load(p_i + i_p * s_xp, mask=m_i, other=0.0).to(tl.float32)
        b_xj = tl.load(p_j + i_p * s_xp, mask=m_ij, other=0.0).to(tl.float32)
        b_d += (b_xi - b_xj) * unit
    return b_d


@jit_any_length
def prune_kernel(
    p_x, p_first, p_end, p_bound, p_kept, s_xb, s_xh, s_xg, s_xt, s_xp, s_fb, s_fh, s_ub, s_uh,
    Tq, Tk, Hq, G, n_rows, n_halvings, unit, bound_unit, tolerance,
    BM: tl.constexpr, BN: tl.constexpr, BOUNDED: tl.constexpr, P: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """The first key of each row whose block of BN keys the decay does not bound below the threshold, (B, Hq, Tq).

    c falls, so the blocks to leave out are a prefix, found by bisection. The threshold is that of `pruning_threshold`.
    """
    if ENDS:
        Tk = tl.load(p_end).to(tl.int32)
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)  # (b * Hq + h) * Tq + t
    o_b, o_h = (o_r // (Tq * Hq)).to(tl.int64), (o_r // Tq % Hq).to(tl.int64)
    o_i = Tk - Tq + o_r % Tq
    m_r = o_r < n_rows
    if BOUNDED:
        b_first = tl.load(p_first + o_b * s_fb + o_h * s_fh + o_r % Tq, mask=m_r, other=0)  # [BM]
    else:
        b_first = tl.zeros([BM], tl.int32)
    m_see = m_r & (b_first <= o_i)
    b_bound = tl.load(p_bound + o_b * s_ub + o_h * s_uh, mask=m_r, other=0.0)  # [BM]
    b_threshold = (tolerance - 2 * bound_unit * b_bound) * LOG2E - tl.log2(tl.cast(Tk, tl.float32))
    p_x_rows = p_x + o_b * s_xb + o_h // G * s_xh + o_h % G * s_xg
    p_xi = p_x_rows + o_i.to(tl.int64) * s_xt
    b_lo, b_hi = b_first // BN, o_i // BN
    for _ in range(n_halvings):
        b_mid = (b_lo + b_hi) // 2
        m_mid = m_see & (b_lo < b_hi)
        p_xj = p_x_rows + (b_mid * BN + BN - 1).to(tl.int64) * s_xt
        m_drop = m_mid & (decay_parts(p_xi, p_xj, s_xp, unit * LOG2E, m_see, m_mid, P) < b_threshold)
        b_lo, b_hi = tl.where(m_drop, b_mid + 1, b_lo), tl.where(m_mid & ~m_drop, b_mid, b_hi)
    tl.store(p_kept + o_r, tl.where(m_see, tl.maximum(b_first, b_lo * BN), b_first), mask=m_r)


@jit_any_length
def decode_kernel(
    p_q, p_k, p_v, p_x, p_first, p_end, p_o, p_lse,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_xb, s_xh, s_xg, s_xt, s_xp, s_fb, s_fh,
    Tq, Tk, Hq, G, B, n_split, scale, unit,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, P: tl.constexpr,
    ENDS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Attention of all G * Tq query rows of a kv head over one of n_split equal parts of the keys that they see.

    How much they see is known on the device only: pruning tells the first key, and p_end the last one where a cache has
    free slots. So the same launch serves every step, and its work stays evenly split.
    """
    n_r = tl.cdiv(G * Tq, BM)
    i_r = tl.program_id(0) % n_r  # neighbours read the same keys
    i_s = tl.program_id(0) // n_r % n_split
    i_bh = tl.program_id(0) // n_r // n_split
    i_b, i_hk = tl.cast(i_bh // (Hq // G), tl.int64), tl.cast(i_bh % (Hq // G), tl.int64)
    # Folded keys are 8 but seldom 16 elements apart, which the compiler would not notice, and load them one by one.
    s_kb, s_kh, s_kt = s_kb // W * W, s_kh // W * W, s_kt // W * W
    s_vb, s_vh, s_vt = s_vb // W * W, s_vh // W * W, s_vt // W * W
    if ENDS:
        Tk = tl.load(p_end).to(tl.int32)
    o_r = i_r * BM + tl.arange(0, BM)
    o_h = i_hk * G + o_r // Tq
    o_i = Tk - Tq + o_r % Tq  # position of each row
    m_r = o_r < G * Tq
    o_d = tl.arange(0, BD)
    p_k += i_b * s_kb + i_hk * s_kh
    p_v += i_b * s_vb + i_hk * s_vh
    p_q_rows = p_q + i_b * s_qb + o_h * s_qh + (o_r % Tq) * s_qt
    b_q = tl.load(p_q_rows[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)  # [BM, BD]
    p_x_rows = p_x + i_b * s_xb + i_hk * s_xh + (o_r // Tq).to(tl.int64) * s_xg  # [BM]
    p_xi = p_x_rows + o_i.to(tl.int64) * s_xt
    unit = unit * LOG2E
    if BOUNDED:
        b_first = tl.load(p_first + i_b * s_fb + o_h * s_fh + o_r % Tq, mask=m_r, other=0)  # [BM]
    else:
        b_first = tl.zeros([BM], tl.int32)
    m_see = m_r & (b_first <= o_i)
    begin = tl.min(tl.where(m_see, b_first, Tk), 0)
    stop = tl.max(tl.where(m_see, o_i + 1, 0), 0)
    span = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), BN), n_split) * BN
    begin += i_s * span
    stop = tl.minimum(begin + span, stop)

    b_o = tl.zeros([BM, BD], tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    for i_k in range(begin, stop, BN):
        o_j = i_k + tl.arange(0, BN)
        b_k = load_rows(p_k, i_k, begin, stop, s_kt, D, BN, BD, True)  # [BN, BD]
        b_v = load_rows(p_v, i_k, begin, stop, s_vt, D, BN, BD, True)  # [BN, BD]
        m_s = m_see[:, None] & (o_j < stop)[None, :] & (o_j[None, :] >= b_first[:, None])
        m_s = m_s & (o_j[None, :] <= o_i[:, None])
        p_xj = p_x_rows[:, None] + o_j.to(tl.int64)[None, :] * s_xt
        b_s = dot(b_q, tl.trans(b_k)) * (scale * LOG2E)  # [BM, BN]
        b_s += decay_parts(p_xi[:, None], p_xj, s_xp, unit, m_see[:, None], m_s, P)
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_alpha = tl.exp2(b_m - b_shift)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_o = b_o * b_alpha[:, None] + dot(narrow(b_p, b_v.dtype), b_v)
        b_m = b_m_new
    # partial results, (n_split, B, Hq, Tq, ...)
    o_row = ((tl.cast(i_s, tl.int64) * B + i_b) * Hq + i_hk * G) * Tq + o_r
    b_o = b_o / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
    tl.store(p_o + o_row[:, None] * D + o_d[None, :], b_o, mask=m_r[:, None] & (o_d < D)[None, :])
    tl.store(p_lse + o_row, b_m + tl.log2(b_l), mask=m_r)


@jit_any_length
def merge_kernel(p_o_split, p_lse, p_o, s_ob, s_oh, s_ot, Tq, Hq, n_rows, n_split,
                 D: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Joins the splits of one query row."""
    i_row = tl.cast(tl.program_id(0), tl.int64)  # (b * Hq + h) * Tq + t
    o_d = tl.arange(0, BD)
    b_o = tl.zeros([BD], tl.float32)
    b_l, b_m = 0.0, float("-inf")
    for i_n in range(n_split):
        i_x = i_n * n_rows + i_row
        b_s = tl.load(p_lse + i_x)
        b_m_new = tl.maximum(b_m, b_s)
        b_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_alpha, b_p = tl.exp2(b_m - b_shift), tl.exp2(b_s - b_shift)
        b_l = b_l * b_alpha + b_p
        b_o = b_o * b_alpha + b_p * tl.load(p_o_split + i_x * D + o_d, mask=o_d < D, other=0.0)
        b_m = b_m_new
    b_o = b_o / tl.where(b_l == 0.0, 1.0, b_l)
    p_o += i_row // (Tq * Hq) * s_ob + i_row // Tq % Hq * s_oh + i_row % Tq * s_ot
    tl.store(p_o + o_d, narrow(b_o, p_o.dtype.element_ty), mask=o_d < D)


# Launchers. Each allocates its outputs and calls its kernels; the ops below are what torch.compile and autograd see.


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _launch(kernel, programs: int, tile: Tile, *args, **constants) -> None:
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
        _launch(
            block_decay_kernel, triton.cdiv(T, block) * (c.numel() // T), Tile(1, block, 1, 1), c, e, d, T, BN=block
        )
    return d


def _forward(q, k, v, c, e, first_key, stop_query, logit_bound, scale):
    B, Hq, Tq, D = q.shape
    o, lse = _empty_output(q), q.new_empty(B, Hq, Tq, dtype=torch.float32)
    tile = tiles_for(q.device, D, q.dtype).forward
    d = _decay_in_block(c, e, tile.BN)
    first_key, *s_first = _bound(first_key, B, Hq)
    with _on(q.device):
        _launch(
            forward_kernel, triton.cdiv(Tq, tile.BM) * B * Hq, tile,
            q, k, v, c, e, d, first_key, logit_bound, o, lse, *_strides(q, k, v, o), *s_first,
            Tq, k.shape[2], Hq, Hq // k.shape[1], scale,
            D=D, BM=tile.BM, BN=tile.BN, BD=padded(D), BOUNDED=first_key is not None, KNOWN=logit_bound is not None,
        )  # fmt: skip
    return o, lse


def _backward(do, dlse, q, k, v, c, e, first_key, stop_query, o, lse, scale):
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
        _launch(
            dq_kernel, triton.cdiv(Tq, tiles.dq.BM) * B * Hq, tiles.dq,
            q, k, v, c, e, d, first_key, o, lse, do, dlse, dq, dc, delta, fade,
            *_strides(q, k, v, o, do, dq), *s_first,
            Tq, Tk, Hq, Hq // Hkv, scale,
            D=D, BM=tiles.dq.BM, BN=tiles.dq.BN, BD=padded(D), BOUNDED=bounded, BR=tiles.dkdv.BM,
        )  # fmt: skip
        _launch(
            dkdv_kernel, triton.cdiv(Tk, tiles.dkdv.BN) * B * Hkv, tiles.dkdv,
            q, k, v, c, e, stop_query, lse, do, delta, fade, dk, dv, dc, *_strides(q, k, v, do, dk, dv), *s_stop,
            Tq, Tk, Hq, Hq // Hkv, scale,
            D=D, BM=tiles.dkdv.BM, BN=tiles.dkdv.BN, BD=padded(D), BOUNDED=bounded, BS=min(tiles.dkdv.BM, 16),
        )  # fmt: skip
    return dq, dk, dv, dc


def _decode(q, k, v, gates, first_key, end, bound, scale, unit, bound_unit, tolerance):
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
            _launch(
                prune_kernel, triton.cdiv(B * Hq * Tq, tile.BM), tile._replace(warps=1),
                gates, first_key, end, bound, kept, *gates.stride(), *s_first, *bound.stride(),
                Tq, Tk, Hq, G, B * Hq * Tq, blocks.bit_length(), unit, bound_unit, tolerance,
                BM=tile.BM, BN=tile.BN, BOUNDED=first_key is not None, P=parts, ENDS=ends,
            )  # fmt: skip
            first_key, *s_first = _bound(kept, B, Hq)
        _launch(
            decode_kernel, n_split * rows, tile,
            q, k, v, gates, first_key, end, o_split, lse, *_strides(q, k, v), *gates.stride(), *s_first,
            Tq, Tk, Hq, G, B, n_split, scale, unit,
            D=D, BM=tile.BM, BN=tile.BN, BD=padded(D), BOUNDED=first_key is not None, P=parts, ENDS=ends,
            W=1 if any(s % 8 for s in _strides(k, v)) else 8,
        )  # fmt: skip
        _launch(
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
        _forward,
        mutates_args=(),
        schema=f"({_INPUTS}, Tensor? logit_bound, float scale) -> (Tensor, Tensor)",
    )
    fox_backward = torch.library.custom_op(
        f"{_SPACE}::fox_backward",
        _backward,
        mutates_args=(),
        schema=f"(Tensor do, Tensor dlse, {_INPUTS}, Tensor o, Tensor lse, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    )
    fox_decode = torch.library.custom_op(
        f"{_SPACE}::fox_decode",
        _decode,
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


# What the kernels read: the bound of each row, its transpose, and the running sum of the gates.


def _require(holds: torch.Tensor, error: type[Exception], explain: Callable[[], str]) -> None:
    """Raises `error` unless `holds`; inside torch.compile, where values are unknown, the device asserts it instead."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, "attention_mask has holes, or cu_seqlens does not rise from 0 to the token count")
    elif not holds:
        raise error(explain())


def first_visible_key(
    Tq: int,
    Tk: int,
    *,
    attention_mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor | None:
    """The first key that each query sees: padding, packing and window as one integer per row.

    Compute it once per forward pass and hand it to every layer as `first_key`; checking a mask or `cu_seqlens` waits
    for the device once.

    Args:
        Tq, Tk: number of queries and keys; query i sits at position Tk - Tq + i.
        attention_mask: (B, Tk), nonzero for real tokens, which must be contiguous in each row.
        starts, lengths: (B,) integers, the same thing in numbers: row b holds real tokens at starts[b] <= t <
            starts[b] + lengths[b]. Defaults: 0, and up to the end. They are clamped to the row.
        cu_seqlens: (N + 1,) integers 0 ... Tk, borders of sequences packed into a batch of one. Needs Tq == Tk.
        window: number of most recent keys that a query sees, itself included.
        device: where to put the result if no tensor is given.

    Returns:
        int32, (B or 1, 1, Tq), not decreasing along each row; a position past the query's own means that it sees
        nothing. None if every query sees everything before it.

    Raises:
        ValueError: more than one description of the sequences, or one that does not fit Tq and Tk.
        NotImplementedError: real tokens on both sides of a padding token.
    """
    described = {
        "attention_mask": attention_mask,
        "starts/lengths": starts if lengths is None else lengths,
        "cu_seqlens": cu_seqlens,
    }
    given = [name for name, x in described.items() if x is not None]
    if len(given) > 1:
        raise ValueError(
            f"Got {' and '.join(given)}; pass one of them, since each says where sequences begin and end."
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the keys a query sees, itself included, so it starts at 1.")

    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[1] != Tk:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (B, {Tk}), one entry per key, "
                "those in the cache included."
            )
        real = attention_mask.bool()
        starts, lengths = real.int().argmax(-1), real.sum(-1)
        t = torch.arange(Tk, device=real.device)
        holes = real != ((t >= starts[:, None]) & (t < (starts + lengths)[:, None]))
        _require(
            ~holes.any(),
            NotImplementedError,
            lambda: (
                f"attention_mask has padding between real tokens (row {int(holes.any(-1).int().argmax())}); the "
                "Triton backend takes padding on the left and on the right only. Use another backend, or pack."
            ),
        )
        if window is None and not torch.compiler.is_compiling() and real.all():
            return None

    if starts is not None or lengths is not None:
        starts = torch.zeros_like(lengths) if starts is None else starts.clamp(min=0)
        stops = torch.full_like(starts, Tk) if lengths is None else (starts + lengths).clamp(max=Tk)
        i = torch.arange(Tk - Tq, Tk, device=starts.device)
        first = torch.where(i < stops[:, None], starts[:, None], Tk)
    elif cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or Tq != Tk:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, with {Tq} queries and "
                f"{Tk} keys; it must be a vector of integers, with as many queries as keys."
            )
        _require(
            (cu_seqlens[0] == 0) & (cu_seqlens[-1] == Tk) & (cu_seqlens.diff() >= 0).all(),
            ValueError,
            lambda: (
                f"cu_seqlens is {cu_seqlens.tolist()}; it must rise from 0 to the {Tk} packed tokens, because every "
                "token belongs to one sequence."
            ),
        )
        i = torch.arange(Tk, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        first = cu_seqlens[torch.searchsorted(cu_seqlens, i, right=True) - 1][None]
    elif window is not None:
        i = torch.arange(Tk - Tq, Tk, device=device)
        first = torch.zeros_like(i)[None]
    else:
        return None
    if window is not None:
        first = torch.maximum(first, i - window + 1)
    return first[:, None].int()


def stop_query(first_key: torch.Tensor, Tk: int) -> torch.Tensor:
    """The transpose of `first_key`: one past the last query that sees each key, 0 for none. int32, (b, h, Tk)."""
    keys = torch.arange(Tk, device=first_key.device, dtype=torch.int32).expand(*first_key.shape[:2], Tk)
    count = torch.searchsorted(first_key.contiguous(), keys.contiguous(), right=True, out_int32=True)
    return torch.where(count > 0, count + (Tk - first_key.shape[-1]), 0).int()


def first_kept_key(
    c: torch.Tensor, threshold: torch.Tensor, Tq: int, query_block: int, key_block: int
) -> torch.Tensor:
    """Adaptive computation pruning (arXiv 2504.06949): the first key that each block of queries still has to read.

    A key block that ends at e is dropped for the query block that starts at r if c_r - c_e < threshold. c falls, so
    the dropped blocks are a prefix, found by bisection, and the prefix grows from one query block to the next.

    Args:
        c: float64 running sum of log f, (B, H, Tk).
        threshold: (B, H), at most 0.
        Tq, query_block, key_block: the queries are the last Tq positions, cut into blocks from the first of them.

    Returns:
        int64, (B, H, ceil(Tq / query_block)), multiples of key_block (or the block's own position if c is NaN).
    """
    Tk = c.shape[-1]
    rows = torch.arange(Tk - Tq, Tk, query_block, device=c.device)
    ends = torch.arange(key_block, Tk + key_block, key_block, device=c.device).clamp(max=Tk) - 1
    dropped = torch.searchsorted(-c[..., ends], threshold.double()[..., None] - c[..., rows])
    return torch.minimum(dropped * key_block, rows)


def _bound_from_norms(q, k, scale, first_key, stop) -> torch.Tensor:
    """(B, Hq): upper bound of |scale * q.k| from the largest norms of the rows that take part."""
    rows = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float32)  # (B, Hq, Tq)
    keys = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32)  # (B, Hkv, Tk)
    if first_key is not None:  # padding may hold anything
        t = torch.arange(k.shape[2], device=k.device)
        rows = torch.where(first_key <= t[k.shape[2] - q.shape[2] :], rows, 0.0)
        keys = torch.where(stop > t, keys, 0.0)
    return rows.amax(-1) * keys.amax(-1).repeat_interleave(q.shape[1] // k.shape[1], 1) * abs(scale)


def bound_per_head(q, logit_bound: torch.Tensor | float) -> torch.Tensor:
    """A bound that broadcasts to (B, Hq), as the kernels read it: fp32, contiguous."""
    return torch.as_tensor(logit_bound, device=q.device, dtype=torch.float32).expand(q.shape[:2]).contiguous()


def pruning_threshold(q, Tk: int, tolerance: float, logit_bound) -> torch.Tensor:
    """(B, Hq) fp32: what the decay must fall below so that all that is pruned weighs at most e^tolerance of a row."""
    bound = bound_per_head(q, logit_bound)
    return tolerance - 2 * bound - bound.new_full((), Tk).log()  # math.log would fix Tk in a compiled graph


class PrunedBlocks:
    """Tally of `count_pruned_blocks`: blocks of the forward tile, over all heads, rows and calls so far."""

    def __init__(self):
        self._pruned = self._total = 0

    def add(self, first_key: torch.Tensor | None, pruned_from: torch.Tensor, Tk: int, tile: Tile) -> None:
        """Counts one call: key blocks of each query block under `first_key`, and those that `pruned_from` drops."""
        Tq = pruned_from.shape[-1]
        stops = torch.arange(Tk - Tq, Tk, tile.BM, device=pruned_from.device).add(tile.BM).clamp(max=Tk)
        begin = pruned_from[..., :: tile.BM]
        before = torch.zeros_like(begin) if first_key is None else first_key[..., :: tile.BM].expand_as(begin)
        blocks = ((stops - before).clamp(min=0) + tile.BN - 1) // tile.BN
        kept = ((stops - begin).clamp(min=0) + tile.BN - 1) // tile.BN
        self._total = self._total + blocks.sum()
        self._pruned = self._pruned + (blocks - kept).sum()

    @property
    def total(self) -> int:
        """Blocks that causality, padding and window leave to compute."""
        return int(self._total)

    @property
    def pruned(self) -> int:
        """How many of them were not computed."""
        return int(self._pruned)


_tallies: list[PrunedBlocks] = []


@contextlib.contextmanager
def count_pruned_blocks():
    """Counts what adaptive computation pruning leaves out: `with count_pruned_blocks() as blocks: model(x)`, then read
    `blocks.pruned` and `blocks.total`. The tally stays on the device until then. A compiled model is not counted.
    """
    tally = PrunedBlocks()
    _tallies.append(tally)
    try:
        yield tally
    finally:
        _tallies.remove(tally)


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
        if tolerance is not None:
            Tq, Tk, tile = q.shape[2], k.shape[2], tiles_for(q.device, q.shape[-1], q.dtype).forward
            if logit_bound is None:
                logit_bound = _bound_from_norms(q, k, scale, first_key, stop)
            kept = first_kept_key(c, pruning_threshold(q, Tk, tolerance, logit_bound), Tq, tile.BM, tile.BN)
            kept = kept.int().repeat_interleave(tile.BM, -1)[..., :Tq]
            pruned = kept if first_key is None else torch.maximum(kept, first_key)
            for tally in _tallies:
                tally.add(first_key, pruned, Tk, tile)
            first_key, stop = pruned, stop_query(pruned, Tk)
        if logit_bound is not None:
            # fp16 weights cannot be that small beside the bound: those rows keep their running maximum
            logit_bound = None if q.dtype == torch.float16 else bound_per_head(q, logit_bound)
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
