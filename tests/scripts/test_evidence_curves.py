"""scripts/evidence_curves.py in a few steps: every model is trained, measured and drawn."""

import sys
from pathlib import Path

import pytest

from hf_longctx.metrics import ForgettingCurve


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("undrawn")
def test_the_script_makes_picture_table_and_curves(load_script, tmp_path, capsys, monkeypatch):
    folders = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["evidence_curves", "--quick", *folders])
    load_script("evidence_curves").main()
    curves = {file.stem: ForgettingCurve.from_json(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    assert {"llama__rope_base_20000", "llama__rope_base_100", "mamba_2"} <= curves.keys()
    assert "hmt_around_the_llama" in curves
    assert all([p.length for p in curve.points] == [8, 12] for curve in curves.values())
    table = (tmp_path / "out" / "README.md").read_text()
    assert table.count("| random |") == len(curves)
    assert (tmp_path / "out" / "comparison.png").exists() and (tmp_path / "out" / "comparison.svg").exists()
    assert capsys.readouterr().out.count(" loss ") == 5


def test_the_committed_evidence_is_that_of_the_script():
    folder = ROOT / "model_cards" / "evidence" / "curves"
    table = (folder / "README.md").read_text()
    curves = [ForgettingCurve.from_json(file.read_text()) for file in sorted(folder.glob("*.json"))]
    assert len(curves) == table.count("| random |") == 5
    for curve in curves:
        row = next(line for line in table.splitlines() if line.startswith(f"| {curve.settings['model']} |"))
        assert f"| {curve.fine_length}, {curve.coarse_length} |" in row and "| random |" in row
    by_base = {curve.settings["model"]: curve.fine_length for curve in curves if "RoPE" in curve.settings["model"]}
    assert by_base["Llama, RoPE base 20000"] > by_base["Llama, RoPE base 100"]
