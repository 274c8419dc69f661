"""Modules of scripts, and a tiny model instead of SmolLM2."""

import importlib
from pathlib import Path

import pytest
from demo_model import DEMO, VOCABULARY
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx.corpus import stdlib_text


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load_script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"scripts.{name}")


@pytest.fixture
def load(load_script):
    return lambda name: load_script(f"evidence.{name}")


@pytest.fixture
def smollm2(load, monkeypatch, tmp_path):
    """Replace SmolLM2 by a tiny Llama, and novels by text of the standard library."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **sizes))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path / "model")
    (tmp_path / "text" / "train").mkdir(parents=True)
    (tmp_path / "text" / "train" / "a.txt").write_text(stdlib_text("train")[:2000])
    for book in load("hmt_neural_cache").BOOKS:
        (tmp_path / "text" / "train" / f"{book}.txt").write_text(stdlib_text("held_out")[:6000])
    (tmp_path / "text" / "held_out.txt").write_text(stdlib_text("held_out")[:20_000])
    monkeypatch.setitem(load("hmt_neural_cache").BACKBONES, "smollm2", tmp_path / "model")
    monkeypatch.setattr(load("hmt_neural_cache"), "TEXT", tmp_path / "text")
