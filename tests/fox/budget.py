"""What the tests of the operator and of its kernels share: inputs, results with gradients, and error budgets.

A fast path may err a few times as much as plain PyTorch in the same dtype, above a floor. Plain PyTorch has no
rounding error where a sum happens to be exact: with one key to see, softmax gives 1, and dq, dk and dlog_f are 0.
There the floor alone counts. It is 8 * eps times the size of what cancels, and so fits any processor.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from hf_longctx.fox import forgetting_attention_ref, triton_fox


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps  # kernels sum in float32, whatever the dtype of the inputs
RESULTS = ("o", "dq", "dk", "dv", "dlog_f")

runs_triton = [
    pytest.mark.skipif(
        triton_fox.why_not(16, torch.float32, torch.device(DEVICE)) is not None,
        reason="triton is not installed, or was imported without TRITON_INTERPRET=1 where there is no GPU",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy warns at exp2(-inf) and log2(0)
]


def on_triton(test):
    """Marks a test that runs kernels."""
    for mark in runs_triton:
        test = mark(test)
    return test


def draw(B, Hq, Hkv, Tq, Tk, D, dtype=torch.float32, seed=0, openness=2.0):
    """q, k, v, log_f, do; gates have a mean of about sigmoid(openness)."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, Hq, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, D)
    q, k, v = (torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in shapes)
    log_f = F.logsigmoid(openness + 2 * torch.randn(B, Hq, Tk, generator=g)).to(DEVICE)
    return q, k, v, log_f, torch.randn(shapes[0], generator=g).to(DEVICE, dtype)


def padding(T, *spans):
    """attention_mask with real tokens at [start, stop) of each row."""
    mask = torch.zeros(len(spans), T, dtype=torch.long, device=DEVICE)
    for row, (start, stop) in zip(mask, spans):
        row[start:stop] = 1
    return mask


def run(attention, q, k, v, log_f, do, **kwargs):
    """Output and gradients."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, log_f)]
    o = attention(*inputs, **kwargs)
    return o.detach(), *torch.autograd.grad(o, inputs, do.to(o.dtype))


def run_exact(q, k, v, log_f, do, **kwargs):
    """The definition in float64."""
    return run(forgetting_attention_ref, q.double(), k.double(), v.double(), log_f, do, **kwargs)


def run_plain(q, k, v, log_f, do, **kwargs):
    """The definition as plain PyTorch rounds it: matrix products in the dtype of q, the rest in float32."""
    rounded = (
        torch.autocast(DEVICE, q.dtype) if q.dtype in (torch.bfloat16, torch.float16) else contextlib.nullcontext()
    )
    with rounded:
        return run(forgetting_attention_ref, q, k, v, log_f, do, **kwargs)


def error(x, exact):
    return (x.double() - exact.double()).norm().item()


def floors(q, k, v, log_f, do, scale=None):
    """Name of each result -> rounding error that anything summed in float32 may have, as a norm over the whole tensor.

    What cancels in the gradient of a logit is do.v - do.o, two sums of D products. dq and dk multiply it by k and q,
    and the gradient of log f sums it over up to T later positions.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] / k.shape[1]  # query heads whose gradients add up in dk and dv
    q_size, k_size, v_size, do_size = (x.double().square().mean().sqrt().item() for x in (q, k, v, do))
    logit = q.shape[-1] ** 0.5 * do_size * v_size
    units = {
        "o": (v_size, q),
        "dq": (scale * logit * k_size, q),
        "dk": (scale * logit * q_size * group**0.5, k),
        "dv": (do_size * group**0.5, k),
        "dlog_f": (logit * k.shape[2] ** 0.5, log_f),
    }
    return {name: 8 * EPS * size * x.numel() ** 0.5 for name, (size, x) in units.items()}


def check_budget(fast, plain, exact, inputs, scale=None, resolution=0.0, dlog_f=0.0):
    """Assert that `fast` errs at most 2 times (output) or 3 times (gradients) as much as `plain`, above the floor.

    fast, plain, exact: results of `run`, all of them or the first few.
    inputs: q, k, v, log_f, do.
    resolution: relative error that everything may have besides; dlog_f: the same for this gradient alone.
    """
    for (name, floor), f, p, x in zip(floors(*inputs, scale).items(), fast, plain, exact):
        assert f.shape == x.shape, name
        floor += (resolution + (dlog_f if name == "dlog_f" else 0.0)) * x.norm().item()
        allowed = (2 if name == "o" else 3) * error(p, x) + floor
        assert error(f, x) <= allowed, f"{name}: fast {error(f, x):.1e}, plain {error(p, x):.1e}, floor {floor:.1e}"


def check_close(x, y, size, share=0.0):
    """Assert that two float32 sums of terms of at most `size` agree, but for a `share` that one of them leaves out."""
    torch.testing.assert_close(x, y, atol=float(size) * (16 * EPS + share), rtol=0)
