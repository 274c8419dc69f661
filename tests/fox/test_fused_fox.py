"""Norm, token shift and output gate in one pass: the kernels by their definition, and where they run."""

import pytest
import torch
from budget import DEVICE, runs_triton
from tiny_fox import check_logits, filled, logits, tokens
from tiny_fox import make as make_model

from hf_longctx.fox import fused_fox
from hf_longctx.fox.fused_fox import Shift, fused_norm, norm_as_defined
from hf_longctx.fox.inputs_fox import find_successors


pytestmark = runs_triton


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels run wherever there is Triton."""
    monkeypatch.setattr(fused_fox, "has_kernels", lambda device: True)


def packed(*lengths):
    """Predecessors and successors of documents in one row."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    predecessor = torch.arange(sum(lengths))
    predecessor[starts] = -1
    predecessor = predecessor[None].to(DEVICE)
    return predecessor, find_successors(predecessor, None)


def padded(*rows):
    """Predecessors and successors of rows of real tokens, 1, and padding, 0."""
    mask = torch.tensor(rows, device=DEVICE).bool()
    last = torch.arange(1, mask.shape[1] + 1, device=DEVICE) * mask
    predecessor = torch.nn.functional.pad(last.cummax(1).values[:, :-1], (1, 0))
    return predecessor, find_successors(predecessor, mask), mask


def draw(shape, dtype, generator, layout="plain"):
    """Numbers that require a gradient, and a view of them, (B, T, H, D), of each layout in memory."""
    B, T, H, D = shape
    x = torch.randn(B, T, H, D + 8 if layout == "wide" else D, generator=generator)
    if layout == "heads first":
        x = torch.randn(B, H, T, D, generator=generator)
    x = x.to(DEVICE, dtype).requires_grad_()
    return x, (x[..., :D] if layout == "wide" else x.transpose(1, 2) if layout == "heads first" else x)


CASES = {
    "norm of heads": dict(shape=(2, 37, 3, 64), weight="heads"),
    "norm with one weight": dict(shape=(2, 37, 3, 32), weight="one"),
    "norm of wide heads": dict(shape=(2, 20, 2, 64), weight="heads", layout="wide"),
    "norm of rows": dict(shape=(2, 70, 1, 768), weight="one"),
    "shift": dict(shape=(2, 70, 2, 64), shift="plain"),
    "shift of narrow heads": dict(shape=(2, 33, 2, 40), shift="plain"),
    "shift and norm": dict(shape=(2, 70, 2, 64), weight="heads", shift="plain"),
    "shift and norm, heads first": dict(shape=(2, 33, 3, 48), weight="one", shift="plain", layout="heads first"),
    "shift and norm of documents": dict(shape=(1, 64, 2, 128), weight="heads", shift=(40, 1, 1, 22)),
    "shift and norm beside padding": dict(shape=(3, 20, 2, 32), weight="one", shift="padding"),
    "gate": dict(shape=(2, 37, 2, 64), gate="sigmoid"),
    "norm and gate": dict(shape=(2, 37, 2, 64), weight="heads", gate="sigmoid", layout="wide"),
    "norm and silu": dict(shape=(1, 50, 3, 80), weight="heads", gate="silu"),
    "heads of 256": dict(shape=(1, 18, 2, 256), weight="heads", gate="silu"),
}
ROWS = ([1] * 20, [0] * 7 + [1] * 13, [1] * 9 + [0] * 3 + [1] * 6 + [0] * 2)


def make(case, dtype, seed=0):
    """Leaves that require a gradient; a function of them that gives arguments; which outputs count."""
    generator = torch.Generator().manual_seed(seed)
    B, T, H, D = shape = case["shape"]

    def leaf(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {"x": draw(shape, dtype, generator, case.get("layout", "plain"))[0]}
    if "weight" in case:
        leaves["weight"] = leaf(H * D if case["weight"] == "heads" else D, dtype=wide)
    if "gate" in case:
        leaves["gate"] = leaf(B, T, H * D)
    before = predecessor = successor = mask = None
    if (kind := case.get("shift")) is not None:
        leaves["share"] = leaf(B, T, H, dtype=wide)
        if kind == "before":
            before = leaf(B, 1, H, D).detach()
        elif kind == "padding":
            predecessor, successor, mask = padded(*ROWS)
        elif kind != "plain":
            predecessor, successor = packed(*kind)

    def arguments(leaves):
        x = leaves["x"][..., :D] if leaves["x"].shape[-1] > D else leaves["x"]
        x = x if x.shape == shape else x.transpose(1, 2)
        share = leaves.get("share")
        shift = None if share is None else Shift(share.sigmoid(), before, predecessor, successor)
        return x, leaves.get("weight"), 1e-5, shift, leaves.get("gate"), case.get("gate")

    dy = leaf(*shape).detach()
    return leaves, arguments, dy if mask is None else dy * mask[..., None, None]


def results(function, leaves, arguments, dy):
    y = function(*arguments(leaves))
    y = y * (dy != 0)
    return [y, *torch.autograd.grad(y, list(leaves.values()), dy)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_compute_what_is_defined(case, dtype, monkeypatch):
    launched = []
    launch = fused_fox.launch
    monkeypatch.setattr(
        fused_fox, "launch", lambda *args, **kwargs: (launched.append(args[0]), launch(*args, **kwargs))
    )
    monkeypatch.setattr(fused_fox, "processors", lambda device: 1)  # each program has several blocks
    leaves, arguments, dy = make(case, dtype)
    exact_leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    fast = results(fused_norm, leaves, arguments, dy)
    assert len(launched) == 2
    plain = results(norm_as_defined, leaves, arguments, dy)

    def exact_arguments(leaves):
        x, weight, eps, shift, gate, activation = arguments(leaves)
        if shift is not None and shift.before is not None:
            shift = shift._replace(before=shift.before.double())
        return x, weight, eps, shift, gate, activation

    exact = results(norm_as_defined, exact_leaves, exact_arguments, dy.double())
    for name, f, p, e in zip(("y", *leaves), fast, plain, exact):
        assert f.dtype == p.dtype and f.shape == p.shape, name
        error, allowed = ((z.double() - e).norm() / e.norm() for z in (f, p))
        assert error <= 2 * allowed + torch.finfo(dtype).eps, f"{name}: {error:.1e}, plain {allowed:.1e}"


def test_gradients_of_gradients_are_those_of_the_definition():
    leaves, arguments, dy = make(CASES["shift and norm of documents"] | dict(shape=(1, 64, 2, 8)), torch.float32)
    found = []
    for function in (fused_norm, norm_as_defined):
        y = function(*arguments(leaves))
        first = torch.autograd.grad(y, list(leaves.values()), dy, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), list(leaves.values())))
    for fast, plain in zip(*found):
        torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-4)


