"""The neural cache of remembered tokens: `neural_cache_weight` of `HMTConfig`.

A remembered token is likely to occur again after a similar context (Grave, Joulin and Usunier, arXiv 1612.04426, eq. 3
to 5; for an unbounded cache: arXiv 1711.02604). Let h_i be the last-layer hidden state at token x_i of a remembered
segment. It predicts the token x_{i+1}. The normalized h_i is the key of x_{i+1}. At position t, a token w has
probability p(w):

    p(w) = (1 - weight) p_LM(w) + weight p_cache(w)
    p_cache(w) ~ sum over all i with x_{i+1} = w of exp(SHARPNESS cos(h_t, h_i))

The cache works without training and does not occupy positions of the backbone. Gradients reach h_t, but not the keys.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .retriever_hmt import Retriever, Segment, register_retriever, remember


SHARPNESS = 30  # theta in the paper; the best value from 10 to 60 for SmolLM2-135M on Moby Dick
SCORES_AT_ONCE = 2**24  # maximum number of cache scores computed at a time


@register_retriever("neural_cache")
class NeuralCacheRetriever(Retriever):
    """A retriever that mixes a neural cache of the latest `memory_size` segments into the logits.

    Memory: `keys` (B, c, L' - 1, d), `ids` (B, c, L') and `ends` (B, c).
    """

    field = "neural_cache_weight"
    reads_hidden = True

    def empty(self, rows: int, like: Tensor) -> dict[str, Any]:
        """Return an empty cache."""
        length = self.config.segment_length
        ends = torch.zeros(rows, 0, dtype=torch.long, device=like.device)
        keys = like.new_zeros(rows, 0, length - 1, like.shape[-1])
        return {"keys": keys, "ids": ends[..., None].expand(-1, -1, length), "ends": ends}

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Append the tokens of a segment and their keys."""
        assert segment.hidden is not None
        keys = keys_of(segment.hidden[:, None, :-1].detach())
        return remember(state, segment, self.config.memory_size, keys=keys, ids=segment.ids[:, None])

    def mix(self, state: dict[str, Any], logits: Tensor, hidden: Tensor) -> Tensor:
        """Mix the cache's distribution into the logits (B, n, V). Rows without memories are unchanged."""
        keys = state["keys"]
        if not keys.shape[1]:
            return logits
        columns = max(1, SCORES_AT_ONCE // (len(keys) * keys[0, ..., 0].numel()))
        pieces = zip(logits.split(columns, 1), hidden.split(columns, 1))
        with torch.autocast(logits.device.type, enabled=False):
            return torch.cat([self.mix_piece(state, *piece) for piece in pieces], 1)

    def mix_piece(self, state: dict[str, Any], logits: Tensor, hidden: Tensor) -> Tensor:
        """Mix the cache's distribution into a chunk of the logits."""
        weight = self.config.neural_cache_weight
        dtype = logits.dtype
        there = state["ends"] > 0
        assert weight is not None
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        keys, ids = state["keys"].flatten(1, 2), state["ids"][:, :, 1:].flatten(1)
        scores = SHARPNESS * (keys_of(hidden).to(keys) @ keys.mT).to(logits)
        valid = there.repeat_interleave(state["keys"].shape[2], 1)[:, None]
        scores = scores.masked_fill(~valid, torch.finfo(scores.dtype).min).softmax(-1)
        cached = torch.zeros_like(logits).scatter_add(2, ids[:, None].expand_as(scores), scores)
        cached = cached.clamp(min=torch.finfo(cached.dtype).tiny).log() + logits.logsumexp(-1, keepdim=True)
        mixed = torch.logaddexp(logits + math.log1p(-weight), cached + math.log(weight))
        return torch.where(there.any(1)[:, None, None], mixed, logits).to(dtype)


def keys_of(hidden: Tensor) -> Tensor:
    """Normalize hidden states (..., d) to length one, in at least fp32."""
    return F.normalize(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), dim=-1)
