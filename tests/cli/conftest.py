"""A model folder for the commands to work on."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_longctx import FoxConfig, FoxForCausalLM


DEMO = Path(__file__).resolve().parents[2] / "model_cards" / "fox-demo"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny FoX (Pro) with random weights, which claims 64 tokens, and a tokenizer of 1024 tokens of English."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")
    path = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    special = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    FoxForCausalLM(FoxConfig.pro(**sizes, **special, max_position_embeddings=64)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def no_hub(tmp_path_factory, monkeypatch):
    """No network, and a cache of tokens that is not the user's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
