# Triton compiles the functions of this file, with tl.constexpr for constants and tl.static_range for unrolled loops.
"""The Triton kernels of forgetting attention (arXiv 2503.02130, sec. 3 and App. E). triton_fox.py launches them.

    o_i = sum_{start_i <= j <= i} softmax_j(scale * q_i.k_j + c_i - c_j) v_j,        c_t = sum_{l <= t} log f_l

Design:

* **One integer per query instead of a mask.** Query i attends to the keys start_i ... i. This covers causality,
  padding on either side, packed sequences, a sliding window and adaptive computation pruning. The kernels read
  start_i. The dk/dv pass reads the transpose: for each key, the position after the last query that attends to it.
* **The decay is exact at any length.** c is summed in float64 and split into an fp32 pair c + e, in units of log 2.
  This pair is precise enough that the rounding error of c_i - c_j is relative to this difference, not to c.
* **Each program writes its own output block.** There are no atomics, and the cumulative sum has a fixed order, so
  results are bitwise deterministic.

Prefixes of names: p_ pointer, o_ offsets, m_ mask, b_ block in registers, i_ index, s_ stride. A row is a query. Rows
are numbered like keys, so the first query has index Tk - Tq. Query pointers are moved back by Tk - Tq rows. Logits are
in units of log 2, because exp2 is one hardware instruction. D is `head_dim`, and BD is D rounded up to a power of two.
"""

from __future__ import annotations  # leaves tl.constexpr unevaluated if Triton is not installed

import os
from types import SimpleNamespace


try:
    import triton
    import triton.language as tl

    jit = triton.jit
    # These arguments change with the sequence length T. Triton would recompile a kernel specialized on them, for
    # example at every step of generation. `rows_of` tells the compiler which number divides the strides.
    _STRIDES = (
        "qb qh qt kb kh kt vb vh vt ob oh ot dob doh dot dqb dqh dqt dkb dkh dkt dvb dvh dvt xb xh xg xt fb fh sb sh w"
    )
    _SIZES = "T Tq Tk past n_split n_groups n_parts n_tokens n_blocks G"
    jit_any_length = triton.jit(do_not_specialize=_SIZES.split() + [f"s_{name}" for name in _STRIDES.split()])
    LOG2E = tl.constexpr(1.4426950408889634)
    # The cumulative sum replaces log 0 with this number. exp(-1e5) is negligible compared with any other weight.
    GATE_FLOOR = tl.constexpr(-1e5)
    # If logits, in units of log 2, are at most 42 in absolute value, the softmax does not need a running maximum. The
    # query's own key then weighs at least 2^-84 before normalization. Weights below 2^-126 underflow in fp32. The sum
    # of 2^18 such weights is at most 2^-24 of the denominator, and the sum of 2^20 at most 2^-22.
    MAX_FIXED = tl.constexpr(42.0)
    # Triton's interpreter (3.3 to 3.9) multiplies bf16 operands as integers. It truncates fp32 to bf16. `dot` and
    # `narrow` work around these bugs.
    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"))
except ImportError:  # without Triton (CPU wheel, Windows), a call raises the error of `why_not` in triton_fox.py
    triton, INTERPRETED = None, SimpleNamespace(value=False)

    def jit(fn):
        return fn

    jit_any_length = jit


@jit
def dot(b_a, b_b):
    if INTERPRETED:
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    return tl.dot(b_a, b_b, input_precision="tf32x3")  # for fp32 operands: three tf32 products


@jit
def narrow(b_x, dtype: tl.constexpr):
    """Cast an fp32 block to `dtype`, rounding to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.uint32, bitcast=True)
        b_x = ((b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@jit
def number(x):
    """Cast a float argument to fp32. Inductor passes float64, and float64 logits would be many times slower."""
    return tl.cast(x, tl.float32)


@jit
def rows_of(p_x, i_b, i_h, past, s_b, s_h, s_t, W: tl.constexpr):
    """Return the pointer to a head, moved back by `past` rows, and the stride of its rows.

    W is the number of elements in a 16-byte load. If this number does not divide all strides, W is 1. `// W * W` tells
    the compiler that strides are multiples of W. By itself, the compiler only detects multiples of 16, but the strides
    of folded keys are 72 or 136.
    """
    s_b, s_h, s_t = s_b // W * W, s_h // W * W, s_t // W * W
    return p_x + i_b * s_b + i_h * s_h - past * s_t, s_t


@jit
def load_rows(
    p_x, i_row, begin, stop, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Load BT rows of a (T, D) matrix, starting at i_row, as [BT, BD].

    With MASKED, rows outside [begin, stop) are not read but set to 0.
    """
    o_t, o_d = tl.arange(0, BT), tl.arange(0, BD)
    # The address of row i_row is a 64-bit scalar. Offsets within the block are 32-bit and constant along a loop.
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
    """Store an fp32 block to the rows [i_row, stop) of a (T, D) matrix."""
    o_t, o_d = tl.arange(0, BT), tl.arange(0, BD)
    p_block = p_x + tl.cast(i_row, tl.int64) * stride + (o_t[:, None] * stride + o_d[None, :])
    m_block = (i_row + o_t < stop)[:, None] & (o_d < D)[None, :]
    tl.store(p_block, narrow(b_x, p_x.dtype.element_ty), mask=m_block)


@jit
def load_tokens(p_x, o_n, m_n, H, D: tl.constexpr, BD: tl.constexpr):
    """Load the tokens at offsets o_n as [BT, BD] fp32, for one of H heads. If m_n is False, the result is 0."""
    o_d = tl.arange(0, BD)
    p_block = p_x + o_n.to(tl.int64)[:, None] * H * D + o_d[None, :]
    return tl.load(p_block, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)


@jit
def store_tokens(p_x, b_x, o_n, m_n, H, D: tl.constexpr, BD: tl.constexpr):
    o_d = tl.arange(0, BD)
    p_block = p_x + o_n.to(tl.int64)[:, None] * H * D + o_d[None, :]
    tl.store(p_block, narrow(b_x, p_x.dtype.element_ty), mask=m_n[:, None] & (o_d < D)[None, :])


