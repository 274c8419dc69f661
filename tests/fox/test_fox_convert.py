"""Converters in memory: exact round trips, the Llama family with open gates, and refusals."""

import copy

import pytest
import torch
import transformers
from budget import load_cases, weights
from mistakes import refused
from tiny_fox import ROPE, check_logits, logits
from tiny_fox import SIZES as TINY
from tiny_fox import make_from as make

import hf_longctx.fox as fox
from hf_longctx.fox.convert import read_llama_config


def same_tensors(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    "folder, read, write",
    [("fox", fox.from_official, fox.to_official), ("fox_fla", fox.from_fla, fox.to_fla)],
    ids=["official", "fla"],
)
def test_there_and_back_gives_every_golden_checkpoint_again(golden, folder, read, write):
    count = 0
    for kind in ("forward", "decode", "generate"):
        for case, t in load_cases(golden / folder, kind):
            model = read(weights(t), case["config"])
            state_dict, config_dict = write(model)
            same_tensors(state_dict, weights(t))
            for name, value in case["config"].items():
                # None stands for a default, which we spell out; the ratio gives the size of the MLP, which we give
                if name in config_dict and value is not None and name != "hidden_ratio":
                    assert config_dict[name] == value, (case["name"], name)
            again = read(state_dict, config_dict)
            assert again.config.to_dict() == model.config.to_dict()
            same_tensors(again.state_dict(), model.state_dict())
            count += 1
    assert count >= 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        fox.FoxConfig(**TINY, rope_parameters=ROPE, tie_word_embeddings=True, decay_time_min=2, decay_time_max=9),
        fox.FoxConfig.pro(**TINY, rope_parameters=ROPE, qk_norm_shared=True, output_gate="silu", pad_token_id=3),
        fox.FoxConfig(**TINY, forget_gate="fixed", decay_time_min=2, decay_time_max=64, hidden_act="sigmoid"),
        fox.FoxConfig(**TINY, forget_gate="none", rope_parameters=ROPE, v_shift=True),
    ],
    ids=["llama", "pro", "fixed", "no gate"],
)
def test_fox_to_official_and_back(config, dtype):
    model = make(config, dtype)
    again = fox.from_official(*fox.to_official(model))
    ids = torch.arange(40)[None]
    assert again.dtype == dtype and not again.training
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_the_authors_plain_transformer():
    """The authors' config of a plain Transformer has a window, grouped heads and RoPE by default. Its class ignores
    QK-norm.
    """
    kept = dict(num_key_value_heads=2, rope_parameters=ROPE, forget_gate="none")
    model = make(fox.FoxConfig(**TINY, sliding_window=8, **kept))
    state_dict, _ = fox.to_fla(make(fox.FoxConfig(**TINY, num_key_value_heads=2)))
    state_dict = {name: tensor for name, tensor in state_dict.items() if "f_proj" not in name}
    for layer in (f"model.layers.{i}.mlp" for i in range(2)):
        gate, up = (state_dict.pop(f"{layer}.{x}_proj.weight") for x in ("gate", "up"))
        state_dict[f"{layer}.gate_proj.weight"] = torch.cat([gate, up])
    config_dict = dict(model_type="transformer-project_fox", vocab_size=61, hidden_size=32, intermediate_size=40)
    config_dict |= dict(num_hidden_layers=2, num_heads=4, num_kv_heads=2, rope_base=10000.0, window_size=8)
    read = fox.from_official(state_dict, {**config_dict, "qk_norm": True, "fgate_type": "full"})
    model.load_state_dict(read.state_dict())
    assert read.config.to_dict().items() >= dict(sliding_window=8, **kept).items()
    ids = torch.arange(40)[None]
    assert torch.equal(logits(read, ids), logits(model, ids))


def official():
    return fox.to_official(make(fox.FoxConfig.pro(**TINY)))


def test_every_tensor_is_accounted_for():
    state_dict, config_dict = official()
    del state_dict["model.norm.weight"], state_dict["model.layers.1.attn.k_proj.shift_proj.weight"]
    state_dict["model.layers.2.attn_norm.weight"] = torch.ones(32)
    state_dict["lm_head.weight"] = torch.ones(60, 32)
    with pytest.raises(ValueError) as error:
        fox.from_official(state_dict, config_dict)
    assert str(error.value).splitlines()[1:] == [
        "  missing: model.layers.1.attn.k_proj.shift_proj.weight",
        "  missing: model.norm.weight",
        "  shape of lm_head.weight is (60, 32), not (61, 32)",
        "  unknown: model.layers.2.attn_norm.weight",
    ]


def test_a_tied_head_may_be_absent_or_equal_but_not_different():
    model = make(fox.FoxConfig(**TINY, tie_word_embeddings=True))
    state_dict, config_dict = fox.to_fla(model)
    head = state_dict.pop("lm_head.weight")
    ids = torch.arange(9)[None]
    read = fox.from_fla(state_dict, config_dict)
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert torch.equal(logits(read, ids), logits(model, ids))
    for wrong in (head + 1, head[:-1]):
        with pytest.raises(ValueError, match=r"configuration:\n  tie_.* lm_head.weight is not equal to model.embed"):
            fox.from_fla({**state_dict, "lm_head.weight": wrong}, config_dict)


