"""scripts.evidence.hmt_beyond and its documents, with a tiny model."""

import json

import numpy as np
import pytest
from demo_model import DEMO
from transformers import AutoTokenizer


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.mark.parametrize("task", ["lines", "needle"])
def test_a_document_states_the_answer_to_each_question(load, tokenizer, task):
    module = load("long_documents")
    text, questions = module.document(task, 1500, 4, tokenizer, seed=0)
    assert 1400 < len(tokenizer(text)["input_ids"]) < 1600
    assert len({question.answer for question in questions}) == 4
    for question in questions:
        assert module.states_answer(question, text) and question.is_answered_by(f"{question.answer} And so on.")
        assert not any(question.is_answered_by(other.answer) for other in questions if other is not question)
    assert (text, questions) != module.document(task, 1500, 4, tokenizer, seed=1)


def test_training_sequences_score_the_answers_about_one_passage(load, tokenizer):
    module = load("long_documents")
    novel = np.array(tokenizer("The ship sailed on. " * 400)["input_ids"])
    for row in module.training_sequences(tokenizer, novel, 4):
        ids, scored = row["id"], row["scored"]
        assert len(ids) == 2 * module.SEGMENT and not scored[: module.SEGMENT + module.QUERY].any()
        (first, *_) = np.flatnonzero(scored)
        assert first == module.SEGMENT + module.QUERY  # the first question ends the first part
        answer = tokenizer.decode(ids[first : first + 5])
        assert answer in tokenizer.decode(ids[: module.SEGMENT])


def test_every_method_answers_the_same_questions(load, smollm2, tmp_path, capsys, monkeypatch):
    module = load("hmt_beyond")
    (tmp_path / "model").rename(tmp_path / "smollm2-135m")
    monkeypatch.setattr(module, "MODELS", tmp_path)
    work, options = tmp_path / "work", "--models smollm2-135m --contexts 700 3000 --questions 2"
    arguments = [*options.split(), "--work", str(work), "--output", str(tmp_path / "x.json")]
    module.load_hmt("smollm2-135m", None).save_pretrained(work / "trained" / "model")
    module.main(arguments)
    printed, rows = capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())["rows"]
    cells = {(row["task"], row["tokens"], row["method"]): row for row in rows}
    assert len(cells) == len(rows) == 2 * 2 * len(module.METHODS) and "compared with search" in printed
    assert all(row["questions"] == 2 for row in rows)
    for task in module.TASKS:
        assert cells[task, 700, "full"]["found"] == 1 and cells[task, 3000, "truncated"]["found"] == 0
        assert cells[task, 3000, "full"]["found"] == 0.5  # the first fact is beyond the claimed 2,048 tokens
        assert cells[task, 700, "hmt"]["kept_mb"] < cells[task, 700, "full"]["kept_mb"]
    monkeypatch.setattr(module, "measure_one", None)  # so that measuring again fails
    module.main(arguments)
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == rows


@pytest.mark.parametrize("task", ["lines", "needle"])
@pytest.mark.parametrize("kind, tokens", [("search", 290), ("search 3 chunks", 288)])
def test_search_finds_the_chunks_with_the_words_of_the_question(load, tokenizer, kind, tokens, task):
    module, documents = load("hmt_beyond"), load("long_documents")
    text, questions = documents.document(task, 4000, 4, tokenizer, seed=0)
    search = module.READERS[kind](None, tokenizer, text)
    last = module.Window(None, tokenizer, text)
    windows, truncated = ([reader.window(question) for question in questions] for reader in (search, last))
    assert max(map(len, windows)) == tokens
    found, at_the_end = (
        sum(map(documents.states_answer, questions, map(tokenizer.decode, shown))) for shown in (windows, truncated)
    )
    assert found >= 2 > at_the_end  # chunks may cut a fact
