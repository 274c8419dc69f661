"""FlashAttention gets packed sequences one after another, without a mask; losses are those with a mask."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from demo_model import VOCABULARY
from transformers import AttentionInterface, BartConfig, BartForCausalLM, LlamaForCausalLM, PreTrainedModel


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from faults import log, make
from small_llama import save_llama

from hf_longctx.training.models import check_flash_attention
from hf_longctx.training.run import train


NAME = "flash_attention_stub"
SHAPES = []


def stub(module, query, key, value, attention_mask, scaling=None, position_ids=None, **kwargs):
    """Compute attention as FlashAttention does: each document separately, found by the positions of a single row."""
    assert attention_mask is None and len(query) == 1
    SHAPES.append(tuple(position_ids.shape))
    bounds = [*(position_ids[0] == 0).nonzero()[:, 0].tolist(), query.shape[2]]
    parts = [
        F.scaled_dot_product_attention(*(x[:, :, i:j] for x in (query, key, value)), is_causal=True, scale=scaling)
        for i, j in pairwise(bounds)
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


def test_packed_sequences_have_the_losses_that_they_have_with_a_mask(tmp_path, monkeypatch):
    AttentionInterface.register(NAME, stub)
    set_attention = PreTrainedModel.set_attn_implementation  # it would look for the stub on the Hub
    monkeypatch.setattr(
        PreTrainedModel,
        "set_attn_implementation",
        lambda self, name: (
            setattr(self.config, "_attn_implementation", name) if name == NAME else set_attention(self, name)
        ),
    )
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    save_llama(tmp_path / "llama", **sizes)
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number:02}.txt").write_text("The fox forgets. " * (1 + number % 4))
    run = dict(recipe="lora", model=str(tmp_path / "llama"), data=str(tmp_path / "text"), max_length=32, max_steps=3)
    run |= dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2)
    run |= dict(eval_data=str(tmp_path / "text"), eval_steps=3, per_device_eval_batch_size=1)
    losses = {}
    for name in ("sdpa", NAME):
        assert train(make(run | dict(output_dir=str(tmp_path / name), attn_implementation=name))) == 0
        losses[name] = [entry.get("loss", entry.get("eval_loss")) for entry in log(Path(tmp_path, name))]
    assert losses[NAME] == pytest.approx(losses["sdpa"], rel=1e-6) and {(1, 64), (1, 32)} <= set(SHAPES)

    model = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    model.set_attn_implementation(NAME)
    check_flash_attention(model)
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda x, position_ids=None, forward=forward, **kwargs: forward(x, **kwargs)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM does not pass position_ids to flash_att.*--packing false"):
        check_flash_attention(model)


def test_a_model_that_takes_no_positions_is_refused():
    """Its layers receive the other arguments of a call, but the collator removes positions."""
    AttentionInterface.register(NAME, stub)
    sizes = dict(vocab_size=VOCABULARY, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16)
    model = BartForCausalLM(BartConfig(**sizes))
    model.config._attn_implementation = NAME
    with pytest.raises(ValueError, match="BartForCausalLM does not pass position_ids to flash_att"):
        check_flash_attention(model)
