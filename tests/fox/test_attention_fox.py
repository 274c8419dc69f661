"""The folded operator against its definition in float64: shapes, padding, packing, dtypes, gradients, bad input."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hf_longctx.fox.attention_fox import (
    fold_keys,
    forgetting_attention,
    forgetting_attention_ref,
    unfold_decay,
)


# B, Hq, Hkv, Tq, Tk, D
SHAPES = [
    pytest.param(2, 3, 3, 17, 17, 16, id="square"),
    pytest.param(1, 4, 2, 33, 33, 20, id="two query heads share a key head"),
    pytest.param(1, 6, 1, 9, 9, 8, id="one key head"),
    pytest.param(2, 2, 2, 5, 31, 16, id="the last 5 queries"),
    pytest.param(2, 4, 2, 1, 40, 24, id="one-token decode"),
    pytest.param(1, 1, 1, 1, 1, 64, id="a single token"),
]
# Unit roundoff: how much one rounding to the dtype costs.
EPS = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}


def draw(B, Hq, Hkv, Tq, Tk, D, *, gate=1.0, seed=0):
    """float64 q, k, v and fp32 log_f; `gate` shifts the mean: the smaller, the more is forgotten."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).double() for H, T in ((Hq, Tq), (Hkv, Tk), (Hkv, Tk)))
    return q, k, v, F.logsigmoid(torch.randn(B, Hq, Tk, generator=g) + gate)


