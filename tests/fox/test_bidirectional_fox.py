"""Attention in both directions against its definition in float64; on CPU in the interpreter.

Budgets and inputs are those of test_triton_fox.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("triton")
import test_triton_fox
from budget import check_budget, check_close, error, floors, run
from test_triton_fox import DEVICE, HOLES, alter, change, draw, padding

from hf_longctx.fox import bidirectional_forgetting_attention, bidirectional_fox, forgetting_attention_ref
from hf_longctx.fox.bounds_fox import count_pruned_blocks
from hf_longctx.fox.triton_fox import forgetting_attention_triton


pytestmark = test_triton_fox.pytestmark
BF16 = torch.bfloat16


def reference(q, k, v, log_f, *, scale=None, attention_mask=None, cu_seqlens=None, window=None):
    """The definition, matrix products in the dtype of q and the decay a product of gates, without any running sum."""
    T, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    t = torch.arange(T, device=q.device)
    see = torch.ones(1, 1, T, T, dtype=torch.bool, device=q.device)
    if attention_mask is not None:
        real = attention_mask.bool()[:, None]
        see = see & real[..., None] & real[..., None, :]
    if cu_seqlens is not None:
        sequence = torch.bucketize(t, cu_seqlens, right=True)
        see = see & (sequence[:, None] == sequence)
    if window is not None:
        see = see & ((t[:, None] - t).abs() < window)
    later, earlier = torch.maximum(t[:, None], t), torch.minimum(t[:, None], t)  # (T, T)
    between = ((t > earlier[..., None]) & (t <= later[..., None])).to(log_f.dtype)  # (T, T, T)
    decay = torch.einsum("bhl,ijl->bhij", log_f.clamp(min=-1e5), between)
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = (s.to(log_f.dtype) + decay).masked_fill(~see, -torch.inf).softmax(-1).masked_fill(~see, 0.0)
    return p.to(q.dtype) @ v


def run_exact(*inputs, **kwargs):
    return run(reference, *(x.double() for x in inputs), **kwargs)


CASES = {  # shape (B, Hq, Hkv, T, D), what the queries see
    "ragged": ((1, 2, 2, 67, 16), {}),
    "one token": ((2, 2, 1, 1, 16), {}),
    "two tokens": ((2, 2, 1, 2, 16), {}),
    "one block and a token": ((1, 1, 1, 33, 16), {}),
    "grouped heads": ((1, 4, 2, 37, 32), {}),
    "head of 20": ((1, 1, 1, 35, 20), {}),
    "scale": ((1, 2, 1, 40, 16), {"scale": 0.5}),
    "left padding": ((3, 1, 1, 40, 16), {"attention_mask": padding(40, (0, 40), (7, 40), (39, 40))}),
    "right padding": ((3, 1, 1, 40, 16), {"attention_mask": padding(40, (0, 40), (0, 17), (0, 1))}),
    "both, one row empty": ((3, 1, 1, 45, 16), {"attention_mask": padding(45, (5, 40), (30, 32), (0, 0))}),
    "packed": ((1, 2, 1, 61, 16), {"cu_seqlens": torch.tensor([0, 1, 18, 18, 50, 61], dtype=torch.int32)}),
    "window": ((1, 1, 1, 60, 16), {"window": 9}),
    "window of 2": ((1, 1, 1, 40, 16), {"window": 2}),
    "window and padding": ((2, 1, 1, 50, 16), {"window": 20, "attention_mask": padding(50, (9, 50), (3, 35))}),
    "window, packed": ((1, 1, 1, 50, 16), {"window": 5, "cu_seqlens": torch.tensor([0, 3, 40, 50])}),
}  # fmt: skip


def case(name, **options):
    (B, Hq, Hkv, T, D), kwargs = CASES[name]
    kwargs = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in kwargs.items()}
    return draw(B, Hq, Hkv, T, T, D, **options), kwargs


@pytest.mark.parametrize("name", CASES)
def test_fp32_matches_float64(name):
    inputs, kwargs = case(name)
    fast, exact = run(bidirectional_forgetting_attention, *inputs, **kwargs), run_exact(*inputs, **kwargs)
    check_budget(fast, run(reference, *inputs, **kwargs), exact, inputs, kwargs.get("scale"))
    assert fast[0].transpose(1, 2).is_contiguous()
    if "attention_mask" in kwargs:
        assert (fast[0].mT[~kwargs["attention_mask"].bool()[:, None, None].expand_as(fast[0].mT)] == 0).all()


@pytest.mark.parametrize("name", ["ragged", "two tokens", "grouped heads", "both, one row empty", "packed", "window"])
def test_bf16_error_budget(name):
    inputs, kwargs = case(name, dtype=BF16)
    fast = run(bidirectional_forgetting_attention, *inputs, **kwargs)
    assert [x.dtype for x in fast] == [BF16] * 4 + [torch.float32]
    check_budget(fast, run(reference, *inputs, **kwargs), run_exact(*inputs, **kwargs), inputs)


@pytest.mark.parametrize("name", ["ragged", "one token", "grouped heads", "both, one row empty", "packed", "scale"])
def test_the_definition_on_any_device(name):
    (q, k, v, log_f, do), kwargs = case(name)
    if "cu_seqlens" in kwargs:
        kwargs["cu_seqlens"] = kwargs["cu_seqlens"].unique()  # it refuses empty documents
    inputs = q.double(), k.double(), v.double(), log_f
    got = run(forgetting_attention_ref, *inputs, do, causal=False, **kwargs)
    floor = floors(q, k, v, log_f, do, kwargs.get("scale")).values()  # log f and its gradient are float32
    for g, x, largest in zip(got, run_exact(q, k, v, log_f, do, **kwargs), floor):
        assert error(g, x) <= largest


@pytest.mark.parametrize("value", [0.0, -30.0, -1e4, -torch.inf])
def test_extreme_gates(value):
    q, k, v, log_f, do = draw(1, 1, 1, 50, 50, 16)
    log_f[..., 20], log_f[..., 35:38] = value, value
    exact, plain = run_exact(q, k, v, log_f, do), run(reference, q, k, v, log_f.clamp(min=-100), do)
    check_budget(run(bidirectional_forgetting_attention, q, k, v, log_f, do), plain, exact, (q, k, v, log_f, do))


def test_decay_is_exact_far_below_zero():
    """A running sum of -5e5 would resolve the decay to 0.03 in float32; the references know no running sum."""
    q, k, v, log_f, do = draw(1, 1, 1, 90, 90, 16)
    log_f[..., :50] = -1e4
    inputs = q, k, v, log_f, do
    fast = run(bidirectional_forgetting_attention, *inputs)
    check_budget(fast, run(reference, *inputs), run_exact(*inputs), inputs)


def test_open_gates_are_plain_attention():
    q, k, v, log_f, _ = draw(1, 4, 2, 40, 40, 16)
    o = bidirectional_forgetting_attention(q, k, v, torch.zeros_like(log_f))
    check_close(o, F.scaled_dot_product_attention(q, k, v, enable_gqa=True), v.abs().max())


def test_a_window_of_one_leaves_no_future():
    inputs = draw(1, 2, 1, 40, 40, 16)
    both = run(bidirectional_forgetting_attention, *inputs, window=1)
    past = run(forgetting_attention_triton, *inputs, window=1)
    assert all(torch.equal(x, y) for x, y in zip(both, past))


def test_reversed_time_reverses_the_result():
    """Gates stay on their border, so that they belong to the token on its other side."""
    q, k, v, log_f, do = draw(1, 2, 1, 45, 45, 16)
    o, dq, dk, dv, dlog_f = run(bidirectional_forgetting_attention, q, k, v, log_f, do)
    turned = (*(x.flip(2) for x in (q, k, v)), log_f.flip(-1).roll(1, -1), do.flip(2))
    got = run(bidirectional_forgetting_attention, *turned)
    want = (*(x.flip(2) for x in (o, dq, dk, dv)), dlog_f.flip(-1).roll(1, -1))
    for g, w, floor in zip(got, want, floors(q, k, v, log_f, do).values()):
        assert error(g, w) <= 2 * floor


def test_pruning_stays_within_its_tolerance():
    """With gates that bring the forgotten just below its bound, so that it leaves a trace."""
    q, k, v, log_f, do = draw(1, 2, 1, 97, 97, 16)
    q, log_f = 0.1 * q, torch.full_like(log_f, -0.3)
    kwargs = {"starts": torch.tensor([13], device=DEVICE)}
    dense = run(bidirectional_forgetting_attention, q, k, v, log_f, do, **kwargs)
    kwargs["log_pruning_tolerance"] = -3.0
    with count_pruned_blocks() as blocks:
        pruned = run(bidirectional_forgetting_attention, q, k, v, log_f, do, **kwargs)
    with count_pruned_blocks() as past:
        forgetting_attention_triton(q.requires_grad_(), k, v, log_f, **kwargs)
    share = math.exp(-3.0)
    assert not torch.equal(dense[0], pruned[0])
    check_close(dense[0], pruned[0], v.abs().max(), 2 * share)
    for d, p, floor in zip(dense[1:], pruned[1:], list(floors(q, k, v, log_f, do).values())[1:]):
        assert error(p, d) <= 20 * share * d.norm() + floor
    assert blocks.pruned > past.pruned > 0 and blocks.pruned < blocks.total


def test_padding_may_hold_nan():
    """Bit for bit the same result, so nothing of a padded row is ever multiplied in."""
    mask = padding(40, (6, 40), (0, 33), (9, 35)).to(DEVICE)
    inputs = draw(3, 1, 1, 40, 40, 16)
    hole = ~mask.bool()[:, None, :, None]
    poisoned = [x.masked_fill(hole if x.ndim == 4 else hole[..., 0], torch.nan) for x in inputs]
    kwargs = {"attention_mask": mask, "log_pruning_tolerance": -1.0}
    clean = run(bidirectional_forgetting_attention, *inputs, **kwargs)
    for c, d in zip(clean, run(bidirectional_forgetting_attention, *poisoned, **kwargs)):
        assert torch.equal(c, d)


@pytest.mark.parametrize("masked", [False, True])
def test_compiles_to_one_graph(masked):
    inputs = draw(1, 1, 1, 24, 24, 16)
    kwargs = {"attention_mask": padding(24, (3, 20)).to(DEVICE)} if masked else {}
    attention = torch.compile(
        lambda *x: bidirectional_forgetting_attention(*x, log_pruning_tolerance=-10.0, **kwargs),
        fullgraph=True,
        backend="aot_eager",
    )
    got, want = run(attention, *inputs), run(bidirectional_forgetting_attention, *inputs, **kwargs)
    for x, y in zip(got, want):
        check_close(x, y, y.abs().max(), 20 * math.exp(-10.0))


@pytest.mark.parametrize("shape", [(0, 2, 1, 8, 8, 16), (1, 2, 1, 0, 0, 16)])
def test_zero_length(shape):
    q, k, v, log_f, do = draw(*shape)
    o, dq, dk, *_ = run(bidirectional_forgetting_attention, q, k, v, log_f, do)
    assert o.shape == dq.shape == q.shape and (dk == 0).all()


BAD = {
    "fewer queries than keys": (alter("q", lambda x: x[:, :, :5]), ValueError, "5 queries for 8 keys"),
    "bf16 gate": (alter(("log_f",), lambda x: x.bfloat16()), ValueError, "float32"),
    "float64": (alter("qkv", lambda x: x.double()), NotImplementedError, "float64"),
    "positive tolerance": (change(log_pruning_tolerance=1.0), ValueError, "at most 0"),
    "no window": (change(window=0), ValueError, "starts at 1"),
    "mask with holes": (change(attention_mask=HOLES), NotImplementedError, "between real"),
    "packed batch": (change(cu_seqlens=torch.tensor([0, 8])), ValueError, "batch of one"),
    "starts of another batch": (change(starts=torch.zeros(4, dtype=torch.long)), ValueError, "another batch size"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name):
    spoil, error, words = BAD[name]
    inputs = spoil(dict(zip(("q", "k", "v", "log_f"), draw(2, 2, 1, 8, 8, 16))))
    inputs = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in inputs.items()}
    with pytest.raises(error, match=words):
        bidirectional_forgetting_attention(**inputs)


def test_without_triton_the_error_names_the_definition(monkeypatch):
    monkeypatch.setattr(bidirectional_fox, "triton", None)
    with pytest.raises(ImportError, match=r"pip install .*forgetting_attention_ref\(\.\.\., causal=False\)"):
        bidirectional_forgetting_attention(*draw(1, 1, 1, 4, 4, 16)[:4])
