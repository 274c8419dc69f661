"""Tests that need a GPU: the block sizes of the tile table, long sequences, 64-bit offsets, Inductor.

The small cases of test_operator.py, test_triton_fox.py and test_triton_backend.py run on the GPU too, if there is one.
"""

import math

import pytest
import torch


pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from budget import EPS, check_budget, check_run, draw, error, padding, run, run_exact, run_plain
from test_triton_backend import DEVICE, check, holes, loss_and_gradients
from test_triton_backend import draw as draw_ids
from test_triton_fox import check_output, check_same_bits, largest_logit
from tiny_fox import ROPE, checkpointed
from transformers import CompileConfig

from hf_longctx import forgetting_attention
from hf_longctx.fox import FoxConfig, FoxForCausalLM
from hf_longctx.fox.triton_fox import triton_attention
from scripts.bench.gpu.pruned_blocks import count_pruned_blocks


BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("D", [16, 32, 64, 72, 80, 128, 192, 256])
def test_every_row_of_the_tile_table(D, dtype):
    inputs, mask = draw(2, 4, 2, 300, 517, D, dtype=dtype), padding(517, (0, 517), (230, 500))
    check_run(run(forgetting_attention, *inputs, attention_mask=mask), inputs, attention_mask=mask)
    inputs = draw(1, 2, 1, 517, 517, D, dtype=dtype)
    for bound in (None, largest_logit(*inputs[:2])):  # None: the kernel uses a running maximum
        check_run(run(triton_attention, *inputs, logit_bound=bound), inputs)


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("D", [64, 128])
def test_lengths_beside_the_borders_of_tiles(D, T):
    inputs = draw(2, 2, 1, T, T, D, dtype=BF16)
    check_run(run(triton_attention, *inputs), inputs)


@pytest.mark.parametrize("D", [64, 128])
def test_no_races(D):
    check_same_bits(draw(2, 8, 4, 4096, 4096, D, dtype=BF16), 10)


@pytest.mark.parametrize("Tq", [1, 7, 16])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_decoding_long_contexts(D, Tq):
    *inputs, _ = draw(2, 8, 2, Tq, 20_011, D, dtype=BF16, openness=8.0)
    check_output(triton_attention(*inputs), inputs)


def test_131072_tokens_with_strong_gates():
    """c below -1e5, gradients included; the definition needs only the keys that the last rows still remember."""
    T, rows, near = 131072, 100, 600
    q, k, v, log_f, do = draw(1, 2, 1, T, T, 64, dtype=BF16)
    log_f = -2 * torch.rand_like(log_f)
    assert log_f.sum(-1).max() < -1e5
    do[:, :, :-rows] = 0
    fast = run(triton_attention, q, k, v, log_f, do)
    cut = (q[:, :, -near:], k[:, :, -near:], v[:, :, -near:], log_f[..., -near:], do[:, :, -near:])
    fast, plain, exact = ([x[:, :, -rows:] for x in results] for results in (fast, run_plain(*cut), run_exact(*cut)))
    check_budget(fast, plain, exact, cut)


def test_offsets_beyond_32_bits():
    """2.2e9 elements in q alone, stored as (B, T, H, D); some 50 GB. What is last depends on the last window alone."""
    B, H, T, D, rows = 1, 132, 131072, 128, 100
    q, k, v, do = (torch.randn(B, T, H, D, device="cuda", dtype=BF16).transpose(1, 2) for _ in range(4))
    inputs = q, k, v, torch.full((B, H, T), -0.1, device="cuda"), do
    fast = [x[:, -2:, -rows:] for x in run(forgetting_attention, *inputs, window=512)]
    cut = [x[:, -2:, T - 700 :] for x in inputs]
    plain, exact = ([x[:, :, -rows:] for x in f(*cut, window=512)] for f in (run_plain, run_exact))
    check_budget(fast, plain, exact, cut)


