"""accelerate, PEFT and TRL with an HMT: a call works, or its error gives advice that works."""

import copy
from importlib.util import find_spec

import pytest
import torch
from demo_model import DEMO
from streams import assert_close
from tiny_hmt import ROUNDING
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx.hmt import HMTConfig, HMTWrapper


# --- without weights, and with weights on disk -----------------------------------------------------------------------

MODES = [{}, {"recall_mode": "paper"}]


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("reread", [None, False])
def test_no_weights(settings, reread, make_wrapper):
    accelerate = pytest.importorskip("accelerate")
    config = copy.deepcopy(make_wrapper(**settings).config)
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


@pytest.mark.parametrize("settings", MODES, ids=str)
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
    assert_close(found.logits, expected.logits)
    assert_close(found.loss, expected.loss)
    if settings.get("recall_mode") != "paper":
        options = dict(max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(tokens))
        assert torch.equal(on_disk.generate(tokens, **options), model.generate(tokens, **options))
    on_disk.save_pretrained(tmp_path / "again")
    assert_close(HMTWrapper.from_pretrained(tmp_path / "again")(tokens).logits, expected.logits)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_a_model_that_is_offloaded_afterwards(offload, make_wrapper, tokens, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = make_wrapper().eval()
    expected = model(tokens).logits
    getattr(accelerate, offload)(model, *([tmp_path] if offload == "disk_offload" else []), execution_device="cpu")
    assert torch.equal(model(tokens).logits, expected)
    assert {parameter.device.type for parameter in model.memory.parameters()} == {"meta"}


def test_a_backbone_on_disk_is_probed_and_keeps_a_memory(llama, tokens, tmp_path):
    pytest.importorskip("accelerate")
    llama.save_pretrained(tmp_path / "backbone")
    disk = dict(device_map={"": "disk"}, offload_folder=tmp_path / "disk")
    config = HMTConfig(segment_length=8, sensory_tokens=3, backbone_in_checkpoint=False)
    models = []
    for options in ({}, disk):
        torch.manual_seed(0)
        models.append(HMTWrapper.from_backbone(tmp_path / "backbone", config, **options).eval())
    model, on_disk = models
    assert on_disk.config.reread is False
    expected = model(tokens).logits
    torch.testing.assert_close(on_disk(tokens).logits, expected, atol=ROUNDING, rtol=0)
    model.save_pretrained(tmp_path / "model")
    pointer = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **disk)
    torch.testing.assert_close(pointer(tokens).logits, expected, atol=ROUNDING, rtol=0)


# --- prompts of PEFT -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_prompts_of_peft_are_refused(kind, make_wrapper, tokens):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2, token_dim=16, num_attention_heads=4)
    with pytest.raises((TypeError, ValueError), match=r"of PEFT.* not supported.*use LoRA"):
        peft.get_peft_model(make_wrapper(), config)(input_ids=tokens)


# --- trainers of TRL -------------------------------------------------------------------------------------------------


def test_last_hidden_states_and_packed_rows_are_refused(make_wrapper, tokens):
    with pytest.raises(AttributeError, match=r"trainers of TRL cannot train it.*before it is wrapped"):
        _ = make_wrapper()(tokens).last_hidden_state
    with pytest.raises(ValueError, match=r"does not support the argument position_ids.*Packed rows.*not supported"):
        make_wrapper()(tokens, position_ids=torch.arange(tokens.shape[1])[None])


@pytest.mark.skipif(find_spec("trl") is None, reason="pip install trl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_trl_as_it_is(name, tmp_path):
    import trl
    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    backbone = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    row = {"text": "the fox forgets"} if name == "SFT" else {"prompt": "fox", "chosen": " a key", "rejected": " all"}
    hmt = HMTWrapper.from_backbone(backbone, HMTConfig(segment_length=8, sensory_tokens=3))
    hmt.save_pretrained(tmp_path / "hmt")  # DPO loads a reference model
    tokenizer.save_pretrained(tmp_path / "hmt")
    model, data = HMTWrapper.from_pretrained(tmp_path / "hmt"), Dataset.from_list([row] * 4)
    settings = getattr(trl, f"{name}Config")(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, bf16=False)
    with pytest.raises(AttributeError, match="trainers of TRL cannot train it"):
        getattr(trl, f"{name}Trainer")(model, args=settings, train_dataset=data, processing_class=tokenizer).train()
