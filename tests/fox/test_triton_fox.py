"""The kernels by themselves: decoding, decay at any length, bounds on the logits, layouts, autograd.

test_operator.py compares them with the definition on inputs of every kind.
"""

import pytest
import torch
import torch.nn.functional as F
from budget import (
    DEVICE,
    EPS,
    check_budget,
    check_close,
    check_run,
    draw,
    error,
    floors,
    padding,
    run,
    run_exact,
    run_plain,
    runs_triton,
)
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx import forgetting_attention
from hf_longctx.fox import launch_fox, operator, tiles_fox, triton_fox
from hf_longctx.fox.attention_fox import GATE_PARTS, GATE_QUERY, fold_keys, unfold_decay
from hf_longctx.fox.key_ranges_fox import find_visible_keys
from hf_longctx.fox.triton_fox import triton_attention, triton_decode


pytestmark = runs_triton


def check_output(o, inputs, **options):
    """The budget of an output without gradients."""
    q, k, v, log_f = (x.detach() for x in inputs)
    check_run([o], (q, k, v, log_f, q), **options)


def test_decoding_joins_more_parts_than_are_read_at_a_time(monkeypatch):
    """A GPU has processors for them, which the interpreter does not pretend to have."""
    monkeypatch.setattr(triton_fox, "processors", lambda device: 132)
    inputs = draw(1, 2, 1, 1, 40 * tiles_fox.tiles_for(torch.device(DEVICE), 16, torch.float32).decode.BN, 16)[:4]
    inputs[3][..., 900] = -torch.inf  # a closed gate needs no clamp here
    check_output(forgetting_attention(*inputs, backend="triton"), inputs)


