"""What users of FoX get wrong: each row is refused with one clear error, or changes no number."""

import json
import shutil

import pytest
import torch
from mistakes import harmless, refused
from tiny_fox import ROPE, TINY, logits, make, tokens
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from hf_longctx.fox import FoxConfig, FoxForCausalLM, PrunedCache


# --- configurations --------------------------------------------------------------------------------------------------


def config(name, says, **changes):
    return refused(name, lambda: FoxConfig(**{**TINY, **changes}), says)


AT_LEAST_1 = [
    ("vocab_size", 0),
    ("vocab_size", -1),
    ("hidden_size", 0),
    ("hidden_size", -64),
    ("intermediate_size", 0),
    ("intermediate_size", -5),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 0),
    ("num_attention_heads", -4),
    ("num_key_value_heads", 0),
    ("head_dim", 0),
    ("head_dim", -1),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", -5),
]
CONFIG = [
    *(
        config(f"{name} of {size}", f"{name}={size}; it must be at least 1", **{name: size})
        for name, size in AT_LEAST_1
    ),
    config("a size as text", r"hidden_size(.|\n)*expected int, got str", hidden_size="64"),
    config("half a head", r"num_attention_heads(.|\n)*expected int, got float", num_attention_heads=2.5),
    config("a switch as text", r"k_shift(.|\n)*expected bool, got str", k_shift="yes"),
    config("epsilon as text", r"rms_norm_eps(.|\n)*expected float, got str", rms_norm_eps="small"),
    config("no kind of gate", r"forget_gate(.|\n)*expected str", forget_gate=None),
    config("negative epsilon", "rms_norm_eps=-1.0.*1e-6", rms_norm_eps=-1.0),
    config("epsilon of 0", "rms_norm_eps=0.0", rms_norm_eps=0.0),
    config("epsilon of NaN", "qk_norm_eps=nan", qk_norm_eps=float("nan")),
    config("negative epsilon of QK-norm", "qk_norm_eps=-1.0", qk_norm_eps=-1.0),
    config("dropout of everything", "attention_dropout=2.0", attention_dropout=2.0),
    config("negative dropout", "attention_dropout=-0.1", attention_dropout=-0.1),
    config("negative range", "initializer_range=-1.0", initializer_range=-1.0),
    config("range of NaN", "initializer_range=nan", initializer_range=float("nan")),
    config("pruning of NaN", "log_pruning_tolerance=nan", log_pruning_tolerance=float("nan")),
    config("positive pruning tolerance", "log_pruning_tolerance=0.5", log_pruning_tolerance=0.5),
    config("hidden size and heads", "not a multiple of num_attention_heads", hidden_size=30),
    config("heads and key heads", "not a multiple of num_key_value_heads", num_key_value_heads=3),
    config("unknown gate", "must be one of", forget_gate="sigmoid"),
    config("unknown output gate", "must be None or one of", output_gate="tanh"),
    config("fixed without times", "needs decay_time_min", forget_gate="fixed"),
    config("times without a gate", 'forget_gate is "none"', forget_gate="none", decay_time_min=2, decay_time_max=8),
    config("times upside down", "0 < min <= max", forget_gate="fixed", decay_time_min=8, decay_time_max=2),
    config("one time of two", "decay_time_max=None", decay_time_min=2),
    config("times without end", "0 < min <= max < inf", decay_time_min=2, decay_time_max=float("inf")),
    config("shared gates without gates", 'forget_gate is "none"', forget_gate="none", forget_gate_per_kv_head=True),
    config("shared norm without a norm", "Give qk_norm=True", qk_norm_shared=True),
    config("window of one token", "at least 2", sliding_window=1),
    config("negative window", "at least 2", sliding_window=-3),
    config("odd head with rope", "head_dim=9 is odd", hidden_size=36, rope_parameters=ROPE),
    config("unknown rope", "rope_type='bogus' is unknown", rope_parameters={"rope_type": "bogus"}),
    config("yarn without a factor", "yarn.*factor", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
    config("negative base of rope", "rope_theta=-1.0", rope_parameters={"rope_theta": -1.0}),
    config("base of rope as text", "rope_theta='1e4'", rope_theta="1e4"),
    config("rope by name", r"rope_parameters(.|\n)*got str", rope_parameters="yarn"),
    config("layer types", "Leave layer_types out", layer_types=["full_attention", "sliding_attention"]),
    config("layer types without a window", "Leave layer_types out", layer_types=["sliding_attention"] * 2),
    config("unknown layer types", "Leave layer_types out", layer_types=["mamba", "mamba"]),
    config("one layer type", "Leave layer_types out", layer_types="full_attention"),
    config("newer format", "format version 99", format_version=99),
    config("no format", "format_version=0", format_version=0),
    config("unknown activation", "hidden_act='sillu'.*such as 'silu'", hidden_act="sillu"),
    config("unknown dtype", "dtype='float7'", dtype="float7"),
    config("padding outside the vocabulary", "pad_token_id=61.*vocab_size=61", pad_token_id=61),
    config("negative padding", "pad_token_id=-1", pad_token_id=-1),
    config("first token outside the vocabulary", "bos_token_id=99999", bos_token_id=99999),
    config("one of several last tokens", r"eos_token_id=\[2, 99\]", eos_token_id=[2, 99]),
    config("last token as text", r"eos_token_id(.|\n)*got str", eos_token_id="</s>"),
    config("both directions", "is_causal=False.*causal decoder", is_causal=False),
    config("cross attention", "add_cross_attention=True", add_cross_attention=True),
    config("an encoder", "is_encoder_decoder=True", is_encoder_decoder=True),
    config("letters swapped", "'k_shfit' is no field.*k_shift", k_shfit=True),
    config("name of another model", "'num_heads' is no field.*num_attention_heads", num_heads=4),
    config("a name too long", "'use_forget_gate' is no field.*forget_gate", use_forget_gate=True),
    config("a name of nothing", "'frobnicate' is no field", frobnicate=True),
    config("an option of generate", "'temperature' is no field", temperature=0.5),
    refused("unknown implementation", lambda: with_implementation("magic"), "magic"),
    refused("vLLM without its plugin", lambda: with_implementation("vllm"), r"leave out.*'hf-longctx\[vllm\]'"),
    harmless("rope without parameters", lambda: (theta({}), theta({"rope_type": "default"}))),
]


def with_implementation(name):
    return FoxForCausalLM(FoxConfig(**TINY, attn_implementation=name))


def theta(rope_parameters):
    return FoxConfig(**TINY, rope_parameters=rope_parameters).rope_parameters["rope_theta"]


@pytest.mark.parametrize("mistake", CONFIG, ids=str)
def test_configurations(mistake, record_property):
    record_property("mistake", mistake.check())


# --- calls of a model ------------------------------------------------------------------------------------------------

IDS = tokens(2, 9)
ONES = torch.ones(2, 9, dtype=torch.long)
DENSE = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
PACKED = {"input_ids": tokens(1, 15), "position_ids": torch.tensor([[*range(5), 0, *range(9)]])}


@pytest.fixture(scope="module")
def models():
    return [make("llama"), make("pro")]


def call(name, says, **changes):
    return refused(name, lambda model: model(**{"input_ids": IDS, **made(model, changes)}), says)


def same(name, **changes):
    """The call gives the logits of the right one."""
    return harmless(
        name, lambda model: (logits(model, **{"input_ids": IDS, **made(model, changes)}), logits(model, IDS))
    )


def made(model, changes):
    """Of these arguments, functions are called with the model: caches are filled anew for each call."""
    return {name: value(model) if callable(value) else value for name, value in changes.items()}


def filled(model, ids=IDS):
    """The cache of a model that has read `ids`."""
    cache = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=cache)
    return cache


