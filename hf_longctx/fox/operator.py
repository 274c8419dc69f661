"""The operator `forgetting_attention`, and its reference implementation.

The operator runs the kernels of kernels_fox.py on a GPU. Elsewhere it runs `scaled_dot_product_attention` on folded
queries and keys (attention_fox.py). Every backend is tested against `forgetting_attention_ref`.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .attention_fox import CLOSED_GATE, autocast_inputs, cumulative_sum, fold_keys, fold_queries
from .kernels_fox import INTERPRETED
from .key_ranges_fox import find_visible_keys
from .torch_internals_fox import assert_async
from .triton_fox import triton_attention, why_not


BACKENDS = ("triton", "folded", "reference")


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
) -> torch.Tensor:
    """Compute forgetting attention by its definition. Every backend must agree with this function.

    Arguments, result and errors are as in `forgetting_attention`. The dtype of the computation is float32. For float64
    inputs, it is float64. Memory grows with Tq * Tk.

    Source: arXiv 2503.02130, eq. 11. The paper omits the scale. The scale applies to q.k only.
    """
    masks = dict(attention_mask=attention_mask, cu_seqlens=cu_seqlens, window=window)
    check_inputs(q, k, v, log_f, scale=scale, **masks)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_length, kv_length, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    position = torch.arange(kv_length, device=q.device)
    distance = position[-q_length:, None] - position  # (Tq, Tk), negative for keys after the query
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    if attention_mask is not None:
        token_mask = attention_mask.bool()
        q, k, v, log_f = clear_padding(q, k, v, log_f, token_mask)
        visible = visible & token_mask[:, None, None, :] & token_mask[:, None, -q_length:, None]  # (B, 1, Tq, Tk)
    if cu_seqlens is not None:
        sequence_ids = torch.bucketize(position, cu_seqlens[1:], right=True)
        visible = visible & (sequence_ids == sequence_ids[:, None])

    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    c = log_f.double().clamp(min=-1e4).cumsum(-1)  # (B, Hq, Tk); exp(-1e4) is 0
    decay = c[..., -q_length:, None] - c[..., None, :]
    logits = scale * q.to(dtype) @ k.mT + decay.to(dtype)  # (B, Hq, Tq, Tk)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~visible, 0.0)  # padding queries return 0, not NaN
    return (weights @ v).to(q.dtype)


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
    log_pruning_tolerance: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute causal softmax attention in which a forget gate fades the keys. Differentiable in q, k, v and log_f.

        o_i = sum_{j <= i} softmax_j(scale * q_i.k_j + c_i - c_j) v_j,        c_t = sum_{l <= t} log f_l

    Args:
        q: queries, (B, Hq, Tq, D), any floating dtype. The Tq queries are the *last* Tq of the Tk positions.
        k: keys, (B, Hkv, Tk, D). Hkv divides Hq. Query head h uses key head h // (Hq // Hkv).
        v: values, of the shape of k.
        log_f: natural log of the forget gate per query head and key, (B, Hq, Tk), fp32, <= 0. -inf is a closed gate.
            The gate of position t lies between t - 1 and t: it fades every key before t, not t itself.
        scale: factor on q.k before the decay is added. Default D ** -0.5.
        attention_mask: (B, Tk), 1 for a real token, 0 for padding. Padding may be anywhere in a row, and may contain
            any value, including NaN. No query attends to padding, the gates of padding do not count, and the output
            of a padding query is 0.
        cu_seqlens: (N + 1,) integers from 0 to T, boundaries of N sequences packed into one row (B = 1, Tq = Tk).
            Neither attention nor decay crosses a boundary.
        window: number of most recent positions that a query attends to, including its own (i - j < window).
        log_pruning_tolerance: log of the largest attention weight that a query may lose. The log must be at most 0.
            Pruning skips faded keys (arXiv 2504.06949 uses -10).
        backend: default "triton" on NVIDIA GPUs of compute capability 8.0 and later, "folded" elsewhere.
            "triton": the kernels of kernels_fox.py, for bf16, fp16 or fp32 and D up to 256. Memory is linear in T. The
            decay is exact at any length. Only this backend prunes. If padding lies between real tokens, "folded" runs
            instead.
            "folded": `scaled_dot_product_attention` with the decay folded into the keys (attention_fox.py), on any
            device. Memory is linear in T. If Tq < Tk, or with a window, there is also a mask of Tq * Tk booleans. The
            exponent has a resolution of 6e-8 * -c. A closed gate adds 120 to -c. In fp16, -c must stay below
            64 * scale * 65504.
            "reference": `forgetting_attention_ref`, the definition. Memory grows with Tq * Tk. It supports second and
            forward-mode derivatives. Under PyTorch's `sdpa_kernel(SDPBackend.MATH)`, "folded" supports them, too.

    Returns:
        (B, Hq, Tq, D) in q.dtype.

    Raises:
        ValueError: a shape, dtype or value is not as described above.
        ImportError, NotImplementedError: the backend is not installed or does not support the arguments.

    Source: arXiv 2503.02130, eq. 11.
    """
    q, k, v = autocast_inputs(q, k, v)
    attention_mask, cu_seqlens = (x if x is None else x.to(q.device) for x in (attention_mask, cu_seqlens))
    masks: dict[str, Any] = dict(attention_mask=attention_mask, cu_seqlens=cu_seqlens, window=window)
    check_inputs(q, k, v, log_f, scale=scale, **masks, log_pruning_tolerance=log_pruning_tolerance)
    backend = choose_backend(backend, q, log_pruning_tolerance)
    if backend == "reference":
        return forgetting_attention_ref(q, k, v, log_f, scale=scale, **masks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    token_mask = None if attention_mask is None else attention_mask.bool()
    if backend == "triton":
        start = None if cu_seqlens is None else sequence_starts(cu_seqlens, k.shape[2])
        options = dict(token_mask=token_mask, sequence_start=start, window=window)
        visible = find_visible_keys(q.shape[2], k.shape[2], q.device, **options)
        if visible is not None:
            options = dict(scale=scale, log_pruning_tolerance=log_pruning_tolerance)
            return triton_attention(q, k, v, log_f, visible, **options)
    log_f = log_f.clamp(min=CLOSED_GATE)
    if cu_seqlens is None:
        return folded_attention(q, k, v, log_f, scale, token_mask, window)
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    sequences = zip(*(x.split(lengths, dim=2) for x in (q, k, v, log_f)))
    return torch.cat([folded_attention(*sequence, scale, window=window) for sequence in sequences], dim=2)


def sequence_starts(cu_seqlens: torch.Tensor, T: int) -> torch.Tensor:
    """Compute the start of each token's sequence, (1, T), from the boundaries `cu_seqlens`, (N + 1,)."""
    if torch.compiler.is_compiling():  # `check_inputs` checks nothing while compiling
        rising = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == T) & (cu_seqlens.diff() >= 0).all()
        assert_async(rising, "compiled Triton attention: cu_seqlens must increase from 0 to the token count")
    cu_seqlens, t = cu_seqlens.long(), torch.arange(T, device=cu_seqlens.device)
    return cu_seqlens[torch.searchsorted(cu_seqlens, t, right=True) - 1][None]


