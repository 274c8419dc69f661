"""What does not fit together is refused with one error that says what to do; what only looks odd is not."""

import copy

import pytest
import torch
from tiny_fox import TINY, both_blocks, every_variant, logits, make, tokens
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

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


BAD_CALLS = {
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
    "mask too short": (lambda model: {"attention_mask": torch.ones(2, 7)}, r"it must be \(2, 9\)"),
    "mask too long": (lambda model: {"attention_mask": torch.ones(2, 12)}, r"it must be \(2, 9\)"),
    "mask of one row": (lambda model: {"attention_mask": torch.ones(1, 9)}, r"it must be \(2, 9\)"),
    "mask of the new tokens only": (
        lambda model: {"attention_mask": torch.ones(2, 9), "past_key_values": filled(model)},
        r"it must be \(2, 18\): a column for each of 9 cached and 9 new tokens",
    ),
    "positions that fall": (
        lambda model: {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 1, 2]])},
        "go from 2 to 1 at token 7 of row 0",
    ),
    "positions of other tokens": (
        lambda model: {"position_ids": torch.arange(7)[None]},
        r"must be \(2, 9\) or \(1, 9\)",
    ),
    "no tokens": (lambda model: {"input_ids": IDS[:, :0]}, "the input is empty: 2 rows of 0 tokens"),
    "no rows": (lambda model: {"input_ids": IDS[:0]}, "the input is empty: 0 rows of 9 tokens"),
    "embeddings in half precision": (
        lambda model: {"input_ids": None, "inputs_embeds": torch.randn(2, 9, 32).bfloat16()},
        "inputs_embeds is torch.bfloat16 but the weights are torch.float32",
    ),
    "ids and embeddings": (lambda model: {"inputs_embeds": torch.randn(2, 9, 32)}, "exactly one of"),
}


@pytest.mark.parametrize("variant", ["llama", "pro"])
@pytest.mark.parametrize("arguments, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(variant, arguments, message):
    model = make(variant)
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": IDS, **arguments(model)})


def test_embeddings_in_single_precision_for_a_half_precision_model():
    model = make("llama").bfloat16()
    with pytest.raises(ValueError, match=r"is torch\.float32 but the weights are torch\.bfloat16"):
        model(inputs_embeds=torch.randn(2, 9, 32))


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
    torch.testing.assert_close(torch.cat(got, dim=1), logits(model, IDS), atol=2e-5, rtol=1e-4)


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_its_cache(variant, dtype):
    """Its keys are in half precision and the weights are not, which is no mistake."""
    model = make(variant)
    with torch.autocast("cpu", dtype=dtype):
        continued = filled(model)
        assert logits(model, IDS, past_key_values=continued).isfinite().all()
