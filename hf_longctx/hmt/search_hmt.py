"""Search for the tokens that are read again: `recall_tokens` of `HMTConfig`.

The remembered segments are cut into stretches of r tokens. The best one for a query has the highest BM25 (Robertson
and Zaragoza 2009, with the idf of Lucene), whose words are tokens. All stretches are equally long, so b has no effect.
What comes next depends most on the latest tokens of the query: a token n places before its end has weight
exp(-n / 8).
"""

from typing import Any

import torch
from torch import Tensor

from .configuration_hmt import HMTConfig
from .retriever_hmt import Retrieved, Retriever, Segment, register_retriever, remember


K1 = 1.2  # how soon more of the same token stops counting, the usual choice
FADE = 8  # tokens over which the weight of a query's token falls to 1 / e


@register_retriever("search")
class Search(Retriever):
    """Remembers the tokens of the latest `memory_size` segments; a segment reads the best `recall_tokens` again.

    Memory: `ids` (B, c, L') and `ends` (B, c).
    """

    @classmethod
    def is_used(cls, config: HMTConfig) -> bool:
        """Say whether tokens are read again."""
        return config.recall_tokens is not None

    @property
    def columns(self) -> int:
        """Tokens that are read again."""
        return self.config.recall_tokens or 0

    def empty(self, rows: int, like: Tensor) -> dict[str, Any]:
        """Return a memory without tokens."""
        ends = torch.zeros(rows, 0, dtype=torch.long, device=like.device)
        return {"ids": ends[..., None].expand(-1, -1, self.config.segment_length), "ends": ends}

    def retrieve(self, state: dict[str, Any], query: Tensor | None, ids: Tensor) -> Retrieved:
        """Embed the tokens that share most with the first part of the segment."""
        return Retrieved(self.embed(find_tokens(ids, state["ids"], state["ends"] > 0, self.columns)))

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Append the tokens of a segment."""
        return remember(state, segment, self.config.memory_size, ids=segment.ids[:, None])


def find_tokens(query: Tensor, ids: Tensor, valid: Tensor, length: int) -> Tensor:
    """Find the stretch of `length` tokens that shares most with a query, (B, length); of equal ones the latest.

    Args:
        query: tokens, (B, n), long.
        ids: tokens of the remembered segments, oldest first, (B, c, L'), long; L' is a multiple of `length`.
        valid: False where a row has no such segment, (B, c), bool.
    """
    stretches = ids.unflatten(2, (-1, length)).flatten(1, 2).contiguous()  # (B, s, length)
    valid = valid.repeat_interleave(stretches.shape[1] // valid.shape[1], dim=1)  # (B, s)
    # of equal tokens the last one comes first, which is the one that is found
    query, order = query.flip(1).sort(dim=1, stable=True)
    weights = (-order / FADE).exp()[:, None]
    place = torch.searchsorted(query, stretches.flatten(1)).clamp(max=query.shape[1] - 1)  # of a token in the query
    found = query.gather(1, place) == stretches.flatten(1)
    counts = torch.zeros(*valid.shape, query.shape[1], device=query.device)  # of each token of the query
    counts.scatter_add_(2, place.view_as(stretches), found.view_as(stretches).to(counts))
    counts *= valid[..., None]
    containing, of_all = (counts > 0).sum(1, keepdim=True), valid.sum(1)[:, None, None]
    idf = (1 + (of_all - containing + 0.5) / (containing + 0.5)).log()
    scores = (weights * idf * counts * (K1 + 1) / (counts + K1)).sum(2).masked_fill(~valid, -1)
    best = scores.shape[1] - 1 - scores.flip(1).argmax(1)
    return stretches[torch.arange(len(best), device=best.device), best]


__all__ = ["Search", "find_tokens"]
