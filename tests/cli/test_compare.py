"""hf-longctx compare."""

import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx import cli
from hf_longctx.metrics import CurvePoint, ForgettingCurve, PositionLoss


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def files(tmp_path):
    for name, correct in (("fox", 5), ("llama", 1)):
        points = [CurvePoint(8, [4, 4], [1, 1]), CurvePoint(9, [correct] * 2, [1, 1])]
        ForgettingCurve.of_points(points, {"model": name, "train_length": 32}).save(tmp_path / f"{name}.json")
        PositionLoss.of_mean([3.0, 2.5, 2.0], 4, {"model": name}).save(tmp_path / f"{name}_loss.json")
    return tmp_path


def test_names_and_losses(files, capsys):
    losses = [str(files / f"{name}_loss.json") for name in ("fox", "llama")]
    picture = files / "new folder" / "losses.png"
    options = ["--names", "a", "b", "--output", str(picture), "--title", "Losses"]
    assert cli.main(["compare", *losses, *options]) == 0
    assert "| b | 2.500 | 2.000 | 12.18 | 3 | 4 |" in capsys.readouterr().out
    assert picture.exists()


def test_a_markdown_file_gets_the_table(files, capsys):
    curves = [str(files / f"{name}.json") for name in ("fox", "llama")]
    assert cli.main(["compare", *curves, "--output", str(files / "table.md")]) == 0
    heading, _, table = (files / "table.md").read_text().partition("\n\n")
    assert heading == "# Forgetting curve" and "\n| model |" in table and "| llama |" in table
    assert table.startswith("Neither fox nor llama copies significantly further than the other.")
    assert capsys.readouterr().out == f"{table}wrote {files / 'table.md'}\n"
