"""Both names of the cache work with every version of transformers."""

import pickle
from contextlib import nullcontext

import pytest
import torch
from tiny_fox import filled, make, tokens
from transformers import DynamicCache

from hf_longctx.fox import FoxForSequenceClassification, compat_fox


pytestmark = pytest.mark.parametrize("name", ["cache", "past_key_values"])


def warned(name):
    """The old name warns as in transformers, which warns from 5.24 on."""
    if name == compat_fox.CACHE or compat_fox.CACHE == "past_key_values":
        return nullcontext()
    return pytest.warns(FutureWarning, match="`past_key_values` is deprecated")


def check_names(output, cache):
    assert output.cache is output.past_key_values is cache
    assert pickle.loads(pickle.dumps(output)).cache.get_seq_length() == cache.get_seq_length()
    output.cache = None  # as code that only needs the logits does
    assert output.past_key_values is None


def test_calls_take_and_return_both_names(name):
    model, ids = make("pro"), tokens(2, 9)
    for read in (model, model.model, FoxForSequenceClassification(model.config)):
        cache = DynamicCache(config=model.config)
        with warned(name), torch.no_grad():
            output = read(ids, **{name: cache})
        assert cache.get_seq_length() == 9
        check_names(output, cache)


def test_a_layer_takes_both_names(name):
    model, x = make("pro"), torch.randn(2, 1, 32)
    cache = filled(model)
    for part in ("model.layers.1", "model.layers.1.self_attn"):
        with warned(name), torch.no_grad():
            model.get_submodule(part)(x, **{name: cache})
    assert cache.get_seq_length(1) == 11


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_generate_takes_and_returns_both_names(options, name):
    model, ids, cache = make("pro"), tokens(1, 9), DynamicCache(config=make("pro").config)
    options = options | dict(max_new_tokens=3, do_sample=False)
    with warned(name):
        output = model.generate(ids, return_dict_in_generate=True, **{name: cache}, **options)
    check_names(output, cache)
    assert output.sequences.tolist() == model.generate(ids, **options).tolist()


def test_masks_take_both_names(name):
    model, x = make("llama"), torch.randn(2, 3, 32)
    with warned(name):
        mask = model.create_masks_for_generate(model.config, x, torch.ones(2, 12).long(), **{name: filled(model)})
    assert mask["sdpa"].shape == (2, 1, 3, 12)
