"""Documents become sequences in which they do not see each other."""

import random
from itertools import islice
from unittest import mock

import numpy as np
import pytest
import torch
from demo_model import DEMO, VOCABULARY
from transformers import AutoTokenizer

from hf_longctx import FoxConfig, FoxForCausalLM
from hf_longctx.training.data import (
    DocumentDataset,
    StreamedTokenDataset,
    TokenDataset,
    encode,
    flags_by_eos,
    interleave,
    make_sequence,
    pack,
)
from hf_longctx.training.prepare import mix


EOS = 2
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15]]
PACKED = np.array([token for document in DOCUMENTS for token in (1, *document, EOS)])


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def folder(tmp_path):
    for number, document in enumerate(["The first.", "The second is longer.", "A third one follows here. " * 20]):
        (tmp_path / f"{number}.txt").write_text(document)
    return str(tmp_path)


def test_positions_restart_and_no_label_crosses_a_boundary():
    ids = PACKED[1:13]
    row = make_sequence(ids, flags_by_eos(ids, EOS))
    assert row["input_ids"].tolist() == [5, 6, 7, 2, 1, 8, 2, 1, 9, 10, 11, 12]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]
    assert row["labels"].tolist() == [-100, 6, 7, 2, -100, 8, 2, -100, 9, 10, 11, 12]
    assert make_sequence(ids, flags_by_eos(ids, EOS), is_one_document=True)["position_ids"].tolist() == list(range(12))


@pytest.mark.parametrize("pro", [False, True], ids=["llama", "pro"])
def test_a_packed_document_has_the_logits_and_loss_that_it_has_alone(pro):
    torch.manual_seed(0)
    make = FoxConfig.pro if pro else FoxConfig
    fox = FoxForCausalLM(make(vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)).eval()
    row = {name: value[None] for name, value in make_sequence(PACKED, flags_by_eos(PACKED, EOS)).items()}
    with torch.no_grad():
        packed = fox(**row)
        losses, logits = [], []
        for document in DOCUMENTS:
            ids = torch.tensor([[1, *document, EOS]])
            alone = fox(ids, labels=ids)
            losses.append(alone.loss * (ids.shape[1] - 1))
            logits.append(alone.logits[0])
    torch.testing.assert_close(packed.logits[0], torch.cat(logits), atol=1e-5, rtol=1e-5)
    labels = (row["labels"] != -100).sum()
    torch.testing.assert_close(packed.loss * labels, sum(losses), atol=1e-4, rtol=1e-5)


def test_a_text_is_packed_whole_with_a_bos_and_an_eos_for_each_document(
    tokenizer, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("hf_longctx.training.data.SECONDS_BETWEEN_LINES", -1)
    pack(folder, tokenizer, tmp_path / "tokens.npy")
    size = np.load(tmp_path / "tokens.npy").size
    said = f"{folder}: 3 documents, {size} tokens\n"
    assert capsys.readouterr().err.endswith(f"packing {said}packed {said}")
    tokens = np.load(tmp_path / "tokens.npy")
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens[: len(tokens) // 2]).startswith("<s>The first.</s><s>The second is longer.</s><s>A")
    assert (tokens == tokenizer.eos_token_id).sum() == (tokens == tokenizer.bos_token_id).sum() == 3
    assert not list(tmp_path.glob("*.unfinished"))
    as_in_gpt2 = AutoTokenizer.from_pretrained(DEMO, bos_token="</s>")
    assert sum((ids == EOS).sum() for ids, _ in encode(folder, as_in_gpt2)) == 3, "a BOS would be a document"


@pytest.mark.parametrize("has_flags", [False, True])
def test_without_packing_a_sequence_is_a_chunk_of_one_document(has_flags, tmp_path):
    np.save(tmp_path / "tokens.npy", PACKED)
    if has_flags:  # where a document begins, and that all but its first token is scored
        first = np.append(True, PACKED[:-1] == EOS)
        np.save(tmp_path / "tokens.flags.npy", np.where(first, 2, 1).astype(np.uint8))
    rows = DocumentDataset(tmp_path / "tokens.npy", 5, EOS, 20)
    assert [row["input_ids"].tolist() for row in (rows[i] for i in range(len(rows)))] == [
        [1, 5, 6, 7, 2],
        [1, 8, 2, 0, 0],
        [1, 9, 10, 11, 12],
        [13, 14, 15, 2, 0],
    ]
    assert rows[1]["attention_mask"].tolist() == [1, 1, 1, 0, 0]
    assert rows[1]["labels"].tolist() == [-100, 8, 2, -100, -100]
    assert rows[3]["labels"].tolist() == [-100, 14, 15, 2, -100]


def test_a_file_of_tokens_appears_when_it_is_complete(tokenizer, folder, tmp_path):
    def documents():
        yield "The first."
        raise InterruptedError

    cut = mock.patch("hf_longctx.training.data.open_source", lambda *args, **options: (folder, documents()))
    with cut, pytest.raises(InterruptedError):
        pack(folder, tokenizer, tmp_path / "tokens.npy")
    assert not list(tmp_path.glob("tokens*"))


def test_a_stream_has_the_rows_of_the_file_and_begins_again(tokenizer, folder, tmp_path):
    pack(folder, tokenizer, tmp_path / "tokens.npy")
    rows = TokenDataset(tmp_path / "tokens.npy", 16, tokenizer.eos_token_id, VOCABULARY)
    stream = iter(StreamedTokenDataset([lambda: encode(folder, tokenizer)], [1], 16, tokenizer.eos_token_id))
    for row in (rows[i] for i in range(len(rows))):
        assert {name: value.tolist() for name, value in next(stream).items()} == {
            name: value.tolist() for name, value in row.items()
        }
    tail = rows.tokens[len(rows) * 16 :].tolist()
    assert next(stream)["input_ids"].tolist()[: len(tail) + 1] == [*tail, tokenizer.bos_token_id]


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
    assert list(mix(parts, [None] * len(parts))) == [row for part in parts for row in part]
    assert min(max(rows.count(row) for row in part) for part in parts) == 1, "of one source no row is read twice"


def test_a_stream_never_strays_from_its_shares_by_more_than_a_row():
    shares = [0.6, 0.3, 0.1]
    drawn = list(islice(interleave([iter(lambda n=n: n, None) for n in range(3)], shares), 1000))
    for count in (10, 77, 1000):
        for number, share in enumerate(shares):
            assert abs(drawn[:count].count(number) - share * count) <= 1
