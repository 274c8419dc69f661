"""Runs that are killed, stopped and continued end as if nothing had happened."""

import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import commands
import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from faults import FAULTS, make_environments
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

from hf_longctx import FoxForCausalLM
from hf_longctx.corpus import stdlib_text
from hf_longctx.training.adapters import load_adapter
from hf_longctx.training.data import TokenDataset, stack
from hf_longctx.training.model_init import load_changed_model
from hf_longctx.training.recipes import FinetuneSettings, TrainSettings
from hf_longctx.training.run import train, training_arguments
from hf_longctx.training.streams import CarriesStates, StreamTrainer
from hf_longctx.training.trainer import ResumableTrainer, warm_up_above_zero


pytestmark = pytest.mark.usefixtures("small_model")
STEPS, SAVE_STEPS = 5, 2
ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = str(DEMO)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    documents = stdlib_text("held_out")[:12000].split("\n\n")
    for number, document in enumerate(documents):
        (path / f"{number:03}.txt").write_text(document)
    return str(path)


def settings(text, output, **changes):
    sizes = dict(
        sequence_length=32, batch_tokens=128, per_device_batch_size=2, steps=STEPS, save_steps=SAVE_STEPS, dropout=0.1
    )
    return TrainSettings(data=text, tokenizer=TOKENIZER, output=str(output), pro=True, **sizes | changes)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluated(text):
    """Settings of an evaluation on an odd number of rows, and of a training that is the same in any processes."""
    return dict(dropout=0.0, eval_data=os.path.join(text, "003.txt"), eval_steps=2)


@pytest.fixture(scope="module")
def in_one_process(apart, evaluated, text, tmp_path_factory):
    """Metrics of a run in one process that nothing interrupts."""
    folder = tmp_path_factory.mktemp("one")
    assert apart(settings(text, folder, **evaluated)) == 0
    return metrics(folder)


def losses(lines):
    return [line["loss"] for line in lines if "loss" in line]


def test_a_process_without_launcher_trains_on_one_of_several_gpus(text, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 4))  # of which Trainer would use all
    assert training_arguments(settings(text, tmp_path).resolve(), tmp_path)._n_gpu == 1


def test_a_run_stops_after_its_hours_and_is_as_long_as_its_epochs(text, tmp_path):
    run = settings(text, tmp_path, epochs=0.1)
    assert train(replace(run, max_hours=1e-6)) == signal.SIGALRM
    assert not (tmp_path / "model").exists()
    assert train(run) == 0
    rows = len(TokenDataset(tmp_path / "data" / "tokens.npy", 32, 2, VOCABULARY))
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, math.ceil(0.1 * rows / 4) + 1))


def test_the_loss_of_other_texts_is_measured_whole_and_leaves_the_training_alone(text, tmp_path, capsys):
    """Three rows, which are fewer than two forward passes, of a text that a stream would repeat without end."""
    (tmp_path / "other").mkdir()
    for number, times in enumerate((1, 1, 1, 1, 5)):  # short documents, so that rows have fewer labels than the last
        (tmp_path / "other" / f"{number}.txt").write_text("The fox forgets what it no longer needs. " * times)
    measured = []
    for streaming in (False, True):
        folder = tmp_path / str(streaming)
        evaluated = dict(eval_data=str(tmp_path / "other"), eval_steps=2, streaming=streaming)
        train(settings(text, folder, preset="tiny", steps=4, **evaluated))
        measured.append([line["eval_loss"] for line in metrics(folder) if "eval_loss" in line])
    assert [len(values) for values in measured] == [2, 2]
    said = capsys.readouterr().err
    assert f"step 4/4  eval_loss {measured[0][-1]:.4f}\n" in said
    assert said.count(" rows, which are read ") == 1, "a stream has no end"
    model = FoxForCausalLM.from_pretrained(tmp_path / "False" / "model")
    rows = TokenDataset(tmp_path / "False" / "data" / "eval_tokens.npy", 32, 2, VOCABULARY)
    assert len(rows) == 3
    labels = [int((row["labels"][1:] != -100).sum()) for row in map(rows.__getitem__, range(3))]
    assert len(set(labels)) > 1
    with torch.no_grad():
        total = sum(float(model(**stack([rows[i]])).loss) * labels[i] for i in range(3))
    assert measured[0][-1] == pytest.approx(total / sum(labels), rel=1e-5)
    plain = tmp_path / "plain"
    train(settings(text, plain, preset="tiny", steps=4))
    assert metrics(plain) == [line for line in metrics(tmp_path / "False") if "loss" in line]


@pytest.mark.parametrize(
    "name, steps, warmup", [("cosine", 3, 0), ("constant_with_warmup", 20, 1), ("warmup_stable_decay", 200, 10)]
)
def test_every_step_of_a_schedule_learns_and_the_warmup_is_linear(name, steps, warmup):
    options = {"num_decay_steps": steps // 10} if name == "warmup_stable_decay" else {}
    rates = {}
    for mended in (False, True):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=options)
        schedule = warm_up_above_zero(schedule, warmup) if mended else schedule
        rates[mended] = []
        for _ in range(steps):
            rates[mended].append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
    assert min(rates[True]) > 0 and max(rates[True]) == 1
    assert rates[True][: warmup + 1] == pytest.approx([(step + 1) / (warmup + 1) for step in range(warmup + 1)])
    assert rates[True][warmup:] == rates[False][warmup:]


