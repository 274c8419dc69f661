"""hf-longctx compare."""

import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx import cli
from hf_longctx.metrics import PositionLoss


pytestmark = pytest.mark.usefixtures("undrawn")


def test_names_of_losses_and_a_figure(tmp_path, capsys):
    files = [str(tmp_path / f"{name}.json") for name in ("fox", "llama")]
    for file in files:
        PositionLoss.of_mean([3.0, 2.5, 2.0], 4).save(file)
    figure = tmp_path / "new folder" / "losses.png"
    assert cli.main(["compare", *files, "--names", "a", "b", "--output", str(figure), "--title", "Losses"]) == 0
    out = capsys.readouterr().out
    assert figure.exists() and "| b | 2.500 | 2.000 | 12.18 | 3 | 4 |" in out and out.endswith(f"wrote {figure}\n")


def test_counts_of_other_benchmarks(tmp_path, capsys):
    (tmp_path / "ruler.csv").write_text("Model,Length, Correct,Total\na,4096,480,500\na,8192,300,500\nb,4096,99,500\n")
    assert cli.main(["compare", "--counts", str(tmp_path / "ruler.csv"), "--output", str(tmp_path / "ruler.md")]) == 0
    printed = capsys.readouterr().out
    assert "| a | RULER | 85.6% | 4096 | 4,096 to below 8,192 | 4096 to 8192 |" in printed
    assert "| b | NoLiMa | 16.8% | 4096 (base score 20%: cannot do the task) | " in printed
    assert (tmp_path / "ruler.md").read_text().startswith("# Effective length\n\n| model | rule |")
