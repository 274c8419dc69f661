"""The estimate of a step counts what a step with data counts; scripts.bench.estimate compares it with peaks."""

import json
from dataclasses import replace

import pytest
import torch
from demo_model import DEMO
from transformers import LlamaConfig, LlamaForCausalLM


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from peft import LoraConfig, get_peft_model

from hf_longctx.cli import main
from hf_longctx.hmt import HMTConfig
from hf_longctx.training.estimate import LiveMemory, estimate, savings
from hf_longctx.training.model_init import quantization
from hf_longctx.training.recipes import FinetuneSettings


pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    LlamaConfig(vocab_size=500, max_position_embeddings=128, dtype="bfloat16", **sizes).save_pretrained(folder)
    return folder


def settings(config, **changes):
    fixed = dict(model=str(config), tokenizer=str(DEMO), data="-", output="-")
    return FinetuneSettings(**fixed | dict(sequence_length=64, batch_tokens=64) | changes)


def test_parts_are_those_of_a_step_with_data(config):
    found = estimate(settings(config, full=True, dtype="float32"))
    with LiveMemory() as memory:
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(config)).float()
        ids = torch.zeros(1, 64, dtype=torch.int64)
        memory.kind, memory.vocab_size = "activations", 500
        model(ids, labels=ids, position_ids=torch.arange(64)[None] % 32, use_cache=False).loss.backward()
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert weights <= found.weights < 1.01 * weights
    assert 2 * weights <= found.optimizer < 2.01 * weights
    of_step = memory.most["activations"] + memory.most["logits"]  # with its gradients
    assert found.gradients + found.activations + found.logits == pytest.approx(of_step, rel=0.05)


@pytest.mark.parametrize("recipe", ["lora", "fox-from-llama", "rope-extend", "hmt"])
def test_every_recipe_has_an_estimate(recipe, config):
    longer = {"sequence_length": 256, "batch_tokens": 256} if recipe == "rope-extend" else {}
    if recipe == "hmt":
        longer = {"segment_length": 64, "sensory_tokens": 4}
    found = estimate(settings(config, recipe=recipe, **longer))
    assert 0 <= found.gradients < found.optimizer and found.activations > 0
    assert 2 * 2 * 500 * 32 < found.weights < found.peak  # embeddings in bfloat16


def test_the_settings_of_a_saved_memory_count(config, tmp_path):
    backbone, sizes, found = LlamaConfig.from_pretrained(config), {"segment_length": 16, "sensory_tokens": 4}, {}
    for more in ({}, {"recall_tokens": 16}, {"neural_cache_weight": 0.1}):
        HMTConfig(**sizes, **more, backbone_config=backbone).save_pretrained(tmp_path)
        found[str([*more])] = estimate(settings(tmp_path, recipe="hmt", sequence_length=32, batch_tokens=32, **sizes))
    plain, again, cache = found.values()
    assert again.activations > 1.2 * plain.activations
    assert cache.logits > 2 * plain.logits  # which are never in memory at once without a cache


def test_weights_in_4_bits_are_those_of_a_model_that_is_read(tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'hf-longctx[quantized]'")
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=100)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    run = settings(tmp_path, load_in_4bit=True, lora_targets="q_proj").resolve()
    model = LlamaForCausalLM.from_pretrained(tmp_path, **quantization(run))
    tensors = [p.data for p in model.parameters()]
    states = [p.quant_state for p in model.parameters() if hasattr(p, "quant_state")]
    tensors += [tensor for state in states for tensor in (state.absmax, state.state2.absmax)]
    adapter = 4 * 2 * 8 * 256
    assert estimate(run).weights - adapter == pytest.approx(sum(x.nbytes for x in tensors), rel=0.01)


def test_what_saves_memory_is_told_and_saves_it(config, capsys):
    run = settings(config, sequence_length=128, batch_tokens=256, per_device_batch_size=2)
    before = estimate(run)
    saved = dict(savings(run, before))
    assert saved["--per-device-batch-size 1"] == pytest.approx((before.activations + before.logits) / 2, rel=0.05)
    less = estimate(replace(run, activation_checkpointing=True))
    assert 0 < saved["--activation-checkpointing"] == before.peak - less.peak < before.activations
    assert estimate(replace(run, load_in_4bit=True)).weights < before.weights
    main(["finetune", str(config), "--tokenizer", str(DEMO), "--data", "-", "--output", "-", "--sequence-length", "32",
          "--batch-tokens", "32", "--activation-checkpointing", "--load-in-4bit", "--estimate"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "weights" in printed and "in all" in printed
    assert ("MALLOC_MMAP_THRESHOLD_" in printed) != torch.cuda.is_available()


@pytest.mark.usefixtures("small_model")
def test_a_new_model_has_an_estimate(capsys):
    main(["train", "--tokenizer", str(DEMO), "--data", "-", "--output", "-", "--sequence-length", "64",
          "--batch-tokens", "64", "--per-device-batch-size", "1", "--estimate"])  # fmt: skip
    assert "optimizer" in capsys.readouterr().out


def test_muon_has_one_moment_of_a_matrix_and_an_adapter_that_is_trained_on_its_own_rank(config, tmp_path):
    adamw, muon = (estimate(settings(config, full=True, optimizer=name)) for name in ("adamw", "muon"))
    matrices = 4 * 32 * 32 + 3 * 32 * 64  # numbers in them
    assert adamw.optimizer - muon.optimizer == pytest.approx(4 * matrices, rel=0.01)
    targets = ["q_proj", "v_proj"]
    base = LlamaForCausalLM(LlamaConfig.from_pretrained(config))
    get_peft_model(base, LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(config)}))
    new = settings(config, lora_rank=3, lora_targets=",".join(targets))
    assert estimate(replace(new, model=str(tmp_path), lora_rank=8, lora_targets=None)) == estimate(new)
