"""A pretrained model is changed and trained, and the saved model is the trained one."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from faults import log, losses, make
from safetensors.torch import load_file, save_file
from small_llama import save_llama
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Trainer,
    TrainerCallback,
)
from transformers.integrations import deepspeed
from transformers.utils import logging

from hf_longctx.hub.bundle import build_bundle
from hf_longctx.metrics import rope_base_bound
from hf_longctx.training import run as run_module
from hf_longctx.training.adapters import load_adapter
from hf_longctx.training.chunked_loss import chunk_loss
from hf_longctx.training.models import make_config, make_model
from hf_longctx.training.recipes.rope_extend import extend_rope
from hf_longctx.training.run import train
from hf_longctx.training.trainer import LongContextTrainer


IDS = torch.randint(3, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    tied = getattr(request, "param", False)
    save_llama(folder, **sizes, max_position_embeddings=64, tie_word_embeddings=tied)
    AutoTokenizer.from_pretrained(DEMO, model_max_length=64).save_pretrained(folder)
    (folder / "text.txt").write_text("The fox forgets what it no longer needs. " * 60)
    return folder


def values(llama, output, **changes):
    """Two sequences a step, in two forward passes."""
    sizes = dict(max_length=32, gradient_accumulation_steps=2, max_steps=3, learning_rate=1e-2)
    data = {"model": str(llama), "data": str(llama / "text.txt"), "output_dir": str(output)}
    return {"recipe": "lora", **data, **sizes, **changes}


def settings(llama, output, **changes):
    return make(values(llama, output, **changes))


def base_of(run, llama):
    return make_model(run, make_config(run, AutoTokenizer.from_pretrained(llama)))


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


@pytest.mark.parametrize(
    "llama, recipe",  # llama: with tied embeddings
    [
        (True, "fox-from-llama"),
        (False, "rope-extend"),
    ],
    indirect=["llama"],
)
def test_the_saved_model_is_the_trained_one_and_an_adapter_equals_its_merge(recipe, llama, tmp_path):
    longer = dict(max_length=128, warmup_steps=0) if recipe == "rope-extend" else {}
    run = settings(llama, tmp_path, recipe=recipe, **longer)
    assert train(run) == 0
    assert losses(tmp_path)[2] < losses(tmp_path)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = base_of(run, llama)
    start = logits(base)
    adapted = load_adapter(base, tmp_path / "adapter")
    assert (logits(model) - start).abs().max() > 0.01
    torch.testing.assert_close(logits(adapted), logits(model), atol=1e-5, rtol=1e-5)
    if longer:
        assert AutoTokenizer.from_pretrained(tmp_path / "model").model_max_length == 128
        assert model.config.max_position_embeddings == 128
        assert model.config.rope_parameters["rope_theta"] >= rope_base_bound(127, 8).base
    assert model.config.tie_word_embeddings == (model.get_input_embeddings().weight is model.lm_head.weight)


def test_a_run_without_logits_has_the_losses_of_one_with_them(llama, tmp_path, monkeypatch):
    found = {}
    for name, chunk in {"chunked": partial(chunk_loss, logits_at_once=10 * VOCABULARY), "plain": bool}.items():
        monkeypatch.setattr(run_module, "chunk_loss", chunk)
        assert train(settings(llama, tmp_path / name, eval_data=str(llama / "text.txt"), eval_steps=3)) == 0
        found[name] = [line.get("loss", line.get("eval_loss")) for line in log(tmp_path / name)]
    assert len(found["chunked"]) == 4 and found["chunked"] != found["plain"]
    assert found["chunked"] == pytest.approx(found["plain"], rel=1e-5)


@pytest.mark.parametrize("recipe", ["fox-from-llama", "rope-extend", "hmt"])
def test_modules_trained_in_full_stay_float32_alongside_a_bfloat16_base(recipe, llama, tmp_path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(base)
    sizes = dict(max_length=128) if recipe == "rope-extend" else {}
    if recipe == "hmt":
        sizes = dict(max_length=80, set=["segment_length=40", "sensory_tokens=8"])
    if recipe == "fox-from-llama":
        sizes["decay_time"] = 1e7  # bfloat16 cannot represent a difference of 6 %
    options = dict(recipe=recipe, tokenizer=str(llama), data=str(llama / "text.txt"), bf16=True, **sizes)
    for stage in ("first", "second") if recipe == "hmt" else ("first",):
        run = settings(base, tmp_path / stage, **options)
        assert train(run) == 0
        adapter = load_file(tmp_path / stage / "adapter" / "adapter_model.safetensors")
        whole = {
            n.removeprefix("base_model.model."): p
            for n, p in adapter.items()
            if "lora_" not in n and p.is_floating_point()
        }
        base = tmp_path / stage / "model"
        saved = load_file(base / "model.safetensors")
        assert whole and not any(torch.equal(p, p.bfloat16().float()) for p in whole.values())
        whole = {name: whole[name] for name in whole if name in saved}  # tied parameters are saved once
        assert {n for n, p in saved.items() if p.dtype == torch.float32} == set(whole)
        assert all(torch.equal(saved[name], parameter) for name, parameter in whole.items())
        loaded = AutoModelForCausalLM.from_pretrained(base)
        assert loaded.dtype == torch.bfloat16
    if recipe != "rope-extend":  # gates and memory are float32 in every model
        assert all(torch.equal(loaded.get_parameter(name), parameter) for name, parameter in whole.items())


@pytest.mark.parametrize("recipe, bits", [("lora", 4), ("fox-from-llama", 4), ("rope-extend", 4), ("hmt", 8)])
def test_a_quantized_base_is_kept_with_its_adapter_or_merged_into_the_whole_one(recipe, bits, llama, tmp_path):
    """The quantized path runs where bitsandbytes is installed."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'hf-longctx[quantized]'")
    sizes = dict(max_length=128) if recipe == "rope-extend" else {}
    if recipe == "hmt":
        sizes = dict(max_length=80, set=["segment_length=40", "sensory_tokens=8"])
    options = dict(recipe=recipe, merge=False, dtype="float32", **sizes)
    run = settings(llama, tmp_path / "run", **{f"load_in_{bits}bit": True}, **options)
    before = base_of(run, llama)
    assert any(p.dtype == (torch.uint8 if bits == 4 else torch.int8) for p in before.parameters())
    assert train(run) == 0
    folder = tmp_path / "run" / "model"
    expected = logits(load_adapter(before, folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if recipe != "lora":  # lora does not change the base
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
        whole = {n: p for n, p in load_file(folder / "adapter_model.safetensors").items() if "lora_" not in n}
        assert whole and all(p.dtype in (torch.float32, torch.uint8) for p in whole.values())
        assert load_file(folder / "model.safetensors")
        with pytest.raises(ValueError, match="contains an adapter and its base"):
            build_bundle(folder)
    (tmp_path / "run" / "model").rename(tmp_path / "run" / "kept")
    assert train(settings(llama, tmp_path / "run", **{f"load_in_{bits}bit": True}, **options | dict(merge=True))) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    adapted = load_adapter(base_of(settings(llama, tmp_path / "run", **options), llama), tmp_path / "run" / "adapter")
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)
    assert 0 < (logits(merged) - expected).norm() < 0.3 * expected.norm()


def test_an_adapter_that_is_not_merged_loads_with_its_base(llama, tmp_path):
    assert train(settings(llama, tmp_path)) == 0
    merged = load_adapter(AutoModelForCausalLM.from_pretrained(llama), tmp_path / "model").merge_and_unload()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits(merged))


