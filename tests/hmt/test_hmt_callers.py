"""What accelerate and PEFT do to an HMT: it works, or it is refused with advice that works."""

import re

import pytest
import torch
from tiny_hmt import ROUNDING, VOCAB, tiny_llama
from transformers import AutoModelForCausalLM

from hf_longctx.fox import FoxConfig, FoxForCausalLM
from hf_longctx.hmt import HMTConfig, HMTWrapper


SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)


# --- without weights, and with weights on disk -----------------------------------------------------------------------

MODES = [{}, {"recall_mode": "paper"}, {"recurrence": False}, {"recall_init": "random"}]


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("reread", [None, False])
def test_no_weights(settings, reread, make_wrapper):
    accelerate = pytest.importorskip("accelerate")
    config = make_wrapper(**settings).config
    config.reread = reread
    for empty in (accelerate.init_empty_weights, lambda: torch.device("meta")):
        with empty():
            model = HMTWrapper(config)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.tie_weights()
    assert accelerate.infer_auto_device_map(model, max_memory={"cpu": "1GB"}) == {"": "cpu"}


PLACES = [
    {"": "disk"},
    {"backbone": "cpu", "memory": "disk"},
    {"backbone": "disk", "memory": "cpu"},
    {"backbone.model": "disk", "backbone.lm_head": "cpu", "memory": "disk"},
]


@pytest.mark.parametrize("settings", MODES[:3], ids=str)
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_weights_on_disk(places, settings, make_wrapper, tokens, tmp_path, capsys, caplog):
    pytest.importorskip("accelerate")
    model = make_wrapper(**settings).eval()
    model.save_pretrained(tmp_path / "model")
    on_disk = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    )
    assert "_extra_state" not in capsys.readouterr().err + caplog.text
    expected, found = model(tokens, labels=tokens, use_cache=True), on_disk(tokens, labels=tokens, use_cache=True)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    if settings.get("recall_mode") != "paper":
        options = dict(max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(tokens))
        assert torch.equal(on_disk.generate(tokens, **options), model.generate(tokens, **options))
    on_disk.save_pretrained(tmp_path / "again")
    assert torch.equal(HMTWrapper.from_pretrained(tmp_path / "again")(tokens).logits, expected.logits)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_a_model_that_is_offloaded_afterwards(offload, make_wrapper, tokens, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = make_wrapper().eval()
    expected = model(tokens).logits
    getattr(accelerate, offload)(model, *([tmp_path] if offload == "disk_offload" else []), execution_device="cpu")
    assert torch.equal(model(tokens).logits, expected)
    assert {parameter.device.type for parameter in model.memory.parameters()} == {"meta"}


def tiny_fox():
    return FoxForCausalLM(FoxConfig.pro(vocab_size=VOCAB, **SMALL))


@pytest.mark.parametrize("make_backbone", [tiny_llama, tiny_fox])
def test_a_backbone_on_disk_is_probed_and_keeps_a_memory(make_backbone, tokens, tmp_path):
    """A FoX is read again, which a probe finds out."""
    pytest.importorskip("accelerate")
    make_backbone().save_pretrained(tmp_path / "backbone")
    disk = dict(device_map={"": "disk"}, offload_folder=tmp_path / "disk")
    config = HMTConfig(segment_length=8, sensory_tokens=3, backbone_in_checkpoint=False)
    models = []
    for options in ({}, disk):
        torch.manual_seed(0)
        models.append(HMTWrapper.from_backbone(tmp_path / "backbone", config, **options).eval())
    model, on_disk = models
    # A FoX computes its gates in float32, which may round the last bit of a product of offloaded weights up or down.
    rounding = 1e-6 if make_backbone is tiny_fox else ROUNDING
    assert model.config.reread == on_disk.config.reread == (make_backbone is tiny_fox)
    expected = model(tokens).logits
    torch.testing.assert_close(on_disk(tokens).logits, expected, atol=rounding, rtol=0)
    model.save_pretrained(tmp_path / "model")
    pointer = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **disk)
    torch.testing.assert_close(pointer(tokens).logits, expected, atol=rounding, rtol=0)


# --- prompts of PEFT -------------------------------------------------------------------------------------------------

PROMPTS = {
    "PromptTuningConfig": dict(num_virtual_tokens=2),
    "PrefixTuningConfig": dict(num_virtual_tokens=2),
    "PromptEncoderConfig": dict(num_virtual_tokens=2),
    "MultitaskPromptTuningConfig": dict(num_virtual_tokens=2, num_tasks=2),
    "CPTConfig": dict(cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2]),
}
SIZES = dict(num_layers=2, token_dim=16, num_attention_heads=4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_peft_are_refused(name, make_wrapper, tokens):
    peft = pytest.importorskip("peft")
    config = getattr(peft, name)(task_type="CAUSAL_LM", **PROMPTS[name])
    for field, value in SIZES.items():
        setattr(config, field, value)
    model = peft.get_peft_model(make_wrapper(), config)
    with pytest.raises((TypeError, ValueError), match=r"prompt methods of PEFT .* or (LoraConfig.*)\.$") as raised:
        model(input_ids=tokens, task_ids=torch.zeros(2, dtype=torch.long) if "Multi" in name else None)
    advice = re.search(r"or (LoraConfig.*)\.$", str(raised.value))[1]
    model = peft.get_peft_model(make_wrapper(), eval(advice, {"LoraConfig": peft.LoraConfig}))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert any(parameter.grad is not None for name, parameter in model.named_parameters() if ".memory." in name)