@jit
def decay(c_i, e_i, c_j, e_j):
    """Return c_i - c_j. With about 48 bits in a pair c + e, only the rounding of the difference matters."""
    return (c_i - c_j) + (e_i - e_j)


@jit
def pack(b_x, b_y):
    """Pack two fp32 numbers into an int64.

    In Triton 3.6, every thread loads all elements of a short vector. Packing halves the number of loads.
    """
    b_x, b_y = b_x.to(tl.uint32, bitcast=True).to(tl.uint64), b_y.to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((b_y << 32) | b_x).to(tl.int64, bitcast=True)


@jit
def unpack(b_pair):
    b_pair = b_pair.to(tl.uint64, bitcast=True)
    b_x, b_y = b_pair.to(tl.uint32), (b_pair >> 32).to(tl.uint32)
    return b_x.to(tl.float32, bitcast=True), b_y.to(tl.float32, bitcast=True)


@jit
def key_range(p_start, i_row, Tk, BM: tl.constexpr, BN: tl.constexpr, BOUNDED: tl.constexpr):
    """Return (start, begin, full, diagonal, end) for the BM queries from i_row on.

    `start` contains start_i of each query, [BM]. The queries attend to keys in [begin, end). Blocks of BN keys in
    [full, diagonal) are visible to all of these queries, and do not need a mask.
    """
    o_i = i_row + tl.arange(0, BM)
    if BOUNDED:
        b_start = tl.load(p_start + o_i, mask=o_i < Tk, other=0)
        m_i = (b_start <= o_i) & (o_i < Tk)  # queries that attend to at least one key
        begin = tl.min(tl.where(m_i, b_start, Tk), 0)
        end = tl.max(tl.where(m_i, o_i + 1, 0), 0)
        full = tl.cdiv(tl.minimum(tl.max(b_start, 0), end), BN) * BN
    else:
        b_start = tl.zeros([BM], tl.int32)
        begin, full = 0, 0
        end = tl.minimum(i_row + BM, Tk)
    diagonal = tl.maximum(full, tl.minimum(i_row + 1, end) // BN * BN)
    return b_start, begin, full, diagonal, end


@jit_any_length
def running_sum_kernel(
    p_f, p_start, p_dc, p_y, s_fb, s_fh, s_ft, s_sb, s_sh, H, T, past,
    BT: tl.constexpr, BOUNDED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Compute c, the float64 cumulative sum of log f of one head. With BACKWARD, get the gradient of log f from dc.

    If no query attends to a key (padding), its log f counts as 0. A log f below GATE_FLOOR counts as GATE_FLOOR. The
    order of additions depends only on T. torch.cumsum on a GPU does not guarantee this.
    """
    i_bh = tl.cast(tl.program_id(0), tl.int64)
    p_f += i_bh // H * s_fb + i_bh % H * s_fh
    b_before = tl.zeros([1], tl.float64)
    for i_t in range(0, T, BT):
        o_t = i_t + tl.arange(0, BT)
        if BACKWARD:
            o_t = T - 1 - o_t
        m_t = (o_t >= 0) & (o_t < T)
        b_f = tl.load(p_f + tl.cast(o_t, tl.int64) * s_ft, mask=m_t, other=0.0)  # [BT]
        if BOUNDED:
            # start_i does not decrease: if a query attends to a key, so does the first query from the key on
            p_query = p_start + i_bh // H * s_sb + i_bh % H * s_sh + tl.maximum(o_t - past, 0)
            m_real = tl.load(p_query, mask=m_t, other=0) <= o_t  # [BT]
            b_f = tl.where(m_real, b_f, 0.0)
        if BACKWARD:
            b_x = tl.load(p_dc + i_bh * T + o_t, mask=m_t, other=0.0).to(tl.float64)  # [BT]
        else:
            b_x = tl.where(b_f < GATE_FLOOR, GATE_FLOOR, b_f).to(tl.float64)  # keeps NaN
        b_y = tl.cumsum(b_x, 0) + b_before
        b_before += tl.sum(b_x, 0)
        if BACKWARD:
            b_y = tl.where(b_f >= GATE_FLOOR, b_y, 0.0)
            if BOUNDED:
                b_y = tl.where(m_real, b_y, 0.0)
        tl.store(p_y + i_bh * T + o_t, b_y.to(p_y.dtype.element_ty), mask=m_t)


@jit_any_length
def split_sum_kernel(
    p_y, p_c, p_e, p_d, p_g, p_start, p_query_end, s_fb, s_fh, H, Tq, Tk, scale,
    BT: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Split the float64 cumulative sum y into an fp32 pair c + e, in units of log 2.

    Also compute d, the decay from each key to the last key of its block of BN keys. With PARTS, compute g, too: 16
    bf16 numbers per key. The first three add up to d / (scale log2(e)), and the others are 0. With BOUNDED, also find
    the position after the last query that attends to each key, by bisection. If no query attends to a key, this is at
    most the key's own position.
    """
    n_t = tl.cdiv(Tk, BT)
    i_bh = tl.cast(tl.program_id(0) // n_t, tl.int64)
    o_t = tl.program_id(0) % n_t * BT + tl.arange(0, BT)
    m_t = o_t < Tk
    o_last = tl.minimum(o_t // BN * BN + BN, Tk) - 1
    b_log2e = tl.full([BT], LOG2E, tl.float64)  # a scalar would be rounded to fp32
    b_y = tl.load(p_y + i_bh * Tk + o_t, mask=m_t, other=0.0) * b_log2e  # [BT]
    b_last = tl.load(p_y + i_bh * Tk + o_last, mask=m_t, other=0.0) * b_log2e  # [BT]
    b_c = b_y.to(tl.float32)
    tl.store(p_c + i_bh * Tk + o_t, b_c, mask=m_t)
    tl.store(p_e + i_bh * Tk + o_t, (b_y - b_c).to(tl.float32), mask=m_t)
    b_d = (b_last - b_y).to(tl.float32)
    tl.store(p_d + i_bh * Tk + o_t, b_d, mask=m_t)
    if PARTS:
        o_p = tl.arange(0, 16)[None, :]
        b_rest = b_d / (number(scale) * LOG2E)
        b_g = tl.zeros([BT, 16], tl.float32)
        for i_p in tl.static_range(3):
            b_part = narrow(b_rest, tl.bfloat16).to(tl.float32)
            b_g = tl.where(o_p == i_p, b_part[:, None], b_g)
            b_rest -= b_part
        tl.store(p_g + (i_bh * Tk + o_t)[:, None] * 16 + o_p, narrow(b_g, tl.bfloat16), mask=m_t[:, None])
    if BOUNDED:
        p_start += i_bh // H * s_fb + i_bh % H * s_fh
        b_lo, b_hi = tl.zeros([BT], tl.int32), tl.zeros([BT], tl.int32) + Tq  # number of queries with start_i <= o_t
        left = Tq
        while left > 0:
            left //= 2
            b_mid = (b_lo + b_hi) // 2
            m_mid = m_t & (b_lo < b_hi)
            m_attends = m_mid & (tl.load(p_start + b_mid, mask=m_mid, other=0) <= o_t)
            b_lo, b_hi = tl.where(m_attends, b_mid + 1, b_lo), tl.where(m_mid & ~m_attends, b_mid, b_hi)
        tl.store(p_query_end + i_bh * Tk + o_t, tl.where(b_lo > 0, b_lo + Tk - Tq, 0), mask=m_t)


@jit
def forward_span(
    b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_d, p_g, c_row, e_row, i_from, i_to, s_kt, s_vt, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FIXED: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Update an online softmax with the key blocks from i_from to i_to. These blocks are visible to all rows.

    b_o, b_l and b_m are the output, sum and maximum. They include only the decay from each key to the first row.

    The decay from key j to row i has three terms, all at most 0: from j to the end of its key block (p_d); from there
    to the first row (a scalar); and from the first row to i. The last term is the same for all keys, so the caller
    adds it.

    With FIXED, b_m is a bound on all logits instead of a running maximum. This saves work per logit. With PRODUCTS and
    FIXED, the tensor cores add the decay and sum the weights.
    """
    o_p = tl.arange(0, 16)[None, :]
    b_three = tl.where(o_p < 3, tl.full([BM, 16], 1.0, tl.float32), 0.0).to(tl.bfloat16)  # adds the three parts of d
    b_sums = tl.zeros([BM, 16], tl.float32)
    for i_k in range(i_from, i_to, BN):
        b_k = load_rows(p_k, i_k, 0, 0, s_kt, D, BN, BD, False)  # [BN, BD]
        c_end, e_end = tl.load(p_c + i_k + BN - 1), tl.load(p_e + i_k + BN - 1)
        if PRODUCTS:
            b_g = tl.load(p_g + (i_k + tl.arange(0, BN))[:, None] * 16 + o_p)  # [BN, 16]
            b_s = dot(b_q, tl.trans(b_k)) + dot(b_three, tl.trans(b_g))  # one accumulator for both
            b_p = tl.exp2(b_s * scale2 + (decay(c_row, e_row, c_end, e_end) - b_m))  # [BM, BN]
        else:
            b_d = tl.load(p_d + i_k + tl.arange(0, BN)) + decay(c_row, e_row, c_end, e_end)  # [BN]
        if FIXED and not PRODUCTS:
            b_p = tl.exp2(dot(b_q, tl.trans(b_k)) * scale2 + (b_d - b_m)[None, :])  # [BM, BN]
        if not FIXED:
            b_s = dot(b_q, tl.trans(b_k)) * scale2 + b_d[None, :]  # [BM, BN]
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_alpha = tl.exp2(b_m - b_m_new)
            b_p = tl.exp2(b_s - b_m_new[:, None])
            b_l, b_o, b_m = b_l * b_alpha, b_o * b_alpha[:, None], b_m_new
        b_v = load_rows(p_v, i_k, 0, 0, s_vt, D, BN, BD, False)  # [BN, BD]
        # With a running maximum, a weight that dominates its row is exactly 1. With a bound, it is not. Its rounding
        # error then cancels only if b_l sums the rounded weights. They are rounded as integers: to convert bf16
        # numbers that are used twice, the compiler would occupy the hardware unit that computes exponentials.
        if FIXED and not PRODUCTS and b_v.dtype == tl.bfloat16:
            b_bits = b_p.to(tl.uint32, bitcast=True) + 0x8000
            b_bits = tl.minimum(b_bits, 0x7FC00000) & 0xFFFF0000  # NaN, 0x7FFFFFFF, would wrap to -0
            b_p = b_bits.to(tl.float32, bitcast=True)
        b_w = narrow(b_p, b_v.dtype)
        if PRODUCTS:
            b_sums += dot(b_w, tl.full([BN, 16], 1.0, tl.float32).to(b_v.dtype))
        else:
            b_l += tl.sum(b_p, 1)
        b_o += dot(b_w, b_v)
    if PRODUCTS:
        b_l += tl.sum(b_sums, 1) / 16
    return b_o, b_l, b_m


@jit
def forward_masked_span(
    b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_start, i_row, i_from, i_to, begin, end, Tk,
    s_kt, s_vt, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Update an online softmax with the key blocks from i_from to i_to. These blocks are masked for some rows.

    b_o, b_l and b_m are the output, sum and maximum. They include the decay of each key from its position to the row.
    """
    o_i = i_row + tl.arange(0, BM)  # computed here, so as not to occupy registers in the unmasked loop
    b_ci, b_ei = tl.load(p_c + o_i, mask=o_i < Tk, other=0.0), tl.load(p_e + o_i, mask=o_i < Tk, other=0.0)  # [BM]
    if BOUNDED:
        b_start = tl.load(p_start + o_i, mask=o_i < Tk, other=0)  # [BM]
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
            m_s = m_s & (o_j[None, :] >= b_start[:, None])
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)  # 0 for rows without a visible key so far
        b_alpha = tl.exp2(b_m - b_shift)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_v = load_rows(p_v, i_k, begin, end, s_vt, D, BN, BD, True)  # [BN, BD]
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_o = b_o * b_alpha[:, None] + dot(narrow(b_p, b_v.dtype), b_v)
        b_m = b_m_new
    return b_o, b_l, b_m


@jit_any_length
def forward_kernel(
    p_q, p_k, p_v, p_c, p_e, p_d, p_g, p_start, p_bound, p_o, p_lse,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_ob, s_oh, s_ot, s_fb, s_fh,
    Tq, Tk, Hq, G, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, KNOWN: tl.constexpr,
    BS: tl.constexpr, W: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Compute the output o of one query block. Also compute lse, the natural log of the softmax denominator.

    lse is -inf for a row without visible keys. With KNOWN, p_bound contains an upper bound of |scale * q.k| for each
    head. Masked blocks are processed BS keys at a time, because they compute a decay for each pair, in more registers.
    """
    n_m = tl.cdiv(Tq, BM)
    i_bh = tl.program_id(0) // n_m
    i_b, i_h = tl.cast(i_bh // Hq, tl.int64), tl.cast(i_bh % Hq, tl.int64)
    i_row = Tk - Tq + (n_m - 1 - tl.program_id(0) % n_m) * BM  # the rows with the most keys start first
    past = tl.cast(Tk - Tq, tl.int64)
    p_q, s_qt = rows_of(p_q, i_b, i_h, past, s_qb, s_qh, s_qt, W)
    p_o, s_ot = rows_of(p_o, i_b, i_h, past, s_ob, s_oh, s_ot, W)
    p_k, s_kt = rows_of(p_k, i_b, i_h // G, 0, s_kb, s_kh, s_kt, W)
    p_v, s_vt = rows_of(p_v, i_b, i_h // G, 0, s_vb, s_vh, s_vt, W)
    p_c += (i_b * Hq + i_h) * Tk
    p_e += (i_b * Hq + i_h) * Tk
    p_d += (i_b * Hq + i_h) * Tk
    if KNOWN and PRODUCTS:
        p_g += (i_b * Hq + i_h) * Tk * 16
    p_lse += (i_b * Hq + i_h) * Tq - past
    if BOUNDED:
        p_start += i_b * s_fb + i_h * s_fh - past
    _, begin, full, diagonal, end = key_range(p_start, i_row, Tk, BM, BN, BOUNDED)

    b_q = load_rows(p_q, i_row, i_row, Tk, s_qt, D, BM, BD, True)  # [BM, BD]
    c_row, e_row = tl.load(p_c + i_row), tl.load(p_e + i_row)
    scale = number(scale)
    scale2 = scale * LOG2E
    b_o = tl.zeros([BM, BD], tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    if KNOWN:
        bound2 = tl.load(p_bound + i_bh) * LOG2E
        fixed = bound2 <= MAX_FIXED
    else:
        fixed: tl.constexpr = tl.constexpr(False)  # a constant, so that only one of the branches below is compiled
    if fixed:
        b_o, b_l, bound2 = forward_span(
            b_o, b_l, bound2, b_q, p_k, p_v, p_c, p_e, p_d, p_g, c_row, e_row, full, diagonal, s_kt, s_vt, scale2,
            D, BM, BN, BD, FIXED=True, PRODUCTS=PRODUCTS)  # fmt: skip
        b_m = bound2 + tl.log2(b_l)  # log of the denominator, used as a maximum; -inf without visible keys
        b_o = b_o / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
        b_l = tl.where(b_l == 0.0, 0.0, 1.0)
    else:
        b_m = tl.full([BM], float("-inf"), tl.float32)
        b_o, b_l, b_m = forward_span(
            b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_d, p_g, c_row, e_row, full, diagonal, s_kt, s_vt, scale2,
            D, BM, BN, BD, FIXED=False, PRODUCTS=False)  # fmt: skip
    o_i = i_row + tl.arange(0, BM)
    b_ci, b_ei = tl.load(p_c + o_i, mask=o_i < Tk, other=0.0), tl.load(p_e + o_i, mask=o_i < Tk, other=0.0)  # [BM]
    b_m += decay(b_ci, b_ei, c_row, e_row)
    if BOUNDED:
        b_o, b_l, b_m = forward_masked_span(
            b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_start, i_row, begin // BS * BS, full, begin, end, Tk,
            s_kt, s_vt, scale2, D, BM, BS, BD, BOUNDED)  # fmt: skip
    b_o, b_l, b_m = forward_masked_span(
        b_o, b_l, b_m, b_q, p_k, p_v, p_c, p_e, p_start, i_row, diagonal, end, begin, end, Tk,
        s_kt, s_vt, scale2, D, BM, BS, BD, BOUNDED)  # fmt: skip
    b_o = b_o / tl.where(b_l == 0.0, 1.0, b_l)[:, None]  # the output of a row without visible keys is 0
    store_rows(p_o, b_o, i_row, Tk, s_ot, D, BM, BD)
    tl.store(p_lse + o_i, (b_m + tl.log2(b_l)) / LOG2E, mask=o_i < Tk)


@jit
def dq_span(
    b_dq, b_dc, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, p_e, p_d, b_ci, b_ei, c_row, e_row, b_start, i_row,
    i_from, i_to, begin, end, s_kt, s_vt, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS k to dq, and the row sums of dS to dc, for the key blocks from i_from to i_to.

    Without MASKED, the decay is split as in `forward_span`.
    """
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
                m_s = m_s & (o_j[None, :] >= b_start[:, None])
            b_ds = tl.exp2(b_s) * (dot(b_do, tl.trans(b_v)) - b_delta[:, None])  # [BM, BN]
            b_ds = tl.where(m_s, b_ds, 0.0)  # a row without visible keys may contain NaN
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
    p_q, p_k, p_v, p_c, p_e, p_d, p_start, p_o, p_lse, p_do, p_dq, p_dc, p_rows,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_ob, s_oh, s_ot, s_dob, s_doh, s_dot, s_dqb, s_dqh, s_dqt,
    s_fb, s_fh,
    Tq, Tk, Hq, G, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of queries, and the part of dc that comes from queries.

    p_rows receives two numbers per row for `dkdv_kernel`. The first is the decay since the first row of the aligned
    block of BR rows, minus lse. The second is delta = rowsum(do * o).

    Let dS = p * (do.v - delta). The part of dc that comes from queries is the row sums of dS. In exact arithmetic, the
    row sums are 0. In practice they are not, because delta contains the rounding error of o. Without the row sums, the
    error of row i would affect all gates before i. With the row sums, the error affects only the gates of keys that
    row i has not forgotten.
    """
    n_m = tl.cdiv(Tq, BM)
    i_bh = tl.program_id(0) // n_m
    i_b, i_h = tl.cast(i_bh // Hq, tl.int64), tl.cast(i_bh % Hq, tl.int64)
    i_row = Tk - Tq + (n_m - 1 - tl.program_id(0) % n_m) * BM
    past = tl.cast(Tk - Tq, tl.int64)
    p_q, s_qt = rows_of(p_q, i_b, i_h, past, s_qb, s_qh, s_qt, W)
    p_o, s_ot = rows_of(p_o, i_b, i_h, past, s_ob, s_oh, s_ot, W)
    p_do, s_dot = rows_of(p_do, i_b, i_h, past, s_dob, s_doh, s_dot, W)
    p_dq, s_dqt = rows_of(p_dq, i_b, i_h, past, s_dqb, s_dqh, s_dqt, W)
    p_k, s_kt = rows_of(p_k, i_b, i_h // G, 0, s_kb, s_kh, s_kt, W)
    p_v, s_vt = rows_of(p_v, i_b, i_h // G, 0, s_vb, s_vh, s_vt, W)
    p_c += (i_b * Hq + i_h) * Tk
    p_e += (i_b * Hq + i_h) * Tk
    p_d += (i_b * Hq + i_h) * Tk
    p_dc += (i_b * Hq + i_h) * Tk
    p_lse += (i_b * Hq + i_h) * Tq - past
    p_rows += (i_b * Hq + i_h) * Tq - past
    if BOUNDED:
        p_start += i_b * s_fb + i_h * s_fh - past
    b_start, begin, full, diagonal, end = key_range(p_start, i_row, Tk, BM, BN, BOUNDED)

    o_i = i_row + tl.arange(0, BM)
    m_i = o_i < Tk
    b_do = load_rows(p_do, i_row, i_row, Tk, s_dot, D, BM, BD, True)  # [BM, BD]
    b_o = load_rows(p_o, i_row, i_row, Tk, s_ot, D, BM, BD, True)  # [BM, BD]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BM]
    b_ci, b_ei = tl.load(p_c + o_i, mask=m_i, other=0.0), tl.load(p_e + o_i, mask=m_i, other=0.0)  # [BM]
    b_lse = tl.load(p_lse + o_i, mask=m_i, other=0.0) * LOG2E  # [BM]
    o_r = o_i // BR * BR
    b_cr, b_er = tl.load(p_c + o_r, mask=m_i, other=0.0), tl.load(p_e + o_r, mask=m_i, other=0.0)  # [BM]
    tl.store(p_rows + o_i, pack(decay(b_ci, b_ei, b_cr, b_er) - b_lse, b_delta), mask=m_i)
    b_q = load_rows(p_q, i_row, i_row, Tk, s_qt, D, BM, BD, True)  # [BM, BD]
    c_row, e_row = tl.load(p_c + i_row), tl.load(p_e + i_row)
    scale = number(scale)
    scale2 = scale * LOG2E
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_dc = tl.zeros([BM], tl.float32)
    b_dq, b_dc = dq_span(
        b_dq, b_dc, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, p_e, p_d, b_ci, b_ei, c_row, e_row, b_start, i_row,
        full, diagonal, begin, end, s_kt, s_vt, scale2, D, BM, BN, BD, BOUNDED, MASKED=False)  # fmt: skip
    if BOUNDED:
        b_dq, b_dc = dq_span(
            b_dq, b_dc, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, p_e, p_d, b_ci, b_ei, c_row, e_row, b_start, i_row,
            begin // BS * BS, full, begin, end, s_kt, s_vt, scale2, D, BM, BS, BD, BOUNDED, MASKED=True)  # fmt: skip
    b_dq, b_dc = dq_span(
        b_dq, b_dc, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, p_e, p_d, b_ci, b_ei, c_row, e_row, b_start, i_row,
        diagonal, end, begin, end, s_kt, s_vt, scale2, D, BM, BS, BD, BOUNDED, MASKED=True)  # fmt: skip
    store_rows(p_dq, b_dq * scale, i_row, Tk, s_dqt, D, BM, BD)
    tl.store(p_dc + o_i, b_dc, mask=m_i)


@jit
def dkdv_span(
    b_dk, b_dv, b_dc, b_k, b_v, p_q, p_do, p_c, p_e, p_lse, p_rows, b_cj, b_ej, c_col, e_col, b_query_end, i_col,
    i_from, i_to, begin, end, s_qt, s_dot, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS^T @ q to dk and P^T @ do to dv, and subtract the column sums of dS from dc.

    The sums are over the query blocks from i_from to i_to. Blocks of P and dS are transposed, [keys, queries].
    """
    o_j = i_col + tl.arange(0, BN)
    b_fade = decay(c_col, e_col, b_cj, b_ej)  # decay from each key to the block's last key, [BN]
    for i_q in range(i_from, i_to, BM):
        o_i = i_q + tl.arange(0, BM)
        b_q = load_rows(p_q, i_q, begin, end, s_qt, D, BM, BD, MASKED)  # [BM, BD]
        b_do = load_rows(p_do, i_q, begin, end, s_dot, D, BM, BD, MASKED)  # [BM, BD]
        if MASKED:
            m_i = (o_i >= begin) & (o_i < end)
            b_ci, b_ei = tl.load(p_c + o_i, mask=m_i, other=0.0), tl.load(p_e + o_i, mask=m_i, other=0.0)  # [BM]
            b_lse = tl.load(p_lse + o_i, mask=m_i, other=0.0) * LOG2E  # [BM]
            _, b_delta = unpack(tl.load(p_rows + o_i, mask=m_i, other=0))  # [BM]
            b_s = dot(b_k, tl.trans(b_q)) * scale2  # [BN, BM]
            b_s += decay(b_ci[None, :], b_ei[None, :], b_cj[:, None], b_ej[:, None]) - b_lse[None, :]
            m_s = (o_j[:, None] <= o_i[None, :]) & (o_i[None, :] < b_query_end[:, None]) & m_i[None, :]
            b_p = tl.where(m_s, tl.exp2(b_s), 0.0)
            b_ds = b_p * (dot(b_v, tl.trans(b_do)) - b_delta[None, :])  # [BN, BM]
            b_ds = tl.where(m_s, b_ds, 0.0)  # a key without queries may contain NaN
        else:
            # three terms of decay: from a key to the last key of its block, to the first query (a scalar), to row i
            c_start, e_start = tl.load(p_c + i_q), tl.load(p_e + i_q)
            b_row, b_delta = unpack(tl.load(p_rows + o_i))  # [BM]
            b_col = b_fade + decay(c_start, e_start, c_col, e_col)  # [BN]
            b_p = tl.exp2(dot(b_k, tl.trans(b_q)) * scale2 + (b_row[None, :] + b_col[:, None]))  # [BN, BM]
            b_ds = b_p * (dot(b_v, tl.trans(b_do)) - b_delta[None, :])
        b_dv += dot(narrow(b_p, b_do.dtype), b_do)
        b_dk += dot(narrow(b_ds, b_q.dtype), b_q)
        b_dc -= tl.sum(b_ds, 1)
    return b_dk, b_dv, b_dc


@jit_any_length
def dkdv_kernel(
    p_q, p_k, p_v, p_c, p_e, p_query_end, p_lse, p_do, p_rows, p_dk, p_dv, p_dc,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_dob, s_doh, s_dot, s_dkb, s_dkh, s_dkt,
    s_dvb, s_dvh, s_dvt,
    Tq, Tk, Hq, n_groups, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, BS: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys, and the part of dc that comes from these keys.

    All are summed over the G query heads of the key head. G is not an argument: Inductor would compile G = 1 as a
    constant and remove the loop over heads. In the machine code for Hopper, each product would then wait for the
    previous one.

    Masked blocks are processed BS queries at a time, because the decay of every pair needs more registers.
    """
    n_n = tl.cdiv(Tk, BN)
    i_bh = tl.program_id(0) // n_n
    i_b, i_hk = tl.cast(i_bh // n_groups, tl.int64), tl.cast(i_bh % n_groups, tl.int64)
    G = Hq // n_groups
    i_col = tl.program_id(0) % n_n * BN  # the oldest keys start first, because they have the most queries
    i_last = tl.minimum(i_col + BN, Tk) - 1
    past = tl.cast(Tk - Tq, tl.int64)
    p_k, s_kt = rows_of(p_k, i_b, i_hk, 0, s_kb, s_kh, s_kt, W)
    p_v, s_vt = rows_of(p_v, i_b, i_hk, 0, s_vb, s_vh, s_vt, W)
    p_dk, s_dkt = rows_of(p_dk, i_b, i_hk, 0, s_dkb, s_dkh, s_dkt, W)
    p_dv, s_dvt = rows_of(p_dv, i_b, i_hk, 0, s_dvb, s_dvh, s_dvt, W)
    o_j = i_col + tl.arange(0, BN)
    b_k = load_rows(p_k, i_col, i_col, Tk, s_kt, D, BN, BD, True)  # [BN, BD]
    b_v = load_rows(p_v, i_col, i_col, Tk, s_vt, D, BN, BD, True)  # [BN, BD]
    scale = number(scale)
    scale2 = scale * LOG2E
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    for i_g in range(G):
        i_h = i_hk * G + i_g
        p_qh, s_qrow = rows_of(p_q, i_b, i_h, past, s_qb, s_qh, s_qt, W)
        p_doh, s_dorow = rows_of(p_do, i_b, i_h, past, s_dob, s_doh, s_dot, W)
        i_key, i_query = (i_b * Hq + i_h) * Tk, (i_b * Hq + i_h) * Tq - past
        p_ch, p_eh = p_c + i_key, p_e + i_key
        p_lseh, p_rowsh = p_lse + i_query, p_rows + i_query
        b_cj, b_ej = tl.load(p_ch + o_j, mask=o_j < Tk, other=0.0), tl.load(p_eh + o_j, mask=o_j < Tk, other=0.0)
        c_col, e_col = tl.load(p_ch + i_last), tl.load(p_eh + i_last)
        # Queries in [begin, end) attend to some of the keys. Blocks of BM queries in [full, ragged) attend to all of
        # them.
        if BOUNDED:
            b_query_end = tl.load(p_query_end + i_key + o_j, mask=o_j < Tk, other=0)  # [BN]
            m_j = b_query_end > o_j  # keys to which a query attends
            begin = tl.maximum(tl.min(tl.where(m_j, o_j, Tk), 0), Tk - Tq)
            end = tl.max(tl.where(m_j, b_query_end, 0), 0)
            until = tl.min(tl.where(o_j < Tk, b_query_end, Tk), 0)
        else:
            b_query_end = tl.zeros([BN], tl.int32) + Tk
            begin = tl.maximum(i_col, Tk - Tq)
            end, until = Tk, Tk
        full = tl.cdiv(tl.minimum(tl.maximum(i_last, begin), end), BM) * BM
        ragged = tl.maximum(full, tl.minimum(until, end) // BM * BM)
        b_dc = tl.zeros([BN], tl.float32)
        b_dk, b_dv, b_dc = dkdv_span(
            b_dk, b_dv, b_dc, b_k, b_v, p_qh, p_doh, p_ch, p_eh, p_lseh, p_rowsh, b_cj, b_ej, c_col, e_col,
            b_query_end, i_col, begin // BS * BS, full, begin, end, s_qrow, s_dorow, scale2,
            D, BS, BN, BD, MASKED=True)  # fmt: skip
        b_dk, b_dv, b_dc = dkdv_span(
            b_dk, b_dv, b_dc, b_k, b_v, p_qh, p_doh, p_ch, p_eh, p_lseh, p_rowsh, b_cj, b_ej, c_col, e_col,
            b_query_end, i_col, full, ragged, begin, end, s_qrow, s_dorow, scale2,
            D, BM, BN, BD, MASKED=False)  # fmt: skip
        b_dk, b_dv, b_dc = dkdv_span(
            b_dk, b_dv, b_dc, b_k, b_v, p_qh, p_doh, p_ch, p_eh, p_lseh, p_rowsh, b_cj, b_ej, c_col, e_col,
            b_query_end, i_col, ragged, end, begin, end, s_qrow, s_dorow, scale2,
            D, BS, BN, BD, MASKED=True)  # fmt: skip
        p_dch = p_dc + i_key + o_j
        b_dc += tl.load(p_dch, mask=(o_j >= Tk - Tq) & (o_j < Tk), other=0.0)  # the part from `dq_kernel`
        tl.store(p_dch, b_dc, mask=o_j < Tk)
    store_rows(p_dk, b_dk * scale, i_col, Tk, s_dkt, D, BN, BD)
    store_rows(p_dv, b_dv, i_col, Tk, s_dvt, D, BN, BD)


@jit
def decay_parts(p_i, p_j, s_xp, gate_scale, m_i, m_ij, P: tl.constexpr):
    """Return the decay between positions i and j in fp32. c is stored as P parts, or as one float64 number.

    Parts are subtracted one by one, because c_i - c_j is small even if c is large.
    """
    b_xi, b_xj = tl.load(p_i, mask=m_i, other=0.0), tl.load(p_j, mask=m_ij, other=0.0)
    if b_xi.dtype != tl.float64:
        b_xi, b_xj = b_xi.to(tl.float32), b_xj.to(tl.float32)
    b_d = ((b_xi - b_xj) * gate_scale).to(tl.float32)
    for i_p in tl.static_range(1, P):
        b_xi = tl.load(p_i + i_p * s_xp, mask=m_i, other=0.0).to(tl.float32)
        b_xj = tl.load(p_j + i_p * s_xp, mask=m_ij, other=0.0).to(tl.float32)
        b_d += (b_xi - b_xj) * gate_scale
    return b_d


@jit_any_length
def prune_kernel(
    p_x, p_start, p_end, p_bound, p_kept, s_xb, s_xh, s_xg, s_xt, s_xp, s_fb, s_fh, s_ub, s_uh,
    Tq, Tk, Hq, G, n_rows, gate_scale, bound_scale, tolerance,
    BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BOUNDED: tl.constexpr, P: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Adaptive computation pruning (arXiv 2504.06949): find the first key that each row must read, (B, Hq, Tq).

    Take a block of BN keys that ends at e, and a block of BM queries that starts at r. The queries skip the keys if

        c_r - c_e < tolerance - 2 bound_scale p_bound - log Tk.

    A row then loses at most the weight exp(tolerance). c decreases, so the dropped blocks are the first ones. We find
    their number by bisection. It does not decrease from one row to the next. If a value is NaN, nothing is dropped.
    A program processes BR rows.
    """
    if ENDS:
        Tk = tl.load(p_end).to(tl.int32)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)  # (b * Hq + h) * Tq + t
    o_b, o_h = (o_r // (Tq * Hq)).to(tl.int64), (o_r // Tq % Hq).to(tl.int64)
    o_i = Tk - Tq + o_r % Tq
    o_m = Tk - Tq + o_r % Tq // BM * BM  # first row of the query block
    m_r = o_r < n_rows
    if BOUNDED:
        b_start = tl.load(p_start + o_b * s_fb + o_h * s_fh + o_r % Tq, mask=m_r, other=0)  # [BR]
    else:
        b_start = tl.zeros([BR], tl.int32)
    m_see = m_r & (b_start <= o_i)
    b_bound = tl.load(p_bound + o_b * s_ub + o_h * s_uh, mask=m_r, other=0.0)  # [BR]
    b_threshold = (number(tolerance) - 2 * number(bound_scale) * b_bound) * LOG2E - tl.log2(tl.cast(Tk, tl.float32))
    gate_scale = number(gate_scale) * LOG2E
    p_x_rows = p_x + o_b * s_xb + o_h // G * s_xh + o_h % G * s_xg
    p_xm = p_x_rows + o_m.to(tl.int64) * s_xt
    b_lo, b_hi = b_start // BN, o_m // BN
    left = tl.cdiv(Tk, BN)
    while left > 0:
        left //= 2
        b_mid = (b_lo + b_hi) // 2
        m_mid = m_see & (b_lo < b_hi)
        p_xj = p_x_rows + (b_mid * BN + BN - 1).to(tl.int64) * s_xt
        m_drop = m_mid & (decay_parts(p_xm, p_xj, s_xp, gate_scale, m_see, m_mid, P) < b_threshold)
        b_lo, b_hi = tl.where(m_drop, b_mid + 1, b_lo), tl.where(m_mid & ~m_drop, b_mid, b_hi)
    tl.store(p_kept + o_r, tl.where(m_see, tl.maximum(b_start, b_lo * BN), b_start), mask=m_r)


@jit_any_length
def decode_kernel(
    p_q, p_k, p_v, p_x, p_start, p_end, p_o, p_lse,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_xb, s_xh, s_xg, s_xt, s_xp, s_fb, s_fh,
    Tq, Tk, Hq, G, B, n_split, scale, gate_scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, P: tl.constexpr,
    ENDS: tl.constexpr, W: tl.constexpr, ONE_DECAY: tl.constexpr,
):  # fmt: skip
    """Compute attention for the queries of one key head, over one part of the visible keys.

    The queries form G * Tq rows. The visible keys are split into n_split equal parts.

    With ONE_DECAY, there is one new token, and its query heads share a gate. All rows then have the same decays.

    The range of visible keys is read on the device, so the same launch works for every step. Pruning determines the
    start of the range. If the cache has free slots, p_end contains its end.
    """
    n_r = tl.cdiv(G * Tq, BM)
    i_r = tl.program_id(0) % n_r  # programs with consecutive ids read the same keys
    i_s = tl.program_id(0) // n_r % n_split
    i_bh = tl.program_id(0) // n_r // n_split
    i_b, i_hk = tl.cast(i_bh // (Hq // G), tl.int64), tl.cast(i_bh % (Hq // G), tl.int64)
    p_k, s_kt = rows_of(p_k, i_b, i_hk, 0, s_kb, s_kh, s_kt, W)
    p_v, s_vt = rows_of(p_v, i_b, i_hk, 0, s_vb, s_vh, s_vt, W)
    if ENDS:
        Tk = tl.load(p_end).to(tl.int32)
    o_r = i_r * BM + tl.arange(0, BM)
    o_h = i_hk * G + o_r // Tq
    o_i = Tk - Tq + o_r % Tq  # position of each row among the keys
    m_r = o_r < G * Tq
    o_d = tl.arange(0, BD)
    p_q_rows = p_q + i_b * s_qb + o_h * s_qh + (o_r % Tq) * s_qt
    b_q = tl.load(p_q_rows[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)  # [BM, BD]
    p_x += i_b * s_xb + i_hk * s_xh
    p_x_rows = p_x + (o_r // Tq).to(tl.int64) * s_xg  # [BM]
    p_xi = p_x_rows + o_i.to(tl.int64) * s_xt
    p_last = p_x + tl.cast(Tk - 1, tl.int64) * s_xt
    gate_scale = number(gate_scale) * LOG2E
    if BOUNDED:
        b_start = tl.load(p_start + i_b * s_fb + o_h * s_fh + o_r % Tq, mask=m_r, other=0)  # [BM]
    else:
        b_start = tl.zeros([BM], tl.int32)
    m_see = m_r & (b_start <= o_i)
    begin = tl.min(tl.where(m_see, b_start, Tk), 0)
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
        m_s = m_see[:, None] & (o_j < stop)[None, :] & (o_j[None, :] >= b_start[:, None])
        m_s = m_s & (o_j[None, :] <= o_i[:, None])
        o_x = o_j.to(tl.int64) * s_xt
        b_s = dot(b_q, tl.trans(b_k)) * (number(scale) * LOG2E)  # [BM, BN]
        if ONE_DECAY:
            b_s += decay_parts(p_last, p_x + o_x, s_xp, gate_scale, Tk > 0, o_j < stop, P)[None, :]
        else:
            p_xj = p_x_rows[:, None] + o_x[None, :]
            b_s += decay_parts(p_xi[:, None], p_xj, s_xp, gate_scale, m_see[:, None], m_s, P)
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_alpha = tl.exp2(b_m - b_shift)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_o = b_o * b_alpha[:, None] + dot(narrow(b_p, b_v.dtype), b_v)
        b_m = b_m_new
    # output and log2 of the denominator for each part of the keys, (n_split, B, Hq, Tq, ...)
    o_row = ((tl.cast(i_s, tl.int64) * B + i_b) * Hq + i_hk * G) * Tq + o_r
    b_o = b_o / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
    tl.store(p_o + o_row[:, None] * D + o_d[None, :], b_o, mask=m_r[:, None] & (o_d < D)[None, :])
    tl.store(p_lse + o_row, b_m + tl.log2(b_l), mask=m_r)


@jit_any_length
def merge_kernel(p_o_split, p_lse, p_o, s_ob, s_oh, s_ot, Tq, Hq, n_rows, n_split,
                 D: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Combine the outputs of one query row over all parts of the keys, 16 parts at a time."""
    i_row = tl.cast(tl.program_id(0), tl.int64)  # (b * Hq + h) * Tq + t
    o_d = tl.arange(0, BD)
    b_o = tl.zeros([BD], tl.float32)
    b_l, b_m = 0.0, float("-inf")
    for i_n in range(0, n_split, 16):
        o_n = i_n + tl.arange(0, 16)
        m_n = o_n < n_split
        o_x = o_n.to(tl.int64) * n_rows + i_row
        b_s = tl.load(p_lse + o_x, mask=m_n, other=float("-inf"))  # [16]
        p_x = p_o_split + o_x[:, None] * D + o_d[None, :]
        b_x = tl.load(p_x, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)  # [16, BD]
        b_m_new = tl.maximum(b_m, tl.max(b_s, 0))
        b_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_alpha, b_p = tl.exp2(b_m - b_shift), tl.exp2(b_s - b_shift)
        b_l = b_l * b_alpha + tl.sum(b_p, 0)
        b_o = b_o * b_alpha + tl.sum(b_p[:, None] * b_x, 0)
        b_m = b_m_new
    b_o = b_o / tl.where(b_l == 0.0, 1.0, b_l)
    p_o += i_row // (Tq * Hq) * s_ob + i_row // Tq % Hq * s_oh + i_row % Tq * s_ot
    tl.store(p_o + o_d, narrow(b_o, p_o.dtype.element_ty), mask=o_d < D)
