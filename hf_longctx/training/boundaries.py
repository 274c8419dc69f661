"""Boundaries of packed documents for kernels that take them, so that sequences of any length need no mask."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested


def boundaries(position_ids: torch.Tensor) -> dict[str, Any]:
    """Return where documents begin, for FlashAttention: the `FlashAttentionKwargs` of transformers.

    Without, each layer would look for them in the position ids, and only in a batch of one row.

    Args:
        position_ids: (B, T), 0 at the first token of each document and of each row.

    Returns:
        cu_seq_lens_q and cu_seq_lens_k, (documents + 1,) int32, over the tokens of all rows; max_length_q and
        max_length_k, the length of the longest document.
    """
    starts = (position_ids.flatten() == 0).nonzero()[:, 0]
    ends = F.pad(starts, (0, 1), value=position_ids.numel()).int()
    longest = int(ends.diff().max())
    return dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest)


@torch.no_grad()
def takes_boundaries(model: Any) -> bool:
    """Return whether `boundaries` reach all FlashAttention calls of a model, by a trial; a FoX makes its own.

    Args:
        model: a causal language model, on any device, also "meta".
    """
    name = model.config._attn_implementation
    if model.config.model_type in ("fox", "hmt") or not is_flash_attention_requested(model.config):
        return False
    seen, attention = [], ALL_ATTENTION_FUNCTIONS[name]

    def note(module, query, key, value, *args, **kwargs):
        seen.append(kwargs.get("cu_seq_lens_q") is not None and kwargs.get("max_length_q") is not None)
        return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None

    ids = torch.ones(1, 2, dtype=torch.int64, device=model.device)
    longest = dict(max_length_q=2, max_length_k=2)
    ends = torch.tensor([0, 2], dtype=torch.int32, device=model.device)
    ALL_ATTENTION_FUNCTIONS[name] = note
    try:
        model(input_ids=ids, use_cache=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **longest)
    except TypeError:  # takes no other arguments
        return False
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = attention
    return bool(seen) and all(seen)


__all__ = ["boundaries", "takes_boundaries"]
