"""Forgetting attention, folded into queries and keys so that any attention kernel can run it.

Forgetting attention (Lin et al. 2025, arXiv 2503.02130, eq. 11) adds the decay `D_ij = c_i - c_j` to the attention
logits, where `c_t = sum_{l<=t} log f_l`. Softmax is invariant to a constant added to a row, so `c_i` can be dropped.
`-c_j` depends on the key alone and is stored in a few extra head dimensions:

    q' = [q, 64, 64, 64, 0]     k' = [k, p1, p2, p3, 64]     v' = [v, 0]     p1 + p2 + p3 = -c_j / (64 * scale)

Then `scale * q'.k'_j = scale * q.k_j - c_j`: any kernel computes forgetting attention in linear memory, and any KV
cache stores the decay with its keys. Each part has eight significant bits, so it is exact in bfloat16, float16 and
TF32. Together, the three parts represent all 24 bits of a float32. Because of the factor 64, the parts stay within
float16's range if `|c|` is at most 64 * scale * 65504. For D = 64, this limit is 5e5.

The last head dimension adds 0 to the logits and is only needed for the gradient. Let dS be the gradient with respect
to the logits. The gradient of c_t is the row sum of dS at t minus the column sum at t. The gradient of log f_t is the
sum of the gradients of c from t on. In exact arithmetic, the row sums are 0. In practice, each rounding error of dS
enters both a row sum and a column sum. The last head dimension passes the row sums to c, so these errors cancel.

Limits of the folded form: `c` is a float32, so at `|c| = 1e5` the exponent has a resolution of 0.008. If a kernel
returns the gradient of k' in bfloat16, it rounds the column sums. The gradient of log f then has an unbiased error of
1 % to 4 % (T = 512 to 1024). In float16 the error is 0.3 %, in float32 1e-5 to 1e-4.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.autograd.forward_ad import unpack_dual

from .torch_internals_fox import is_exporting, is_transforming


GATE_PARTS = 3
GATE_QUERY = 64.0
# A closed gate has log f = -inf, and `c_i - c_j` would be inf - inf. -120 therefore replaces -inf. exp(-120) is 0 in
# float32. A lower value would cost resolution, because every closed gate adds it to c.
CLOSED_GATE = -120.0
# Additive mask values below -1e4 hide a key. They are replaced with float32's minimum, because a decay can be lower
# than float16's minimum, -65504.
MASKED = -1e4


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of an enclosing `torch.autocast`. Without autocast, or on the meta device, return None."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast q, k and v to the dtype of an enclosing `torch.autocast`, before they are folded."""
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


def first_columns(x, width):
    """Return x[..., :width]. If this is all of x, return x itself, because a slice would be a node of autograd."""
    return x if x.shape[-1] == width else x[..., :width]


