"""The single-pass mode: its definition, that no position sees a later token, and how it reads."""

import math

import pytest
import torch
from causality import changed_by
from gradients import assert_same_gradients, gradients
from streams import CHUNKS, stream
from tiny_hmt import ROUNDING

from hf_longctx.hmt import HMTMemory
from hf_longctx.hmt.memory_hmt import TEMPERATURE


def plain_single(model, row):
    """The table of `single_pass_hmt.py` for a row, (T,) -> (T, V): whole segments, no cache, a mask made in loops."""
    c, memory, backbone = model.config, model.memory, model.backbone
    embed, j, bank, logits = backbone.get_input_embeddings(), c.summary_length, [], []

    def call(*parts, mask=None):
        x = torch.cat(parts)[None]
        out = backbone(inputs_embeds=x, attention_mask=mask, output_hidden_states=True, use_cache=False)
        return out.logits[0], out.hidden_states[-1][0]

    def recall(q):
        if not c.recall:
            return bank[-1]
        remembered = torch.cat(bank[-c.memory_size :])
        mean = remembered.mean(0)
        q, keys = (  # at length one
            (x - mean) / ((x - mean).square().sum(1) + 1e-4 * x.square().sum(1)).sqrt()[:, None]
            for x in (q, remembered)
        )
        scores = math.log(1 + len(keys)) * (q @ memory.wq.T) @ (keys @ memory.wk.T).T / memory.log_temperature.exp()
        return scores.softmax(-1) @ remembered

    def visible(i, key, prompt):
        """Whether position i sees position `key`, where the prompt stands at `prompt`."""
        if i < prompt or key > i:
            return key <= i
        if i == prompt:
            return key == prompt
        return key not in (0, prompt - 1)  # the constant prompt, and what closes the first part

    for start in range(0, len(row), c.segment_length):
        x = embed(row[start : start + c.segment_length])
        front = torch.cat([memory.initial, embed(row[max(0, start - c.sensory_tokens) : start]), x[:j]])
        out, hidden = call(front, memory.summary_token)
        logits.append(out[len(front) - len(x[:j]) : len(front)])
        if len(x) <= j:
            continue
        prompt = recall(hidden[-1:]) if bank else memory.initial
        parts = (front, memory.summary_token, prompt, x[j:], memory.summary_token)
        size, place = sum(map(len, parts)), len(front) + 1
        mask = torch.zeros(1, 1, size, size).double()
        for i in range(size):
            for key in range(size):
                if not visible(i, key, place):
                    mask[0, 0, i, key] = torch.finfo(torch.float64).min
        out, hidden = call(*parts, mask=mask)
        logits.append(out[place + 1 : -1])
        bank.append(hidden[-1:])
    return torch.cat(logits)


SETTINGS = [
    {},
    {"sum_fraction": 0.9},
    {"sum_fraction": 0.2},
    {"sensory_tokens": 0},
    {"recall_dim": 5},
    {"recall": False},
]


@pytest.fixture
def make_single(make_wrapper):
    def make(**settings):
        return make_wrapper(recall_mode="single_pass", **settings)

    return make


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_its_definition(make_single, tokens, settings):
    model = make_single(**settings)
    assert model.lm.takes_masks(15)
    for length in (4, 21, 43):
        logits = model(tokens[:, :length]).logits
        for row, expected in zip(logits, tokens[:, :length]):
            torch.testing.assert_close(row, plain_single(model, expected), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_position_sees_a_later_token(make_single, tokens, settings):
    early, here = changed_by(make_single(**settings), tokens[0, :29], range(29))
    assert max(early) <= ROUNDING
    assert min(here) > 1e-3


@pytest.mark.parametrize(
    "settings, gradients",
    [({}, False), ({}, True), ({"sum_fraction": 0.9}, False), ({"recall": False}, False)],
    ids=str,
)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_any_chunking_is_one_piece(make_single, tokens, chunks, gradients, settings):
    model = make_single(**settings)
    mask = torch.ones_like(tokens)
    mask[1, :13] = 0
    for attention_mask in (mask, None):
        with torch.set_grad_enabled(gradients):
            whole = model(tokens, attention_mask=attention_mask, use_cache=True)
            logits, state = stream(model, tokens, chunks, attention_mask)
        torch.testing.assert_close(logits, whole.logits, atol=ROUNDING, rtol=0)
        tensors = whole.state.tensors()
        tensors.pop("prompt", None)  # of a row without an open recall it may be anything
        for name, value in tensors.items():
            torch.testing.assert_close(getattr(state, name), value, atol=ROUNDING, rtol=0)


def test_each_position_is_read_once(make_single, tokens):
    model, shapes = make_single(summary_batch=7), []  # two rows of three segments fit
    assert model.lm.takes_masks(15)  # probes, which are not counted
    model.backbone.model.register_forward_hook(lambda module, args, out: shapes.append(tuple(out[0].shape[:2])))
    with torch.no_grad():
        model(tokens[:, :40])
        # the first parts of segment 0, and of 1 and 2; second parts; the first parts of 3 and 4; second parts
        assert shapes == [(2, 6), (4, 9), (2, 6), (2, 6), (2, 6), (4, 9), (2, 6), (2, 6)]
        shapes.clear()
        stream(model, tokens, [1] * 43)
    assert {length for _, length in shapes} == {1, 2, 5}  # a segment begins with its prompt and 3 sensory tokens


@pytest.mark.parametrize("recurrence", [True, False])
def test_checkpointing_gives_the_same_gradients(make_single, tokens, recurrence):
    model, results = make_single(recurrence=recurrence).train(), []
    for checkpointing in (False, True):
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        results.append(gradients(model))
    assert_same_gradients(*results)
    assert model.memory.wq.grad.any()


def test_recall_is_free_of_scale():
    """What all memories have in common, and their size, do not matter, and the start is not saturated."""
    torch.manual_seed(0)
    memory = HMTMemory(64, 1, 64, single_pass=True).double()
    torch.nn.init.eye_(memory.wq)
    torch.nn.init.eye_(memory.wk)
    torch.nn.init.constant_(memory.log_temperature, math.log(TEMPERATURE))
    bank, valid = torch.randn(1, 12, 64).double(), torch.ones(1, 12, dtype=torch.bool)
    query = bank[:, 3:4] + 2 * torch.randn(1, 1, 64)
    weights = memory.recall(query, bank, valid)[1]
    assert 0.1 < weights[0, 3] < 0.95 and weights.argmax() == 3
    torch.testing.assert_close(memory.recall(20 * query, 20 * bank, valid)[1], weights, atol=1e-6, rtol=0)
    # 1e-4 of the squared length stays, and with it 0.3 % of the cosines
    torch.testing.assert_close(memory.recall(query + 3, bank + 3, valid)[1], weights, atol=0, rtol=0.05)


def test_a_model_from_the_meta_device_has_to_decide_on_its_mask(make_wrapper, tokens):
    """Left open, a model that can follow the mask would be read without it."""
    model = make_wrapper()
    expected = model(tokens).logits
    model.config.recall_mask = None  # as `HMTWrapper` leaves it on the meta device
    with pytest.raises(ValueError, match=r"decide_recall_mask\(\)"):
        model(tokens)
    model.decide_recall_mask()
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=0)
