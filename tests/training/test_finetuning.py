"""A pretrained model is changed and trained, and what is saved is what was trained."""

import json
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from safetensors.torch import load_file
from torch.optim.lr_scheduler import StepLR
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations import deepspeed

from hf_longctx.hub.bundle import build_bundle
from hf_longctx.metrics import read_result, rope_base_bound
from hf_longctx.training import trainer as trainer_module
from hf_longctx.training.adapters import load_adapter
from hf_longctx.training.loss_in_pieces import LossInPieces
from hf_longctx.training.merge import merge
from hf_longctx.training.model_init import build_new_model, extend_rope, load_changed_model
from hf_longctx.training.recipes import FinetuneSettings, TrainSettings
from hf_longctx.training.run import dry_run, train, training_arguments
from hf_longctx.training.trainer import ResumableTrainer


# PEFT asks transformers for a property that has another name now.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

IDS = torch.randint(3, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            tie_word_embeddings=getattr(request, "param", False),
            **sizes,
        )
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO, model_max_length=64).save_pretrained(folder)
    (folder / "text.txt").write_text("The fox forgets what it no longer needs. " * 60)
    return folder


def settings(llama, output, **changes):
    sizes = dict(sequence_length=32, batch_tokens=64, steps=3, learning_rate=1e-2)
    data = {"data": str(llama / "text.txt"), "output": str(output)}
    return FinetuneSettings(model=str(llama), **data | sizes | changes)


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
    longer = dict(sequence_length=128, batch_tokens=128, eval_context=False) if recipe == "rope-extend" else {}
    run = settings(llama, tmp_path, recipe=recipe, merge=True, **longer)
    assert train(run) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[2] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = load_changed_model(run.resolve(), AutoTokenizer.from_pretrained(llama))
    start = logits(base)
    adapted = load_adapter(base, tmp_path / "adapter")
    assert (logits(model) - start).abs().max() > 0.01
    torch.testing.assert_close(logits(adapted), logits(model), atol=1e-5, rtol=1e-5)
    assert model.config.tie_word_embeddings == (model.get_input_embeddings().weight is model.lm_head.weight)


def test_a_run_without_logits_has_the_losses_of_one_with_them(llama, tmp_path, monkeypatch):
    made = []

    def make_small_pieces(model):
        made.append(LossInPieces(model, logits_at_once=10 * VOCABULARY))
        return made[-1]

    monkeypatch.setattr(trainer_module, "LossInPieces", make_small_pieces)
    losses = {}
    for in_pieces in (True, False):
        if not in_pieces:
            monkeypatch.setattr(trainer_module, "fits", lambda model: False)
        folder = tmp_path / str(in_pieces)
        assert train(settings(llama, folder, eval_data=str(llama / "text.txt"), eval_steps=3)) == 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[in_pieces] = [line.get("loss", line.get("eval_loss")) for line in lines]
    assert len(made) == 1 and len(losses[True]) == 4
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_conversations_are_trained_on_and_their_flags_are_locked(llama, tmp_path):
    rows = [{"prompt": f"What is {n}?", "completion": f" It is {n}, which comes after {n - 1}."} for n in range(40)]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = settings(llama, tmp_path / "run", data=str(data))
    assert train(run) == 0 and "flags" in json.loads((tmp_path / "run" / "lock.json").read_text())
    with pytest.raises(ValueError, match="holds conversations, which are packed as they are"):
        train(settings(llama, tmp_path / "other", data=str(data), packing=False))


