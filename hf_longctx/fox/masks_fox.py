"""A mask of four dimensions from the caller: who sees whom, token by token, as for a tree of continuations in one row.

A key fades by the gates of those tokens between key and query that the query sees, so that each path through the tree
is computed as if no other branch stood in the row. This decay is not a property of the key: it cannot be folded into
the keys (attention_fox.py) and is added to the logits, as (B, H, T, keys) numbers.
"""

import torch
import torch.nn.functional as F

from .attention_fox import cumulative_sum
from .state_fox import AttendingCache


# An additive mask below -1e4 hides a key. It is applied again as a minimum of float32, because a decay can exceed the
# minimum of float16, -65504.
MASKED = -1e4


def read_tree_mask(config, mask: torch.Tensor, batch: int, length: int, cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a mask of four dimensions, and find the token before each token. While compiling, values are not checked.

    Args:
        config: the `FoxConfig`.
        mask: (1 or B, 1, T, keys): boolean, True for what is seen, or floating, 0 for what is seen and a minimum for
            the rest. `keys` are those in the cache after this call, free slots of a static cache included.
        batch, length: B and T.
        cache: a `Cache` or None.

    Returns:
        the mask as booleans; and (1 or B, T), the last token that each token sees before itself, counted from the last
        cached token, which is 0, over the new ones; -1 if it sees none.

    Raises:
        ValueError: shape, dtype or values are others; a token sees a later one, or more than the sliding window; or
            the model has a token shift and the token before a new one is a cached token but not the last.
        NotImplementedError: the cache is a `PrunedCache`.
    """
    if isinstance(cache, AttendingCache):
        raise NotImplementedError(
            f"a {type(cache).__name__} has dropped tokens by the gates of all tokens, so it cannot follow an "
            "attention_mask of four dimensions. Use DynamicCache(config=model.config)."
        )
    cached, keys, offset = 0, length, 0
    if cache is not None:
        cached, (keys, offset) = cache.get_seq_length(), cache.get_mask_sizes(length, 0)
    if tuple(mask.shape) not in ((batch, 1, length, keys), (1, 1, length, keys)):
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}; with four dimensions it must be {(batch, 1, length, keys)}: for each "
            "row, the same for all heads, which keys each new token sees."
        )
    compiling, additive = torch.compiler.is_compiling(), mask.is_floating_point()
    values = compiling or not additive or ((mask == 0) | (mask < MASKED)).all()
    if not values or not (additive or mask.dtype == torch.bool):
        raise ValueError(
            f"attention_mask of four dimensions is {mask.dtype}; it must be boolean, True for what a token sees, or "
            "floating and added to logits: 0 for what a token sees and torch.finfo(dtype).min for the rest. Convert a "
            "mask of 1 and 0: mask.bool()."
        )
    visible = mask > MASKED if additive else mask
    key = torch.arange(keys, device=mask.device) + offset
    query = torch.arange(length, device=mask.device)[:, None] + cached  # (T, 1)
    if not compiling and (visible & (key > query)).any():
        raise ValueError(
            "attention_mask lets a token see a later one, which a FoX, whose gates forget the past, cannot. Hide what "
            "lies above the diagonal: mask.tril()."
        )
    if config.sliding_window is not None and not compiling and visible.sum(-1).max() > config.sliding_window:
        raise ValueError(
            f"attention_mask lets a token see {visible.sum(-1).max()} tokens; with sliding_window={config.sliding_window} it "
            "must hide all but the last so many."
        )
    before = torch.where(visible[:, 0] & (key < query), key, -1).amax(-1)  # (1 or B, T)
    predecessor = torch.where(before < 0, -1, before - cached + 1)
    if (config.k_shift or config.v_shift) and not compiling and ((predecessor < 0) & (before >= 0)).any():
        raise ValueError(
            "attention_mask continues a cached token that is not the last one, but the token shift of this model is "
            "cached for the last one alone. Give the branch and all before it, after the last cached token, in one call."
        )
    return visible, predecessor


def decay_along_paths(log_f: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the decay of each key for each query, the sum of log f over the later keys that it sees; else a minimum.

    Args:
        log_f: log gates of all keys, (B, H, keys), fp32.
        visible: (1 or B, 1, T, keys) bool.

    Returns:
        (B, H, T, keys) fp32.
    """
    seen = log_f[:, :, None] * visible  # (B, H, T, keys)
    later = F.pad(cumulative_sum(seen[..., 1:].flip(-1)).flip(-1), (0, 1))
    return later.masked_fill(~visible, torch.finfo(log_f.dtype).min)
