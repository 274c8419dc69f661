"""Comparing the gradients of two models, for the tests."""

import torch
from tiny_hmt import ROUNDING


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(a, b, atol=ROUNDING):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=atol, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
