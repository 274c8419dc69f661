"""One checkpoint is one function: `HMTConfig.reread`, with a cache and without, against the definition in loops."""

import pytest
import torch
import transformers
from gradients import assert_same_gradients, gradients
from plain_hmt import plain_single
from streams import CHUNKS, stream
from test_hmt_backbones import BACKBONES
from tiny_hmt import ROUNDING, tiny_llama
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.hmt.backbone_hmt import Backbone


FALCON = {
    **{"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    **{"mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8},
}
LLAMA, LLAMA4 = (BACKBONES[f"{name}ForCausalLM"] for name in ("Llama", "Llama4"))
NEO = dict(vocab_size=61, hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=64, window_size=9)
NEO |= {"attention_types": [[["global", "local"], 1]]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 10}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI3 = LLAMA | {"original_max_position_embeddings": 10, "rope_parameters": LONGROPE, "sliding_window": None}
# name, sizes, settings, reread
KINDS = {
    "Llama": ("LlamaForCausalLM", LLAMA, {}, False),
    "Llama reread": ("LlamaForCausalLM", LLAMA, {"reread": True, "recall_tokens": 2}, True),
    "Llama4, long chunks": ("Llama4ForCausalLM", LLAMA4, {}, False),
    "Llama4, short chunks": ("Llama4ForCausalLM", LLAMA4 | {"attention_chunk_size": 12}, {}, True),
    "GPT-2 reread": ("GPT2LMHeadModel", BACKBONES["GPT2LMHeadModel"], {"reread": True}, True),
    "neural cache reread": ("LlamaForCausalLM", LLAMA, {"reread": True, "neural_cache_weight": 0.3}, True),
    "GPT-Neo, short windows": ("GPTNeoForCausalLM", NEO, {}, True),
    "Phi3, longrope": ("Phi3ForCausalLM", PHI3, {}, True),
    "Gemma2": ("Gemma2ForCausalLM", BACKBONES["Gemma2ForCausalLM"], {}, True),
    "BLOOM": ("BloomForCausalLM", BACKBONES["BloomForCausalLM"], {}, True),
    "Mamba": ("MambaForCausalLM", BACKBONES["MambaForCausalLM"], {}, True),
    "Falcon-H1": ("FalconH1ForCausalLM", FALCON, {}, True),
}

# Llama's norms are in float32, also backward, and a token that is read twice has two parts of its gradient.
NORM = 8 * torch.finfo(torch.float32).eps


def make(kind):
    name, sizes, settings, _ = KINDS[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    backbone = model_class(model_class.config_class(**sizes, **special)).eval()
    with torch.no_grad():  # far from the near-uniform start, so that every input matters visibly
        for parameter in backbone.parameters():
            parameter.mul_(3 if parameter.dim() == 2 else 1)
    config = HMTConfig(segment_length=8, sensory_tokens=3, memory_size=3, **settings)
    return HMTWrapper.from_backbone(backbone, config)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_definition_with_a_cache_and_without(kind, tokens, monkeypatch):
    model, length = make(kind), 21
    assert model.config.reread == KINDS[kind][3]
    expected = torch.stack([plain_single(model, row[:length]) for row in tokens])
    allowed = 256 * torch.finfo(torch.float32).eps * expected.abs().max()  # 1e-2 of it moved between the two models
    for has_cache in (True, False):
        if not has_cache:
            monkeypatch.setattr(Backbone, "checkpoints_layers", True)
            model.lm._continues = False
        torch.testing.assert_close(model(tokens[:, :length]).logits, expected, atol=allowed, rtol=0)
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, :5] = 0
        padded = model(tokens[:, :length], attention_mask=mask).logits
        torch.testing.assert_close(padded[1], expected[1], atol=allowed, rtol=0)


