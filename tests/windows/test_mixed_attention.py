"""A weighted sum of windows equals its definition, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from hf_longctx.windows.mixed_attention import BLOCK, mixed_attention


def definition(q, k, v, weights, sizes, sinks, scale, extra=None):
    """Compute the formula of the module docstring with dense matrices."""
    k, v, weights = (x.repeat_interleave(q.shape[1] // len(weights), dim) for x, dim in ((k, 1), (v, 1), (weights, 0)))
    i = torch.arange(q.shape[2])
    distance = i[:, None] - i
    output = torch.zeros_like(q)
    for w, size in enumerate(sizes):
        visible = (distance >= 0) & ((distance < size) | (i < sinks))
        p = (scale * q @ k.mT).masked_fill(~visible, -torch.inf).exp()
        total = p.sum(-1, keepdim=True)
        if extra is not None:
            total = total + extra[:, None, None].exp()
        output = output + weights[:, w, None, None] * (p / total @ v)
    return output


@pytest.mark.parametrize("tokens", [1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("has_extra", [False, True])
def test_equals_the_definition(tokens, heads, sinks, has_extra):
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(2, h, tokens, 8, dtype=torch.float64) for h in (heads, 3, 3))
    weights, sizes = F.one_hot(torch.tensor([0, 2, 3]), 4).double(), torch.tensor([1, 16, 100, 2 * BLOCK + 7])
    inputs = [x.requires_grad_() for x in (q, k, v, weights)]
    extra = torch.linspace(-1, 2, heads, dtype=torch.float64) if has_extra else None
    found = mixed_attention(*inputs, sizes, sinks=sinks, scale=0.3, extra_logits=extra)
    expected = definition(*inputs, sizes, sinks=sinks, scale=0.3, extra=extra)
    assert torch.allclose(found, expected, atol=1e-12)
    gradient = torch.randn_like(found)
    found, expected = (torch.autograd.grad(output, inputs, gradient) for output in (found, expected))
    for name, a, b in zip("qkvw", found, expected):
        assert torch.allclose(a, b, atol=1e-11), name


@pytest.mark.parametrize("mean", [0, 20])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_effects_in_bfloat16(mean, autocast):
    """An effect is a difference: large logits, and values with a large mean, would otherwise lose it in bfloat16."""
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(1, h, 300, 32) for h in (4, 2, 2, 4))
    q *= 8
    v += mean * torch.randn(1, 2, 1, 32)
    halves = [x.bfloat16() for x in (q, k, v, gradient)]
    outputs, effects = [], []
    for dtype in (torch.bfloat16, torch.float64):
        *inputs, gradient = (x.to(dtype) for x in halves)
        weights = torch.tensor([[0, 1, 0], [0, 1, 0]], dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
        sizes = torch.tensor([16, 64, 300])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == torch.bfloat16):
            output = mixed_attention(*inputs, weights.requires_grad_(), sizes, sinks=4, scale=0.2)
        outputs.append(output.detach().double())
        effects.append(torch.autograd.grad(output, weights, gradient)[0].double().diff(dim=-1))
    assert (outputs[0] - outputs[1]).norm() < 0.005 * outputs[1].norm()
    assert (effects[0] - effects[1]).norm() < 0.005 * effects[1].norm()


def test_a_dropped_key_with_a_huge_logit_is_dropped():
    q = torch.ones(1, 1, 9, 4)
    k, v = torch.zeros(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    k[0, 0, 5] = 1e4
    weights = torch.tensor([[1.0, 0.0]]).requires_grad_()
    found = mixed_attention(q, k, v, weights, torch.tensor([2, 9]), sinks=0, scale=1.0)
    assert torch.allclose(found[0, 0, 8], v[0, 0, 7:].mean(0), atol=1e-6)
    (effect,) = torch.autograd.grad(found[0, 0, 8].sum(), weights)
    assert effect[0, 1] == pytest.approx(v[0, 0, 5].sum().item(), abs=1e-6)
    assert effect[0, 0] == 0, "all keys of the window underflow"
