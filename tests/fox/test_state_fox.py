"""The states of a FoX survive what caches do; a cache that this model cannot have filled is refused."""

import copy

import pytest
import torch
from tiny_fox import TINY, both_blocks, check_logits, every_variant, logits, make, tokens, with_and_without_window
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from hf_longctx.fox import FoxConfig, FoxForCausalLM


IDS = tokens(2, 9)


def filled(model, ids=IDS):
    """The cache of a model that has read `ids`."""
    cache = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=cache)
    return cache


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()


def wider(model):
    """A FoX of the same kind with other heads."""
    return FoxForCausalLM(FoxConfig.from_dict({**model.config.to_dict(), "hidden_size": 64, "head_dim": 16})).eval()


def with_more_heads(model):
    changes = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "head_dim": 8}
    return FoxForCausalLM(FoxConfig.from_dict({**model.config.to_dict(), **changes})).eval()


def cache(make_cache):
    return lambda model: {"past_key_values": make_cache(model)}


BAD_CACHES = {
    "cache of a Llama": (cache(lambda model: filled(llama())), "filled by another model"),
    "cache of a Llama as wide as folded keys": (cache(lambda model: filled(llama(head_dim=12))), "carry no decay"),
    "cache of a deeper Llama": (
        cache(lambda model: filled(llama(num_hidden_layers=4))),
        "for 4 layers and the model has 2",
    ),
    "cache of a wider FoX": (cache(lambda model: filled(wider(model))), "filled by another model"),
    "cache of a FoX with more heads": (cache(lambda model: filled(with_more_heads(model))), "filled by another model"),
    "cache of another batch": (cache(lambda model: filled(model, IDS[:1])), "for another batch"),
    "cache in another dtype": (cache(lambda model: filled(copy.deepcopy(model).bfloat16())), "in another dtype"),
    "cache that is none": (cache(lambda model: ((torch.zeros(2, 4, 3, 8),) * 2,) * 2), "no transformers Cache"),
    "static cache too short": (
        cache(lambda model: StaticCache(config=model.config, max_cache_len=8)),
        "room for 8 tokens and 9 are needed",
    ),
}


@pytest.mark.parametrize("variant", ["llama", "pro"])
@pytest.mark.parametrize("arguments, message", BAD_CACHES.values(), ids=BAD_CACHES)
def test_bad_caches(variant, arguments, message):
    model = make(variant)
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": IDS, **arguments(model)})


def test_a_growing_cache_without_a_place_for_the_token_shift():
    with pytest.raises(ValueError, match=r"no place for the token shift; make it for this model"):
        make("pro")(IDS, past_key_values=DynamicCache())


def test_a_static_cache_that_is_full():
    model = make("llama")
    full = StaticCache(config=model.config, max_cache_len=9)
    logits(model, IDS, past_key_values=full)
    with pytest.raises(ValueError, match="room for 9 tokens and 10 are needed"):
        model(IDS[:, :1], past_key_values=full)


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


@pytest.mark.parametrize(
    "change", [("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([1]))], ids=str
)
def test_a_token_shift_of_other_rows_than_the_keys(change):
    model = make("pro")
    cache = filled(model)
    getattr(cache, change[0])(change[1])
    ids = IDS.repeat(2, 1) if change[0] == "batch_repeat_interleave" else IDS[1:]
    with pytest.raises(ValueError, match=r"token shift of 2 rows.*reorder_cache\(indices\)"):
        model(ids, past_key_values=cache)


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
