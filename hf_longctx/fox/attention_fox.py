"""Forgetting attention: its definition, and the folded form that every attention kernel can run.

The definition (Lin et al. 2025, arXiv 2503.02130, eq. 11) adds the decay `D_ij = c_i - c_j`, `c_t = sum_{l<=t} log f_l`,
to the attention logits. A softmax row does not see what is added to the whole row, so `c_i` can be left out, and `-c_j`
is a property of the key alone. It becomes a few more dimensions of the head:

    q' = [q, 64, 64, 64, 0]     k' = [k, p1, p2, p3, 64]     v' = [v, 0]     p1 + p2 + p3 = -c_j / (64 * scale)

so `scale * q'.k'_j = scale * q.k_j - c_j`: any kernel computes forgetting attention, in linear memory, and any KV cache
carries the decay along. Each part has eight significant bits, so it is exact in bfloat16, float16 and TF32, and the three
together hold the 24 bits of a float32. The factor 64 keeps the parts inside float16's range up to `|c|` of
64 * scale * 65504, 5e5 at D = 64.

The last column adds 0 to the logits and is there for the gradient. With dS the gradient of the logits, that of c_t is
(row sum - column sum) of dS, and that of log f_t sums it over all later positions. Rows of dS sum to 0 but for rounding;
left out, this rounding would pile up over the whole context, where it should cancel against that of the columns.

What the folded form cannot do: `c` is a float32, so at `|c| = 1e5` the decay is resolved to 0.008 in the exponent. And a
kernel that returns the gradient of k' in bfloat16 rounds the column sums: the gradient of log f is then off by 1 % to 4 %
(T = 512 to 1024; float16 0.3 %, float32 1e-5 to 1e-4), a noise without bias.
"""

import itertools

import torch
import torch.nn.functional as F


GATE_PARTS = 3
GATE_QUERY = 64.0
# A closed gate (log f = -inf) must not turn `c_i - c_j` into inf - inf. exp(-120) is 0 in float32; a larger constant would
# cost resolution, since every closed gate adds it to c.
CLOSED_GATE = -120.0


