"""Tile sizes of the Triton kernels: one table, keyed by device and head size. scripts/bench/gpu/tune.py tunes it."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Launch parameters of one kernel: query rows and keys per block, warps, and pipeline stages.

    products: whether tensor cores add the decay and sum the weights in the forward pass if the logits are bounded.
    """

    BM: int
    BN: int
    warps: int
    stages: int
    products: bool = False


class Tiles(NamedTuple):
    """One Tile per kernel."""

    forward: Tile
    dq: Tile
    dkdv: Tile
    decode: Tile


OLDEST_GPU = 80  # compute capability 8.0, the first for which there are tile sizes
DECODE_ROWS = 16  # maximum number of queries for the split-KV kernel, without gradients

# TILES[capability, bytes per element][smallest power of two >= head_dim]. Chosen from compiled resources: almost no
# spills in the unmasked loops, 16 or more rows of the score block per warp, shared memory within the device's limit.
# For 9.0, head_dim=64 and 128, except decoding, they were the fastest correct ones on an H200 at 16384 tokens.
TILES: dict[tuple[int, int], dict[int, Tiles]] = {
    (80, 2): {
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(16, 64, 4, 3)),
        256: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2), Tile(16, 32, 4, 2)),
    },
    (86, 2): {  # 8.6, 8.9: 99 KiB of shared memory per block
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
    (100, 2): {  # with 64 keys of 256 dimensions, the dk/dv pass no longer fits tensor memory and compiles to a trap
        32: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 64, 4, 3)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
        256: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 3)),
    },
    # fp32 is for tests: one product is three tf32 products (`dot`) of operands split in registers, which spills. At
    # head_dim=64, dk/dv with 8 warps, 8 keys each, were wrong on an H200 (Triton 3.6).
    (80, 4): {
        32: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2)),
        64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2)),
        128: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 4, 2)),
        256: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),
    },
    # the interpreter: several blocks even in a small test
    (0, 2): dict.fromkeys(
        (32, 64, 128, 256), Tiles(Tile(32, 32, 1, 1), Tile(32, 16, 1, 1), Tile(32, 32, 1, 1), Tile(16, 32, 1, 1))
    ),
}
TILES[0, 4] = TILES[0, 2]
for rows in TILES.values():
    rows.setdefault(16, rows[32])


def nearest_key(capability: int, itemsize: int) -> tuple[int, int]:
    """Return the key of `TILES` for a capability such as 90, or the nearest lower one; 12.x has 8.6's memory."""
    memory = 86 if capability >= 120 else capability
    return max(
        [key for key in TILES if key[1] == itemsize and key[0] <= memory]
    )  # torch 2.11 does not compile generators


def capability_of(device: torch.device) -> int:
    """Return 90 for compute capability 9.0, and 0 for a CPU, which runs the interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


def tiles_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Return the tile sizes of a launch."""
    return TILES[nearest_key(capability_of(device), dtype.itemsize)][padded(head_dim)]


def prune_blocks(tiles: Tiles) -> tuple[int, int]:
    """Return the numbers of queries and keys that are pruned together, except in decoding.

    They are whole blocks of every kernel, so pruning does not need masks.
    """
    return tuple(max(sizes) for sizes in zip(*(tile[:2] for tile in tiles[:3])))


def padded(head_dim: int) -> int:
    """Return the smallest power of two, at least 16, that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())
