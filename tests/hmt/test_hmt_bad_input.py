"""Mistakes of users of HMT: each row raises one clear error, or does not change any number."""

import copy
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mistakes import harmless, refused
from tiny_hmt import tiny_llama
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    RobertaConfig,
    RobertaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_longctx.hmt import HMTConfig, HMTWrapper, from_official, official_parameters


COUNTS = ["memory_tokens", "memory_size", "recall_dim", "recall_tokens", "bptt_segments", "summary_batch"]
SETTINGS = {"segment_length": 8, "sensory_tokens": 3, "memory_size": 4}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 61}
RWKV = {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 61}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 61}


def config(**settings):
    return HMTConfig(**{**SETTINGS, **settings})


def build(backbone=None, **settings):
    torch.manual_seed(0)
    backbone = tiny_llama() if backbone is None else backbone
    torch.manual_seed(1)
    return HMTWrapper.from_backbone(backbone, config(**settings))


def masked(columns):
    """A mask of ones, (2, 43), with zeros in columns of row 1."""
    mask = torch.ones(2, 43, dtype=torch.long)
    mask[1, columns] = 0
    return mask


LEFT, RIGHT, HOLE, EMPTY = map(masked, (slice(5), slice(30, None), slice(5, 7), slice(None)))


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """Models and inputs that all rows share and leave as they are."""
    folder = tmp_path_factory.mktemp("bad")
    model, paper = build(), build(recall_mode="paper")
    tokens = torch.randint(3, 61, (2, 43), generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder / "hmt")
    model.backbone.save_pretrained(folder / "llama")
    with torch.no_grad():
        state = model(tokens, use_cache=True).state
        paper_state = paper(tokens, use_cache=True).state
    names = {"folder": folder, "model": model, "paper": paper, "tokens": tokens, "state": state}
    return SimpleNamespace(**names, paper_state=paper_state)


def changed(model, **settings):
    """Return a copy of a model with other settings."""
    model = copy.deepcopy(model)
    model.configure(**settings)
    return model


def written(model, **settings):
    """Return a copy of a model after an attempt to change its config directly."""
    model = copy.deepcopy(model)
    model.config.update(settings)
    return model


CONFIG = [
    refused(name, lambda settings=settings: HMTConfig(**settings), says)
    for name, settings, says in [
        ("a segment no longer than what it repeats", {"segment_length": 33}, "must be greater than sensory_tokens"),
        ("two memory tokens with recall", {"memory_tokens": 2}, "memory_tokens=2` needs .*recall_m"),
        ("negative sensory tokens", {"sensory_tokens": -1}, "sensory_tokens` must be at least 0, got -1"),
        ("an empty query", {"sum_fraction": 1e-4}, "sum_fraction` must select .*511 of the 512 .*got 0.0001"),
        ("a query longer than the segment", {"sum_fraction": 1.5}, "sum_fraction` must select .*got 1.5"),
        ("a token behind the recall is missing", {"sum_fraction": 1.0}, "got 1.0.*one token must follow"),
        ("a misspelt recall_mode", {"recall_mode": "causal"}, "recall_mode` must be .*got 'causal'"),
        ("an unknown loss_scope", {"loss_scope": "first"}, "loss_scope` must be .*got 'first'"),
        *((f"{name} of 0", {name: 0}, f"{name}` must be at least 1, got 0") for name in COUNTS),
        ("tokens read again without recall", {"recall_tokens": 2, "recall": False}, "got .'recall': False"),
        ("tokens read again by the paper", {"recall_tokens": 2, "recall_mode": "paper"}, "got .*'recall_mode': 'p"),
        ("a neural cache alone", {"neural_cache_weight": 1}, "above 0 and below 1, got 1"),
        ("a field of earlier versions", {"recalled_pages": 2}, "'recalled_pages' is not a field"),
        ("stretches that do not fill a segment", {"recall_tokens": 3}, "must divide segment_length=512"),
        ("an unknown backbone", {"backbone_config": {"model_type": "nothing"}}, "'nothing'. This version of tr"),
        ("a misspelt name", {"segment_len": 12}, "'segment_len' is not a field of HMTConfig; did you mean segment_l"),
    ]
]
CONFIG += [
    harmless(
        "an unknown name in a saved configuration",
        lambda: (HMTConfig.from_dict({"model_type": "hmt", "added": 1}).segment_length, HMTConfig().segment_length),
    ),
]


