"""The states of a FoX survive what caches do."""

import pytest
import torch
import transformers
from tiny_fox import both_blocks, check_logits, every_variant, logits, make, tokens, with_and_without_window
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer


IDS = tokens(2, 9)


def filled(model, ids=IDS):
    """The cache of a model that has read `ids`."""
    cache = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=cache)
    return cache


@both_blocks
def test_a_cache_cropped_to_nothing_is_an_empty_one(variant):
    model = make(variant)
    cropped = DynamicCache(config=model.config)
    cropped.activate_past_recording()
    logits(model, IDS, past_key_values=cropped)
    cropped.crop(-IDS.shape[1])
    got = [logits(model, piece, past_key_values=cropped) for piece in IDS.split([4, 1, 4], dim=1)]
    check_logits(torch.cat(got, dim=1), logits(model, IDS))


@with_and_without_window
def test_a_turn_can_be_taken_back(variant):
    """A token shift needs the token before, which transformers' layers keep if they are told to in time."""
    if "window" in variant and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("before 5.23, transformers cannot take tokens back from a full sliding window, whatever the model")
    model, cache = make(variant), DynamicCache(config=make(variant).config)
    cache.activate_past_recording()
    settings = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    turn = model.generate(IDS, past_key_values=cache, **settings)
    cache.crop(-3)
    again = turn[:, : cache.get_seq_length() + 1]
    assert torch.equal(model.generate(again, past_key_values=cache, **settings | dict(max_new_tokens=3)), turn)


def test_a_token_shift_that_was_not_recorded_cannot_be_taken_back():
    with pytest.raises(RuntimeError, match="Call `activate_past_recording` before"):
        filled(make("pro")).crop(-3)


@with_and_without_window
def test_rows_of_a_cache_can_be_repeated_and_left_out(variant):
    model, rows = make(variant), torch.tensor([1, 0, 1])
    cache = filled(model)
    cache.reorder_cache(rows)
    got = logits(model, IDS[rows][:, :4], past_key_values=cache)
    check_logits(got, logits(model, torch.cat([IDS, IDS[:, :4]], dim=1)[rows])[:, 9:])


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_its_cache(variant, dtype):
    """Its keys are in half precision and the weights are not, which is no mistake."""
    model = make(variant)
    with torch.autocast("cpu", dtype=dtype):
        continued = filled(model)
        assert logits(model, IDS, past_key_values=continued).isfinite().all()


@with_and_without_window
def test_a_static_cache_can_be_reset(variant):
    model, ids = make(variant), tokens(2, 9)
    cache = StaticCache(config=model.config, max_cache_len=16)
    before = logits(model, ids, past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(logits(model, ids, past_key_values=cache), before)


def test_a_quantized_cache_is_refused():
    class Rounded(DynamicLayer):
        def _quantize(self, tensor):
            return tensor

    with pytest.raises(NotImplementedError, match="quantized cache"):
        make("llama")(tokens(), past_key_values=Cache(layers=[Rounded(), Rounded()]))
    for variant in ("llama", "pro"):
        with pytest.raises(NotImplementedError, match="quantized cache"):
            make(variant).generate(tokens(), max_new_tokens=2, cache_implementation="quantized")


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
        pieces.append(logits(model, chunk, past_key_values=cache))
        for layer in cache.layers:
            states = layer.conv_states[0] if hasattr(layer, "conv_states") else None
            stored[layer] = (layer.keys, states)
            layer.keys = torch.zeros_like(layer.keys)
            if states is not None:
                layer.conv_states[0] = torch.zeros_like(states)
    check_logits(torch.cat(pieces, dim=1), logits(model, ids, use_cache=False))
