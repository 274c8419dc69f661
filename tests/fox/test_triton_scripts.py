"""scripts/bench_triton.py and scripts/tune_triton.py as far as the interpreter takes them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch


pytest.importorskip("triton")
from hf_longctx.fox import tiles_fox
from hf_longctx.fox.tiles_fox import Tile


ROOT = Path(__file__).resolve().parents[2]
dry = pytest.mark.skipif(torch.cuda.is_available(), reason="dry runs are for machines without a GPU")


def run(script, *options):
    command = [sys.executable, ROOT / "scripts" / script, "--device", "cpu", *map(str, options)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@dry
@pytest.mark.slow
def test_bench_dry_run(tmp_path):
    out = run("bench_triton.py", "--tile", "forward=64,32,1,1", "--out", tmp_path / "bench")
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["about"]["tiles"] == "forward=64,32,1,1"
    ours = [row for row in report["attention"] if row["name"] == "ours"]
    assert ours and all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in ours)
    assert report["pruning"] and report["decode"][0]["pruned_graph_us"] > 0
    assert out.endswith((tmp_path / "bench.md").read_text() + "\n")


@dry
@pytest.mark.slow
def test_tuning_dry_run(tmp_path):
    out = run("tune_triton.py", "--kernel", "dkdv", "decode", "--candidates", 2, "--json", tmp_path / "tune.json")
    report = json.loads((tmp_path / "tune.json").read_text())
    assert [row["kernel"] for row in report["rows"]] == ["dkdv", "dkdv", "decode", "decode"]
    for row in report["rows"]:
        assert row["registers"] > 0
        assert "dropped" in row or (row["ms"] > 0 and row["difference"] < 1e-5), row
    assert report["rows"][0]["tile"] == list(tiles_fox.TILES[90, 2][16].dkdv) and report["rows"][0]["faster"] == 1
    row = ", ".join(f"Tile{tuple(tile)}" for tile in report["tiles"]["16"].values())
    assert f"    (90, 2): {{\n        16: Tiles({row}),\n    }},\n" in out


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import tune_triton

    return tune_triton


class Fake:
    """A problem whose forward tiles are right, wrong by one row, not finite, or failing."""

    shape = (1, 1, 8, 16)
    tiles = {"right": Tile(32, 32, 1, 1), "one row": Tile(64, 32, 1, 1), "nan": Tile(16, 32, 1, 1), "raises": Tile(32, 64, 1, 1)}  # fmt: skip

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


def test_a_tile_that_computes_something_else_is_not_chosen(tune, tmp_path, monkeypatch):
    """However fast it is."""
    report = tune.Report(tmp_path / "tune.json", {"device": "fake"}, {})
    rows = [{"kernel": "forward", "head_dim": 16, "tile": list(tile)} for tile in Fake.tiles.values()]
    report.rows.extend(rows)
    monkeypatch.setattr(tune, "seconds_of", lambda *_: 1.0 / tiles_fox.TILES[0, 4][16].forward.BM)
    monkeypatch.setitem(tiles_fox.TILES[0, 4], 16, tiles_fox.TILES[0, 4][16])
    tune.time_tiles(rows, Fake(), "cpu", time.monotonic() + 60, report)
    assert ["ms" in row for row in rows] == [True, False, False, False]
    assert [row.get("dropped") for row in rows] == [None, "differs by 0.1", "differs by inf", rows[3]["error"]]
    assert "out of resource" in rows[3]["error"]
    assert tune.fastest(rows) == Fake.tiles["right"]
    assert json.loads(report.path.read_text())["rows"][3]["error"] == rows[3]["error"]


@pytest.mark.parametrize("gain, chosen", [(1.005, "right"), (1.2, "one row")], ids=["noise", "gain"])
def test_the_present_tile_stays_unless_another_is_clearly_faster(tune, gain, chosen):
    rows = [{"tile": list(Fake.tiles["right"]), "faster": 1.0}, {"tile": list(Fake.tiles["one row"]), "faster": gain}]
    assert tune.fastest([*rows, {"tile": [16, 16, 1, 1], "dropped": "no time left"}]) == Fake.tiles[chosen]


def test_a_run_leaves_out_what_failed_before(tune, tmp_path, monkeypatch):
    """A tile that takes the device down ends a run, but not the next one; another device starts afresh."""
    group = [{"kernel": "dq", "head_dim": 64, "tile": [BM, 64, 4, 3]} for BM in (32, 64, 128)]
    first = tune.Report(tmp_path / "tune.json", {"device": "A"}, {})
    first.rows.extend([group[0], {**group[1], "error": "lost", "dropped": "lost"}])
    first.save()
    asked = []

    def compiled(cases, jobs, until):
        asked.append([case["tile"][0] for case in cases])
        return (
            {
                **case,
                "shared": 0,
                "shared_limit": 1,
                "blocks_per_sm": 1,
                "hot_loop_spills": 0,
                "hot_loop_instructions": 400,
                "serialized": False,
            }
            for case in cases
        )

    monkeypatch.setattr(tune, "compiled", compiled)
    for device in ("A", "B"):
        report = tune.Report(tmp_path / "tune.json", {"device": device}, {})
        tune.compile_tiles(report, [group], 1, time.monotonic())
        assert [row["tile"][0] for row in report.rows] == [32, 64, 128]
    assert asked == [[32, 128], [32, 64, 128]]