@pytest.mark.parametrize("mistake", CONFIG, ids=str)
def test_configurations(mistake):
    mistake.check()


class TokensOnly(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask)


def pointer_to_nowhere(it):
    build(backbone_in_checkpoint=False).save_pretrained(it.folder / "nowhere")


def official(it, rename=None, **changes):
    parameters = {**dict(official_parameters(it.paper)), **changes}
    parameters.pop(rename, None)
    return from_official(tiny_llama(), parameters, **SETTINGS)


BUILD = [
    refused("too few positions", lambda it: build(segment_length=64, sensory_tokens=0), "64 positions.*at most 62"),
    refused(
        "positions that are kept for padding",
        lambda it: build(RobertaForCausalLM(RobertaConfig(**BERT, is_decoder=True, max_position_embeddings=14))),
        "allows 12 positions. A segment needs 13",
    ),
    refused("a model of tokens only", lambda it: build(TokensOnly(tiny_llama().config)), "must take inputs_embeds"),
    refused("T5", lambda it: build(T5ForConditionalGeneration(T5Config(**T5))), "must be a decoder"),
    refused("a wrapper in a wrapper", lambda it: build(it.model), "HMTWrapper"),
    *(
        refused(name, lambda it, x=x: build(x(tiny_llama().config)), "must be a transformers causal LM", TypeError)
        for name, x in {
            "a classifier": LlamaForSequenceClassification,
            "a model without a head": LlamaModel,
            "a linear layer": lambda config: torch.nn.Linear(2, 2),
        }.items()
    ),
    refused("no backbone", lambda it: HMTWrapper(HMTConfig()), "backbone_config` must be set"),
    refused("a plain Llama's folder", lambda it: HMTWrapper.from_pretrained(it.folder / "llama"), "from_backbone"),
    refused(
        "a dtype for a model", lambda it: HMTWrapper.from_backbone(it.model.backbone, dtype="auto"), "by name or path"
    ),
    refused(
        "a setting and a config",
        lambda it: HMTWrapper.from_pretrained(it.folder / "hmt", config=it.model.config, memory_size=9),
        "'memory_size'.*omit `config`",
    ),
    refused("a pointer to nowhere", pointer_to_nowhere, "backbone_name_or_path` must be set"),
    refused("a misspelt official name", lambda it: official(it, typo=torch.zeros(1)), r"unknown: .'typo'"),
    refused("no official prompt", lambda it: official(it, rename="mem"), r"Missing: .'mem'"),
    refused(
        "an official prompt of half the width",
        lambda it: official(it, **{"memory_cell.memory": torch.zeros(1, 8)}),
        r"memory_cell.memory must have shape .*got \(1, 8\)",
    ),
    refused(
        "checkpointing of every other layer",
        lambda it: it.model._set_gradient_checkpointing(every_n_layers=2),
        "segments, not layers",
    ),
    refused(
        "reentrant checkpointing",
        lambda it: it.model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=True)),
        "loses the gradients",
    ),
]


