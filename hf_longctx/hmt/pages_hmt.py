"""The second level of memory: the bank drops embeddings into pages, and a recall selects pages.

A page contains similar embeddings from anywhere in the sequence. Its tag is the mean of its embeddings. A new
embedding goes to the page with the nearest tag. Distances are angles around the mean of all embeddings, because the
embeddings of a sequence share a large common component. A page contains at most S embeddings (defined below). If it
grows beyond S, it is split in half along its principal component. Tags are scored like embeddings. In each
row, a recall selects the r pages with the best scores, and attends to their embeddings. If there are at most r pages,
it attends to all embeddings. The result then equals a recall from a flat memory without pages.

With n embeddings, S is the larger of `page_size` and sqrt(n / r). A recall attends to at most r S embeddings. After a
split, a page must receive S / 2 embeddings before it splits again. This limits the number of tags to 4 sqrt(r n). The
cost of a segment therefore grows with the square root of the sequence length.

`python -m scripts.bench.pages` compares pages with a flat memory. It counts how often the selected pages contain the
embedding with the highest score. It uses unrelated vectors, and memories from reading a novel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .bank_hmt import Bank
from .configuration_hmt import HMTConfig
from .memory_hmt import mean_memory
from .retriever_hmt import Retrieved, Segment, register_retriever


@dataclass
class MemoryPages:
    """The pages of one row. They contain the n memory embeddings that the bank of the row has dropped.

    This object is immutable: `append` returns a new object. States can therefore branch, and rows can share pages.

    page_size: initial maximum number of embeddings per page.
    recalled: r, the number of pages that a recall attends to.
    empty_page: (0, d), on the CPU, in the dtype of the embeddings.
    sums: (P, d) fp32, the sum of the embeddings of each page.
    members: tuple of P tuples of ints, the indices of the embeddings in each page.
    pages: tuple of P tensors (t, d), the embeddings of each page.
    """

    page_size: int
    recalled: int
    empty_page: Tensor
    sums: Tensor
    members: tuple[tuple[int, ...], ...] = ()
    pages: tuple[Tensor, ...] = ()

    @classmethod
    def empty(
        cls, width: int, dtype: torch.dtype, device: torch.device | str, page_size: int, recalled: int
    ) -> "MemoryPages":
        """Return an empty `MemoryPages`. Its tags are on `device`, and its embeddings in CPU memory."""
        sums = torch.zeros(0, width, dtype=torch.promote_types(dtype, torch.float32), device=device)
        return cls(page_size, recalled, torch.zeros(0, width, dtype=dtype), sums)

    def __len__(self) -> int:
        """Return n, the number of embeddings."""
        return sum(map(len, self.members))

    def append(self, embeddings: Tensor) -> "MemoryPages":
        """Return pages with `embeddings` (n, d) added. The embeddings are in the order of the sequence."""
        pages = replace(self, sums=self.sums.clone())
        with torch.autocast(self.sums.device.type, enabled=False), torch.autocast("cpu", enabled=False):
            for embedding in embeddings:
                pages._put(embedding[None])
        return pages

    def _put(self, embedding: Tensor) -> None:
        """Add the embedding (1, d) to the page with the nearest tag, in place."""
        number, detached = len(self), embedding.detach().to(self.sums, copy=True)
        embedding = embedding.to(self.empty_page.device)
        if number == 0:
            self.members, self.pages, self.sums = ((0,),), (embedding.clone(),), detached
            return
        mean = self.sums.sum(0) / number
        page = int((F.normalize(self.tags() - mean, dim=-1) @ (detached[0] - mean)).argmax())
        self._replace(page, [(*self.members[page], number)], [torch.cat([self.pages[page], embedding])])
        self.sums[page] += detached[0]
        if len(self.members[page]) > max(self.page_size, int((number / self.recalled) ** 0.5)):
            self._split(page, mean)

    def _replace(self, page: int, members: list[tuple[int, ...]], pages: list[Tensor]) -> None:
        """Replace a page with one or more pages, in place."""
        self.members = (*self.members[:page], *members, *self.members[page + 1 :])
        self.pages = (*self.pages[:page], *pages, *self.pages[page + 1 :])

    def _split(self, page: int, mean: Tensor) -> None:
        """Move half of a page to a new one, in place. `mean` (d,) is the mean of all embeddings."""
        mean, numbers = mean.to(self.empty_page.device), torch.tensor(self.members[page])
        embeddings = self.pages[page].detach().to(mean)
        directions = F.normalize(embeddings - mean, dim=-1)
        centred = directions - directions.mean(0)
        products = (centred @ centred.mT).nan_to_num(0, 0, 0)  # non-finite memories fail later, in the recall
        places = torch.linalg.eigh(products).eigenvectors[:, -1]  # coordinates along the principal component
        halves = [half.sort().values for half in places.argsort().tensor_split(2)]
        sums = torch.stack([embeddings[half].sum(0) for half in halves]).to(self.sums)
        self.sums = torch.cat([self.sums[:page], sums, self.sums[page + 1 :]])
        members = [tuple(numbers[half].tolist()) for half in halves]
        self._replace(page, members, [self.pages[page][half] for half in halves])

    def tags(self) -> Tensor:
        """Return the mean of each page, (P, d)."""
        return self.sums / torch.tensor([*map(len, self.members)], device=self.sums.device)[:, None]

    def look_up(self, score: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the embeddings that a recall attends to, oldest first, on the device of the tags.

        Args:
            score: maps tags (P, d) to recall scores (P,).

        Returns:
            Embeddings (c, d) and their indices (c,), long.
        """
        with torch.no_grad():
            chosen = score(self.tags()).topk(min(len(self.members), self.recalled)).indices.tolist()
        numbers = torch.tensor([number for page in chosen for number in self.members[page]], dtype=torch.long)
        numbers, order = numbers.sort()
        embeddings = torch.cat([self.empty_page, *(self.pages[page] for page in chosen)])[order]
        return embeddings.to(self.sums.device), numbers.to(self.sums.device)

    def to(self, device: torch.device | str) -> "MemoryPages":
        """Move the tags to another device. Embeddings are not moved."""
        return replace(self, sums=self.sums.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> "MemoryPages":
        """Return pages with `function` applied to each tensor."""
        pages = (*map(function, self.pages),)
        return replace(self, empty_page=function(self.empty_page), sums=function(self.sums), pages=pages)

    def pack(self) -> tuple[dict[str, Tensor], dict]:
        """Return the tensors and numbers from which `unpack` restores the pages."""
        members = torch.tensor([number for page in self.members for number in page], dtype=torch.long)
        tensors = {"pages": torch.cat([self.empty_page, *self.pages]), "sums": self.sums, "members": members}
        sizes = [*map(len, self.members)]
        return tensors, {"page_size": self.page_size, "recalled": self.recalled, "sizes": sizes}

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor], numbers: dict) -> "MemoryPages":
        """Restore the pages from the output of `pack`."""
        for name in ("page_size", "recalled"):
            if not isinstance(numbers[name], int) or numbers[name] < 1:
                raise ValueError(f"`{name}` must be a positive int, got {numbers[name]!r}")
        pages, sizes = tensors["pages"].cpu(), numbers["sizes"]
        members = tuple(tuple(page.tolist()) for page in tensors["members"].cpu().split(sizes))
        empty_page, sums = pages[:0], tensors["sums"]
        return cls(numbers["page_size"], numbers["recalled"], empty_page, sums, members, pages.split(sizes))


