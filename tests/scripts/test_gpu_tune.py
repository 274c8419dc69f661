"""Tuning in Triton's interpreter, and which tile it chooses."""

import time
from pathlib import Path

import pytest
import torch


pytest.importorskip("triton")
from hf_longctx.fox import tiles_fox
from hf_longctx.fox.tiles_fox import Tile


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from scripts.bench.gpu import tune

    return tune


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


def test_a_tile_that_computes_something_else_is_not_chosen(tune, monkeypatch):
    """However fast it is: seconds are longest for the smallest tile here."""
    rows = [{"kernel": "forward", "head_dim": 16, "tile": list(tile)} for tile in Fake.tiles.values()]
    monkeypatch.setattr(tune, "launch_seconds", lambda *_: 1.0 / tiles_fox.TILES[0, 4][16].forward.BM)
    monkeypatch.setitem(tiles_fox.TILES[0, 4], 16, tiles_fox.TILES[0, 4][16])
    tune.time_tiles(rows, Fake(), "cpu", time.monotonic() + 60)
    assert ["ms" in row for row in rows] == [True, False, False, False]
    dropped = [row.get("dropped") for row in rows]
    assert dropped == [None, "differs by 0.1", "differs by inf", "RuntimeError: out of resource"]
    assert tune.fastest(rows) == Fake.tiles["right"]


@pytest.mark.parametrize("gain, chosen", [(1.005, "right"), (1.2, "one row")], ids=["noise", "gain"])
def test_the_present_tile_stays_unless_another_is_clearly_faster(tune, gain, chosen):
    rows = [{"tile": list(Fake.tiles["right"]), "faster": 1.0}, {"tile": list(Fake.tiles["one row"]), "faster": gain}]
    assert tune.fastest([*rows, {"tile": [16, 16, 1, 1], "dropped": "no time left"}]) == Fake.tiles[chosen]
