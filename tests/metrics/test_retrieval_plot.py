"""Pictures of the needle in a haystack and of line retrieval."""

import math

import pytest
from examples import answers


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics.retrieval.answers import wilson
from hf_longctx.metrics.tasks.lines import LineRetrieval, LinesPoint
from hf_longctx.metrics.tasks.needle import NeedleCell, NeedleGrid


SETTINGS = {"model": "someone/tiny", "mode": "easy"}
GRID = NeedleGrid.of_parts(
    [NeedleCell(answers(True, i < j), 100 * i, j / 4, [7, 7]) for i in range(1, 4) for j in range(5) if i + j < 7],
    SETTINGS,
)
REPLIED = LineRetrieval.of_parts([LinesPoint(answers(True, reply="12"), 10, [600], [0])], SETTINGS)


@pytest.mark.parametrize(
    "result, texts",
    [
        (GRID, ["Needle in a haystack, easy mode of someone/tiny", "context: 150", "300", "given token for token"]),
        (REPLIED, ["Line retrieval of someone/tiny", "found in the responses", "given token for token", "600"]),
    ],
    ids=["needle", "lines"],
)
def test_words_of_the_picture(words, result, texts):
    picture = words(result.plot, train_length=150)
    assert [text for text in texts if text not in picture] == []
    assert ("found in the responses" in picture) is (result is REPLIED)


def test_a_needle_has_its_column_by_length_and_its_row_by_depth(figures):
    GRID.plot("unused")
    assert figures[0].get_supxlabel() == "2 haystacks in each cell"
    axes = figures[0].axes[0]
    colours = axes.images[0].get_array().filled(math.nan)
    words = {text.get_position(): text.get_text() for text in axes.texts}
    assert colours.shape == (5, 3) and len(words) == len(GRID.cells)
    for cell in GRID.cells:
        row, column = GRID.depths.index(cell.depth), GRID.lengths.index(cell.length)
        assert colours[row, column] == cell.exact_rate and words[column, row] == f"{cell.exact_rate * 2:.0f}/2"


def test_lines_are_evenly_spaced_with_their_intervals(figures):
    LineRetrieval.of_parts([LinesPoint(answers(True, n < 20), n, [20 * n] * 2, [0, 1]) for n in (5, 10, 160)]).plot(
        "unused"
    )
    axes = figures[0].axes[0]
    assert list(axes.get_xticks()) == [0, 1, 2]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["5", "10", "160"]
    exact, probability = axes.containers
    ends = [segment[:, 1] for segment in exact.lines[2][0].get_segments()]
    assert ends[0] == pytest.approx(wilson(1, 2)) and ends[2] == pytest.approx(wilson(0.5, 2))
    assert not set(exact.lines[0].get_xdata()) & set(probability.lines[0].get_xdata()), "one series hides the other"
