"""One checkpoint is one function: `HMTConfig.reread`, with a cache and without, against the definition in loops."""

import pytest
import torch
import transformers
from gradients import assert_same_gradients, gradients
from plain_hmt import plain_single
from streams import assert_close, stream
from test_hmt_backbones import BACKBONES
from tiny_hmt import NORM, ROUNDING, tiny_llama
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.hmt.backbone_hmt import Backbone


LLAMA, LLAMA4 = (BACKBONES[f"{name}ForCausalLM"] for name in ("Llama", "Llama4"))
NEO = dict(vocab_size=61, hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=64, window_size=9)
NEO |= {"attention_types": [[["global", "local"], 1]]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 10}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI3 = LLAMA | {"original_max_position_embeddings": 10, "rope_parameters": LONGROPE, "sliding_window": None}
KINDS = {  # name, sizes, reread
    "Llama4, long chunks": ("Llama4ForCausalLM", LLAMA4, False),
    "Llama4, short chunks": ("Llama4ForCausalLM", LLAMA4 | {"attention_chunk_size": 12}, True),
    "GPT-Neo, short windows": ("GPTNeoForCausalLM", NEO, True),
    "Phi3, longrope": ("Phi3ForCausalLM", PHI3, True),
    "Gemma2": ("Gemma2ForCausalLM", BACKBONES["Gemma2ForCausalLM"], True),
    "BLOOM": ("BloomForCausalLM", BACKBONES["BloomForCausalLM"], True),
    "Mamba": ("MambaForCausalLM", BACKBONES["MambaForCausalLM"], True),
    "Falcon-H1": ("FalconH1ForCausalLM", BACKBONES["FalconH1ForCausalLM"], True),
}


def make(kind):
    name, sizes, _ = KINDS[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    backbone = model_class(model_class.config_class(**sizes, **special)).eval()
    with torch.no_grad():  # far from the near-uniform start, so that every input matters visibly
        for parameter in backbone.parameters():
            parameter.mul_(3 if parameter.dim() == 2 else 1)
    config = HMTConfig(segment_length=8, sensory_tokens=3, memory_size=3)
    return HMTWrapper.from_backbone(backbone, config)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_definition_with_a_cache_and_without(kind, tokens, monkeypatch):
    model, length = make(kind), 21
    assert model.config.reread == KINDS[kind][2]
    expected = torch.stack([plain_single(model, row[:length]) for row in tokens])
    allowed = 256 * torch.finfo(torch.float32).eps * expected.abs().max()  # 1e-2 of it moved between the two models
    for has_cache in (True, False):
        if not has_cache:
            monkeypatch.setattr(Backbone, "checkpoints_layers", True)
            model.lm._continues = False
        torch.testing.assert_close(model(tokens[:, :length]).logits, expected, atol=allowed, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_under_autocast(make_wrapper, tokens, monkeypatch, attention):
    model = make_wrapper().float()
    model.set_attn_implementation(attention)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens).logits
        monkeypatch.setattr(Backbone, "checkpoints_layers", True)
        torch.testing.assert_close(model(tokens).logits, expected, atol=0.05 * expected.abs().max().item(), rtol=0)


def like_flash(module, query, key, value, attention_mask, position_ids=None, **options):
    """Compute attention as FlashAttention does: without a mask, and with packed sequences where positions jump."""
    assert attention_mask is None
    if position_ids is not None and len(query) == 1:
        assert (position_ids.diff() == 1).all()
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, visible, **options)


@pytest.fixture
def flash(monkeypatch):
    """Return the name of an attention function without masks, which is registered for one test."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "like_flash", like_flash)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "like_flash", lambda *args, **kwargs: None)
    return "like_flash"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"recall": False}], ids=str)
def test_attention_without_masks_lets_the_prompt_see_itself_alone(tokens, settings, rows, flash):
    torch.manual_seed(0)
    llama, tokens, results = tiny_llama(num_attention_heads=4, num_key_value_heads=2), tokens[:rows], []
    config = HMTConfig(segment_length=8, sensory_tokens=3, memory_size=4, **settings)
    for attention in ("sdpa", flash):
        llama.config._attn_implementation = attention
        torch.manual_seed(1)
        model = HMTWrapper.from_backbone(llama, config)
        assert model.config.reread is False and llama.config._attn_implementation == attention
        model.zero_grad()
        out = model(tokens, labels=tokens)
        out.loss.backward()
        results.append((out.logits, gradients(model)))
    (expected, expected_gradients), (logits, found) = results
    torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)
    assert_same_gradients(found, expected_gradients, NORM)


def test_attention_without_masks_is_refused_where_a_mask_is_needed(make_wrapper, llama, tokens, monkeypatch, flash):
    llama.config._attn_implementation = flash
    with pytest.raises(ValueError, match=f"reread=False needs a 4D mask, and attention '{flash}'.*'sdpa'"):
        make_wrapper(recall_tokens=2)(tokens)
    llama.config._attn_implementation = "sdpa"
    model = make_wrapper(recall_tokens=2)
    model(tokens)
    llama.config._attn_implementation = flash  # after the model has settled
    with pytest.raises(ValueError, match="reread=False needs a 4D mask"):
        model(tokens)
    monkeypatch.setattr(Backbone, "checkpoints_layers", True)
    with pytest.raises(ValueError, match="gradient checkpointing of the layers is off"):
        make_wrapper()(tokens)
    assert make_wrapper(reread=True)(tokens).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"reread": True}], ids=str)
def test_any_attention_without_masks_reads_streams(make_wrapper, llama, tokens, monkeypatch, flash, settings):
    """Also that of Falcon and GPT-Neo, which do not use the interface of transformers."""
    model, mask = make_wrapper(**settings), torch.ones_like(tokens)
    mask[1, :5] = 0
    expected = model(tokens, attention_mask=mask).logits
    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *args: like_flash)
    llama.config._attn_implementation = flash
    assert_close(model(tokens, attention_mask=mask).logits, expected)
    logits, _ = stream(model, tokens[1:, 5:], [2, 8, 9, 1, 10, 8])
    assert_close(logits, expected[1:, 5:])


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
        assert_close(again(tokens).logits, model(tokens).logits)
    for kind in ("Gemma2", "Mamba", "Falcon-H1", "BLOOM"):
        model = make(kind)
        with pytest.raises(ValueError, match="is not supported by"):
            model.configure(reread=False)
        assert model.config.reread
        model.save_pretrained(tmp_path / kind)
        file = tmp_path / kind / "config.json"
        file.write_text(file.read_text().replace('"reread": true', '"reread": false'))
        with pytest.raises(ValueError, match="is not supported by"):
            AutoModelForCausalLM.from_pretrained(tmp_path / kind)
