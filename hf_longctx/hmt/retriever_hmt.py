"""The protocol and the registry of retrievers. A retriever selects what a segment reads from previous segments.

HMT uses retrievers only through this protocol. A retriever remembers full segments (`observe`). It returns embeddings,
and the next segment reads them (`retrieve`). It may change the logits of that segment (`mix`). A retriever's memory of
a batch is a dict. Methods must not change this dict in place, so that states can branch.

The values of the dict are tensors (B, n, ...). The length n may grow. `HMTState` selects, joins, saves and loads the
rows of these tensors. If rows remember different numbers of segments, shorter rows are padded with zeros on the left.
`ends` is 0 on this padding.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .configuration_hmt import HMTConfig
from .memory_hmt import HMTMemory


RetrieverClass = TypeVar("RetrieverClass", bound=type["Retriever"])
RETRIEVERS: dict[str, type["Retriever"]] = {}  # classes keyed by name, in the order of their embeddings in a segment


class Segment(NamedTuple):
    """A full segment of each row. `Retriever.observe` adds it to a memory.

    ids: token ids, (B, L'), long.
    memory: memory embeddings, (B, m, d).
    numbers: for each row, the index of the segment in the sequence.
    hidden: last hidden states of the tokens, (B, L', d). None if no retriever sets `reads_hidden`.
    """

    ids: Tensor
    memory: Tensor
    numbers: list[int]
    hidden: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        """For each row, the number of tokens from the start of the sequence to the end of the segment, (B,), long."""
        length = self.ids.shape[1]
        return long_tensor([length * (number + 1) for number in self.numbers], self.ids.device)


class Retrieved(NamedTuple):
    """Result of `Retriever.retrieve`.

    embeds: embeddings that the segment reads, (B, columns, d).
    weights: recall weights of the remembered segments, (B, c), for `output_recall`; or None.
    ends: `Segment.ends` of these segments, (B, c), long; or None. If a row does not have a segment, its end is 0.
    """

    embeds: Tensor
    weights: Tensor | None = None
    ends: Tensor | None = None


class Retriever:
    """Base class of retrievers. Its memory is always empty.

    Args:
        config: the model's configuration.
        memory: the model's memory parameters, such as the recall projections.
        embed: embeds token ids, (B, T) -> (B, T, d).

    Attributes:
        field: field of `HMTConfig` that enables the retriever when it is set.
        columns: number of embeddings that `retrieve` returns. The first embedding of the first retriever is the
            prompt. Only tokens after the query attend to the prompt. All tokens attend to the other embeddings. In
            total, the retrievers return one prompt and `config.recall_tokens` other embeddings.
        reads_hidden: whether `observe` needs the last hidden states of a segment.
    """

    field: str | None = None
    columns = 0
    reads_hidden = False

    def __init__(self, config: HMTConfig, memory: HMTMemory, embed: Callable[[Tensor], Tensor]):
        self.config, self.memory, self.embed = config, memory, embed

    @classmethod
    def is_used(cls, config: HMTConfig) -> bool:
        """Return whether a model uses this retriever when `config.retrievers` is None."""
        return cls.field is not None and getattr(config, cls.field) is not None

    def empty(self, rows: int, like: Tensor) -> dict[str, Any]:
        """Return the memory before the first segment.

        Args:
            rows: B, number of rows.
            like: tensor (..., d) with the dtype and device of memory embeddings.
        """
        return {}

    def retrieve(self, state: dict[str, Any], query: Tensor | None, ids: Tensor) -> Retrieved:
        """Return the embeddings that a segment reads before its tokens. Each row must remember at least one segment.

        Args:
            state: the memory.
            query: hidden state of the summary token after `ids`, (B, 1, d). Without recall, None.
            ids: the first j tokens of the segment, (B, j), long.
        """
        raise NotImplementedError

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Add a full segment of each row to the memory, and return the new memory."""
        return state

    def mix(self, state: dict[str, Any], logits: Tensor, hidden: Tensor) -> Tensor:
        """Mix the predictions of this retriever into a segment's logits (B, n, V), and return the logits.

        Args:
            state: the memory of the previous segments.
            hidden: last hidden states from which the logits were computed, (B, n, d).
        """
        return logits


class Retrievers(Retriever):
    """All retrievers of a model. Their memory is a dict of the retrievers' memories, keyed by name.

    Raises:
        ValueError: a name is not registered, or the retrievers do not match the other fields of the config.
    """

    def __init__(self, config: HMTConfig, memory: HMTMemory, embed: Callable[[Tensor], Tensor]):
        asked_for = [name for name, cls in RETRIEVERS.items() if cls.is_used(config)]
        names = config.retrievers or asked_for
        if unknown := [name for name in names if name not in RETRIEVERS]:
            raise ValueError(
                f"`retrievers` must be chosen from {list(RETRIEVERS)}, got {unknown}. Import the file that registers "
                "them before you build or load the model."
            )
        if left_out := [name for name in asked_for if name not in names]:
            raise ValueError(
                f"`retrievers` must include {left_out}, got {names}. Other fields of the config require {left_out}. "
                "Add the missing retrievers, or unset these fields."
            )
        self.parts = {name: RETRIEVERS[name](config, memory, embed) for name in names}
        self.columns = sum(part.columns for part in self.parts.values())
        self.reads_hidden = any(part.reads_hidden for part in self.parts.values())
        self.mixes = any(type(part).mix is not Retriever.mix for part in self.parts.values())
        if self.columns != 1 + (config.recall_tokens or 0):
            raise ValueError(
                f"The columns of `retrievers` must sum to {1 + (config.recall_tokens or 0)}, got {self.columns} from "
                f"{names}. The prompt needs one column, and recall_tokens needs {config.recall_tokens or 0} more. Set "
                "recall_tokens, or the `columns` of a retriever."
            )

    def empty(self, rows: int, like: Tensor) -> dict[str, Any]:
        """Return the memory before the first segment."""
        return {name: part.empty(rows, like) for name, part in self.parts.items()}

    def retrieve(self, state: dict[str, Any], query: Tensor | None, ids: Tensor) -> Retrieved:
        """Return the embeddings of all retrievers, and the weights of the first retriever that returns weights."""
        found = [part.retrieve(state[name], query, ids) for name, part in self.parts.items() if part.columns]
        embeds = torch.cat([x.embeds.to(found[0].embeds) for x in found], 1)
        weighted = next((x for x in found if x.weights is not None), found[0])
        return weighted._replace(embeds=embeds)

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Add a full segment of each row to the memory, and return the new memory."""
        return {name: part.observe(state[name], segment) for name, part in self.parts.items()}

    def mix(self, state: dict[str, Any], logits: Tensor, hidden: Tensor) -> Tensor:
        """Apply `mix` of each retriever to the logits, one retriever after the other. Return the logits."""
        for name, part in self.parts.items():
            logits = part.mix(state[name], logits, hidden)
        return logits


def register_retriever(name: str) -> Callable[[RetrieverClass], RetrieverClass]:
    """Register a retriever for `HMTConfig(retrievers=[name])`. Use it as a class decorator."""

    def decorate(cls: RetrieverClass) -> RetrieverClass:
        if not name.isidentifier():
            raise ValueError(
                f"`name` must be a Python identifier, got {name!r}. The names of saved tensors contain it."
            )
        RETRIEVERS[name] = cls
        return cls

    return decorate


def remember(state: dict[str, Tensor], segment: Segment, size: int | None, **new: Tensor) -> dict[str, Tensor]:
    """Append a segment's entries to tensors (B, c, ...), and retain the latest `size` entries.

    Args:
        state: `ends` (B, c), and a tensor for each name in `new`.
        size: maximum number of entries. None: all are retained.
        new: the entries to append, (B, 1, ...).
    """
    kept = size or 1 + max(segment.numbers)  # a limit, because a row that ends a segment adds padding to the others
    new = {"ends": segment.ends[:, None], **new}
    return {name: torch.cat([state[name], x.to(state[name])], 1)[:, -kept:] for name, x in new.items()}


def long_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """Return ints as a tensor (n,). Equal or consecutive ints are created on the GPU without synchronization."""
    first, count = values[0], len(values)
    if all(value == first for value in values):
        return torch.full((count,), first, device=device)
    if list(values) == list(range(first, first + count)):
        return torch.arange(first, first + count, device=device)
    return torch.tensor(values, device=device)