def test_optimizer_compilation_and_checkpointed_layers_are_those_of_trainer(llama, tmp_path, monkeypatch):
    layers = dict(activation_checkpointing=True, checkpointed_layers=2, offload_activations=True)
    run = settings(llama, tmp_path, optimizer="paged_adamw_8bit", compile=True, **layers).resolve()
    monkeypatch.setattr("hf_longctx.training.run.is_bitsandbytes_available", lambda: True)
    arguments = training_arguments(run, tmp_path)
    assert arguments.optim == "paged_adamw_8bit" and arguments.torch_compile
    expected = {"use_reentrant": False, "every_n_layers": 2, "offload": True}
    assert arguments.activation_checkpointing and arguments.activation_checkpointing_kwargs == expected
    monkeypatch.setattr("hf_longctx.training.run.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ImportError, match="paged_adamw_8bit needs bitsandbytes"):
        training_arguments(run, tmp_path)
    assert training_arguments(settings(llama, tmp_path).resolve(), tmp_path).optim == TrainingArguments("x").optim


@pytest.mark.parametrize("recipe", ["fox-from-llama", "rope-extend", "hmt"])
def test_what_is_trained_in_full_is_never_rounded_beside_a_base_in_bfloat16(recipe, llama, tmp_path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(base)
    sizes = dict(sequence_length=128, batch_tokens=128, eval_context=False) if recipe == "rope-extend" else {}
    if recipe == "hmt":
        sizes = dict(sequence_length=80, batch_tokens=80, segment_length=40, sensory_tokens=8)
    if recipe == "fox-from-llama":
        sizes["decay_time"] = 1e7  # which bfloat16 cannot tell from 6 % less
    options = dict(recipe=recipe, tokenizer=str(llama), data=str(llama / "text.txt"), **sizes)
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
        whole = {name: whole[name] for name in whole if name in saved}  # not the second of tied ones
        assert {n for n, p in saved.items() if p.dtype == torch.float32} == set(whole)
        assert all(torch.equal(saved[name], parameter) for name, parameter in whole.items())
        loaded = AutoModelForCausalLM.from_pretrained(base)
        assert loaded.dtype == torch.bfloat16
    if recipe != "rope-extend":  # gates and memory are float32 in every model
        assert all(torch.equal(loaded.get_parameter(name), parameter) for name, parameter in whole.items())


@pytest.mark.parametrize(
    "recipe, bits", [("lora", 4), ("fox-from-llama", 4), ("rope-extend", 4), ("hmt", 4), ("hmt", 8)]
)
def test_a_quantized_base_is_kept_beside_its_adapter_and_merged_later_into_the_whole_one(
    recipe, bits, llama, tmp_path
):
    """The quantized path runs where bitsandbytes is installed."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'hf-longctx[quantized]'")
    sizes = dict(sequence_length=128, batch_tokens=128) if recipe == "rope-extend" else {}
    if recipe == "hmt":
        sizes = dict(sequence_length=80, batch_tokens=80, segment_length=40, sensory_tokens=8)
    run = settings(llama, tmp_path / "run", recipe=recipe, **{f"load_in_{bits}bit": True}, dtype="float32", **sizes)
    before = load_changed_model(run.resolve(), AutoTokenizer.from_pretrained(llama))
    assert any(p.dtype == (torch.uint8 if bits == 4 else torch.int8) for p in before.parameters())
    assert train(run) == 0
    folder = tmp_path / "run" / "model"
    expected = logits(load_adapter(before, folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if recipe != "lora":  # which leaves the base as it was
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
        whole = {n: p for n, p in load_file(folder / "adapter_model.safetensors").items() if "lora_" not in n}
        assert whole and all(p.dtype in (torch.float32, torch.uint8) for p in whole.values())
        assert load_file(folder / "model.safetensors")
        with pytest.raises(ValueError, match="holds an adapter and its base"):
            build_bundle(folder)
    with pytest.raises(ValueError):
        merge(tmp_path / "run", str(DEMO))
    merged = AutoModelForCausalLM.from_pretrained(merge(tmp_path / "run", str(llama)))
    adapted = load_adapter(
        load_changed_model(
            replace(run, load_in_4bit=False, load_in_8bit=False).resolve(), AutoTokenizer.from_pretrained(llama)
        ),
        folder,
    )
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)
    assert 0 < (logits(merged) - expected).norm() < 0.3 * expected.norm()


def test_an_adapter_that_is_not_merged_loads_with_its_base(llama, tmp_path):
    assert train(settings(llama, tmp_path)) == 0
    merged = load_adapter(AutoModelForCausalLM.from_pretrained(llama), tmp_path / "model").merge_and_unload()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits(merged))


@pytest.mark.parametrize("dropout", [0.1, 0.0], ids=["ours", "of PEFT alone"])
def test_an_adapter_is_trained_on(dropout, llama, tmp_path):
    assert train(settings(llama, tmp_path / "first", train_in_full="norm", lora_rank=3, lora_dropout=dropout)) == 0
    first = tmp_path / "first" / "model"
    if not dropout:
        (first / "base.json").unlink()
        (first / "tokenizer_config.json").unlink()
    run = settings(first, tmp_path / "second", data=str(llama / "text.txt"), eval_data=str(llama / "text.txt"))
    assert train(replace(run, max_hours=1e-6)) == signal.SIGALRM
    assert train(run) == 0
    whole = settings(llama, tmp_path / "whole", adapter=str(first), eval_data=str(llama / "text.txt"))
    assert train(whole) == 0
    lines = (tmp_path / "second" / "metrics.jsonl").read_bytes()
    assert lines == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    before, after = (
        load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("first", "second")
    )
    assert before.keys() == after.keys() and any("norm" in name for name in after)
    assert all(0 < (before[name] - after[name]).abs().max() < 0.1 for name in before)
    adapted = load_adapter(AutoModelForCausalLM.from_pretrained(llama), first)
    ids = torch.from_numpy(np.load(tmp_path / "whole" / "data" / "tokens.npy")[:32].astype(np.int64))[None]
    begins = adapted.eval()(ids, labels=ids).loss.item()
    assert json.loads(lines.splitlines()[0])["loss"] == pytest.approx(begins, abs=0.3), "it begins where that ended"
    (first / "adapter_model.safetensors").write_bytes(
        (tmp_path / "second" / "model" / "adapter_model.safetensors").read_bytes()
    )
    (tmp_path / "whole" / "model").rename(tmp_path / "model")
    with pytest.raises(ValueError, match=r"other settings \(--adapter: "):
        train(whole)


@pytest.mark.parametrize("full", [True, False], ids=["full", "lora"])
def test_the_checkpoint_with_the_lowest_loss_is_kept_and_written(full, llama, tmp_path, monkeypatch, capsys):
    losses, evaluate = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.7}, Trainer.evaluate

    def scripted(self, **kwargs):
        return evaluate(self, **kwargs) | {"eval_loss": losses[self.state.global_step]}

    monkeypatch.setattr(Trainer, "evaluate", scripted)
    options = dict(steps=4, eval_steps=1, eval_data=str(llama / "text.txt"), schedule="constant")
    run = settings(llama, tmp_path, full=full, keep_best=True, save_steps=100, keep_checkpoints=1, **options)
    checkpoints, model = tmp_path / "checkpoints", tmp_path / "model"

    def weights(folder):
        return load_file(folder / f"{'' if full else 'adapter_'}model.safetensors")

    def is_of(step):
        expected = weights(checkpoints / f"checkpoint-{step}")
        return all(torch.equal(weights(model)[name], tensor) for name, tensor in expected.items())

    assert train(replace(run, max_hours=1e-6)) == signal.SIGALRM
    for _ in range(2):  # and again when all steps are done
        assert train(run) == 0
        assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-2", "checkpoint-4"]
        assert is_of(2) and not is_of(4)
        shutil.rmtree(model)
    assert "the model is that of step 2, whose eval_loss was the lowest: 2.0000" in capsys.readouterr().err
    (checkpoints / "checkpoint-2").rename(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=r"checkpoint-2 had the lowest eval_loss, 2\.0000, and is gone"):
        train(run)
    assert train(replace(run, keep_best=False)) == 0 and is_of(4)


@pytest.mark.parametrize(
    "owner, method",
    [(LlamaForCausalLM, "save_pretrained"), (ResumableTrainer, "save_model")],
)
def test_a_run_that_ends_while_its_model_is_saved_saves_it_when_called_again(
    owner, method, llama, tmp_path, monkeypatch
):
    def end(*args, **kwargs):
        raise InterruptedError

    run = settings(llama, tmp_path, merge=True)
    monkeypatch.setattr(owner, method, end)
    with pytest.raises(InterruptedError):
        train(run)
    monkeypatch.undo()
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert train(run) == 0
    assert (tmp_path / "metrics.jsonl").read_text() == metrics
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-3"]
    adapter = load_adapter(AutoModelForCausalLM.from_pretrained(llama), tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logits(adapter), logits(model), atol=1e-5, rtol=1e-5)


def test_all_parameters_are_trained_where_the_user_wants_it(llama, tmp_path):
    assert train(settings(llama, tmp_path, full=True, warmup_steps=1)) == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["learning_rate"] for line in lines] == pytest.approx([5e-3, 1e-2, 5e-3])
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (llama, tmp_path / "model"))
    same = [n for (n, p), q in zip(before.named_parameters(), after.parameters()) if torch.equal(p, q)]
    assert not same


def test_a_converted_llama_begins_with_its_loss_and_its_gates_learn(llama, tmp_path, capsys):
    run = settings(llama, tmp_path, recipe="fox-from-llama", decay_time=1e7, attention="eager")
    assert train(run) == 0
    said = capsys.readouterr().err
    assert "gates that forget after 1e+07 tokens hardly learn from rows of 32" in said and "fox, eager" in said
    assert train(settings(llama, tmp_path / "llama")) == 0
    fox, plain = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (tmp_path, tmp_path / "llama")
    )
    assert fox[0]["loss"] == pytest.approx(plain[0]["loss"], abs=1e-4)
    assert [line["tokens"] for line in fox] == [64, 128, 192]
    assert [line["gate_learning_rate"] for line in fox] == pytest.approx([100 * x["learning_rate"] for x in fox])
    assert set(plain[0]) == {"step", "tokens", "loss", "grad_norm", "learning_rate"}
    before = load_changed_model(run.resolve(), AutoTokenizer.from_pretrained(llama)).model.layers[0].self_attn.f_proj
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.layers[0].self_attn.f_proj
    assert not torch.equal(before.weight, after.weight) and not torch.equal(before.bias, after.bias)


def test_a_longer_context_gets_a_base_above_the_bound_and_is_measured_before_and_after(llama, tmp_path, capsys):
    run = settings(llama, tmp_path, recipe="rope-extend", sequence_length=256, batch_tokens=256, steps=1)
    dry_run(run)
    said = capsys.readouterr().err
    assert "step 3/3" in said and "peak memory" in said and "before:" not in said
    assert not list(tmp_path.iterdir())
    assert train(run) == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "model").config
    assert AutoTokenizer.from_pretrained(tmp_path / "model").model_max_length == 256
    assert config.max_position_embeddings == 256
    assert config.rope_parameters["rope_theta"] >= rope_base_bound(255, 8).base
    for when in ("before", "after"):
        assert read_result(tmp_path / "evaluation" / when / "loss.json").context_length == 256
        assert read_result(tmp_path / "evaluation" / when / "lines.json").summary()


def test_a_longer_context_is_measured_only_where_wished_also_by_a_run_that_is_finished(llama, tmp_path):
    sizes = dict(sequence_length=128, batch_tokens=128, steps=1)
    run = settings(llama, tmp_path, recipe="rope-extend", eval_context=False, **sizes)
    assert train(run) == 0
    assert (tmp_path / "model").exists() and not (tmp_path / "evaluation").exists()
    assert train(replace(run, eval_context=True)) == 0
    assert [folder.name for folder in (tmp_path / "evaluation").iterdir()] == ["after"]


def test_a_base_below_the_bound_for_the_claimed_context_is_mended_with_shorter_rows():
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    smollm2 = LlamaConfig(hidden_size=576, num_attention_heads=9, max_position_embeddings=8192, rope_parameters=rope)
    run = FinetuneSettings(model="smollm2", recipe="rope-extend", sequence_length=2048)
    assert (
        extend_rope(smollm2, run)
        == "RoPE base 100000, which reaches 3615 tokens, becomes 2e+06; 8192 tokens need 323744"
    )
    assert (smollm2.rope_parameters["rope_theta"], smollm2.max_position_embeddings) == (2e6, 8192)
    with pytest.raises(ValueError, match=r"base 2e\+06 suffices for these: there is nothing to extend"):
        extend_rope(smollm2, run)


def test_a_memory_is_trained_in_two_stages(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hf_longctx.training.trainer.StepLR", lambda optimizer, step_size, gamma: StepLR(optimizer, 2, gamma)
    )
    options = dict(recipe="hmt", segment_length=40, sensory_tokens=8, sequence_length=80, batch_tokens=160, steps=3)
    options["recall_mode"] = "single_pass"
    texts = dict(tokenizer=str(llama), data=str(llama / "text.txt"))
    assert train(settings(llama, tmp_path / "first", **options)) == 0
    lines = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
    # of optimizer steps, which have two passes each
    assert [json.loads(line)["learning_rate"] for line in lines] == pytest.approx([1e-2, 1e-2, 7e-3])
    adapted = json.loads((tmp_path / "first" / "adapter" / "adapter_config.json").read_text())
    assert set(adapted["target_modules"]) == {"q_proj", "v_proj"} and adapted["modules_to_save"] == ["memory"]
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "model")
    assert not first.config.recall
    options["sequence_length"] = 160
    with pytest.raises(ValueError, match=r"'recall_mode': 'single_pass'}, this run has .*'recall_mode': 'three_pass'"):
        train(
            settings(
                tmp_path / "first" / "model", tmp_path / "other", **options | texts | {"recall_mode": "three_pass"}
            )
        )
    assert train(settings(tmp_path / "first" / "model", tmp_path / "second", **options | texts)) == 0
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "model")
    assert second.config.recall and second.config.segment_length == 40 and second.config.recall_mode == "single_pass"
    assert not torch.equal(first.memory.summary_token, second.memory.summary_token)
    assert train(settings(tmp_path / "second" / "model", tmp_path / "third", **options | texts, carry_state=True)) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "third" / "model").config.recall
    plain = dict(sequence_length=160, batch_tokens=160, steps=1)
    assert train(settings(tmp_path / "second" / "model", tmp_path / "fourth", **plain | texts)) == 0


def test_models_are_built_whole_where_zero_3_will_divide_them(llama, tmp_path, monkeypatch):
    """Without DeepSpeed, transformers fails where it would divide one."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for build, run in (
        (build_new_model, TrainSettings(data="text", tokenizer=DEMO, output=tmp_path, sequence_length=32)),
        (load_changed_model, settings(llama, tmp_path)),
    ):
        zero_3 = SimpleNamespace(is_zero3=lambda: True)
        monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda zero_3=zero_3: zero_3)
        assert deepspeed.is_deepspeed_zero3_enabled()
        assert all(parameter.numel() for parameter in build(run.resolve(), tokenizer).parameters())