def with_gradients(attention, inputs, dtype, **kwargs):
    """Output and gradients (q, k, v, log_f) for q, k, v in `dtype`; the cotangent is the same for every call."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs[:3]] + [inputs[3].clone().requires_grad_()]
    out = attention(*leaves, **kwargs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(cotangent.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def error(got, exact):
    """Norm of the error, relative unless the exact value is nearly 0."""
    return ((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1.0)).item()


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("B, Hq, Hkv, Tq, Tk, D", SHAPES)
def test_agrees_with_the_definition(B, Hq, Hkv, Tq, Tk, D, dtype):
    inputs = draw(B, Hq, Hkv, Tq, Tk, D)
    exact = with_gradients(forgetting_attention_ref, inputs, torch.float64)
    plain = with_gradients(forgetting_attention_ref, inputs, dtype)
    fast = with_gradients(forgetting_attention, inputs, dtype)
    # Logits carry c_j rather than c_i - c_j, and c is a float32.
    resolution = EPS[torch.float32] * inputs[3].sum(-1).abs().max().item()
    if Tk == 1:  # dq and dk are 0: all there is is what two sums of D products, do.v and do.o, differ by in rounding
        resolution += D * EPS[torch.float32]
    for name, x, p, f in zip(("o", "dq", "dk", "dv", "dlog_f"), exact, plain, fast):
        budget = (2 if name == "o" else 3) * error(p, x) + 2 * EPS[dtype] + resolution
        if name == "dlog_f" and dtype is not torch.float32:
            budget = 0.02  # the kernel rounds the column sums of dS to the dtype: see the module's docstring
        assert error(f, x) <= budget, name


@pytest.mark.parametrize("gate", [3.0, 0.0, -3.0], ids=["open gates", "half-open gates", "closing gates"])
def test_gate_gradient_does_not_drift_over_a_long_context(gate):
    inputs = draw(1, 2, 2, 512, 512, 16, gate=gate)
    exact = with_gradients(forgetting_attention_ref, inputs, torch.float64)
    plain = with_gradients(forgetting_attention_ref, inputs, torch.float32)
    fast = with_gradients(forgetting_attention, inputs, torch.float32)
    resolution = EPS[torch.float32] * inputs[3].sum(-1).abs().max().item()
    assert error(fast[4], exact[4]) <= 3 * error(plain[4], exact[4]) + resolution


@pytest.mark.parametrize("padding", ["left", "right", "middle"])
@pytest.mark.parametrize("B, Hq, Hkv, Tq, Tk, D", SHAPES[:4])
def test_padding(B, Hq, Hkv, Tq, Tk, D, padding):
    inputs = draw(B, Hq, Hkv, Tq, Tk, D)
    mask = torch.ones(B, Tk, dtype=torch.long)
    span = {"left": slice(0, 3), "right": slice(Tk - 3, Tk), "middle": slice(Tk - 5, Tk - 2)}[padding]
    mask[0, span] = 0
    exact = with_gradients(forgetting_attention_ref, inputs, torch.float64, attention_mask=mask)
    fast = with_gradients(forgetting_attention, inputs, torch.float32, attention_mask=mask)
    for name, x, f in zip(("o", "dq", "dk", "dv", "dlog_f"), exact, fast):
        assert error(f, x) <= 1e-5, name
    # What stands at a padded position is of no account; what a padded query gets is 0.
    noisy = [x.clone() for x in inputs]
    for x in noisy[1:3]:
        x[0, :, span] = 1e3
    noisy[3][0, :, span] = -5.0
    torch.testing.assert_close(forgetting_attention(*noisy, attention_mask=mask), exact[0], atol=1e-6, rtol=1e-6)
    assert not exact[0][0, :, ~mask[0, Tk - Tq :].bool()].any()


@pytest.mark.parametrize("attention", [forgetting_attention, forgetting_attention_ref])
def test_packed_documents_equal_separate_calls(attention):
    q, k, v, log_f = draw(1, 4, 2, 29, 29, 16)
    borders = [0, 1, 12, 29]
    packed = attention(q, k, v, log_f, cu_seqlens=torch.tensor(borders))
    for a, b in itertools.pairwise(borders):
        alone = attention(*(x[:, :, a:b] for x in (q, k, v, log_f)))
        torch.testing.assert_close(packed[:, :, a:b], alone, atol=1e-12, rtol=1e-12)


def test_an_open_gate_is_plain_attention():
    q, k, v, log_f = draw(2, 3, 3, 20, 20, 16)
    out = forgetting_attention(q, k, v, torch.zeros_like(log_f), scale=0.3)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3))


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("attention", [forgetting_attention, forgetting_attention_ref])
def test_closed_gates_forget_everything_before_them(attention, dtype):
    q, k, v, log_f = draw(1, 2, 2, 600, 600, 16)
    closed = list(range(5, 600, 3))  # 200 of them
    log_f[:, :, closed] = -torch.inf
    out = attention(*(x.to(dtype) for x in (q, k, v)), log_f)
    borders = torch.tensor([0, *closed, 600])
    exact = forgetting_attention_ref(q, k, v, log_f.nan_to_num(neginf=0.0), cu_seqlens=borders)
    assert error(out, exact) <= 8 * EPS[dtype] + EPS[torch.float32] * 120 * len(closed)


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("head_dim", [8, 20, 128])
def test_the_decay_can_be_read_back_from_the_keys(dtype, head_dim):
    c = -torch.rand(2, 4, 9).cumsum(-1) * 1000
    scale = head_dim**-0.5
    keys = fold_keys(torch.randn(2, 2, 9, head_dim, dtype=dtype), c, scale)
    torch.testing.assert_close(unfold_decay(keys, head_dim, 2, scale), c, rtol=2**-22, atol=1e-6)


def test_decay_resolution_at_large_c():
    """The documented limit: with c near -1e5 the exponent is resolved to 0.008, and no worse."""
    q, k, v, log_f = draw(1, 1, 1, 64, 64, 16)
    exact = forgetting_attention_ref(q, k, v, log_f)
    before = [F.pad(x.float(), (0, 0, 100, 0)) for x in (q, k, v)]
    closed = torch.cat([torch.full((1, 1, 100), -1000.0), log_f], dim=-1)
    closed[..., 100] = -1000.0  # nothing of what came before is left
    out = forgetting_attention(*before, closed)[..., 100:, :]
    assert 1e-5 < error(out, exact) < 1e-2


@pytest.mark.parametrize("gate", [2.0, torch.inf], ids=["fading", "open"])
def test_the_definition_in_both_directions(gate):
    """A key fades by every gate between it and the query, whichever comes first; open gates have a gradient too."""
    q, k, v, log_f = draw(1, 2, 1, 9, 9, 4, gate=gate)

    def by_hand(q, k, v, log_f):
        decay = [[log_f[..., min(i, j) + 1 : max(i, j) + 1].sum(-1) for j in range(9)] for i in range(9)]
        logits = q @ k.mT / 2 + torch.stack([torch.stack(row, -1) for row in decay], -2)
        return logits.softmax(-1) @ v

    got = with_gradients(forgetting_attention_ref, (q, k, v, log_f), torch.float64, causal=False)
    for x, y in zip(got, with_gradients(by_hand, (q, k, v, log_f), torch.float64)):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


def test_both_directions_stay_within_padding_and_documents():
    q, k, v, log_f = draw(2, 2, 1, 12, 12, 8)
    alone = forgetting_attention_ref(*(x[:, :, 3:8] for x in (q, k, v, log_f)), causal=False)
    mask = torch.zeros(2, 12, dtype=torch.long)
    mask[:, 3:8] = 1
    padded = forgetting_attention_ref(q, k, v, log_f, attention_mask=mask, causal=False)
    torch.testing.assert_close(padded, F.pad(alone, (0, 0, 3, 4)))
    packed = forgetting_attention_ref(
        *(x[:1] for x in (q, k, v, log_f)), cu_seqlens=torch.tensor([0, 3, 8, 12]), causal=False
    )
    torch.testing.assert_close(packed[:, :, 3:8], alone[:1])


def test_both_directions_need_a_query_for_each_key():
    with pytest.raises(ValueError, match="5 queries for 9 keys"):
        forgetting_attention_ref(*draw(1, 1, 1, 5, 9, 4), causal=False)


BAD = {
    "3-dimensional": (dict(q=torch.zeros(2, 4, 8)), r"must be \(batch, heads, time, head_dim\)"),
    "head dims differ": (dict(q=torch.zeros(1, 2, 4, 6)), "do not fit"),
    "v shorter than k": (dict(v=torch.zeros(1, 2, 3, 8)), "do not fit"),
    "mixed dtypes": (dict(k=torch.zeros(1, 2, 4, 8).half()), "share one floating dtype"),
    "integers": ({name: torch.zeros(1, 2, 4, 8, dtype=torch.long) for name in "qkv"}, "share one floating dtype"),
    "no positions": (
        {**{name: torch.zeros(1, 2, 0, 8) for name in "qkv"}, "log_f": torch.zeros(1, 2, 0)},
        "at least one position",
    ),
    "3 heads on 2": (dict(q=torch.zeros(1, 3, 4, 8)), "Hkv must divide Hq"),
    "Tq > Tk": (dict(q=torch.zeros(1, 2, 5, 8)), "Tq must not exceed Tk"),
    "log_f in half": (dict(log_f=torch.zeros(1, 2, 4).half()), "must be torch.float32"),
    "log_f in double": (dict(log_f=torch.zeros(1, 2, 4).double()), "must be torch.float32"),
    "log_f of another shape": (dict(log_f=torch.zeros(1, 2, 3)), r"must be \(B, Hq, Tk\) = \(1, 2, 4\)"),
    "f > 1": (dict(log_f=torch.full((1, 2, 4), 0.1)), "must be <= 0"),
    "NaN gate": (dict(log_f=torch.full((1, 2, 4), torch.nan)), "NaN"),
    "scale 0": (dict(scale=0.0), "positive number"),
    "mask of wrong length": (dict(attention_mask=torch.ones(1, 3)), r"must be \(B, Tk\) = \(1, 4\)"),
    "packing does not cover": (dict(cu_seqlens=torch.tensor([0, 3])), "must rise from 0 to T = 4"),
    "packing goes back": (dict(cu_seqlens=torch.tensor([0, 3, 2, 4])), "must rise"),
    "packing and a mask": (
        dict(cu_seqlens=torch.tensor([0, 4]), attention_mask=torch.ones(1, 4)),
        "no attention_mask",
    ),
}


@pytest.mark.parametrize("attention", [forgetting_attention, forgetting_attention_ref])
@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_bad_input(attention, changes, message):
    good = {**{name: torch.zeros(1, 2, 4, 8) for name in "qkv"}, "log_f": torch.zeros(1, 2, 4)}
    with pytest.raises(ValueError, match=message):
        attention(**{**good, **changes})