def test_batched_gradients_are_those_of_the_definition():
    leaves, arguments, dy = make(CASES["norm and gate"], torch.float32)
    y = fused_norm(*arguments(leaves))
    batch = torch.stack([dy, 2 * dy])
    got = torch.autograd.grad(y, list(leaves.values()), batch, is_grads_batched=True, retain_graph=True)
    for batched, single in zip(got, torch.autograd.grad(y, list(leaves.values()), dy)):
        torch.testing.assert_close(batched[1], 2 * single, atol=1e-4, rtol=1e-4)


def forward_mode(x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(fused_norm(dual, torch.ones(64))).tangent


PREDECESSOR = torch.arange(20)[None]
UNFUSED = {
    "few tokens": lambda x: fused_norm(x[:, :16], torch.ones(64)),
    "float64": lambda x: fused_norm(x.double(), torch.ones(64)),
    "a cached token": lambda x: fused_norm(x, shift=Shift(x[..., 0], x[:, :1])),
    "a tree": lambda x: fused_norm(x, shift=Shift(x[..., 0], None, PREDECESSOR)),
    "heads that are not contiguous": lambda x: fused_norm(x.transpose(1, 3), torch.ones(20)),
    "vmap": lambda x: torch.func.vmap(lambda y: fused_norm(y[None], torch.ones(64)))(x),
    "forward mode": forward_mode,
    "no step": fused_norm,
}


@pytest.mark.parametrize("call", UNFUSED.values(), ids=UNFUSED)
def test_everything_else_is_computed_as_defined(call, monkeypatch):
    monkeypatch.setattr(fused_fox, "launch", None)
    x = torch.randn(2, 20, 2, 64, generator=torch.Generator().manual_seed(0))
    assert call(x).isfinite().all()


PACKED = torch.cat([torch.arange(9), torch.arange(15)])[None].expand(2, -1)
MASKS = {
    "left": [[0] * 5 + [1] * 19] * 2,
    "right": [[1] * 24, [1] * 18 + [0] * 6],
    "middle": [[1] * 9 + [0] * 4 + [1] * 11] * 2,
}
CALLS = {
    "plain": {},
    "documents": dict(position_ids=PACKED),
    **{f"padding, {where}": dict(attention_mask=torch.tensor(mask)) for where, mask in MASKS.items()},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("variant", ["pro with grouped heads and rope", "only v shift, shared norm, biases"])
def test_models_have_the_same_losses_and_gradients(variant, call, monkeypatch):
    found, ids = [], tokens()
    labels = ids if "attention_mask" not in call else ids.masked_fill(call["attention_mask"] == 0, -100)
    for fused in (True, False):
        monkeypatch.setattr(fused_fox, "has_kernels", lambda device, fused=fused: fused)
        model = make_model(variant).train()
        loss = model(ids, labels=labels, **call).loss
        loss.backward()
        found.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
    for name, fast in found[0].items():
        check_logits(fast, found[1][name])


def test_a_cache_holds_the_same_tokens(monkeypatch):
    ids, found = tokens(2, 30), []
    for fused in (True, False):
        monkeypatch.setattr(fused_fox, "has_kernels", lambda device, fused=fused: fused)
        model = make_model("pro")
        found.append(logits(model, ids[:, 20:], cache=filled(model, ids[:, :20])))
    check_logits(*found)


def test_a_norm_that_was_replaced_is_called(monkeypatch):
    model, called = make_model("only v shift, shared norm, biases"), []
    norm = model.model.layers[0].self_attn.k_norm
    norm.register_forward_hook(lambda *_: called.append("hook"))
    norm = model.model.layers[1].self_attn.k_norm
    norm.forward = lambda x: (called.append("forward"), x)[1]
    logits(model, tokens())
    assert called == ["hook", "forward"]


def test_autocast_has_its_dtype():
    model = make_model("pro")
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model.layers[0].input_layernorm(torch.randn(1, 20, 32))
        hidden_on_few_tokens = model.model.layers[0].input_layernorm(torch.randn(1, 1, 32))
    assert hidden.dtype == hidden_on_few_tokens.dtype == torch.bfloat16
