"""`forgetting_attention`: every backend, in both directions, agrees with the definition."""

import types

import pytest
import torch
from budget import (
    DEVICE,
    EPS,
    check_budget,
    draw,
    error,
    floors,
    on_triton,
    padding,
    run,
    run_exact,
    run_plain,
    runs_triton,
)

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
    "two tokens": ((2, 2, 1, 2, 2, 16), {}),
    "grouped heads": ((1, 4, 2, 37, 37, 32), {}),
    "head of 20": ((1, 3, 1, 33, 33, 20), {"scale": 0.5}),
    "head of 80": ((1, 1, 1, 35, 35, 80), {}),
    "more keys than queries": ((1, 2, 1, 21, 75, 16), {}),
    "head of 256": ((1, 1, 1, 20, 33, 256), {}),
    "left padding": ((2, 1, 1, 40, 40, 16), {"attention_mask": padding(40, (7, 40), (39, 40))}),
    "right padding": ((2, 2, 1, 40, 40, 16), {"attention_mask": padding(40, (0, 17), (0, 1))}),
    "both sides, one row empty": ((3, 1, 1, 45, 45, 16), {"attention_mask": padding(45, (5, 40), (30, 33), (0, 0))}),
    "padding between tokens": ((3, 1, 1, 45, 45, 16), {"attention_mask": HOLES}),
    "padded prefix": ((2, 2, 1, 19, 50, 16), {"attention_mask": padding(50, (3, 50), (40, 48))}),
    "scattered prefix": ((3, 1, 1, 25, 45, 16), {"attention_mask": HOLES}),
    "packed": ((1, 2, 1, 61, 61, 16), {"cu_seqlens": PACKED}),
    "packed, window": ((1, 1, 1, 61, 61, 16), {"cu_seqlens": PACKED, "window": 5}),
    "window": ((1, 2, 1, 45, 60, 16), {"window": 9}),
    "window of one": ((1, 1, 1, 40, 40, 16), {"window": 1}),
    "window and padding": ((2, 1, 1, 50, 50, 16), {"window": 20, "attention_mask": padding(50, (9, 50), (3, 35))}),
    "window, padding between tokens": ((3, 1, 1, 45, 45, 16), {"window": 7, "attention_mask": HOLES}),
}
IN_16_BITS = {"ragged": BF16, "one token": BF16, "grouped heads": BF16, "both sides, one row empty": BF16}
IN_16_BITS |= {"packed, window": BF16, "head of 80": FP16, "window and padding": FP16}
BOTH_WAYS = ["one token", "two tokens", "head of 20", "both sides, one row empty", "padding between tokens"]
BOTH_WAYS += ["packed, window", "window of one", "window and padding"]
TRITON = pytest.param("triton", marks=runs_triton)


def calls():
    """(backend, causal, case, dtype), pair-wise: the kernels of both directions are those of one.

    What padding, documents, windows and both directions do is the same in 16 bits: interpreted, such cases are slow.
    """
    for case in CASES:
        dtypes = dict.fromkeys((FP32, IN_16_BITS.get(case, FP32)))  # in an order that test workers agree on
        for dtype in dtypes:
            yield "folded", True, case, dtype
            yield "triton", True, case, dtype
    for case in ("ragged", "grouped heads"):
        yield "triton", False, case, BF16
    for case in BOTH_WAYS:
        yield "triton", False, case, FP32


def is_second_look(backend, causal, case, dtype):
    return backend == "triton" and dtype != FP32 and (bool(CASES[case][1]) or not causal)


CALLS = [
    pytest.param(
        *call,
        id=f"{call[0]} {'causal' if call[1] else 'both ways'}, {call[2]}, {str(call[3]).removeprefix('torch.')}",
        marks=[
            *(runs_triton if call[0] == "triton" else ()),
            *([pytest.mark.slow] if is_second_look(*call) else ()),
        ],
    )
    for call in calls()
]


@pytest.mark.parametrize("backend, causal, case, dtype", CALLS)
def test_every_backend_agrees_with_the_definition(backend, causal, case, dtype):
    """Output and gradients; queries that are padding, or see nothing, give 0."""
    shape, options = CASES[case]
    inputs = draw(*shape, dtype=dtype)
    fast = run(forgetting_attention, *inputs, causal=causal, backend=backend, **options)
    assert [x.dtype for x in fast] == [dtype] * 4 + [FP32]
    plain, exact = (f(*inputs, causal=causal, **options) for f in (run_plain, run_exact))
    limits = {}
    if backend == "folded":  # the logits hold c_j in float32 instead of c_i - c_j
        limits["resolution"] = EPS * inputs[3].sum(-1).abs().max().item()
        limits["dlog_f"] = 0.0 if dtype == FP32 else 0.02  # SDPA rounds the column sums of dS to 16 bits
    check_budget(fast, plain, exact, inputs, options.get("scale"), **limits)
    if "attention_mask" in options:
        assert (
            fast[0].mT[~options["attention_mask"].bool()[:, None, None, -shape[3] :].expand_as(fast[0].mT)] == 0
        ).all()