LLAMA = dict(TINY, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2)
WINDOW = dict(use_sliding_window=True, sliding_window=9)
SCALED = [
    dict(rope_type="dynamic", factor=2.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    dict(rope_type="longrope", factor=4.0, original_max_position_embeddings=16)
    | dict(short_factor=[1.1] * 4, long_factor=[3.0] * 4),
]
FAMILY = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "llama, tied, wide heads": transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True, head_dim=16),
    "llama with a padding id of -1": transformers.LlamaConfig(**LLAMA | dict(pad_token_id=-1)),
    "mistral with a window": transformers.MistralConfig(**LLAMA, sliding_window=9),
    "qwen2": transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen2 with a window": transformers.Qwen2Config(**LLAMA | WINDOW, max_window_layers=0),
    "qwen3": transformers.Qwen3Config(**LLAMA, head_dim=16, rms_norm_eps=1e-3),
} | {rope["rope_type"]: transformers.LlamaConfig(**LLAMA, rope_parameters=ROPE | rope) for rope in SCALED}


@pytest.mark.parametrize("config", FAMILY.values(), ids=FAMILY)
def test_a_llama_becomes_a_fox_that_says_the_same(config):
    model = make(copy.deepcopy(config))
    for length in (64, 96):  # within the context, and beyond it, where dynamic RoPE changes
        ids = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))
        expected = logits(model, ids)
        assert (logits(fox.from_llama(model), ids) - expected).abs().max() <= 1e-3
        closest = fox.from_llama(model, decay_time=1e15)
        check_logits(logits(closest, ids), expected)


def test_the_opened_gates_can_be_trained_and_the_original_is_untouched():
    model = make(transformers.LlamaConfig(**LLAMA))
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    before = copy.deepcopy(model.state_dict())
    converted = fox.from_llama(model, decay_time=640.0)
    gate = converted.model.layers[0].self_attn.f_proj
    torch.testing.assert_close(torch.sigmoid(gate.bias), torch.full((4,), -1 / 640.0).exp())
    assert converted.generation_config.temperature == 0.7
    ids = torch.arange(40)[None]
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    converted(ids, labels=ids).loss.backward()
    for name, parameter in converted.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    optimizer.step()
    same_tensors(dict(model.state_dict()), dict(before))


def writes(name, write, says, **changes):
    return refused(name, lambda: write(fox.FoxForCausalLM(fox.FoxConfig(**TINY, **changes))), says)


def reads(name, read, says, **config):
    return refused(name, lambda: read({}, config), says)


def keeps(name, says, model_type="llama", **config):
    return refused(name, lambda: read_llama_config(LLAMA | config | dict(model_type=model_type)), says)


SHIFTS = dict(k_shift=True, v_shift=True, output_norm=True)
LINEAR = ROPE | dict(rope_type="linear", factor=2.0)
MISTAKES = [
    writes("grouped heads", fox.to_official, "num_kv_heads=2.*not support grouped heads", num_key_value_heads=2),
    writes("activation", fox.to_official, "hidden_act must be .*got 'gelu'", qkv_bias=True, hidden_act="gelu"),
    writes("scaled RoPE", fox.to_official, "rope_parameters=.*linear", rope_parameters=LINEAR),
    writes("epsilon", fox.to_official, "qk_norm_eps=1e-06 .would become 1e-05", qk_norm=True, qk_norm_eps=1e-6),
    writes("shifts and norm", fox.to_fla, "output_norm=True.*k_shift=True.*v_shift=True", **SHIFTS),
    writes("a window", fox.to_fla, "window_size=8.*only in decoding", sliding_window=8),
    reads("another model", fox.from_official, "model_type must be .*got 'llama'", model_type="llama"),
    reads("FLA activation", fox.from_fla, "hidden_act must be .*got 'powlu'", hidden_act="powlu"),
    reads("FLA residuals", fox.from_fla, "not support attention residuals", attnres_block_size=4),
    keeps("biases", "output projection; mlp_bias=True", attention_bias=True, mlp_bias=True),
    keeps("window in some layers", "only some layers", "qwen3", **WINDOW, max_window_layers=1),
    keeps("unknown RoPE", "spiral.* not one supported RoPE", rope_scaling={"type": "spiral", "factor": 2.0}),
    keeps("RoPE per layer", "not one supported RoPE for all", "qwen3", rope_parameters={"full_attention": ROPE}),
    keeps("another family", "for conversion to FoX, got 'gemma'", "gemma"),
    keeps("quantized", "quantized models are not supported", quantization_config={"quant_method": "gptq"}),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_what_cannot_be_kept_is_refused(mistake):
    mistake.check()