def folded_width(head_dim, group, device):
    """Return the head dimension after folding. Each key head stores the gate parts of `group` query heads."""
    multiple = 4 if device.type == "cpu" else 8  # for aligned loads in GPU kernels
    return -(-(head_dim + GATE_PARTS * group + 1) // multiple) * multiple


def cumulative_sum(x):
    """Compute the cumulative sum of x along its last dimension.

    Under `torch.use_deterministic_algorithms`, the order of additions depends only on the length. For floats on a GPU,
    torch.cumsum does not guarantee this order. On CUDA, Inductor of torch 2.11 fails to fuse a long cumsum. Compiled
    calls therefore sum within chunks, and then over the chunk sums.
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
    """Compute `c`, the cumulative sum of the log gates, (B, H, T) -> (B, H, T) fp32.

    position_in_sequence: (B, T) if sequences are packed. The sum then restarts near 0 in every sequence, so
        the row length does not reduce its resolution. The start value cancels in the softmax.
    """
    c = cumulative_sum(log_f)
    if position_in_sequence is None:
        return c
    before = (c - log_f).detach()
    index = torch.arange(log_f.shape[-1], device=log_f.device)
    first = index - position_in_sequence  # index of the sequence's first token
    at_start = before.gather(-1, first[:, None].expand_as(before))
    return cumulative_sum(log_f - at_start.diff(dim=-1, prepend=torch.zeros_like(at_start[..., :1])))


def constant_columns(head_dim, heads, gates_per_key, dtype, device):
    """Return the columns to append to queries, and the columns to append to keys after the gate parts.

    The columns for queries are (heads or 1, 1, D' - D). The columns for keys are a vector.
    """
    added = folded_width(head_dim, gates_per_key, device) - head_dim
    key = torch.zeros(added - GATE_PARTS * gates_per_key, dtype=dtype, device=device)
    key[0] = GATE_QUERY
    return query_columns(added, heads, gates_per_key, dtype, device), key


def query_columns(added, heads, gates_per_key, dtype=None, device=None):
    """Return the columns that select the gate parts of each query head, (heads or 1, 1, added)."""
    gates = GATE_QUERY * torch.eye(gates_per_key, dtype=dtype, device=device).repeat_interleave(GATE_PARTS, dim=1)
    columns = F.pad(gates, (0, added - gates.shape[1]))[:, None]
    # one row per query head of a key head
    return columns.repeat(heads // gates_per_key, 1, 1) if gates_per_key > 1 else columns


cached_columns = lru_cache(maxsize=64)(constant_columns)  # saves small operations in decoding


def columns_for(x, heads, gates_per_key):
    """Return the `constant_columns` for x, (B, H, T, D). If x is a plain tensor, the result is cached."""
    traced = torch.compiler.is_compiling() or type(x) is not torch.Tensor
    # tensors created inside a torch.func transform must not be cached
    make = constant_columns if traced or is_transforming() else cached_columns
    return make(x.shape[3], heads, gates_per_key, x.dtype, x.device)


def fold_queries(q, c, scale, gates_per_key):
    """Append columns to the queries. They multiply the decay in the keys.

    Args:
        q: (B, Hq, T, D).
        c: cumulative sum of log f at the queries, fp32: (B, Hq, T), or (B, Hkv, T) if the query heads of a key head
            share a gate. Gradients reach c, but its values are not used.
        scale: the factor that the kernel applies to q'.k'.
        gates_per_key: gates per key head: 1, or the number of query heads that share a key head.

    Returns:
        (B, Hq, T, D'). A query has 0 in the columns for the gate parts of other query heads.
    """
    batch, heads, length, _ = q.shape
    columns = columns_for(q, heads, gates_per_key)[0].expand(batch, heads, length, -1)
    if not c.requires_grad:
        return torch.cat([q, columns], dim=-1)
    zero = ((c - c.detach()) / (GATE_QUERY * scale)).repeat_interleave(heads // c.shape[1], dim=1)
    parts = GATE_PARTS * gates_per_key
    return torch.cat([q, columns[..., :parts], zero.unsqueeze(-1).to(q.dtype), columns[..., parts + 1 :]], dim=-1)


def gate_parts(x):
    """Split fp32 `x` into three summands of eight significant bits.

    They are exact in every dtype of keys. Only the first summand propagates gradients to `x`.
    """
    y = x.detach() if x.requires_grad or unpack_dual(x).tangent is not None else x
    first = y.bfloat16().to(y.dtype)
    rest = y - first
    second = rest.bfloat16().to(y.dtype)
    return first if y is x else x + (first - y), second, rest - second


def decay_columns(c, scale):
    """Return the columns of keys that store the decay: (..., gates per key head) -> (..., parts) fp32."""
    x = c / (-GATE_QUERY * scale)
    return torch.stack(gate_parts(x), dim=-1).flatten(-2)


def fold_keys(k, c, scale):
    """Append the decay to the keys.

    Args:
        k: (B, Hkv, T, D).
        c: cumulative sum of log f, (B, H, T) fp32. Hkv divides H.
        scale: the factor that the kernel applies to q'.k'.

    Returns:
        (B, Hkv, T, D'). The first of the three parts of c propagates the gradient.
    """
    batch, kv_heads, length, _ = k.shape
    group = c.shape[1] // kv_heads
    parts = decay_columns(c.reshape(batch, kv_heads, group, length).transpose(2, 3), scale)  # (B, Hkv, T, G * parts)
    columns = columns_for(k, c.shape[1], group)[1].expand(batch, kv_heads, length, -1)
    return torch.cat([k, parts.to(k.dtype), columns], dim=-1)


def unfold_decay(folded_keys, head_dim, group, scale):
    """Read c back from folded keys: (B, Hkv, T, D') -> (B, Hq, T) fp32."""
    parts = folded_keys[..., head_dim : head_dim + GATE_PARTS * group].float()
    x = parts.unflatten(-1, (group, GATE_PARTS)).sum(-1)  # (B, Hkv, T, G)
    return (x * (-GATE_QUERY * scale)).transpose(2, 3).flatten(1, 2)


def tree_decay(log_f: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the decay of each key for each query: the sum of log f over all later keys that the query attends to.

    In a token tree, a gate therefore affects only its descendants. The decay depends on the query, so it is added to
    the logits instead of being folded into the keys.

    Args:
        log_f: log gates of all keys, (B, H, keys), fp32.
        visible: (1 or B, 1, T, keys) bool.

    Returns:
        (B, H, T, keys) fp32, with fp32's minimum at masked keys.
    """
    seen = log_f[:, :, None] * visible  # (B, H, T, keys)
    later = F.pad(cumulative_sum(seen[..., 1:].flip(-1)).flip(-1), (0, 1))
    return later.masked_fill(~visible, torch.finfo(log_f.dtype).min)
