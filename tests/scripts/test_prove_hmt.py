"""The recall task, its controls, and the experiment at toy size."""

import json
from argparse import Namespace

import pytest
import torch
from transformers.utils import logging

from hf_longctx.hmt import HMTConfig, HMTWrapper
from scripts import prove_hmt
from scripts.prove_hmt import ANSWER, ANSWER_AT, FIRST_KEY, READ, SIZES, WRITE, RecallTask, changed_recall


TASK = RecallTask(16)


def sample(writes=5, reads=3, rows=50):
    return TASK.sample(writes, reads, rows, torch.Generator().manual_seed(0))


def test_every_question_is_about_a_fact_of_its_sequence():
    ids, labels, question_facts = sample()
    ids, labels = ids.view(50, 8, 16), labels.view(50, 8, 16)
    facts, questions = ids[:, :5], ids[:, 5:]
    assert (facts[..., 0] == WRITE).all() and (questions[..., 0] == READ).all()
    keys, values = facts[..., 1], facts[..., 2]
    assert all(len(set(row.tolist())) == 5 for row in keys)
    assert (questions[..., ANSWER_AT - 1] == ANSWER).all()
    assert torch.equal(questions[..., 1], keys.gather(1, question_facts))
    assert torch.equal(questions[..., ANSWER_AT], values.gather(1, question_facts))
    assert ((keys >= FIRST_KEY) & (keys < FIRST_KEY + 16)).all()
    assert ((values >= FIRST_KEY + 16) & (values < FIRST_KEY + 32)).all() and ids.max() < TASK.vocab_size
    scored = torch.zeros_like(ids, dtype=torch.bool)
    scored[:, 5:, ANSWER_AT] = True
    assert torch.equal(labels, ids.masked_fill(~scored, -100))
    filler, key = facts[..., 3:], keys[..., None]
    assert 0.57 < (filler == key).float().mean() < 0.63
    assert (filler[filler != key.expand_as(filler)] >= FIRST_KEY + 32).all()


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2}
    llama = prove_hmt.new_model("full attention", TASK, Namespace(**SIZES | sizes))
    return HMTWrapper.from_backbone(llama, HMTConfig(segment_length=16, sensory_tokens=2)).eval()


@torch.no_grad()
def test_an_oracle_recalls_the_memory_of_the_fact(model):
    ids, _, facts = sample(5, 2, 4)
    recall = model.memory.recall
    with changed_recall(model, prove_hmt.oracle_recall, facts, 5):
        out = model(input_ids=ids, output_recall=True)
    weights = out.recall_scores[-2:]
    assert all(torch.equal(x.argmax(1), facts[:, i]) and (x.amax(1) == 1).all() for i, x in enumerate(weights))
    assert (out.recall_scores[3].amax(1) < 1).all(), "segments before the questions recall as usual"
    assert model.memory.recall == recall


def test_the_proof_at_toy_size(tmp_path, monkeypatch, capsys):
    level = logging.get_verbosity()
    monkeypatch.setattr(prove_hmt, "FACTS", (2, 16))
    sizes = "--hidden-size 16 --layers 1 --heads 2 --batch 2 --texts 4 --rounds 2 --stage-1-steps 1 --stage-2-steps 1"
    prove_hmt.main([*sizes.split(), "--seeds", "3", "--work", str(tmp_path), "--output", f"{tmp_path}/x.json"])
    rows = {row["method"]: row for row in json.loads((tmp_path / "x.json").read_text())["rows"]}
    assert rows.keys() == prove_hmt.METHODS.keys()
    assert all(set(row["accuracy"]) == {"2", "16"} for row in rows.values())
    assert set(rows["HMT, single pass"]["controls"]) == {*prove_hmt.CONTROLS, f"{prove_hmt.SMALL_MEMORY} memories"}
    assert all(row["first_steps"] == 2 for row in rows.values()), (
        "stage 1 ends when one fact is solved, or after its rounds"
    )
    assert (rows["window"]["steps"], rows["RMT"]["steps"]) == (1, 2), "RMT trains until it solves two facts"
    assert "| HMT, single pass: oracle recall |" in capsys.readouterr().out
    logging.set_verbosity(level)
