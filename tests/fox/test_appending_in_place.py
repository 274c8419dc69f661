"""Tensors that grow in place hold what concatenated ones hold, and a step that uses them is an ordinary step."""

import copy
import io
import pickle

import pytest
import torch
from tiny_fox import TINY, check_logits, logits, make, make_from, tokens
from torch.func import functional_call, jvp
from transformers import DynamicCache, StaticCache

from hf_longctx.fox import FoxConfig, PrunedCache, inputs_fox
from hf_longctx.fox.state_fox import FREE, Growing


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "shallow": lambda x, growing: (x, copy.copy(growing)),
    "deep": lambda x, growing: copy.deepcopy((x, growing)),
    "pickled": lambda x, growing: pickle.loads(pickle.dumps((x, growing))),
    "saved": lambda x, growing: saved((x, growing)),
    "cut": lambda x, growing: (x[:, :-1], growing),
    "the last rows": lambda x, growing: (x[1:], growing),
}


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("dim", [-2, -1])
def test_growing_is_concatenation(dim, copied):
    """Of a token whose last two numbers are those of the token before. A copy and the original go their ways."""
    torch.manual_seed(0)
    pairs = [(torch.randn(3, 5, 5), Growing())]
    expected = [pairs[0][0].clone()]
    for step in range(FREE + 6):
        for i, (x, growing) in enumerate(pairs):
            token = expected[i].narrow(dim, -1, 1).clone()
            new = token.narrow(-3 - dim, 0, 3).normal_()
            pairs[i] = growing.append(x, new, dim=dim), growing
            expected[i] = torch.cat([expected[i], token], dim)
        if step == 2:
            pairs.append(COPIES[copied](*pairs[0]))
            expected.append(COPIES[copied](expected[0], None)[0])
    for (x, _), want in zip(pairs, expected):
        assert torch.equal(x, want)


def test_growing_keeps_the_last_tokens_and_leaves_inference_mode():
    growing, x = Growing(), torch.zeros(1, 2, 1)
    for i in range(1, 3 * FREE):
        with torch.inference_mode() if i < 9 else torch.no_grad():
            x = growing.append(x, torch.full((1, 2, 1), float(i)), dim=-1, most=4)
    assert x[0].tolist() == 2 * [[float(i) for i in range(3 * FREE - 4, 3 * FREE)]]


def decode(model, ids, cache, first=9):
    """The logits of ids, read token by token behind the first ones."""
    return torch.cat([logits(model, x, cache=cache) for x in ids.split([first] + [1] * (ids.shape[1] - first), 1)], 1)


@pytest.mark.parametrize(
    "variant",
    [
        "pro with grouped heads and rope",
        "one gate per key head",
        "pro with a window",
        "fixed",
        "no gate",
        "only v shift, shared norm, biases",
    ],
)
def test_a_step_in_place_is_an_ordinary_step(variant, monkeypatch):
    model, ids = make(variant), tokens(2, 9 + FREE + 4)
    cache = DynamicCache(config=model.config)
    got = decode(model, ids, cache)
    grows = ["keys", "values"] * (variant != "no gate" and "window" not in variant) + ["state"] * (
        "shift" in variant or "pro" in variant
    )
    assert sorted(getattr(cache.layers[1], "growing", ())) == sorted(grows)
    monkeypatch.setattr(inputs_fox, "appends_in_place", lambda *_: False)
    ordinary = decode(model, ids, DynamicCache(config=model.config))
    exact = logits(model.double(), ids)
    (error, budget), size = ((x - exact).abs().max().item() for x in (got, ordinary)), exact.abs().max().item()
    assert error <= 1.5 * budget + 1e-6 * size, (
        f"{error / size:.1e}, where an ordinary step is {budget / size:.1e} off"
    )


@pytest.mark.parametrize(
    "seed, dtype",
    [*((seed, torch.float32) for seed in range(4)), (4, torch.bfloat16), (5, torch.bfloat16), (6, torch.float64)],
    ids=str,
)
def test_random_models_decode_as_they_read(seed, dtype):
    """Of any number of rows and heads, padded on the left, from every kind of cache."""
    draw = torch.Generator().manual_seed(seed)
    pick = lambda *of: of[int(torch.randint(len(of), (), generator=draw))]  # noqa: E731
    heads = dict(num_key_value_heads=pick(1, 2, 4), head_dim=pick(8, 12), forget_gate_per_kv_head=pick(True, False))
    model = make_from(pick(FoxConfig, FoxConfig.pro)(**TINY | heads), dtype=dtype, seed=seed)
    ids = tokens(pick(1, 3), 31, seed)
    mask = torch.ones_like(ids)
    mask[-1, : pick(0, 1, 5)] = 0
    want = logits(model, ids, attention_mask=mask)
    dynamic, static = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=31)
    pruned = [] if dtype == torch.float64 else [PrunedCache(model, tolerance=1e-8, prune_every=8)]
    for cache in dynamic, static, *pruned:
        pieces = []
        for x in ids.split([6] + 25 * [1], dim=1):
            seen = cache.get_seq_length() + x.shape[1]
            pieces.append(logits(model, x, attention_mask=mask[:, :seen], cache=cache))
        got = torch.cat(pieces, dim=1)
        if dtype == torch.bfloat16:
            assert (got - want)[mask.bool()].norm() < 0.03 * want[mask.bool()].norm()
        else:
            check_logits(got[mask.bool()].float(), want[mask.bool()].float())
    assert hasattr(dynamic.layers[0], "growing")


def test_caches_that_share_layers_go_their_ways():
    """A shallow copy of a cache, from which both are continued, as branches of a search are."""
    model, ids = make("pro"), tokens(1, 40)
    cache = DynamicCache(config=model.config)
    decode(model, ids[:, :20], cache)
    branch = copy.copy(cache)
    branch.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in branch.layers:
        layer.conv_states = dict(layer.conv_states)
    other = tokens(1, 40, seed=7)
    for t in range(20, 40):
        one = logits(model, ids[:, t : t + 1], cache=cache)
        two = logits(model, other[:, t : t + 1], cache=branch)
    check_logits(one, logits(model, ids)[:, -1:])
    check_logits(two, logits(model, torch.cat([ids[:, :20], other[:, 20:]], 1))[:, -1:])


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
