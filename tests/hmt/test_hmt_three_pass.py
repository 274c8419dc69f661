"""The three-pass mode: its definition, and that no position sees a later token."""

import pytest
import torch
from causality import changed_by
from tiny_hmt import ROUNDING


def plain_causal(model, row):
    """The layout of `modeling_hmt`'s docstring for one row, (T,) -> (T, V): one segment and one call at a time."""
    c, memory, backbone = model.config, model.memory, model.backbone
    embed, j, bank, query, logits = backbone.get_input_embeddings(), c.summary_length, [], None, []

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
        opening = memory.initial if not bank else bank[-1] if query is None else recall(query)
        before, recalled = len(opening) + len(sensory), None
        if bank and (len(x) > j or len(x) == c.segment_length):
            query = call(memory.summary_token, x[:j], memory.summary_token)[1][-1:]
            recalled = recall(query)
        prompt = opening if recalled is None else recalled
        out, hidden = call(prompt, sensory, x, prompt)
        if recalled is not None:
            logits.append(call(opening, sensory, x[:j])[0][before:])
            logits.append(out[before + j : before + len(x)])
        else:
            logits.append(out[before : before + len(x)])
        bank.append(hidden[-1:])
    return torch.cat(logits)


@pytest.mark.parametrize(
    "settings", [{}, {"sum_fraction": 1.0}, {"sum_fraction": 0.2}, {"sensory_tokens": 0}, {"recall_dim": 5}], ids=str
)
def test_equals_its_definition(make_wrapper, tokens, settings):
    model = make_wrapper(recall_mode="three_pass", **settings)
    for length in (8, 21, 36, 43):
        logits = model(tokens[:, :length]).logits
        for row, expected in zip(logits, tokens[:, :length]):
            torch.testing.assert_close(row, plain_causal(model, expected), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"sum_fraction": 1.0}, {"recall": False}, {"memory_size": None}], ids=str)
def test_no_position_sees_a_later_token(make_wrapper, tokens, settings):
    early, here = changed_by(make_wrapper(recall_mode="three_pass", **settings), tokens[0, :29], range(29))
    assert max(early) <= ROUNDING
    assert min(here) > 1e-3  # and its own logits notice it


def test_paper_mode_sees_the_tokens_of_its_query(make_wrapper, tokens):
    model = make_wrapper(recall_mode="paper")
    early, _ = changed_by(model, tokens[0, :29], range(29))
    j, length = model.config.summary_length, model.config.segment_length
    assert max(early[:length]) <= ROUNDING  # nothing to recall from
    for t in range(2 * length, 29):  # segment 1 has one memory: its recall is that one whatever the query
        leaks = 0 < t % length < j
        assert (early[t] > 1e-6) == leaks, t


def test_from_token_j_on_it_is_the_papers(make_wrapper, tokens):
    causal, paper = (make_wrapper(recall_mode=mode) for mode in ("three_pass", "paper"))
    a, b = (model(tokens[:, :40], output_recall=True) for model in (causal, paper))
    late = torch.arange(40) % 8 >= 4
    torch.testing.assert_close(a.logits[:, late], b.logits[:, late], atol=ROUNDING, rtol=0)
    torch.testing.assert_close(a.memories, b.memories, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(a.recall_scores[1:], b.recall_scores[1:], atol=ROUNDING, rtol=0)
    assert (a.logits - b.logits)[:, 16:].abs().amax((0, 2))[~late[16:]].min() > 1e-4


def test_without_recall_both_modes_are_one(make_wrapper, tokens):
    a, b = (make_wrapper(recall=False, recall_mode=mode)(tokens).logits for mode in ("three_pass", "paper"))
    assert torch.equal(a, b)
