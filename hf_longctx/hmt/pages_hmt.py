"""The second level of memory: embeddings that fell out of the bank are kept in pages, and a recall chooses pages.

Embeddings fill pages in the order of the text. The tag of a page is the mean of its embeddings, so the recall score of
a tag is the mean score of the page. A recall scores the tags, takes the best r pages of each row, and attends to the
embeddings in them. A recall always attends to the newest embeddings, which do not fill a page yet.

With n embeddings in pages of S, a recall scores n / S tags and r S embeddings. Pages start with `page_size`
embeddings; when there are more than 4 r S pages, neighbours join, and S doubles. From then on there are at most 2
sqrt(r n) tags and sqrt(r n) recalled embeddings: the cost of a segment grows with the square root of the text. Up to r
pages are all recalled, and the result is that of one flat memory.

An embedding stands out in the tag of its page by sqrt(d / S) standard deviations if all are unrelated, and by more in
a text, where neighbours are related. Among ten thousand random embeddings of width 512, a recall finds most
(`python -m scripts.bench.hmt pages`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch


TAGS_PER_EMBEDDING = 4  # a tag costs less: it is only scored; an embedding is fetched, copied, scored and averaged


class PageFile:
    """A file of pages, mapped into memory: the operating system reads from disk what a recall touches.

    Args:
        path: the file; it is overwritten, and only the states that use it can read it.
    """

    def __init__(self, path):
        self.path, self.used = Path(path), 0
        self.path.unlink(missing_ok=True)
        self.mapped = torch.empty(0, dtype=torch.uint8)

    def store(self, block):
        """A copy of `block` that lives in the file. Raises ValueError if a gradient would be lost."""
        if block.requires_grad:
            raise ValueError(
                f"Memories that go to {self.path} lose their gradient. Read under torch.no_grad(), or start without a "
                "page file: pages in RAM keep gradients."
            )
        size = block.numel() * block.element_size()
        if self.used + size > len(self.mapped):
            # Doubling keeps the mappings few. Most file systems store no zeros that were never written.
            capacity = 2 * (self.used + size)
            self.mapped = torch.from_file(str(self.path), shared=True, size=capacity, dtype=torch.uint8)
        place = self.mapped[self.used : self.used + size].view(block.dtype).view(block.shape)
        self.used += size
        return place.copy_(block)


@dataclass
class MemoryPages:
    """Pages of n memory embeddings for B rows. Immutable: `append` returns a new object, so states can branch.

    block_size: embeddings per block, the unit of storage; a page is `page_blocks` neighbouring blocks.
    recalled: r, pages that a recall attends to; S = block_size * page_blocks embeddings each.
    blocks, masks: tuples of (B, block_size, d) and (B, block_size) bool, False where a row has no such memory. They
        stay in CPU memory or in `file`.
    rest, rest_mask: (B, t, d) and (B, t), t < block_size, the newest embeddings, which do not fill a block yet.
    sums, counts: (B, P, d) fp32 and (B, P), of the valid embeddings of each page; the quotients are the tags.
    """

    block_size: int
    recalled: int
    rest: torch.Tensor
    rest_mask: torch.Tensor
    sums: torch.Tensor
    counts: torch.Tensor
    blocks: tuple = ()
    masks: tuple = ()
    page_blocks: int = 1
    file: PageFile | None = None

    @classmethod
    def empty(cls, batch, width, dtype, device, block_size, recalled, file=None):
        """No pages yet. Tags live on `device`, embeddings in CPU memory."""
        rest, mask = torch.zeros(batch, 0, width, dtype=dtype), torch.zeros(batch, 0, dtype=torch.bool)
        sums = torch.zeros(batch, 0, width, dtype=torch.promote_types(dtype, torch.float32), device=device)
        return cls(block_size, recalled, rest, mask, sums, sums[..., 0], file=file)

    def __len__(self):
        """n, embeddings in all."""
        return len(self.blocks) * self.block_size + self.rest.shape[1]

    def append(self, embeddings, valid):
        """New pages with `embeddings` (B, n, d) and their mask `valid` (B, n) added, oldest first."""
        rest = torch.cat([self.rest, embeddings.to(self.rest.device)], 1)
        mask = torch.cat([self.rest_mask, valid.to(self.rest.device)], 1)
        blocks, masks, size = list(self.blocks), list(self.masks), self.block_size
        while rest.shape[1] >= size:
            block, rest = rest[:, :size].contiguous(), rest[:, size:]
            blocks.append(block if self.file is None else self.file.store(block))
            masks.append(mask[:, :size])
            mask = mask[:, size:]
        pages = replace(self, rest=rest, rest_mask=mask)
        return pages if len(blocks) == len(self.blocks) else replace(pages, blocks=(*blocks,), masks=(*masks,))._tag()

    def _tag(self):
        """Tag the pages that have become full, and join neighbours when there are too many pages."""
        sums, counts, width, device = [self.sums], [self.counts], self.page_blocks, self.sums.device
        for start in range(self.sums.shape[1] * width, len(self.blocks) - width + 1, width):
            block = torch.cat(self.blocks[start : start + width], 1).to(device, self.sums.dtype)
            mask = torch.cat(self.masks[start : start + width], 1).to(device)
            sums.append((block * mask[..., None]).sum(1, keepdim=True))
            counts.append(mask.sum(1, keepdim=True).to(self.counts))
        pages = replace(self, sums=torch.cat(sums, 1), counts=torch.cat(counts, 1))
        while pages.sums.shape[1] > TAGS_PER_EMBEDDING * self.recalled * self.block_size * pages.page_blocks:
            pairs = pages.sums.shape[1] // 2  # an odd last page goes back to the blocks that are in no page
            sums, counts = (x[:, : 2 * pairs].unflatten(1, (pairs, 2)).sum(2) for x in (pages.sums, pages.counts))
            pages = replace(pages, sums=sums, counts=counts, page_blocks=2 * pages.page_blocks)
        return pages

    def look_up(self, direction):
        """The embeddings that a recall attends to, oldest first, on the device of `direction`.

        Args:
            direction: `HMTMemory.direction` of the query, (B, 1, d). Recall scores are products with it.

        Returns:
            embeddings (B, c, d), mask (B, c) and ages (B, c), long: 0 is the newest of all n.
        """
        batch, n_pages = len(direction), self.sums.shape[1]
        with torch.no_grad():  # the choice has no gradient
            scores = (direction @ (self.sums / self.counts.clamp(min=1)[..., None]).to(direction).mT).squeeze(1)
            scores = scores.masked_fill(self.counts == 0, -torch.inf)
            chosen = scores.topk(min(n_pages, self.recalled)).indices.sort(1).values  # (B, r)
        width, untagged = self.page_blocks, range(n_pages * self.page_blocks, len(self.blocks))
        block_ids = [  # of each row
            [*(i for page in row for i in range(page * width, (page + 1) * width)), *untagged]
            for row in chosen.tolist()
        ]

        def gather(blocks, rest):
            rows = ([blocks[i][b] for i in block_ids[b]] + [rest[b]] for b in range(batch))
            return torch.stack([torch.cat(row) for row in rows])

        embeddings, mask = gather(self.blocks, self.rest), gather(self.masks, self.rest_mask)
        index = torch.tensor(block_ids, dtype=torch.long)[..., None] * self.block_size + torch.arange(self.block_size)
        newest = torch.arange(len(self) - self.rest.shape[1], len(self)).expand(batch, -1)
        ages = len(self) - 1 - torch.cat([index.flatten(1), newest], 1)
        return embeddings.to(direction.device), mask.to(direction.device), ages.to(direction.device)

    def to(self, device):
        """The tags on another device; the embeddings stay where they are."""
        return replace(self, sums=self.sums.to(device), counts=self.counts.to(device))

    def map(self, function):
        """New pages with `function` applied to each tensor."""
        names = ("rest", "rest_mask", "sums", "counts")
        changed = {name: function(getattr(self, name)) for name in names}
        return replace(self, **changed, blocks=(*map(function, self.blocks),), masks=(*map(function, self.masks),))

    def pack(self):
        """Tensors and numbers for a file; `unpack` makes the same pages of them, in RAM."""
        tensors = {name: getattr(self, name) for name in ("rest", "rest_mask", "sums", "counts")}
        if self.blocks:
            tensors |= {"blocks": torch.cat(self.blocks, 1), "masks": torch.cat(self.masks, 1)}
        return tensors, {name: getattr(self, name) for name in ("block_size", "recalled", "page_blocks")}

    @classmethod
    def unpack(cls, tensors, numbers):
        """The pages of what `pack` returned."""
        size = numbers["block_size"]
        split = {name: tensors[name].cpu().split(size, 1) for name in ("blocks", "masks") if name in tensors}
        rest = {name: tensors[name].cpu() for name in ("rest", "rest_mask")}
        return cls(**{**tensors, **rest, **split}, **numbers)


__all__ = ["MemoryPages", "PageFile"]
