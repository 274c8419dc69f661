"""Per-token loss: the moving average, the perplexity, the JSON."""

import doctest
import json
from itertools import pairwise

import numpy as np
import pytest

from hf_longctx.metrics.loss import averages, result
from hf_longctx.metrics.loss.averages import moving_average, perplexity
from hf_longctx.metrics.loss.result import PositionLoss, window_starts


@pytest.fixture(scope="module")
def recorded(golden):
    return json.loads((golden / "forgetting_curve" / "per_token_loss.json").read_text())


def test_examples_in_docstrings():
    assert doctest.testmod(averages) == (0, 2)
    assert doctest.testmod(result) == (0, 1)


def test_recorded_loss(recorded):
    measured = PositionLoss(recorded["loss"], recorded["M"])
    assert np.allclose(measured.smoothed(), recorded["smoothed_101"], rtol=1e-12)
    assert np.allclose(measured.perplexity, recorded["perplexity"], rtol=1e-12)


@pytest.mark.parametrize("tokens, window", [(1, 101), (7, 1), (7, 3), (7, 101), (300, 101)])
def test_moving_average_is_that_of_its_definition(tokens, window):
    values = np.random.default_rng(0).normal(size=tokens)
    expected = [values[max(i - window // 2, 0) : i + window // 2 + 1].mean() for i in range(tokens)]
    assert np.allclose(moving_average(values, window), expected, rtol=1e-9)


@pytest.mark.parametrize("window", [0, -1, 100])
def test_a_window_has_a_centre(window):
    with pytest.raises(ValueError, match=f"window is {window}; it must be odd and positive"):
        moving_average([1.0], window)


def test_perplexity_of_equal_losses():
    assert np.allclose(perplexity(np.full(9, np.log(7))), 7)


@pytest.mark.parametrize("corpus, length, sequences", [(100, 100, 3), (1000, 30, 7), (1000, 10, None), (35, 10, None)])
def test_windows_lie_within_the_corpus(corpus, length, sequences):
    starts = window_starts(corpus, length, sequences)
    assert starts[0] == 0
    assert starts[-1] <= corpus - length
    if sequences is None:
        assert len(starts) == min(corpus // length, 32)
        assert all(b - a >= length for a, b in pairwise(starts))
    else:
        assert len(starts) == sequences


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((99, 100, None), "99 tokens, fewer than context_length=100"),
        ((9, 0, None), "at least 1"),
        ((9, 1, 0), "least"),
    ],
)
def test_no_window(arguments, message):
    with pytest.raises(ValueError, match=message):
        window_starts(*arguments)


def test_json(tmp_path):
    result = PositionLoss(np.linspace(3, 1, 70), 4, {"model": "tiny", "seed": 0})
    result.save(tmp_path / "loss.json")
    text = (tmp_path / "loss.json").read_text()
    assert PositionLoss.from_json(text) == result
    assert PositionLoss.from_json(text).to_json() == result.to_json()
    document = json.loads(text)
    assert document["perplexity"].keys() == {"1", "2", "4", "8", "16", "32", "64", "70"}
    assert document["perplexity"]["70"] == pytest.approx(np.exp(2))
    assert "70 tokens" in result.summary()
    assert "4 sequences" in result.summary()


def test_other_json():
    text = PositionLoss([1.0], 1).to_json()
    with pytest.raises(ValueError, match=r"no result of position_loss.*'other'"):
        PositionLoss.from_json(text.replace("position_loss", "other"))
    with pytest.raises(ValueError, match=r"no result of position_loss.*None"):
        PositionLoss.from_json("[1]")
    with pytest.raises(ValueError, match="has format 9, and this version of hf-longctx reads up to 1"):
        PositionLoss.from_json(text.replace('"format": 1', '"format": 9'))


@pytest.mark.parametrize("loss, sequences", [([], 1), ([1.0, np.nan], 1), ([np.inf], 1), ([1.0], 0)])
def test_no_result(loss, sequences):
    with pytest.raises(ValueError, match="finite number"):
        PositionLoss(loss, sequences)