def stop_at(step, event):
    """Return a callback that finishes a run."""

    def stop(args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == step

    callback = TrainerCallback()
    setattr(callback, event, stop)
    return callback


@pytest.mark.parametrize("full, steps", [(True, 4), (False, 9)], ids=["full", "stopped early"])
def test_the_checkpoint_with_the_lowest_loss_is_kept_and_written(full, steps, llama, tmp_path, monkeypatch):
    scripted, evaluate = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.7}, Trainer.evaluate

    def evaluate_as_scripted(self, **kwargs):
        found = evaluate(self, **kwargs)
        found["eval_loss"] = scripted[self.state.global_step]
        return found

    monkeypatch.setattr(Trainer, "evaluate", evaluate_as_scripted)
    monkeypatch.setattr(run_module, "StopAtNaN", partial(stop_at, 4, "on_evaluate"))
    options = dict(max_steps=steps, eval_steps=1, save_steps=1, eval_data=str(llama / "text.txt"))
    run = values(llama, tmp_path, use_peft=not full, load_best_model_at_end=True, **options)

    def weights(folder):
        return load_file(folder / f"{'' if full else 'adapter_'}model.safetensors")

    def is_of(step):
        expected = weights(tmp_path / f"checkpoint-{step}")
        return all(torch.equal(weights(tmp_path / "model")[name], tensor) for name, tensor in expected.items())

    for _ in range(2):  # the second run resumes after the last step
        assert train(make(run)) == 0
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
        assert is_of(2) and not is_of(4)
        shutil.rmtree(tmp_path / "model")


