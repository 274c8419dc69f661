"""scripts.bench.gpu.tune chooses the fastest tile whose results are right."""

import time

import pytest
import torch


pytest.importorskip("triton")
from hf_longctx.fox import tiles_fox
from hf_longctx.fox.tiles_fox import Tile


class Fake:
    """A problem whose forward tiles give right results, one wrong row, NaN, or an error."""

    shape = (1, 1, 8, 16)
    sizes = {"right": (32, 32), "one row": (64, 32), "nan": (16, 32), "raises": (32, 64)}
    tiles = {name: Tile(*size, 1, 1) for name, size in sizes.items()}

    def run(self, kernel):
        name = next(name for name, tile in self.tiles.items() if tile == tiles_fox.TILES[0, 4][16].forward)
        x = torch.ones(1, 1, 8, 16)
        if name == "one row":
            x[0, 0, 3] += 0.1
        if name == "nan":
            x[0, 0, 3, 3] = torch.nan
        if name == "raises":
            raise RuntimeError("out of resource")
        return (x,)

    def rate(self, kernel, seconds):
        return {"TFLOP/s": 1.0}


def test_a_tile_that_computes_something_else_is_not_chosen(load_script, monkeypatch):
    """The wrong tiles are the fast ones here: the smallest tile takes longest."""
    tune = load_script("bench.gpu.tune")
    rows = [{"kernel": "forward", "head_dim": 16, "tile": list(tile)} for tile in Fake.tiles.values()]
    monkeypatch.setattr(tune, "launch_seconds", lambda *_: 1.0 / tiles_fox.TILES[0, 4][16].forward.BM)
    monkeypatch.setitem(tiles_fox.TILES[0, 4], 16, tiles_fox.TILES[0, 4][16])
    tune.time_tiles(rows, Fake(), "cpu", time.monotonic() + 60)
    assert ["ms" in row for row in rows] == [True, False, False, False]
    dropped = [row.get("dropped") for row in rows]
    assert dropped == [None, "differs by 0.1", "differs by inf", "RuntimeError: out of resource"]
    assert tune.fastest(rows) == Fake.tiles["right"]
