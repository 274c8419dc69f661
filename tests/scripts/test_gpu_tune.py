"""Tuning in Triton's interpreter, and which tile it chooses."""

import json
import time
from pathlib import Path

import pytest
import torch
from commands import run


pytest.importorskip("triton")
from hf_longctx.fox import tiles_fox
from hf_longctx.fox.tiles_fox import Tile


ROOT = Path(__file__).resolve().parents[2]
dry = pytest.mark.skipif(torch.cuda.is_available(), reason="dry runs are for machines without a GPU")


@dry
@pytest.mark.slow
def test_tuning_dry_run(tmp_path):
    command = ["python", "-m", "scripts.bench.gpu.tune", "--device", "cpu", "--output", tmp_path / "tune.json"]
    done = run([*command, "--kernel", "decode", "--candidates", "2"], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "tune.json").read_text())
    assert [row["kernel"] for row in report["rows"]] == ["decode", "decode"]
    for row in report["rows"]:
        assert row["registers"] > 0
        assert "dropped" in row or (row["ms"] > 0 and row["difference"] < 1e-5), row
    assert report["rows"][0]["tile"] == list(tiles_fox.TILES[90, 2][16].decode) and report["rows"][0]["faster"] == 1
    row = ", ".join(f"Tile{tuple(tile)}" for tile in report["tiles"]["16"].values())
    assert f"    (90, 2): {{\n        16: Tiles({row}),\n    }},\n" in done.stdout


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from scripts.bench.gpu import tune

    return tune


def new_report(tune, path, device):
    return tune.Report(path, {"device": device, "versions": {}, "commit": "", "rows": []})


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


def test_a_tile_that_computes_something_else_is_not_chosen(tune, tmp_path, monkeypatch):
    """However fast it is: seconds are longest for the smallest tile here."""
    report = new_report(tune, tmp_path / "tune.json", "fake")
    rows = [{"kernel": "forward", "head_dim": 16, "tile": list(tile)} for tile in Fake.tiles.values()]
    report.rows.extend(rows)
    monkeypatch.setattr(tune, "launch_seconds", lambda *_: 1.0 / tiles_fox.TILES[0, 4][16].forward.BM)
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
    first = new_report(tune, tmp_path / "tune.json", "A")
    first.rows.extend([group[0], {**group[1], "error": "lost", "dropped": "lost"}])
    first.save()
    compiled_tiles = []
    resources = {
        "shared": 0,
        "shared_limit": 1,
        "blocks_per_sm": 1,
        "hot_loop_spills": 0,
        "hot_loop_instructions": 400,
    }

    def compiled(cases, jobs, until):
        compiled_tiles.append([case["tile"][0] for case in cases])
        return (case | resources for case in cases)

    monkeypatch.setattr(tune, "compiled", compiled)
    for device in ("A", "B"):
        report = new_report(tune, tmp_path / "tune.json", device)
        tune.compile_tiles(report, [group], 1, time.monotonic())
        assert [row["tile"][0] for row in report.rows] == [32, 64, 128]
    assert compiled_tiles == [[32, 128], [32, 64, 128]]