def pruned(model):
    return PrunedCache(model, logit_bound="observed")


CALLS = [
    call("ids of three dimensions", r"must be \(B, T, 32\)", input_ids=IDS[None]),
    call("ids of one dimension", r"input_ids\[None\]", input_ids=IDS[0]),
    call("ids as floats", "input_ids is torch.float32", input_ids=IDS.float()),
    call("ids as booleans", "input_ids is torch.bool", input_ids=IDS.bool()),
    call("ids as a list", "input_ids is a list", input_ids=IDS.tolist()),
    call("text", "input_ids is a str.*tokenizer", input_ids="some text"),
    call("ids as an array", "input_ids is a ndarray", input_ids=IDS.numpy()),
    call(
        "ids beyond the vocabulary", "ids from 3 to 61.*between 0 and 60", input_ids=IDS.clamp(3, 3).fill_diagonal_(61)
    ),
    call("negative ids", "input_ids holds ids from -1 ", input_ids=IDS.clamp(max=3) - 4),
    call("no tokens", "the input is empty: 2 rows of 0 tokens", input_ids=IDS[:, :0]),
    call("no rows", "the input is empty: 0 rows of 9 tokens", input_ids=IDS[:0]),
    call("neither ids nor embeddings", "exactly one of", input_ids=None),
    call("ids and embeddings", "exactly one of", inputs_embeds=torch.randn(2, 9, 32)),
    call("embeddings too wide", r"is \(2, 9, 33\); it must be", input_ids=None, inputs_embeds=torch.randn(2, 9, 33)),
    call("embeddings of two dimensions", r"is \(9, 32\)", input_ids=None, inputs_embeds=torch.randn(9, 32)),
    call(
        "embeddings in half precision",
        "inputs_embeds is torch.bfloat16 but the weights are torch.float32",
        input_ids=None,
        inputs_embeds=torch.randn(2, 9, 32).bfloat16(),
    ),
    call("mask too short", r"it must be \(2, 9\)", attention_mask=ONES[:, :7]),
    call("mask too long", r"it must be \(2, 9\)", attention_mask=torch.ones(2, 12)),
    call("mask of one row", r"it must be \(2, 9\)", attention_mask=ONES[:1]),
    call("mask as a list", "attention_mask is a list", attention_mask=ONES.tolist()),
    call("masks by kind of layer", "dictionary of .'full_attention'", attention_mask={"full_attention": DENSE}),
    call("mask of one dimension", r"must be \(B, past \+ T\)", attention_mask=torch.ones(9)),
    call("mask of three dimensions", r"attention_mask is \(2, 9, 9\)", attention_mask=torch.ones(2, 9, 9)),
    call("mask that is added to logits", r"holds -1000000000.*mask == 0", attention_mask=(ONES - 1.0) * 1e9 - 1e9),
    call("mask of NaN", "holds nan", attention_mask=torch.full((2, 9), torch.nan)),
    call("mask of halves", "holds 0.5", attention_mask=ONES / 2),
    call(
        "mask of the new tokens only",
        r"it must be \(2, 18\): a column for each of 9 cached and 9 new tokens",
        attention_mask=ONES,
        past_key_values=filled,
    ),
    call("dense mask of other tokens", r"it must be \(2, 1, 9, 9\)", attention_mask=DENSE[:, :, :7, :7]),
    call("dense mask per head", r"the same for all heads", attention_mask=DENSE.expand(-1, 4, -1, -1)),
    call("dense mask of 1 and 0", r"is torch.float32.*mask.bool\(\)", attention_mask=DENSE.float()),
    call("dense mask of integers", r"is torch.int64.*mask.bool\(\)", attention_mask=DENSE.long()),
    call("dense mask of biases", "floating and added", attention_mask=torch.randn(2, 1, 9, 9)),
    call("dense mask that shows the future", "see a later one", attention_mask=torch.ones_like(DENSE)),
    call("dense mask over a pruned cache", "PrunedCache has dropped", attention_mask=DENSE, past_key_values=pruned),
    call("positions of other tokens", r"must be \(2, 9\) or \(1, 9\)", position_ids=torch.arange(7)[None]),
    call("positions of three dimensions", r"\(3, 2, 9\)", position_ids=torch.zeros(3, 2, 9).long()),
    call("positions as a list", "position_ids is a list", position_ids=list(range(9))),
    call(
        "positions that fall",
        "go from 2 to 1 at token 7 of row 0",
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 1, 2]]),
    ),
    call("a position twice", "go from 3 to 3 at token 4", position_ids=torch.tensor([[0, 1, 2, 3, 3, 4, 5, 6, 7]])),
    call("positions of 0", "do not rise in one of the rows", position_ids=torch.zeros(2, 9).long()),
    call("positions of 0 in one row", "do not rise", position_ids=torch.tensor([range(9), [0] * 9])),
    call(
        "documents into a cache",
        "which a cache cannot tell",
        **PACKED,
        past_key_values=lambda model: DynamicCache(config=model.config),
    ),
    call("documents and padding", "Leave attention_mask out", **PACKED, attention_mask=torch.arange(15)[None] < 13),
    call("borders for two rows", r"a batch of one .* input of \(2, 9\)", cu_seq_lens_q=torch.tensor([0, 9])),
    call(
        "borders of another row",
        r"\(1, 15\) tokens and \[0, 5, 14\]",
        **PACKED,
        cu_seq_lens_q=torch.tensor([0, 5, 14]),
    ),
    call("borders that fall", r"rise .*\[0, 9, 5, 15\]", **PACKED, cu_seq_lens_q=torch.tensor([0, 9, 5, 15])),
    call("borders as a list", "cu_seq_lens_q is a list", **PACKED, cu_seq_lens_q=[0, 15]),
    call("documents of another row", r"seq_idx is \(1, 7\).*\(1, 15\)", **PACKED, seq_idx=torch.zeros(1, 7)),
    call("documents as a list", "seq_idx is a list", **PACKED, seq_idx=[0] * 15),
    call("labels of other tokens", r"labels is torch.int64 of \(2, 7\)", labels=IDS[:, :7]),
    call("labels as floats", "labels is torch.float32", labels=IDS.float()),
    call("labels as a list", "labels is list", labels=IDS.tolist()),
    call("labels beyond the vocabulary", "labels holds ids from 61 to 61", labels=torch.full_like(IDS, 61)),
    call("labels of -1", "labels holds ids from -1 ", labels=torch.full_like(IDS, -1)),
    call("negative logits_to_keep", "logits_to_keep=-1", logits_to_keep=-1),
    call("half a logit to keep", "logits_to_keep=1.5", logits_to_keep=1.5),
    call("both directions", "is_causal=False", is_causal=False),
    call("mask misspelt", "'attention_masks' is no argument.*'attention_mask'", attention_masks=ONES),
    call("cache in the singular", "'past_key_value' is no argument", past_key_value=None),
    call("old name of logits_to_keep", "'num_logits_to_keep' is no argument", num_logits_to_keep=1),
    call("borders misspelt", "'cu_seqlens_q' is no argument.*'cu_seq_lens_q'", cu_seqlens_q=torch.tensor([0, 9])),
    call("positions misspelt", "'postion_ids' is no argument", postion_ids=torch.arange(9)),
    same("an argument of another model", token_type_ids=torch.zeros_like(IDS)),
    same("mask as floats", attention_mask=ONES.float()),
    same("more logits than tokens", logits_to_keep=99),
    same("ids of 32 bits", input_ids=IDS.int()),
    same("positions from 40 on", position_ids=torch.arange(40, 49)[None]),
    same("positions as floats", position_ids=torch.arange(9.0)[None]),
    same("number of the only document", seq_idx=torch.full((2, 9), 7)),
]


