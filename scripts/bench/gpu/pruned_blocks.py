"""Counts of the key blocks that adaptive computation pruning skips."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch

from hf_longctx.fox import triton_fox


@dataclass
class PrunedBlocks:
    """Blocks of the forward tile, summed over heads, rows and calls.

    Attributes:
        total: blocks that causality, padding, packing and the window leave.
        pruned: number of these blocks that were skipped.
    """

    total: int | torch.Tensor = 0
    pruned: int | torch.Tensor = 0

    def add(self, Tk, key_start, kept, tile):
        """Add a call over Tk keys: `kept` is what `launch_prune` returns for key_start."""
        stops = torch.arange(Tk - kept.shape[-1], Tk, tile.BM, device=kept.device).add(tile.BM).clamp(max=Tk)
        begin = kept[..., :: tile.BM]
        before = torch.zeros_like(begin) if key_start is None else key_start[..., :: tile.BM].expand_as(begin)
        blocks, left = (((stops - first).clamp(min=0) + tile.BN - 1) // tile.BN for first in (before, begin))
        self.total = self.total + blocks.sum()
        self.pruned = self.pruned + (blocks - left).sum()


@contextlib.contextmanager
def count_pruned_blocks():
    """Count the blocks of all calls inside, except compiled ones: `with count_pruned_blocks() as blocks: model(x)`."""
    blocks, prune, tiles_for = PrunedBlocks(), triton_fox.launch_prune, triton_fox.tiles_for
    tiles = []

    def remember(*args):
        tiles[:] = [tiles_for(*args)]
        return tiles[0]

    def count(gates, key_start, *args):
        kept = prune(gates, key_start, *args)
        blocks.add(gates.shape[3], key_start, kept, tiles[0].forward)
        return kept

    run = lambda launcher, *args: launcher(*args)  # noqa: E731, a plan would not count
    with mock.patch.multiple(triton_fox, launch_prune=count, tiles_for=remember, repeat=run):
        yield blocks
    blocks.total, blocks.pruned = int(blocks.total), int(blocks.pruned)