def choose_backend(backend: str | None, q: torch.Tensor, log_pruning_tolerance: float | None) -> str:
    """Return `backend`. For None, return the default. Raise an error if `backend` does not support q or pruning."""
    reason = why_not(q.shape[-1], q.dtype, q.device) if backend in (None, "triton") else None
    if backend is None:  # the folded form ignores the tolerance, because skipping keys is optional
        return "folded" if INTERPRETED.value or reason is not None else "triton"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, or None, got {backend!r}.")
    if backend == "triton" and reason is not None:
        raise reason
    if backend != "triton" and log_pruning_tolerance is not None:
        raise NotImplementedError(
            f"backend={backend!r} does not support log_pruning_tolerance. Leave one of them out."
        )
    return backend


# --- the folded form -------------------------------------------------------------------------------------------------


def folded_attention(q, k, v, log_f, scale, token_mask=None, window=None):
    """Compute forgetting attention with `scaled_dot_product_attention` on folded queries and keys.

    Arguments are not checked. Memory is linear in Tk if Tq = Tk and `window` is None. Otherwise it includes a mask of
    Tq * Tk booleans.

    Args:
        q, k, v, scale, window: as in `forgetting_attention`.
        log_f: as in `forgetting_attention`, but finite.
        token_mask: (B, Tk) bool, False at padding.
    """
    head_dim, q_length, kv_length, group = q.shape[-1], q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if token_mask is not None:
        q, k, v, log_f = clear_padding(q, k, v, log_f, token_mask)
    mask, past = None, kv_length - q_length
    if past or window is not None:
        mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=q.device).tril(past)
    if mask is not None and window is not None:
        mask = mask.triu(past - window + 1)
    c = cumulative_sum(log_f)
    keys = fold_keys(k, c, scale)
    if token_mask is not None:
        # The decay columns also mask padding, so SDPA does not need a (T, T) mask.
        columns = torch.arange(keys.shape[-1], device=k.device) >= k.shape[-1]
        keys = keys.masked_fill(~token_mask[:, None, :, None] & columns, -torch.finfo(torch.float16).max)
    out = F.scaled_dot_product_attention(
        fold_queries(q, c[..., -q_length:], scale, group),
        keys,
        F.pad(v, (0, keys.shape[-1] - head_dim)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=group > 1,
    )[..., :head_dim]
    if token_mask is not None:
        out = out.masked_fill(~token_mask[:, None, -q_length:, None], 0.0)
    return out


def clear_padding(q, k, v, log_f, token_mask):
    """Set q, k, v and log_f to 0 at padding. Padding may contain any value, including NaN.

    token_mask: (B, Tk) bool, False at padding.
    """
    padding = ~token_mask[:, None, :, None]  # (B, 1, Tk, 1)
    q = q.masked_fill(padding[:, :, -q.shape[2] :], 0.0)
    return q, k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0), log_f.masked_fill(padding[..., 0], 0.0)