@pytest.mark.parametrize("mistake", CALLS, ids=str)
def test_calls(mistake, models, record_property):
    outcomes = {mistake.check(model) for model in models}
    record_property("mistake", outcomes.pop())


# --- caches ----------------------------------------------------------------------------------------------------------


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()


def another(model, **changes):
    return FoxForCausalLM(FoxConfig.from_dict({**model.config.to_dict(), **changes})).eval()


def with_cache(name, says, make_cache):
    return call(name, says, past_key_values=make_cache)


EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "head_dim": 8}
CACHES = [
    with_cache("cache of a Llama", "filled by another model", lambda model: filled(llama())),
    with_cache("cache of a Llama as wide as folded keys", "carry no decay", lambda model: filled(llama(head_dim=12))),
    with_cache(
        "cache of a deeper Llama",
        "for 4 layers and the model has 2",
        lambda model: filled(llama(num_hidden_layers=4)),
    ),
    with_cache(
        "cache of a wider FoX",
        "filled by another model",
        lambda model: filled(another(model, hidden_size=64, head_dim=16)),
    ),
    with_cache(
        "cache of a FoX with more heads",
        "filled by another model",
        lambda model: filled(another(model, **EIGHT_HEADS)),
    ),
    with_cache("cache of another batch", "for another batch", lambda model: filled(model, IDS[:1])),
    with_cache("cache in another dtype", "in another dtype", lambda model: filled(another(model).bfloat16())),
    with_cache("cache of an autocast", "in another dtype", lambda model: autocast_cache(model)),
    with_cache("cache that is none", "no transformers Cache", lambda model: ((torch.zeros(2, 4, 3, 8),) * 2,) * 2),
    with_cache("cache by name", "this str is no transformers Cache", lambda model: "dynamic"),
    with_cache(
        "static cache too short",
        "room for 8 tokens and 9 are needed",
        lambda model: StaticCache(config=model.config, max_cache_len=8),
    ),
    with_cache(
        "static cache that is full",
        "room for 9 tokens and 18 are needed",
        lambda model: full_static_cache(model),
    ),
    with_cache("pruned cache of another model", "another model", lambda model: pruned(another(model, head_dim=16))),
]


