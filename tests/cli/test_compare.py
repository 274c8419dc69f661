"""hf-longctx compare."""

import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx import cli
from hf_longctx.metrics import PositionLoss


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("output", ["losses.png", "table.md"])
def test_names_of_losses(tmp_path, capsys, output):
    files, path = [str(tmp_path / f"{name}.json") for name in ("fox", "llama")], tmp_path / "new folder" / output
    for file in files:
        PositionLoss.of_mean([3.0, 2.5, 2.0], 4).save(file)
    assert cli.main(["compare", *files, "--names", "a", "b", "--output", str(path), "--title", "Losses"]) == 0
    out = capsys.readouterr().out
    assert "| b | 2.500 | 2.000 | 12.18 | 3 | 4 |" in out and out.endswith(f"wrote {path}\n")
    if output == "table.md":
        heading, table = path.read_text().split("\n\n", 1)
        assert heading == "# Losses" and out == f"{table}wrote {path}\n"