READ = [
    refused(name, lambda it, arguments=arguments: it.model(**{"input_ids": it.tokens, **arguments(it)}), says)
    for name, arguments, says in [
        ("one dimension", lambda it: {"input_ids": it.tokens[0]}, "at least one token"),
        ("a text of no token", lambda it: {"input_ids": it.tokens[:, :0]}, "at least one token"),
        ("short labels", lambda it: {"labels": it.tokens[:, 1:]}, "labels` must have the same shape"),
        ("a hole in the mask", lambda it: {"attention_mask": HOLE}, "between tokens"),
        ("a row of padding", lambda it: {"attention_mask": EMPTY}, "all padding"),
        ("an additive mask", lambda it: {"attention_mask": (LEFT - 1) * 1e30}, "must be 1 .* and 0"),
        ("a misspelt argument", lambda it: {"lables": it.tokens}, "not support the argument lables"),
        ("-1 logits", lambda it: {"logits_to_keep": -1}, "logits_to_keep` must be .* got -1"),
        ("a logit and a half", lambda it: {"logits_to_keep": 1.5}, "logits_to_keep` must be .* got 1.5"),
        ("score_from without labels", lambda it: {"score_from": 4}, "got 4. `score_from` also requires labels"),
        ("two states", lambda it: {"state": it.state, "cache": it.state}, "Pass only one of them"),
        ("score_from of a text", lambda it: {"labels": it.tokens, "score_from": 100}, "0 to 7 .*got 100"),
    ]
]
READ += [
    refused("right padding in the paper mode", lambda it: it.paper(it.tokens, RIGHT), "padded on the right"),
    refused(
        "padding that RWKV would read",
        lambda it: build(RwkvForCausalLM(RwkvConfig(**RWKV)).eval(), recall_mode="paper")(it.tokens, LEFT),
        "ignores the attention mask",
    ),
    refused("a paper stream that stops in j", lambda it: it.paper(it.tokens, state=it.paper_state), "3 tokens into"),
    refused("DataParallel", lambda it: it.model._replicate_for_data_parallel()(it.tokens), "torchrun"),
    refused("memory_size set to 0", lambda it: changed(it.model, memory_size=0), "at least 1, got 0"),
    *(
        refused(
            f"{name} set behind the model's back",
            lambda it, name=name, value=value: written(it.model, **{name: value}),
            rf"config.{name}` cannot be changed.*model.configure\({name}={value!r}\).*copy.deepcopy\(model.config\)",
        )
        for name, value in {"loss_scope": "last", "bptt_segments": 2, "cuda_graphs": True, "segment_length": 9}.items()
    ),
    refused("a misspelt setting", lambda it: changed(it.model, memory_sise=9), "did you mean memory_size"),
    refused("an unknown loss_scope of a call", lambda it: it.model(it.tokens, loss_scope="first"), "got 'first'"),
    refused("a gradient of no segment", lambda it: it.model(it.tokens, bptt_segments=0), "at least 1, got 0"),
    refused("a state of another dtype", lambda it: it.state.to(torch.bfloat16), "got the dtype torch.bfloat16"),
    refused("no rows", lambda it: it.model.new_state(0), "`batch_size` must be at least 1, got 0"),
    refused(
        "a wrong dtype", lambda it: copy.deepcopy(it.model).float()(it.tokens, state=it.state), "got torch.float64"
    ),
    refused(
        "recall_dim of another size",
        lambda it: changed(it.model, recall_dim=8),
        "recall_dim` must be .*got 8",
    ),
    harmless(
        "numpy's logits_to_keep",
        lambda it: (it.model(it.tokens, logits_to_keep=np.int64(1)).logits, it.model(it.tokens).logits[:, -1:]),
    ),
    refused("what no call recalled", lambda it: it.model(it.tokens).recalled(), "output_recall=True"),
    harmless("int32 ids", lambda it: (it.model(it.tokens.int()).logits, it.model(it.tokens).logits)),
    harmless(
        "nothing to score",
        lambda it: (it.model(it.tokens, labels=torch.full_like(it.tokens, -100)).loss, torch.tensor(0.0)),
    ),
    harmless(
        "too many logits", lambda it: (it.model(it.tokens, logits_to_keep=99).logits, it.model(it.tokens).logits)
    ),
    harmless(
        "strange ids in padding",
        lambda it: (it.model(it.tokens.masked_fill(LEFT == 0, -100), LEFT).logits, it.model(it.tokens, LEFT).logits),
    ),
    harmless(
        "another segment_length after building",
        lambda it: (changed(it.model, segment_length=9)(it.tokens).logits, build(segment_length=9)(it.tokens).logits),
    ),
]


