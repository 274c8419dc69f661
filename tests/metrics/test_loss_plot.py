"""Pictures of the per-token loss."""

import numpy as np
import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics import style
from hf_longctx.metrics.tasks.loss import PositionLoss, draw_losses


LOSS = PositionLoss.of_mean(3 + np.exp(-np.arange(400) / 50), 4, {"model": "someone/tiny"})


def plot_losses(results, path):
    figure = style.figure(*PositionLoss.inches)
    draw_losses(figure, results, "Losses")
    style.save(figure, path)


def test_one_model(words):
    picture = words(LOSS.plot, train_length=256)
    for text in ("Per-token loss of someone/tiny", "training context: 256 tokens", "4 sequences", "perplexity P(l)"):
        assert text in picture


def test_several_models(words):
    other = PositionLoss.of_mean(np.linspace(4, 2, 600), 2, {"model": "/home/me/models/other"})
    picture = words(plot_losses, [LOSS, other])
    assert "someone/tiny, 4 sequences other, 2 sequences" in picture
    assert "moving average of 39 or 59 tokens" in picture
    assert words(plot_losses, [LOSS] * 9).count("someone/tiny, 4 sequences") == 9  # more models than colours


def test_the_ribbon_is_the_standard_error(figures):
    PositionLoss.of_mean([3.0, 2.0, 1.0], 3, {}, [0.0, 0.5, 0.5]).plot("unused")
    PositionLoss.of_mean([3.0, 2.0, 1.0], 3).plot("unused")
    (ribbon,) = figures[0].axes[0].collections
    heights = {tuple(corner) for corner in ribbon.get_paths()[0].vertices.tolist()}
    assert {(2.0, 2.5), (2.0, 1.5), (1.0, 3.0)} <= heights
    assert not figures[1].axes[0].collections, "an error that is not known is drawn"
