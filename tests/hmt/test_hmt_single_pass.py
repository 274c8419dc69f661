"""The single-pass mode: its definition, that no position sees a later token, and how it reads."""

import gzip
from pathlib import Path

import pytest
import torch
from causality import changed_by
from gradients import assert_same_gradients, gradients
from plain_hmt import plain_single
from streams import stream
from tiny_hmt import NORM, ROUNDING
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.hmt.backbone_hmt import Backbone


SETTINGS = [
    {},
    {"sum_fraction": 0.9},
    {"sum_fraction": 0.2},
    {"sensory_tokens": 0},
    {"recall_dim": 5},
    {"recall": False},
    {"recall_tokens": 2, "sensory_tokens": 0},
    {"recall_tokens": 8, "memory_size": 2},
    {"neural_cache_weight": 0.2, "memory_size": 2},
    {"neural_cache_weight": 0.5, "recall_tokens": 4},
    {"reread": True, "recall_tokens": 2},
    {"reread": True, "neural_cache_weight": 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_its_definition(make_wrapper, tokens, monkeypatch, settings):
    """Logits and gradients, with a cache and without, as layers are read that are checkpointed."""
    model = make_wrapper(**settings)
    for length in (4, 21, 43):
        ids = tokens[:, :length]
        expected = torch.stack([plain_single(model, row) for row in ids])
        cross_entropy(expected[:, :-1].mT, ids[:, 1:]).backward()
        expected_gradients = gradients(model)
        for checkpoints in (False, True):
            monkeypatch.setattr(Backbone, "checkpoints_layers", checkpoints)
            model.lm._continues = not checkpoints
            model.zero_grad()
            out = model(ids, labels=ids)
            out.loss.backward()
            torch.testing.assert_close(out.logits, expected, atol=NORM if model.config.reread else ROUNDING, rtol=0)
            assert_same_gradients(gradients(model), expected_gradients, NORM)
        model.zero_grad()
    assert model.config.reread == settings.get("reread", False)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_position_sees_a_later_token(make_wrapper, tokens, settings):
    early, here = changed_by(make_wrapper(**settings), tokens[0, :29], range(29))
    assert max(early) <= ROUNDING
    assert min(here) > 1e-3


def test_each_token_is_read_once(make_wrapper, tokens):
    model, shapes = make_wrapper(summary_batch=7), []  # two rows of three segments fit
    assert model.lm.continues  # probes, which are not counted
    model.backbone.model.register_forward_hook(lambda module, args, out: shapes.append(tuple(out[0].shape[:2])))
    with torch.no_grad():
        model(tokens[:, :40])
        # segment 0; the first parts of 1 to 3; second parts with their prompts; segment 4
        assert shapes == [(2, 9), (6, 8), *3 * [(2, 6)], (2, 8), (2, 6)]
        shapes.clear()
        stream(model, tokens, [1] * 43)
    assert {length for _, length in shapes} == {1, 2, 4}  # a segment begins with 3 sensory tokens


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-demo", "fox-demo"])
def test_wrapping_costs_nothing_before_training(name):
    """The perplexity of a novel equals that of windows with the same number of tokens, even directly after recalls."""
    folder = Path(__file__).parents[2] / "model_cards"
    text = gzip.decompress((folder / "held_out.txt.gz").read_bytes()).decode()[:100_000]
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder / name)(text).input_ids)[: 4 * 640].view(4, 640)
    backbone = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    torch.manual_seed(0)
    model = HMTWrapper.from_backbone(backbone, HMTConfig(segment_length=128, sensory_tokens=16))
    windows = [backbone(tokens[:, max(0, i - 16) : i + 128]).logits[:, -128:] for i in range(0, 640, 128)]

    def losses(logits):
        return cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")

    more, place = losses(model(tokens).logits) - losses(torch.cat(windows, 1)), torch.arange(639)
    behind_recall = (place > 128) & (place % 128 >= 64) & (place % 128 < 68)
    assert more[:, place < 192].abs().max() < 1e-3  # without recalls
    assert more[:, place > 192].abs().max() > 1e-3  # something is
    assert abs(more.mean()) < 1e-3
    if name == "llama-demo":  # 192 tokens of a FoX, whose gates vary, show 0.4 % only
        assert abs(more[:, behind_recall].mean()) < 1e-3
