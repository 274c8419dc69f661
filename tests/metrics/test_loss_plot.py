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
    assert "someone/tiny, 4 sequences" in words and ">other, 2 sequences<" in words
    assert "moving average of 39 or 59 tokens<" in words
    assert draw(*[LOSS] * 9).count("someone/tiny, 4 sequences") == 9  # more models than colours


@pytest.fixture
def figures(monkeypatch):
    """What would have been saved."""
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path: figures.append(figure))
    return figures


def test_an_untrained_model_looks_level(figures):
    rng = np.random.default_rng(0)
    PositionLoss.of_sequences(6.24 + 0.01 * rng.normal(size=(8, 400)), {}).plot("unused")
    loss, perplexity = figures[0].axes
    assert np.ptp(loss.get_ylim()) >= 0.5 and np.ptp(np.log(perplexity.get_ylim())) >= 0.499


def test_the_ribbon_is_the_standard_error(figures):
    result = PositionLoss.of_sequences([[3.0, 2.0, 1.0], [3.0, 1.0, 0.0], [3.0, 3.0, 2.0]], {})
    result.plot("unused")
    PositionLoss([3.0, 2.0, 1.0], 3).plot("unused")
    (ribbon,) = figures[0].axes[0].collections
    heights = {tuple(corner) for corner in ribbon.get_paths()[0].vertices.round(6).tolist()}
    assert {(2.0, round(2 + 1 / 3**0.5, 6)), (2.0, round(2 - 1 / 3**0.5, 6)), (1.0, 3.0)} <= heights
    assert not figures[1].axes[0].collections, "an error that is not known is drawn"


def test_a_result_draws_itself(tmp_path):
    LOSS.plot(tmp_path / "picture.png", train_length=256)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="no per-token loss"):
        plot_losses([], tmp_path / "picture.svg")
