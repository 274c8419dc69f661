"""The published algorithm: its definition, and which tokens it reads before it predicts them."""

import pytest
import torch
from causality import changed_by
from tiny_hmt import ROUNDING


def plain_paper(model, row):
    """The layout of `paper_hmt`'s docstring for one row, (T,) -> (T, V): one segment and one call at a time."""
    c, memory, backbone = model.config, model.memory, model.backbone
    embed, j, bank, logits = backbone.get_input_embeddings(), c.summary_length, [], []

    def call(*parts):
        out = backbone(inputs_embeds=torch.cat(parts)[None], output_hidden_states=True, use_cache=False)
        return out.logits[0], out.hidden_states[-1][0]

    def recall(q):
        remembered = torch.cat(bank[-c.memory_size :])
        scores = (q @ memory.wq.T) @ (remembered @ memory.wk.T).T / len(memory.wq) ** 0.5
        return scores.softmax(-1) @ remembered

    for start in range(0, len(row), c.segment_length):
        x = embed(row[start : start + c.segment_length])
        sensory = embed(row[max(0, start - c.sensory_tokens) : start])
        prompt = bank[-1] if bank else memory.initial
        if bank and c.recall:
            prompt = recall(call(memory.summary_token, x[:j], memory.summary_token)[1][-1:])
        out, hidden = call(prompt, sensory, x, prompt)
        before = len(prompt) + len(sensory)
        logits.append(out[before : before + len(x)])
        bank.append(hidden[-len(prompt) :])
    return torch.cat(logits)


SETTINGS = [
    {},
    {"sum_fraction": 1.0},
    {"sum_fraction": 0.2},
    {"sensory_tokens": 0},
    {"recall_dim": 5},
    {"recall": False},
    {"recall": False, "memory_tokens": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_its_definition(make_wrapper, tokens, settings):
    model = make_wrapper(recall_mode="paper", **settings)
    for length in (8, 21, 36, 43):
        logits = model(tokens[:, :length]).logits
        for row, expected in zip(logits, tokens[:, :length]):
            torch.testing.assert_close(row, plain_paper(model, row=expected), atol=ROUNDING, rtol=0)


def test_it_sees_the_tokens_of_its_query(make_wrapper, tokens):
    model = make_wrapper(recall_mode="paper")
    early, _ = changed_by(model, tokens[0, :29], range(29))
    j, length = model.config.summary_length, model.config.segment_length
    assert max(early[:length]) <= ROUNDING  # nothing to recall from
    for t in range(2 * length, 29):  # segment 1 has one memory: its recall is that one whatever the query
        leaks = 0 < t % length < j
        assert (early[t] > 1e-6) == leaks, t


def test_without_recall_no_position_sees_a_later_token(make_wrapper, tokens):
    early, here = changed_by(make_wrapper(recall_mode="paper", recall=False), tokens[0, :29], range(29))
    assert max(early) <= ROUNDING
    assert min(here) > 1e-3
