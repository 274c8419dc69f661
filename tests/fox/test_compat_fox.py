"""Both names of the cache work with every version of transformers, and an unknown version is named."""

import importlib.util
import pickle
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from tiny_fox import both_blocks, filled, make, tokens
from transformers import DynamicCache, modeling_outputs

from hf_longctx.fox import FoxForSequenceClassification, compat_fox


NAMES = ("cache", "past_key_values")
NEXT = tokens(2, 1, seed=2)


def warned(name):
    """The old name warns as in transformers, which warns from 5.24 on."""
    if name == compat_fox.CACHE or compat_fox.CACHE == "past_key_values":
        return nullcontext()
    return pytest.warns(FutureWarning, match="`past_key_values` is deprecated")


def check_names(output, cache):
    for name in NAMES:
        assert getattr(output, name) is output[name] is output.get(name) is cache
        assert name in output
    assert pickle.loads(pickle.dumps(output)).cache.get_seq_length() == cache.get_seq_length()
    output.cache = None  # as code that only needs the logits does
    assert output.past_key_values is None


@pytest.mark.parametrize("name", NAMES)
@both_blocks
def test_calls_take_and_return_both_names(variant, name):
    model, ids = make(variant), tokens(2, 9)
    head = FoxForSequenceClassification(model.config)
    for read in (model, model.model, head):
        cache = DynamicCache(config=model.config)
        with warned(name), torch.no_grad():
            output = read(ids, **{name: cache})
        assert cache.get_seq_length() == 9
        check_names(output, cache)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.1.self_attn"])
def test_layers_take_both_names(part, name):
    model, x = make("pro"), torch.randn(2, 1, 32)
    cache = filled(model)
    with warned(name), torch.no_grad():
        model.get_submodule(part)(x, **{name: cache})
    assert cache.get_seq_length(1) == 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_generate_takes_and_returns_both_names(options, name):
    model, ids, cache = make("pro"), tokens(1, 9), DynamicCache(config=make("pro").config)
    options = options | dict(max_new_tokens=3, do_sample=False)
    with warned(name):
        output = model.generate(ids, return_dict_in_generate=True, **{name: cache}, **options)
    check_names(output, cache)
    assert output.sequences.tolist() == model.generate(ids, **options).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_masks_take_both_names(name):
    model, x = make("llama"), torch.randn(2, 3, 32)
    with warned(name):
        mask = model.create_masks_for_generate(model.config, x, torch.ones(2, 12).long(), **{name: filled(model)})
    assert mask["sdpa"].shape == (2, 1, 3, 12)


@pytest.mark.skipif(compat_fox.CACHE == "cache", reason="transformers itself then warns, and takes `cache`")
def test_two_caches_are_refused():
    model = make("llama")
    with pytest.raises(ValueError, match="only `cache`"):
        model(NEXT, cache=filled(model), past_key_values=filled(model))


def load_copy(module):
    """Import a file again, as transformers does from each saved folder."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_copy", module.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_an_unknown_interface_is_one_error(monkeypatch):
    @dataclass
    class Renamed(transformers.utils.ModelOutput):
        last_hidden_state: Any = None
        memory: Any = None

    monkeypatch.setattr(modeling_outputs, "BaseModelOutputWithPast", Renamed)
    with pytest.raises(ImportError, match=r"FoX does not know the name of the cache.*pip install -U hf-longctx"):
        load_copy(compat_fox)
    model = make("llama")
    monkeypatch.setattr(compat_fox, "IS_TESTED", False)
    with pytest.raises(TypeError, match=r"does not know the argument 'memory', a DynamicCache.*was tested with"):
        model(NEXT, memory=filled(model))
