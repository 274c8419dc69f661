"""Forgetting attention: its definition, and the folded form that every attention kernel can run.

The definition (Lin et al. 2025, arXiv 2503.02130, eq. 11) adds the decay `D_ij = c_i - c_j`, `c_t = sum_{l<=t} log
f_l`, to the attention logits. A softmax row does not see what is added to the whole row, so `c_i` can be left out, and
`-c_j` is a property of the key alone. It becomes a few more dimensions of the head:

    q' = [q, 64, 64, 64, 0]     k' = [k, p1, p2, p3, 64]     v' = [v, 0]     p1 + p2 + p3 = -c_j / (64 * scale)

so `scale * q'.k'_j = scale * q.k_j - c_j`: any kernel computes forgetting attention, in linear memory, and any KV
cache carries the decay along. Each part has eight significant bits, so it is exact in bfloat16, float16 and TF32, and
the three together hold the 24 bits of a float32. The factor 64 keeps the parts inside float16's range up to `|c|` of
64 * scale * 65504, 5e5 at D = 64.

The last column adds 0 to the logits and is there for the gradient. Let dS be the gradient of the logits. The gradient
of c_t is (row sum - column sum) of dS at t, and the gradient of log f_t sums it over all later positions. Rows of dS
sum to 0 but for rounding. Without the last column, the rounding of the rows would be missing, that of the columns
would have nothing to cancel against, and it would pile up over the whole context.

Limits of the folded form: `c` is a float32, so at `|c| = 1e5` the decay is resolved to 0.008 in the exponent. And a
kernel that returns the gradient of k' in bfloat16 rounds the column sums: the gradient of log f is then off by 1 % to
4 % (T = 512 to 1024; float16 0.3 %, float32 1e-5 to 1e-4), a noise without bias. A key that never fades
(`keep_from_fading`) has the same resolution; beside closed gates, what is rounded there is more than their gradient.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.autograd.forward_ad import unpack_dual

from .call_fox import is_exporting


GATE_PARTS = 3
GATE_QUERY = 64.0
# A closed gate (log f = -inf) must not turn `c_i - c_j` into inf - inf. exp(-120) is 0 in float32; a larger constant
# would cost resolution, since every closed gate adds it to c.
CLOSED_GATE = -120.0
# An additive mask below -1e4 hides a key. It is applied again as a minimum of float32, because a decay can exceed the
# minimum of float16, -65504.
MASKED = -1e4


def check_inputs(
    q, k, v, log_f, *, scale, attention_mask, cu_seqlens, window, log_pruning_tolerance=None, sink_bias=None
) -> None:
    """Raise ValueError for arguments of `forgetting_attention` that do not fit; while compiling, check nothing.

    The values of the gates are read on a CPU only: a GPU would have to wait for the answer.
    """
    if torch.compiler.is_compiling():
        return
    if not (
        q.ndim == k.ndim == 4
        and k.shape == v.shape
        and q.shape[::3] == k.shape[::3]
        and 0 not in (*q.shape, *k.shape)
        and q.shape[1] % k.shape[1] == 0
        and q.shape[2] <= k.shape[2]
        and log_f.shape == (*q.shape[:2], k.shape[2])
    ):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(("q", "k", "v", "log_f"), (q, k, v, log_f)))
        raise ValueError(
            f"{shapes} do not fit. q must be (B, Hq, Tq, D), k and v (B, Hkv, Tk, D), log_f (B, Hq, Tk), a gate for each "
            "query head and key; Hkv divides Hq, and the Tq queries are the last of the Tk keys. Pass cached keys together "
            "with new ones."
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must share one floating dtype.")
    if log_f.dtype != torch.float32:
        raise ValueError(
            f"log_f is {log_f.dtype}; it must be torch.float32, because its running sum reaches thousands. "
            "Cast before the log: F.logsigmoid(gate.float())."
        )
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}; it must be a positive number. The default is D ** -0.5.")
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"window is {window}; it must be an integer of at least 1, the keys that a query sees.")
    if log_pruning_tolerance is not None and not log_pruning_tolerance <= 0:
        raise ValueError(f"log_pruning_tolerance is {log_pruning_tolerance}; it is the log of a share, so at most 0.")
    if sink_bias is not None and not (sink_bias.shape == q.shape[1:2] and sink_bias.is_floating_point()):
        raise ValueError(
            f"sink_bias is {tuple(sink_bias.shape)}, {sink_bias.dtype}; it must be (Hq,) = {tuple(q.shape[1:2])}, a floating "
            "number for each query head."
        )
    batch, _, q_length, kv_length = *q.shape[:3], k.shape[2]
    if attention_mask is not None and attention_mask.shape != (batch, kv_length):
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}; it must be (B, Tk) = {(batch, kv_length)} with 1 for real "
            "tokens, cached ones included."
        )
    if attention_mask is not None and attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask is {attention_mask.dtype}; it must be boolean or integer, 1 for real tokens and 0 for padding, "
            "because a floating mask may be one that is added to logits. Convert it: (mask == 0) if it is added, mask.bool() "
            "if it holds 1 and 0."
        )
    if cu_seqlens is not None:
        if batch != 1 or q_length != kv_length or attention_mask is not None:
            raise ValueError(
                "cu_seqlens describes sequences packed into one row: it needs B = 1, Tq = Tk and no attention_mask, got "
                f"B = {batch}, Tq = {q_length}, Tk = {kv_length}."
            )
        borders = cu_seqlens.tolist()
        integers = cu_seqlens.dtype != torch.bool and not cu_seqlens.is_floating_point() and cu_seqlens.ndim == 1
        if not integers or borders != sorted(borders) or borders[:1] != [0] or borders[-1:] != [kv_length]:
            raise ValueError(f"cu_seqlens is {borders}; it must be integers that rise from 0 to T = {kv_length}.")
    if log_f.device.type == "cpu":
        gates = log_f if attention_mask is None else log_f.masked_fill(~attention_mask.cpu().bool()[:, None], 0.0)
        try:
            valid = bool((gates <= 0).all())
        except RuntimeError:  # under torch.func.vmap nothing can be read
            valid = True
        if not valid:
            raise ValueError(
                "log_f holds a positive or NaN value; it is the log of a gate between 0 and 1, so it must be <= 0. "
                "Use F.logsigmoid(gate.float())."
            )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of an enclosing `torch.autocast`, or None outside of one and on the meta device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast q, k and v to the dtype of an enclosing `torch.autocast`, which rounds them before the fold."""
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


