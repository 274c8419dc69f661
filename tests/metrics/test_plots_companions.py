"""The pictures are drawn, and hold what they should."""

import math

import numpy as np
import pytest


pytest.importorskip("matplotlib")

from hf_longctx.metrics.loss.result import PositionLoss
from hf_longctx.metrics.retrieval.answers import Answer
from hf_longctx.metrics.retrieval.haystack import NeedleCell, NeedleGrid
from hf_longctx.metrics.retrieval.lines import LineRetrieval, LinesPoint
from hf_longctx.metrics.retrieval.plot import plot_losses


def answers(*found, reply=None):
    return [Answer(math.log(0.5), 3, exact=x, reply=reply, matched=x) for x in found]


SETTINGS = {"model": "someone/tiny", "mode": "easy"}
LOSS = PositionLoss(3 + np.exp(-np.arange(400) / 50), 4, SETTINGS)
GRID = NeedleGrid(
    [NeedleCell(answers(True, i < j), 100 * i, j / 4, [7, 7]) for i in range(1, 4) for j in range(5) if i + j < 7],
    SETTINGS,
)
LINES = LineRetrieval([LinesPoint(answers(True, n < 20), n, [20 * n] * 2, [0, 1]) for n in (10, 20, 30)], SETTINGS)


REPLIED = LineRetrieval([LinesPoint(answers(True, reply="12"), 10, [200], [0])], SETTINGS)


def text_of(path):
    """SVG with text kept as text."""
    return path.read_text()


@pytest.fixture(autouse=True)
def text_as_text():
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield


@pytest.mark.parametrize(
    "result, options, texts",
    [
        (
            LOSS,
            {"train_length": 256},
            ["Per-token loss of someone/tiny", "training context: 256 tokens", "4 sequences"],
        ),
        (LOSS, {"train_length": 512, "title": "My loss"}, ["My loss", "perplexity P(l)"]),
        (
            GRID,
            {"train_length": 150},
            ["Needle in a haystack, easy mode of someone/tiny", "training context: 150", "300"],
        ),
        (GRID, {"score": "probability"}, ["probability of an answer's token", "75%"]),
        (LINES, {}, ["Line retrieval of someone/tiny", "answers given token for token", "600"]),
        (REPLIED, {}, ["answers found in the replies", "answers given token for token"]),
    ],
)
def test_picture(tmp_path, result, options, texts):
    result.plot(tmp_path / "picture.svg", **options)
    drawn = text_of(tmp_path / "picture.svg")
    assert [text for text in texts if text not in drawn.replace("&#x27;", "'")] == []
    assert ("training context: 512" in drawn) is False
    assert ("found in the replies" in drawn) is (result is REPLIED)


def test_several_models(tmp_path):
    other = PositionLoss(np.linspace(4, 2, 600), 2, {"model": "/home/me/models/other"})
    plot_losses([LOSS, other], tmp_path / "picture.svg")
    drawn = text_of(tmp_path / "picture.svg")
    assert "someone/tiny (4 sequences)" in drawn
    assert ">other (2 sequences)<" in drawn
    assert "perplexity: from l = 51<" in drawn
    plot_losses([LOSS, PositionLoss([3.0, 2.5], 2)], tmp_path / "picture.svg")
    assert "perplexity: from l = 1 or 51<" in text_of(tmp_path / "picture.svg")
    plot_losses([LOSS] * 9, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="nothing was measured"):
        NeedleGrid(()).plot(tmp_path / "picture.svg")
    with pytest.raises(ValueError, match="nothing was measured"):
        LineRetrieval(()).plot(tmp_path / "picture.svg")
    with pytest.raises(ValueError, match="no per-token loss"):
        plot_losses([], tmp_path / "picture.svg")
    with pytest.raises(ValueError, match="no replies, so there is no match_rate; draw exact_rate or probability"):
        GRID.plot(tmp_path / "picture.svg", score="match_rate")
    with pytest.raises(ValueError, match="score must be one of"):
        GRID.plot(tmp_path / "picture.svg", score="judge")
