"""`forgetting_attention`: every backend agrees with the definition."""

import contextlib
import itertools
import types

import pytest
import torch
from budget import DEVICE, EPS, check_run, draw, error, floors, padding, run, runs_triton
from mistakes import refused
from torch.func import grad, hessian, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_longctx import forgetting_attention, forgetting_attention_ref
from hf_longctx.fox import operator, triton_fox


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOLES = padding(45, (0, 45), (9, 40), (0, 1))
HOLES[0, 20:22] = HOLES[1, 10:37:3] = HOLES[2, 30] = 0
HOLES[2, 31] = 1
PACKED = torch.tensor([0, 1, 18, 18, 50, 61], dtype=torch.int32, device=DEVICE)  # one document is empty
CASES = {  # shape (B, Hq, Hkv, Tq, Tk, D), options
    "ragged": ((1, 2, 2, 67, 67, 16), {}),
    "one token": ((2, 2, 1, 1, 1, 16), {}),
    "grouped heads": ((1, 4, 2, 37, 37, 32), {}),
    "head of 80": ((1, 3, 1, 35, 35, 80), {"scale": 0.5}),
    "more keys than queries": ((1, 2, 1, 21, 75, 16), {}),
    "decoding, one token": ((1, 8, 2, 1, 150, 32), {}),
    "decoding, five tokens": ((1, 3, 1, 5, 150, 20), {}),
    "decoding, 64 rows": ((1, 4, 1, 16, 100, 16), {}),
    "decoding, padded": ((3, 2, 1, 2, 90, 16), {"attention_mask": padding(90, (0, 90), (71, 90), (40, 89))}),
    "head of 256": ((1, 1, 1, 20, 33, 256), {}),
    "left padding": ((2, 1, 1, 40, 40, 16), {"attention_mask": padding(40, (7, 40), (39, 40))}),
    "both sides, one row empty": ((3, 1, 1, 45, 45, 16), {"attention_mask": padding(45, (5, 40), (30, 33), (0, 0))}),
    "padding between tokens": ((3, 1, 1, 45, 45, 16), {"attention_mask": HOLES}),
    "scattered prefix": ((3, 1, 1, 25, 45, 16), {"attention_mask": HOLES}),
    "packed, window": ((1, 1, 1, 61, 61, 16), {"cu_seqlens": PACKED, "window": 5}),
    "window": ((1, 2, 1, 45, 60, 16), {"window": 9}),
    "window, padding between tokens": ((3, 1, 1, 45, 45, 16), {"window": 7, "attention_mask": HOLES}),
}
IN_16_BITS = {"ragged": BF16, "one token": BF16, "grouped heads": BF16, "both sides, one row empty": BF16}
IN_16_BITS |= {"packed, window": BF16, "head of 80": FP16, "decoding, one token": BF16, "decoding, padded": FP16}
TRITON = pytest.param("triton", marks=runs_triton)


def calls():
    """Yield (backend, case, dtype). Interpreted, 16 bits are slow, and all but the rounding is the same there."""
    for backend, case in itertools.product(("folded", "triton"), CASES):
        marks = runs_triton if backend == "triton" else []
        yield pytest.param(backend, case, FP32, id=f"{backend}, {case}, float32", marks=marks)
        slow = backend == "triton" and case in ("ragged", "one token", "both sides, one row empty")
        if (dtype := IN_16_BITS.get(case)) and not slow:
            name = f"{backend}, {case}, {str(dtype).removeprefix('torch.')}"
            yield pytest.param(backend, case, dtype, id=name, marks=marks)


@pytest.mark.parametrize("backend, case, dtype", list(calls()))
def test_every_backend_agrees_with_the_definition(backend, case, dtype):
    """Output and gradients, and the output of a call without them; queries that see nothing give 0."""
    shape, options = CASES[case]
    inputs = draw(*shape, dtype=dtype)
    fast = run(forgetting_attention, *inputs, backend=backend, **options)
    assert [x.dtype for x in fast] == [dtype] * 4 + [FP32]
    limits = {}
    if backend == "folded":  # the logits hold c_j in float32 instead of c_i - c_j
        limits["resolution"] = EPS * inputs[3].sum(-1).abs().max().item()
        limits["dlog_f"] = 0.0 if dtype == FP32 else 0.02  # SDPA rounds the column sums of dS to 16 bits
    check_run(fast, inputs, limits, **options)
    check_run([forgetting_attention(*inputs[:4], backend=backend, **options)], inputs, limits, **options)
    if "attention_mask" in options:
        padded = ~options["attention_mask"].bool()[:, None, -shape[3] :, None]
        assert (fast[0].masked_select(padded) == 0).all()


