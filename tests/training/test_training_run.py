"""Runs that are killed, stopped and resumed end like uninterrupted ones."""

import os
import signal
from pathlib import Path

import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

import faults
from accelerate.commands.config.config_args import load_config_from_file
from faults import FAULTS, SIZES, log, losses, make, make_apart
from small_llama import save_llama
from torch._dynamo.backends.debugging import aot_eager
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from hf_longctx import FoxForCausalLM
from hf_longctx.corpus import stdlib_text
from hf_longctx.training.data import TokenDataset, collate
from hf_longctx.training.models import make_config, make_model
from hf_longctx.training.run import train


STEPS, SAVE_STEPS = 5, 2
ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = str(DEMO)
# before transformers 5.23 or so: gradient_checkpointing
CHECKPOINTING = next(
    n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n)
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    documents = stdlib_text("held_out")[:12000].split("\n\n")
    for number, document in enumerate(documents):
        (path / f"{number:03}.txt").write_text(document)
    return str(path)


def settings(text, output, dropout=0.1, processes=1, **changes):
    """Four sequences a step, in forward passes of two."""
    sizes = dict(max_length=32, per_device_train_batch_size=2, max_steps=STEPS, save_steps=SAVE_STEPS)
    sizes |= dict(gradient_accumulation_steps=2 // processes, learning_rate=3e-3)
    paths = dict(data=text, tokenizer=TOKENIZER, output_dir=str(output))
    return paths | sizes | {"set": [*SIZES, f"attention_dropout={dropout}"]} | changes


@pytest.fixture(scope="module")
def apart():
    """Train in separate processes; see `make_apart`."""
    return make_apart()


@pytest.fixture(scope="module")
def evaluated(text):
    """Settings of an evaluation on an odd number of rows, and of a training that is the same in any processes."""
    return dict(dropout=0.0, eval_data=os.path.join(text, "003.txt"), eval_steps=2)


@pytest.fixture(scope="module")
def in_one_process(apart, evaluated, text, tmp_path_factory):
    """Return the log of a run in one process that nothing interrupts."""
    folder = tmp_path_factory.mktemp("one")
    assert apart(settings(text, folder, **evaluated)) == 0
    return folder


def test_a_process_that_sees_several_gpus_is_refused(text, tmp_path, monkeypatch):
    args = make(settings(text, tmp_path))
    monkeypatch.setattr(type(args), "n_gpu", property(lambda self: 4))  # Trainer would use all by DataParallel
    with pytest.raises(ValueError, match=r"has 4 GPUs.*torchrun --nproc-per-node 4 -m hf_longctx train"):
        train(args)


def test_a_fox_on_a_gpu_takes_the_fastest_attention_that_is_right(text, tmp_path, monkeypatch):
    args, tokenizer, taken = make(settings(text, tmp_path)), AutoTokenizer.from_pretrained(TOKENIZER), []
    monkeypatch.setattr(FoxForCausalLM, "set_attn_implementation", lambda self, name: taken.append(name))
    make_model(args, make_config(args, tokenizer))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for attention in (None, "eager"):
        args.attn_implementation = attention
        make_model(args, make_config(args, tokenizer))
    assert taken == ["auto", "eager"]


def test_the_first_line_has_the_size_and_the_last_one_the_loss(text, tmp_path, capsys):
    evaluated = dict(eval_data=os.path.join(text, "003.txt"), eval_steps=2)
    assert train(make(settings(text, tmp_path / "run", max_steps=4, **evaluated))) == 0
    lines = capsys.readouterr().err.splitlines()
    model = FoxForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert lines[0].startswith(f"fox with {model.num_parameters():,} parameters")
    assert lines[1].startswith("4 sequences of 32 tokens a step on 1 x cpu, from the beginning")
    assert lines[-1] == f"wrote {tmp_path / 'run' / 'model'}; the last loss is {losses(tmp_path / 'run')[-1]:.4f}"
    found = [entry["eval_loss"] for entry in log(tmp_path / "run") if "eval_loss" in entry]
    assert len(found) == 2
    held_out = min((tmp_path / "run" / "data").glob("*.npy"), key=os.path.getsize)
    rows = TokenDataset(held_out, 32, 2, VOCABULARY)
    batches = [[rows[i] for i in range(first, min(first + 2, len(rows)))] for first in range(0, len(rows), 2)]
    with torch.no_grad():
        total = sum(float(model.eval()(**collate(batch)).loss) * len(batch) for batch in batches)
    assert found[1] == pytest.approx(total / len(rows), rel=1e-5)


def test_a_run_resumes_as_if_nothing_had_happened(apart, text, tmp_path):
    """It dies in every way, one after the other."""
    run = settings(text, tmp_path / "run")
    for name, fault in FAULTS.items():
        assert apart(run, *fault) == (143 if "SIGTERM" in name else -signal.SIGKILL), name
        assert not (tmp_path / "run" / "model").exists()
    assert apart(run) == apart(settings(text, tmp_path / "whole")) == 0
    assert log(tmp_path / "run") == log(tmp_path / "whole") and len(log(tmp_path / "run")) == STEPS
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


def test_a_compiled_run_equals_one_that_is_not(text, tmp_path, monkeypatch, capsys):
    """One graph for all layers, under activation checkpointing; Inductor itself takes minutes on a CPU."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_module(self, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    layers = {"set": [*settings(text, "")["set"], "num_hidden_layers=3"]}
    for compiles in (False, True):
        options = layers | {CHECKPOINTING: True, "torch_compile": compiles}
        assert train(make(settings(text, tmp_path / str(compiles), **options))) == 0
        assert ("compiled layers" in capsys.readouterr().err) == compiles
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-5)
    assert 1 <= len(graphs) <= 2  # rows with several documents, and rows with one


@pytest.mark.skipif(
    CHECKPOINTING == "gradient_checkpointing",
    reason="an older transformers loads no optimizer in several processes on a CPU",
)
def test_processes_share_rows_and_resume_too(apart, in_one_process, evaluated, text, tmp_path):
    run = settings(text, tmp_path, sequence_parallel=2, **{CHECKPOINTING: True}, **evaluated)
    assert apart(run, *FAULTS["killed after a checkpoint"], processes=2) != 0
    assert apart(run, processes=2) == 0
    two, one = log(tmp_path), log(in_one_process)
    assert sum("eval_loss" in line for line in one) == 3
    assert two[0] == pytest.approx(one[0], rel=1e-5)  # before AdamW enlarges what rounding changes
    for line, expected in zip(two, one, strict=True):
        for name in line.keys() & {"loss", "eval_loss"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-5)


def test_shards_that_share_rows_divide_a_step_and_resume_too(apart, in_one_process, text, tmp_path):
    run = settings(text, tmp_path, dropout=0.0, sequence_parallel=2)
    assert apart(run, *FAULTS["killed inside a save"], processes=2, sharded=True) != 0
    assert apart(run, processes=2, sharded=True) == 0
    assert losses(tmp_path) == pytest.approx(losses(in_one_process), rel=1e-5)
    states = [torch.load(file, weights_only=False)["cpu"] for file in tmp_path.glob(f"checkpoint-{STEPS}/rng_*")]
    assert len(states) == 2 and not torch.equal(*states)  # dropout differs between processes


@pytest.mark.slow
def test_processes_divide_a_step(apart, in_one_process, text, tmp_path):
    assert apart(settings(text, tmp_path, dropout=0.0, processes=2), processes=2) == 0
    assert losses(tmp_path) == pytest.approx(losses(in_one_process), rel=1e-6)
    assert len(list(tmp_path.glob(f"checkpoint-{STEPS}/rng_state*"))) == 2, "two processes trained"


@pytest.mark.parametrize("file", sorted((ROOT / "scripts" / "accelerate").glob("*.yaml")), ids=str)
def test_accelerate_reads_its_config_files(file):
    load_config_from_file(str(file))


@pytest.mark.parametrize("recipe, sharded", [("fox-from-llama", True), ("rope-extend", False)])
def test_processes_train_one_adapter(recipe, sharded, apart, text, tmp_path):
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4)
    save_llama(tmp_path / "llama", **sizes, max_position_embeddings=64)
    sizes = dict(max_length=128 if recipe == "rope-extend" else 32, max_steps=2, learning_rate=1e-2, warmup_steps=0)
    weights = []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        paths = dict(model=str(tmp_path / "llama"), tokenizer=TOKENIZER, data=text, output_dir=str(output))
        run = dict(recipe=recipe, gradient_accumulation_steps=4 // processes, **paths, **sizes)
        assert (train(make(run)) if processes == 1 else apart(run, processes=processes, sharded=sharded)) == 0
        weights.append(dict(AutoModelForCausalLM.from_pretrained(output / "model").named_parameters()))
    for name, parameter in weights[0].items():  # Adam divides rounding by rounding where a gradient is almost 0
        far = ~torch.isclose(parameter, weights[1][name], rtol=1e-3, atol=2e-4)
        assert far.sum() <= 0.02 * far.numel(), f"{name}: {far.sum()} of {far.numel()} numbers differ"


def test_a_second_run_reads_in_all_processes_what_the_first_has_written(apart, text, tmp_path):
    """One process is late, and the other one has long started."""
    first = settings(text, tmp_path / "first", processes=2, max_steps=1)
    second = dict(
        recipe="lora", model=str(tmp_path / "first" / "model"), data=text, output_dir=str(tmp_path / "second")
    )
    second |= dict(max_length=32, max_steps=1, gradient_accumulation_steps=1)
    assert apart(second, faults.train_and_be_late, first, processes=2) == 0