def autocast_cache(model):
    with torch.autocast("cpu", torch.bfloat16):
        return filled(model)


def full_static_cache(model):
    cache = StaticCache(config=model.config, max_cache_len=9)
    logits(model, IDS, past_key_values=cache)
    return cache


@pytest.mark.parametrize("mistake", CACHES, ids=str)
def test_caches(mistake, models, record_property):
    outcomes = {mistake.check(model) for model in models}
    record_property("mistake", outcomes.pop())


def without_place(model):
    model(IDS, past_key_values=DynamicCache())


def repeated(model):
    cache = filled(model)
    cache.batch_repeat_interleave(2)
    model(IDS.repeat_interleave(2, dim=0), past_key_values=cache)


def selected(model):
    cache = filled(model)
    cache.batch_select_indices(torch.tensor([1]))
    model(IDS[1:], past_key_values=cache)


def continued(model):
    """A branch from a token in the middle of a cache."""
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    mask[..., 5:9] = False
    model(IDS[:, :1], attention_mask=mask, past_key_values=filled(model))


SHIFTED = [
    refused("cache without a place for the token shift", without_place, "no place for the token shift"),
    refused("rows repeated but for the token shift", repeated, r"token shift of 2 rows and keys of 4.*reorder_cache"),
    refused("rows left out but for the token shift", selected, r"token shift of 2 rows and keys of 1.*reorder_cache"),
    refused("branch whose token before is gone", continued, "cached for the last one alone"),
]


