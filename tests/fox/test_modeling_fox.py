"""FoX behaves like a Llama: caches, generation, padding, packing, dtypes, training, saving."""

import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from budget import EPS
from tiny_fox import (
    TINY,
    both_blocks,
    check_logits,
    checkpointed,
    close_gates,
    every_variant,
    filled,
    logits,
    make,
    tokens,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, DynamicCache

from hf_longctx.fox import (
    FoxConfig,
    FoxForCausalLM,
    FoxForSequenceClassification,
    compat_fox,
    forgetting_attention_ref,
)
from hf_longctx.fox.modeling_fox import decay_time_bias
from hf_longctx.fox.state_fox import Call


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_pro_layer_is_that_of_the_paper(backend):
    """Section 3 and Figure 1, for one sequence and head by head, without RoPE."""
    layer = make("pro with grouped heads and rope", backend).model.layers[0].self_attn
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    D = layer.head_dim

    def norm(y, weight, eps=layer.config.qk_norm_eps):  # RMSNorm
        return weight * y / (y.square().mean(-1, keepdim=True) + eps).sqrt()

    def shift(y, w):  # eq. 14: a_t of the predecessor, whose first is 0
        a = (x @ w).sigmoid()[:, None]
        return a * torch.cat([torch.zeros(1, D), y[:-1]]) + (1 - a) * y

    outputs = []
    for h in range(4):
        kv = h // 2  # two query heads share a key head
        rows, kv_rows = slice(h * D, h * D + D), slice(kv * D, kv * D + D)
        q = norm(x @ layer.q_proj.weight[rows].T, layer.q_norm.weight[rows])
        k = shift(x @ layer.k_proj.weight[kv_rows].T, layer.k_shift_proj.weight[kv])
        k = norm(k, layer.k_norm.weight[kv_rows])
        v = shift(x @ layer.v_proj.weight[kv_rows].T, layer.v_shift_proj.weight[kv])
        log_f = F.logsigmoid(x @ layer.f_proj.weight[h] + layer.f_proj.bias[h])
        o = forgetting_attention_ref(*(y[None, None] for y in (q, k, v, log_f)))[0, 0]
        gate = torch.sigmoid(x @ layer.g_proj.weight[rows].T)
        outputs.append(norm(o, layer.o_norm.weight[rows], layer.config.rms_norm_eps) * gate)
    expected = torch.cat(outputs, -1) @ layer.o_proj.weight.T
    mask = None if backend == "sdpa" else torch.full((20, 20), -torch.inf).triu(1)[None, None]
    torch.testing.assert_close(layer(x[None], call=Call("sdpa", mask))[0][0], expected, atol=2e-5, rtol=1e-4)


@both_blocks
@pytest.mark.parametrize("padding", ["left", "right", "middle"])
def test_padding_changes_nothing_on_real_tokens(variant, padding):
    model, ids = make(variant), tokens(batch=2, length=12)
    alone = logits(model, ids[:1])
    at = {"left": 0, "right": 12, "middle": 7}[padding]
    row = torch.cat([ids[0, :at], torch.zeros(4, dtype=torch.long), ids[0, at:]])
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, at : at + 4] = 0
    batch = torch.stack([row, tokens(1, 16, seed=5)[0]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = logits(model, batch, attention_mask=mask, position_ids=positions)[0, mask[0].bool()]
    check_logits(padded, alone[0])


def test_a_float16_mask_outweighs_any_decay():
    model = close_gates(make("llama", "eager").half())
    first, second = tokens(1, 200), tokens(1, 200)
    second[0, -1] = 3 + (second[0, -1] - 2) % 50
    assert torch.equal(logits(model, first)[:, :-1], logits(model, second)[:, :-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both_blocks
def test_half_precision_is_no_worse_than_a_llama_would_be(variant, dtype):
    """The decay in the keys must cost nothing beyond the rounding that the dtype costs a model without a gate."""
    ids, error = tokens(1, 200), {}
    for kind in (variant, "no gate"):
        exact = logits(make(kind), ids)
        half = logits(make(kind).to(dtype), ids).float()
        with torch.autocast("cpu", dtype=dtype):
            autocast = logits(make(kind), ids).float()
        error[kind] = max((x - exact).norm() / exact.norm() for x in (half, autocast))
    assert error[variant] <= 3 * error["no gate"]


def wrap_layers(model):
    """Checkpoint the layers as FSDP does. The second run of a layer must not read its own tokens from a cache."""
    model.model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)


@every_variant
def test_every_parameter_learns_and_checkpointing_changes_no_gradient(variant):
    gradients, ids = [], tokens()
    for checkpointing in (lambda model: None, checkpointed, wrap_layers):
        model = make(variant).train()
        checkpointing(model)
        model(ids, labels=ids, use_cache=True).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0])


def test_logits_to_keep():
    model, ids = make("pro"), tokens()
    full = logits(model, ids)
    torch.testing.assert_close(logits(model, ids, logits_to_keep=3), full[:, -3:])
    torch.testing.assert_close(logits(model, ids, logits_to_keep=torch.tensor([2, 5])), full[:, [2, 5]])


def test_gates_start_with_decay_times_on_a_logarithmic_scale():
    times = -1 / F.logsigmoid(decay_time_bias(3, 2, 512).double())
    # bias b = log(1 / expm1(1 / T)) of order log T in float32, and dT / db of order T
    torch.testing.assert_close(times, torch.tensor([2.0, 32.0, 512.0]).double(), atol=0, rtol=8 * EPS)


def test_new_weights_have_the_distribution_of_the_official_code():
    """Every matrix is normal with a standard deviation of 0.02, also an output projection; a gate is half open."""
    torch.manual_seed(0)
    model = FoxForCausalLM(FoxConfig.pro(**TINY | dict(hidden_size=64, num_hidden_layers=4, pad_token_id=None)))
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert (weight == (0.0 if name.endswith("f_proj.bias") else 1.0)).all(), name
        else:
            limit = 4 / weight.numel() ** 0.5  # four standard errors of the mean, and more than four of the deviation
            assert weight.mean().abs() < 0.02 * limit and (weight.std() / 0.02 - 1).abs() < limit, name


@pytest.mark.parametrize(
    "hidden_size, output_norm, low, high", [(256, True, 5, 6.5), (256, False, 0.3, 0.6), (1536, True, 0.9, 1.1)]
)
def test_an_output_norm_makes_attention_larger_than_the_mlp_of_a_narrow_model(hidden_size, output_norm, low, high):
    """At the start, a normed attention has a size of 0.02 sqrt(d) / 2. The MLP's size grows as d^1.5."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=hidden_size, num_attention_heads=hidden_size // 64, num_hidden_layers=1)
    sizes |= dict(intermediate_size=-(-hidden_size * 7 // 3 // 256) * 256, decay_time_min=4, decay_time_max=256)
    model, size = FoxForCausalLM(FoxConfig.pro(**sizes, output_norm=output_norm, pad_token_id=None)), {}
    layer = model.model.layers[0]
    layer.self_attn.register_forward_hook(lambda module, _, y: size.update(attention=y[0].std().item()))
    layer.mlp.register_forward_hook(lambda module, _, y: size.update(mlp=y.std().item()))
    with torch.no_grad():
        model(torch.randint(64, (1, 256)))
    if output_norm:
        assert size["attention"] == pytest.approx(0.02 * hidden_size**0.5 / 2, rel=0.1)
    assert low < size["attention"] / size["mlp"] < high


def test_initial_weights_from_scratch_and_around_loaded_ones(tmp_path):
    full = FoxForCausalLM(FoxConfig(**TINY))
    gate = full.model.layers[0].self_attn.f_proj
    assert not gate.bias.any() and 0.01 < gate.weight.std() < 0.03
    gate.bias.data.fill_(7.0)
    full.save_pretrained(tmp_path)
    loaded = FoxForCausalLM.from_pretrained(tmp_path)
    assert (loaded.model.layers[0].self_attn.f_proj.bias == 7.0).all()


def test_a_folder_can_be_loaded_with_another_depth_or_window(tmp_path):
    make("llama").save_pretrained(tmp_path)
    changed = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1, sliding_window=7)
    assert changed.config.layer_types == ["sliding_attention"]
    first_layer = make("window")  # has the same weights
    del first_layer.model.layers[1]
    check_logits(logits(changed, tokens()), logits(first_layer, tokens()))


def test_a_backend_that_would_ignore_the_gate_is_refused():
    model = make("llama")
    model.config._attn_implementation = "some_engine"
    with pytest.raises(ValueError, match="not known to compute forgetting attention"):
        model(tokens())


# --- both names of the cache argument, with every version of transformers ---

both_names = pytest.mark.parametrize("name", ["cache", "past_key_values"])


def warned(name):
    """Expect the warning about the old name, which transformers gives since 5.24."""
    if name == compat_fox.CACHE or compat_fox.CACHE == "past_key_values":
        return nullcontext()
    return pytest.warns(FutureWarning, match="`past_key_values` is deprecated")


def check_names(output, cache):
    assert output.cache is output.past_key_values is cache
    assert pickle.loads(pickle.dumps(output)).cache.get_seq_length() == cache.get_seq_length()
    output.cache = None  # code that only needs the logits does this
    assert output.past_key_values is None


@both_names
def test_calls_take_and_return_both_names(name):
    model, ids = make("pro"), tokens(2, 9)
    for read in (model, model.model, FoxForSequenceClassification(model.config)):
        cache = DynamicCache(config=model.config)
        with warned(name), torch.no_grad():
            output = read(ids, **{name: cache})
        assert cache.get_seq_length() == 9
        check_names(output, cache)
    cache = filled(model)
    for part in ("model.layers.1", "model.layers.1.self_attn"):
        with warned(name), torch.no_grad():
            model.get_submodule(part)(torch.randn(2, 1, 32), **{name: cache})
    assert cache.get_seq_length(1) == 11


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@both_names
def test_generate_takes_and_returns_both_names(options, name):
    model, ids, cache = make("pro"), tokens(1, 9), DynamicCache(config=make("pro").config)
    options = options | dict(max_new_tokens=3, do_sample=False)
    with warned(name):
        output = model.generate(ids, return_dict_in_generate=True, **{name: cache}, **options)
    check_names(output, cache)
    assert output.sequences.tolist() == model.generate(ids, **options).tolist()
