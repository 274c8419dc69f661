"""How far is measured where nobody says so."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_longctx.metrics.report.defaults import line_counts, longest_target, needle_lengths, record_tokens


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(__file__).resolve().parents[2] / "model_cards" / "fox-demo")


@pytest.mark.parametrize(
    "claimed, corpus_tokens, longest", [(2048, 1500, 500), (2048, 99_999, 1022), (2048, None, 1022), (None, 300, 100)]
)
def test_longest_target(claimed, corpus_tokens, longest):
    assert longest_target(claimed, corpus_tokens) == longest


def test_nothing_says_how_far_to_measure():
    with pytest.raises(ValueError, match="say how far"):
        longest_target(None, None)


def test_needle_lengths(tokenizer):
    assert needle_lengths(800, tokenizer, "easy") == [288, 384, 480, 576, 672, 768]
    assert needle_lengths(64, tokenizer, "easy") == [32]  # too short, which is an error of its own


def test_line_counts(tokenizer):
    assert line_counts(64, tokenizer) == [5]
    counts = line_counts(2000, tokenizer)
    assert counts == [5 * 2**i for i in range(len(counts))] and len(counts) > 1
    assert record_tokens(counts[-1], tokenizer) <= 2000 < record_tokens(2 * counts[-1], tokenizer)
