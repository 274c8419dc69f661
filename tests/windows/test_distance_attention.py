"""Attention with weights of distances equals its definition, forward and backward."""

import pytest
import torch

from hf_longctx.windows.distance_attention import BLOCK, distance_attention


def definition(q, k, v, weights, sinks, scale, extra=None):
    """Compute the formula of the module docstring with dense matrices."""
    i = torch.arange(q.shape[2])
    distance = i[:, None] - i
    w = torch.where(distance >= 0, weights[:, distance.clamp(min=0)], 0.0)
    w = torch.where((i < sinks) & (distance >= 0), 1.0, w)
    w, k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim) for x, dim in ((w, 0), (k, 1), (v, 1)))
    s = scale * q @ k.mT
    largest = s.masked_fill(w == 0, -torch.inf).amax(-1, keepdim=True)
    p = w * torch.minimum(s, largest).exp()
    total = p.sum(-1, keepdim=True)
    if extra is not None:
        total = total + extra[:, None, None].exp()
    return (p / total) @ v


@pytest.mark.parametrize("tokens", [1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("has_extra", [False, True])
def test_equals_the_definition(tokens, heads, has_extra):
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(2, h, tokens, 8, dtype=torch.float64) for h in (heads, 2, 2))
    weights = torch.rand(2, tokens, dtype=torch.float64)
    weights[:, 0] = 1
    weights[0, 3:] = 0  # a window of head 0, and a gap of head 1
    weights[1, 10:100] = 0
    inputs = [x.requires_grad_() for x in (q, k, v, weights)]
    extra = torch.linspace(-1, 2, heads, dtype=torch.float64) if has_extra else None
    found = distance_attention(*inputs, sinks=4, scale=0.3, extra_logits=extra)
    expected = definition(*inputs, sinks=4, scale=0.3, extra=extra)
    assert torch.allclose(found, expected, atol=1e-12)
    gradient = torch.randn_like(found)
    found, expected = (torch.autograd.grad(output, inputs, gradient) for output in (found, expected))
    expected[3][0, 6:] = 0  # twice the window, and beyond
    for name, a, b in zip("qkvw", found, expected):
        assert torch.allclose(a, b, atol=1e-12), name


@pytest.mark.parametrize("mean", [0, 20])
def test_the_effects_of_keys_in_bfloat16(mean):
    """An effect is a difference: values with a large mean would otherwise lose it in bfloat16."""
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(1, h, 300, 32) for h in (4, 2, 2, 4))
    v += mean * torch.randn(1, 2, 1, 32)
    halves = [x.bfloat16() for x in (q, k, v, gradient)]
    effects = []
    for dtype in (torch.bfloat16, torch.float64):
        *inputs, gradient = (x.to(dtype) for x in halves)
        weights = (torch.arange(300) < 64).expand(2, -1).to(torch.float32 if dtype == torch.bfloat16 else dtype)
        output = distance_attention(*inputs, weights.requires_grad_(), sinks=4, scale=0.2)
        effects.append(torch.autograd.grad(output, weights, gradient)[0].double())
    assert (effects[0] - effects[1]).norm() < 0.005 * effects[1].norm()


def test_a_dropped_key_with_a_huge_logit_is_dropped():
    q = torch.ones(1, 1, 9, 4)
    k, v = torch.zeros(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    k[0, 0, 5] = 1e4
    weights = torch.tensor([[1.0, 1.0, 0, 0, 0, 0, 0, 0, 0]])
    found = distance_attention(q, k, v, weights, sinks=0, scale=1.0)
    assert torch.allclose(found[0, 0, 8], v[0, 0, 7:].mean(0), atol=1e-6)