def clear_padding(q, k, v, log_f, token_mask):
    """Set q, k, v and log f to 0 at padding, where they may hold anything, NaN included. A log f of 0 does not fade.

    token_mask: (B, Tk) bool, False at padding.
    """
    padding = ~token_mask[:, None, :, None]  # (B, 1, Tk, 1)
    q = q.masked_fill(padding[:, :, -q.shape[2] :], 0.0)
    return q, k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0), log_f.masked_fill(padding[..., 0], 0.0)


def first_tokens(token_mask):
    """Return the first real token of each row, (B, T) bool, of a mask that is True at real tokens."""
    return token_mask & (token_mask.cumsum(-1) == 1)


def forgetting_attention_ref(
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
) -> torch.Tensor:
    """Compute softmax attention with a forget gate, written as its definition. Every backend must agree with it.

    Arguments, result and errors are those of `forgetting_attention`; computed in float32, or float64 for float64
    inputs. Memory grows with Tq * Tk.

    Source: arXiv 2503.02130, eq. 11 (the scale, which the paper leaves out, acts on q.k only).
    """
    masks = dict(attention_mask=attention_mask, cu_seqlens=cu_seqlens, window=window)
    check_inputs(q, k, v, log_f, scale=scale, **masks, sink_bias=sink_bias)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_length, kv_length, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    position = torch.arange(kv_length, device=q.device)
    distance = position[-q_length:, None] - position  # (Tq, Tk), negative in the future
    visible, first = distance >= 0, position == 0
    if window is not None:
        visible = visible & (distance < window)
    if attention_mask is not None:
        token_mask = attention_mask.bool()
        q, k, v, log_f = clear_padding(q, k, v, log_f, token_mask)
        visible = visible & token_mask[:, None, None, :] & token_mask[:, None, -q_length:, None]  # (B, 1, Tq, Tk)
        first = first_tokens(token_mask)[:, None, None, :]
    if cu_seqlens is not None:
        sequence_ids = torch.bucketize(position, cu_seqlens[1:], right=True)
        visible = visible & (sequence_ids == sequence_ids[:, None])
        first = sequence_ids.diff(prepend=sequence_ids.new_full((1,), -1)) > 0

    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    c = log_f.double().clamp(min=-1e4).cumsum(-1)  # (B, Hq, Tk); exp(-1e4) is 0
    decay = c[..., -q_length:, None] - c[..., None, :]
    if keep_first:
        decay = decay.masked_fill(first, 0.0)
    logits = scale * q.to(dtype) @ k.mT + decay.to(dtype)  # (B, Hq, Tq, Tk)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sink_bias is not None:  # of a key without a value
        sink = sink_bias.to(dtype)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(-1)[..., :kv_length]
    weights = weights.masked_fill(~visible, 0.0)  # a padding query sees nothing: its row is 0, not NaN
    return (weights @ v).to(q.dtype)


