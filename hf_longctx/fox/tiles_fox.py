"""Tile sizes of the Triton kernels for each GPU generation and head_dim, tuned by scripts/bench/gpu/tune.py."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Launch parameters of one kernel: query rows and keys per block, warps, and pipeline stages.

    products: whether the tensor cores add the decay and sum the weights in a forward pass with bounded logits.
    """

    BM: int
    BN: int
    warps: int
    stages: int
    products: bool = False


class Tiles(NamedTuple):
    """The tile of each kernel."""

    forward: Tile
    dq: Tile
    dkdv: Tile
    decode: Tile


OLDEST_GPU = 80  # compute capability 8.0, the lowest that the kernels support
DECODE_ROWS = 16  # maximum number of queries of the split-KV kernel

# TILES[capability, bytes per element][smallest power of two >= head_dim]. The sizes were chosen from the resources of
# the compiled kernels: almost no spills in the unmasked loops, at least 16 rows of logits per warp, and shared memory
# within the device's limit. For capability 9.0 and head_dim=64 or 128, the sizes for training and prefill were the
# fastest correct ones on an H200 at 16384 tokens.
TILES: dict[tuple[int, int], dict[int, Tiles]] = {
    (80, 2): {
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(16, 64, 4, 3)),
        256: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2), Tile(16, 32, 4, 2)),
    },
    (86, 2): {  # also for 8.9: both have 99 KiB of shared memory per block
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 4, 2), Tile(32, 64, 8, 2), Tile(16, 32, 4, 3)),
        256: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 2)),
    },
    (90, 2): {
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 4, 4, True), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3), Tile(16, 64, 4, 3)),
        256: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2), Tile(16, 32, 4, 3)),
    },
    (100, 2): {  # in the dk/dv pass, 64 keys of 256 dimensions exceed the tensor memory and compile to a trap
        32: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
        256: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 3)),
    },
    # fp32 is meant for tests. `dot` splits its operands in registers for three tf32 products, and the registers spill.
    # For head_dim=64, a dk/dv pass with 8 warps of 8 keys each returned wrong gradients on an H200 (Triton 3.6).
    (80, 4): {
        32: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2)),
        64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2)),
        128: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 4, 2)),
        256: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),
    },
    # tiles for the interpreter, small so that small tests have several blocks
    (0, 2): dict.fromkeys(
        (32, 64, 128, 256), Tiles(Tile(32, 32, 1, 1), Tile(32, 16, 1, 1), Tile(32, 32, 1, 1), Tile(16, 32, 1, 1))
    ),
}
TILES[0, 4] = TILES[0, 2]
for rows in TILES.values():
    rows.setdefault(16, rows[32])


def nearest_key(capability: int, itemsize: int) -> tuple[int, int]:
    """Return the key of `TILES` for a capability such as 90. If it has no tiles, use the nearest lower capability.

    12.x uses the tiles of 8.6, because it has the same amount of shared memory.
    """
    memory = 86 if capability >= 120 else capability
    return max(
        [key for key in TILES if key[1] == itemsize and key[0] <= memory]
    )  # a list, because PyTorch 2.11 does not compile generators


def capability_of(device: torch.device) -> int:
    """Return the compute capability times 10. For a CPU, return 0: it runs the interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


def tiles_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Return the tile of each kernel for this device, head_dim and dtype."""
    return TILES[nearest_key(capability_of(device), dtype.itemsize)][padded(head_dim)]


def prune_blocks(tiles: Tiles) -> tuple[int, int]:
    """Return the block size of pruning, (queries, keys), for training and prefill.

    It is a multiple of the block size of each kernel, so pruning does not add masked blocks.
    """
    return tuple(max(sizes) for sizes in zip(*(tile[:2] for tile in tiles[:3])))


def padded(head_dim: int) -> int:
    """Round head_dim up to a power of two of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
