"""A model with attn_implementation="forgetting_triton" equals the eager one: masks, caches, gradients, errors.

On a CPU the kernels run in Triton's interpreter, slowly: the models and the lengths are tiny.
"""

import copy
import math
import os

import pytest
import torch
from commands import run


pytest.importorskip("triton")
from budget import DEVICE, EPS, runs_triton
from tiny_fox import VARIANTS, check_logits, checkpointed, close_gates, in_chunks, logits, make_from, tokens
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_longctx.fox import FoxConfig, PrunedCache, backend_fox
from hf_longctx.fox.attention_fox import folded_width
from hf_longctx.fox.backend_fox import logit_bound_of_norms
from scripts.bench.gpu.pruned_blocks import count_pruned_blocks


pytestmark = runs_triton
PRO = "pro with grouped heads and rope"


def make(variant, backend="forgetting_triton", **changes):
    """Return a model with one layer. All its parameters are far from their initial values."""
    config = VARIANTS[variant]()
    for name, value in (dict(num_hidden_layers=1) | changes).items():
        setattr(config, name, value)
    model = make_from(config)
    model.set_attn_implementation(backend)
    return model.to(DEVICE)


def draw(batch, length, seed=1):
    return tokens(batch, length, seed).to(DEVICE)


def holes(batch, length, *spans):
    """attention_mask of ones, with zeros in [start, stop) of each row."""
    mask = torch.ones(batch, length, dtype=torch.long, device=DEVICE)
    for row, (start, stop) in zip(mask, spans):
        row[start:stop] = 0
    return mask


def check(got, want, rounding=100 * EPS):
    """Assert equality up to float32 rounding and the weight that pruning may drop."""
    share = 2 * math.exp(FoxConfig().log_pruning_tolerance)
    torch.testing.assert_close(got, want, atol=(rounding + share) * want.abs().max().item(), rtol=0)


def loss_and_gradients(model, ids, mask=None, **kwargs):
    labels = ids  # padding is not a label, and does not predict one
    if mask is not None:
        labels = ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)
    out = model(ids, attention_mask=mask, labels=labels, use_cache=False, **kwargs)
    out.loss.backward()
    real = slice(None) if mask is None else mask.bool()
    return out.logits.detach()[real], {name: p.grad for name, p in model.named_parameters()}


def packed(**borders):
    return draw(1, 38), {name: torch.tensor(x, dtype=torch.int32, device=DEVICE) for name, x in borders.items()}


ROWS = {
    "causal": lambda: (draw(1, 38), {}),
    "left padding": lambda: (draw(2, 38), {"mask": holes(2, 38, (0, 0), (0, 30))}),
    "right padding": lambda: (draw(2, 38), {"mask": holes(2, 38, (3, 38), (30, 38))}),
    "padding in the middle": lambda: (draw(2, 38), {"mask": holes(2, 38, (5, 9), (33, 36))}),
    "packed": lambda: packed(position_ids=[[*range(5), 0, *range(20), *range(12)]]),
    "cu_seq_lens": lambda: packed(cu_seq_lens_q=[0, 5, 6, 26, 38]),
}


@pytest.mark.parametrize(
    "variant, kind",
    [
        ("one gate per key head", "causal"),
        ("window", "packed"),
        ("llama", "left padding"),
        ("no gate", "right padding"),
        (PRO, "packed"),
        ("pro with a window", "padding in the middle"),
    ],
)
def test_logits_and_gradients_of_all_parameters_equal_eager(variant, kind):
    ids, kwargs = ROWS[kind]()
    got, gradients = loss_and_gradients(make(variant), ids, **kwargs)
    want, expected = loss_and_gradients(make(variant, "eager"), ids, **kwargs)
    check(got, want)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        check(gradients[name], gradient)


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=48),
    "pruned": lambda model: PrunedCache(model, 1e-6, prune_every=4),
}
CHUNKED = [  # variant, padding of two rows, chunks, cache: pair-wise
    ("llama", None, [20, 1, 17], "static"),
    ("one gate per key head", [(0, 0), (0, 15)], [19, 19], "dynamic"),
    (PRO, [(0, 4), (2, 9)], [18, 1, 3, 16], "dynamic"),
    (PRO, [(0, 0), (0, 5)], [80, 1, 1], "pruned"),
    ("pro with a window", [(0, 3), (22, 25)], [20, 17, 1], "static"),
    ("no gate", [(0, 3), (0, 0)], [18, 1, 19], "static"),
]


