"""A model folder for the commands to work on."""

import pytest
import torch
from demo_model import DEMO
from transformers import AutoTokenizer

from hf_longctx import FoxConfig, FoxForCausalLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return a tiny FoX (Pro) with random weights, which claims 64 tokens, and the demo's tokenizer."""
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
    """Disable the network, and use an empty cache of tokens."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
