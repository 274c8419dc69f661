"""Rows of unequal length: each is read, scored, continued and generated from as if it stood alone."""

import pytest
import torch
from gradients import assert_same_gradients, gradients
from tiny_hmt import ROUNDING


LENGTHS = (43, 30, 3)
FP32 = 64 * torch.finfo(torch.float32).eps  # the loss is of float32
PAGED = {"memory_size": 1, "page_size": 1, "recalled_pages": 1}


def padded(tokens, left=True):
    """Three rows of `LENGTHS` tokens and their mask, (3, 43)."""
    ids, mask = torch.cat([tokens, tokens[:1].flip(1)]), torch.zeros(3, 43, dtype=torch.long)
    for row, n in zip(mask, LENGTHS):
        row[43 - n if left else 0 : 43 if left else n] = 1
    return ids, mask


def close(a, b):
    torch.testing.assert_close(a, b, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    "left, settings",
    [
        (False, {}),
        (True, {"recall": False}),
        (True, PAGED),
        (False, {"recall_tokens": 4}),
    ],
    ids=str,
)
def test_a_padded_row_is_as_alone(make_wrapper, tokens, settings, left):
    model, (ids, mask) = make_wrapper(**settings), padded(tokens, left)
    batch = model(ids, attention_mask=mask, use_cache=True, output_recall=True)
    assert not batch.logits[mask == 0].any()
    assert batch.state.lengths == LENGTHS
    for b, real in enumerate(mask.bool()):
        alone = model(ids[b : b + 1, real], use_cache=True, output_recall=True)
        close(batch.logits[b, real], alone.logits[0])
        n = len(alone.recall_distance)
        assert torch.equal(batch.recall_distance[:n, b], alone.recall_distance[:, 0])
        assert not batch.recall_distance[n:, b].any()
        for made, made_alone in zip(batch.memories, alone.memories):
            close(made[b], made_alone[0])
        state, state_alone = batch.state.select_rows(torch.tensor([b])), alone.state
        (bank, bank_alone) = (next(iter(x.memory.values()))["embeddings"] for x in (state, state_alone))
        memories = bank_alone.shape[1]
        close(bank[:, bank.shape[1] - memories :], bank_alone)
        assert int((next(iter(state.memory.values()))["ends"] > 0).sum()) == memories
        close(model(tokens[:1], state=state).logits, model(tokens[:1], state=state_alone).logits)


@pytest.mark.parametrize("settings, score_from", [({}, 4), ({"loss_scope": "last"}, None)], ids=str)
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


@pytest.mark.parametrize(
    "settings, beams",
    [({}, 1), ({"sum_fraction": 0.9}, 1), (PAGED, 1), (PAGED, 2)],
    ids=str,
)
def test_generation_of_unequal_prompts(make_wrapper, tokens, settings, beams):
    model, (ids, mask) = make_wrapper(**settings), padded(tokens)
    arguments = {"max_new_tokens": 9 // beams, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    batch = model.generate(ids, attention_mask=mask, **arguments)[:, 43:]
    for b, real in enumerate(mask.bool()):
        assert torch.equal(batch[b], model.generate(ids[b : b + 1, real], **arguments)[0, int(real.sum()) :])


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


@pytest.mark.parametrize(
    "settings, gradients",
    [({}, False), (PAGED, False), ({}, True)],
    ids=str,
)
def test_rows_that_get_unequal_numbers_of_tokens_in_every_call(make_wrapper, tokens, settings, gradients):
    model, generator = make_wrapper(**settings), torch.Generator().manual_seed(3)
    calls, logits, state = [], [[], []], None
    with torch.set_grad_enabled(gradients):
        for _ in range(9):
            counts = torch.randint(0, 8, (2,), generator=generator).tolist()
            counts[0] += not any(counts)
            calls.append((counts, torch.randint(3, 61, (2, 8), generator=generator)))
        for counts, ids in calls:
            mask = torch.arange(8) < torch.tensor(counts)[:, None]
            out = model(ids, attention_mask=mask, state=state, use_cache=True)
            state = out.state
            for row in range(2):
                logits[row].append(out.logits[row, : counts[row]])
        for row in range(2):
            text = torch.cat([ids[row, : counts[row]] for counts, ids in calls])[None]
            close(torch.cat(logits[row]), model(text).logits[0])


def test_truncation_of_unequal_rows(make_wrapper, tokens):
    """The gradient is cut at the borders of each row."""
    model, (ids, mask) = make_wrapper(bptt_segments=2), padded(tokens)
    start = model(ids[:, :5], use_cache=True).state
    model(ids, attention_mask=mask, labels=ids, state=start, num_items_in_batch=1).loss.backward()
    batch = gradients(model)
    model.zero_grad()
    for b, real in enumerate(mask.bool()):
        state, row = model(ids[b : b + 1, :5], use_cache=True).state, ids[b : b + 1, real]
        model(row, labels=row, state=state, num_items_in_batch=1).loss.backward()
    assert_same_gradients(batch, gradients(model), FP32)


def test_logits_of_the_last_positions_of_unequal_rows(make_wrapper, tokens):
    model, rows = make_wrapper(), []
    model.backbone.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[:2].numel()))
    for left in (True, False):
        ids, mask = padded(tokens, left)
        with torch.no_grad():
            whole = model(ids, attention_mask=mask).logits
            rows.clear()
            close(model(ids, attention_mask=mask, logits_to_keep=1).logits, whole[:, -1:])
            assert sum(rows) <= 3 * 3
            close(model(ids, attention_mask=mask, logits_to_keep=9).logits, whole[:, -9:])
            positions = torch.tensor([42, 3, 20])
            close(model(ids, attention_mask=mask, logits_to_keep=positions).logits, whole[:, positions])
