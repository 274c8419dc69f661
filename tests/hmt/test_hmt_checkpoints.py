"""Saving and loading: whole checkpoints, pointers to a backbone, two stages, remote code, PEFT."""

import copy
import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from commands import run
from safetensors.torch import load_file
from tiny_hmt import ROUNDING, tiny_llama
from transformers import AutoModelForCausalLM

from hf_longctx.hmt import HMTConfig, HMTWrapper


SETTINGS = {"segment_length": 8, "sensory_tokens": 3, "memory_size": 4}
# PEFT 0.21 asks transformers for this under its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture
def pointer(llama, tmp_path):
    """Return a wrapper of the backbone in `llama`, whose checkpoint in `hmt` contains only the memory."""
    llama.save_pretrained(tmp_path / "llama")
    model = HMTWrapper.from_backbone(tmp_path / "llama", HMTConfig(**SETTINGS, backbone_in_checkpoint=False))
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "hmt")
    return model


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


@pytest.mark.parametrize("mode", ["single_pass", "paper"])
def test_whole_checkpoint(make_wrapper, tokens, tmp_path, mode):
    model = make_wrapper(recall_dim=5, sum_fraction=0.3, memory_size=None, recall_mode=mode)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    again = HMTWrapper.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert again.config.segment_length == 8 and again.config.memory_size is None
    assert again.generation_config.eos_token_id == 2 and again.generation_config.max_new_tokens == 7
    assert again.dtype == torch.float64
    options = {"config": str(tmp_path), "memory_size": 9, "dtype": torch.bfloat16, "attn_implementation": "eager"}
    half = HMTWrapper.from_pretrained(tmp_path, **options)
    assert half.config.memory_size == 9 and half.backbone.config._attn_implementation == "eager"
    assert {p.dtype for p in half.backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in half.memory.parameters()} == {torch.float32}
    out = half(tokens, labels=tokens)
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()


def test_from_config_is_untrained(make_wrapper, tokens):
    model = AutoModelForCausalLM.from_config(make_wrapper().config)
    assert isinstance(model, HMTWrapper)
    assert torch.equal(model.memory.wq, torch.eye(16))
    assert model(tokens, labels=tokens).loss.isfinite()


def test_copies_and_pickles(make_wrapper, tokens):
    model = make_wrapper()
    expected = model(tokens).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.backbone.lm_head.weight.data.mul_(2)
        torch.testing.assert_close(other(tokens).logits, 2 * expected)
    assert torch.equal(model(tokens).logits, expected)


def test_no_call_leaves_a_hook_on_the_backbone(make_wrapper, tokens):
    model = make_wrapper()
    model(tokens)
    assert not model.lm.base._forward_hooks
    model.lm.base.layers[1].self_attn = None
    with pytest.raises(TypeError):
        model(tokens)
    assert not model.lm.base._forward_hooks


def test_threads_share_a_model(make_wrapper, tokens):
    """Each pass of one thread overlaps with a pass of the other: both wait in the first layer and at the head."""
    model, both = make_wrapper(), threading.Barrier(2, timeout=60)
    with torch.no_grad():
        expected = [model(row[None]).logits for row in tokens]

    def wait(*_):
        both.wait()

    def read(row):
        with torch.no_grad():  # holds for one thread
            return model(row[None]).logits

    for module in (model.backbone.model.layers[0], model.backbone.lm_head):
        module.register_forward_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        logits = list(pool.map(read, tokens))
    torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


def test_new_tokens(make_wrapper, tokens):
    model = make_wrapper()
    expected = model(tokens).logits
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    torch.testing.assert_close(model(tokens).logits[..., :61], expected)
    assert model(tokens + 9, labels=tokens + 9).loss.isfinite()


