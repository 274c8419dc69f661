"""Sequences with repeated passages contain and score what they should."""

import numpy as np
import pytest

from hf_longctx.training.data import TokenDataset
from scripts.copy_data import CopyDataset, write


class CountingTokenizer:
    """A tokenizer whose corpus counts upwards from 3, so that running text can be recognized."""

    bos_token_id = 1

    def __len__(self):
        return 600


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "tokens.npy"
    np.save(path, np.arange(3, 503, dtype=np.uint16))
    return lambda length=125: TokenDataset(path, length, None, 600)


def repeats(rows, seed=0):
    data = CopyDataset(rows, 1.0, CountingTokenizer(), seed)
    return [{name: values.tolist() for name, values in data[i].items()} for i in range(len(data))]


def many(text, seeds=50):
    return [row for seed in range(seeds) for row in repeats(text(), seed)]


def test_what_is_scored_can_be_predicted(text):
    """A token is scored if it continues running text, or repeats what the sequence has shown."""
    scored_repeats = unscored = 0
    for row in many(text):
        ids, labels = row["input_ids"], row["labels"]
        assert len(ids) == len(labels) == 125 and row["position_ids"] == list(range(125))
        assert all(label in (-100, token) for token, label in zip(ids, labels))
        unscored += labels.count(-100)
        for t in range(2, len(ids)):
            running = ids[t] == ids[t - 1] + 1
            if labels[t] != -100 and not running and 1 not in ids[t - 1 : t + 1]:
                assert ids[t] in ids[:t]
                scored_repeats += 1
    assert scored_repeats > 1000 and unscored > 1000


def test_rows_are_read_from_a_file_as_they_were_made(text, tmp_path):
    rows = CopyDataset(text(), 0.5, CountingTokenizer(), 0)
    write(rows, tmp_path / "copies.npy")
    again = TokenDataset(tmp_path / "copies.npy", 125, 2, 600)
    assert len(again) == len(rows)
    for i in range(len(rows)):
        assert {n: x.tolist() for n, x in again[i].items()} == {n: x.tolist() for n, x in rows[i].items()}
