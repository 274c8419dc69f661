"""The second level of memory: embeddings that fell out of the bank are kept in pages, and a recall chooses pages.

Embeddings fill pages in the order of the text. The tag of a page is the mean of its embeddings, so the recall score of
a tag is the mean score of the page (in the single mode, of embeddings that were not brought to one length). A recall
scores the tags, takes the best r pages of each row, and attends to the embeddings in them. A recall always attends to
the newest embeddings, which do not fill a page yet.

With n embeddings in pages of S, a recall scores n / S tags and r S embeddings. Pages start with `page_size`
embeddings; when there are more than 4 r S pages, neighbours join, and S doubles. From then on there are at most 2
sqrt(r n) tags and sqrt(r n) recalled embeddings: the cost of a segment grows with the square root of the text. Up to r
pages are all recalled, and the result is that of one flat memory.

An embedding stands out in the tag of its page by sqrt(d / S) standard deviations if all are unrelated, and by less
where they have much in common. Among ten thousand random embeddings of width 512, a recall finds most
(`python -m scripts.bench.hmt pages`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import torch


_STORING = Lock()  # branches of one state, read by several threads, share a file
TAGS_PER_EMBEDDING = 4  # a tag costs less: it is only scored; an embedding is fetched, copied, scored and averaged


class PageFile:
    """A file of pages, mapped into memory: the operating system reads from disk what a recall touches.

    Args:
        path: the file; it is overwritten, and only the states that use it can read it.
    """

    def __init__(self, path):
        self.path, self.used = Path(path), 0
        self.path.unlink(missing_ok=True)
        self._map(1)
        self.inode = self.path.stat().st_ino

    def store(self, block):
        """A copy of `block` that lives in the file. ValueError: a gradient would be lost, or the file was replaced."""
        if block.requires_grad:
            raise ValueError(
                f"Memories that go to {self.path} lose their gradient. Read under torch.no_grad(), or start without a "
                "page file: pages in RAM keep gradients."
            )
        size = block.numel() * block.element_size()
        with _STORING:
            if self.used + size > len(self.mapped):
                if not self.path.exists() or self.path.stat().st_ino != self.inode:
                    raise ValueError(
                        f"{self.path} is no longer the file of this state: another state was started with the same "
                        "page_file, or the file was removed. Give each new_state a page_file of its own."
                    )
                # Doubling keeps the mappings few. Most file systems store no zeros that were never written.
                self._map(2 * (self.used + size))
            place = self.mapped[self.used : self.used + size].view(block.dtype).view(block.shape)
            self.used += size
        return place.copy_(block)

    def _map(self, size):
        with self.path.open("ab") as file:
            file.truncate(size)  # `from_file` would do it too, and set the first byte of the file to 0
        self.mapped = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)


@dataclass
class MemoryPages:
    """Pages of the n memory embeddings that one row has dropped. Immutable: `append` returns a new object, so states
    can branch, and rows can share pages.

    block_size: embeddings per block, the unit of storage; a page is `page_blocks` neighbouring blocks.
    recalled: r, pages that a recall attends to; S = block_size * page_blocks embeddings each.
    blocks: tuple of (block_size, d), in CPU memory or in `file`.
    rest: (t, d), t < block_size, the newest embeddings, which do not fill a block yet.
    sums: (P, d) fp32, of the embeddings of each page; sums / S are the tags.
    """

    block_size: int
    recalled: int
    rest: torch.Tensor
    sums: torch.Tensor
    blocks: tuple = ()
    page_blocks: int = 1
    file: PageFile | None = None

    @classmethod
    def empty(cls, width, dtype, device, block_size, recalled, file=None):
        """No pages yet. Tags live on `device`, embeddings in CPU memory."""
        sums = torch.zeros(0, width, dtype=torch.promote_types(dtype, torch.float32), device=device)
        return cls(block_size, recalled, torch.zeros(0, width, dtype=dtype), sums, file=file)

    def __getstate__(self):
        """Pickles and deep copies are in RAM: a second `PageFile` at the same path would write over the first."""
        return {**vars(self), "blocks": tuple(block.clone() for block in self.blocks), "file": None}

    def emptied(self):
        """Pages like these without any embedding."""
        return replace(self, rest=self.rest[:0], sums=self.sums[:0], blocks=(), page_blocks=1)

    def __len__(self):
        """n, embeddings in all."""
        return len(self.blocks) * self.block_size + len(self.rest)

    def append(self, embeddings):
        """New pages with `embeddings` (n, d) added, oldest first."""
        rest, blocks, size = (
            torch.cat([self.rest, embeddings.to(self.rest.device)]),
            list(self.blocks),
            self.block_size,
        )
        while len(rest) >= size:
            block, rest = rest[:size], rest[size:]
            blocks.append(block if self.file is None else self.file.store(block))
        pages = replace(self, rest=rest)
        return pages if len(blocks) == len(self.blocks) else replace(pages, blocks=(*blocks,))._tag()

    def _tag(self):
        """Tag the pages that have become full, and join neighbours when there are too many pages."""
        sums, width = [self.sums], self.page_blocks
        for start in range(len(self.sums) * width, len(self.blocks) - width + 1, width):
            page = torch.cat(self.blocks[start : start + width])
            sums.append(page.to(self.sums.device, self.sums.dtype).sum(0, keepdim=True))
        pages = replace(self, sums=torch.cat(sums))
        while len(pages.sums) > TAGS_PER_EMBEDDING * self.recalled * self.block_size * pages.page_blocks:
            pairs = len(pages.sums) // 2  # an odd last page goes back to the blocks that are in no page
            sums = pages.sums[: 2 * pairs].unflatten(0, (pairs, 2)).sum(1)
            pages = replace(pages, sums=sums, page_blocks=2 * pages.page_blocks)
        return pages

    def look_up(self, direction):
        """The embeddings that a recall attends to, oldest first, on the device of `direction`.

        Args:
            direction: `HMTMemory.direction` of the query, (1, d). Recall scores are products with it.

        Returns:
            embeddings (c, d) and ages (c,), long: 0 is the newest of all n.
        """
        width, n_pages = self.page_blocks, len(self.sums)
        with torch.no_grad():  # the choice has no gradient
            scores = (direction @ self.sums.to(direction).mT).squeeze(0)  # tags differ from sums by one factor
            chosen = scores.topk(min(n_pages, self.recalled)).indices.sort().values.tolist()
        block_ids = [i for page in chosen for i in range(page * width, (page + 1) * width)]
        block_ids += range(n_pages * width, len(self.blocks))  # in no page yet
        embeddings = torch.cat([*(self.blocks[i] for i in block_ids), self.rest])
        places = torch.tensor(block_ids, dtype=torch.long)[:, None] * self.block_size + torch.arange(self.block_size)
        newest = torch.arange(len(self) - len(self.rest), len(self))
        ages = len(self) - 1 - torch.cat([places.flatten(), newest])
        return embeddings.to(direction.device), ages.to(direction.device)

    def to(self, device):
        """The tags on another device; the embeddings stay where they are."""
        return replace(self, sums=self.sums.to(device))

    def map(self, function):
        """New pages with `function` applied to each tensor."""
        blocks = (*map(function, self.blocks),)
        return replace(self, rest=function(self.rest), sums=function(self.sums), blocks=blocks)

    def pack(self):
        """Tensors and numbers for a file; `unpack` makes the same pages of them, in RAM."""
        tensors = {"rest": self.rest, "sums": self.sums} | ({"blocks": torch.cat(self.blocks)} if self.blocks else {})
        return tensors, {name: getattr(self, name) for name in ("block_size", "recalled", "page_blocks")}

    @classmethod
    def unpack(cls, tensors, numbers):
        """The pages of what `pack` returned."""
        blocks = tensors["blocks"].cpu().split(numbers["block_size"]) if "blocks" in tensors else ()
        return cls(rest=tensors["rest"].cpu(), sums=tensors["sums"], blocks=blocks, **numbers)


__all__ = ["MemoryPages", "PageFile"]
