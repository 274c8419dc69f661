"""The protocol of retrievers, which decide what a segment gets from the segments before it, and their registry.

HMT uses retrievers by this protocol only. A retriever remembers full segments (`observe`), gives the next segment
embeddings to read (`retrieve`), and may change its logits (`mix`). Its memory of a batch is a dict that no method
changes, so that states of a stream can branch.

The values of that dict are tensors (B, n, ...), whose n may grow: an `HMTState` selects, joins, saves and loads their
rows. Where rows of a batch remember different numbers of segments, shorter ones have zeros in front, so an entry
exists where its `ends` are not 0. `rows` lists values that are not tensors.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .configuration_hmt import HMTConfig
from .memory_hmt import HMTMemory


RetrieverClass = TypeVar("RetrieverClass", bound=type["Retriever"])
RETRIEVERS: dict[str, type["Retriever"]] = {}  # by name, in the order in which a segment reads what they give


class Segment(NamedTuple):
    """A full segment of each row, as a retriever observes it.

    ids: its tokens, (B, L'), long.
    memory: its memory embeddings, (B, m, d).
    numbers: for each row, the number of segments before.
    hidden: last hidden states of its tokens, (B, L', d), for retrievers with `reads_hidden`; else None.
    """

    ids: Tensor
    memory: Tensor
    numbers: list[int]
    hidden: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        """Number of tokens of the sequence up to the end of the segment, (B,), long."""
        length = self.ids.shape[1]
        return long_tensor([length * (number + 1) for number in self.numbers], self.ids.device)


class Retrieved(NamedTuple):
    """The result of `Retriever.retrieve`.

    embeds: the embeddings that the segment reads, (B, columns, d).
    weights: weights of the remembered segments in `embeds`, for `output_recall`, (B, c); or None.
    ends: the ends of these segments, (B, c), long, 0 where a row does not have the segment; or None.
    """

    embeds: Tensor
    weights: Tensor | None = None
    ends: Tensor | None = None


class Retriever:
    """The protocol, and a retriever that remembers nothing.

    Args:
        config: that of the model.
        memory: the model's memory parameters, such as the projections of a recall.
        embed: embeds tokens, (B, T) -> (B, T, d).

    Attributes:
        columns: number of embeddings that `retrieve` returns. The first one of all retrievers is the prompt, which the
            tokens behind the query see. The others, `config.recall_tokens`, stand behind it, and all tokens see them.
        reads_hidden: whether `observe` needs the last hidden states of a segment.
        takes_file: whether `empty` takes a file.
        rows: the classes of values that are tuples with an object for each row, with the methods `map`, `to`,
            `pack` and `unpack` of `MemoryPages`.
    """

    columns = 0
    reads_hidden = False
    takes_file = False
    rows: dict[str, Any] = {}

    def __init__(self, config: HMTConfig, memory: HMTMemory, embed: Callable[[Tensor], Tensor]):
        self.config, self.memory, self.embed = config, memory, embed

    @classmethod
    def is_used(cls, config: HMTConfig) -> bool:
        """Say whether a model has this retriever if `config.retrievers` does not list any."""
        return False

    def empty(self, rows: int, like: Tensor) -> dict[str, Any]:
        """Return the memory of rows that have read nothing.

        Args:
            rows: B.
            like: an embedding (..., d), whose dtype and device memory embeddings have.
        """
        return {}

    def retrieve(self, state: dict[str, Any], query: Tensor | None, ids: Tensor) -> Retrieved:
        """Return the embeddings that a segment reads in front of its tokens. Each row remembers at least one segment.

        Args:
            state: the memory.
            query: the hidden state of the summary token behind `ids`, (B, 1, d); None without recall.
            ids: the first j tokens of the segment, (B, j), long.
        """
        raise NotImplementedError

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Return the memory after a segment that is full in each row."""
        return state

    def mix(self, state: dict[str, Any], logits: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits (B, n, V) of a segment with the prediction of the memory.

        Args:
            state: the memory of the segments before.
            hidden: the last hidden states of which the logits were made, (B, n, d).
        """
        return logits

    @classmethod
    def listed(cls, state: dict[str, Any], length: int) -> list[list[int]]:
        """List for each row the ends of the segments that the memory holds, of `length` tokens each, oldest first."""
        return [[end for end in row if end] for row in state["ends"].tolist()] if "ends" in state else []


class Retrievers(Retriever):
    """Several retrievers as one. Its memory holds the memory of each, by its name."""

    def __init__(self, parts: dict[str, Retriever]):
        self.parts = parts
        self.columns = sum(part.columns for part in parts.values())
        self.reads_hidden = any(part.reads_hidden for part in parts.values())
        self.mixes = any(type(part).mix is not Retriever.mix for part in parts.values())

    def empty(self, rows: int, like: Tensor, file: str | Path | None = None) -> dict[str, Any]:
        """Return the memory of rows that have read nothing; `file` goes to the retriever that takes one."""
        files = {name: {"file": file} for name, part in self.parts.items() if part.takes_file and file is not None}
        if file is not None and not files:
            raise ValueError(
                "page_file is a file for pages, and this model does not use pages; set config.recalled_pages, or leave "
                "page_file out."
            )
        return {name: part.empty(rows, like, **files.get(name, {})) for name, part in self.parts.items()}

    def retrieve(self, state: dict[str, Any], query: Tensor | None, ids: Tensor) -> Retrieved:
        """Return the embeddings of all retrievers, and the weights of the first that has some."""
        found = [part.retrieve(state[name], query, ids) for name, part in self.parts.items() if part.columns]
        embeds = torch.cat([x.embeds.to(found[0].embeds) for x in found], 1)
        weighted = next((x for x in found if x.weights is not None), found[0])
        return weighted._replace(embeds=embeds)

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Return the memory after a segment that is full in each row."""
        return {name: part.observe(state[name], segment) for name, part in self.parts.items()}

    def mix(self, state: dict[str, Any], logits: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits with the predictions of all retrievers, in turn."""
        for name, part in self.parts.items():
            logits = part.mix(state[name], logits, hidden)
        return logits


def register_retriever(name: str) -> Callable[[RetrieverClass], RetrieverClass]:
    """Register a retriever, so that `HMTConfig(retrievers=[name])` takes it. Use it as a decorator of the class."""

    def decorate(cls: RetrieverClass) -> RetrieverClass:
        if not name.isidentifier():
            raise ValueError(f"`name` must be an identifier, which names tensors of a file, got {name!r}.")
        RETRIEVERS[name] = cls
        return cls

    return decorate


def build_retrievers(config: HMTConfig, memory: HMTMemory, embed: Callable[[Tensor], Tensor]) -> Retrievers:
    """Build the retrievers of a model.

    Raises:
        ValueError: a name that is not registered; retrievers that do not fit the other fields.
    """
    asked_for = [name for name, cls in RETRIEVERS.items() if cls.is_used(config)]
    names = config.retrievers or asked_for
    unknown = [name for name in names if name not in RETRIEVERS]
    if unknown:
        raise ValueError(
            f"`retrievers` must be names among {list(RETRIEVERS)}, got {unknown}. Import the file that registers them "
            "before you build or load the model."
        )
    if left_out := [name for name in asked_for if name not in names]:
        raise ValueError(
            f"`retrievers` must list {left_out}, which other fields ask for, got {names}. Add or unset them."
        )
    retrievers = Retrievers({name: RETRIEVERS[name](config, memory, embed) for name in names})
    if retrievers.columns != 1 + (config.recall_tokens or 0):
        raise ValueError(
            f"`retrievers` must give a prompt and `recall_tokens` more embeddings, 1 + {config.recall_tokens or 0}, got "
            f"{retrievers.columns} from {names}. Set recall_tokens, or the `columns` of a retriever."
        )
    return retrievers


def remember(state: dict[str, Tensor], segment: Segment, size: int | None, **new: Tensor) -> dict[str, Tensor]:
    """Append a segment's entry to tensors (B, c, ...), and keep the latest `size` entries.

    Args:
        state: `ends` (B, c), and tensors of the names in `new`.
        size: maximum number of entries; None keeps those of all segments.
        new: the entries (B, 1, ...).
    """
    kept = size or 1 + max(segment.numbers)  # otherwise each closing row would pad the others with an empty entry
    new = {"ends": segment.ends[:, None], **new}
    return {name: torch.cat([state[name], x.to(state[name])], 1)[:, -kept:] for name, x in new.items()}


def long_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """Make a tensor (n,) of numbers. Equal or consecutive ones are not copied, which would synchronize with a GPU."""
    first, count = values[0], len(values)
    if all(value == first for value in values):
        return torch.full((count,), first, device=device)
    if list(values) == list(range(first, first + count)):
        return torch.arange(first, first + count, device=device)
    return torch.tensor(values, device=device)


__all__ = [
    "RETRIEVERS",
    "Retrieved",
    "Retriever",
    "Retrievers",
    "Segment",
    "build_retrievers",
    "long_tensor",
    "register_retriever",
    "remember",
]