@pytest.mark.parametrize(
    "owner, method, steps",
    [
        (LlamaForCausalLM, "save_pretrained", 3),
        (LongContextTrainer, "save_model", 3),
        (LongContextTrainer, "save_model", 5),  # a callback finishes the run
    ],
)
def test_a_run_that_ends_while_its_model_is_saved_saves_it_when_called_again(
    owner, method, steps, llama, tmp_path, monkeypatch
):
    save = getattr(owner, method)

    def end(self, folder, *args, **kwargs):
        if "checkpoint" in str(folder):
            return save(self, folder, *args, **kwargs)
        raise InterruptedError

    run = values(llama, tmp_path, merge=True, save_steps=steps, max_steps=steps)
    monkeypatch.setattr(run_module, "StopAtNaN", partial(stop_at, 3, "on_step_end"))
    monkeypatch.setattr(owner, method, end)
    with pytest.raises(InterruptedError):
        train(make(run))
    monkeypatch.undo()
    before = log(tmp_path)
    assert train(make(run)) == 0
    assert log(tmp_path) == before and len(before) == 3
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    adapter = load_adapter(AutoModelForCausalLM.from_pretrained(llama), tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logits(adapter), logits(model), atol=1e-5, rtol=1e-5)


def test_a_converted_llama_begins_with_its_loss_and_its_gates_learn(llama, tmp_path, capsys):
    rates = []

    def note(self, *args, create=LongContextTrainer.create_scheduler, **kwargs):
        rates.extend(group["lr"] for group in self.optimizer.param_groups)
        return create(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LongContextTrainer, "create_scheduler", note)
        run = settings(llama, tmp_path, recipe="fox-from-llama", decay_time=1e7, attn_implementation="eager")
        assert train(run) == 0
    assert "fox with " in (said := capsys.readouterr().err) and "eager attention" in said
    assert sorted(set(rates)) == [1e-2, 1.0]
    assert train(settings(llama, tmp_path / "llama")) == 0
    fox, plain = losses(tmp_path), losses(tmp_path / "llama")
    assert fox[0] == pytest.approx(plain[0], abs=1e-4)
    before = base_of(run, llama).model.layers[0].self_attn.f_proj
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.layers[0].self_attn.f_proj
    assert not torch.equal(before.weight, after.weight) and not torch.equal(before.bias, after.bias)


