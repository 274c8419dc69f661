"""Derivatives of other kinds than a backward pass are those of finite differences, or there are none."""

from contextlib import nullcontext

import pytest
import torch
from budget import draw, runs_triton
from tiny_fox import make, tokens
from torch.func import functional_call, grad, hessian, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_longctx import forgetting_attention


pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of SDPA under vmap
TRANSFORMS = {  # of a function of x and a direction: its derivative, and the function whose differences are that
    "jvp": (lambda f, x, d: jvp(f, (x,), (d,))[1], lambda f: f),
    "jvp of grad": (lambda f, x, d: jvp(grad(f), (x,), (d,))[1], grad),
    "grad of grad": (lambda f, x, d: grad(lambda x: (grad(f)(x) * d).sum())(x), grad),
    "hessian": (lambda f, x, d: hessian(f)(x).flatten(x.ndim).view(*x.shape, -1) @ d.flatten(), grad),
}
FORMS = {"reference": nullcontext, "folded": lambda: sdpa_kernel(SDPBackend.MATH)}


def differences(f, x, direction, step):
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


def of_argument(argument, backend):
    """A number that depends on one argument of the operator, its value, and a direction."""
    *inputs, do = (x.double() if x.ndim == 4 else x for x in draw(1, 2, 1, 7, 7, 4))
    random = torch.Generator().manual_seed(2)

    def number(x):
        arguments = [*inputs[:argument], x, *inputs[argument + 1 :]]
        return (do * forgetting_attention(*arguments, backend=backend)).sum()

    x = inputs[argument]
    return number, x, torch.randn(x.shape, generator=random, dtype=x.dtype).to(x.device)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("argument", range(4), ids=["q", "k", "v", "log_f"])
@pytest.mark.parametrize("backend", FORMS)
def test_derivatives_of_the_operator(backend, argument, transform):
    derive, differ = TRANSFORMS[transform]
    f, x, direction = of_argument(argument, backend)
    reference, *_ = of_argument(argument, "reference")
    step = 1e-4 if x.dtype == torch.float64 else 0.01  # gates are float32
    with FORMS[backend]():
        got = derive(f, x, direction)
    want = differences(differ(reference), x, direction, step)
    torch.testing.assert_close(got, want, atol=1e-3 * want.abs().max().item(), rtol=0, check_dtype=False)


def test_a_derivative_leaves_nothing_for_later_calls():
    """Constants of a head size that only this test uses, made by a derivative of a derivative, and needed again."""
    *inputs, log_f, _ = draw(1, 2, 1, 7, 7, 13)

    def number(log_f):
        return forgetting_attention(*inputs, log_f, backend="folded").sum()

    with sdpa_kernel(SDPBackend.MATH):
        hessian(number)(log_f)
        got = grad(number)(log_f)
        leaf = log_f.detach().requires_grad_()
        number(leaf).backward()
    torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize("argument", range(4), ids=["q", "k", "v", "log_f"])
@pytest.mark.parametrize("backend", ["folded", pytest.param("triton", marks=runs_triton)])
def test_what_has_no_derivative_says_so(backend, argument):
    inputs = draw(1, 1, 1, 8, 8, 16)[:4]

    def attention(x):
        return forgetting_attention(*inputs[:argument], x.clone(), *inputs[argument + 1 :], backend=backend)

    with pytest.raises((NotImplementedError, RuntimeError), match=r"forward AD|forward-mode"):
        jvp(attention, (inputs[argument],), (inputs[argument],))


@pytest.mark.parametrize("only", ["", "f_proj"], ids=["all parameters", "gates"])
@pytest.mark.parametrize(
    "variant, backend", [("llama", "eager"), ("pro with grouped heads and rope", "sdpa"), ("window", "sdpa")]
)
def test_derivatives_of_the_model(backend, variant, only):
    model, ids = make(variant, backend), tokens(2, 9)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    x = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    moved = torch.cat([torch.full((shape.numel(),), float(only in name)) for name, shape in shapes.items()])
    upstream = torch.randn(2, 9, 61, generator=torch.Generator().manual_seed(4))

    def number(x):
        parts = x.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items())}
        return (functional_call(model, weights, (ids,)).logits * upstream).sum()

    with sdpa_kernel(SDPBackend.MATH):
        direction = moved * grad(number)(x)  # along which the slope stands out from the rounding of float32
        slope, curvature, twice = (
            TRANSFORMS[name][0](number, x, direction) for name in ("jvp", "jvp of grad", "grad of grad")
        )
        step = 0.01 / direction.norm()
        torch.testing.assert_close(slope, differences(number, x, direction, step), rtol=0.01, atol=0)
    torch.testing.assert_close(slope, direction.square().sum(), rtol=1e-4, atol=0)
    torch.testing.assert_close(curvature, twice, atol=1e-3 * twice.abs().max().item(), rtol=0)
