"""Compare the definition with plain loops, and the folded form with its resolution."""

import itertools

import pytest
import torch
from budget import DEVICE, EPS, RESULTS, check_close, draw, error, floors, padding, run, run_exact, run_plain

from hf_longctx import forgetting_attention
from hf_longctx.fox.attention_fox import (
    GATE_QUERY,
    cached_columns,
    cumulative_sum,
    fold_keys,
    fold_queries,
    unfold_decay,
)
from hf_longctx.fox.operator import folded_attention, forgetting_attention_ref


def by_hand(q, k, v, log_f, *, scale=None, attention_mask=None, cu_seqlens=None, window=None):
    """Equation 11, one query and one key at a time, the decay as a product of gates: judges the definition."""
    (B, Hq, Tq, D), (Hkv, Tk) = q.shape, k.shape[1:3]
    f = log_f.double().exp()
    real = torch.ones(B, Tk) if attention_mask is None else attention_mask
    document = (
        [0] * Tk if cu_seqlens is None else [sum(t >= border for border in cu_seqlens.tolist()) for t in range(Tk)]
    )
    rows = []
    for b, h, i in itertools.product(range(B), range(Hq), range(Tk - Tq, Tk)):
        numerator, denominator = torch.zeros(D, dtype=torch.double, device=q.device), 0.0
        for j in range(i + 1):
            near = window is None or i - j < window
            if not (near and real[b, i] and real[b, j] and document[i] == document[j]):
                continue
            weight = (q[b, h, i - Tk + Tq] @ k[b, h * Hkv // Hq, j] * (D**-0.5 if scale is None else scale)).exp()
            for t in range(j + 1, i + 1):
                weight = weight * (f[b, h, t] if real[b, t] else 1.0)
            numerator, denominator = numerator + weight * v[b, h * Hkv // Hq, j], denominator + weight
        rows.append(numerator / denominator if torch.is_tensor(denominator) else numerator)
    return torch.stack(rows).view(q.shape) + 0.0 * f.sum()  # a single token has a gate without effect


@pytest.mark.parametrize(
    "shape, options",
    [
        ((1, 4, 2, 9, 9, 4), {}),
        ((1, 2, 1, 4, 9, 4), {"scale": 0.3}),
        ((2, 1, 1, 1, 1, 4), {}),
        ((2, 2, 1, 9, 9, 4), {"attention_mask": padding(9, (2, 9), (0, 5))}),
        (
            (2, 1, 1, 6, 9, 4),
            {"attention_mask": torch.tensor([[0, 1, 0, 1, 1, 0, 1, 1, 0], [1] * 8 + [0]]), "window": 4},
        ),
        ((1, 2, 2, 9, 9, 4), {"cu_seqlens": torch.tensor([0, 3, 3, 4, 9]), "window": 3}),
    ],
    ids=["grouped heads", "fewer queries", "one token", "padding", "padding between tokens", "documents"],
)
def test_the_definition_is_the_equation(shape, options):
    options = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in options.items()}
    q, k, v, log_f, do = draw(*shape)
    exact = run(by_hand, q.double(), k.double(), v.double(), log_f, do, **options)
    floor = floors(q, k, v, log_f, do, options.get("scale"))  # log f and its gradient are float32
    for name, x, y in zip(RESULTS, run_exact(q, k, v, log_f, do, **options), exact):
        assert error(x, y) <= floor[name], name


def test_the_gradient_of_a_logit_is_that_of_the_decay_between_query_and_key():
    """c_i - c_j, although a folded logit holds -c_j only. Under softmax the sums over rows are 0 but for rounding."""
    q, k, _, log_f, _ = draw(1, 4, 2, 9, 9, 4)
    c = log_f.cumsum(-1).requires_grad_()
    logits = 0.5 * fold_queries(q, c, 0.5, 2) @ fold_keys(k, c, 0.5).repeat_interleave(2, dim=1).mT
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    (gradient,) = torch.autograd.grad(logits, c, upstream)
    check_close(gradient, upstream.sum(-1) - upstream.sum(-2), size=9 * upstream.abs().max())


@pytest.mark.parametrize("openness", [3.0, 0.0, -3.0], ids=["open gates", "half-open gates", "closing gates"])
def test_gate_gradient_does_not_drift_over_a_long_context(openness):
    inputs = draw(1, 2, 2, 512, 512, 16, openness=openness)
    exact, plain = run_exact(*inputs)[4], run_plain(*inputs)[4]
    fast = run(folded_attention, *inputs, scale=0.25)[4]
    resolution = EPS / 2 * inputs[3].sum(-1).abs().max().item() * exact.norm().item()
    assert error(fast, exact) <= 3 * error(plain, exact) + resolution


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = {"folded": lambda *x: forgetting_attention(*x, backend="folded"), "definition": forgetting_attention_ref}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", FORMS.values(), ids=FORMS)
def test_closed_gates_forget_everything_before_them(attention, dtype):
    q, k, v, log_f, _ = draw(1, 2, 2, 600, 600, 16)
    closed = list(range(5, 600, 3))  # 200 of them
    log_f[:, :, closed] = -torch.inf
    out = attention(*(x.to(dtype) for x in (q, k, v)), log_f)
    borders = torch.tensor([0, *closed, 600], device=DEVICE)
    exact = forgetting_attention_ref(
        *(x.double() for x in (q, k, v)), log_f.nan_to_num(neginf=0.0), cu_seqlens=borders
    )
    rounding = 4 * torch.finfo(dtype).eps + EPS / 2 * 120 * len(closed)  # c falls by 120 at each closed gate
    assert error(out, exact) <= rounding * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 20, 128])