@pytest.mark.parametrize("variant, spans, chunks, cache", CHUNKED)
def test_any_cache_and_any_chunks_equal_one_forward(variant, spans, chunks, cache):
    ids, model = draw(2, sum(chunks)), make(variant)
    mask = None if spans is None else holes(2, sum(chunks), *spans)
    cache = CACHES[cache](model)
    got = in_chunks(model, ids, cache, chunks, mask)
    want = logits(make(variant, "eager"), ids, attention_mask=mask, use_cache=False)
    real = slice(None) if mask is None else mask.bool()
    check(got[real], want[real])
    assert not isinstance(cache, PrunedCache) or cache.dropped.any()


def test_flash_attention_4_gets_a_width_whose_gradients_are_right(monkeypatch):
    """A multiple of 32 where a backward pass may follow; the fold alone is wide enough for everything else."""
    widths = []

    def flash(module, query, key, value, attention_mask, **kwargs):
        widths.append({x.shape[-1] for x in (query, key, value)})
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        return backend_fox.eager_attention_forward(module, query, key, value, mask, kwargs["scaling"])

    monkeypatch.setattr(backend_fox, "flash_attention_forward", flash)
    for name in ("flash_attention_3", "flash_attention_4"):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, flash)
    ids, eager = draw(1, 6), make("llama", "eager")
    folded = folded_width(eager.config.head_dim, 1, torch.device(DEVICE))
    for name, grad, width in (("3", True, folded), ("4", False, folded), ("4", True, 32)):
        eager.config._attn_implementation = f"flash_attention_{name}"
        with torch.set_grad_enabled(grad):
            got = eager(ids, use_cache=False).logits.detach()
        assert widths.pop() == {width}
        check(got, logits(make("llama", "eager"), ids, use_cache=False))


def test_a_gradient_through_the_cache():
    ids, gradients = draw(1, 34), []
    for backend in ("forgetting_triton", "eager"):
        model = make("llama", backend)
        cache = model(ids[:, :14]).cache
        model(ids[:, 14:], cache=cache).logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[1].items():
        check(gradients[0][name], gradient)


def test_autocast_and_checkpointing():
    ids = draw(1, 20)
    _, plain = loss_and_gradients(make(PRO).train(), ids)
    model = checkpointed(make(PRO).train())
    for name, gradient in loss_and_gradients(model, ids)[1].items():
        check(gradient, plain[name])
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got, want = (logits(make(PRO, backend), ids) for backend in ("forgetting_triton", "eager"))
    exact = logits(make(PRO, "eager"), ids)
    assert (got - exact).norm() <= 2 * (want - exact).norm()


# --- compilation -----------------------------------------------------------------------------------------------------


def compiled(model, **options):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@torch._dynamo.config.patch(specialize_float=True)  # else the graph is made again once its numbers are known
def test_training_on_rows_of_any_length_compiles_to_one_graph():
    model = make("llama")
    model.model.forward = compiled(model.model.forward, dynamic=True)
    for length in (20, 25):
        ids, mask = draw(1, length), holes(1, length, (0, 9))
        check(loss_and_gradients(model, ids, mask)[0], loss_and_gradients(make("llama", "eager"), ids, mask)[0])
    assert graphs() == 1


COMPILED = [(v, backend, "packed") for v in ("llama", PRO) for backend in ("sdpa", "forgetting_triton")]
COMPILED += [(PRO, "forgetting_triton", "causal"), ("llama", "sdpa", "cu_seq_lens")]


@pytest.mark.parametrize("variant, backend, kind", COMPILED)
def test_a_compiled_training_step_is_one_graph_with_the_gradients_of_eager(variant, backend, kind):
    ids, options = ROWS[kind]()
    model = make(variant, backend).train()
    model.model.forward = compiled(model.model.forward)
    got, want = (loss_and_gradients(m, ids, **options) for m in (model, make(variant, backend).train()))
    check(got[0], want[0])
    for name, gradient in want[1].items():
        check(got[1][name], gradient)
    assert graphs() == 1


def test_decoding_with_a_static_cache_compiles_to_one_graph():
    """One graph for every step: how many keys there are is known to the device only."""
    ids, model = draw(1, 20), make("llama")
    cache, want = StaticCache(config=model.config, max_cache_len=32), logits(model, ids, use_cache=False)
    check(logits(model, ids[:, :17], cache=cache), want[:, :17])
    check(in_chunks(compiled(model), ids[:, 17:], cache, 1), want[:, 17:])
    assert graphs() == 1


# --- pruning ---------------------------------------------------------------------------------------------------------


def test_closing_gates_are_pruned_and_nothing_changes():
    ids, bias, variant = draw(1, 68), -12.0, PRO
    with count_pruned_blocks() as blocks:
        pruned = logits(close_gates(make(variant), bias), ids)
    assert 0 < blocks.pruned < blocks.total
    with count_pruned_blocks() as blocks:
        dense = logits(close_gates(make(variant, log_pruning_tolerance=None), bias), ids)
    assert blocks.total == 0
    check(pruned, dense)


