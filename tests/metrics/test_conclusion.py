"""Sentences of conclusion at the top of the page."""

import pytest
from examples import answers, lines

from hf_longctx.metrics import CurvePoint, ForgettingCurve, NeedleGrid, PositionLoss
from hf_longctx.metrics.report.conclusion import conclusion, facts
from hf_longctx.metrics.report.page import write_report
from hf_longctx.metrics.tasks.needle import NeedleCell


def curve(*shares, **settings):
    """Copied shares of texts of 400, 800 and 1600 tokens, of which 20 % can be guessed."""
    points = [CurvePoint(n, [int(n * s / 2)] * 10, [n // 10] * 10) for n, s in zip((400, 800, 1600), shares)]
    return ForgettingCurve.of_points(points, settings)


def needle(*rights):
    found = [answers(*(i < right for i in range(10))) for right in rights]
    return NeedleGrid.of_parts([NeedleCell(each, 300 * i, 0.5, [1] * 10) for i, each in enumerate(found, start=1)])


@pytest.mark.parametrize(
    "shares, copies, exact",
    [
        (
            (1, 1, 1),
            "Copies up to 1,600 tokens [at least 1,600, the longest tested] at 100 %.",
            "up to 1,600 tokens [",
        ),
        ((1, 0.5, 0.2), "Copies up to 800 tokens [", "up to 400 tokens ["),
        ((0.2, 0.2, 0.2), "Copies no better than it guesses from 400 tokens on [", "at no tested length ["),
    ],
    ids=["all", "fades", "nothing"],
)
def test_a_curve_says_how_far_it_copies(shares, copies, exact):
    first, second = conclusion([curve(*shares)])
    assert first.startswith(copies) and second.startswith(f"Copies word for word {exact}")


@pytest.mark.parametrize(
    "result, words",
    [
        (needle(10, 9, 1), "Finds a sentence hidden in a document of up to 600 tokens (9 of 10 questions)."),
        (needle(1, 0), "Does not find a sentence hidden in a document, not even of 300 tokens (1 of 10 questions)."),
        (lines([True] * 4), "Finds one of many lines of up to 90 tokens (4 of 4 questions)."),
    ],
)
def test_what_is_found(result, words):
    assert conclusion([result]) == [words]
    assert conclusion([result, PositionLoss.of_mean([2.0, 1.0], 2), curve(1, 1, 1), result])[2:] == [words]


def test_nothing_measured_says_nothing():
    assert conclusion([ForgettingCurve.of_points([]), NeedleGrid.of_parts([])]) == []
    assert conclusion([PositionLoss.of_mean([2.0, 1.0], 2)])[0].startswith("The loss after 2 tokens is 1.000 nats")


@pytest.mark.usefixtures("undrawn")
def test_the_page_begins_with_them(tmp_path):
    result = curve(1, 0.5, 0.2, model="fox", parameters=1_240_000_000, dtype="bfloat16", hardware="NVIDIA H100")
    write_report([result], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.index("Copies up to 800 tokens") < page.index("1.24 billion parameters, bfloat16, NVIDIA H100; 20")
    assert page.index("NVIDIA H100; 20") < page.index("<table")


def test_sizes_in_words():
    assert facts([curve(1, parameters=86_336)]) == "86,336 parameters"
