"""Readers: an object of any subclass can be measured."""

import numpy as np
import pytest
from tiny_models import copied_ids

from hf_longctx.metrics import forgetting_curve, line_retrieval, position_loss
from hf_longctx.metrics.run.reader import Reader


class RuleReader(Reader):
    """Reads by a rule, and is neither a module nor a server: after `k` equal ids comes what came after them before."""

    vocab_size, can_reply = 300, False

    def settings(self):
        return {"model": "rule"}

    def configured_id(self, name):
        return 1

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
    with pytest.raises(ValueError, match="rule does not have a generate"):
        line_retrieval(RuleReader(), None, lines=[2])
