"""Several curves in one picture and in one table."""

from pathlib import Path

import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from matplotlib.figure import Figure

from hf_longctx.metrics import CurvePoint, ForgettingCurve, comparison_table
from hf_longctx.metrics.report.comparison import STRONG, named, plot_comparison


def curve(*accuracies, lengths=(8, 64, 512), **settings):
    points = [
        CurvePoint(n, [round(copy * n / 2)] * 3, [round(lm * n / 2)] * 3)
        for n, (copy, lm) in zip(lengths, accuracies, strict=True)
    ]
    return ForgettingCurve(points, settings)


CURVES = {
    "long": curve((1, 0), (1, 0.25), (1, 0.25), data_type="random"),
    "fades | early": curve((1, 0), (0.5, 0.25), (0.25, 0.25), data_type="order"),
    "nothing": curve((0.5, 0.5), (0.25, 0.25), lengths=(8, 64)),
}


@pytest.fixture
def drawn(monkeypatch):
    """Collects the figures that are saved."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure) or save(figure, path))
    return figures


@pytest.mark.parametrize("ending, begin", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_decides_the_kind_of_file(tmp_path, ending, begin):
    plot_comparison(CURVES, tmp_path / f"picture.{ending}")
    assert (tmp_path / f"picture.{ending}").read_bytes().startswith(begin)


def test_bars_end_at_the_lengths(tmp_path, drawn):
    plot_comparison(CURVES, tmp_path / "picture.png", train_lengths={"long": 131})
    above, below = drawn[0].axes
    bars = {}
    for bar in below.patches:
        bars.setdefault(round(bar.get_y() + 0.31), []).append((bar.get_x() + bar.get_width(), bar.get_facecolor()))
    assert [[round(end) for end, _ in row] for row in bars.values()] == [[512, 512, 512], [8, 64, 512], [7, 7, 64]]
    assert len({colour for row in bars.values() for _, colour in row}) == len(STRONG)
    assert [text.get_text() for text in below.texts] == [
        "fine >512, coarse >512",
        "fine 8, coarse 64",
        "fine 0, coarse 0",
    ]
    assert [line.get_xdata()[0] for line in below.get_lines()] == [64.0]  # (131 - 3) / 2, of the one model that has it
    assert len(above.get_lines()) == 6


def test_table():
    rows = [line.split(" | ") for line in comparison_table(CURVES, {"long": 131}).splitlines()]
    assert rows[2] == ["| long", "random", ">512", ">512", "-, -", "8 to 512", "131 |"]
    assert rows[3] == [r"| fades \| early", "order", "8", "64", "64, 512", "8 to 512", "- |"]
    assert rows[4][1:5] == ["-", "0", "0", "8, 8"]


@pytest.mark.parametrize("curves, message", [({}, "there is no curve"), ({"a": ForgettingCurve([])}, "measured: a")])
def test_nothing_to_draw(tmp_path, curves, message):
    with pytest.raises(ValueError, match=message):
        plot_comparison(curves, tmp_path / "picture.png")


def test_curves_are_named_by_model_then_file():
    def curve(model):
        return ForgettingCurve([], {"model": model} if model else {})

    files = [(Path("a/x.json"), curve("fox")), (Path("b/x.json"), curve("fox")), (Path("y.json"), curve("llama"))]
    assert list(named(files)) == ["fox (x)", "fox (x)'", "llama"]
    assert list(named([(Path("results/my_fox.json"), curve(None))])) == ["my_fox"]
