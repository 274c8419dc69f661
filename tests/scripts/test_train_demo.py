"""The committed demo models went through the stages of scripts.train_demo, and show what the demo claims."""

import pytest
from demo_model import DEMO

from hf_longctx.metrics import read_result


CARDS = DEMO.parent


@pytest.fixture
def train_demo(monkeypatch):
    monkeypatch.syspath_prepend(CARDS.parent)
    from scripts import train_demo

    return train_demo


def test_the_fox_remembers_beyond_its_training_length(train_demo):
    """The input for a passage of n tokens has 2 n + 3 tokens."""
    fox, llama = (read_result(CARDS / name / "forgetting_curve.json") for name in train_demo.MODELS)
    assert fox.settings["train_length"] == llama.settings["train_length"] == 512
    assert fox.interval("fine").low >= 192 and fox.interval("coarse").low >= 512
    accuracy = [{point.length: point.copy_mean for point in curve.points} for curve in (fox, llama)]
    assert accuracy[0][384] > 0.97 > 0.5 > accuracy[1][384]
