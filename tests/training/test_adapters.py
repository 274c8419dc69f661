"""Adapters and modules trained in full are the same after saving, loading and merging."""

import json

import pytest
import torch


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_longctx import FoxConfig, FoxForCausalLM, HMTConfig, HMTWrapper
from hf_longctx.training.adapters import BASE, add_lora, load_adapter, model_fingerprint
from hf_longctx.training.config import FinetuneConfig


IDS = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
SIZES = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
NORMS = ["norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "o_norm"]


def fox(tied):
    return FoxForCausalLM(FoxConfig.pro(**SIZES, tie_word_embeddings=tied))


def llama(tied):
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def hmt(tied):
    return HMTWrapper.from_backbone(llama(tied), HMTConfig(segment_length=16, sensory_tokens=4))


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


@pytest.mark.parametrize(
    "make, targets, in_full, tied",
    [
        (fox, ["q_proj", "g_proj"], [], False),
        (fox, None, [*NORMS, "embed_tokens"], False),
        (fox, None, ["embed_tokens", "lm_head"], True),
        (fox, None, ["embed_tokens", "lm_head"], False),
        (llama, ["all-linear"], ["lm_head"], True),
        (llama, None, ["q_proj", "norm"], True),
        (hmt, ["q_proj", "down_proj"], ["memory"], True),
    ],
)
def test_an_adapter_is_read_and_merged_as_it_was_trained(make, targets, in_full, tied, tmp_path):
    torch.manual_seed(0)
    make(tied).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    start, known = logits(base), model_fingerprint(base)
    paths = dict(data="-", output_dir="-", model="-")
    adapted = add_lora(base, FinetuneConfig(lora_target_modules=targets, lora_modules_to_save=in_full, **paths))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    expected = logits(adapted)
    assert (expected - start).abs().max() > 0.01
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / BASE).write_text(json.dumps(known))

    again = load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), expected, rtol=1e-6, atol=1e-6)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    rounding = 64 * torch.finfo(torch.float32).eps * expected.abs().max().item()  # sums in another order
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for model in (merged, loaded):
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=rounding)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied


def test_an_adapter_knows_its_base_in_every_dtype_and_with_another_rope_base(tmp_path):
    torch.manual_seed(0)
    base = llama(False)
    known = model_fingerprint(base)
    assert model_fingerprint(base.bfloat16()) == known
    other = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}))
    other.load_state_dict(llama(False).state_dict())
    assert model_fingerprint(other)["rope_theta"] != known["rope_theta"]
