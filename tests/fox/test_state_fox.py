"""The states of a FoX survive what caches do."""

import copy
import pickle
import random

import pytest
import torch
import transformers
from tiny_fox import TINY, VARIANTS, both_blocks, check_logits, in_chunks, logits, make, make_from, tokens
from torch.func import functional_call, jvp
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from hf_longctx.fox import FoxConfig, PrunedCache, state_fox
from hf_longctx.fox.state_fox import FREE_TOKENS, InPlaceBuffer


OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
LENGTH, SLOTS = 90, 76


def caches_for(model):
    """Return a dynamic cache, a static one, and both kinds of a pruned cache, which drops tokens under QK-norm."""
    caches = [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH)]
    if model.dtype != torch.float64 and model.config.forget_gate != "none" and model.config.sliding_window is None:
        bound, slots = ("weights", SLOTS) if model.config.qk_norm else ("observed", LENGTH)
        caches += [PrunedCache(model, 1e-6, bound, prune_every=8, max_cache_len=n) for n in (None, slots)]
    return caches


GROUPED = "pro with grouped heads and rope"
READ = [(variant, "sdpa", torch.float32) for variant in VARIANTS]
READ += [(variant, "eager", torch.float32) for variant in ("llama", GROUPED, "pro with a window")]
READ += [(GROUPED, "sdpa", dtype) for dtype in (torch.bfloat16, torch.float64)]


@pytest.mark.parametrize("variant, backend, dtype", READ, ids=str)
def test_any_cache_and_any_chunks_equal_one_forward(variant, backend, dtype):
    """One row has no padding, one has padding on the left, and one has padding between tokens."""
    draw, config = random.Random(f"{variant} {backend}"), VARIANTS[variant]()
    config.head_dim = draw.choice([8, 12])
    model, chunks = make_from(config, dtype), []
    model.set_attn_implementation(backend)
    ids = tokens(3, LENGTH)
    while rest := LENGTH - sum(chunks):
        chunks.append(min(rest, draw.choice([1, 3, 9, 17])))
    padded = torch.ones_like(ids)
    padded[1, : draw.randrange(1, 20)] = 0
    padded[2, (start := draw.randrange(60)) : start + draw.randrange(1, 5)] = 0
    for mask in (None, padded):
        want = logits(model, ids, attention_mask=mask, use_cache=False)
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        for cache in caches_for(model):
            got = in_chunks(model, ids, cache, chunks, mask)
            if dtype == torch.bfloat16:
                assert (got - want)[real].norm() < 0.03 * want[real].norm()
            else:
                check_logits(got[real].float(), want[real].float())
            assert not (isinstance(cache, PrunedCache) and model.config.qk_norm) or cache.dropped.any()


def rows(index):
    return lambda cache: cache.batch_select_indices(torch.tensor(index)), lambda ids: ids[index]


def back(tokens_back):
    return lambda cache: cache.crop(-tokens_back), lambda ids: ids[:, : ids.shape[1] - tokens_back]


# Operations on a cache, and their effect on the tokens in it.
OPERATIONS = {
    "permuted": rows([1, 0]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), lambda ids: ids.repeat_interleave(2, dim=0)),
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 0, 1])), lambda ids: ids[[1, 0, 1]]),
    "copied": (lambda cache: vars(cache).update(vars(copy.deepcopy(cache))), lambda ids: ids),
    "cropped by 1": back(1),
    "cropped by 31": back(31),
    "cropped to nothing": (lambda cache: cache.crop(-cache.get_seq_length()), lambda ids: ids[:, :0]),
}


FOLLOWED = [(v, "growing", x) for v in ("llama", GROUPED, "window", "pro with a window") for x in OPERATIONS]
FOLLOWED += [(v, "recorded", x) for v, cache, x in FOLLOWED if "crop" in x]
FOLLOWED += [(GROUPED, cache, x) for cache in ("pruned", "static pruned") for x in OPERATIONS if "crop" not in x]


@pytest.mark.parametrize("variant, kind, operation", FOLLOWED)
def test_the_states_follow_the_keys(variant, kind, operation):
    """Change twice: the cache then continues like one that read these rows only, together or one by one."""
    if "window" in variant and (OLD if kind == "recorded" else "crop" in operation):
        pytest.skip("transformers takes tokens back from a full sliding window if they are recorded, and from 5.23 on")
    model, (change, changed) = make(variant), OPERATIONS[operation]
    growing, _, *pruned = caches_for(model)
    cache, new = {"pruned": pruned[:1], "static pruned": pruned[1:]}.get(kind, [growing])[0], tokens(8, 32, seed=2)
    if kind == "recorded":
        cache.activate_past_recording()
    ids = tokens(2, 40)
    in_chunks(model, ids, cache, 20)
    for chunks in [1, 1, 30], 32:
        change(cache)
        ids = changed(ids)
        added = new[: len(ids)]
        got = in_chunks(model, added, cache, chunks)
        ids = torch.cat([ids, added], dim=1)
        check_logits(got, logits(model, ids, use_cache=False)[:, -32:])
    assert "pruned" not in kind or cache.dropped.any()


def test_a_quantized_cache_is_refused():
    class Rounded(DynamicLayer):
        def _quantize(self, tensor):
            return tensor

    with pytest.raises(NotImplementedError, match="quantized cache"):
        make("llama")(tokens(), cache=Cache(layers=[Rounded(), Rounded()]))


@both_blocks
def test_what_is_offloaded_is_waited_for(variant, monkeypatch):
    """A stream that copies as late as it may: a layer's keys and shift arrive when they are waited for, not before."""
    model, ids = make(variant), tokens()
    cache, stored = DynamicCache(config=model.config), {}

    class Stream:
        def wait_stream(self, other):
            for layer, (keys, states) in stored.items():
                layer.keys = keys
                if states is not None:
                    layer.conv_states[0] = states
            stored.clear()

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, True, Stream()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: cache.prefetch_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cache.prefetch_stream)
    pieces = []
    for chunk in ids.split(6, dim=1):
        pieces.append(logits(model, chunk, cache=cache))
        for layer in cache.layers:
            states = layer.conv_states[0] if hasattr(layer, "conv_states") else None
            stored[layer] = (layer.keys, states)
            layer.keys = torch.zeros_like(layer.keys)
            if states is not None:
                layer.conv_states[0] = torch.zeros_like(states)
    check_logits(torch.cat(pieces, dim=1), logits(model, ids, use_cache=False))


# --- tensors that grow in place hold what concatenated ones hold ---

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
