"""Several curves in one picture and in one table."""

from pathlib import Path

import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

import matplotlib

from hf_longctx.metrics import CurvePoint, ForgettingCurve, comparison_table
from hf_longctx.metrics.report.comparison import bar_ends, mark_place, named, plot_comparison


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


@pytest.mark.parametrize("ending, begin", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_decides_the_kind_of_file(tmp_path, ending, begin):
    plot_comparison(CURVES, tmp_path / f"picture.{ending}")
    assert (tmp_path / f"picture.{ending}").read_bytes().startswith(begin)


def test_bars_end_at_the_lengths():
    assert [bar_ends(curve, left=7) for curve in CURVES.values()] == [[512, 512, 512], [8, 64, 512], [7, 7, 64]]


@pytest.mark.parametrize("train_length, place", [(131, 64), (1027, 512), (1028, None), (17, None), (None, None)])
def test_the_training_context_is_marked_within_the_bar(train_length, place):
    assert mark_place(CURVES["long"], train_length, left=7) == place  # (train_length - 3) / 2


def test_words_of_the_picture(tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_comparison(CURVES, tmp_path / "picture.svg", train_lengths={"long": 131}, title="My models")
    words = (tmp_path / "picture.svg").read_text()
    for expected in (
        *("My models", "fine &gt;512, coarse &gt;512", "fine 8, coarse 64", "fine 0, coarse 0", "fades | early"),
        "deviation of 3 repeats, order and random data, black mark: training context",
    ):
        assert expected in words


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