def folded_width(head_dim, group, device):
    """Return the head dimension after folding, with room for the gate parts of `group` query heads per key head."""
    multiple = 4 if device.type == "cpu" else 8  # what GPU kernels need for aligned loads
    return -(-(head_dim + GATE_PARTS * group + 1) // multiple) * multiple


def cumulative_sum(x):
    """Sum up x along its last dimension; in an order that depends on its length alone, if torch is told so.

    torch.cumsum of floats has no such order on a GPU, and raises under `torch.use_deterministic_algorithms`. Compiled,
    chunks are summed up and then their sums: Inductor of torch 2.11 fails on CUDA where it fuses longer ones.
    """
    length = x.shape[-1]
    if length == 1:
        return x
    if torch.compiler.is_compiling() and not is_exporting():
        n = (length + 63) // 64
        chunks = F.pad(x, (0, 64 * n - length)).view(*x.shape[:-1], n, 64).cumsum(-1)
        before = F.pad(chunks[..., :-1, -1].cumsum(-1), (1, 0))
        return (chunks + before[..., None]).flatten(-2)[..., :length]
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1)
    shift = 1
    while shift < length:
        x, shift = x + F.pad(x[..., :-shift], (shift, 0)), 2 * shift
    return x


def running_sum(log_f, position_in_sequence=None):
    """Sum up the log gates, (B, H, T) -> (B, H, T) fp32: the `c` whose differences are the decay.

    position_in_sequence: (B, T), where rows hold several sequences. The sum then starts near 0 with every sequence, so
        its resolution is that of a sequence, not of the row. How far from 0 it starts cancels in the softmax.
    """
    c = cumulative_sum(log_f)
    if position_in_sequence is None:
        return c
    before = (c - log_f).detach()
    index = torch.arange(log_f.shape[-1], device=log_f.device)
    first = index - position_in_sequence  # token of the sequence
    at_border = before.gather(-1, first[:, None].expand_as(before))
    return cumulative_sum(log_f - at_border.diff(dim=-1, prepend=torch.zeros_like(at_border[..., :1])))


