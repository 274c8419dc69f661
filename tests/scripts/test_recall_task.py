"""Sequences of the recall task have the structure that its docstring describes."""

import pytest
import torch

from scripts.recall_task import ANSWER, FIRST_KEY, READ, WRITE, RecallTask


def sample(task, writes=5, reads=3, rows=50, seed=0):
    ids, labels, question_facts = task.sample(writes, reads, rows, torch.Generator().manual_seed(seed))
    shape = (rows, writes + task.noise_segments + reads, task.segment_length)
    return ids.view(shape), labels.view(shape), question_facts


@pytest.mark.parametrize("answer_at", [2, 3, 13, 15])
def test_every_question_is_about_a_fact_of_its_sequence(answer_at):
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


def test_the_filler_repeats_only_the_key_of_its_segment():
    ids, _, _ = sample(RecallTask(), rows=200)
    filler, key = ids[:, :5, 3:], ids[:, :5, 1, None]
    assert 0.57 < (filler == key).float().mean() < 0.63
    noise = filler[filler != key.expand_as(filler)]
    assert (noise >= FIRST_KEY + 32).all() and len(noise.unique()) == 28


def test_segments_of_noise_separate_facts_from_questions():
    ids, labels, _ = sample(RecallTask(noise_segments=2))
    assert (ids[:, 5:7] >= FIRST_KEY + 32).all() and (labels[:, :7] == -100).all()
    assert (ids[:, :5, 0] == WRITE).all() and (ids[:, 7:, 0] == READ).all()
    assert ((labels != -100).sum(-1)[:, 7:] == 1).all()