SETTINGS = [
    {},
    {"sum_fraction": 0.9},
    {"sensory_tokens": 0, "recall_tokens": 2},
    {"recall": False},
    {"recall_tokens": 4, "memory_size": 2},
    {"neural_cache_weight": 0.5, "recall_tokens": 4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_without_a_cache_it_is_the_same_function(make_wrapper, tokens, monkeypatch, settings):
    model, results = make_wrapper(**settings), []
    for has_cache in (True, False):
        if not has_cache:
            monkeypatch.setattr(Backbone, "checkpoints_layers", True)
            model.lm._continues = False
        model.zero_grad()
        out = model(tokens, labels=tokens, output_recall=True)
        out.loss.backward()
        with torch.no_grad():
            chunked, _ = stream(model, tokens, CHUNKS["ragged"])
            ids = model.generate(tokens[:, :13], max_new_tokens=12, do_sample=False, eos_token_id=None)
        results.append((out, gradients(model), chunked, ids))
        assert model.config.reread is False
    (out, gradient, chunked, ids), (same_out, same_gradient, same_chunked, same_ids) = results
    torch.testing.assert_close(same_out.logits, out.logits, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(same_out.memories, out.memories, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(same_chunked, chunked, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(chunked, out.logits, atol=ROUNDING, rtol=0)
    assert torch.equal(same_ids, ids)
    assert_same_gradients(same_gradient, gradient, NORM)


def logits_and_gradients(model, tokens):
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    return out.logits, gradients(model)


def assert_same_results(expected, got):
    torch.testing.assert_close(got[0], expected[0], atol=ROUNDING, rtol=0)
    assert_same_gradients(got[1], expected[1], NORM)


def test_layers_that_are_checkpointed_use_no_cache(make_wrapper, tokens):
    model, results = make_wrapper().train(), []
    for checkpointing in (False, True):
        if checkpointing:
            backbone = model.backbone
            getattr(backbone, "activation_checkpointing_enable", backbone.gradient_checkpointing_enable)()
        results.append(logits_and_gradients(model, tokens))
    assert_same_results(*results)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_under_autocast(make_wrapper, tokens, monkeypatch, attention):
    model = make_wrapper().float()
    model.set_attn_implementation(attention)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens).logits
        monkeypatch.setattr(Backbone, "checkpoints_layers", True)
        torch.testing.assert_close(model(tokens).logits, expected, atol=0.05 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Falcon-H1"])
def test_the_dtype_does_not_decide(kind):
    backbone = make(kind).backbone
    config = HMTConfig(segment_length=8, sensory_tokens=3)
    assert HMTWrapper.from_backbone(backbone.bfloat16(), config).config.reread == KINDS[kind][3]
    with torch.device("meta"):
        empty = HMTWrapper.from_backbone(type(backbone)(backbone.config), config)
    assert empty.config.reread is None  # decided when there are weights


def like_flash(module, query, key, value, attention_mask, position_ids=None, **options):
    """Compute attention as FlashAttention does: without a mask, and with packed sequences where positions jump."""
    assert attention_mask is None
    if position_ids is not None and len(query) == 1:
        assert (position_ids.diff() == 1).all()
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, visible, **options)


@pytest.fixture
def flash(monkeypatch):
    """The name of an attention function without masks, which is registered for one test."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "like_flash", like_flash)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "like_flash", lambda *args, **kwargs: None)
    return "like_flash"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"num_key_value_heads": 1}], ids=str)
def test_attention_without_masks_lets_the_prompt_see_itself_alone(tokens, settings, rows, flash):
    settings, tokens = dict(settings), tokens[:rows]
    torch.manual_seed(0)
    llama = tiny_llama(**{name: settings.pop(name) for name in ["num_key_value_heads"] if name in settings})
    config = HMTConfig(segment_length=8, sensory_tokens=3, memory_size=4, **settings)
    results = []
    for attention in ("sdpa", flash):
        llama.config._attn_implementation = attention
        torch.manual_seed(1)
        model = HMTWrapper.from_backbone(llama, config)
        assert model.config.reread is False and llama.config._attn_implementation == attention
        results.append(logits_and_gradients(model, tokens))
    assert_same_results(*results)
    with pytest.raises(AssertionError):  # the backbone alone gets its position ids as before
        llama(tokens[:1], position_ids=torch.arange(43)[None] * 2)


def test_attention_without_masks_is_refused_where_a_mask_is_needed(make_wrapper, llama, tokens, monkeypatch, flash):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "no_masks", like_flash)
    for attention, settings in ((flash, {"recall_tokens": 2}), ("no_masks", {})):
        llama.config._attn_implementation = attention
        with pytest.raises(ValueError, match=f"reread=False needs a 4D mask, and attention '{attention}'.*'sdpa'"):
            make_wrapper(**settings)(tokens)
    llama.config._attn_implementation = flash
    monkeypatch.setattr(Backbone, "checkpoints_layers", True)
    with pytest.raises(ValueError, match="gradient checkpointing of the layers is off"):
        make_wrapper()(tokens)
    assert make_wrapper(reread=True)(tokens).logits.isfinite().all()


def test_attention_that_is_not_of_the_interface_is_refused(make_wrapper, llama, tokens, monkeypatch, flash):
    """Falcon and GPT-Neo call FlashAttention themselves."""
    model = make_wrapper()
    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *args: like_flash)
    llama.config._attn_implementation = flash
    with pytest.raises(RuntimeError, match="keep the prompt from attending to other tokens"):
        model(tokens)


def test_a_failing_probe_decides_nothing(make_wrapper, llama, tokens, monkeypatch):
    forward = llama.model.forward

    def fails(*args, attention_mask=None, **kwargs):
        if attention_mask is not None:
            raise RuntimeError("out of order")
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama.model, "forward", fails)
    for reread in (None, False):
        with pytest.raises(ValueError, match=r"or set HMTConfig\(reread=True\)"):
            make_wrapper(reread=reread)
    assert make_wrapper(reread=True)(tokens).logits.isfinite().all()


def test_masks_and_windows_that_no_config_reports_are_found(make_wrapper, llama, monkeypatch):
    monkeypatch.setattr(Backbone, "keeps_all_keys", lambda *args: True)
    assert make("GPT-Neo, short windows").config.reread is True
    forward = llama.model.forward
    monkeypatch.setattr(llama.model, "forward", lambda attention_mask=None, **inputs: forward(**inputs))
    assert make_wrapper().config.reread is True


def test_it_is_saved_and_refused_where_it_cannot_be_computed(make_wrapper, tokens, tmp_path):
    for reread in (False, True):
        model = make_wrapper(reread=reread)
        model.save_pretrained(tmp_path / "hmt")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "hmt")
        assert again.config.reread is reread
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert (make_wrapper(reread=False)(tokens).logits - model(tokens).logits).abs().max() > 1e-3
    with pytest.raises(ValueError, match="from a model with other settings"):
        make_wrapper(reread=False)(tokens, state=model(tokens, use_cache=True).state)
    for kind in ("Gemma2", "Mamba", "Falcon-H1", "BLOOM"):
        model = make(kind)
        model.config.reread = False
        with pytest.raises(ValueError, match="is not supported by"):
            model(tokens)
        model.config.save_pretrained(tmp_path / kind)
        model.save_pretrained(tmp_path / kind)
        with pytest.raises(ValueError, match="is not supported by"):
            AutoModelForCausalLM.from_pretrained(tmp_path / kind)
