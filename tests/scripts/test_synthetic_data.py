"""Interleaved and dilated documents, and PubMedQA."""

import json

import numpy as np
import pytest
from demo_model import DEMO, VOCABULARY
from transformers import AutoTokenizer

from hf_longctx.training.data import TokenDataset
from scripts import synthetic_data
from scripts.synthetic_data import arrange, interleave, open_pubmedqa, questions


AS_PUBLISHED = {
    str(n): {
        "QUESTION": f"Is it {n}?",
        "CONTEXTS": [f"Aim {n}.", f"Result {n}."],
        "LABELS": ["AIM", "RESULTS"],
        "LONG_ANSWER": f"It is {n}.",
        "final_decision": "yes" if n % 2 else "no",
    }
    for n in range(5)
}
TEXTS = [
    "Aim 0. Result 0. Aim 1. Result 1. Is it 0? It is 0.",
    "Aim 0. Result 0. Aim 1. Result 1. Is it 1? It is 1.",
    "Aim 2. Result 2. Aim 3. Result 3. Is it 2? It is 2.",
    "Aim 2. Result 2. Aim 3. Result 3. Is it 3? It is 3.",
]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "pubmedqa.json").write_text(json.dumps(AS_PUBLISHED))
    return str(tmp_path / "pubmedqa.json")


def test_documents_are_arranged_in_pairs_or_one_by_one():
    first, second = list(range(100, 110)), list(range(200, 204))
    assert interleave(first, second, 3) == [100, 101, 102, 200, 201, 202, 103, 104, 105, 203, *range(106, 110)]
    assert interleave([], first, 4) == interleave(first, [], 4) == first
    documents = [[1, 2, 3], [4, 5], [6]]
    assert arrange("interleave", 1, documents, 9) == [[1, 4, 2, 5, 3], [6]]
    assert arrange("dilate", 2, documents, 9) == [[1, 2, 9, 9, 3], [4, 5, 9, 9], [6]]
    assert arrange("pubmedqa-long", 2, documents, 9) == documents


def test_pubmedqa_asks_one_question_about_several_abstracts(source):
    assert list(questions(open_pubmedqa(source), "long", 2)) == TEXTS
    assert list(questions(open_pubmedqa(source), "short", 1))[3] == "Aim 3. Result 3. Is it 3? yes"
    with pytest.raises(ValueError, match="does not have a short answer to 'Is it 0"):
        list(questions(iter([{**AS_PUBLISHED["0"], "final_decision": None}]), "short", 1))


@pytest.mark.parametrize("kind, documents", [("interleave", 3), ("dilate", 5), ("pubmedqa-short", 4)])
def test_a_token_file_has_all_documents(kind, documents, source, tmp_path, monkeypatch):
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": "one two three " * n}) for n in range(1, 6)))
    if not kind.startswith("pubmedqa"):
        source = str(tmp_path / "text.jsonl")
    arguments = [kind, source, "--tokenizer", str(DEMO), "--output", str(tmp_path / "tokens.npy"), "--size", "2"]
    monkeypatch.setattr("sys.argv", ["synthetic_data", *arguments])
    synthetic_data.main()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    rows = TokenDataset(tmp_path / "tokens.npy", 16, tokenizer.eos_token_id, VOCABULARY)
    assert (rows.tokens == tokenizer.eos_token_id).sum() == (rows.tokens == tokenizer.bos_token_id).sum() == documents
    dollars = np.sum(rows.tokens == tokenizer.convert_tokens_to_ids("$"))
    assert (dollars > 0) == (kind == "dilate")