def test_a_pointer_contains_only_the_memory(pointer, llama, tokens, tmp_path):
    saved = load_file(tmp_path / "hmt" / "model.safetensors")
    assert set(saved) == {f"memory.{name}" for name, _ in pointer.memory.named_parameters()}
    assert all(torch.equal(pointer.backbone.get_parameter(name), p) for name, p in llama.named_parameters())
    for loader in (AutoModelForCausalLM, HMTWrapper):
        again, info = loader.from_pretrained(tmp_path / "hmt", memory_size=9, output_loading_info=True)
        assert "missing_keys" in info and not any(info.values())
        assert again.config.backbone_name_or_path == str(tmp_path / "llama")
        assert again.config.memory_size == 9 and again.generation_config.max_new_tokens == 7
        assert torch.equal(loader.from_pretrained(tmp_path / "hmt")(tokens).logits, pointer(tokens).logits)
        half = loader.from_pretrained(tmp_path / "hmt", dtype=torch.bfloat16, attn_implementation="eager")
        assert half.backbone.config._attn_implementation == "eager"
        assert {p.dtype for p in half.backbone.parameters()} == {torch.bfloat16}
        assert all(torch.equal(half.memory.get_parameter(n), p) for n, p in pointer.memory.named_parameters())
    (tmp_path / "hmt" / "generation_config.json").unlink()
    assert HMTWrapper.from_pretrained(tmp_path / "hmt").generation_config.eos_token_id == 2


def test_a_pointer_is_refused_only_for_a_trained_backbone(pointer, tokens, tmp_path):
    pointer.backbone.requires_grad_(False)
    train_a_little(pointer, tokens)
    for other in (pointer, copy.deepcopy(pointer), pointer.bfloat16()):
        other.save_pretrained(tmp_path / "hmt")
    again = HMTWrapper.from_pretrained(tmp_path / "hmt")
    again.save_pretrained(tmp_path / "again")
    again.backbone.requires_grad_(True)
    train_a_little(again, tokens)
    with pytest.raises(
        ValueError, match=r"parameters of the backbone have changed, such as model\.embed_tokens\.weight"
    ):
        again.save_pretrained(tmp_path / "lost")


ELSEWHERE = """
from pathlib import Path
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Model
Path({ran!r}).touch()
class Config(LlamaConfig):
    model_type = "elsewhere"
class ModelElsewhere(Model):
    config_class = Config
"""


@pytest.mark.usefixtures("pointer")
def test_trust_in_a_checkpoint_does_not_hold_for_its_backbone(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran, values = tmp_path / "ran", json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "code.py").write_text(ELSEWHERE.format(ran=str(ran)))
    values |= {"model_type": "elsewhere", "architectures": ["ModelElsewhere"]}
    values["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.ModelElsewhere"}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(values))
    for loader in (AutoModelForCausalLM, HMTWrapper):
        with pytest.raises(ValueError, match=r"llama' has custom code.*backbone_trust_remote_code=True"):
            loader.from_pretrained(tmp_path / "hmt", trust_remote_code=True)
    assert not ran.exists()
    model = HMTWrapper.from_pretrained(tmp_path / "hmt", backbone_trust_remote_code=True)
    assert ran.exists() and type(model.backbone).__name__ == "ModelElsewhere"


def test_arguments_of_the_checkpoint_do_not_reach_its_backbone(pointer, tmp_path, monkeypatch):
    """AutoModel passes the checkpoint's commit on, but the repository of the backbone does not have this commit."""
    pointer.config.backbone_revision = "a1b2"
    pointer.save_pretrained(tmp_path / "hmt")
    calls, load = [], AutoModelForCausalLM.from_pretrained

    def record(name, **kwargs):
        calls.append(kwargs)
        return load(name, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    of_the_checkpoint = {"adapter_kwargs": {"revision": "c3d4"}, "_commit_hash": "c3d4", "revision": "c3d4"}
    HMTWrapper.from_pretrained(tmp_path / "hmt", **of_the_checkpoint)
    assert calls[0]["revision"] == "a1b2" and not calls[0].keys() & {"adapter_kwargs", "_commit_hash"}


def test_the_commit_of_the_backbone_is_kept(llama, tmp_path, monkeypatch):
    llama.config._commit_hash = "a1b2"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: llama)
    assert HMTWrapper.from_backbone("someone/llama", HMTConfig(**SETTINGS)).config.backbone_revision == "a1b2"
    pinned = HMTWrapper.from_backbone("someone/llama", HMTConfig(**SETTINGS), revision="v1")
    assert pinned.config.backbone_revision == "v1"