# --- checks of the arguments -----------------------------------------------------------------------------------------


def check_inputs(q, k, v, log_f, *, scale, attention_mask, cu_seqlens, window, log_pruning_tolerance=None) -> None:
    """Raise ValueError for invalid arguments of `forgetting_attention`, except while compiling.

    The values of the gates are checked on a CPU only, because reading them would stall a GPU.
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
            f"q must be (B, Hq, Tq, D), k and v (B, Hkv, Tk, D), and log_f (B, Hq, Tk), got {shapes}. Hkv must divide Hq. "
            "The queries are at the last Tq of the Tk positions. Pass cached and new keys together, and a gate for each "
            "query head and key."
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    if log_f.dtype != torch.float32:
        raise ValueError(
            f"log_f must be torch.float32, got {log_f.dtype}. Its cumulative sum reaches thousands. Cast before the log: "
            "F.logsigmoid(gate.float())."
        )
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a positive number, got {scale}. The default is D ** -0.5.")
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"window must be an integer of at least 1, got {window}. It is the number of visible keys.")
    if log_pruning_tolerance is not None and not log_pruning_tolerance <= 0:
        raise ValueError(
            f"log_pruning_tolerance must be at most 0, got {log_pruning_tolerance}. It is the log of a weight."
        )
    batch, _, q_length, kv_length = *q.shape[:3], k.shape[2]
    if attention_mask is not None and attention_mask.shape != (batch, kv_length):
        raise ValueError(
            f"attention_mask must be (B, Tk) = {(batch, kv_length)}, got {tuple(attention_mask.shape)}. Set it to 1 for "
            "real tokens, including cached ones."
        )
    if attention_mask is not None and attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask must be boolean or integer, got {attention_mask.dtype}. Convert an additive mask by "
            "(mask == 0), and a mask of 1 and 0 by mask.bool()."
        )
    if cu_seqlens is not None:
        if batch != 1 or q_length != kv_length or attention_mask is not None:
            raise ValueError(
                f"cu_seqlens requires B = 1, Tq = Tk and no attention_mask, got B = {batch}, Tq = {q_length}, "
                f"Tk = {kv_length}. Pack the sequences into one row, and leave attention_mask out."
            )
        boundaries = cu_seqlens.tolist()
        integers = cu_seqlens.dtype != torch.bool and not cu_seqlens.is_floating_point() and cu_seqlens.ndim == 1
        if not integers or boundaries != sorted(boundaries) or boundaries[:1] != [0] or boundaries[-1:] != [kv_length]:
            raise ValueError(f"cu_seqlens must be integers that increase from 0 to T = {kv_length}, got {boundaries}.")
    if log_f.device.type == "cpu":
        gates = log_f if attention_mask is None else log_f.masked_fill(~attention_mask.cpu().bool()[:, None], 0.0)
        try:
            valid = bool((gates <= 0).all())
        except RuntimeError:  # torch.func.vmap does not support reading values
            valid = True
        if not valid:
            raise ValueError(
                "log_f must be <= 0, got a positive or NaN value. It is the log of a gate between 0 and 1. "
                "Use F.logsigmoid(gate.float())."
            )