@pytest.mark.parametrize(
    "backend, between",
    [
        ("folded", False),
        ("reference", True),
        pytest.param("triton", True, marks=runs_triton),
        pytest.param("triton", False, marks=runs_triton),
    ],
)
def test_padding_may_hold_nan(backend, between):
    """Bit for bit the same result, so nothing at padding is ever multiplied in."""
    mask = HOLES[:, :40] if between else padding(40, (6, 40), (0, 33), (9, 35))
    *inputs, do = draw(3, 1, 1, 40, 40, 16)
    hole = ~mask.bool()[:, None, :, None]
    poisoned = [x.masked_fill(hole if x.ndim == 4 else hole[..., 0], torch.nan) for x in inputs]
    poisoned.append(do if backend == "reference" else do.masked_fill(hole, torch.nan))
    options = dict(attention_mask=mask, backend=backend)
    if backend == "triton":
        options["log_pruning_tolerance"] = -1.0
    clean, dirty = (run(forgetting_attention, *x, **options) for x in ((*inputs, do), poisoned))
    for x, y in zip(clean, dirty):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["folded", TRITON])
def test_autocast(backend):
    q, k, v, log_f, _ = draw(1, 2, 1, 20, 20, 16)
    with torch.autocast(DEVICE, dtype=BF16):
        mixed = forgetting_attention(q, k.bfloat16(), v, log_f, backend=backend)
    assert torch.equal(mixed, forgetting_attention(*(x.bfloat16() for x in (q, k, v)), log_f, backend=backend))


def test_compiles_to_one_graph():
    inputs, options = draw(1, 2, 1, 24, 24, 16), dict(attention_mask=padding(24, (3, 20)), backend="folded")
    compiled = torch.compile(forgetting_attention, fullgraph=True, backend="aot_eager")
    got, want = (run(f, *inputs, **options) for f in (compiled, forgetting_attention))
    for x, y, floor in zip(got, want, floors(*inputs).values()):
        assert error(x, y) <= floor


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion on the device ends the process's CUDA context")
@pytest.mark.parametrize("backend", [TRITON])
def test_a_compiled_graph_refuses_bad_values(backend):
    q, k, v, log_f, _ = draw(1, 1, 1, 8, 8, 16)
    compiled = torch.compile(forgetting_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="between real tokens"):
        compiled(q, k, v, log_f, backend=backend, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]]))


# --- other derivatives than a backward pass agree with finite differences, or raise an error ---

TRANSFORMS = {  # derivative of a function at x in a direction, and the function whose differences approximate it
    "jvp": (lambda f, x, d: jvp(f, (x,), (d,))[1], lambda f: f),
    "jvp of grad": (lambda f, x, d: jvp(grad(f), (x,), (d,))[1], grad),
    "grad of grad": (lambda f, x, d: grad(lambda x: (grad(f)(x) * d).sum())(x), grad),
    "hessian": (lambda f, x, d: hessian(f)(x).flatten(x.ndim).view(*x.shape, -1) @ d.flatten(), grad),
}
FORMS = {"reference": contextlib.nullcontext, "folded": lambda: sdpa_kernel(SDPBackend.MATH)}


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


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # from SDPA under vmap
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


@pytest.mark.parametrize("argument", range(4), ids=["q", "k", "v", "log_f"])
@pytest.mark.parametrize("backend", ["folded", TRITON])
def test_what_has_no_derivative_says_so(backend, argument):
    inputs = draw(1, 1, 1, 8, 8, 16)[:4]

    def attention(x):
        return forgetting_attention(*inputs[:argument], x.clone(), *inputs[argument + 1 :], backend=backend)

    with pytest.raises((NotImplementedError, RuntimeError), match=r"forward AD|forward-mode"):
        jvp(attention, (inputs[argument],), (inputs[argument],))


# --- who computes ----------------------------------------------------------------------------------------------------


