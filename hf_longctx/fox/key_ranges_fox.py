"""Padding, packing and a sliding window, described by the first key that each query attends to.

`find_visible_keys` computes this key for the operator and the model. Adaptive computation pruning (arXiv 2504.06949)
moves it to the first key that is not forgotten (`prune_kernel` in kernels_fox.py).
"""

from typing import NamedTuple

import torch

from .torch_internals_fox import assert_async


class VisibleKeys(NamedTuple):
    """The keys that the queries of one call attend to. They are the same in every layer of a model.

    key_start: position of the first key that each query attends to, int32, (B or 1, 1, Tq). It does not decrease
        along a row. If it exceeds the query's own position, the query attends to nothing. None: plain causal
        attention.
    end: number of filled key slots. The queries are in the last Tq of them. If the number is stored on the device,
        `end` is a tensor of one element, else an int.
    """

    key_start: torch.Tensor | None
    end: int | torch.Tensor

    def contiguous(self):
        """Return self. `generate` calls this method on every mask."""
        return self

    def last(self, length):
        """Restrict the visible keys to the last `length` keys, for a cache that has dropped all earlier ones."""
        first = None if self.key_start is None else (self.key_start - (self.end - length)).clamp(min=0)
        return VisibleKeys(first, length)


def find_visible_keys(
    Tq, Tk, device, *, token_mask=None, sequence_start=None, window=None, end=None
) -> VisibleKeys | None:
    """Combine padding, packed sequences and a sliding window into the `VisibleKeys` of causal queries.

    Call it once per forward pass, because reading `token_mask` waits for the device.

    Args:
        Tq, Tk: number of queries and keys. The queries are the last Tq of the first `end` keys.
        token_mask: (B, Tk) bool, False at padding.
        sequence_start: (B or 1, Tq) integers, position of the first key of each query's sequence.
        window: number of most recent positions that a query attends to, including its own.
        end: number of filled key slots, an integer tensor (1,) or (). Default: Tk.

    Returns:
        The visible keys. If padding lies between real tokens, None: the kernels do not support this. Compiled calls
        cannot return None, and fail instead.
    """
    compiling = torch.compiler.is_compiling()
    end = Tk if end is None else end
    slots = torch.arange(Tq, device=device) + (end - Tq)  # key slot of each query
    first = torch.zeros_like(slots)[None] if sequence_start is None else sequence_start  # (B or 1, Tq)
    if window is not None:
        first = torch.maximum(first, slots - window + 1)
    bounded = sequence_start is not None or window is not None
    unpadded = VisibleKeys(first[:, None].int() if bounded else None, end)
    if token_mask is None:
        return unpadded
    t = torch.arange(Tk, device=device)
    if not compiling and (token_mask | (t >= end)).all():
        return unpadded

    token_mask = token_mask & (t < end)
    start = token_mask.int().argmax(-1, keepdim=True)
    stop = start + token_mask.sum(-1, keepdim=True)
    one_block = (token_mask == ((t >= start) & (t < stop))).all()
    if compiling:
        assert_async(one_block, "compiled Triton attention: attention_mask has padding between real tokens")
    elif not one_block:
        return None
    first = torch.where(slots < stop, torch.maximum(first, start), Tk)
    return VisibleKeys(first[:, None].int(), end)


def bound_from_norms(q, k, scale, key_start) -> torch.Tensor:
    """Return a bound on |scale * q.k|, (B, Hq), from the largest norms of queries and keys. Padding is ignored."""
    rows = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float32)  # (B, Hq, Tq)
    keys = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32)  # (B, Hkv, Tk)
    if key_start is not None:  # padding may contain any value
        t, past = torch.arange(k.shape[2], device=k.device), k.shape[2] - q.shape[2]
        rows = torch.where(key_start <= t[past:], rows, 0.0)
        keys = torch.where(key_start[..., (t - past).clamp(min=0)] <= t, keys, 0.0)  # as in `running_sum_kernel`
    return rows.amax(-1) * keys.amax(-1).repeat_interleave(q.shape[1] // k.shape[1], 1) * abs(scale)


def bound_per_head(q, logit_bound: torch.Tensor | float) -> torch.Tensor:
    """Expand a bound (a number or a tensor) to a contiguous fp32 tensor (B, Hq) for the kernels."""
    if not isinstance(logit_bound, torch.Tensor):
        return q.new_full(q.shape[:2], logit_bound, dtype=torch.float32)  # a copy to the GPU would synchronize
    return logit_bound.to(q.device, torch.float32).expand(q.shape[:2]).contiguous()
