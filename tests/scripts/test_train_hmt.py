"""scripts.train_hmt runs the command once for each stage, the second time on the model of the first stage."""

import sys

from transformers import LlamaConfig

from hf_longctx import HMTConfig
from hf_longctx.training.config import FinetuneConfig, parse
from scripts import train_hmt


def test_both_stages_one_after_the_other(monkeypatch):
    calls = []
    monkeypatch.setattr(train_hmt, "main", lambda argv: calls.append(parse(FinetuneConfig, argv[1:])))
    monkeypatch.setattr(
        sys, "argv", ["train_hmt", "llama", "--data", "books", "--output_dir", "run", "--segments", "8"]
    )
    assert train_hmt.stages() == 0
    first, second = calls
    assert (first.model, first.output_dir, first.max_length, first.max_steps) == ("llama", "run/stage-1", 1024, 200)
    assert (second.model, second.output_dir) == ("run/stage-1/model", "run/stage-2")
    assert (second.max_length, second.max_steps, second.config_fields(HMTConfig)) == (
        4096,
        500,
        {"segment_length": 512},
    )
    assert {call.data for call in calls} == {"books"} and {call.recipe for call in calls} == {"hmt"}


def test_the_segments_of_a_saved_memory_are_the_default(monkeypatch, tmp_path):
    calls = []
    HMTConfig(segment_length=32, sensory_tokens=4, backbone_config=LlamaConfig()).save_pretrained(tmp_path)
    monkeypatch.setattr(train_hmt, "main", lambda argv: calls.append(parse(FinetuneConfig, argv[1:])))
    monkeypatch.setattr(sys, "argv", ["train_hmt", str(tmp_path), "--data", "books", "--output_dir", "run"])
    assert train_hmt.stages() == 0
    assert [call.max_length for call in calls] == [64, 480]
    assert calls[0].config_fields(HMTConfig) == {"segment_length": 32}


def test_a_stage_that_fails_ends_the_script(monkeypatch):
    monkeypatch.setattr(train_hmt, "main", lambda argv: 2)
    monkeypatch.setattr(sys, "argv", ["train_hmt", "llama", "--output_dir", "run"])
    assert train_hmt.stages() == 2
