"""The memory of the paper: a bank of memory embeddings. A recall attends to the bank."""

from typing import Any

import torch
from torch import Tensor

from .configuration_hmt import HMTConfig
from .retriever_hmt import Retrieved, Retriever, Segment, register_retriever, remember


@register_retriever("bank")
class Bank(Retriever):
    """A retriever with a bank C: the memory embeddings of the latest `memory_size` segments.

    The prompt is softmax(scores) C. Without recall, the prompt is the latest memory.

    Memory: `embeddings` (B, c, d), oldest first; `ends` (B, c), the `Segment.ends` of the segments.
    """

    columns = 1

    @classmethod
    def is_used(cls, config: HMTConfig) -> bool:
        """Return True if `retrievers` is None."""
        return config.retrievers is None

    def empty(self, rows: int, like: Tensor) -> dict[str, Any]:
        """Return an empty bank."""
        ends = torch.zeros(rows, 0, dtype=torch.long, device=like.device)
        return {"embeddings": like.new_zeros(rows, 0, like.shape[-1]), "ends": ends}

    def retrieve(self, state: dict[str, Any], query: Tensor | None, ids: Tensor) -> Retrieved:
        """Return the recalled prompt, (B, 1, d). Without recall, return the latest memory, (B, m, d)."""
        if query is None or not self.config.recall:
            return Retrieved(state["embeddings"][:, -self.config.memory_tokens :])
        prompt, weights = self.memory.recall(query, state["embeddings"], state["ends"] > 0)
        return Retrieved(prompt, weights, state["ends"])

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Append the memory of a segment, and drop the oldest memory if the bank is full."""
        size = self.config.memory_size if self.config.recall else self.config.memory_tokens
        ends = segment.ends[:, None].expand(segment.memory.shape[:2])
        return remember(state, segment, size, embeddings=segment.memory, ends=ends)
