"""The controls of scripts.prove_hmt do what they say, and the same command resumes a run of tiny models."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.utils import logging


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def proof(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    level, threads = logging.get_verbosity(), torch.get_num_threads()
    yield importlib.import_module("scripts.prove_hmt")
    logging.set_verbosity(level)
    logging.enable_progress_bar()
    torch.set_num_threads(threads)


@pytest.fixture
def recipe(proof):
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "batch": 2, "texts": 4, "rounds": 2}
    return replace(proof.Recipe(), **sizes, stage_1_steps=1, stage_2_steps=1)


@pytest.fixture
def model(proof, recipe):
    run = proof.Run("recall", 0.6, 2, 0, "HMT, single pass")
    torch.manual_seed(0)
    return proof.HMTWrapper.from_backbone(
        proof.new_model(run, run.recall_task(recipe), recipe).backbone,
        proof.HMTConfig(segment_length=16, sensory_tokens=2, recall_mode="single_pass"),
    ).eval()


def sample(proof, recipe):
    task = proof.Run("recall", 0.6, 2, 0, "HMT, single pass").recall_task(recipe)
    ids, _, facts = task.sample(3, 2, 4, torch.Generator().manual_seed(0))
    return ids, facts


@torch.no_grad()
def test_an_oracle_recalls_the_memory_of_the_fact(proof, recipe, model):
    ids, facts = sample(proof, recipe)
    recall = model.memory.recall
    with proof.changed_recall(model, proof.oracle_recall, facts, 5):
        out = model(input_ids=ids, output_recall=True)
    weights = out.recall_scores[-2:]
    assert all(torch.equal(x.argmax(1), facts[:, i]) and (x.amax(1) == 1).all() for i, x in enumerate(weights))
    assert (out.recall_scores[3].amax(1) < 1).all(), "segments before the questions recall as usual"
    assert model.memory.recall == recall


@torch.no_grad()
def test_shuffled_memories_are_those_of_another_sequence(proof, recipe, model):
    ids, facts = sample(proof, recipe)
    once = model(input_ids=ids[:1].expand(4, -1))
    with proof.changed_recall(model, proof.shuffled_memories, facts, 5):
        same = model(input_ids=ids[:1].expand(4, -1))
        other = model(input_ids=ids)
    assert torch.equal(once.logits, same.logits), "equal sequences have equal memories"
    assert not torch.allclose(other.logits[:, -10:], model(input_ids=ids).logits[:, -10:])


def test_the_proof_at_toy_size(proof, recipe, tmp_path, monkeypatch, capsys, request):
    """Every method runs, runs that have a row are not repeated, and a table and a figure show the rows."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(proof, "Recipe", lambda: recipe)
    monkeypatch.setattr(proof, "FACTS", (2, 16))
    monkeypatch.setattr(proof, "SMALL", tmp_path / "small")
    arguments = f"--seeds 3 --output {tmp_path}/small/hmt_recall.json --picture {tmp_path}/x.png".split()
    monkeypatch.setattr(proof, "CONDITIONS", dict([*proof.CONDITIONS.items()][:1]))
    proof.main(["--seeds", "3", "--small"])  # does not read the rows of the committed result
    assert (tmp_path / "small" / "hmt_recall.png").stat().st_size > 10_000
    request.getfixturevalue("undrawn")
    result = json.loads((tmp_path / "small" / "hmt_recall.json").read_text())
    small = [row["method"] for row in result["rows"]]
    assert small == ["HMT, single pass", "HMT, single pass, no recurrence", "window", "RMT"]
    proof.main(arguments)
    rows = json.loads((tmp_path / "small" / "hmt_recall.json").read_text())["rows"]
    assert rows[:4] == result["rows"] and {row["method"] for row in rows} == set(proof.METHODS) and len(rows) == 8
    assert all(set(row["accuracy"]) == {"2", "16"} for row in rows)
    assert set(rows[0]["controls"]) == {*proof.CONTROLS, *proof.SMALL_MEMORY}
    assert all(row["first_steps"] == 2 for row in rows), "trained until one fact is solved, or for the budget"
    assert (rows[2]["steps"], rows[3]["steps"]) == (1, 2), "RMT trains until it solves two facts, or for its budget"
    output = capsys.readouterr().out
    assert (
        "| HMT, single pass: oracle recall |" in output and output.count("Share of right answers among 16 facts") == 2
    )
    assert (tmp_path / "x.png").exists()
    monkeypatch.setattr(proof, "measure", None)
    proof.main(arguments)
    assert json.loads((tmp_path / "small" / "hmt_recall.json").read_text())["rows"] == rows
    monkeypatch.setattr(proof, "Recipe", lambda: replace(recipe, texts=8))
    with pytest.raises(ValueError, match="another recipe"):
        proof.main(arguments)