def generate(it, tokens=None, **arguments):
    tokens = it.tokens[:, :9] if tokens is None else tokens
    return it.model.generate(tokens, **{"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, **arguments})


GENERATE = [
    refused(name, lambda it, arguments=arguments: generate(it, **arguments(it)), says)
    for name, arguments, says in [
        ("hidden states", lambda it: {"output_hidden_states": True}, "not support output_hidden_states=True"),
        ("guidance", lambda it: {"guidance_scale": 1.5}, "not support guidance_scale=1.5"),
        ("a static cache", lambda it: {"cache_implementation": "static"}, "not support cache_implementation='static'"),
        ("a state without the cache", lambda it: {"state": it.state, "use_cache": False}, "must be True to continue"),
        ("right padding", lambda it: {"tokens": it.tokens, "attention_mask": RIGHT}, "must end with a token"),
        ("new tokens as the whole text", lambda it: {"cache": it.state}, "whole sequence of each row"),
        ("another model's cache", lambda it: {"cache": DynamicCache()}, "got a DynamicCache"),
        ("assisted generation", lambda it: {"tokens": it.tokens[:1], "prompt_lookup_num_tokens": 2}, "stateful"),
    ]
]
GENERATE += [
    refused(
        "continuous batching",
        lambda it: it.model.generate_batch(it.tokens.tolist(), max_new_tokens=2),
        "does not support continuous batching",
        NotImplementedError,
    ),
    refused(
        "the paper mode behind an open segment",
        lambda it: it.paper.generate(it.tokens[:, :29], max_new_tokens=9, eos_token_id=None),
        "train a model with recall_mode='single_pass'",
    ),
]


@pytest.mark.parametrize("mistake", [*BUILD, *READ, *GENERATE], ids=str)
def test_calls(mistake, it):
    with torch.set_grad_enabled("gradients" in mistake.name):
        mistake.check(it)


def test_a_backbone_that_sees_ahead():
    torch.manual_seed(0)
    sizes = {**BERT, "initializer_range": 0.3}
    model = BertLMHeadModel(BertConfig(**sizes)).bfloat16()
    model.dropout_of_mine = torch.nn.Dropout().eval()
    modes = [m.training for m in model.modules()]
    with pytest.raises(ValueError, match=r"BertLMHeadModel must be causal.*is_decoder=True.*attn_type='uni'"):
        build(model)
    assert [m.training for m in model.modules()] == modes and any(modes) and not all(modes)
    assert build(BertLMHeadModel(BertConfig(**sizes, is_decoder=True)).bfloat16()).training


def test_a_tie_goes_to_the_even_number():
    assert [HMTConfig(segment_length=n, sensory_tokens=0).summary_length for n in (13, 15, 16)] == [6, 8, 8]


FITTED = [{"sensory_tokens": 0}, {"recall_tokens": 8}, {"sensory_tokens": 0, "recall_tokens": 7}]


@pytest.mark.parametrize("settings", FITTED, ids=str)
def test_the_longest_segment_that_fits(settings):
    with pytest.raises(ValueError, match="at most") as refusal:
        build(segment_length=8 * 7 * 2, **settings)
    longest = int(re.search(r"at most (\d+)", str(refusal.value))[1])
    config = build(segment_length=longest, **settings).config
    assert 64 - config.positions_per_segment < settings.get("recall_tokens", 1)


def test_official_parameters(llama, make_wrapper):
    params = dict(official_parameters(make_wrapper(recall_mode="paper")))
    from_official(llama, {**params, "memory_cell.mem_map.linear.weight": torch.zeros(16, 16)}, **SETTINGS)
    weights = {f"memory_cell.model.{k}": torch.zeros_like(v) for k, v in llama.state_dict().items()}
    assert not from_official(llama, {**params, **weights}, **SETTINGS).backbone.lm_head.weight.any()