def test_a_run_goes_on_as_if_nothing_had_happened(apart, text, tmp_path):
    """It dies in every way, one after another."""
    run = settings(text, tmp_path / "run")
    for name, fault in FAULTS.items():
        assert apart(run, *fault) == (143 if "SIGTERM" in name else -signal.SIGKILL), name
        assert not (tmp_path / "run" / "model").exists()
    assert apart(run) == apart(replace(run, output=str(tmp_path / "whole"))) == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert FoxForCausalLM.from_pretrained(tmp_path / "run" / "model").num_parameters() > 2e5


def test_processes_share_rows_and_go_on_too(apart, in_one_process, evaluated, text, tmp_path):
    run = settings(text, tmp_path, sequence_parallel=2, activation_checkpointing=True, **evaluated)
    assert apart(run, *FAULTS["killed after a checkpoint"], processes=2) != 0
    assert apart(run, processes=2) == 0
    two = metrics(tmp_path)
    assert sum("eval_loss" in line for line in in_one_process) == 3
    assert two[0] == pytest.approx(in_one_process[0], rel=1e-5)  # before AdamW enlarges what rounding changes
    for line, expected in zip(two, in_one_process, strict=True):
        for name in line.keys() & {"loss", "eval_loss"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-5)


def test_shards_that_share_rows_divide_a_step_and_go_on_too(apart, in_one_process, text, tmp_path):
    run = settings(text, tmp_path, dropout=0.0, sequence_parallel=2)
    assert apart(run, *FAULTS["killed inside a save"], processes=2, sharded=True) != 0
    assert apart(run, processes=2, sharded=True) == 0
    assert losses(metrics(tmp_path)) == pytest.approx(losses(in_one_process), rel=1e-5)
    states = [
        torch.load(file, weights_only=False)["cpu"] for file in tmp_path.glob(f"checkpoints/checkpoint-{STEPS}/rng_*")
    ]
    assert len(states) == 2 and not torch.equal(*states)  # of dropout


def test_accelerate_launches_processes_that_divide_a_step(apart, in_one_process, text, tmp_path):
    """What is launched keeps its environment, in which forks then train: they need not import torch anew."""
    script = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))"
    (tmp_path / "script.py").write_text(script)
    accelerate = ["python", "-m", "accelerate.commands.launch", "--config_file", ROOT / "scripts/accelerate/ddp.yaml"]
    launched = [*accelerate, "--num_processes", "2", tmp_path / "script.py", tmp_path / "rank-"]
    done = commands.run(launched, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    environments = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    for environment, ours in zip(environments, make_environments(2)):
        assert ours.keys() <= environment.keys()
        # the launcher, which kept a store for its processes, has ended
        environment |= {"MASTER_PORT": ours["MASTER_PORT"], "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert apart(settings(text, tmp_path / "run", dropout=0.0), environments=environments) == 0
    assert losses(metrics(tmp_path / "run")) == pytest.approx(losses(in_one_process), rel=1e-6)
    states = list((tmp_path / "run" / "checkpoints" / f"checkpoint-{STEPS}").glob("rng_state*"))
    assert len(states) == 2, "two processes trained"


@pytest.mark.parametrize("recipe, sharded", [("fox-from-llama", True), ("rope-extend", False)])
def test_processes_train_one_adapter_and_measure_together(recipe, sharded, apart, text, tmp_path):
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).save_pretrained(tmp_path / "llama")
    sizes = dict(sequence_length=128, batch_tokens=512) if recipe == "rope-extend" else dict(sequence_length=32)
    sizes |= dict(per_device_batch_size=1, steps=2, learning_rate=1e-2)
    weights = []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        base = dict(model=str(tmp_path / "llama"), tokenizer=TOKENIZER, data=text, output=str(output))
        run = FinetuneSettings(recipe=recipe, **base, **sizes)
        if recipe == "rope-extend":
            run.eval_context = processes == 2
        assert (train(run) if processes == 1 else apart(run, processes=processes, sharded=sharded)) == 0
        merged = AutoModelForCausalLM.from_pretrained(output / "model")
        adapted = load_adapter(
            load_changed_model(run.resolve(), AutoTokenizer.from_pretrained(TOKENIZER)), output / "adapter"
        )
        weights.append(dict(merged.named_parameters()))
        for name, parameter in adapted.merge_and_unload().named_parameters():
            torch.testing.assert_close(parameter, weights[-1][name])
        results = [path.name for path in (output / "evaluation").rglob("lines.json")]
        assert len(results) == (2 if recipe == "rope-extend" and processes == 2 else 0)
    for name, parameter in weights[0].items():  # Adam divides rounding by rounding where a gradient is almost 0
        far = ~torch.isclose(parameter, weights[1][name], rtol=1e-3, atol=2e-4)
        assert far.sum() <= 0.02 * far.numel(), f"{name}: {far.sum()} of {far.numel()} numbers differ"


def test_all_private_members_of_trainer_that_are_overridden_are_known():
    """A release of transformers that renames one would leave ours uncalled."""
    ours = {name for cls in (ResumableTrainer, CarriesStates, StreamTrainer) for name in vars(cls)}
    assert sorted(name for name in ours & set(dir(Trainer)) if re.match("_[a-z]", name)) == [
        "_get_grad_norm",
        "_get_output_dir",
        "_load_rng_state",
        "_run_epoch",
        "_save_checkpoint",
        "_save_rng_state",
    ]
    assert hasattr(TrainingArguments, "n_gpu")  # which reads the member `_n_gpu` that `training_arguments` sets
