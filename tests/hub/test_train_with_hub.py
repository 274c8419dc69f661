"""Adapters and Trainer with the Hub, where hf_longctx is not installed."""

import pytest
import torch

from hf_longctx import FoxConfig, FoxForCausalLM
from hf_longctx.hub import build_bundle


def test_adapters_and_trainer(run_client, publish, tmp_path):
    for name in ("peft", "accelerate"):
        pytest.importorskip(name)
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2)
    FoxForCausalLM(FoxConfig.pro(**sizes)).save_pretrained(tmp_path / "fox")
    commit = publish(build_bundle(tmp_path / "fox").files, "alice/fox-to-train")
    run_client("train.py", commit)
