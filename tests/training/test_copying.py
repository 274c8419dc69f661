"""The demo's training: what its rows are made of, and that an interrupted run goes on."""

import itertools
import json

import pytest


pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'hf-longctx[training]'")

from hf_longctx.corpus import stdlib_text
from hf_longctx.training.copying import RepeatedPassages, train_demo_model, train_tokenizer


def rows(seed=0, context=128):
    return RepeatedPassages(list(range(3, 503)), context, vocab_size=600, rows=200, bos_token_id=1, seed=seed)


def test_rows_depend_on_seed_and_index_alone():
    assert rows()[7] == rows()[7] != rows(seed=1)[7]
    assert rows()[7] != rows()[8]


def test_what_is_scored_can_be_predicted():
    """Whatever is neither running text nor a repetition of what the row has shown is not scored."""
    scored_repeats = unscored = 0
    for row in (rows()[i] for i in range(200)):
        ids, labels = row["input_ids"], row["labels"]
        assert len(ids) == len(labels) == 128
        assert all(label in (-100, token) for token, label in zip(ids, labels))
        unscored += labels.count(-100)
        for t in range(2, len(ids)):
            running = ids[t] == ids[t - 1] + 1  # in this corpus text counts upwards
            if labels[t] != -100 and not running and ids[t] != 1 and ids[t - 1] != 1:
                assert ids[t] in ids[:t]
                scored_repeats += 1
    assert scored_repeats > 1000 and unscored > 1000


def test_passages_have_every_length():
    lengths = set()
    for row in (rows(seed)[i] for i in range(200) for seed in range(4)):
        borders = [i for i, token in enumerate(row["input_ids"]) if token == 1]
        lengths |= {b - a - 1 for a, b in itertools.pairwise(borders)}
    assert set(range(8, 60)) <= lengths


def test_a_text_shorter_than_a_row_is_refused():
    with pytest.raises(ValueError, match=r"100 tokens; rows of 128.*lower context"):
        RepeatedPassages([5] * 100, 128, 600, 10, 1, 0)


def test_the_tokenizer_loses_nothing():
    tokenizer = train_tokenizer("The fox forgets. " * 20, 300)
    for text in ("The fox forgets.", "naïve 狐 🦊\n\t"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.bos_token_id not in ids
        assert tokenizer(text)["input_ids"] == [tokenizer.bos_token_id, *ids]


def test_an_interrupted_training_goes_on(tmp_path):
    text = stdlib_text("held_out")[:20000]
    train_demo_model(text, tmp_path, steps=2, context=64)
    model = train_demo_model(text, tmp_path, steps=4, context=64)
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4]
    assert not model.training
    with pytest.raises(ValueError, match="another text and seed"):
        train_demo_model(text + "!", tmp_path, steps=4, context=64, seed=1)