def check_inputs(q, k, v, log_f, scale, attention_mask, cu_seqlens):
    """Raise ValueError with what is wrong, what is needed and how to mend it; see `forgetting_attention`."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions; they must be (batch, heads, time, head_dim)."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape != v.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: k and v must have one shape, "
            "(B, Hkv, Tk, D), and q the same B and D."
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must share one floating dtype.")
    if len({x.device for x in (q, k, v, log_f)}) > 1:
        raise ValueError(
            f"q, k, v and log_f are on {q.device}, {k.device}, {v.device} and {log_f.device}; move them to one device."
        )
    batch, heads, q_length, _ = q.shape
    kv_heads, kv_length = k.shape[1], k.shape[2]
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q {tuple(q.shape)} or k {tuple(k.shape)} is empty; attention needs at least one position.")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads; Hkv must divide Hq.")
    if q_length > kv_length:
        raise ValueError(
            f"there are {q_length} queries but {kv_length} keys; the queries are the last positions of the keys, so Tq "
            "must not exceed Tk. Pass the cached keys together with the new ones."
        )
    if log_f.dtype != torch.float32:
        raise ValueError(
            f"log_f is {log_f.dtype}; it must be torch.float32, because its running sum reaches thousands. "
            "Cast before the log: F.logsigmoid(gate.float())."
        )
    if log_f.shape != (batch, heads, kv_length):
        raise ValueError(
            f"log_f is {tuple(log_f.shape)}; it must be (B, Hq, Tk) = {(batch, heads, kv_length)}, one gate per query "
            "head and key position."
        )
    if not torch.compiler.is_compiling() and not (log_f <= 0).all():
        raise ValueError(
            "log_f holds a positive or NaN value; it is the log of a gate between 0 and 1, so it must be <= 0. "
            "Use F.logsigmoid(gate.float())."
        )
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}; it must be a positive number. The default is D ** -0.5.")
    if attention_mask is not None and attention_mask.shape != (batch, kv_length):
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}; it must be (B, Tk) = {(batch, kv_length)} with 1 for real "
            "tokens, cached ones included."
        )
    if cu_seqlens is not None:
        if batch != 1 or q_length != kv_length or attention_mask is not None:
            raise ValueError(
                "cu_seqlens describes documents packed into one row: it needs B = 1, Tq = Tk and no attention_mask, got "
                f"B = {batch}, Tq = {q_length}, Tk = {kv_length}."
            )
        borders = cu_seqlens.tolist()
        if borders[0] != 0 or borders[-1] != kv_length or any(b <= a for a, b in itertools.pairwise(borders)):
            raise ValueError(
                f"cu_seqlens is {borders}; it must rise from 0 to T = {kv_length} without empty documents."
            )


def forgetting_attention_ref(q, k, v, log_f, *, scale=None, attention_mask=None, cu_seqlens=None, causal=True):
    """Softmax attention with a forget gate, written as its definition. Every backend must agree with it.

    Arguments, result and errors are those of `forgetting_attention`; computed in float32, or float64 for float64 inputs.
    Memory grows with Tq * Tk.

    With causal=False, which needs Tq = Tk, queries see the keys on both sides, and `D_ij = -|c_i - c_j|`: a key fades by
    all gates between the two, the later token's included. The paper leaves this case to future work (sec. 6).

    Source: arXiv 2503.02130, eq. 11 (the scale, which the paper leaves out, acts on q.k only).
    """
    check_inputs(q, k, v, log_f, scale, attention_mask, cu_seqlens)
    if not causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries for {k.shape[2]} keys; with causal=False each token is query and key, so Tq must be Tk."
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_length, kv_length, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    log_f = log_f.double().clamp(min=-1e4)  # for its sum; exp(-1e4) is 0
    key_positions = torch.arange(kv_length, device=q.device)
    past = key_positions <= key_positions[-q_length:, None]  # (Tq, Tk)
    visible = past if causal else torch.ones_like(past)
    if attention_mask is not None:
        real = attention_mask.bool()[:, None]  # (B, 1, Tk)
        log_f = log_f.masked_fill(~real, 0.0)  # padding does not decay
        visible = visible & real[..., None, :] & real[..., -q_length:, None]  # (B, 1, Tq, Tk)
    if cu_seqlens is not None:
        document = torch.bucketize(key_positions, cu_seqlens[1:], right=True)
        visible = visible & (document == document[:, None])

    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    c = log_f.cumsum(-1)  # (B, Hq, Tk)
    decay = c[..., -q_length:, None] - c[..., None, :]
    decay = torch.where(past, decay, -decay)  # abs() would have no gradient across open gates
    logits = scale * q.to(dtype) @ k.mT + decay.to(dtype)  # (B, Hq, Tq, Tk)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~visible, 0.0)  # a padding query sees nothing: its row is 0, not NaN
    return (weights @ v).to(q.dtype)


def folded_width(head_dim, group, device):
    """Head dimension after folding: room for the gate parts of the `group` query heads that share a key head."""
    multiple = 4 if device.type == "cpu" else 8  # what GPU kernels need for aligned loads
    return -(-(head_dim + GATE_PARTS * group + 1) // multiple) * multiple


def running_sum(log_f, places=None):
    """Running sum of the log gates, (B, H, T) -> (B, H, T) fp32: the `c` whose differences are the decay.

    places: (B, T), place of each token in its document, where a row holds several one after the other. The sum then starts
        near 0 with every document, so that its resolution is that of a document and not of the row; by how much it misses 0
        is the same for a whole document and does not count.
    """
    c = log_f.cumsum(-1)
    if places is None:
        return c
    before = (c - log_f).detach()
    first = torch.arange(places.shape[1], device=places.device) - places  # of the document
    at_border = before.gather(-1, first[:, None].expand_as(before))
    return (log_f - at_border.diff(dim=-1, prepend=torch.zeros_like(at_border[..., :1]))).cumsum(-1)


def fold_queries(q, c, scale, gates_per_key):
    """Append to the queries what reads the decay from the keys.

    Args:
        q: (B, Hq, T, D).
        c: running sum of log f at the queries, (B, Hq, T), or (B, Hkv, T) if the query heads of a key head share a gate;
            fp32. It takes part in the gradient only.
        scale: the factor that the kernel will apply to q'.k'.
        gates_per_key: gates per key head: 1, or the number of query heads that share a key head.

    Returns:
        (B, Hq, T, D'). A query reads only the gate parts that belong to its own head.
    """
    batch, heads, length, head_dim = q.shape
    parts = GATE_PARTS * gates_per_key
    added = q.new_zeros(
        heads // gates_per_key, gates_per_key, folded_width(head_dim, gates_per_key, q.device) - head_dim
    )
    added[..., :parts].unflatten(-1, (gates_per_key, GATE_PARTS)).diagonal(dim1=1, dim2=2).fill_(GATE_QUERY)
    added = added.view(1, heads, 1, -1).expand(batch, -1, length, -1)
    if c.requires_grad:
        zero = ((c - c.detach()) / (GATE_QUERY * scale)).repeat_interleave(heads // c.shape[1], dim=1)
        added = added + F.pad(zero.unsqueeze(-1).to(q.dtype), (parts, added.shape[-1] - parts - 1))
    return torch.cat([q, added], dim=-1)


def fold_keys(k, c, scale):
    """Append the decay to the keys.

    Args:
        k: (B, Hkv, T, D).
        c: running sum of log f, (B, H, T), fp32; Hkv divides H.
        scale: the factor that the kernel will apply to q'.k'.

    Returns:
        (B, Hkv, T, D'). The gradient of c is that of its first part; the others only carry what rounding left over.
    """
    batch, kv_heads, length, head_dim = k.shape
    group = c.shape[1] // kv_heads
    x = (c / (-GATE_QUERY * scale)).view(batch, kv_heads, group, length).transpose(2, 3)  # (B, Hkv, T, G)
    rest = x.detach()
    first = rest.bfloat16().to(x.dtype)
    second = (rest - first).bfloat16().to(x.dtype)
    third = rest - first - second
    if x.requires_grad:
        first = x + (first - rest)
    parts = torch.stack([first, second, third], dim=-1).flatten(3).to(k.dtype)
    one = k.new_zeros(folded_width(head_dim, group, k.device) - head_dim - parts.shape[-1])
    one[:1].fill_(GATE_QUERY)  # one[0] = ... would copy a number from the CPU, and a GPU wait for it
    return torch.cat([k, parts, one.expand(batch, kv_heads, length, -1)], dim=-1)


def unfold_decay(folded_keys, head_dim, group, scale):
    """Inverse of `fold_keys` for c: (B, Hkv, T, D') -> (B, Hq, T) fp32."""
    parts = folded_keys[..., head_dim : head_dim + GATE_PARTS * group].float()
    x = parts.unflatten(-1, (group, GATE_PARTS)).sum(-1)  # (B, Hkv, T, G)
    return (x * (-GATE_QUERY * scale)).transpose(2, 3).flatten(1, 2)


def forgetting_attention(q, k, v, log_f, *, scale=None, attention_mask=None, cu_seqlens=None):
    """Causal softmax attention whose keys fade by a forget gate, on any device, in memory linear in Tk when Tq = Tk.

    Args:
        q: queries, (B, Hq, Tq, D), any floating dtype. The Tq queries are the *last* Tq of the Tk positions.
        k, v: keys and values, (B, Hkv, Tk, D). Hkv divides Hq; query head h uses key head h // (Hq // Hkv).
        log_f: natural log of the forget gate per key, (B, Hq, Tk), fp32, <= 0. The gate of position t fades every key
            before t, not t itself.
        scale: factor on q.k before the decay is added. Default D ** -0.5.
        attention_mask: (B, Tk), 1 = real token, 0 = padding on any side. Padding is never attended, does not decay, and
            as a query gives 0.
        cu_seqlens: (N + 1,) borders of N documents packed into one row (B = 1, Tq = Tk): neither attention nor decay
            crosses a border.

    Returns:
        (B, Hq, Tq, D) in q.dtype.

    Raises:
        ValueError: a shape, dtype, device or value above does not hold.

    Source: arXiv 2503.02130, eq. 11. `forgetting_attention_ref` is the definition.
    """
    check_inputs(q, k, v, log_f, scale, attention_mask, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    log_f = log_f.clamp(min=CLOSED_GATE)
    if cu_seqlens is not None:
        documents = cu_seqlens.diff().tolist()
        rows = zip(*(x.split(documents, dim=2) for x in (q, k, v, log_f)))
        return torch.cat([folded_attention(*row, scale) for row in rows], dim=2)
    return folded_attention(q, k, v, log_f, scale, None if attention_mask is None else attention_mask.bool())


def folded_attention(q, k, v, log_f, scale, real=None):
    head_dim, q_length, kv_length, group = q.shape[-1], q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if real is not None:
        log_f = log_f.masked_fill(~real[:, None], 0.0)
    c = log_f.cumsum(-1)
    keys = fold_keys(k, c, scale)
    if real is not None:
        # A padding key fades out in its own columns, so the kernel needs no (T, T) mask for it.
        columns = torch.arange(keys.shape[-1], device=k.device) >= head_dim
        keys = keys.masked_fill(~real[:, None, :, None] & columns, -torch.finfo(torch.float16).max)
    causal_mask = None
    if q_length < kv_length:
        causal_mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=q.device).tril(kv_length - q_length)
    out = F.scaled_dot_product_attention(
        fold_queries(q, c[..., -q_length:], scale, group),
        keys,
        F.pad(v, (0, keys.shape[-1] - head_dim)),
        attn_mask=causal_mask,
        is_causal=causal_mask is None,
        scale=scale,
        enable_gqa=group > 1,
    )[..., :head_dim]
    if real is not None:
        out = out.masked_fill(~real[:, None, -q_length:, None], 0.0)
    return out
