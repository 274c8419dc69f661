"""The arguments of a call, read once.

`read_call` turns the arguments of `FoxModel.forward` into a `Call`, which every layer takes as it is: no layer looks
at masks, borders or positions again. Mistakes of a caller are refused by checks_fox.py before anything is read.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested

from .backend_fox import NAME
from .call_fox import Call, Shard
from .checks_fox import check_borders, check_call, check_restarts
from .masks_fox import read_tree_mask
from .state_fox import appends_in_place


logger = logging.get_logger(__name__)


def read_call(
    config,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
    position_ids: torch.Tensor | None,
    cache,
    shard: Shard | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    **kwargs,
) -> Call:
    """Check the arguments of a call, and read from them what the layers need.

    Args:
        config: the `FoxConfig`, whose attention implementation is chosen.
        inputs_embeds: (B, T, hidden), or (B, t, hidden) where a shard is given.
        attention_mask: (B, past + T), a mask of four dimensions as in masks_fox.py, the result of
            `create_masks_for_generate`, or None.
        position_ids: (1 or B, T) or None.
        cache: a `Cache` or None.
        shard: the part of each row that `inputs_embeds` is, or None.
        cu_seq_lens_q, seq_idx: borders of packed sequences, as in `find_sequences`.
        kwargs: what other parts of the model take.

    Raises:
        ValueError: tokens, mask, positions and cache do not fit together; or packed sequences, or rows that several
            processes share, have padding or a cache.
        NotImplementedError: FoX cannot use this cache in this way.
    """
    if shard is not None:  # only the shape of the whole rows is used
        inputs_embeds = inputs_embeds.detach()[:, :1].expand(-1, shard.size * inputs_embeds.shape[1], -1)
    check_call(config, inputs_embeds, attention_mask, position_ids, cache, shard, kwargs)
    (batch, length), device = inputs_embeds.shape[:2], inputs_embeds.device
    token_mask = sequences = predecessor = visible = None
    name = config._attn_implementation
    if isinstance(attention_mask, dict):
        (name, mask), (_, token_mask) = attention_mask.items()
    elif attention_mask is not None and attention_mask.ndim == 4:
        mask = attention_mask
        visible, predecessor = read_tree_mask(config, attention_mask, batch, length, cache)
    else:
        if attention_mask is not None:
            token_mask = read_token_mask(attention_mask, length)
        borders = position_ids, cu_seq_lens_q, seq_idx
        if borders != (None, None, None) and (cache is None or not torch.compiler.is_compiling()):
            sequences = find_sequences(batch, length, device, token_mask, *borders)
        if sequences is not None:
            if token_mask is not None or cache is not None:
                raise ValueError(
                    "these rows hold packed documents (their position ids start again, or cu_seq_lens_q or seq_idx says "
                    "so), which a cache cannot tell apart, and whose attention_mask may not hide tokens. Leave "
                    "cache and attention_mask out: padding after the documents needs only labels of -100."
                )
            attention_mask = cache = None  # at most ones, and an empty cache while compiling
        mask = create_attention_mask(config, inputs_embeds, attention_mask, cache, sequences)

    if config.k_shift or config.v_shift:
        if token_mask is not None:  # the last real token before each one
            last = torch.arange(1, length + 1, device=device) * token_mask
            predecessor = F.pad(last.cummax(1).values[:, :-1], (1, 0))
        if sequences is not None:
            first = sequences == 0 if shard is None else shard.part(sequences == 0)
            predecessor = torch.where(first, -1, torch.arange(first.shape[1], device=device))
    flash = {}
    if sequences is not None and cu_seq_lens_q is None and is_flash_attention_requested(config):
        # FlashAttention would look for them in the position ids, in each layer again and only in a batch of one
        borders = F.pad((sequences.flatten() == 0).nonzero()[:, 0], (0, 1), value=sequences.numel()).int()
        longest = int(sequences.max()) + 1
        flash = dict(cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=longest, max_length_k=longest)
    if position_ids is None:
        position_ids = sequences
    in_place = False
    if cache is not None and token_mask is None and visible is None and shard is None and name != NAME:
        in_place = appends_in_place(cache, inputs_embeds)
    if position_ids is None:
        cached = 0 if cache is None else cache.get_seq_length()
        position_ids = (torch.arange(length, device=device) + cached).unsqueeze(0)
    return Call(mask, token_mask, position_ids, sequences, predecessor, visible, flash, shard, name, in_place)


def can_be_cached(call: Call) -> bool:
    """Return whether a new cache may be filled with these rows; warn once if packed sequences forbid it.

    While compiling it may: sequences that are only taken for packed may be continued.
    """
    if call.position_in_sequence is None or torch.compiler.is_compiling():
        return True
    logger.warning_once("Packed documents cannot be continued from a cache: none is returned for them.")
    return False


def read_token_mask(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Return which of the last `length` tokens are real, (B, T) bool, of a mask (B, past + T); None if all are.

    Not transformers' `create_recurrent_attention_mask`: it takes a single token for a generated one, but a prompt may
    come token by token.
    """
    if attention_mask is None:
        return None
    token_mask = attention_mask[:, -length:].bool()
    return None if not torch.compiler.is_compiling() and token_mask.all() else token_mask


