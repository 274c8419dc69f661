"""Readers: any object with the protocol's members can be measured; what is asked of one before it runs."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
from tiny_models import copied_ids, tiny_gpt2, tiny_llama

from hf_longctx.metrics import LocalReader, forgetting_curve, line_retrieval, position_loss, reader_for
from hf_longctx.metrics.run.reader import check_positions, special_ids


class RuleReader:
    """Reads by a rule, and is neither a module nor a server: after `k` equal ids comes what came after them before."""

    vocab_size, position_limit, claimed_context = 300, None, None
    can_reply, is_distributed, device = False, False, None

    def settings(self):
        return {"model": "rule"}

    def identity(self):
        return {"rule": "copies"}

    def configured_id(self, name):
        return 1

    def cost(self, tokens):
        return tokens

    def reading(self, trial, tokens_per_pass):
        return nullcontext()

    def predict(self, inputs, prefix, positions):
        guesses = [copied_ids(row.tolist(), 3, 10**9) for row in inputs]
        return np.array([[guess[p] for p in positions] for guess in guesses])

    def score(self, ids, targets, positions):
        best = self.predict(ids[None], 0, positions)[0]
        return np.where(best == targets, np.log(0.9), np.log(0.1 / 299)), best


def test_any_reader_is_measured():
    text = np.random.default_rng(1).integers(3, 300, size=300)
    curve = forgetting_curve(RuleReader(), text, lengths=[8, 40], repeats=2)
    assert (curve.points[1].copy_mean, curve.points[1].lm_mean, curve.settings["model"]) == (1, 0, "rule")
    assert position_loss(RuleReader(), np.tile(text[:20], 4), context_length=60).loss[-1] == pytest.approx(
        -np.log(0.9)
    )
    with pytest.raises(ValueError, match="rule has no generate"):
        line_retrieval(RuleReader(), None, lines=[2])


def test_a_reader_stays_and_a_module_gets_one():
    reader, model = RuleReader(), tiny_llama()
    assert reader_for(reader) is reader
    assert isinstance(reader_for(model), LocalReader) and reader_for(model).model is model
    assert reader_for(model).claimed_context == 512 and reader_for(model).position_limit is None
    assert reader_for(tiny_gpt2()).position_limit == 24


def test_special_ids_outside_the_vocabulary_are_refused():
    reader = RuleReader()
    assert special_ids(reader, None, 7) == (1, 7)
    with pytest.raises(ValueError, match=r"bos_token_id is 300.*300 ids"):
        special_ids(reader, 300, None)
    reader.vocab_size = math.inf
    assert special_ids(reader, 300, None) == (300, 1)
    reader.configured_id = lambda name: None
    with pytest.raises(ValueError, match=r"neither a BOS nor an EOS token.*bos_token_id=\.\.\."):
        special_ids(reader, None, None)


def test_an_input_fits_into_the_positions_or_the_claim():
    reader = reader_for(tiny_gpt2(n_positions=24))
    check_positions(reader, 24, "it")
    with pytest.raises(ValueError, match=r"it needs 25 positions.*ends at 24.*below 24 tokens"):
        check_positions(reader, 25, "it")
    with pytest.raises(ValueError, match=r"30 positions, 6 of them for a reply.*generate=False"):
        check_positions(reader, 24, "it", reply=6)
    with pytest.warns(UserWarning, match=r"it needs 513 positions, more than the 512"):
        check_positions(reader_for(tiny_llama()), 513, "it")
