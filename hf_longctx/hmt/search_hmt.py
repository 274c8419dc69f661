"""Search for tokens to re-read: `recall_tokens` of `HMTConfig`.

The remembered segments are split into passages of r tokens. A query retrieves the passage with the highest BM25 score
over token ids (Robertson and Zaragoza 2009, with Lucene's idf). All passages are equally long, so BM25's length
normalization is not needed. The next token depends most on the last tokens of the query. A token that is n positions
before the end of the query therefore has weight exp(-n / 8).
"""

from typing import Any

import torch
from torch import Tensor

from .retriever_hmt import Retrieved, Retriever, Segment, register_retriever, remember


K1 = 1.2  # BM25's term-frequency saturation, at its usual value
FADE = 8  # distance in tokens at which the weight of a query token falls to 1 / e


@register_retriever("search")
class Search(Retriever):
    """A retriever that searches the latest `memory_size` segments with BM25. A segment re-reads the best passage.

    Memory: `ids` (B, c, L') and `ends` (B, c).
    """

    field = "recall_tokens"

    @property
    def columns(self) -> int:
        """Number of tokens to re-read."""
        return self.config.recall_tokens or 0

    def empty(self, rows: int, like: Tensor) -> dict[str, Any]:
        """Return an empty memory."""
        ends = torch.zeros(rows, 0, dtype=torch.long, device=like.device)
        return {"ids": ends[..., None].expand(-1, -1, self.config.segment_length), "ends": ends}

    def retrieve(self, state: dict[str, Any], query: Tensor | None, ids: Tensor) -> Retrieved:
        """Return the embeddings of the passage that best matches the first part of the segment."""
        return Retrieved(self.embed(find_tokens(ids, state["ids"], state["ends"] > 0, self.columns)))

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Append the tokens of a segment."""
        return remember(state, segment, self.config.memory_size, ids=segment.ids[:, None])


def find_tokens(query: Tensor, ids: Tensor, valid: Tensor, length: int) -> Tensor:
    """Return the passage of `length` tokens with the highest BM25 score, (B, length). Ties go to the latest passage.

    Args:
        query: token ids, (B, n), long.
        ids: token ids of the remembered segments, oldest first, (B, c, L'), long; L' is a multiple of `length`.
        valid: (B, c), bool, False where a row does not have the segment.
    """
    passages = ids.unflatten(2, (-1, length)).flatten(1, 2).contiguous()  # (B, s, length) with s passages per row
    valid = valid.repeat_interleave(passages.shape[1] // valid.shape[1], dim=1)  # (B, s)
    # After the flip and the stable sort, the last of equal query tokens comes first. searchsorted finds the first.
    query, order = query.flip(1).sort(dim=1, stable=True)
    weights = (-order / FADE).exp()[:, None]
    place = torch.searchsorted(query, passages.flatten(1)).clamp(max=query.shape[1] - 1)  # indices in the query
    found = query.gather(1, place) == passages.flatten(1)
    counts = torch.zeros(
        *valid.shape, query.shape[1], device=query.device
    )  # number of occurrences of each query token in each passage
    counts.scatter_add_(2, place.view_as(passages), found.view_as(passages).to(counts))
    counts *= valid[..., None]
    containing, of_all = (counts > 0).sum(1, keepdim=True), valid.sum(1)[:, None, None]
    idf = (1 + (of_all - containing + 0.5) / (containing + 0.5)).log()
    scores = (weights * idf * counts * (K1 + 1) / (counts + K1)).sum(2).masked_fill(~valid, -1)
    best = scores.shape[1] - 1 - scores.flip(1).argmax(1)
    return passages[torch.arange(len(best), device=best.device), best]
