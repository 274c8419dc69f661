"""The picture of a forgetting curve."""

import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

import matplotlib

from hf_longctx.metrics import CurvePoint, ForgettingCurve
from hf_longctx.metrics.curve.plot import area_ends, ribbon


CURVE = ForgettingCurve(
    [
        CurvePoint(18, [9, 9], [0, 1], [3, 1]),
        CurvePoint(20, [4, 5], [1, 0], [2, 9]),
        CurvePoint(40, [1, 0], [0, 1]),
    ],
    {"model": "some/folder/tiny", "seed": 7, "data_type": "order", "dtype": "float32"},
)


@pytest.mark.parametrize("name, magic", [("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml")])
def test_the_ending_decides_the_kind_of_file(tmp_path, name, magic):
    CURVE.plot(tmp_path / name, train_length=64)
    assert (tmp_path / name).read_bytes().startswith(magic)


def svg_text(tmp_path, curve, **options):
    """An SVG whose words are text."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        curve.plot(tmp_path / "curve.svg", **options)
    return (tmp_path / "curve.svg").read_text()


def test_the_picture_says_how_many_repeats_adaptive_points_have(tmp_path):
    curve = ForgettingCurve([CurvePoint(8, [4] * 3, [1] * 3), CurvePoint(9, [5] * 10, [1] * 10)])
    assert "deviation of 3 to 10 repeats" in svg_text(tmp_path, curve)


def test_the_picture_says_what_was_measured(tmp_path):
    words = svg_text(tmp_path, CURVE, train_length=64)
    for expected in (
        "Forgetting curve of tiny",
        "fine length: 18 tokens",
        "coarse length: 20 tokens",
        "training context: 64 tokens",
        "mean and standard deviation of 2 repeats, order data, float32, seed 7",
    ):
        assert expected in words
    open_ended = ForgettingCurve(CURVE.points[:1])
    words = svg_text(tmp_path, open_ended, train_length=64, title="A title")
    for expected in ("A title", "fine length: &gt;18 tokens", "amnesia: not reached", "64 tokens not reached"):
        assert expected in words


@pytest.mark.parametrize(
    "points, ends",
    [
        ([(8, 4, 0), (16, 8, 0), (32, 8, 0), (64, 0, 0)], (16, 32)),
        ([(8, 4, 0), (16, 8, 0), (32, 8, 0)], (16, 70)),
        ([(8, 4, 0), (16, 8, 0)], (70, 70)),
        ([(8, 2, 0), (16, 4, 4)], (5, 8)),
        ([(8, 1, 2), (16, 4, 4)], (5, 5)),
        ([(8, 4, 4), (16, 4, 4)], (8, 8)),  # fine, though the text could be guessed
    ],
    ids=["all three", "coarse open", "fine open", "no fine", "nothing", "no coarse"],
)
def test_areas_end_at_the_lengths(points, ends):
    curve = ForgettingCurve([CurvePoint(n, [copy], [lm]) for n, copy, lm in points])
    assert area_ends(curve, left=5, right=70) == ends


def test_the_ribbon_stays_within_accuracies():
    low, high = ribbon([(0.9, 0.2), (0.5, 0.2), (0.1, 0.2)])
    assert low == pytest.approx([0.7, 0.3, 0.0]) and high == pytest.approx([1.0, 0.7, 0.3])


def test_an_empty_curve_is_not_drawn(tmp_path):
    with pytest.raises(ValueError, match="no point to draw"):
        ForgettingCurve([]).plot(tmp_path / "curve.png")