@register_retriever("pages")
class Pages(Bank):
    """A bank whose dropped embeddings are stored in pages.

    Memory: `embeddings` and `ends` as in `Bank`; `pages`, a tuple of B `MemoryPages`.
    """

    rows = {"pages": MemoryPages}

    @classmethod
    def is_used(cls, config: HMTConfig) -> bool:
        """Return whether `recalled_pages` is set."""
        return config.recalled_pages is not None

    def empty(self, rows: int, like: Tensor) -> dict[str, Any]:
        """Return an empty bank and empty pages."""
        recalled = self.config.recalled_pages or 1
        pages = MemoryPages.empty(like.shape[-1], like.dtype, like.device, self.config.page_size, recalled)
        return super().empty(rows, like) | {"pages": (pages,) * rows}

    def observe(self, state: dict[str, Any], segment: Segment) -> dict[str, Any]:
        """Append the memory of a segment to the bank. Append the memory dropped by the bank to the pages."""
        drops = [number >= (self.config.memory_size or 0) for number in segment.numbers]
        dropped = state["embeddings"][:, :1]
        pages = tuple(row.append(x) if drop else row for row, x, drop in zip(state["pages"], dropped, drops))
        return super().observe(state, segment) | {"pages": pages}

    def retrieve(self, state: dict[str, Any], query: Tensor | None, ids: Tensor) -> Retrieved:
        """Return the prompt that each row recalls from its bank and its best pages, (B, 1, d)."""
        if query is None:
            return super().retrieve(state, query, ids)
        pages, valid = state["pages"], state["ends"] > 0
        bank = state["embeddings"].to(pages[0].sums.dtype)
        sums = torch.stack([row.sums.sum(0, keepdim=True) for row in pages])
        counts = torch.tensor([len(row) for row in pages], device=bank.device)
        origin, count = mean_memory(bank, valid, sums, counts)

        def score(tags: Tensor, i: int) -> Tensor:
            row = slice(i, i + 1)
            return self.memory.scores(query[row], tags[None], origin[row], count[row]).squeeze(0)

        looked_up = [row.look_up(partial(score, i=i)) for i, row in enumerate(pages)]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        found = pad([embeddings for embeddings, _ in looked_up])
        ends = pad([self.config.segment_length * (numbers + 1) for _, numbers in looked_up])
        # gradients of the origin flow to the recalled embeddings
        total = sums + (found - found.detach()).to(sums).sum(1, keepdim=True)
        bank, ends = torch.cat([found, state["embeddings"]], 1), torch.cat([ends, state["ends"]], 1)
        of_all = mean_memory(state["embeddings"].to(sums), valid, total, counts)
        prompt, weights = self.memory.recall(query, bank, ends > 0, *of_all)
        return Retrieved(prompt, weights, ends)

    @classmethod
    def listed(cls, state: dict[str, Any], length: int) -> list[list[int]]:
        """For each row, list the `Segment.ends` of the remembered segments. `length` is L'.

        Segments in pages precede segments in the bank.
        """
        rows = super().listed(state, length)
        return [[length * (i + 1) for i in range(len(pages))] + row for pages, row in zip(state["pages"], rows)]


__all__ = ["MemoryPages", "Pages"]
