"""A training is measured on its way, and neither the training nor the measurements know of an interruption."""

import json
import signal
from dataclasses import replace

import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx import FoxConfig, FoxForCausalLM
from hf_longctx.metrics import forgetting_curve
from hf_longctx.training import measurements
from hf_longctx.training.data import TokenDataset
from hf_longctx.training.measurements import PROMPT
from hf_longctx.training.recipes import FinetuneSettings
from hf_longctx.training.run import train


SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


NEW = 5  # tokens of a sample


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "NEW", NEW)
    FoxForCausalLM(FoxConfig(**SIZES)).save_pretrained(tmp_path / "fox")
    (tmp_path / "text.txt").write_text("The fox forgets what it no longer needs. " * 40)
    paths = dict(model=str(tmp_path / "fox"), data=str(tmp_path / "text.txt"), tokenizer=str(DEMO))
    sizes = dict(sequence_length=32, batch_tokens=64, steps=4, lora_dropout=0.1, save_steps=1)
    return FinetuneSettings(output=str(tmp_path / "run"), measure_steps=2, **paths, **sizes)


@pytest.mark.filterwarnings("ignore:.*few repeats")
def test_curves_and_samples_are_those_of_the_model_and_leave_the_training_alone(run, tmp_path, capsys):
    assert train(replace(run, measure_steps=None, output=str(tmp_path / "plain"))) == 0
    assert train(replace(run, output=str(tmp_path / "whole"))) == 0
    assert train(replace(run, max_hours=1e-6)) == signal.SIGALRM
    with open(tmp_path / "run" / "measurements.jsonl", "a") as file:
        file.write('{"step": 2, "fine": ')  # killed while it was written
    assert train(run) == 0
    for name in ("metrics.jsonl", "measurements.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "plain" / "metrics.jsonl").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "run" / "measurements.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert [point["length"] for point in lines[0]["curve"]] == [7, 14]
    assert "step 4  copies " in capsys.readouterr().err
    model, tokenizer = (
        kind.from_pretrained(tmp_path / "run" / "model") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    rows = TokenDataset(tmp_path / "run" / "data" / "tokens.npy", 32, 2, VOCABULARY)
    ids = torch.cat([rows[i]["input_ids"] for i in range(8)])
    special = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    curve = forgetting_curve(model, ids, lengths=[7, 14], repeats=4, **special)
    assert [point["copy"] for point in lines[2]["curve"]] == [point.copy_mean for point in curve.points]
    text = tokenizer.decode(model.generate(ids[None, :PROMPT], max_new_tokens=NEW, do_sample=False)[0, PROMPT:])
    assert lines[2]["samples"][0] == {"prompt": tokenizer.decode(ids[:PROMPT]), "text": text}


def test_a_base_in_bfloat16_and_a_memory_are_measured(run, tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().save_pretrained(tmp_path / "llama")
    memory = dict(recipe="hmt", segment_length=16, sensory_tokens=4, lora_dropout=None)
    short = replace(run, steps=1, measure_steps=1, model=str(tmp_path / "llama"))
    for changes in (dict(train_in_full="norm,embed_tokens"), memory):
        output = tmp_path / f"{changes.get('recipe')}"
        assert train(replace(short, output=str(output), **changes)) == 0
        assert len((output / "measurements.jsonl").read_text().splitlines()) == 2


def test_rows_that_are_too_short_are_refused(run):
    with pytest.raises(ValueError, match="--measure-steps needs rows of 11 tokens or more"):
        train(replace(run, sequence_length=8))