def test_the_decay_can_be_read_back_from_the_keys(dtype, head_dim):
    c = -torch.rand(2, 4, 9).cumsum(-1) * 1000
    scale = head_dim**-0.5
    keys = fold_keys(torch.randn(2, 2, 9, head_dim, dtype=dtype), c, scale)
    spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # float16 stores small parts as subnormals
    torch.testing.assert_close(
        unfold_decay(keys, head_dim, 2, scale), c, rtol=2 * EPS, atol=GATE_QUERY * scale * spacing
    )


def test_a_compiled_sum_is_as_exact_at_every_length():
    torch._dynamo.reset()
    compiled = torch.compile(cumulative_sum, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (200, 4096, 33, 64):
        x = -torch.rand(2, 3, length)
        exact = x.double().cumsum(-1)
        errors = [((y - exact) / exact).abs().max().item() for y in (compiled(x), x.cumsum(-1))]
        assert errors[0] <= 2 * errors[1] + EPS


FIRST_CALLS = {
    "inference": lambda f, x: torch.inference_mode()(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "compiled": lambda f, x: torch.compile(f, fullgraph=True, backend="aot_eager")(x),
    "compiled for inference": lambda f, x: torch.inference_mode()(torch.compile(f, fullgraph=True, backend="eager"))(
        x
    ),
}


@pytest.mark.parametrize("first_call, dtype", [*zip(FIRST_CALLS, itertools.cycle(DTYPES[:2]))], ids=str)
def test_columns_that_are_kept_serve_later_calls_of_every_kind(first_call, dtype):
    q, k, _, log_f, _ = draw(1, 4, 2, 9, 9, 4)

    def logits(log_f, dtype=torch.float32):
        queries, keys = fold_queries(q.to(dtype), log_f, 0.5, 2), fold_keys(k.to(dtype), log_f, 0.5)
        return queries @ keys.repeat_interleave(2, dim=1).mT

    results = []
    for call in (lambda f, x: f(x), FIRST_CALLS[first_call]):
        cached_columns.cache_clear()
        call(logits, log_f)
        x = log_f.clone().requires_grad_()
        y = logits(x, dtype)
        results.append((y.detach(), *torch.autograd.grad(y.sum(), x), logits(log_f.double(), dtype)))
    for got, want in zip(*results):
        assert torch.equal(got, want)