@pytest.mark.parametrize(
    "Tq, gates_per_key, dtype",
    [
        (3, 2, torch.float32),
        (1, 1, torch.bfloat16),
    ],
)
def test_decoding_from_the_folded_keys_of_a_cache(Tq, gates_per_key, dtype):
    """Only the device knows the number of filled slots. Free slots and forgotten keys are never read."""
    filled, slots, D, scale = 90, 100, 20, 0.25
    q, k, v, log_f, _ = draw(2, 4, 2, Tq, filled, D, dtype=dtype, openness=-1.0)
    c = log_f[:, :: 2 // gates_per_key].cumsum(-1)
    folded = fold_keys(k, c, scale)
    free = (0, 0, 0, slots - filled)
    keys, values = F.pad(folded, free, value=torch.nan), F.pad(v, free, value=torch.nan)
    gates = keys[..., D : D + GATE_PARTS * gates_per_key].unflatten(-1, (-1, GATE_PARTS)).transpose(2, 3)
    gates = gates.expand(-1, -1, 2, -1, -1)
    mask = padding(filled, (0, filled), (5, filled))
    first = find_visible_keys(Tq, filled, q.device, token_mask=mask.bool()).key_start
    args = (gates, -GATE_QUERY * scale, first, torch.tensor(filled, device=DEVICE), scale)
    o = triton_decode(q, keys[..., :D], values, *args)

    c_read = unfold_decay(folded, D, gates_per_key, scale).repeat_interleave(2 // gates_per_key, 1)
    gates_read = c_read.diff(dim=-1, prepend=torch.zeros_like(c_read[..., :1])).clamp(max=0)
    inputs = q, k, v, gates_read
    check_output(o, inputs, attention_mask=mask, scale=scale)

    bound = torch.full((4,), 2.0, device=DEVICE)
    block = tiles_fox.tiles_for(q.device, D, dtype).decode.BN
    keys[:, :, :block, :D] = values[:, :, :block] = torch.nan
    pruned = triton_decode(q, keys[..., :D], values, *args, -20.0, bound, 1.5)
    check_output(pruned, inputs, attention_mask=mask, scale=scale)


# --- the cumulative sum ---


@pytest.mark.parametrize("padded", [False, True])
def test_the_running_sum_equals_that_of_pytorch_in_float64(padded):
    """Over several chunks and any strides, with its gradient; log 0 counts as -1e5, and what no query sees as 0."""
    T = 2 * triton_fox.SUM_TILE.BM + 5
    log_f = draw(2, 2, 2, 1, T, 16)[3].mT.contiguous().mT
    log_f[0, :, 40] = -torch.inf
    start, real = None, torch.ones(2, 1, T, dtype=torch.bool, device=DEVICE)
    if padded:
        real[1, :, :1500] = False
        log_f[1, :, :1500] = torch.nan
        start = torch.tensor([0, 1500], dtype=torch.int32, device=DEVICE)[:, None, None].expand(2, 1, T)
    dc = torch.randn(log_f.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for total in (
        lambda x: triton_fox.fox_running_sum(x, start),
        lambda x: x.masked_fill(~real, 0.0).clamp(min=-1e5).double().cumsum(-1),
    ):
        x = log_f.detach().requires_grad_()
        c = total(x)
        results.append((c, *torch.autograd.grad(c, x, dc)))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(want.dtype).eps, atol=1e-12 * T)


@pytest.mark.parametrize("Tq", [45, 20, 3])
def test_the_last_query_of_each_key(Tq):
    """With padding on both sides and a window; where no query attends to a key, the position is at most its own."""
    mask, t = padding(45, (0, 45), (7, 30), (0, 0)).bool(), torch.arange(45, device=DEVICE)
    first = find_visible_keys(Tq, 45, t.device, token_mask=mask, window=9).key_start
    c = draw(3, 2, 1, 1, 45, 16)[3].double().cumsum(-1)
    got = triton_fox.split_sum(c, 16, key_start=first)[-1]
    attends = (first[..., None] <= t) & (t <= t[-Tq:, None])  # (B, 1, Tq, Tk)
    last = torch.where(attends, t[-Tq:, None] + 1, 0).amax(-2).expand(3, 2, 45)
    assert torch.equal(torch.where(got > t, got, 0), torch.where(last > t, last, 0).int())


class Names(TorchDispatchMode):
    """The names of operators are added to a set."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_operators_give_what_their_launchers_give():
    """A call is an operator where something traces it, and else its launcher."""
    inputs = draw(1, 1, 1, 20, 20, 16)
    few = inputs[0][:, :, -3:], *inputs[1:4]
    launched, decoded = run(triton_attention, *inputs, log_pruning_tolerance=-3.0), triton_attention(*few)
    folded = run(forgetting_attention, *inputs, backend="folded")
    torch.use_deterministic_algorithms(True)  # refuses sums that a GPU may take in any order
    try:
        with Names(names := set()):
            traced = run(triton_attention, *inputs, log_pruning_tolerance=-3.0)
            assert torch.equal(triton_attention(*few), decoded)
            for x, y in zip(run(forgetting_attention, *inputs, backend="folded"), folded):
                check_close(x, y, y.abs().max())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, launched, traced))
    assert {"fox_forward", "fox_backward", "fox_prune", "fox_running_sum_backward", "fox_decode"} <= names
    assert not names & {"cumsum", "index_add", "index_put", "scatter_add", "scatter_add_"}


def test_a_second_derivative_is_refused():
    """A backward pass whose result seems constant would give 0 for it."""
    q, *others, _ = draw(1, 1, 1, 5, 5, 16)
    o = triton_attention(q.requires_grad_(), *others).sum()
    (dq,) = torch.autograd.grad(o, q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (o + dq.square().sum()).backward()


def test_tensors_that_are_not_what_their_memory_holds():
    *inputs, do = draw(1, 1, 1, 20, 20, 16)
    leaves = [x.requires_grad_() for x in inputs]
    o = triton_attention(*inputs)
    negated = torch.complex(do, -inputs[3].detach().unsqueeze(-1).expand_as(do)).conj().imag[..., 0]
    assert negated.is_neg() and torch.equal(triton_attention(*inputs[:3], negated), o)
    several = torch.stack([do, 2 * do, torch.zeros_like(do)])
    batched = torch.autograd.grad(o, leaves, several, is_grads_batched=True, retain_graph=True)
    *each, zeros = [torch.autograd.grad(o, leaves, x, retain_graph=True) for x in several]
    assert all(torch.equal(x, torch.stack(y)) for x, y in zip(batched, zip(*each, zeros)))
    no_gradient = torch._efficientzerotensor(do.shape, device=do.device)
    assert all(map(torch.equal, torch.autograd.grad(o, leaves, no_gradient), zeros))
    assert triton_attention(*(x.to("meta") for x in inputs)).shape == o.shape
    traced = torch.jit.trace(triton_attention, tuple(x.detach() + 1 for x in inputs))
    assert torch.equal(traced(*inputs), o)


# --- decay at any length ---------------------------------------------------------------------------------------------


def test_decay_is_exact_at_131072_tokens():
    """Strong gates bring c below -1e5. The last rows and keys stand for the sequence, with the c of all of it."""
    T, near = 131072, 90
    q, k, v, _, do = draw(1, 1, 1, near, near, 16)
    log_f = -2 * torch.rand(1, 1, T, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    c_exact = log_f.double().cumsum(-1)
    assert c_exact[..., -near] < -1e5

    def long(c):
        def attention(q, k, v, log_f):
            c_near = log_f.double() - log_f.detach() + c[..., -near:]
            return triton_fox.fox_forward(q, k, v, c_near, None, None, 0.25)[0]

        return attention

    inputs = (q, k, v, log_f[..., -near:], do)
    exact, plain = run_exact(*inputs), run_plain(*inputs)
    dc_exact, dc_plain = (x[4] - F.pad(x[4], (0, 1))[..., 1:] for x in (exact, plain))  # the op stops at c
    pairs = run(long(c_exact), *inputs)
    check_budget(pairs, (*plain[:4], dc_plain), (*exact[:4], dc_exact), inputs)
    naive = run(long(log_f.cumsum(-1)), *inputs)
    assert error(naive[0], exact[0]) > 100 * error(pairs[0], exact[0])  # the error of a plain fp32 cumulative sum


EXTREME = [(50, [20, 35, 36, 37], value) for value in (0.0, -torch.inf)]
EXTREME += [(90, list(range(50)), -1e4)]  # a cumulative sum of -5e5 would resolve the decay to 0.03 in float32


@pytest.mark.parametrize("length, changed, value", EXTREME)
def test_extreme_gates(length, changed, value, set_products):
    """Open gates are plain attention; closed ones hide what lies beyond; nothing in between overflows."""
    inputs = draw(1, 1, 1, length, length, 16)
    inputs[3][..., changed] = value
    check_run(run(forgetting_attention, *inputs, backend="triton"), inputs)
    set_products(True)  # the decay of keys as three numbers of bf16
    check_run(run(triton_attention, *inputs, logit_bound=largest_logit(*inputs[:2])), inputs)


@pytest.mark.parametrize("name", ["log_f", "k"])
def test_what_is_no_number_reaches_only_later_rows(name):
    """Every later row, also where a bound replaces the running maximum."""
    q, k, v, log_f, _ = draw(1, 1, 1, 120, 120, 16, dtype=torch.bfloat16)
    q, log_f = q.requires_grad_(), log_f * 1e-3  # the gates forget almost nothing
    options = dict(log_pruning_tolerance=-10.0, logit_bound=20.0)
    clean = triton_attention(q, k, v, log_f, **options)
    {"k": k, "log_f": log_f}[name][:, :, 75] = torch.nan
    o = triton_attention(q, k, v, log_f, **options)
    assert torch.equal(o[:, :, :75], clean[:, :, :75]) and o[:, :, 75:].isnan().any(-1).all()


# --- a bound of the logits instead of the running maximum ------------------------------------------------------------


def largest_logit(q, k, scale=None):
    """(B, Hq): the largest |scale * q.k| of each head."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float()
    return (q.float() @ k.mT).abs().amax((-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)


@pytest.fixture
def set_products(monkeypatch):
    """Return a function that sets which products use the tensor cores; see `Tile`."""

    def set_products(products):
        tiles = triton_fox.tiles_for
        changed = lambda *args: (t := tiles(*args))._replace(forward=t.forward._replace(products=products))  # noqa: E731
        monkeypatch.setattr(triton_fox, "tiles_for", changed)
        monkeypatch.setattr(launch_fox, "PLANS", {})

    return set_products


@pytest.mark.parametrize(
    "shape, options, dtype, products",
    [
        ((1, 2, 1, 21, 75, 16), {}, torch.float32, True),
        ((2, 2, 1, 45, 45, 16), {"attention_mask": padding(45, (5, 40), (0, 0))}, torch.float32, False),
        (
            (1, 2, 1, 61, 61, 16),
            {"cu_seqlens": torch.tensor([0, 1, 18, 18, 50, 61], device=DEVICE), "window": 20},
            torch.bfloat16,
            True,
        ),
    ],
    ids=["more keys than queries", "padding", "packed"],
)
def test_a_known_bound_changes_nothing(shape, options, dtype, products, set_products):
    set_products(products)
    inputs = draw(*shape, dtype=dtype, openness=0.0)
    bound = largest_logit(*inputs[:2])
    bound[:, 1:2] = torch.nan  # this head has no bound
    described = {"window": options.get("window")}
    if "attention_mask" in options:
        described["token_mask"] = options["attention_mask"].bool()
    if "cu_seqlens" in options:
        described["sequence_start"] = operator.sequence_starts(options["cu_seqlens"], shape[4])
    visible = find_visible_keys(*shape[3:5], bound.device, **described)
    fast = run(triton_attention, *inputs, visible=visible, logit_bound=bound)
    check_run(fast, inputs, **options)
    assert (fast[0][run_exact(*inputs, **options)[0] == 0] == 0).all()


def test_the_largest_bound_loses_nothing(set_products):
    """Every key but a row's own is as strong as the bound allows, its own as weak; most are forgotten, few are not."""
    set_products(True)
    T, largest, bound = 100, 28.0, 29.0
    k = torch.ones(1, 1, T, 16, device=DEVICE)
    q = torch.full_like(k, largest / 16)
    k[:, :, 50:] *= -1
    log_f = torch.full((1, 1, T), -0.7 * largest, device=DEVICE)
    _, _, v, _, do = draw(1, 1, 1, T, T, 16)
    o, *gradients = run(triton_attention, q, k, v, log_f, do, scale=1.0, logit_bound=bound)
    check_output(o, (q, k, v, log_f), scale=1.0)
    for got, want in zip(gradients, run(triton_attention, q, k, v, log_f, do, scale=1.0)[1:]):
        assert (
            error(got, want) <= 4 * EPS * 84 * want.norm()
        )  # fp32 resolves the exponents here, up to 84, to 84 * eps
    assert (o[:, :, 50] - v[:, :, 49]).abs().max() < 0.1  # a strong key of yesterday, before a weak one of today


@pytest.mark.parametrize("sink, products", [(False, False), (True, True)])
def test_a_weight_that_outdoes_its_row_does_not_feel_its_rounding(sink, products, set_products):
    """The weight belongs to the query's own key, or to the first key. With a running maximum, it is 1. With a bound,
    it is rounded, and the sum must contain the rounded weight.
    """
    set_products(products)
    T = 80
    q, k, v, log_f, _ = inputs = draw(1, 1, 1, T, T, 32, dtype=torch.bfloat16)
    log_f.fill_(0.0 if sink else -torch.inf)
    if sink:
        q[..., 0], k[..., 0], k[:, :, 0, 0] = 4.0, 0.0, 20.0  # e^14 times the others
    bounded, online = (run(triton_attention, *inputs, logit_bound=bound) for bound in (20.0, None))
    check_run(bounded[:1], inputs)
    for got, other, want, floor in zip(bounded, online, run_exact(*inputs), floors(*inputs).values()):
        assert error(got, want) <= 1.5 * error(other, want) + floor
    assert sink or torch.equal(bounded[0], v)


def test_half_precision_keeps_the_running_maximum():
    """The weakest key's weight, e^-40 relative to the bound, is not representable in float16."""
    q, k, v, log_f, _ = draw(1, 1, 1, 40, 40, 16, dtype=torch.float16)
    args = q.mul(1e-3).requires_grad_(), k * 1e-3, v, log_f
    assert torch.equal(triton_attention(*args, logit_bound=20.0), triton_attention(*args))


# --- memory, layout, autograd ----------------------------------------------------------------------------------------


def test_any_layout():
    q, k, v, log_f, do = draw(1, 2, 1, 37, 37, 16)
    base = run(triton_attention, q, k, v, log_f, do)
    assert base[0].transpose(1, 2).is_contiguous()

    def shift(x):  # misaligned: one element into a larger buffer, stored as (B, T, H, D)
        big = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        return big[1:].view(x.transpose(1, 2).shape).copy_(x.transpose(1, 2)).transpose(1, 2)

    def widen(x, width):  # rows of a cache's folded keys, some multiple of 16 bytes apart, or of none
        return F.pad(x, (0, width)).detach()[..., :-width]

    other = [shift(q), shift(k), v.mT.contiguous().mT, log_f.mT.contiguous().mT, shift(do)]
    for keys in (other[1], widen(k, 4), widen(k, 1)):
        inputs = [x.detach().requires_grad_() for x in (other[0], keys, *other[2:4])]
        o = triton_attention(*inputs)
        for x, y in zip((o, *torch.autograd.grad(o, inputs, other[4])), base):
            assert torch.equal(x, y)
    decoded = triton_attention(*(x[:, :, -9:] if i == 0 else x for i, x in enumerate(other[:4])))
    check_close(decoded, base[0][:, :, -9:], v.abs().max())


def test_no_rows_at_all():
    assert triton_attention(*(x[:0] for x in draw(1, 2, 1, 1, 9, 16)[:4])).shape == (0, 2, 1, 16)


def test_rows_far_apart_are_copied():
    """Inside a block, the kernels count offsets in 32 bits."""
    far = torch.empty_strided((1, 1, 20, 16), (0, 0, 2**27, 1), device="meta")
    assert triton_fox._readable(far).stride(2) == 16


def check_same_bits(inputs, rounds):
    """Output, gradients and decoding do not depend on what new memory holds, which PyTorch fills with NaN here."""

    def results():
        decoded = triton_attention(*(x[:, :, -1:] if i == 0 else x for i, x in enumerate(inputs[:4])))
        return *run(triton_attention, *inputs, log_pruning_tolerance=-10.0), decoded

    expected = results()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(rounds):
            assert all(torch.equal(x, y) for x, y in zip(results(), expected))
    finally:
        torch.use_deterministic_algorithms(False)


def test_same_inputs_same_bits():
    check_same_bits(draw(1, 2, 1, 33, 45, 16, dtype=torch.bfloat16), 1)


def test_custom_ops_are_registered_correctly():
    q, k, v, log_f, _ = draw(1, 2, 1, 5, 9, 16)
    c = log_f.double().cumsum(-1)
    first = find_visible_keys(5, 9, q.device, window=4).key_start
    ops = torch.ops.hf_longctx
    inputs = [x.requires_grad_() for x in (q, k, v, c)]
    bound = torch.ones(1, 2, device=DEVICE)
    library.opcheck(ops.fox_forward, (*inputs, first, bound, 0.25))
    library.opcheck(ops.fox_running_sum, (log_f.requires_grad_(), first))
    library.opcheck(ops.fox_prune, (c.detach()[:, :, None, :, None], first, None, bound, 5, 2, 4, 1.0, 1.0, -3.0))
    gates, end = c.detach().view(1, 1, 2, 9, 1), torch.tensor(9, device=DEVICE)
    few, heads = [x.detach() for x in (q[:, :, -3:], k, v)], torch.ones(2, device=DEVICE)
    library.opcheck(ops.fox_decode, (*few, gates, 1.0, None, end, 0.25, -10.0, heads, 1.0))
