"""The states of a FoX survive what caches do."""

import copy

import pytest
import torch
import transformers
from tiny_fox import (
    TINY,
    both_blocks,
    check_logits,
    logits,
    make,
    make_from,
    tokens,
    with_and_without_window,
)
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from hf_longctx.fox import FoxConfig, PrunedCache


IDS = tokens(2, 9)
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)


def rows(index):
    return lambda cache: cache.batch_select_indices(torch.tensor(index)), lambda ids: ids[index]


def back(tokens_back):
    return lambda cache: cache.crop(-tokens_back), lambda ids: ids[:, : ids.shape[1] - tokens_back]


# What is done to a cache, and what that does to the tokens in it.
OPERATIONS = {
    "permuted": rows([1, 0]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), lambda ids: ids.repeat_interleave(2, dim=0)),
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 0, 1])), lambda ids: ids[[1, 0, 1]]),
    "copied": (lambda cache: vars(cache).update(vars(copy.deepcopy(cache))), lambda ids: ids),
    "cropped by 1": back(1),
    "cropped by 31": back(31),
    "cropped to nothing": (lambda cache: cache.crop(-cache.get_seq_length()), lambda ids: ids[:, :0]),
}


@pytest.mark.parametrize(
    "operation, recorded", [*((x, False) for x in OPERATIONS), *((x, True) for x in OPERATIONS if "crop" in x)]
)
@with_and_without_window
def test_the_states_follow_the_keys(variant, operation, recorded):
    """Crop twice: the cache then continues like one that read the remaining tokens only, together or one by one."""
    if "window" in variant and (OLD if recorded else "crop" in operation):
        pytest.skip("transformers takes tokens back from a full sliding window if they are recorded, and from 5.23 on")
    model, (change, changed) = make(variant), OPERATIONS[operation]
    cache, new = DynamicCache(config=model.config), tokens(8, 32, seed=2)
    if recorded:
        cache.activate_past_recording()
    ids = tokens(2, 40)
    logits(model, ids, cache=cache)
    for pieces in [1, 1, 30], [32]:
        change(cache)
        ids = changed(ids)
        added = new[: len(ids)]
        got = torch.cat([logits(model, x, cache=cache) for x in added.split(pieces, dim=1)], dim=1)
        ids = torch.cat([ids, added], dim=1)
        check_logits(got, logits(model, ids, use_cache=False)[:, -32:])


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
    caches = [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=31)]
    if dtype != torch.float64:
        caches.append(PrunedCache(model, tolerance=1e-8, prune_every=8))
    for cache in caches:
        pieces = []
        for x in ids.split([6] + 25 * [1], dim=1):
            seen = cache.get_seq_length() + x.shape[1]
            pieces.append(logits(model, x, attention_mask=mask[:, :seen], cache=cache))
        got = torch.cat(pieces, dim=1)
        if dtype == torch.bfloat16:
            assert (got - want)[mask.bool()].norm() < 0.03 * want[mask.bool()].norm()
        else:
            check_logits(got[mask.bool()].float(), want[mask.bool()].float())


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
