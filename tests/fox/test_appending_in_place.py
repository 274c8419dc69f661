"""Tensors that grow in place hold what concatenated ones hold, and a step that uses them is an ordinary step."""

import copy
import pickle

import pytest
import torch
from tiny_fox import TINY, check_logits, in_chunks, make, make_from, tokens
from torch.func import functional_call, jvp
from transformers import DynamicCache

from hf_longctx.fox import FoxConfig, state_fox
from hf_longctx.fox.state_fox import FREE_TOKENS, InPlaceBuffer


COPIES = {
    "shallow": lambda x, buffer: (x, copy.copy(buffer)),
    "deep": lambda x, buffer: copy.deepcopy((x, buffer)),
    "pickled": lambda x, buffer: pickle.loads(pickle.dumps((x, buffer))),
    "cropped": lambda x, buffer: (x[:, :-1], buffer),
    "the last rows": lambda x, buffer: (x[1:], buffer),
}


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
def test_appending_is_concatenation(copied):
    """A copy and the original are extended independently."""
    torch.manual_seed(0)
    pairs = [(torch.randn(3, 5, 4), InPlaceBuffer())]
    expected = [pairs[0][0].clone()]
    for step in range(FREE_TOKENS + 6):
        for i, (x, buffer) in enumerate(pairs):
            new = torch.randn(len(x), 1, 4)
            pairs[i] = buffer.append(x, new), buffer
            expected[i] = torch.cat([expected[i], new], 1)
        if step == 2:
            pairs.append(COPIES[copied](*pairs[0]))
            expected.append(COPIES[copied](expected[0], None)[0])
    for (x, _), want in zip(pairs, expected):
        assert torch.equal(x, want)


def test_a_buffer_of_inference_mode_is_left_behind():
    buffer, x = InPlaceBuffer(), torch.zeros(1, 1, 2)
    for i in range(1, 12):
        with torch.inference_mode() if i < 9 else torch.no_grad():
            x = buffer.append(x, torch.full((1, 1, 2), float(i)))
    assert x[0].tolist() == [[float(i)] * 2 for i in range(12)]


@pytest.mark.parametrize("seed, dtype", [(0, torch.bfloat16), (1, torch.float32)], ids=str)
def test_a_step_in_place_is_an_ordinary_step(seed, dtype, monkeypatch):
    """Compared bit for bit, for several rows, padded on the left."""
    model = make_from((FoxConfig, FoxConfig.pro)[seed % 2](**TINY), dtype=dtype, seed=seed)
    ids, mask = tokens(2, 9 + FREE_TOKENS + 4, seed), torch.ones(2, 9 + FREE_TOKENS + 4, dtype=torch.long)
    mask[-1, :3] = 0

    def decode():
        cache = DynamicCache(config=model.config)
        return in_chunks(model, ids, cache, [9] + [1] * (ids.shape[1] - 9), mask), cache

    got, cache = decode()
    assert all("buffers" in vars(layer) for layer in cache.layers)
    monkeypatch.setattr(state_fox, "DynamicCache", None)
    want, ordinary = decode()
    assert torch.equal(got, want)
    assert all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in zip(cache.layers, ordinary.layers)
    )


@torch.no_grad()
def test_a_step_that_is_differentiated_forward_is_not_in_place():
    model, ids = make("pro", "eager"), tokens(1, 12)
    names = ["lm_head.weight", "model.layers.0.self_attn.f_proj.weight"]
    weights = {name: model.get_parameter(name).detach() for name in names}

    def run(weights, pieces):
        cache = DynamicCache(config=model.config)
        parts = ids.split(pieces, dim=1)
        return torch.cat([functional_call(model, weights, x, dict(cache=cache)).logits for x in parts], dim=1)

    tangent = {name: torch.randn_like(x) for name, x in weights.items()}
    got, want = (jvp(lambda w: run(w, pieces), (weights,), (tangent,))[1] for pieces in ([10, 1, 1], [12]))  # noqa: B023
    check_logits(got, want)
