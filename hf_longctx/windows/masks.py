"""Attention masks that also tell the index of each key in its sequence.

A window counts the tokens of a sequence. Padding is not counted, and packed documents are counted separately. The mask
of a model therefore contains more than "visible" and "not visible". It has one of these forms:

- None: attention is causal, and nothing is padded. The index of a key is its slot, i.e. its position in the row.
- int8, (B, 1, T, keys): 1 if the query sees the key. The index of a key is its slot.
- int32, (B, 1, T, keys): 1 + the index of the key in its sequence, 0 if the query does not see the key.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import sdpa_mask


def indexed_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Create the mask of a call, as the mask function of the attention implementation. See the module docstring.

    Args:
        q_length, kv_length: numbers of queries and of keys.
        q_offset, kv_offset: slots of the first query and of the first key. A static cache has a tensor as `q_offset`.
        attention_mask: (B, slots), False for padding.
        kwargs: the other arguments of `sdpa_mask`.

    Raises:
        NotImplementedError: the attention is not causal.
    """
    visible = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        **kwargs,
    )
    if "allow_is_bidirectional_skip" in kwargs:
        raise NotImplementedError(f"{NOT_CAUSAL} The model's `config.is_causal` must be True.")
    if visible is None:
        return None
    static = isinstance(q_offset, Tensor) or kv_length != q_offset + q_length - kv_offset
    compiling = torch.compiler.is_compiling()
    if not (static or compiling) and torch.diagonal(visible, q_offset - kv_offset + 1, -2, -1).any():
        raise NotImplementedError(f"{NOT_CAUSAL} Leave out images and other blocks with bidirectional attention.")

    end = kv_offset + kv_length
    slots = torch.arange(end, device=visible.device)
    if attention_mask is not None and (compiling or not attention_mask.all()):
        real = attention_mask[:, :end].to(visible.device, torch.int32)
        index = F.pad(real, (0, end - real.shape[1])).cumsum(-1) - 1  # (B, end)
    elif kv_length == q_length and (compiling or not torch.diagonal(visible[:, 0], -1, -2, -1).all()):
        follows = torch.diagonal(visible[:, 0], -1, -2, -1)  # whether a token sees the previous one
        first = F.pad(~follows, (1, 0), value=True)  # (B, end): the first token of each packed document
        index = slots - torch.where(first, slots, 0).cummax(-1).values
    elif kv_offset == 0 and not static:
        return visible.view(torch.int8)
    else:
        index = slots[None]
    return torch.where(visible, index[:, None, None, kv_offset:] + 1, 0).int()


NOT_CAUSAL = "head windows require causal attention, got a mask in which a token attends to a later one."


class CallMask:
    """The mask of one call of one attention layer.

    mask: see the module docstring. A mask of another dtype is the user's. It supports only heads that keep all keys.
    first: slot of the first query, if the mask is not int32.
    tokens: number of queries.
    sliding_window: the layer's own window. Older keys are not visible, as padding is not.
    """

    def __init__(self, mask: Tensor | None, first: Any, tokens: int, device: torch.device, sliding_window: int | None):
        self.mask = None if mask is None else mask.to(device)
        self.first, self.tokens, self.device, self.sliding_window = first, tokens, device, sliding_window
        self.indexed = mask is not None and mask.dtype == torch.int32
        self._last: Tensor | None = None

    def of_model(self, keys: int) -> Tensor | None:
        """Return the mask of the last keys without windows, as the model's own attention receives it."""
        if self.mask is None:
            return None
        mask = self.mask[..., -keys:]
        if mask.dtype not in (torch.int8, torch.int32):
            return mask
        return mask > 0 if self.indexed else mask.view(torch.bool)

    def check(self) -> None:
        """Raise an error if the mask does not tell the indices of the keys."""
        if self.mask is not None and self.mask.dtype not in (torch.int8, torch.int32):
            self._reject()

    def check_indices(self) -> None:
        """Raise an error if an int32 mask is the user's: several keys of a sequence would have the index 0.

        One layer is enough, because this waits for a GPU.
        """
        if self.indexed and not torch.compiler.is_compiling():
            assert self.mask is not None
            if ((self.mask[:, :, -1] == 1).sum(-1) > 1).any():
                self._reject()

    def _reject(self) -> None:
        assert self.mask is not None
        raise NotImplementedError(
            f"`attention_mask` must have two dimensions, got a mask of {self.mask.dim()} dimensions. Head windows do not "
            "count padding, and such a mask does not tell which keys are padding."
        )

    def new_indices(self, slots: Tensor) -> Tensor:
        """Return the index of each new token in its sequence, (B, T); -1 for padding. The mask must be int32.

        slots: slots of the new tokens, (T,).
        """
        assert self.mask is not None
        queries = torch.arange(self.tokens, device=self.device)
        return self.mask[:, 0, queries, slots].long() - 1

    def check_cached(self, cached: Tensor | None, before: int) -> Tensor | None:
        """Raise an error if the mask contradicts the masks of earlier calls.

        cached: 1 + the index of each cached token in its sequence, 0 for padding, (B, slots), from the earlier masks.
            Slots that it leaves out are not checked. None: nothing is padded so far.
        before: number of cached tokens.

        Return the same for the tokens of this call and all before. None: nothing is padded.
        """
        end = before + self.tokens
        if (cached.shape[1] == end) if cached is not None else not self.indexed:
            return cached  # another group of heads has checked this call
        unpadded = 1 + torch.arange(end, device=self.device)[None]
        if cached is None:
            cached = unpadded[:, :before]
        if self.indexed:
            assert self.mask is not None
            first, found = self.mask[:, 0, 0], self.mask[:, 0, :, :end].amax(1)  # by the first query, and by any
        else:
            first = found = unpadded.expand(len(cached), -1)
        known = min(before, cached.shape[1])
        checked = slice(max(0, before + 1 - (self.sliding_window or before + 1)), known)
        if (first[:, checked] != cached[:, checked]).any():
            raise ValueError(
                "`attention_mask` must mark the same cached tokens as padding as in earlier calls. Pass a mask of all "
                "tokens, (B, cached + new tokens), to each call."
            )
        return torch.cat([found[:, :known].maximum(cached[:, :known]), found[:, known:]], 1)

    def allowed(self, begin: int, end: int, slots: Tensor, window: int, sinks: int) -> Tensor:
        """Return which keys the queries `begin` to `end` attend to, (B or 1, 1, end - begin, n) bool.

        slots: slots of the keys, (n,) or (B, n); -1 for a key that does not exist.
        """
        columns = slots if slots.dim() == 1 else slots[:, None, None]  # (n,) or (B, 1, 1, n)
        queries = self.first + torch.arange(begin, end, device=self.device)[:, None]
        if self.mask is None:
            visible, ages, index = columns <= queries, queries - columns, columns
        else:
            part = self.mask[:, :, begin:end]
            if slots.dim() == 1:
                part = part[..., slots]
            else:
                part = part.gather(-1, columns.clamp(min=0).expand(-1, -1, end - begin, -1))
            visible, ages, index = part > 0, queries - columns, columns
        if self.mask is not None and self.indexed:
            if self._last is None:
                self._last = self.mask.amax(-1, keepdim=True)  # (B, 1, T, 1): 1 + the index of each query
            ages, index = self._last[:, :, begin:end] - part, part - 1
        allowed = visible & ((ages < window) | (index < sinks)) & (columns >= 0)
        return allowed if allowed.dim() == 4 else allowed[None, None]