@pytest.mark.parametrize("mode, added, gain", [("paper", "summary_token", 1.5), ("single_pass", "log_temperature", 1)])
def test_stage_two_starts_from_stage_one(make_wrapper, tokens, tmp_path, mode, added, gain):
    first = make_wrapper(recall=False, recall_mode=mode)
    for parameter in first.memory.parameters():
        torch.nn.init.normal_(parameter)
    first.save_pretrained(tmp_path)
    second, info = HMTWrapper.from_pretrained(tmp_path, recall=True, output_loading_info=True)
    assert set(info["missing_keys"]) == {"memory.wq", "memory.wk", f"memory.{added}"}
    assert all(torch.equal(second.memory.get_parameter(name), p) for name, p in first.memory.named_parameters())
    assert torch.equal(second.memory.wq, gain * torch.eye(16).double())
    if mode == "paper":
        assert torch.equal(second.memory.summary_token, first.memory.initial)
    else:
        assert second.memory.log_temperature.exp().item() == pytest.approx(0.25)
    assert torch.equal(second(tokens[:, :8]).logits, first(tokens[:, :8]).logits)


LOAD_REMOTE = """
import json, torch
from transformers import AutoModelForCausalLM
ids = torch.arange(3, 33)[None]
for folder, copy in (("hub", "again"), ("again", "third")):  # a loaded model can be saved and loaded again
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules." + folder), type(model).__module__
    new = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 30:]
    print(json.dumps([model(ids).logits.abs().sum().item(), new.tolist()]))
    model.save_pretrained(copy)
"""


def test_remote_code_without_the_package(make_wrapper, tmp_path):
    model = make_wrapper()
    model.save_pretrained(tmp_path / "hub")
    ids = torch.arange(3, 33)[None]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = run(["python", "-c", LOAD_REMOTE], env=environment, cwd=tmp_path, package=False)
    assert done.returncode == 0, done.stderr
    total = model(ids).logits.abs().sum().item()
    new = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 30:].tolist()
    for line in done.stdout.strip().splitlines():
        assert json.loads(line) == [pytest.approx(total), new]


def train_a_little(model, tokens):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize("whole", [True, False])
def test_lora_around_the_wrapper(peft, llama, tokens, tmp_path, whole):
    """The recipe for fine-tuning: LoRA in the backbone, the memory in full through modules_to_save."""
    llama.save_pretrained(tmp_path / "llama")
    settings = HMTConfig(**SETTINGS, backbone_in_checkpoint=whole)
    HMTWrapper.from_backbone(tmp_path / "llama", settings).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["memory"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(HMTWrapper.from_pretrained(tmp_path / "base"), config)
    before = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
    assert sum("memory.modules_to_save" in n for n in before) == 4
    assert {n.split(".")[-3] for n in before if "memory" not in n} == {"lora_A", "lora_B"}
    train_a_little(model, tokens)
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)

    model.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(again(input_ids=tokens).logits, model(input_ids=tokens).logits)
    ids = [m.generate(input_ids=tokens[:, :13], max_new_tokens=15, do_sample=False) for m in (model, again)]
    assert torch.equal(*ids)
    other = HMTWrapper.from_backbone(tiny_llama(), HMTConfig(**SETTINGS | {"segment_length": 9}))
    with pytest.raises(ValueError, match=r"trained with \{'segment_length': \d+\}"):
        peft.PeftModel.from_pretrained(other, tmp_path / "adapter")
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, again(input_ids=tokens).logits, atol=ROUNDING, rtol=0)


def test_adapters_without_the_memory_warn(peft, make_wrapper, tokens):
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_wrapper(), config)
    with pytest.warns(UserWarning, match="the memory stays frozen"):
        model.train()(input_ids=tokens, labels=tokens)


def test_a_peft_model_as_backbone(peft, llama, tokens, tmp_path):
    backbone = peft.get_peft_model(llama, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapter = {n: p.clone() for n, p in backbone.named_parameters() if "lora_A" in n}
    model = HMTWrapper.from_backbone(backbone, HMTConfig(**SETTINGS))
    assert all(
        torch.equal(model.backbone.get_parameter(n), p) for n, p in adapter.items()
    )  # the adapter is not initialized again
    train_a_little(model, tokens)
    assert all(not torch.equal(model.backbone.get_parameter(n), p) for n, p in adapter.items())
    with pytest.raises(NotImplementedError, match="merge_and_unload"):
        model.save_pretrained(tmp_path)
    logits = model(tokens).logits
    merged = HMTWrapper.from_backbone(backbone.merge_and_unload(), model.config)
    merged.memory.load_state_dict(model.memory.state_dict())
    torch.testing.assert_close(merged(tokens).logits, logits, atol=ROUNDING, rtol=0)


def test_prompt_tuning_is_refused(peft, llama):
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="adds its own positions"):
        HMTWrapper.from_backbone(peft.get_peft_model(llama, config), HMTConfig(**SETTINGS))
