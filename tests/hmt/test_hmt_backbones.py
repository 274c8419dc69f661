"""One wrapper, many backbones: training step, streams and reload on tiny random instances."""

import copy
from functools import cache

import pytest
import torch
import transformers
from causality import changed_by
from streams import assert_calls_do_not_matter
from transformers import AutoModelForCausalLM

import hf_longctx
from hf_longctx.hmt import HMTConfig, HMTWrapper


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61}
ROOM = {"max_position_embeddings": 64, "intermediate_size": 24}
HEADS = {"num_key_value_heads": 1, "head_dim": 8}
LINEAR = {**HEADS, "num_local_experts": 2, "block_size": 4, "layer_types": ["linear_attention", "full_attention"]}
BACKBONES = {
    "LlamaForCausalLM": {**SIZES, **ROOM},
    "Qwen2ForCausalLM": {**SIZES, **ROOM, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "OPTForCausalLM": {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 8, "max_position_embeddings": 64},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 64},
    "FoxForCausalLM": {**SIZES, **ROOM, "qk_norm": True, "k_shift": True, "v_shift": True, "output_gate": "sigmoid"},
    "Gemma2ForCausalLM": {**SIZES, **ROOM, **HEADS, "sliding_window": 6, "final_logit_softcapping": 2.0},
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 61},
    "CohereForCausalLM": {**SIZES, **ROOM, "num_key_value_heads": 1, "logit_scale": 0.5},
    "Lfm2ForCausalLM": {
        **{**SIZES, **ROOM, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]},
        "initializer_range": 0.3,  # large enough for the convolution to change the logits
    },
    "MiniMaxForCausalLM": {**SIZES, **ROOM, **LINEAR},
    "Llama4ForCausalLM": {**SIZES, **ROOM, **HEADS, "intermediate_size_mlp": 24, "num_local_experts": 2},
    "ModernBertDecoderForCausalLM": {
        **{**SIZES, **ROOM, "local_attention": 12, "global_attn_every_n_layers": 2, "decoder_bias": False},
        **{"cls_token_id": 1, "sep_token_id": 2},
    },
    "RobertaForCausalLM": {**SIZES, **ROOM, "is_decoder": True},
    "FalconH1ForCausalLM": {  # a module without parameters fills a buffer of its layers
        **{**SIZES, **ROOM, **HEADS, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
        **{"mamba_n_groups": 1, "mamba_chunk_size": 8},
    },
    "MambaForCausalLM": {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 61, "state_size": 4},
    "RwkvForCausalLM": {
        **{"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 61},
        "intermediate_size": 24,
    },
}


# How the two-pass mode reads them. No prompt can precede windows shorter than a segment, or gates, and
# BLOOM takes no position ids.
RECURRENT = {f"{name}ForCausalLM" for name in ("Lfm2", "MiniMax", "FalconH1", "Mamba", "Rwkv")}
WITHOUT_CACHE = RECURRENT | {"RobertaForCausalLM"}
READ_AGAIN = WITHOUT_CACHE | {f"{name}ForCausalLM" for name in ("Gemma2", "Fox", "ModernBertDecoder", "Bloom")}


@cache
def make_model(name):
    """Return a wrapper in eval mode. The tests share it and do not change it."""
    model_class = getattr(hf_longctx if name.startswith("Fox") else transformers, name)
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    backbone = model_class(model_class.config_class(**BACKBONES[name], **special)).eval()
    return HMTWrapper.from_backbone(backbone, HMTConfig(segment_length=8, sensory_tokens=3, memory_size=3))


@pytest.fixture(params=BACKBONES)
def model(request):
    return make_model(request.param)


def assert_same_logits(actual, expected, largest=None):
    """Equal up to what float32 rounds in numbers as large as these logits; at most 4 eps were seen."""
    largest = expected.abs().max() if largest is None else largest
    allowed = 64 * torch.finfo(torch.float32).eps * largest.item()
    torch.testing.assert_close(actual, expected, atol=allowed, rtol=0)


def test_every_parameter_learns_with_logits_and_without(model, tokens):
    model = copy.deepcopy(model)  # in eval mode, without dropout
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []
    assert all(p.grad.any() for p in model.memory.parameters())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    other = model(tokens, labels=tokens, logits_to_keep=1).loss
    other.backward()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(other, loss, atol=0, rtol=64 * eps)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=256 * eps * largest, rtol=0)


def test_reload_gives_the_same_logits(model, tokens, tmp_path):
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, HMTWrapper)
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    with torch.no_grad():
        assert_same_logits(again(tokens).logits, model(tokens).logits)
    tied = [m.get_input_embeddings().weight is m.get_output_embeddings().weight for m in (model, again)]
    assert tied[0] == tied[1]


def test_streams_do_not_depend_on_the_calls(model, tmp_path):
    """No recurrence, convolution, window, position bias or cache sees padding."""
    with torch.no_grad():
        for seed in (0, 1):
            assert_calls_do_not_matter(model, tmp_path, seed, assert_same_logits)


def test_no_position_sees_a_later_token(model, tokens):
    early, here = changed_by(model, tokens[0, :29], range(29))
    assert_same_logits(torch.tensor(early), torch.zeros(29), largest=model(tokens[:1]).logits.abs().max())
    assert min(here) > 0


def test_the_layout_of_the_single_mode(model):
    """The scale of Gemma's embeddings reaches the prompts too."""
    lm, name = model.lm, type(model.lm.model).__name__
    assert 0.5 < model.memory.summary_token.std() / model.get_input_embeddings()(torch.arange(61)).std() < 2
    assert model.config.reread == (name in READ_AGAIN)
    assert lm.continues == (name not in WITHOUT_CACHE)
    rounded = HMTWrapper.from_backbone(copy.deepcopy(lm.model).bfloat16(), model.config)
    assert rounded.lm.continues == lm.continues and rounded.config.reread == model.config.reread
    with torch.device("meta"):
        empty = HMTWrapper.from_backbone(
            type(lm.model)(lm.model.config), HMTConfig(segment_length=8, sensory_tokens=3)
        )
    assert empty.config.reread is None  # decided when there are weights
