"""Error budgets of attention: a fast path may err a few times as much as plain PyTorch, above a floor with a unit.

Plain PyTorch has no rounding error where a sum happens to be exact: with one key to see, softmax gives 1 and dq, dk and
dlog_f are 0. There the floor alone counts. It is 8 * eps times the size of what cancels, and so fits any processor.
"""

import torch


RESULTS = ("o", "dq", "dk", "dv", "dlog_f")
EPS = torch.finfo(torch.float32).eps  # kernels sum in float32, whatever the dtype of the inputs


def run(attention, q, k, v, log_f, do, **kwargs):
    """Output and gradients."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, log_f)]
    o = attention(*inputs, **kwargs)
    return o.detach(), *torch.autograd.grad(o, inputs, do.to(o.dtype))


def error(x, exact):
    return (x.double() - exact.double()).norm().item()


def floors(q, k, v, log_f, do, scale=None):
    """Name of each result -> rounding error that anything summed in float32 may have, as a norm over the whole tensor.

    What cancels in the gradient of a logit is do.v - do.o, two sums of D products. dq and dk multiply it by k and q, and
    the gradient of log f sums it over up to T later positions.
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


def check_budget(fast, plain, exact, inputs, scale=None):
    """Assert that `fast` errs at most 2 times (output) or 3 times (gradients) as much as `plain`, above the floor.

    fast, plain, exact: results of `run`, all of them or the first few.
    inputs: q, k, v, log_f, do.
    """
    for (name, floor), f, p, x in zip(floors(*inputs, scale).items(), fast, plain, exact):
        assert f.shape == x.shape, name
        allowed = (2 if name == "o" else 3) * error(p, x) + floor
        assert error(f, x) <= allowed, f"{name}: fast {error(f, x):.1e}, plain {error(p, x):.1e}, floor {floor:.1e}"


def check_close(x, y, size, share=0.0):
    """Assert that two results summed in float32 from terms of at most `size` agree, but for a `share` that one left out."""
    torch.testing.assert_close(x, y, atol=float(size) * (16 * EPS + share), rtol=0)