def test_decoding_leaves_out_what_is_forgotten():
    """Early keys of the cache are overwritten with NaN: the pruned decoding never reads them, the dense one does."""
    model, ids = close_gates(make(PRO), -12.0), draw(1, 50)
    want, cache = logits(model, ids, use_cache=False)[:, -1:], DynamicCache(config=model.config)
    logits(model, ids[:, :-1], cache=cache)
    cache.layers[0].values[:, :, :32] = torch.nan
    cache.layers[0].keys[:, :, :32, : model.config.head_dim] = torch.nan
    check(logits(model, ids[:, -1:], cache=copy.deepcopy(cache)), want)
    model.config.log_pruning_tolerance = None
    assert logits(model, ids[:, -1:], cache=cache).isnan().all()


def test_rope_brings_the_largest_weights_of_both_norms_together():
    """It turns dimension 0 of a query into dimension D / 2 of a key, almost wholly 11 tokens apart: 11 = 7 pi / 2."""
    model = make_from(VARIANTS[PRO]())
    layer, largest = model.model.layers[0].self_attn, {"q": 0, "k": model.config.head_dim // 2}
    heads = {}
    for name, norm, number in (("q", layer.q_norm, 4), ("k", layer.k_norm, 2)):
        norm.weight.data.fill_(0.1).view(number, -1)[:, largest[name]] = torch.arange(2.0, 2.0 + number)
        x = torch.zeros(1, 12, number, model.config.head_dim)
        x[..., largest[name]] = 1e3  # far above the epsilon of the norm
        heads[name] = norm(x).transpose(1, 2)
    q, k = apply_rotary_pos_emb(heads["q"], heads["k"], *model.model.rotary_emb(x, torch.arange(12)[None]))
    reached = (layer.scaling * q @ k.repeat_interleave(2, dim=1).mT).abs().amax((0, 2, 3))
    largest, unit = logit_bound_of_norms(layer, 4)
    assert (0.9 * unit * largest <= reached).all() and (reached <= unit * largest).all()


def test_an_adapter_in_the_place_of_a_norm():
    """PEFT's LN tuning still has the weight that it replaces, so we only read the weights of our own norms."""
    attention = make(PRO).model.layers[0].self_attn
    assert logit_bound_of_norms(attention, 4)[0].shape == (4,)
    attention.q_norm = torch.nn.Sequential(attention.q_norm)
    attention.q_norm.weight = attention.q_norm[0].weight
    assert logit_bound_of_norms(attention, 4) == (None, 1.0)


def test_offloaded_weights():
    """They are in place while their own module runs, so their bound is not known to the attention."""
    accelerate = pytest.importorskip("accelerate")
    ids, model = draw(1, 18), make(PRO)
    want = logits(model, ids, use_cache=False)
    accelerate.cpu_offload(model, torch.device(DEVICE))
    assert logit_bound_of_norms(model.model.layers[0].self_attn, 4) == (None, 1.0)
    check(in_chunks(model, ids, DynamicCache(config=model.config), [17, 1]), want)
    with pytest.raises(ValueError, match="offloaded"):
        PrunedCache(model)


# --- code next to the weights ----------------------------------------------------------------------------------------

REMOTE = """
import sys
import torch
from hf_longctx.fox import FoxForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

installed = FoxForCausalLM.from_pretrained(sys.argv[1], attn_implementation="forgetting_triton")
remote = get_class_from_dynamic_module("modeling_fox.FoxForCausalLM", sys.argv[1])
assert remote is not FoxForCausalLM
remote = remote.from_pretrained(sys.argv[1], attn_implementation="forgetting_triton")
remote.config.log_pruning_tolerance = None
ids = torch.arange(3, 23)[None]
for model in (installed, remote):
    for length in (20, 2):  # forward and decoding kernel
        with torch.no_grad():
            print(model(ids[:, :length], use_cache=False).logits.sum().item())
"""


def test_remote_code_beside_the_package(tmp_path):
    """Each copy of the files has operators of its own."""
    make("llama", log_pruning_tolerance=None).cpu().save_pretrained(tmp_path / "a modèle")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = run(["python", "-c", REMOTE, tmp_path / "a modèle"], env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    installed, remote = done.stdout.split()[:2], done.stdout.split()[2:]
    assert installed == remote


def test_masks_of_four_dimensions_need_gates():
    """With gates, the model computes attention under a 4D mask itself, with every implementation."""
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=DEVICE).tril()
    model, ids = make("llama"), draw(1, 6)
    check_logits(logits(model, ids, attention_mask=mask), logits(model, ids))
    with pytest.raises(NotImplementedError, match="for a custom mask"):
        make("no gate")(ids, attention_mask=mask)