@pytest.mark.parametrize("mistake", SHIFTED, ids=str)
def test_token_shifts(mistake, models, record_property):
    record_property("mistake", mistake.check(models[1]))


def prune(name, says, **options):
    return refused(name, lambda model: PrunedCache(**{"model": model, **options}), says)


PRUNED = [
    prune("tolerance of everything", "tolerance is 1.0", tolerance=1.0),
    prune("negative tolerance", "tolerance is -1", tolerance=-1),
    prune("tolerance as text", "tolerance is 'a'", tolerance="a"),
    prune("tolerance of NaN", "tolerance is nan", tolerance=float("nan")),
    prune("bound of a number", "logit_bound is 7.0", logit_bound=7.0),
    prune("unknown bound", "logit_bound is 'seen'", logit_bound="seen"),
    prune("no interval", "prune_every is 0", prune_every=0),
    prune("half an interval", "prune_every is 2.5", prune_every=2.5),
    prune("a configuration", "FoxConfig is not a FoX", model=FoxConfig(**TINY)),
    prune("a Llama", "LlamaForCausalLM is not a FoX", model=llama()),
    prune("no gates", "forgets nothing", model=FoxForCausalLM(FoxConfig(**TINY, forget_gate="none"))),
    prune("a window", "sliding window of 8", model=FoxForCausalLM(FoxConfig(**TINY, sliding_window=8))),
    prune(
        "no tolerance anywhere",
        "turns pruning off",
        model=FoxForCausalLM(FoxConfig(**TINY, log_pruning_tolerance=None)),
    ),
]


