"""Sequences of several datasets, mixed by shares."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


class Mixture(torch.utils.data.Dataset):
    """Rows of several datasets, so many of each that one reading has all rows of all, and the shares.

    Rows of a dataset that is small for its share are read several times. Trainer shuffles the rows.

    Args:
        parts: the datasets.
        shares: of the rows, which sum to 1; None: the rows of each are read once.
    """

    def __init__(self, parts: Sequence[Any], shares: Sequence[float] | None):
        self.parts = parts
        sizes = np.array([len(part) for part in parts])
        if shares is not None:
            sizes = np.rint((sizes / shares).max() * np.array(shares)).astype(int)
        self.sizes, self.ends = sizes, sizes.cumsum()

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, item):
        number = int(np.searchsorted(self.ends, item, side="right"))
        rows = self.parts[number]
        return rows[int(item - self.ends[number] + self.sizes[number]) % len(rows)]


class StreamedMixture(torch.utils.data.IterableDataset):
    """Rows of several streams: the next one is of the stream whose rows lack most of their share."""

    def __init__(self, parts: Sequence[Any], shares: Sequence[float]):
        self.parts, self.shares = parts, np.array(shares)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        streams, counts = [iter(part) for part in self.parts], np.zeros(len(self.parts))
        while True:
            number = int(((counts + 1) / self.shares).argmin())
            counts[number] += 1
            yield next(streams[number])


__all__ = ["Mixture", "StreamedMixture"]
