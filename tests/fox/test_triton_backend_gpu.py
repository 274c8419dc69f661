"""What only a GPU can show of attn_implementation="forgetting_triton": inductor's kernels around ours, CUDA graphs,
bf16.

The small models of test_triton_backend.py run on the GPU too, wherever there is one.
"""

import pytest
import torch


pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from budget import EPS
from test_triton_backend import DEVICE, check, checkpointed, draw, holes, loss_and_gradients
from tiny_fox import ROPE
from transformers import CompileConfig

from hf_longctx.fox import FoxConfig, FoxForCausalLM


LENGTH = 300


def make(backend="forgetting_triton"):
    """Heads of 64 dimensions, and every parameter far from its initial value."""
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
    """Two rows, one of them padded on the left."""
    return draw(2, LENGTH), holes(2, LENGTH, (0, 0), (0, LENGTH // 3))


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
    """As far from float32 as stock attention is, or less, and nothing changes in the second run of a layer."""
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