def create_attention_mask(config, inputs_embeds, attention_mask, cache, position_ids=None) -> Any:
    """Return who sees whom, in the form that the attention implementation of the config takes."""
    create = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    return create(config, inputs_embeds, attention_mask, cache, position_ids=position_ids)


def find_sequences(
    batch: int,
    length: int,
    device: torch.device,
    token_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the position of each token in its own sequence, (B, T), where rows hold several; None where no row does.

    A sequence starts where a collator's `cu_seq_lens_q` (N + 1,) or `seq_idx` (B, T) says so, or where the position
    ids do not rise from one token to the next. While compiling, when values cannot be read, position ids without a
    mask are taken for packed, as transformers does.
    """
    compiling = torch.compiler.is_compiling()
    if cu_seq_lens_q is not None:
        ends = not compiling and (cu_seq_lens_q[0] != 0 or cu_seq_lens_q[-1] != length)
        if batch > 1 or ends or (not compiling and (cu_seq_lens_q.diff() < 0).any()):
            raise ValueError(
                "cu_seq_lens_q holds the borders of documents packed into one row: it needs a batch of one and must "
                f"rise from 0 to the length of the row; got an input of {(batch, length)} tokens and "
                f"{cu_seq_lens_q.tolist()}."
            )
        starts = torch.zeros(length + 1, dtype=torch.bool, device=device)
        starts = starts.index_fill(0, cu_seq_lens_q.to(device, torch.long), True)[None, :-1]
    elif seq_idx is not None:
        if seq_idx.shape != (batch, length):
            raise ValueError(
                f"seq_idx is {tuple(seq_idx.shape)}; it must be {(batch, length)}, the number of the document of each token."
            )
        starts = F.pad(seq_idx.to(device).diff(dim=1) != 0, (1, 0), value=True)
    elif position_ids is None or length == 1 or (compiling and token_mask is not None):
        return None
    else:
        position_ids = position_ids.to(device).expand(batch, -1)
        previous = position_ids[:, :-1]
        if token_mask is not None:  # of the last real token
            last = (torch.arange(length, device=device) * token_mask).cummax(1).values
            previous = position_ids.gather(1, last[:, :-1]).masked_fill(~token_mask.cummax(1).values[:, :-1], -1)
        starts = F.pad(position_ids[:, 1:] <= previous, (1, 0), value=True)
        if token_mask is not None:  # `generate` after right padding goes back too, but not to the row's first position
            first = position_ids.gather(1, token_mask.int().argmax(1, keepdim=True))
            starts = starts & token_mask & (position_ids == first)
        elif not compiling and starts[:, 1:].any():
            check_restarts(position_ids, starts)
    if not compiling and position_ids is not None and (cu_seq_lens_q, seq_idx) != (None, None):
        check_borders(position_ids.to(device), starts)
    if not compiling and not starts[:, 1:].any():
        return None
    index = torch.arange(length, device=device)
    return index - torch.where(starts, index, 0).cummax(1).values
