"""Journals: resuming at every byte, other runs' journals, damaged files."""

import json
import os

import pytest
from demo_model import DEMO
from tiny_models import CORPUS, tiny_llama
from transformers import AutoTokenizer

from hf_longctx.metrics import Run, position_loss
from hf_longctx.metrics.run.journal import Journal, OtherRun


SETTINGS = {"model": "tiny", "seed": 3, "lengths": (8, 16)}
PARTS = {8: {"copy": [4, 4]}, "needle": 0.5, ("depth", 0.25, 1, None): None, 16: "naïve"}


def run(path, parts=PARTS):
    """Do what is not done, in order; returns what had to be done."""
    measured = []
    with Journal(path, SETTINGS) as journal:
        for key, result in parts.items():
            if key not in journal.done:
                journal.append(key, result)
                measured.append(key)
        assert journal.done == PARTS
    return measured


def test_a_run_killed_anywhere_ends_with_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # it is slow, and has no effect that this test could see
    run(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 1 + len(PARTS)
    for killed_at in range(len(whole) + 1):
        path = tmp_path / "killed"
        path.write_bytes(whole[:killed_at])
        kept = max(sum(end <= killed_at for end in ends) - 1, 0)
        assert run(path) == list(PARTS)[kept:]
        assert path.read_bytes() == whole


def test_each_part_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "folder" / "journal"
    with Journal(path, SETTINGS) as journal:
        for count, (key, result) in enumerate(PARTS.items(), start=2):
            journal.append(key, result)
            lines = path.read_text().splitlines()
            assert len(lines) == count
            assert json.loads(lines[-1])["result"] == result


def test_journal_of_another_run(tmp_path):
    path = tmp_path / "journal"
    run(path)
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"another run: model is 'tiny' there and 'large' here; seed is 3 there and 4 "
    ):
        Journal(path, SETTINGS | {"model": "large", "seed": 4})
    with pytest.raises(ValueError, match=r"corpus is 'nothing' there and 'abc' here. To resume it"):
        Journal(path, SETTINGS | {"corpus": "abc"})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content, message",
    [
        ("a precious text", "is not a journal"),
        ("a precious text\n", "is not a journal, or is damaged"),
        ('{"format": 1}\n', "is not a journal, or is damaged .*settings"),
        ('{"format": 2, "settings": {}}\n', "must have format 1, got 2"),
        ('{"format": 1, "settings": {}}\n{"key": 1, "re\n{"key": 2, "result": 3}\n', "is damaged"),
    ],
)
def test_other_files_are_left_alone(tmp_path, content, message):
    path = tmp_path / "journal"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Journal(path, {})
    assert path.read_text() == content


def test_bad_entries_change_nothing(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, {}) as journal:
        journal.append(["a", 1], 0)
        before = path.read_bytes()
        with pytest.raises(ValueError, match="JSON"):
            journal.append("new", float("nan"))
        assert (path.read_bytes(), journal.done) == (before, {("a", 1): 0})


def test_names_in_the_settings_do_not_change_the_journal(tmp_path):
    """A run resumes if the corpus has a different name, because its hash identifies it."""
    model, run = tiny_llama(), Run(journal=tmp_path / "journal")
    first = position_loss(model, CORPUS, context_length=9, run=run, corpus_name="a")
    again = position_loss(model, CORPUS, context_length=9, run=run, corpus_name="b", train_length=64)
    assert first.loss == again.loss
    assert (first.settings["corpus"], again.settings["corpus"], again.settings["train_length"]) == ("a", "b", 64)


def test_a_tokenizer_of_the_same_name_is_another_run(tmp_path):
    """`--output_dir run1/model` and `run2/model`: the folders' last names are equal."""
    path, model = tmp_path / "journal", tiny_llama()
    first, second = (AutoTokenizer.from_pretrained(DEMO) for _ in range(2))
    second.add_tokens(["foxes"])
    options = dict(context_length=4, sequences=2, run=Run(path))
    result = position_loss(model, CORPUS, tokenizer=first, **options)
    assert position_loss(model, CORPUS, tokenizer=first, **options).scores == result.scores
    with pytest.raises(OtherRun, match="tokenizer_sha256 is"):
        position_loss(model, CORPUS, tokenizer=second, **options)
