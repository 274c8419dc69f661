"""Interleaved and dilated texts, and PubMedQA."""

import json

import numpy as np
import pytest
from demo_model import DEMO, VOCABULARY
from mistakes import refused
from transformers import AutoTokenizer

from hf_longctx.training.data import TokenDataset, pack
from scripts import synthetic_data
from scripts.synthetic_data import Construction, interleave, open_pubmedqa, questions


ROWS = [
    {
        "pubid": n,
        "question": f"Is it {n}?",
        "context": {"contexts": [f"Aim {n}.", f"Result {n}."], "labels": ["AIM", "RESULTS"], "meshes": ["Humans"]},
        "long_answer": f"It is {n}.",
        "final_decision": "yes" if n % 2 else "no",
    }
    for n in range(5)
]
AS_PUBLISHED = {
    str(row["pubid"]): {
        "QUESTION": row["question"],
        "CONTEXTS": row["context"]["contexts"],
        "LABELS": row["context"]["labels"],
        "MESHES": row["context"]["meshes"],
        "LONG_ANSWER": row["long_answer"],
        "final_decision": row["final_decision"],
    }
    for row in ROWS
}
TEXTS = [
    "Aim 0. Result 0. Aim 1. Result 1. Is it 0? It is 0.",
    "Aim 0. Result 0. Aim 1. Result 1. Is it 1? It is 1.",
    "Aim 2. Result 2. Aim 3. Result 3. Is it 2? It is 2.",
    "Aim 2. Result 2. Aim 3. Result 3. Is it 3? It is 3.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def test_interleaved():
    first, second = list(range(100, 110)), list(range(200, 204))
    assert interleave(first, second, 3) == [100, 101, 102, 200, 201, 202, 103, 104, 105, 203, *range(106, 110)]
    assert interleave(second, first, 256) == second + first
    assert interleave([], first, 4) == interleave(first, [], 4) == first


def test_documents_are_arranged_in_pairs_or_one_by_one(tokenizer):
    documents = [[1, 2, 3], [4, 5], [6]]
    assert Construction("interleave", 1).arrange(documents, tokenizer) == [[1, 4, 2, 5, 3], [6]]
    dollar = tokenizer.convert_tokens_to_ids("$")
    assert Construction("dilate", 2).arrange(documents, tokenizer) == [
        [1, 2, dollar, dollar, 3],
        [4, 5, dollar, dollar],
        [6],
    ]
    assert Construction("pubmedqa-long", 2).arrange(documents, tokenizer) == documents


def write(folder, kind):
    path = folder / f"pubmedqa{kind}"
    if kind == ".parquet":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    elif kind == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        path.write_text(json.dumps(AS_PUBLISHED))
    return str(path)


@pytest.mark.parametrize("kind", [".json", ".jsonl", ".parquet"])
def test_pubmedqa_asks_one_question_about_several_abstracts(kind, tmp_path):
    assert list(Construction("pubmedqa-long", 2).read(write(tmp_path, kind))) == TEXTS


def test_short_answers_are_decisions_and_the_answer_stands_apart(tmp_path):
    rows = open_pubmedqa(write(tmp_path, ".json"))
    prompts, answers = zip(*questions(rows, "short", 1))
    assert answers == ("no", "yes", "no", "yes", "no")
    assert prompts[3] == "Aim 3. Result 3. Is it 3?"


@pytest.mark.parametrize("kind", ["interleave", "dilate", "pubmedqa-short"])
def test_a_token_file_has_all_documents(kind, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": "one two three " * n}) for n in range(1, 6)))
    source = write(tmp_path, ".json") if kind.startswith("pubmedqa") else str(tmp_path / "text.jsonl")
    arguments = [kind, source, "--tokenizer", str(DEMO), "--output", str(tmp_path / "tokens.npy"), "--size", "2"]
    monkeypatch.setattr("sys.argv", ["synthetic_data", *arguments])
    synthetic_data.main()
    rows = TokenDataset(tmp_path / "tokens.npy", 16, tokenizer.eos_token_id, VOCABULARY)
    assert (rows.tokens == tokenizer.eos_token_id).sum() == {"interleave": 3, "dilate": 5, "pubmedqa-short": 4}[kind]
    if kind == "dilate":
        ids = np.array([id_ for id_ in rows.tokens if id_ != tokenizer.convert_tokens_to_ids("$")])
        pack(source, tokenizer, tmp_path / "plain.npy")
        assert (ids == np.load(tmp_path / "plain.npy")).all()


def ask(row, answers="long"):
    return lambda kit: list(questions(iter([row]), answers, 1))


MISTAKES = [
    refused("another table", ask({"text": "something"}), "contexts, long_answer and final_decision .* has text"),
    refused("a text for a row", ask("something"), "this one has str"),
    refused("no decision", ask({**ROWS[0], "final_decision": None}, "short"), "no short answer to 'Is it 0"),
    refused("no JSON", lambda kit: open_pubmedqa(kit("a.json")), "a.json is not JSON"),
    refused(
        "no such dataset", lambda kit: open_pubmedqa("no/such"), "neither a .json, .jsonl or .parquet nor a dataset"
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes(mistake, tmp_path, record_property):
    (tmp_path / "a.json").write_text("{")
    record_property("mistake", mistake.check(lambda name: str(tmp_path / name)))
