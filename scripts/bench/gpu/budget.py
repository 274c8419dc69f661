"""Error budgets of forgetting attention, compared with its definition in float64: inputs, results and limits.

The error of a fast path may be a floor plus a few times the error of plain PyTorch in the same dtype. Plain PyTorch
has no rounding error where a sum happens to be exact: with one visible key, softmax gives 1, and dq, dk and dlog_f are
0. There, only the floor applies: 8 * eps times the size of the terms that cancel, which suits any processor.
"""

import contextlib

import torch
import torch.nn.functional as F

from hf_longctx.fox import forgetting_attention_ref


EPS = torch.finfo(torch.float32).eps  # kernels sum in float32, whatever the dtype of the inputs
RESULTS = ("o", "dq", "dk", "dv", "dlog_f")
# Additional error of dlog_f in the folded form, as a share of its norm: it sums gradients of keys, which are rounded
# to their dtype. On a CPU, in 24 draws of 129 to 1024 tokens, that is up to 0.023 in bfloat16, 0.004 in float16 and
# 2e-5 in float32; TF32, which a GPU may use instead, is coarser.
FOLDED_DLOG_F = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.06}


def draw(B, Hq, Hkv, Tq, Tk, D, dtype=torch.float32, seed=0, openness=2.0, device: torch.device | str = "cpu"):
    """Return q, k, v, log_f, do; gates have a mean of about sigmoid(openness)."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, Hq, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, D)
    q, k, v = (torch.randn(shape, generator=g).to(device, dtype) for shape in shapes)
    log_f = F.logsigmoid(openness + 2 * torch.randn(B, Hq, Tk, generator=g)).to(device)
    return q, k, v, log_f, torch.randn(shapes[0], generator=g).to(device, dtype)


def run(attention, q, k, v, log_f, do, **kwargs):
    """Return output and gradients."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, log_f)]
    o = attention(*inputs, **kwargs)
    return o.detach(), *torch.autograd.grad(o, inputs, do.to(o.dtype))


def run_exact(q, k, v, log_f, do, definition=forgetting_attention_ref, **kwargs):
    """Return output and gradients of the definition in float64."""
    return run(definition, q.double(), k.double(), v.double(), log_f, do, **kwargs)


def run_plain(q, k, v, log_f, do, definition=forgetting_attention_ref, **kwargs):
    """Return those that plain PyTorch computes: matrix products in the dtype of q, everything else in float32."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(q.device.type, q.dtype) if half else contextlib.nullcontext():
        return run(definition, q, k, v, log_f, do, **kwargs)


def error(x, exact):
    """Return the norm of the difference."""
    return (x.double() - exact.double()).norm().item()


def floors(q, k, v, log_f, do, scale=None):
    """Return for each result the rounding error of sums in float32, as a norm of the tensor.

    The gradient of a logit has the difference do.v - do.o of two sums of D products. dq and dk multiply it by k and q,
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


def find_errors(fast, plain, exact, inputs, scale=None, resolution=0.0, dlog_f=0.0):
    """Return {name: (error of `fast`, error of `plain`, allowed error of `fast`)} for the given results, as norms.

    Twice (output) or three times (gradients) the error of `plain` is allowed, above the floor.

    Args:
        fast: results of `run`, all of them or the first few.
        plain: likewise.
        exact: likewise.
        inputs: q, k, v, log_f, do.
        resolution: additional relative error of all results.
        dlog_f: additional relative error of this gradient.
    """
    errors = {}
    for (name, floor), f, p, x in zip(floors(*inputs, scale=scale).items(), fast, plain, exact):
        assert f.shape == x.shape, name
        floor += (resolution + (dlog_f if name == "dlog_f" else 0.0)) * x.norm().item()
        errors[name] = error(f, x), error(p, x), (2 if name == "o" else 3) * error(p, x) + floor
    return errors