KINDS = {
    "llama": (LlamaConfig, {}),
    "yarn": (
        LlamaConfig,
        {"rope_parameters": dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=32, rope_theta=1e4)},
    ),
    "mistral": (MistralConfig, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_fox_equals_its_llama_before_training_however_short_the_sequences_are(kind, tmp_path):
    config, fields = KINDS[kind]
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    config = config(
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        initializer_range=0.2,
        num_key_value_heads=2,
        **sizes,
        **fields,
    )
    source = AutoModelForCausalLM.from_config(config).eval()
    source.save_pretrained(tmp_path / "source")

    def fox(**changes):
        paths = dict(tokenizer=str(DEMO), data="-")
        options = dict(recipe="fox-from-llama", max_length=16) | paths | changes
        return base_of(settings(tmp_path / "source", tmp_path / "run", **options), DEMO).eval()

    ids = torch.randint(3, VOCABULARY, (2, 96))  # beyond `max_length`, and beyond the claimed context
    rounding = 1e-4  # for logits up to 8; the converter's test has the same tolerance
    with torch.no_grad():
        expected = source(ids).logits
        torch.testing.assert_close(fox()(ids).logits, expected, atol=rounding, rtol=0)
        longer = fox(set=["max_position_embeddings=1000000"])
        torch.testing.assert_close(longer(ids).logits, expected, atol=rounding, rtol=0)
        for asked in (dict(decay_time=16.0), dict(set=["decay_time_min=16.0"])):
            assert (fox(**asked)(ids).logits - expected).abs().max() > 100 * rounding
    assert longer.config.decay_time_min == 1e5 * 1e6


def test_a_recipe_prints_no_warning_about_weights_that_it_makes_itself_but_true_ones(llama, tmp_path, caplog):
    """The run loads the base, saves an adapter and merges it."""
    logging.enable_propagation()  # caplog needs it
    try:
        assert train(settings(llama, tmp_path / "run", recipe="fox-from-llama")) == 0
        assert not [line for line in caplog.messages if "LOAD REPORT" in line or "model of type" in line]
        weights = load_file(llama / "model.safetensors")
        shutil.copytree(llama, tmp_path / "llama")
        save_file(weights | {"model.other.weight": torch.ones(2)}, tmp_path / "llama" / "model.safetensors")
        base_of(settings(tmp_path / "llama", tmp_path / "x", recipe="fox-from-llama"), llama)
        assert [line for line in caplog.messages if "model.other.weight" in line and "f_proj" not in line]
        (tmp_path / "fox").mkdir()
        fox = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
        gates = [name for name in fox.state_dict() if "f_proj" in name]
        fox.save_pretrained(tmp_path / "fox", state_dict={n: x for n, x in fox.state_dict().items() if n not in gates})
        caplog.clear()
        AutoModelForCausalLM.from_pretrained(tmp_path / "fox")
        assert "f_proj" in caplog.text, "a FoX without its gates is damaged"
    finally:
        logging.disable_propagation()


@pytest.mark.parametrize("recipe", ["lora", "fox-from-llama", "rope-extend", "hmt"])
def test_an_adapter_names_the_checkpoint_only_if_that_is_its_base(recipe, llama, tmp_path, capsys):
    sizes = {"rope-extend": dict(max_length=128), "hmt": dict(set=["segment_length=16", "sensory_tokens=4"])}
    run = settings(llama, tmp_path, recipe=recipe, merge=True, max_steps=1, **sizes.get(recipe, {}))
    assert train(run) == 0
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == (str(llama) if recipe == "lora" else None)
    said = capsys.readouterr().err
    assert ("First stage: each segment of 16 tokens" in said and f"--model {tmp_path / 'model'}" in said) == (
        recipe == "hmt"
    )


def test_an_extended_model_generates_as_far_as_it_was_extended(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "llama2")
    GenerationConfig(max_length=64).save_pretrained(tmp_path / "llama2")  # Llama 2 has such a limit
    run = settings(tmp_path / "llama2", tmp_path / "run", recipe="rope-extend", max_length=128, max_steps=1)
    assert train(run) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").generation_config.max_length == 128


def test_a_base_below_the_bound_for_the_claimed_context_is_mended_with_shorter_rows():
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    smollm2 = LlamaConfig(hidden_size=576, num_attention_heads=9, max_position_embeddings=8192, rope_parameters=rope)
    run = settings(Path("smollm2"), "run", recipe="rope-extend", max_length=2048)
    assert (
        extend_rope(smollm2, run)
        == "RoPE base: 100000 (reaches 3615 tokens) -> 1.92e+06; 8192 tokens need at least 324000"
    )
    assert (smollm2.rope_parameters["rope_theta"], smollm2.max_position_embeddings) == (1.92e6, 8192)
    with pytest.raises(ValueError, match=r"base 1.92e\+06 already suffices"):
        extend_rope(smollm2, run)


def test_a_memory_is_trained_in_two_stages(llama, tmp_path):
    fields = {"set": ["segment_length=40", "sensory_tokens=8", "recall_mode=single_pass"]}
    options = dict(recipe="hmt", max_length=80, lr_decay_every=2, **fields)
    texts = dict(tokenizer=str(llama), data=str(llama / "text.txt"))
    assert train(settings(llama, tmp_path / "first", **options)) == 0
    # the rate falls with optimizer steps, of two passes each
    assert [line["learning_rate"] for line in log(tmp_path / "first")] == pytest.approx([1e-2, 1e-2, 7e-3])
    adapted = json.loads((tmp_path / "first" / "adapter" / "adapter_config.json").read_text())
    assert set(adapted["target_modules"]) == {"q_proj", "v_proj"} and adapted["modules_to_save"] == ["memory"]
    first_stage = tmp_path / "first" / "model"
    first = AutoModelForCausalLM.from_pretrained(first_stage)
    assert not first.config.recall
    options["max_length"] = 160
    with pytest.raises(ValueError, match="`recall_mode` must be 'single_pass', got"):
        train(settings(first_stage, tmp_path / "x", **options | texts | {"set": ["recall_mode=paper"]}))
    assert not (tmp_path / "x" / "data").exists(), "the error comes before anything is packed"
    assert train(settings(first_stage, tmp_path / "second", **options | texts | {"set": []})) == 0
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "model")
    assert second.config.recall and second.config.segment_length == 40 and second.config.recall_mode == "single_pass"
    assert not torch.equal(first.memory.summary_token, second.memory.summary_token)
    plain = dict(max_length=160, max_steps=1)
    assert train(settings(tmp_path / "second" / "model", tmp_path / "fourth", **plain | texts)) == 0


def test_models_are_built_whole_where_zero_3_will_divide_them(llama, tmp_path, monkeypatch):
    """Without DeepSpeed, transformers fails when it partitions a model."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    new = make(dict(data="text", tokenizer=str(DEMO), output_dir=str(tmp_path), max_length=32))
    for run in (new, settings(llama, tmp_path)):
        config = make_config(run, tokenizer)
        zero_3 = SimpleNamespace(is_zero3=lambda: True)
        monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda zero_3=zero_3: zero_3)
        assert deepspeed.is_deepspeed_zero3_enabled()
        assert all(parameter.numel() for parameter in make_model(run, config).parameters())
