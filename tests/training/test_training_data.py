"""Documents become sequences in which they do not see each other."""

import json
import random

import numpy as np
import pytest
from demo_model import DEMO
from transformers import AutoTokenizer

from hf_longctx.training import FinetuneConfig
from hf_longctx.training.data import TokenDataset, encode, load_datasets, make_sequence, mark_documents, mix, pack


EOS = 2
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15]]
PACKED = np.array([token for document in DOCUMENTS for token in (1, *document, EOS)])


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def folder(tmp_path):
    for number, document in enumerate(["The first.", "The second is longer.", "A third one follows here. " * 20]):
        (tmp_path / f"{number}.txt").write_text(document)
    return str(tmp_path)


def test_positions_restart_and_no_label_crosses_a_boundary():
    ids = PACKED[1:13]
    row = make_sequence(mark_documents(ids, EOS))
    assert row["input_ids"].tolist() == [5, 6, 7, 2, 1, 8, 2, 1, 9, 10, 11, 12]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]
    assert row["labels"].tolist() == [-100, 6, 7, 2, -100, 8, 2, -100, 9, 10, 11, 12]
    assert make_sequence(mark_documents(ids, EOS), is_one_document=True)["position_ids"].tolist() == list(range(12))


def test_a_text_is_packed_whole_with_a_bos_and_an_eos_for_each_document(tokenizer, folder, tmp_path):
    pack(folder, tokenizer, tmp_path / "tokens.npy")
    tokens = np.load(tmp_path / "tokens.npy")["id"]
    assert tokenizer.decode(tokens[: len(tokens) // 2]).startswith("<s>The first.</s><s>The second is longer.</s><s>A")
    assert (tokens == tokenizer.eos_token_id).sum() == (tokens == tokenizer.bos_token_id).sum() == 3
    as_in_gpt2 = AutoTokenizer.from_pretrained(DEMO, bos_token="</s>")
    assert sum((tokens["id"] == EOS).sum() for tokens in encode(folder, as_in_gpt2)) == 3, "a BOS would be a document"


@pytest.mark.parametrize("is_marked", [False, True])
def test_without_packing_a_sequence_is_a_chunk_of_one_document(is_marked, tmp_path):
    np.save(tmp_path / "tokens.npy", mark_documents(PACKED, EOS) if is_marked else PACKED)
    rows = TokenDataset(tmp_path / "tokens.npy", 5, EOS, 20, packing=False)
    assert [row["input_ids"].tolist() for row in (rows[i] for i in range(len(rows)))] == [
        [1, 5, 6, 7, 2],
        [1, 8, 2, 0, 0],
        [1, 9, 10, 11, 12],
        [13, 14, 15, 2, 0],
    ]
    assert rows[1]["attention_mask"].tolist() == [1, 1, 1, 0, 0]
    assert rows[1]["labels"].tolist() == [-100, 8, 2, -100, -100]
    assert rows[3]["labels"].tolist() == [-100, 14, 15, 2, -100]


def test_a_file_of_tokens_appears_when_it_is_complete(tokenizer, tmp_path, monkeypatch):
    documents = (text if text else 1 / 0 for text in ("The first.", ""))
    monkeypatch.setattr("hf_longctx.training.data.open_source", lambda *args, **options: ("", documents))
    with pytest.raises(ZeroDivisionError):
        pack("text", tokenizer, tmp_path / "tokens.npy")
    assert not (tmp_path / "tokens.npy").exists()


@pytest.mark.parametrize("shape", [(64,), (4, 16)])
def test_a_file_of_tokens_of_any_integers_is_read(shape, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(64, dtype=np.int32).reshape(shape))
    rows = TokenDataset(tmp_path / "tokens.npy", 20, None, 64)
    assert len(rows) == 3
    assert rows[2]["input_ids"].tolist() == list(range(40, 60))


@pytest.mark.parametrize("seed", range(5))
def test_a_mixture_has_all_rows_of_all_sources_in_their_shares(seed):
    rng = random.Random(seed)
    parts = [[(part, row) for row in range(rng.randint(1, 60))] for part in range(rng.randint(2, 4))]
    shares = [rng.randint(1, 9) for _ in parts]
    shares = [share / sum(shares) for share in shares]
    rows = list(mix(parts, shares))
    for number, (part, share) in enumerate(zip(parts, shares)):
        own = [row for row in rows if row[0] == number]
        times = [own.count(row) for row in part]
        assert min(times) >= 1 and max(times) - min(times) <= 1
        assert abs(len(own) - share * len(rows)) <= len(parts)
    assert min(max(rows.count(row) for row in part) for part in parts) == 1, "of one source no row is read twice"


def test_the_hash_of_the_data_depends_on_the_chat_template_and_on_shares_and_order(tokenizer, tmp_path):
    def load(data):
        run = FinetuneConfig(data=data, model="-", output_dir=str(tmp_path / "run"), max_length=32)
        return load_datasets(run, tokenizer, False)[2]

    for name in "ab":
        turns = [{"role": "user", "content": name}, {"role": "assistant", "content": "The fox. " * 30}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": turns}))
    a, b = (tmp_path / f"{name}.jsonl" for name in "ab")
    hashes = [load(data) for data in (f"{a}=1,{b}=3", f"{a}=3,{b}=1", f"{b}=3,{a}=1", f"{a},{b}", str(a))]
    tokenizer.chat_template = "<user>" + tokenizer.chat_template
    assert len({*hashes, load(str(a))}) == 6
