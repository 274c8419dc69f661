"""A model's settings change in one place, and what follows from replaced parts is settled again."""

import copy
import pickle

import pytest
import torch
from streams import assert_close

from hf_longctx.hmt import HMTWrapper


def test_settings_change_together_or_not_at_all(make_wrapper, tokens):
    model = make_wrapper()
    model.configure(segment_length=12, sensory_tokens=2, memory_size=None)
    expected = make_wrapper(segment_length=12, sensory_tokens=2, memory_size=None)(tokens)
    assert_close(model(tokens).logits, expected.logits)
    with pytest.raises(ValueError, match="`memory_size` must be at least 1"):
        model.configure(segment_length=8, memory_size=0)
    assert (model.config.segment_length, model.config.memory_size) == (12, None)
    assert_close(model(tokens).logits, expected.logits)


def test_copies_of_a_used_config_can_be_changed(make_wrapper, llama, tokens, tmp_path):
    model = make_wrapper()
    for config in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
        config.segment_length = 12
        assert HMTWrapper.from_backbone(llama, config).config.segment_length == 12
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), HMTWrapper(model.config, llama)):
        other.configure(segment_length=12)
        with pytest.raises(ValueError, match=r"model.configure\(segment_length=8\)"):
            other.config.segment_length = 8
    assert model.config.segment_length == 8
    model.config.backbone_in_checkpoint = True  # no call reads it
    model.save_pretrained(tmp_path)
    assert "_is_used" not in (tmp_path / "config.json").read_text()


def test_replaced_parts_are_noticed(make_wrapper, tokens):
    model, other = make_wrapper(), make_wrapper()
    with torch.no_grad():
        other.memory.summary_token.mul_(2)
    old = model(tokens[:, :13], use_cache=True).state
    model.memory = other.memory  # PEFT does this for modules_to_save
    assert_close(model(tokens).logits, other(tokens).logits)
    model.backbone.resize_token_embeddings(70)
    assert model(tokens, use_cache=True).state.signature["vocab_size"] == 70
    with pytest.raises(ValueError, match=r"other settings.*'vocab_size': 61"):
        model(tokens, state=old)
