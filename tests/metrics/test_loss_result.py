"""Per-token loss: the moving average, the perplexity, the JSON."""

import json
from itertools import pairwise

import numpy as np
import pytest

from hf_longctx.metrics.tasks.loss import PositionLoss, mean_loss, moving_average, smoothing_window, window_starts


@pytest.fixture(scope="module")
def recorded(golden):
    return json.loads((golden / "forgetting_curve" / "per_token_loss.json").read_text())


def of_sequences(losses, starts=None):
    """Return the result of these sequences. By default, they do not overlap."""
    starts = range(0, len(losses) * len(losses[0]), len(losses[0])) if starts is None else starts
    return PositionLoss.of_mean(**mean_loss(losses, starts))


def test_recorded_loss(recorded):
    measured = PositionLoss.of_mean(recorded["loss"], recorded["M"])
    assert np.allclose(moving_average(measured.loss, 101), recorded["smoothed_101"], rtol=1e-12)
    assert np.allclose(measured.perplexity, recorded["perplexity"], rtol=1e-12)


@pytest.mark.parametrize("tokens", [1, 10, 64, 1009, 1010, 100_000])
def test_smoothing_leaves_a_tenth_of_the_context_apart(tokens):
    window = smoothing_window(tokens)
    assert window % 2 == 1 and 1 <= window <= max(1, tokens / 10) and window <= 101
    assert window + 2 > min(tokens / 10, 101), "the window is narrower than it may be"


def test_the_error_is_that_of_the_smoothed_mean():
    """Errors of neighbouring tokens are correlated, so smoothing does not divide the error by the window."""
    rng = np.random.default_rng(0)
    losses = 3 + rng.normal(size=(6, 1)) + 0.01 * rng.normal(size=(6, 50))
    result = of_sequences(losses)
    smoothed = np.stack([[row[max(i - 2, 0) : i + 3].mean() for i in range(50)] for row in losses])
    assert result.window == 5 and result.sequences == 6
    assert result.smoothed() == pytest.approx(smoothed.mean(0))
    assert result.error == pytest.approx(smoothed.std(0, ddof=1) / 6**0.5)
    assert f"{result.smoothed()[-1]:.3f} ± {result.error[-1]:.3f} at the end of 50 tokens" in result.summary()
    assert of_sequences(losses[:1]).error is None


def test_sequences_that_overlap_are_one_text():
    """The report of 32 windows within 44 tokens: no error, and a warning; of two side by side among three, theirs."""
    losses = 3 + np.random.default_rng(0).normal(size=(32, 20))
    close = of_sequences(losses, range(32))
    assert close.texts == 2 and close.sequences == 32  # the sequences that start at 0 and at 20
    assert close.error == pytest.approx(of_sequences(losses[[0, 20]]).error)
    assert "its 32 sequences overlap, and count as 2 sequences" in close.summary()
    assert of_sequences(losses, [0] * 32).error is None
    assert PositionLoss.from_json(close.to_json()) == close
    assert not of_sequences(losses).shortage


@pytest.mark.parametrize("corpus, length, sequences", [(100, 100, 3), (1000, 30, 7), (1000, 10, None), (35, 10, None)])
def test_windows_lie_within_the_corpus(corpus, length, sequences):
    starts = window_starts(corpus, length, sequences)
    assert starts[0] == 0
    assert starts[-1] <= corpus - length
    if sequences is None:
        assert len(starts) == min(corpus // length, 32)
        assert all(b - a >= length for a, b in pairwise(starts))
    else:
        assert len(starts) == (sequences if corpus > length else 1)


def test_the_numbers_of_a_loss():
    result = of_sequences(np.add.outer([-0.1, 0.1, 0.2, -0.2], np.linspace(3, 1, 70)))
    assert json.loads(result.to_json())["numbers"][0]["value"] == pytest.approx(np.exp(2), abs=1e-4)
    assert [row[0] for row in result.table().rows] == [1, 2, 4, 8, 16, 32, 64, 70]
    assert "70 tokens" in result.summary() and "4 sequences" in result.summary()
