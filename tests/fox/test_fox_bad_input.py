"""Mistakes of users of FoX: each row raises one clear error, or does not change any number."""

import pytest
import torch
from mistakes import harmless, refused
from tiny_fox import ROPE, TINY, filled, logits, make, tokens
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM

from hf_longctx.fox import FoxConfig, FoxForCausalLM, PrunedCache


# --- configurations --------------------------------------------------------------------------------------------------


def config(name, says, **changes):
    return refused(name, lambda: FoxConfig(**{**TINY, **changes}), says)


def with_vllm():
    FoxForCausalLM(FoxConfig(**TINY, attn_implementation="vllm"))


HALF = {**ROPE, "partial_rotary_factor": 0.5}
LAYERS = ["full_attention", "sliding_attention"]
CONFIG = [
    config("a size as text", r"hidden_size(.|\n)*expected int, got str", hidden_size="64"),
    config("positive pruning tolerance", "at most 0, got 0.5", log_pruning_tolerance=0.5),
    config("hidden size and heads", "must be a multiple of num_attention_heads", hidden_size=30),
    config("heads and key heads", "must be a multiple of num_key_value_heads", num_key_value_heads=3),
    config("unknown gate", "must be 'full', 'bias_only'", forget_gate="sigmoid"),
    config("unknown output gate", "must be None, 'sigmoid'", output_gate="tanh"),
    config("fixed without times", "got None and None.*Set both", forget_gate="fixed"),
    config("times upside down", "0 < min <= max", forget_gate="fixed", decay_time_min=8, decay_time_max=2),
    config("shared norm without a norm", "requires qk_norm=True", qk_norm_shared=True),
    config("window of one token", "at least 2 tokens, got 1", sliding_window=1),
    config("half a rope", "partial_rotary_factor must be 1, got 0.5.*whole", rope_parameters=HALF),
    config("layer types", "Leave layer_types out", layer_types=LAYERS),
    config("both directions", "is_causal must be True.*causal attention", is_causal=False),
    config("letters swapped", "'k_shfit' is not a field.*mean 'k_shift'", k_shfit=True),
    config("a name of nothing", "'frobnicate' is not a field", frobnicate=True),
    refused("vLLM without its plugin", with_vllm, r"ignore the forget gate.*'hf-longctx\[vllm\]'"),
    harmless("rope without parameters", lambda: (theta({}), theta({"rope_type": "default"}))),
]


def theta(rope_parameters):
    return FoxConfig(**TINY, rope_parameters=rope_parameters).rope_parameters["rope_theta"]


@pytest.mark.parametrize("mistake", CONFIG, ids=str)
def test_configurations(mistake):
    mistake.check()


# --- calls of a model ------------------------------------------------------------------------------------------------

IDS = tokens(2, 9)
ONES = torch.ones(2, 9, dtype=torch.long)
DENSE = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
PADDING = torch.tensor([[-1, *range(4), *range(4)]])
FALLING = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 1, 2]])
PACKED = {"input_ids": tokens(1, 15), "position_ids": torch.tensor([[*range(5), 0, *range(9)]])}


@pytest.fixture(scope="module")
def models():
    return [make("llama"), make("pro")]


def call(name, says, **changes):
    return refused(name, lambda model: model(**{"input_ids": IDS, **made(model, changes)}), says)


def same(name, **changes):
    """Return a check that the call has the logits of the correct call."""
    return harmless(name, lambda model: (logits(model, IDS, **changes), logits(model, IDS)))


def made(model, changes):
    """Call arguments that are functions with the model, so that each call gets a new cache."""
    return {name: value(model) if callable(value) else value for name, value in changes.items()}


def empty(model):
    return DynamicCache(config=model.config)


def pruned(model):
    return PrunedCache(model, logit_bound="observed")