@pytest.mark.parametrize(
    "backend, causal, between",
    [
        ("folded", True, False),
        ("reference", True, True),
        pytest.param("triton", True, False, marks=runs_triton),
        pytest.param("triton", False, True, marks=runs_triton),
    ],
)
def test_padding_may_hold_nan(backend, causal, between):
    """Bit for bit the same result, so nothing at padding is ever multiplied in."""
    mask = HOLES[:, :40] if between else padding(40, (6, 40), (0, 33), (9, 35))
    *inputs, do = draw(3, 1, 1, 40, 40, 16)
    hole = ~mask.bool()[:, None, :, None]
    poisoned = [x.masked_fill(hole if x.ndim == 4 else hole[..., 0], torch.nan) for x in inputs]
    poisoned.append(do if backend == "reference" else do.masked_fill(hole, torch.nan))
    options = dict(attention_mask=mask, causal=causal, backend=backend)
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


@pytest.mark.parametrize("options", ["", "mask", "packed", "both ways"])
@pytest.mark.parametrize("backend", ["folded", TRITON])
def test_compiles_to_one_graph(backend, options):
    if backend == "folded" and options in ("packed", "both ways"):
        pytest.skip("the folded form splits documents by their lengths, and is causal")
    inputs = draw(1, 2, 1, 24, 24, 16)
    options = {
        "mask": {"attention_mask": padding(24, (3, 20))},
        "packed": {"cu_seqlens": torch.tensor([0, 9, 24], device=DEVICE)},
        "both ways": {"causal": False, "attention_mask": padding(24, (3, 20))},
    }.get(options, {})
    options |= dict(backend=backend)
    compiled = torch.compile(forgetting_attention, fullgraph=True, backend="aot_eager")
    got, want = (run(f, *inputs, **options) for f in (compiled, forgetting_attention))
    for x, y, floor in zip(got, want, floors(*inputs).values()):
        assert error(x, y) <= floor


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion on the device ends the process's CUDA context")
@pytest.mark.parametrize(
    "bad, words",
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])}, "between real tokens"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
    ],
    ids=["padding between tokens", "packing does not cover"],
)
@on_triton
def test_a_compiled_graph_refuses_bad_values(bad, words):
    q, k, v, log_f, _ = draw(1, 1, 1, 8, 8, 16)
    compiled = torch.compile(forgetting_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=words):
        compiled(q, k, v, log_f, backend="triton", **bad)


# --- who computes ----------------------------------------------------------------------------------------------------


def test_the_default_is_triton_on_a_gpu_and_the_folded_form_elsewhere(monkeypatch):
    def gpu(dtype=BF16, head_dim=64):
        return types.SimpleNamespace(shape=(1, 1, 1, head_dim), dtype=dtype, device=torch.device("cuda"))

    capability = 90
    monkeypatch.setattr(triton_fox, "capability_of", lambda device: capability)
    for module in (operator, triton_fox):
        monkeypatch.setattr(module, "INTERPRETED", types.SimpleNamespace(value=False))
    monkeypatch.setattr(triton_fox, "triton", "installed")
    assert all(operator.triton_runs_well(gpu(dtype)) for dtype in (BF16, FP16, FP32))
    assert not operator.triton_runs_well(gpu(torch.float64)) and not operator.triton_runs_well(gpu(head_dim=320))
    assert not operator.triton_runs_well(torch.zeros(1, 1, 1, 64))
    capability = 75
    assert not operator.triton_runs_well(gpu())
    assert "compute capability 7.5" in str(triton_fox.why_not(64, BF16, torch.device("cuda")))
    capability = 94
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in str(triton_fox.why_not(64, BF16, torch.device("cuda")))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton_fox, "triton", None)
    assert not operator.triton_runs_well(gpu())


@pytest.mark.skipif(DEVICE == "cuda", reason="asks what a CPU does")
def test_the_default_never_interprets_kernels():
    *inputs, _ = draw(1, 2, 1, 20, 20, 16)
    folded = forgetting_attention(*inputs, backend="folded")
    assert torch.equal(forgetting_attention(*inputs), folded)
    assert torch.equal(forgetting_attention(*inputs, log_pruning_tolerance=-10.0), folded)  # it need not prune
    with pytest.raises(NotImplementedError, match="backend='reference'"):
        forgetting_attention(*inputs, causal=False)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 3}], ids=str)
def test_the_definition_is_a_backend(options):
    *inputs, _ = draw(1, 2, 1, 20, 20, 16)
    got = forgetting_attention(*inputs, backend="reference", **options)
    assert torch.equal(got, forgetting_attention_ref(*inputs, **options))


@pytest.mark.parametrize(
    "dtype, head_dim, words",
    [(torch.float64, 16, "float64"), (FP32, 320, "head size 320")],
    ids=["dtype", "head size"],
)
@on_triton
def test_triton_refuses_what_its_kernels_do_not_hold(dtype, head_dim, words):
    with pytest.raises(NotImplementedError, match=words):
        forgetting_attention(*draw(1, 1, 1, 4, 4, head_dim, dtype=dtype)[:4], backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="asks what a CPU does")
def test_triton_refuses_a_cpu(monkeypatch):
    monkeypatch.setattr(triton_fox, "INTERPRETED", types.SimpleNamespace(value=False))
    monkeypatch.setattr(triton_fox, "triton", "installed")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        forgetting_attention(*draw(1, 1, 1, 4, 4, 16)[:4], backend="triton")


def test_without_triton_the_request_names_the_package(monkeypatch):
    monkeypatch.setattr(triton_fox, "triton", None)
    with pytest.raises(ImportError, match="pip install"):
        forgetting_attention(*draw(1, 1, 1, 4, 4, 16)[:4], backend="triton")
