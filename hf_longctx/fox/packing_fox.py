"""Which tokens of a row are real, and which document each belongs to where a row holds several."""

import torch
import torch.nn.functional as F

from .checks_fox import check_positions


def padding_mask(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Which of the last `length` tokens are real, (B, T) bool; None where all of them are, or nothing is known.

    Not transformers' `create_recurrent_attention_mask`: it takes a token that comes alone for a generated one, but a
    prompt may be fed token by token.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    real = attention_mask[:, -length:].bool()
    return None if not torch.compiler.is_compiling() and real.all() else real


def packed_places(inputs_embeds, attention_mask, position_ids, cu_seq_lens_q=None, seq_idx=None):
    """Place of each token in its own document, (B, T), where rows hold several documents; None where none does.

    Borders are read from what transformers' collators give: `cu_seq_lens_q` (N + 1,), `seq_idx` (B, T), or position ids
    that do not go up from one token to the next. Where values cannot be looked at (compiling), position ids without a
    mask are taken for packed, as transformers does.
    """
    (batch, length), device = inputs_embeds.shape[:2], inputs_embeds.device
    if cu_seq_lens_q is None and seq_idx is None and (position_ids is None or length == 1):
        return None  # before the mask is looked at, for which a GPU would be waited for in every step
    compiling = torch.compiler.is_compiling()
    real = padding_mask(attention_mask, length)
    if cu_seq_lens_q is not None:
        if batch > 1 or (not compiling and (cu_seq_lens_q[0] != 0 or cu_seq_lens_q[-1] != length)):
            raise ValueError(
                "cu_seq_lens_q holds the borders of documents packed into one row: it needs a batch of one and must run from "
                f"0 to the length of the row; got an input of {(batch, length)} tokens and {cu_seq_lens_q.tolist()}."
            )
        starts = torch.zeros(length + 1, dtype=torch.bool, device=device)
        starts = starts.index_fill(0, cu_seq_lens_q.to(device, torch.long), True)[None, :-1]
    elif seq_idx is not None:
        starts = F.pad(seq_idx.to(device).diff(dim=1) != 0, (1, 0), value=True)
    elif not (compiling and real is not None):
        position_ids = position_ids.to(device).expand(batch, -1)
        before = position_ids[:, :-1]
        if real is not None:  # of the last real token
            last_real = (torch.arange(length, device=device) * real).cummax(1).values
            before = position_ids.gather(1, last_real[:, :-1]).masked_fill(~real.cummax(1).values[:, :-1], -1)
        starts = F.pad(position_ids[:, 1:] <= before, (1, 0), value=True)
        if real is not None:  # what `generate` appends to right padding falls too, but not to where the row began
            first = position_ids.gather(1, real.int().argmax(1, keepdim=True))
            starts = starts & real & (position_ids == first)
    else:
        return None
    if not compiling and not starts[:, 1:].any():
        return None
    if not compiling and real is None and cu_seq_lens_q is None and seq_idx is None:
        check_positions(position_ids, starts)
    if real is not None:
        raise ValueError(
            "these rows hold packed documents (their position ids start again, or cu_seq_lens_q or seq_idx says so) and their "
            "attention_mask hides tokens. Leave attention_mask out: padding after the documents needs no mask, only labels "
            "of -100; or give each document a row of its own."
        )
    index = torch.arange(length, device=device)
    return index - torch.where(starts, index, 0).cummax(1).values


def flash_borders(places: torch.Tensor) -> dict:
    """The borders of packed documents as FlashAttention takes them, over all rows one after the other.

    Left to itself it looks for them in position ids, in each layer again and only in a batch of one.
    """
    borders = F.pad((places.flatten() == 0).nonzero()[:, 0], (0, 1), value=places.numel()).int()
    longest = int(places.max()) + 1
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}
