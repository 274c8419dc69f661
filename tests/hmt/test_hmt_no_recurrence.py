"""Memories without recurrence: two calls whatever the length."""

import pytest
import torch
from causality import changed_by
from streams import CHUNKS, stream
from tiny_hmt import ROUNDING


SETTINGS = [{}, {"sum_fraction": 0.9}, {"sensory_tokens": 0}, {"recall": False}, {"recall_tokens": 4}]


@pytest.fixture
def make_parallel(make_wrapper):
    def make(**settings):
        return make_wrapper(recall_mode="single_pass", recurrence=False, **settings)

    return make


def close(a, b):
    torch.testing.assert_close(a, b, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_memory_is_that_of_its_segment_without_recall(make_parallel, tokens, settings):
    """And the logits are those of a recurrent model with the same memories."""
    model = make_parallel(**settings)
    out, memory = model(tokens[:, :40], output_recall=True), model.memory
    embed, j, k = model.get_input_embeddings(), model.config.summary_length, model.config.sensory_tokens
    for n, made in enumerate(out.memories):
        x, front = embed(tokens[:, 8 * n : 8 * n + 8]), embed(tokens[:, max(0, 8 * n - k) : 8 * n])
        summary = memory.summary_token.expand(2, 1, -1)
        whole = torch.cat([front, x[:, :j], summary[:, : n > 0], x[:, j:], summary], 1)
        positions = (1 + settings.get("recall_tokens", 0)) * (n > 0) + torch.arange(whole.shape[1])[None]
        hidden = model.backbone.model(inputs_embeds=whole, position_ids=positions).last_hidden_state
        close(made, hidden[:, -1:])
    recurrent = make_parallel(**settings)
    recurrent.config.recurrence = True
    with torch.no_grad():
        state = model(tokens[:, :32], use_cache=True).state
        state.signature = recurrent.config.signature(recurrent.lm.width)
        close(recurrent(tokens[:, 32:40], state=state).logits, out.logits[:, 32:])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_position_sees_a_later_token(make_parallel, tokens, settings):
    early, here = changed_by(make_parallel(**settings), tokens[0, :29], range(29))
    assert max(early) <= ROUNDING
    assert min(here) > 1e-3


@pytest.mark.parametrize("chunks", ["ragged", "one by one"])
def test_any_chunking_is_one_piece(make_parallel, tokens, chunks):
    model, mask = make_parallel(), torch.ones_like(tokens)
    mask[1, :13] = 0
    for attention_mask in (mask, None):
        with torch.no_grad():
            whole = model(tokens, attention_mask=attention_mask, use_cache=True)
            logits, state = stream(model, tokens, CHUNKS[chunks], attention_mask)
        close(logits, whole.logits)
        tensors = whole.state.tensors()
        tensors.pop("prompt", None)  # of a row without an open recall it may be anything
        for name, value in tensors.items():
            close(state.tensors()[name], value)


@pytest.mark.parametrize("segments", [4, 5])
def test_two_calls_whatever_the_length(make_parallel, tokens, segments):
    model, shapes = make_parallel(summary_batch=100), []
    model.backbone.model.register_forward_hook(lambda module, args, out: shapes.append(tuple(out[0].shape[:2])))
    with torch.no_grad():
        state = model(tokens[:, :8], use_cache=True).state  # the first segment has no sensory tokens
        shapes.clear()
        model(tokens[:, 8 : 8 * segments], state=state)
        assert shapes == [(2 * (segments - 1), width) for width in (13, 5)]
        shapes.clear()
        model(tokens[:, 8 : 8 * segments], state=state, logits_to_keep=1)
        assert shapes == [(2 * (segments - 1), 13), (2, 5)]