def constant_columns(head_dim, heads, gates_per_key, dtype, device):
    """Return the columns that queries get, (heads or 1, 1, D' - D), and keys behind the gate parts, (free,)."""
    added = folded_width(head_dim, gates_per_key, device) - head_dim
    gates = GATE_QUERY * torch.eye(gates_per_key, dtype=dtype, device=device).repeat_interleave(GATE_PARTS, dim=1)
    query = F.pad(gates, (0, added - gates.shape[1]))[:, None]
    if gates_per_key > 1:  # a row for each query head that shares a key head
        query = query.repeat(heads // gates_per_key, 1, 1)
    key = torch.zeros(added - gates.shape[1], dtype=dtype, device=device)
    key[0] = GATE_QUERY
    return query, key


kept_columns = lru_cache(maxsize=64)(constant_columns)  # a decoding step is made of small operations


def columns_for(x, heads, gates_per_key):
    """Return the `constant_columns` for x, (B, H, T, D), and `heads` query heads, made once for plain tensors."""
    make = constant_columns if torch.compiler.is_compiling() or type(x) is not torch.Tensor else kept_columns
    return make(x.shape[3], heads, gates_per_key, x.dtype, x.device)


def fold_queries(q, c, scale, gates_per_key):
    """Append to the queries the columns that multiply the decay in the keys.

    Args:
        q: (B, Hq, T, D).
        c: running sum of log f at the queries, (B, Hq, T), or (B, Hkv, T) if the query heads of a key head share a
            gate; fp32. It changes the gradient only.
        scale: the factor that the kernel will apply to q'.k'.
        gates_per_key: gates per key head: 1, or the number of query heads that share a key head.

    Returns:
        (B, Hq, T, D'). The added columns are 0 at the gate parts of other query heads.
    """
    batch, heads, length, _ = q.shape
    columns = columns_for(q, heads, gates_per_key)[0].expand(batch, heads, length, -1)
    if not c.requires_grad:
        return torch.cat([q, columns], dim=-1)
    zero = ((c - c.detach()) / (GATE_QUERY * scale)).repeat_interleave(heads // c.shape[1], dim=1)
    parts = GATE_PARTS * gates_per_key
    return torch.cat([q, columns[..., :parts], zero.unsqueeze(-1).to(q.dtype), columns[..., parts + 1 :]], dim=-1)


def gate_parts(x):
    """Split x, fp32, into a sum of three numbers of eight bits each, which every dtype of keys holds.

    The first has the derivative of x.
    """
    y = x.detach() if x.requires_grad or unpack_dual(x).tangent is not None else x
    first = y.bfloat16().to(y.dtype)
    rest = y - first
    second = rest.bfloat16().to(y.dtype)
    return first if y is x else x + (first - y), second, rest - second


def fold_keys(k, c, scale):
    """Append the decay to the keys.

    Args:
        k: (B, Hkv, T, D).
        c: running sum of log f, (B, H, T), fp32; Hkv divides H.
        scale: the factor that the kernel will apply to q'.k'.

    Returns:
        (B, Hkv, T, D'). The gradient of c goes through its first part; the other parts hold what rounding left over.
    """
    batch, kv_heads, length, _ = k.shape
    group = c.shape[1] // kv_heads
    x = c / (-GATE_QUERY * scale)
    x = x.unsqueeze(-1) if group == 1 else x.view(batch, kv_heads, group, length).transpose(2, 3)  # (B, Hkv, T, G)
    parts = gate_parts(x)
    parts = torch.cat(parts, dim=-1) if group == 1 else torch.stack(parts, dim=-1).flatten(-2)
    columns = columns_for(k, c.shape[1], group)[1].expand(batch, kv_heads, length, -1)
    return torch.cat([k, parts.to(k.dtype), columns], dim=-1)


def keep_from_fading(q, k, c, kept, scale):
    """Append three columns to queries and keys before the fold, so that kept keys do not fade.

    Of such a key the fold shall add `-c_i` to the logit, which the query knows, where it adds `-c_j` of others.

    Args:
        q, k: (B, Hq, Tq, D), (B, Hkv, Tk, D).
        c: running sum of log f at the queries, (B, Hq, Tq), fp32. At kept keys it has to be 0 in `fold_keys`, or what
            their logits shall have less.
        kept: (1 or B, Tk) bool.
        scale: as in `fold_keys`.
    """
    parts = torch.stack(gate_parts(c / (-GATE_QUERY * scale)), dim=-1)  # (B, Hq, Tq, 3)
    marks = (GATE_QUERY * kept.to(k.dtype))[:, None, :, None].expand(*k.shape[:3], GATE_PARTS)
    return torch.cat([q, parts.to(q.dtype)], dim=-1), torch.cat([k, marks], dim=-1)


def unfold_decay(folded_keys, head_dim, group, scale):
    """Read c back from folded keys: (B, Hkv, T, D') -> (B, Hq, T) fp32."""
    parts = folded_keys[..., head_dim : head_dim + GATE_PARTS * group].float()
    if group == 1:
        return parts.sum(-1) * (-GATE_QUERY * scale)
    x = parts.unflatten(-1, (group, GATE_PARTS)).sum(-1)  # (B, Hkv, T, G)
    return (x * (-GATE_QUERY * scale)).transpose(2, 3).flatten(1, 2)


def folded_attention(q, k, v, log_f, scale, token_mask=None, window=None, keep_first=False, sink_bias=None):
    """Compute forgetting attention by `scaled_dot_product_attention` on folded queries and keys; inputs are checked.

    log_f: finite. token_mask: (B, Tk) bool, False at padding. Memory is linear in Tk where Tq = Tk without a window;
    otherwise it includes a mask of Tq * Tk booleans. A sink is one more key in front, and with it a query that is
    left out of the result, as causality is counted from the front.
    """
    head_dim, q_length, kv_length, group = q.shape[-1], q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if token_mask is not None:
        q, k, v, log_f = clear_padding(q, k, v, log_f, token_mask)
    mask, past = None, kv_length - q_length
    if past or window is not None:
        mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=q.device).tril(past)
    if mask is not None and window is not None:
        mask = mask.triu(past - window + 1)
    c, real = cumulative_sum(log_f), token_mask
    c_of_queries = c[..., -q_length:]
    if keep_first or sink_bias is not None:
        kept = torch.zeros(1, kv_length, dtype=torch.bool, device=k.device)
        if keep_first:
            kept = torch.arange(kv_length, device=k.device)[None] == 0 if real is None else first_tokens(real)
            c = c.masked_fill(kept[:, None], 0.0)
        if sink_bias is not None:
            c = torch.cat([-sink_bias.float()[:, None].expand(*c.shape[:2], 1), c], dim=-1)
            k, v, kept = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)), F.pad(kept, (1, 0), value=True)
            real = None if real is None else F.pad(real, (1, 0), value=True)
            if mask is None:
                q, c_of_queries = F.pad(q, (0, 0, 1, 0)), F.pad(c_of_queries, (1, 0))
            else:
                mask = F.pad(mask, (1, 0), value=True)
        q, k = keep_from_fading(q, k, c_of_queries, kept, scale)
    keys = fold_keys(k, c, scale)
    if real is not None:
        # The columns of the decay hide a padding key, so the kernel needs no (T, T) mask for it.
        columns = torch.arange(keys.shape[-1], device=k.device) >= k.shape[-1]
        keys = keys.masked_fill(~real[:, None, :, None] & columns, -torch.finfo(torch.float16).max)
    out = F.scaled_dot_product_attention(
        fold_queries(q, c_of_queries, scale, group),
        keys,
        F.pad(v, (0, keys.shape[-1] - head_dim)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=group > 1,
    )[:, :, -q_length:, :head_dim]
    if token_mask is not None:
        out = out.masked_fill(~token_mask[:, None, -q_length:, None], 0.0)
    return out


def decay_along_paths(log_f: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the decay of each key for each query, the sum of log f over the later keys that it sees; else a minimum.

    Each path through a tree of tokens is then computed as if no other branch stood in the row. This decay is not a
    property of the key: it cannot be folded into the keys, and is added to the logits.

    Args:
        log_f: log gates of all keys, (B, H, keys), fp32.
        visible: (1 or B, 1, T, keys) bool.

    Returns:
        (B, H, T, keys) fp32.
    """
    seen = log_f[:, :, None] * visible  # (B, H, T, keys)
    later = F.pad(cumulative_sum(seen[..., 1:].flip(-1)).flip(-1), (0, 1))
    return later.masked_fill(~visible, torch.finfo(log_f.dtype).min)