@pytest.mark.parametrize("mistake", PRUNED, ids=str)
def test_pruned_caches(mistake, models, record_property):
    record_property("mistake", mistake.check(models[1]))


# --- generation ------------------------------------------------------------------------------------------------------


def generate(name, says, **changes):
    options = dict(inputs=IDS, max_new_tokens=2, do_sample=False)
    return refused(name, lambda model: model.generate(**{**options, **made(model, changes)}), says)


GENERATE = [
    generate("ids beyond the vocabulary", "between 0 and 60", inputs=torch.full((1, 4), 61)),
    generate("quantized cache", "quantized cache", cache_implementation="quantized"),
    generate("unknown cache", "cache_implementation", cache_implementation="magic"),
    generate("mask of other tokens", r"it must be \(2, 9\)", attention_mask=ONES[:, :7]),
    generate(
        "cache of another batch",
        "for another batch",
        inputs=tokens(2, 12),
        past_key_values=lambda m: filled(m, IDS[:1]),
    ),
    generate("misspelt option", "max_new_token", max_new_token=3),
    generate("negative number of tokens", "max_new_tokens", max_new_tokens=-3),
]


@pytest.mark.parametrize("mistake", GENERATE, ids=str)
def test_generation(mistake, models, record_property):
    outcomes = {mistake.check(model) for model in models}
    record_property("mistake", outcomes.pop())


# --- saved folders ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fox")
    make("llama").save_pretrained(folder)
    return folder


def folder(name, says, change, load=AutoModelForCausalLM.from_pretrained, **options):
    def call(path):
        change(path)
        load(path, **options)

    return refused(name, call, says)


def edit(**changes):
    def change(path):
        text = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**text, **changes}))

    return change


def remove(name):
    return lambda path: (path / name).unlink()


FOLDERS = [
    folder(
        "folder of a newer format", "format version 2.*Upgrade", edit(format_version=2), AutoConfig.from_pretrained
    ),
    folder("layer types in a folder", "Leave layer_types out", edit(layer_types=["full_attention", "mamba"])),
    folder("negative heads in a folder", "num_attention_heads=-4", edit(num_attention_heads=-4)),
    folder("activation in a folder", "hidden_act='bogus'", edit(hidden_act="bogus")),
    folder("dtype in a folder", "dtype='float7'", edit(dtype="float7")),
    folder("rope in a folder", "rope_type='bogus'", edit(rope_parameters={"rope_type": "bogus", "rope_theta": 1e4})),
    folder("folder without weights", r"model\.safetensors", remove("model.safetensors")),
    folder("folder without a configuration", "config.json", remove("config.json")),
    folder(
        "no folder",
        "no_such_folder",
        lambda path: None,
        lambda path: FoxForCausalLM.from_pretrained("./no_such_folder"),
    ),
]


@pytest.mark.parametrize("mistake", FOLDERS, ids=str)
def test_folders(mistake, saved, tmp_path, record_property):
    shutil.copytree(saved, tmp_path / "fox")
    record_property("mistake", mistake.check(tmp_path / "fox"))