def test_pruning_at_16k():
    inputs = draw(1, 4, 4, 16384, 16384, 64, dtype=BF16, openness=1.0)
    norms = [x.float().norm(dim=-1).amax(-1) for x in inputs[:2]]
    bound = {"logit_bound": norms[0] * norms[1] * 64**-0.5}
    dense = run(triton_attention, *inputs, **bound)
    with count_pruned_blocks() as blocks:
        pruned = run(triton_attention, *inputs, log_pruning_tolerance=-10.0, **bound)
    assert blocks.pruned > 0.7 * blocks.total
    for d, p in zip(dense, pruned):
        assert error(p, d) < 20 * math.exp(-10.0) * d.norm()


@pytest.mark.parametrize("Tq", [333, 3])
def test_inductor(Tq):
    inputs = draw(2, 4, 2, Tq, 333, 64, dtype=BF16)
    attention = torch.compile(lambda *x: triton_attention(*x, log_pruning_tolerance=-10.0), fullgraph=True)
    if Tq == 3:
        with torch.no_grad():
            got, want = ([f(*inputs[:4])] for f in (attention, triton_attention))
    else:
        got, want = run(attention, *inputs), run(triton_attention, *inputs)
    for g, w in zip(got, want):
        assert error(g, w) < 20 * math.exp(-10.0) * w.norm()


# --- models: inductor's kernels around ours, CUDA graphs, bf16 ---

LENGTH = 300


def make(backend="forgetting_triton"):
    """Return a model with head_dim=64. All its parameters are far from their initial values."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    gates = dict(decay_time_min=2, decay_time_max=100)
    model = FoxForCausalLM(FoxConfig.pro(**sizes, **gates, num_key_value_heads=2, rope_parameters=ROPE)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.set_attn_implementation(backend)
    return model.to(DEVICE)


def rows():
    """Return two rows, one of them padded on the left."""
    return draw_ids(2, LENGTH), holes(2, LENGTH, (0, 0), (0, LENGTH // 3))


def rel(x, exact):
    return ((x - exact).norm() / exact.norm()).item()


def counters():
    return torch._dynamo.utils.counters


def test_a_training_step_under_inductor():
    want, expected = loss_and_gradients(make("eager"), *rows())
    torch.compiler.reset()
    model = make()
    model.model.forward = torch.compile(model.model.forward, fullgraph=True)
    got, gradients = loss_and_gradients(model, *rows())
    check(got, want, rounding=2000 * EPS)
    for name, gradient in expected.items():
        assert rel(gradients[name], gradient) < 1e-3, name


def test_generation_with_a_static_cache_under_cuda_graphs():
    ids, mask = (x[:, -60:] for x in rows())
    mask[1, :20] = 0
    settings = dict(max_new_tokens=30, do_sample=False, eos_token_id=None, attention_mask=mask)
    settings |= dict(return_dict_in_generate=True, output_logits=True)
    want = make("eager").generate(ids, **settings, use_cache=False)
    torch.compiler.reset()
    counters().clear()
    compilation = CompileConfig(fullgraph=True, mode="reduce-overhead")
    got = make().generate(ids, **settings, cache_implementation="static", compile_config=compilation)
    assert counters()["stats"]["unique_graphs"] == 1
    assert counters()["inductor"]["cudagraph_skips"] == 0
    assert torch.equal(got.sequences, want.sequences)
    for x, y in zip(got.logits, want.logits):
        check(x, y, rounding=2000 * EPS)


def test_bfloat16_autocast_with_checkpointing():
    """The error is at most that of stock attention, and the second run of a layer gives equal results."""
    _, exact = loss_and_gradients(make("eager").train(), *rows())
    gradients = {}
    for name, backend in (("plain", "forgetting_triton"), ("twice", "forgetting_triton"), ("stock", "sdpa")):
        model = make(backend).train()
        model = checkpointed(model) if name == "twice" else model
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            _, gradients[name] = loss_and_gradients(model, *rows())
    for name, gradient in exact.items():
        assert rel(gradients["twice"][name], gradients["plain"][name]) < 1e-3, name
        assert rel(gradients["plain"][name], gradient) <= 2 * rel(gradients["stock"][name], gradient) + 1e-3, name
