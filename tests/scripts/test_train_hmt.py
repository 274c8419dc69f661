"""scripts.train_hmt runs the command once for each stage, the second time on the model of the first stage."""

import sys

import pytest
from transformers import LlamaConfig

from hf_longctx import HMTConfig
from hf_longctx.training.config import FinetuneConfig, parse
from scripts import train_hmt


@pytest.fixture
def stages(monkeypatch):
    """Return the settings of both stages, without training."""

    def run(model):
        calls = []
        monkeypatch.setattr(train_hmt, "main", lambda argv: calls.append(parse(FinetuneConfig, argv[1:])))
        monkeypatch.setattr(sys, "argv", ["train_hmt", model, "--data", "books", "--output_dir", "run"])
        assert train_hmt.stages() == 0
        return calls

    return run


def test_both_stages_one_after_the_other(stages):
    first, second = stages("llama")
    assert (first.model, first.output_dir, first.max_length, first.max_steps) == ("llama", "run/stage-1", 1024, 200)
    assert (second.model, second.output_dir) == ("run/stage-1/model", "run/stage-2")
    assert (second.max_length, second.max_steps) == (7680, 500)
    assert second.config_fields(HMTConfig) == {"segment_length": 512}
    assert {call.data for call in (first, second)} == {"books"}


def test_the_segments_of_a_saved_memory_are_the_default(stages, tmp_path):
    HMTConfig(segment_length=32, sensory_tokens=4, backbone_config=LlamaConfig()).save_pretrained(tmp_path)
    first, second = stages(str(tmp_path))
    assert (first.max_length, second.max_length) == (64, 480)
    assert first.config_fields(HMTConfig) == {"segment_length": 32}