CALLS = [
    call("ids of one dimension", r"input_ids\[None\]", input_ids=IDS[0]),
    call("neither ids nor embeddings", "exactly one of", input_ids=None),
    call("mask too short", r"attention_mask must be \(2, 9\)", attention_mask=ONES[:, :7]),
    call("mask of three dimensions", r"got \(2, 9, 9\)", attention_mask=torch.ones(2, 9, 9)),
    call("mask that is added to logits", r"got -1000000000.*mask == 0", attention_mask=(ONES - 1.0) * 1e9 - 1e9),
    call("mask of the new tokens only", r"\(2, 18\), .*9 cached and 9 new tokens", attention_mask=ONES, cache=filled),
    call("dense mask of other tokens", r"must be \(2, 1, 9, 9\)", attention_mask=DENSE[:, :, :7, :7]),
    call("dense mask per head", r"the same for all heads", attention_mask=DENSE.expand(-1, 4, -1, -1)),
    call("dense mask of 1 and 0", r"got torch.float32.*mask.bool\(\)", attention_mask=DENSE.float()),
    call("dense mask that shows the future", "attends to a later one", attention_mask=torch.ones_like(DENSE)),
    call(
        "dense mask over a pruned cache",
        "PrunedCache does not support a 4D attention_mask",
        attention_mask=DENSE,
        cache=pruned,
    ),
    call("positions of other tokens", r"must be \(2, 9\) or \(1, 9\)", position_ids=torch.arange(7)[None]),
    call("positions that fall", "Row 1 starts at 0, but token 7 has position 1", position_ids=FALLING),
    call("positions of 0 in one row", "must increase.* Row 1 starts", position_ids=torch.tensor([range(9), [0] * 9])),
    call("padding by positions", "starts at -1.*attention_mask", position_ids=PADDING),
    call("documents into a cache", "A cache cannot separate documents", **PACKED, cache=empty),
    call(
        "documents and padding", "Omit cache and attention_mask", **PACKED, attention_mask=torch.arange(15)[None] < 9
    ),
    call("borders for two rows", r"a batch of one.* input of \(2, 9\)", cu_seq_lens_q=torch.tensor([0, 9])),
    call("borders that fall", r"increase .*\[0, 9, 5, 15\]", **PACKED, cu_seq_lens_q=torch.tensor([0, 9, 5, 15])),
    call("documents of another row", r"seq_idx must be \(1, 15\).*\(1, 7\)", **PACKED, seq_idx=torch.zeros(1, 7)),
    call("borders beside other positions", "restart where neither", **PACKED, cu_seq_lens_q=torch.tensor([0, 7, 15])),
    call("both directions", "is_causal must be True", is_causal=False),
    call("mask misspelt", "'attention_masks' is not an argument.*'attention_mask'", attention_masks=ONES),
    call("cache in the singular", "'past_key_value' is not an argument", past_key_value=None),
    same("an argument of another model", token_type_ids=torch.zeros_like(IDS)),
    same("mask as floats", attention_mask=ONES.float()),
    same("more logits than tokens", logits_to_keep=99),
    same("positions from 40 on", position_ids=torch.arange(40, 49)[None]),
    same("number of the only document", seq_idx=torch.full((2, 9), 7)),
]


# --- caches ----------------------------------------------------------------------------------------------------------


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()


def another(model, **changes):
    return FoxForCausalLM(FoxConfig.from_dict({**model.config.to_dict(), **changes})).eval()


CACHES = [
    call("cache of a Llama", "filled by another model", cache=lambda model: filled(llama())),
    call("a tuple as a cache", "must be a Cache.*got a tuple", cache=((IDS, IDS),) * 2),
    call("two caches", "must be a Cache.*got a Encoder", cache=EncoderDecoderCache(DynamicCache(), DynamicCache())),
    call("cache of a Llama as wide as folded keys", "another model", cache=lambda model: filled(llama(head_dim=12))),
    call("cache of a deeper Llama", "must have 2 layers .* got 4", cache=lambda _: filled(llama(num_hidden_layers=4))),
    call("cache of another batch", "for another batch", cache=lambda model: filled(model, IDS[:1])),
    call(
        "pruned cache of another model", "for another model", cache=lambda model: pruned(another(model, head_dim=16))
    ),
]


def without_place(model):
    model(IDS, cache=DynamicCache())


def cropped(model):
    filled(model, tokens(2, 40)).crop(-32)


def continued(model):
    """Continue from a token in the middle of a cache."""
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    mask[..., 5:9] = False
    model(IDS[:, :1], attention_mask=mask, cache=filled(model))


SHIFTED = [
    refused("cache without a place for the token shift", without_place, "cannot store the token-shift state"),
    refused(
        "more tokens taken back than are kept", cropped, r"cannot remove 32 of 40 tokens.*the last 32 tokens only"
    ),
    refused("branch whose token before is gone", continued, "Only the last token has a cached token-shift state"),
]


def adapted():
    model = make("llama")
    model.model.layers[1].self_attn.q_proj = torch.nn.Sequential(model.model.layers[1].self_attn.q_proj)
    return model


def prune(name, says, **options):
    return refused(name, lambda model: PrunedCache(**{"model": model, **options}), says)


PRUNED = [
    prune("tolerance of everything", "tolerance must be .*got 1.0", tolerance=1.0),
    prune("tolerance of NaN", "tolerance must be .*got nan", tolerance=float("nan")),
    prune("unknown bound", "logit_bound must be .*got 'seen'", logit_bound="seen"),
    prune("no interval", "prune_every must be .*got 0", prune_every=0),
    prune("fewer slots than an interval", "max_cache_len must be .*got 256", max_cache_len=256),
    prune("adapted weights", "got Sequential.*observed", model=adapted()),
    prune("a configuration", "must be a FoX .*got FoxConfig", model=FoxConfig(**TINY)),
    prune("a Llama", "must be a FoX .*got LlamaForCausalLM", model=llama()),
    prune("no gates", "requires forget gates", model=FoxForCausalLM(FoxConfig(**TINY, forget_gate="none"))),
    prune("a window", "sliding_window=8", model=FoxForCausalLM(FoxConfig(**TINY, sliding_window=8))),
    prune("no tolerance", "disables pruning", model=FoxForCausalLM(FoxConfig(**TINY, log_pruning_tolerance=None))),
]


@pytest.mark.parametrize("mistake", [*SHIFTED, *PRUNED], ids=str)
def test_caches_of_pro(mistake, models):
    mistake.check(models[1])


@pytest.mark.parametrize("mistake", [*CALLS, *CACHES], ids=str)
def test_calls(mistake, models):
    for model in models:
        mistake.check(model)