def test_the_default_is_triton_on_a_gpu_and_the_folded_form_elsewhere(monkeypatch):
    def chosen(dtype=BF16, head_dim=64):
        q = types.SimpleNamespace(shape=(1, 1, 1, head_dim), dtype=dtype, device=torch.device("cuda"))
        return operator.choose_backend(None, q, None)

    capability = 90
    monkeypatch.setattr(triton_fox, "capability_of", lambda device: capability)
    for module in (operator, triton_fox):
        monkeypatch.setattr(module, "INTERPRETED", types.SimpleNamespace(value=False))
    monkeypatch.setattr(triton_fox, "triton", "installed")
    assert all(chosen(dtype) == "triton" for dtype in (BF16, FP16, FP32))
    assert chosen(torch.float64) == chosen(head_dim=320) == "folded"
    assert operator.choose_backend(None, torch.zeros(1, 1, 1, 64), None) == "folded"
    capability = 75
    assert chosen() == "folded"
    assert "compute capability 7.5" in str(triton_fox.why_not(64, BF16, torch.device("cuda")))
    capability = 94
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in str(triton_fox.why_not(64, BF16, torch.device("cuda")))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton_fox, "triton", None)
    assert chosen() == "folded"


@pytest.mark.skipif(DEVICE == "cuda", reason="asks what a CPU does")
def test_the_default_never_interprets_kernels():
    *inputs, _ = draw(1, 2, 1, 20, 20, 16)
    folded = forgetting_attention(*inputs, backend="folded")
    assert torch.equal(forgetting_attention(*inputs), folded)
    assert torch.equal(forgetting_attention(*inputs, log_pruning_tolerance=-10.0), folded)  # it need not prune


@pytest.mark.skipif(DEVICE == "cuda", reason="asks what a CPU does")
def test_triton_refuses_a_cpu(monkeypatch):
    monkeypatch.setattr(triton_fox, "INTERPRETED", types.SimpleNamespace(value=False))
    monkeypatch.setattr(triton_fox, "triton", "installed")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        forgetting_attention(*draw(1, 1, 1, 4, 4, 16)[:4], backend="triton")


# --- mistakes --------------------------------------------------------------------------------------------------------


def attend(name, says, **changes):
    arguments = {**{x: torch.zeros(1, 2, 4, 8) for x in "qkv"}, "log_f": torch.zeros(1, 2, 4), **changes}
    return refused(name, lambda attention: attention(**arguments), says)


ROW = torch.ones(1, 4, dtype=torch.long)
MISTAKES = [
    attend("v shorter than k", r"q must be .*v \(1, 2, 3, 8\)", v=torch.zeros(1, 2, 3, 8)),
    attend("three heads on two", "Hkv must divide Hq", q=torch.zeros(1, 3, 4, 8), log_f=torch.zeros(1, 3, 4)),
    attend("more queries than keys", "the last Tq of the Tk positions", q=torch.zeros(1, 2, 5, 8)),
    attend("a gate per key head", "a gate for each query head", q=torch.zeros(1, 4, 4, 8)),
    attend("mixed dtypes", "one floating dtype", k=torch.zeros(1, 2, 4, 8).half()),
    attend("gates in half precision", "torch.float32", log_f=torch.zeros(1, 2, 4).half()),
    attend("gates above 1", "logsigmoid", log_f=torch.full((1, 2, 4), 0.1)),
    attend("gates of NaN", "NaN", log_f=torch.full((1, 2, 4), torch.nan)),
    attend("scale of 0", "positive number, got 0.0", scale=0.0),
    attend("half a window", "got 2.5", window=2.5),
    attend("mask of another batch", r"\(1, 4\)", attention_mask=ROW.repeat(2, 1)),
    attend("mask that is added to logits", r"mask == 0.*mask\.bool", attention_mask=torch.zeros(1, 4)),
    attend("borders that do not cover", r"T = 4, got \[0, 3\]", cu_seqlens=torch.tensor([0, 3])),
    attend("borders as floats", "integers", cu_seqlens=torch.tensor([0.0, 4.0])),
    attend("borders and a mask", "no attention_mask", cu_seqlens=torch.tensor([0, 4]), attention_mask=ROW),
]
CHOICES = [  # options that the definition does not have
    attend("positive tolerance", "at most 0", log_pruning_tolerance=1.0),
    attend("unknown backend", "folded.*'flash'", backend="flash"),
    attend("pruning, folded", "log_pruning_tolerance", backend="folded", log_pruning_tolerance=-10.0),
]


@pytest.mark.parametrize("mistake", [*MISTAKES, *CHOICES], ids=str)
def test_mistakes(mistake):
    mistake.check(forgetting_attention)
    if mistake in MISTAKES:
        mistake.check(forgetting_attention_ref)
