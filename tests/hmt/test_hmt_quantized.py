"""Quantized backbones: the memory is never quantized, it learns through them, and a checkpoint points to them."""

from types import SimpleNamespace

import pytest
import torch
from transformers import BitsAndBytesConfig

from hf_longctx.hmt import HMTConfig, HMTWrapper


SETTINGS = {"segment_length": 8, "sensory_tokens": 3, "memory_size": 4}


def test_a_checkpoint_with_quantized_weights_is_refused(make_wrapper, llama, tmp_path):
    llama.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gptq"))
    model = make_wrapper()
    with pytest.raises(NotImplementedError, match="backbone_in_checkpoint=False"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("whole", [False, True], ids=["pointer", "whole"])
def test_bitsandbytes(whole, llama, tokens, tmp_path):
    """8 bits, as far as it works on a CPU. Runs where bitsandbytes is installed."""
    pytest.importorskip("bitsandbytes")
    llama.float().save_pretrained(tmp_path / "llama")
    loading = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "dtype": torch.float32}
    config = HMTConfig(**SETTINGS, backbone_in_checkpoint=whole)
    model = HMTWrapper.from_backbone(tmp_path / "llama", config, **loading, device_map="cpu")
    assert model.backbone.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad.any() for p in model.memory.parameters())
    model.save_pretrained(tmp_path / "hmt")
    again = HMTWrapper.from_pretrained(tmp_path / "hmt", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
