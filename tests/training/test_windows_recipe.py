"""The recipe windows: it learns, resumes, writes head_windows.json, and prints what the windows cost."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from faults import log, losses, make, make_apart
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from hf_longctx.training.run import train
from hf_longctx.training.trainer import LongContextTrainer
from hf_longctx.windows import HeadWindows


# before transformers 5.23 or so: gradient_checkpointing
CHECKPOINTING = next(
    n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n)
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,  # the tokenizer has it
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(3, VOCABULARY, 5000))
    return folder


def values(llama, output, **changes):
    sizes = dict(max_length=512, max_steps=4, save_steps=1, save_total_limit=9, keep=0.4)
    paths = dict(model=str(llama), data=str(llama / "tokens.npy"), output_dir=str(output))
    return {"recipe": "windows", **paths, **sizes, **changes}


@pytest.fixture(scope="module")
def finished(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(make(values(llama, folder)))
    return folder


def test_the_run_writes_windows_that_keep_the_share_of_the_cache(finished, llama, capsys):
    windows = HeadWindows.from_pretrained(finished / "model")
    assert 0.2 < windows.share(1024) <= 0.4
    assert not list((finished / "model").glob("*.safetensors")), "the model itself is not copied"
    windows.apply(LlamaForCausalLM.from_pretrained(llama))
    checkpoint = finished / "checkpoint-4" / "model.safetensors"
    assert checkpoint.stat().st_size < 1000, "a checkpoint contains the windows only"


def test_the_run_prints_what_the_windows_cost(finished, llama, tmp_path, capsys):
    train(make(values(llama, tmp_path, max_steps=1, data="stdlib")))
    printed = capsys.readouterr().out
    assert re.fullmatch(
        r"cache \d\d % at 1,024 tokens; copies 254 tokens at \d+ % \(model: \d+ %\), perplexity [+-][\d.,]+ %, "
        r"lines \d+ % \(\d+ %\)\n",
        printed.replace("%", " %").replace("  %", " %"),
    ), printed


@pytest.mark.parametrize("moment", ["measuring", "writing"])
def test_a_killed_measurement_is_repeated(moment, finished, llama, tmp_path, monkeypatch, capsys):
    write = Path.write_text

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    def killed_in_cost(path, text):
        if path.stem != "cost":
            return write(path, text)
        write(path, "")
        raise KeyboardInterrupt

    if moment == "measuring":
        monkeypatch.setattr("hf_longctx.training.recipes.windows.line_retrieval", killed)
    else:
        monkeypatch.setattr(Path, "write_text", killed_in_cost)
    with pytest.raises(KeyboardInterrupt):
        train(make(values(llama, tmp_path)))
    monkeypatch.undo()
    capsys.readouterr()
    for _ in range(2):  # the second time, the sentence is read
        train(make(values(llama, tmp_path)))
        assert capsys.readouterr().out.strip() == (finished / "model" / "cost.txt").read_text()


def test_the_evaluation_data_are_read_in_any_format(llama, tmp_path, capsys):
    mixture = "{0}=0.7,{0}=0.3".format(llama / "tokens.npy")
    train(make(values(llama, tmp_path, max_steps=1, eval_data=mixture, eval_steps=1)))
    assert "cache" in capsys.readouterr().out and "eval_loss" in log(tmp_path)[-1]


def test_the_context_is_that_of_the_text_model(llama, tmp_path, capsys):
    text = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    text |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, layer_types=["full_attention"] * 2)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    vision |= dict(patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=4000)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path / "model")
    train(make(values(llama, tmp_path / "run", model=str(tmp_path / "model"), max_steps=1)))
    assert "at 8,192 tokens" in capsys.readouterr().out


def test_a_stopped_run_resumes_with_the_losses_of_an_uninterrupted_one(finished, llama, tmp_path, monkeypatch):
    step = LongContextTrainer.training_step

    def terminated(self, *args, **kwargs):
        if self.state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(LongContextTrainer, "training_step", terminated)
    assert train(make(values(llama, tmp_path))) == signal.SIGTERM
    monkeypatch.undo()
    assert len(losses(tmp_path)) == 2
    train(make(values(llama, tmp_path)))
    assert log(tmp_path) == log(finished)
    assert HeadWindows.from_pretrained(tmp_path / "model") == HeadWindows.from_pretrained(finished / "model")


def test_a_run_that_a_callback_stops_keeps_the_share(llama, tmp_path, monkeypatch):
    step = LongContextTrainer.training_step

    def stopped(self, *args, **kwargs):
        self.control.should_training_stop = True
        return step(self, *args, **kwargs)

    monkeypatch.setattr(LongContextTrainer, "training_step", stopped)
    train(make(values(llama, tmp_path, max_steps=9)))
    (first, *_) = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert len(losses(tmp_path)) == 1 and first["share"] > 0.4, "the first step has a larger share"
    assert HeadWindows.from_pretrained(tmp_path / "model").share(1024) <= 0.4


@pytest.mark.slow
def test_two_processes_share_a_step_and_the_measurements(llama, tmp_path):
    """The loss is the mean of all sequences of a step, also if they are read one after the other."""
    found = []
    for processes in (1, 2):
        run = values(llama, tmp_path / str(processes), max_steps=1, use_cpu=True)
        run |= {"gradient_accumulation_steps": 2 // processes, "per_device_train_batch_size": 1}
        assert make_apart()(run, processes=processes) == 0
        found.append(
            (*losses(tmp_path / str(processes)), HeadWindows.from_pretrained(tmp_path / f"{processes}/model"))
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    assert found[0][1] == found[1][1]


def test_a_finished_run_with_another_share_is_an_error(finished, llama):
    with pytest.raises(ValueError, match="keep"):
        train(make(values(llama, finished, keep=0.3)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_peft": True}, "`use_peft` must be False for the recipe windows"),
        ({"packing": False}, "`packing` must be True for the recipe windows"),
        ({"attn_implementation": "sdpa"}, "`attn_implementation` must be None for the recipe windows"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0 for the recipe windows, got 0.1"),
        ({"weight_decay": 0.1}, "`weight_decay` must be 0 for the recipe windows, got 0.1"),
        (
            {"load_best_model_at_end": True, "eval_data": "stdlib", "eval_steps": 1, "save_steps": 1},
            "`load_best_model_at_end` must be False for the recipe windows",
        ),
        ({CHECKPOINTING: True}, f"`{CHECKPOINTING}` must be False for the recipe windows"),
        ({"max_grad_norm": 1.0}, "`max_grad_norm` must be 0 for the recipe windows, got 1.0"),
        ({"adam_beta1": 0.5}, "`adam_beta1` must be 0.9 for the recipe windows, got 0.5"),
        ({"optim": "adafactor"}, "`optim` must be .* for the recipe windows, got .*(?i:adafactor)"),
        ({"max_steps": -1}, "`max_steps` must be positive for the recipe windows, got -1. Give --max_steps 24"),
        ({"learning_rate": 2.0}, "`learning_rate` must be from 0 to 1 for the recipe windows, got 2.0"),
        ({"max_length": 500}, "`max_length` must be a power of two of at least 64, got 500. Give --max_length 256"),
        ({"keep_context": 256}, r"`keep_context` must be at least `max_length` \(512\), got 256"),
        ({"keep_context": 0}, "`keep_context` must be at least `max_length` .*, got 0"),
        ({"keep": 0.001}, "`keep` must be at least"),
        ({"recipe": "lora", "data": "stdlib"}, "`keep` requires `recipe`='windows'"),
    ],
)
def test_wrong_settings_are_errors(changes, message, llama, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(make(values(llama, tmp_path, **changes)))
