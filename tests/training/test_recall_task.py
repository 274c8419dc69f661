"""The recall task is what its docstring says, and the proof built on it runs, resumes and draws."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_longctx.training.recall_task import ANSWER, FIRST_KEY, READ, WRITE, RecallTask


def sample(task, writes=5, reads=3, rows=50, seed=0):
    ids, labels, question_facts = task.sample(writes, reads, rows, torch.Generator().manual_seed(seed))
    shape = (rows, writes + reads, task.segment_length)
    return ids.view(shape), labels.view(shape), question_facts


@pytest.mark.parametrize("answer_at", [2, 3, 13, 15])
def test_every_question_is_about_a_fact_of_its_text(answer_at):
    task = RecallTask(answer_at=answer_at)
    ids, labels, question_facts = sample(task)
    facts, questions = ids[:, :5], ids[:, 5:]
    assert (facts[..., 0] == WRITE).all() and (questions[..., 0] == READ).all()
    keys, values = facts[..., 1], facts[..., 2]
    assert all(len(set(row.tolist())) == 5 for row in keys)
    assert (questions[..., answer_at - 1] == ANSWER).all()
    assert torch.equal(questions[..., 3 if answer_at == 2 else 1], keys.gather(1, question_facts))
    assert torch.equal(questions[..., answer_at], values.gather(1, question_facts))
    assert ((keys >= FIRST_KEY) & (keys < FIRST_KEY + 16)).all()
    assert ((values >= FIRST_KEY + 16) & (values < FIRST_KEY + 32)).all()
    assert ids.max() < task.vocab_size
    scored = torch.zeros_like(ids, dtype=torch.bool)
    scored[:, 5:, answer_at] = True
    assert torch.equal(labels, ids.masked_fill(~scored, -100))


def test_the_filler_repeats_the_key_of_its_segment_only():
    ids, _, _ = sample(RecallTask(), rows=200)
    filler, key = ids[:, :5, 3:], ids[:, :5, 1, None]
    assert 0.57 < (filler == key).float().mean() < 0.63
    noise = filler[filler != key.expand_as(filler)]
    assert (noise >= FIRST_KEY + 32).all() and len(noise.unique()) == 28


def test_before_the_answer_nothing_tells_the_question_on_the_leak_task():
    ids, _, _ = sample(RecallTask(answer_at=2))
    assert (ids[:, 5:, :2] == torch.tensor([READ, ANSWER])).all()


def test_texts_depend_on_the_generator_alone():
    a = sample(RecallTask())[0]
    torch.manual_seed(1)
    assert torch.equal(a, sample(RecallTask())[0])
    assert not torch.equal(a, sample(RecallTask(), seed=1)[0])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RecallTask(answer_at=1), "answer_at is 1 in a segment of 16"),
        (lambda: RecallTask(answer_at=16), "must be from 2 to the last position"),
        (lambda: RecallTask(topic=1.5), "topic between 0 and 1"),
        (lambda: sample(RecallTask(), writes=17), "holds 1 to 16 facts"),
        (lambda: sample(RecallTask(), writes=0), "writes is 0"),
    ],
)
def test_bad_sizes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture(scope="module")
def proof():
    path = Path(__file__).resolve().parents[2] / "scripts" / "prove_hmt.py"
    spec = importlib.util.spec_from_file_location("prove_hmt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_proof_at_toy_size(proof, tmp_path, monkeypatch):
    """Every method of both tasks runs; what is in the journal is not run again; the picture is drawn."""
    pytest.importorskip("matplotlib")
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "batch": 4, "evaluated": 4}
    recipe = replace(proof.Recipe(), **sizes, stage_1_steps=2, stage_2_steps=2)
    proof.prove(tmp_path, tmp_path / "work", [0], recipe)
    first = (tmp_path / "hmt_recall.json").read_text()
    runs = json.loads(first)["runs"]
    assert [(r["task"], r["method"]) for r in runs] == proof.RUNS
    assert all(set(r["accuracy"]) == {"2", "4", "8", "16"} for r in runs)
    causal = runs[proof.RUNS.index(("recall", "HMT, causal"))]
    assert set(causal["small_memory"]) == set(proof.SMALL_MEMORY)
    assert len(causal["looked"]) == len(causal["expected"]) == 4
    (tmp_path / "hmt_recall.png").unlink()
    monkeypatch.setattr(proof, "train", None)  # not called again
    proof.prove(tmp_path, tmp_path / "work", [0], recipe)
    assert (tmp_path / "hmt_recall.json").read_text() == first
    assert (tmp_path / "hmt_recall.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="evaluated"):
        proof.prove(tmp_path, tmp_path / "work", [0], replace(recipe, evaluated=8))
