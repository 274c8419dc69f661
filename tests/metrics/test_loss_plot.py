"""Pictures of the per-token loss."""

import numpy as np
import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

import matplotlib

from hf_longctx.metrics.loss.plot import plot_losses
from hf_longctx.metrics.loss.result import PositionLoss


LOSS = PositionLoss(3 + np.exp(-np.arange(400) / 50), 4, {"model": "someone/tiny"})


@pytest.fixture
def draw(tmp_path):
    """Draws losses; returns an SVG whose words are text."""

    def draw(*losses, **options):
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            plot_losses(losses, tmp_path / "picture.svg", **options)
        return (tmp_path / "picture.svg").read_text()

    return draw


def test_one_model(draw):
    words = draw(LOSS, train_length=256)
    for text in ("Per-token loss of someone/tiny", "training context: 256 tokens", "4 sequences", "perplexity P(l)"):
        assert text in words


def test_a_training_context_beyond_the_picture_is_left_out(draw):
    words = draw(LOSS, train_length=512, title="My loss")
    assert "My loss" in words and "training context" not in words


def test_several_models(draw):
    other = PositionLoss(np.linspace(4, 2, 600), 2, {"model": "/home/me/models/other"})
    words = draw(LOSS, other)
    assert "someone/tiny (4 sequences)" in words and ">other (2 sequences)<" in words
    assert "perplexity: from l = 51<" in words
    assert "perplexity: from l = 1 or 51<" in draw(LOSS, PositionLoss([3.0, 2.5], 2))
    assert draw(*[LOSS] * 9).count("someone/tiny (4 sequences)") == 9  # more models than colours


def test_a_result_draws_itself(tmp_path):
    LOSS.plot(tmp_path / "picture.png", train_length=256)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="no per-token loss"):
        plot_losses([], tmp_path / "picture.svg")
