"""How far retrieval is measured by default."""

import pytest
from demo_model import DEMO
from transformers import AutoTokenizer

from hf_longctx.metrics.report.defaults import line_counts, needle_lengths, record_tokens
from hf_longctx.metrics.retrieval.wording import wording


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def test_needle_lengths(tokenizer):
    assert needle_lengths(800, tokenizer, wording("easy")) == [192, 288, 384, 480, 576, 672, 768]
    assert needle_lengths(64, tokenizer, wording("easy")) == [32]  # too short, which is an error of its own


def test_line_counts(tokenizer):
    assert line_counts(64, tokenizer) == [5]
    counts = line_counts(2000, tokenizer)
    assert counts == [5 * 2**i for i in range(len(counts))] and len(counts) > 1
    assert record_tokens(counts[-1], tokenizer) <= 2000 < record_tokens(2 * counts[-1], tokenizer)
