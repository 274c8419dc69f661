"""Rows of unequal length: each is reported and scored as if it stood alone. `test_hmt_state.py` has their logits."""

import pytest
import torch
from gradients import assert_same_gradients, gradients
from streams import LENGTHS, assert_close, padded


FP32 = 64 * torch.finfo(torch.float32).eps  # the loss is of float32


@pytest.mark.parametrize("left, settings", [(False, {}), (True, {"recall": False})], ids=str)
def test_a_padded_row_is_as_alone(make_wrapper, tokens, settings, left):
    model, (ids, mask) = make_wrapper(**settings), padded(tokens, left)
    batch = model(ids, attention_mask=mask, output_recall=True)
    for b, real in enumerate(mask.bool()):
        alone = model(ids[b : b + 1, real], output_recall=True)
        assert_close(batch.logits[b, real], alone.logits[0])
        n = len(alone.recall_distance)
        assert torch.equal(batch.recall_distance[:n, b], alone.recall_distance[:, 0])
        assert not batch.recall_distance[n:, b].any()
        for made, made_alone in zip(batch.memories, alone.memories):
            assert_close(made[b], made_alone[0])


@pytest.mark.parametrize(
    "settings, score_from",
    [({}, 4), ({"loss_scope": "last"}, None), ({"bptt_segments": 2}, None)],
    ids=str,
)
def test_the_loss_of_a_padded_batch_is_that_of_its_rows(make_wrapper, tokens, settings, score_from):
    """Whatever the labels of padding are."""
    model, (ids, mask) = make_wrapper(**settings), padded(tokens)
    out = model(ids, attention_mask=mask, labels=ids, score_from=score_from, num_items_in_batch=100)
    out.loss.backward()
    batch_gradients, counts, losses = gradients(model), [], []
    model.zero_grad()
    for b, real in enumerate(mask.bool()):
        row = ids[b : b + 1, real]
        scored = torch.arange(row.shape[1] - 1) % 8 >= (score_from or 0)
        counts.append(int(scored[-8:].sum() if model.config.loss_scope == "last" else scored.sum()))
        losses.append(model(row, labels=row, score_from=score_from).loss * counts[-1])
    labelled = sum(LENGTHS) - len(LENGTHS)
    expected = sum(losses) / sum(counts) * labelled / 100
    expected.backward()
    torch.testing.assert_close(out.loss, expected, atol=0, rtol=FP32)
    assert_same_gradients(batch_gradients, gradients(model), FP32)


def test_decoding_unequal_rows_continues_a_cache(make_wrapper, tokens):
    """A step reads one new token, unless a row recalled or closed its segment in this step or the one before."""
    model, (ids, mask), positions = make_wrapper(), padded(tokens), []
    with torch.no_grad():
        state = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1).state  # 3, 6 and 3 open tokens
        model.backbone.model.register_forward_hook(lambda module, args, out: positions.append(out[0].shape[1]))
        for column in range(8):
            state = model(tokens[[0, 1, 0], column, None], state=state, logits_to_keep=1).state
            positions.append(None)
    steps = [[]]
    for number in positions:
        steps[-1].append(number) if number else steps.append([])
    # no cache; closes and recalls; no cache; one token; closes; no cache; a recall; one token
    assert [n for n, step in enumerate(steps) if step == [1]] == [3, 6, 7]


@torch.no_grad()
def test_beams_of_one_row_can_have_a_padded_cache(make_wrapper, tokens):
    model, mask = make_wrapper(), torch.ones(2, 7, dtype=torch.long)
    mask[1, :4] = 0
    state = model(tokens[:, :7], attention_mask=mask, use_cache=True).state
    state.reorder_cache(torch.tensor([1, 1]))
    assert state.kv_mask is not None
    more = model(tokens[:, 7:20], state=state).logits
    for found, rest in zip(more, tokens[:, 7:20]):
        assert_close(found, model(torch.cat([tokens[1, 4:7], rest])[None]).logits[0, 3:])


def test_logits_of_the_last_positions_of_unequal_rows(make_wrapper, tokens):
    model, rows, (ids, left), (_, right) = make_wrapper(), [], padded(tokens), padded(tokens, False)
    with torch.no_grad():
        model(tokens)  # the first call probes the head
        model.backbone.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[:2].numel()))
        for mask, computed in ((torch.ones_like(ids), 3), (left, 9), (right, 9)):
            whole = model(ids, attention_mask=mask).logits
            rows.clear()
            assert_close(model(ids, attention_mask=mask, logits_to_keep=1).logits, whole[:, -1:])
            assert sum(rows) <= computed
            for kept in (9, torch.tensor([42, 3, 20])):
                expected = whole[:, -9:] if isinstance(kept, int) else whole[:, kept]
                assert_close(model(ids, attention_mask=mask, logits_to_keep=kept).logits, expected)
