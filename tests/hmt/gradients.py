"""Computing and comparing gradients, for the tests."""

import torch
from tiny_hmt import ROUNDING


def gradients(model):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same_gradients(a, b, rounding=ROUNDING):
    """Up to the rounding of sums in float64 whose terms are as large as the largest gradient."""
    assert a.keys() == b.keys()
    largest = max(gradient.abs().max().item() for gradient in b.values())
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=rounding * largest, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def enable_checkpointing(module):
    """Enable checkpointing by the name of the method since transformers 5.24, or before."""
    getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
