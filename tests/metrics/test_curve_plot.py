"""The figure of a forgetting curve."""

import pytest
from examples import SMALL_CURVE
from examples import curve as curve_of


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics import CurvePoint, ForgettingCurve
from hf_longctx.metrics.curve.plot import areas


def test_the_picture_says_what_was_measured(words):
    text = words(SMALL_CURVE.plot, train_length=64)
    for expected in (
        "Forgetting curve of tiny",
        "Whether the model copies is not significant (95 % CI: unknown; more repeats are needed). Copies 2 of 2",
        "copy accuracy of the worst repeat",
        "99 %: copied word for word",
        "training context: 64 tokens",
        "mean and standard deviation of 2 repeats, order data, float32, seed 7",
    ):
        assert expected in text
    text = words(curve_of(1, lengths=(400,)).plot, train_length=1000, title="A title")
    assert "A title" in text and "1,000 tokens not reached" in text


def curve(fine, coarse=0, dip=None, lengths=(100, 200, 400, 600, 800), **options):
    """Copies exactly up to `fine` tokens, half of it up to `coarse`, except at `dip`."""
    shares = [1 if n <= fine and n != dip else 0.5 if n <= max(fine, coarse) else 0 for n in lengths]
    return curve_of(*shares, lengths=lengths, **options)


@pytest.mark.parametrize(
    "curve, stretches",
    [
        (curve(200, 400), [(50, 300, "fine"), (300, 500, "coarse"), (500, 900, "amnesia")]),
        (curve(800), [(50, 900, "fine")]),
        (curve(0), [(50, 900, "amnesia")]),
        (curve(400, dip=200), [(50, 150, "fine"), (150, 500, "coarse"), (500, 900, "amnesia")]),
        (curve(800, repeats=1, lengths=(100, 200)), [(50, 150, "coarse"), (150, 900, "unsure")]),
        (ForgettingCurve.of_points([CurvePoint(100, [1, 0, 1], [0, 0, 0])]), [(50, 900, "unsure")]),
    ],
    ids=["all three", "fine only", "nothing", "a dip", "too few repeats", "luck"],
)
def test_colours_stand_for_what_is_sure(curve, stretches):
    """No length that fails is green, none that passes by chance is blue."""
    assert areas(curve, left=50, right=900, log=False) == stretches


def test_areas_of_a_logarithmic_axis_meet_at_the_ratio():
    assert areas(curve(8, lengths=(100, 400, 1600)), 50, 2000, log=True) == [(50, 2000, "amnesia")]
    assert areas(curve(400, lengths=(100, 400, 1600)), 50, 2000, log=True)[0] == (50, 800, "fine")
