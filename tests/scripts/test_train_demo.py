"""The committed demo models went through the stages of scripts.train_demo, and show what the demo claims."""

import json

import pytest
from demo_model import DEMO

from hf_longctx.metrics import read_result


CARDS = DEMO.parent


@pytest.fixture
def train_demo(monkeypatch):
    monkeypatch.syspath_prepend(CARDS.parent)
    from scripts import train_demo

    return train_demo


def test_the_models_have_been_trained_in_the_stages_of_the_script(train_demo, monkeypatch, tmp_path):
    monkeypatch.setattr(train_demo.subprocess, "run", lambda *command, **options: None)
    for name, preset in train_demo.MODELS.items():
        commands = train_demo.train(name, preset, tmp_path)
        assert len((CARDS / name / "training.txt").read_text().splitlines()) == len(commands) == 3
        log = [json.loads(line) for line in (CARDS / name / "training_log.jsonl").read_text().splitlines()]
        assert [entry["step"] for entry in log if "loss" in entry][-1] == 384 and log[-1]["stage"] == 3


def test_the_fox_remembers_beyond_its_training_length(train_demo):
    """The input for a passage of n tokens has 2 n + 3 tokens."""
    fox, llama = (read_result(CARDS / name / "forgetting_curve.json") for name in train_demo.MODELS)
    assert fox.settings["train_length"] == llama.settings["train_length"] == 512
    assert fox.interval("fine").low >= 192 and fox.interval("coarse").low >= 512
    accuracy = [{point.length: point.copy_mean for point in curve.points} for curve in (fox, llama)]
    assert accuracy[0][384] > 0.97 > 0.5 > accuracy[1][384]
