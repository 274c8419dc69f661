"""A Llama that many people have becomes a FoX: SmolLM2-135M-Instruct, as `scripts.fetch_model` saves it."""

import os
from pathlib import Path

import pytest
import torch


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import stdlib_text
from hf_longctx.fox.convert import from_llama
from hf_longctx.training.config import FinetuneConfig
from hf_longctx.training.run import train


FOLDER = Path(os.environ.get("HF_LONGCTX_MODELS") or Path.home() / ".cache" / "hf_longctx") / "smollm2-135m"

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"{FOLDER} is missing: python -m scripts.fetch_model smollm2-135m"
)


@torch.no_grad()
def loss(model, ids):
    return model.eval()(input_ids=ids, labels=ids).loss.item()


def test_smollm2_becomes_a_fox_of_the_same_loss_which_training_lowers(tmp_path):
    text = stdlib_text("train")[:4000]
    (tmp_path / "text.txt").write_text(text)
    ids = torch.tensor([AutoTokenizer.from_pretrained(FOLDER)(text)["input_ids"][:64]])
    llama = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert loss(from_llama(llama), ids) == pytest.approx(loss(llama, ids), abs=1e-4)
    del llama.model.layers[2:]  # a step of all 30 takes a second
    llama.config.num_hidden_layers = 2
    before = loss(llama, ids)
    llama.save_pretrained(tmp_path / "llama")
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(tmp_path / "llama")
    settings = dict(max_length=64, gradient_accumulation_steps=1, max_steps=5, learning_rate=1e-3)
    paths = dict(model=str(tmp_path / "llama"), data=str(tmp_path / "text.txt"), output_dir=str(tmp_path / "run"))
    assert train(FinetuneConfig.from_recipe("fox-from-llama", **settings, **paths)) == 0
    fox = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert fox.config.model_type == "fox"
    assert loss(fox, ids) < before - 0.02
