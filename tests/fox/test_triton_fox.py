"""The Triton kernels against the definition in float64 and against the golden vectors; on CPU in the interpreter.

Tolerances are error budgets (budget.py): the kernels may err twice as much as plain PyTorch in the same dtype (three times
in the gradients), both measured against float64.
"""

import importlib
import json
import math
import re
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file


pytest.importorskip("triton")
from budget import EPS, check_budget, check_close, error, floors, run

from hf_longctx.fox import bounds_fox, kernels_fox, tiles_fox, triton_fox
from hf_longctx.fox.attention_fox import GATE_PARTS, GATE_QUERY, fold_keys, unfold_decay
from hf_longctx.fox.bounds_fox import count_pruned_blocks, first_kept_key, first_visible_key
from hf_longctx.fox.triton_fox import forgetting_attention_triton


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton_fox.INTERPRETED.value,
        reason="triton was imported without TRITON_INTERPRET=1, and there is no GPU",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy speaks up at exp2(-inf), log2(0)
]


def visible(Tq, Tk, attention_mask=None, cu_seqlens=None, window=None):
    """(B or 1, 1, Tq, Tk), the keys that each query sees, from the definitions of padding, packing and window."""
    i, j = torch.arange(Tk - Tq, Tk)[:, None], torch.arange(Tk)
    see = (j <= i)[None]
    if attention_mask is not None:
        real = attention_mask.bool()
        see = see & real[:, None, :] & real[:, Tk - Tq :, None]
    if cu_seqlens is not None:
        sequence = torch.bucketize(torch.arange(Tk), cu_seqlens.cpu(), right=True)
        see = see & (sequence[Tk - Tq :, None] == sequence)
    if window is not None:
        see = see & (i - j < window)
    return see[:, None]


def reference(q, k, v, log_f, *, scale=None, see=None):
    """The definition (arXiv 2503.02130, eq. 11), matrix products in the dtype of q; rows that see nothing give 0."""
    Tq, Tk, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    see = (visible(Tq, Tk) if see is None else see).to(q.device)
    c = log_f.cumsum(-1)
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s.to(log_f.dtype) + c[..., Tk - Tq :, None] - c[..., None, :]
    p = s.masked_fill(~see, -torch.inf).softmax(-1).masked_fill(~see, 0.0)
    return p.to(q.dtype) @ v


def draw(B, Hq, Hkv, Tq, Tk, D, dtype=torch.float32, seed=0, openness=2.0):
    """q, k, v, log_f, do with gates of mean sigmoid(openness) or so."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, Hq, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, D)
    q, k, v = (torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in shapes)
    log_f = F.logsigmoid(openness + 2 * torch.randn(B, Hq, Tk, generator=g)).to(DEVICE)
    return q, k, v, log_f, torch.randn(shapes[0], generator=g).to(DEVICE, dtype)


def run_exact(q, k, v, log_f, do, **kwargs):
    return run(reference, *(x.double() for x in (q, k, v, log_f, do)), **kwargs)


def rel(x, exact):
    """Relative error; absolute where the exact result all but vanishes, as gradients of a single token do."""
    return ((x.double() - exact).norm() / exact.norm().clamp(min=1.0)).item()


def check_output(fast, plain, exact, v):
    check_budget([fast], [plain], [exact], (fast, v, v, v[..., 0], fast))


def padding(Tk, *spans):
    """attention_mask with real tokens at [start, stop) of each row."""
    mask = torch.zeros(len(spans), Tk, dtype=torch.long)
    for row, (start, stop) in zip(mask, spans):
        row[start:stop] = 1
    return mask


CASES = {  # shape (B, Hq, Hkv, Tq, Tk, D), what the queries see
    "one block": ((1, 1, 1, 16, 16, 16), {}),
    "ragged": ((1, 2, 2, 67, 67, 16), {}),
    "one token": ((2, 1, 1, 1, 1, 16), {}),
    "grouped heads": ((2, 4, 2, 37, 37, 32), {}),
    "more keys than queries": ((1, 2, 1, 21, 75, 16), {}),
    "head of 20": ((1, 3, 1, 33, 33, 20), {}),
    "head of 80": ((1, 1, 1, 35, 35, 80), {}),
    "head of 256": ((1, 1, 1, 20, 33, 256), {}),
    "scale": ((1, 2, 1, 33, 40, 16), {"scale": 0.5}),
    "left padding": ((3, 2, 1, 40, 40, 16), {"attention_mask": padding(40, (0, 40), (7, 40), (33, 40))}),
    "right padding": ((3, 2, 1, 40, 40, 16), {"attention_mask": padding(40, (0, 40), (0, 17), (0, 1))}),
    "both, one row empty": ((3, 2, 2, 45, 45, 16), {"attention_mask": padding(45, (5, 40), (30, 33), (0, 0))}),
    "padded prefix": ((2, 2, 1, 19, 50, 16), {"attention_mask": padding(50, (3, 50), (40, 48))}),
    "packed": ((1, 4, 2, 61, 61, 16), {"cu_seqlens": torch.tensor([0, 1, 18, 18, 50, 61], dtype=torch.int32)}),
    "window": ((1, 2, 1, 45, 60, 16), {"window": 9}),
    "window and padding": ((2, 1, 1, 50, 50, 16), {"window": 20, "attention_mask": padding(50, (9, 50), (0, 35))}),
}  # fmt: skip


def split(kwargs):
    """The keyword arguments of the kernel and those of the reference."""
    kwargs = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in kwargs.items()}
    scale = {"scale": kwargs["scale"]} if "scale" in kwargs else {}
    return kwargs, scale, {name: x for name, x in kwargs.items() if name != "scale"}


@pytest.mark.parametrize("case", CASES)
def test_fp32_matches_float64(case):
    shape, kwargs = CASES[case]
    kwargs, scale, bounds = split(kwargs)
    see = visible(*shape[3:5], **{n: x.cpu() if torch.is_tensor(x) else x for n, x in bounds.items()})
    inputs = draw(*shape)
    fast = run(forgetting_attention_triton, *inputs, **kwargs)
    exact = run_exact(*inputs, see=see, **scale)
    check_budget(fast, run(reference, *inputs, see=see, **scale), exact, inputs, **scale)
    assert fast[0].transpose(1, 2).is_contiguous()
    assert (fast[0][~see.any(-1).expand(*shape[:2], -1)] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", ["ragged", "grouped heads", "head of 80", "left padding", "packed", "window"])
def test_16_bit_error_budget(case, dtype):
    shape, kwargs = CASES[case]
    kwargs, scale, bounds = split(kwargs)
    see = visible(*shape[3:5], **{n: x.cpu() if torch.is_tensor(x) else x for n, x in bounds.items()})
    inputs = draw(*shape, dtype=dtype)
    fast = run(forgetting_attention_triton, *inputs, **kwargs)
    assert [x.dtype for x in fast] == [dtype] * 4 + [torch.float32]
    plain, exact = run(reference, *inputs, see=see, **scale), run_exact(*inputs, see=see, **scale)
    check_budget(fast, plain, exact, inputs, **scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "shape, mask",
    [
        ((2, 2, 2, 1, 1, 16), None),
        ((1, 8, 2, 1, 150, 32), None),
        ((1, 3, 1, 5, 150, 20), None),
        ((1, 4, 1, 16, 100, 16), None),
        ((3, 2, 1, 2, 90, 16), padding(90, (0, 90), (71, 90), (40, 89))),
    ],
    ids=["first token", "one token", "five tokens", "64 rows", "padded"],
)
def test_decoding(shape, mask, dtype):
    q, k, v, log_f, _ = draw(*shape, dtype=dtype)
    log_f[..., shape[4] // 2] = -torch.inf  # a closed gate needs no clamp here
    kwargs = {} if mask is None else {"attention_mask": mask.to(DEVICE)}
    see = visible(*shape[3:5], attention_mask=mask)
    o = forgetting_attention_triton(q, k, v, log_f, **kwargs)
    finite = log_f.clamp(min=-1e5)  # keeps inf - inf out of the references
    exact = reference(q.double(), k.double(), v.double(), finite.double(), see=see)
    check_output(o, reference(q, k, v, finite, see=see), exact, v)


def test_decoding_equals_the_full_kernel():
    q, k, v, log_f, _ = draw(2, 4, 2, 16, 70, 16)
    decoded = forgetting_attention_triton(q, k, v, log_f)
    full = forgetting_attention_triton(q.requires_grad_(), k, v, log_f).detach()
    check_close(decoded, full, v.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("gates_per_key", [1, 2])
@pytest.mark.parametrize("Tq", [1, 3])
def test_decoding_from_the_folded_keys_of_a_cache(Tq, gates_per_key, dtype):
    """How many slots are filled is known to the device only; free slots and forgotten keys are never read."""
    filled, slots, D, scale = 90, 100, 20, 0.25
    q, k, v, log_f, _ = draw(2, 4, 2, Tq, filled, D, dtype=dtype, openness=-1.0)
    c = log_f[:, :: 2 // gates_per_key].cumsum(-1)
    folded = fold_keys(k, c, scale)
    free = (0, 0, 0, slots - filled)
    keys, values = F.pad(folded, free, value=torch.nan), F.pad(v, free, value=torch.nan)
    gates = keys[..., D : D + GATE_PARTS * gates_per_key].unflatten(-1, (-1, GATE_PARTS)).transpose(2, 3)
    gates = gates.expand(-1, -1, 2, -1, -1)
    first = first_visible_key(Tq, filled, starts=torch.tensor([0, 5], device=DEVICE))
    end = torch.tensor(filled, device=DEVICE)
    args = (gates, -GATE_QUERY * scale, first, end, scale)
    o = triton_fox.attend_few(q, keys[..., :D], values, *args)

    c_read = unfold_decay(folded, D, gates_per_key, scale).repeat_interleave(2 // gates_per_key, 1)
    gates_read = c_read.diff(dim=-1, prepend=torch.zeros_like(c_read[..., :1]))
    see = visible(Tq, filled, attention_mask=padding(filled, (0, filled), (5, filled)))
    exact = reference(*(x.double() for x in (q, k, v, gates_read)), scale=scale, see=see)
    plain = reference(q, k, v, gates_read, scale=scale, see=see)
    check_output(o, plain, exact, v)

    bound = torch.full((4,), 2.0, device=DEVICE)
    block = tiles_fox.tiles_for(q.device, D, dtype).decode.BN
    keys[:, :, :block, :D] = values[:, :, :block] = torch.nan
    pruned = triton_fox.attend_few(q, keys[..., :D], values, *args, -20.0, bound, 1.5)
    check_output(pruned, plain, exact, v)


# --- golden vectors --------------------------------------------------------------------------------------------------


def golden_cases(folder, kind):
    for case in json.loads((folder / "manifest.json").read_text())["cases"]:
        if case["kind"] == kind:
            yield case, load_file(folder / case["file"], device=DEVICE)


def check_golden(case, tensors, key, got):
    for check in case["compare"]:
        if check["key"] == key:
            want = tensors[key]
            excess = (got.double() - want.double()).abs() - (check["atol"] + check["rtol"] * want.double().abs())
            assert excess.max() <= 0, (case["name"], key, excess.max().item())


def test_golden_official_op(golden):
    for case, tensors in golden_cases(golden / "fox", "op"):
        inputs = [tensors[f"inputs/{name}"] for name in ("q", "k", "v", "log_fgate")]
        kwargs = {"scale": case["call"]["sm_scale"], "starts": tensors.get("inputs/seq_start")}
        if case["call"]["adaptive_threshold"] == "auto":
            kwargs["log_pruning_tolerance"] = -10.0
        if "inputs/dout" in tensors:
            got = run(forgetting_attention_triton, *inputs, tensors["inputs/dout"], **kwargs)
            names = ("out", "dq", "dk", "dv", "dlog_fgate")
        else:
            got, names = (forgetting_attention_triton(*inputs, **kwargs),), ("out",)
        for name, x in zip(names, got):
            check_golden(case, tensors, f"expected/{name}", x)


def test_golden_fla_op(golden):
    for case, tensors in golden_cases(golden / "fox_fla", "op"):
        q, k, v, log_f, do = (
            tensors[f"inputs/{name}"].transpose(1, 2) for name in ("q", "k", "v", "log_fgate", "dout")
        )
        call = case["call"]
        kwargs = {
            "scale": call["scale"],
            "window": call["window_size"],
            "cu_seqlens": tensors.get("inputs/cu_seqlens"),
        }
        got = run(forgetting_attention_triton, q, k, v, log_f, do, **kwargs)
        for name, x in zip(("out", "dq", "dk", "dv", "dlog_fgate"), got):
            check_golden(case, tensors, f"expected/{name}", x.transpose(1, 2))


def running_sum(tensors):
    """c in float64 with the gates before seq_start left out."""
    log_f = tensors["inputs/log_fgate"].double()
    if "inputs/seq_start" in tensors:
        t = torch.arange(log_f.shape[-1], device=log_f.device)
        log_f = log_f.masked_fill(t < tensors["inputs/seq_start"][:, None, None], 0.0)
    return log_f.cumsum(-1)


def test_golden_pruning_boundaries_are_exact(golden):
    for case, tensors in golden_cases(golden / "fox", "op_acp"):
        q, k, v, log_f = (tensors[f"inputs/{name}"] for name in ("q", "k", "v", "log_fgate"))
        Tq, Tk = q.shape[2], k.shape[2]
        padded = first_visible_key(Tq, Tk, starts=tensors.get("inputs/seq_start", torch.zeros(1, dtype=torch.long)))
        for r in case["runs"]:
            threshold = r["threshold"]
            threshold = tensors[threshold] if isinstance(threshold, str) else torch.full(q.shape[:2], threshold)
            start = first_kept_key(running_sum(tensors), threshold.to(DEVICE), Tq, r["query_block"], r["key_block"])
            assert torch.equal(start, tensors[f"expected/run{r['index']}/start_index"]), (case["name"], r)
            rows = start.int().repeat_interleave(r["query_block"], -1)[..., :Tq]
            bound = torch.maximum(rows, padded.to(DEVICE))
            got = forgetting_attention_triton(q.requires_grad_(), k, v, log_f, first_key=bound).detach()
            check_golden(case, tensors, f"expected/run{r['index']}/out", got)


def test_golden_op_pruning_boundaries_are_exact(golden):
    for case, tensors in golden_cases(golden / "fox", "op"):
        if "expected/start_index" not in tensors:
            continue
        q, k = tensors["inputs/q"], tensors["inputs/k"]
        if case["call"]["adaptive_threshold"] == "auto":
            bound = bounds_fox.bound_from_norms(q, k, q.shape[-1] ** -0.5, None, None)
            threshold = bounds_fox.pruning_threshold(q, k.shape[2], -10.0, bound)
            check_golden(case, tensors, "expected/threshold", threshold)
        else:
            threshold = tensors[case["call"]["adaptive_threshold"]]
        blocks = case["forward_block_sizes"] if "forward_block_sizes" in case else case["call"]["forward_block_sizes"]
        blocks = blocks.values() if isinstance(blocks, dict) else blocks
        start = first_kept_key(running_sum(tensors), threshold, q.shape[2], *blocks)
        assert torch.equal(start, tensors["expected/start_index"]), case["name"]


# --- decay at any length ---------------------------------------------------------------------------------------------


def test_decay_is_exact_at_131072_tokens():
    """Strong gates bring c below -1e5. The last rows and keys stand for the sequence, with the c of all of it."""
    T, near = 131072, 90
    q, k, v, _, do = draw(1, 1, 1, near, near, 16)
    log_f = -2 * torch.rand(1, 1, T, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    c_exact = log_f.double().cumsum(-1)
    assert c_exact[..., -near] < -1e5
    c = c_exact.float()
    e = (c_exact - c).float()[..., -near:]
    c_naive = log_f.cumsum(-1)[..., -near:]

    def long(c, e):
        def attention(q, k, v, log_f):
            return triton_fox.fox_forward(q, k, v, log_f - log_f.detach() + c, e, None, None, None, 0.25)[0]

        return attention

    inputs = (q, k, v, log_f[..., -near:], do)
    exact, plain = run_exact(*inputs), run(reference, *inputs)
    dc_exact = exact[4] - F.pad(exact[4], (0, 1))[..., 1:]  # the op stops at c
    dc_plain = plain[4] - F.pad(plain[4], (0, 1))[..., 1:]
    pairs = run(long(c[..., -near:], e), *inputs)
    check_budget(pairs, (*plain[:4], dc_plain), (*exact[:4], dc_exact), inputs)
    naive = run(long(c_naive, torch.zeros_like(c_naive)), *inputs)
    assert rel(naive[0], exact[0]) > 100 * rel(pairs[0], exact[0])  # what a plain fp32 running sum gives


@pytest.mark.slow
def test_whole_131072_tokens():
    """The same end to end: the running sum of every gate, every key in reach of the last rows' window."""
    T, window = 131072, 40
    q, k, v, log_f, _ = draw(1, 1, 1, T, T, 16)
    log_f, q = -2 * torch.rand_like(log_f), q[:, :, -17:]
    o = forgetting_attention_triton(q.requires_grad_(), k, v, log_f, window=window).detach()
    near = slice(T - 17 - window, None)
    see = visible(17, 17 + window, window=window)
    cut = [x.detach() for x in (q, k[:, :, near], v[:, :, near], log_f[..., near])]
    exact = reference(*(x.double() for x in cut), see=see)
    check_output(o, reference(*cut, see=see), exact, v[:, :, near])


@pytest.mark.parametrize("value", [0.0, -30.0, -1e4, -torch.inf])
def test_extreme_gates(value):
    """Open gates are plain attention; closed ones hide the past; nothing in between overflows."""
    q, k, v, log_f, do = draw(1, 1, 1, 50, 50, 16)
    log_f[..., 20], log_f[..., 35] = value, value
    exact = run_exact(q, k, v, log_f.clamp(min=-1e5), do)
    plain = run(reference, q, k, v, log_f.clamp(min=-100), do)  # fp32 loses the small gates beside a large sum
    check_budget(run(forgetting_attention_triton, q, k, v, log_f, do), plain, exact, (q, k, v, log_f, do))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gate_that_is_no_number_reaches_only_later_rows(value):
    q, k, v, log_f, do = draw(1, 1, 1, 150, 150, 16)
    log_f = log_f * 1e-3  # nothing is forgotten
    clean = run(forgetting_attention_triton, q, k, v, log_f, do, log_pruning_tolerance=-10.0)[0]
    log_f[..., 75] = value
    o = run(forgetting_attention_triton, q, k, v, log_f, do, log_pruning_tolerance=-10.0)[0]
    assert torch.equal(o[:, :, :75], clean[:, :, :75]) and o[:, :, 75:].isnan().any(-1).all()


def test_an_unknown_bound_prunes_nothing():
    q, k, v, log_f, do = draw(1, 2, 1, 150, 150, 16)
    bound = torch.tensor([torch.nan, torch.inf], device=DEVICE)
    got = run(forgetting_attention_triton, q, k, v, log_f, do, log_pruning_tolerance=-10.0, logit_bound=bound)
    for x, y in zip(got, run(forgetting_attention_triton, q, k, v, log_f, do)):
        assert torch.equal(x, y)


# --- a bound of the logits instead of the running maximum --------------------------------------------------------------


def largest_logit(q, k, scale=None):
    """(B, Hq): the largest |scale * q.k| of each head."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float()
    return (q.float() @ k.mT).abs().amax((-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "case", ["ragged", "grouped heads", "more keys than queries", "both, one row empty", "packed", "window"]
)
def test_a_known_bound_changes_nothing(case, dtype):
    shape, kwargs = CASES[case]
    kwargs, _, bounds = split(kwargs)
    see = visible(*shape[3:5], **{n: x.cpu() if torch.is_tensor(x) else x for n, x in bounds.items()})
    q, k, v, log_f, do = draw(*shape, dtype=dtype, openness=0.0)
    bound = largest_logit(q, k)
    bound[:, 1:2] = torch.nan  # a head of which nothing is known
    fast = run(forgetting_attention_triton, q, k, v, log_f, do, logit_bound=bound, **kwargs)
    plain, exact = run(reference, q, k, v, log_f, do, see=see), run_exact(q, k, v, log_f, do, see=see)
    check_budget(fast, plain, exact, (q, k, v, log_f, do))
    assert (fast[0][~see.any(-1).expand(*shape[:2], -1)] == 0).all()


@pytest.mark.parametrize("largest, bound", [(28.0, 29.0), (60.0, 61.0)], ids=["used", "too large"])
def test_the_largest_bound_loses_nothing(largest, bound):
    """Every key but a row's own is as strong as the bound allows, its own as weak; most are forgotten, few are not."""
    T = 100
    k = torch.ones(1, 1, T, 16, device=DEVICE)
    q = torch.full_like(k, largest / 16)
    k[:, :, 50:] *= -1
    log_f = torch.full((1, 1, T), -0.7 * largest, device=DEVICE)
    _, _, v, _, do = draw(1, 1, 1, T, T, 16)
    o, *gradients = run(forgetting_attention_triton, q, k, v, log_f, do, scale=1.0, logit_bound=bound)
    exact, plain = (f(q, k, v, log_f, do, scale=1.0)[0] for f in (run_exact, partial(run, reference)))
    check_output(o, plain, exact, v)
    for got, want in zip(gradients, run(forgetting_attention_triton, q, k, v, log_f, do, scale=1.0)[1:]):
        assert rel(got, want.double()) <= 4 * EPS * 84  # fp32 resolves the exponents here, up to 84, to 84 * eps
    assert (o[:, :, 50] - v[:, :, 49]).abs().max() < 0.1  # a strong key of yesterday, before a weak one of today


@pytest.mark.parametrize("sink", [False, True], ids=["own key", "first key"])
def test_a_weight_that_outdoes_its_row_does_not_feel_its_rounding(sink):
    """Beside a running maximum it is 1; beside a bound it is rounded, and must be summed as it multiplies."""
    T = 128
    q, k, v, log_f, do = draw(1, 1, 1, T, T, 32, dtype=torch.bfloat16)
    log_f = torch.full_like(log_f, 0.0 if sink else -torch.inf)
    if sink:
        q[..., 0], k[..., 0], k[:, :, 0, 0] = 4.0, 0.0, 20.0  # e^14 beside the others
    plain, exact = (f(q, k, v, log_f.clamp(min=-1e4), do) for f in (partial(run, reference), run_exact))
    bounded, online = (run(forgetting_attention_triton, q, k, v, log_f, do, logit_bound=b) for b in (20.0, None))
    check_output(bounded[0], plain[0], exact[0], v)
    for got, other, want, floor in zip(bounded, online, exact, floors(q, k, v, log_f, do).values()):
        assert error(got, want) <= 1.5 * error(other, want) + floor
    assert sink or torch.equal(bounded[0], v)


def test_half_precision_keeps_the_running_maximum():
    """The weakest key's weight, e^-40 beside the bound, is no number of float16."""
    q, k, v, log_f, do = draw(1, 1, 1, 40, 40, 16, dtype=torch.float16)
    args = [x * 1e-3 for x in (q, k)] + [v, log_f, do]
    got, want = (run(forgetting_attention_triton, *args, logit_bound=b)[0] for b in (20.0, None))
    assert torch.equal(got, want)


# --- pruning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", [0.0, -3.0, -10.0])
@pytest.mark.parametrize("seed", range(3))
def test_pruning_stays_within_its_tolerance(seed, tolerance):
    q, k, v, log_f, do = draw(2, 1, 1, 65, 97, 16, seed=seed, openness=[3.0, 0.0, -2.0][seed])
    kwargs = {"starts": torch.tensor([0, 13], device=DEVICE)}
    dense = run(forgetting_attention_triton, q, k, v, log_f, do, **kwargs)
    with count_pruned_blocks() as blocks:
        pruned = run(forgetting_attention_triton, q, k, v, log_f, do, log_pruning_tolerance=tolerance, **kwargs)
    # a row loses at most e^tolerance of its weight and spreads it over the rest
    share = torch.tensor(tolerance).exp().item()
    check_close(dense[0], pruned[0], v.abs().max(), 2 * share)
    for d, p, floor in zip(dense[1:], pruned[1:], list(floors(q, k, v, log_f, do).values())[1:]):
        assert error(p, d) <= 20 * share * d.norm() + floor
    assert blocks.pruned < blocks.total and (blocks.pruned > 0 or seed == 0)  # open gates forget little in 97 tokens


def test_pruned_gradients_belong_to_the_pruned_function():
    """Forward and backward drop the same keys, at a threshold so high that dropping them matters."""
    q, k, v, log_f, do = draw(1, 2, 2, 70, 90, 16)
    start = first_kept_key(log_f.double().cumsum(-1), torch.full((1, 2), -3.0, device=DEVICE), 70, 32, 16)
    rows = start.int().repeat_interleave(32, -1)[..., :70]
    see = visible(70, 90) & (torch.arange(90) >= rows.cpu()[..., None])
    assert not torch.equal(see, visible(70, 90).expand_as(see))
    fast = run(forgetting_attention_triton, q, k, v, log_f, do, first_key=rows)
    inputs = q, k, v, log_f, do
    check_budget(fast, run(reference, *inputs, see=see), run_exact(*inputs, see=see), inputs)


def test_given_logit_bound_prunes_more():
    T = 3 * tiles_fox.tiles_for(torch.device(DEVICE), 16, torch.float32).forward.BM
    q, k, v, log_f, _ = draw(1, 2, 1, T, T, 16)
    log_f = torch.full_like(log_f, -20 / T)
    counts = []
    for bound in (None, torch.tensor([0.1, 0.1], device=DEVICE)):
        with count_pruned_blocks() as blocks:
            run(forgetting_attention_triton, q, k, v, log_f, q, log_pruning_tolerance=0.0, logit_bound=bound)
        counts.append(blocks.pruned)
    assert counts[0] < counts[1]


def test_decoding_leaves_out_exactly_what_the_rule_says():
    """NaN in what it leaves out changes nothing, and NaN in the first key that it keeps reaches every result."""
    tolerance, bound = -3.0, torch.tensor([0.5, 6.0, 15.0], device=DEVICE)
    block = tiles_fox.tiles_for(torch.device(DEVICE), 16, torch.float32).decode.BN
    T = 6 * block + 8
    q, k, v, log_f, _ = draw(2, 3, 3, 1, T, 16)
    threshold = bounds_fox.pruning_threshold(q, T, tolerance, bound)
    start = first_kept_key(log_f.double().cumsum(-1), threshold, 1, 1, block)  # (2, 3, 1)
    assert (start > 0).all() and start.unique().numel() > 1

    def decode(poisoned):
        k_poisoned, v_poisoned = (x.masked_fill(poisoned[..., None], torch.nan) for x in (k, v))
        return forgetting_attention_triton(
            q, k_poisoned, v_poisoned, log_f, log_pruning_tolerance=tolerance, logit_bound=bound
        )

    t = torch.arange(T, device=DEVICE)
    assert torch.equal(decode(t < start), decode(t < 0))
    assert decode(t == start).isnan().all()


# --- memory, layout, autograd, compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("Tq", [40, 12], ids=["kernel", "decoding"])
def test_padding_may_hold_nan(Tq):
    """Bit for bit the same result, so no padded row is ever multiplied in."""
    mask = padding(40, (6, 40), (0, 33), (9, 35)).to(DEVICE)
    q, k, v, log_f, do = draw(3, 2, 1, Tq, 40, 16)
    hole = ~mask.bool()[:, None, :, None]
    poisoned = [x.masked_fill(hole[:, :, 40 - x.shape[2] :], torch.nan) for x in (q, k, v)]
    poisoned.append(log_f.masked_fill(hole[..., 0], torch.nan))
    if Tq == 12:
        clean = (forgetting_attention_triton(q, k, v, log_f, attention_mask=mask),)
        dirty = (forgetting_attention_triton(*poisoned, attention_mask=mask),)
    else:
        kwargs = {"attention_mask": mask, "log_pruning_tolerance": -1.0}
        clean = run(forgetting_attention_triton, q, k, v, log_f, do, **kwargs)
        dirty = run(forgetting_attention_triton, *poisoned, do.masked_fill(hole, torch.nan), **kwargs)
    for c, d in zip(clean, dirty):
        assert torch.equal(c, d)


def test_any_layout():
    q, k, v, log_f, do = draw(2, 2, 1, 37, 37, 16)
    base = run(forgetting_attention_triton, q, k, v, log_f, do)

    def shift(x):  # misaligned: one element into a larger buffer, stored as (B, T, H, D)
        big = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        return big[1:].view(x.transpose(1, 2).shape).copy_(x.transpose(1, 2)).transpose(1, 2)

    other = [shift(q), shift(k), v.mT.contiguous().mT, log_f.mT.contiguous().mT, shift(do)]
    inputs = [x.requires_grad_() for x in other[:4]]
    o = forgetting_attention_triton(*inputs)
    for x, y in zip((o, *torch.autograd.grad(o, inputs, other[4])), base):
        assert torch.equal(x, y)
    decoded = forgetting_attention_triton(*(x[:, :, -9:] if i == 0 else x for i, x in enumerate(other[:4])))
    check_close(decoded, base[0][:, :, -9:], v.abs().max())


def test_log_sum_exp_has_a_gradient():
    """Together with that of the output; rows that see nothing have -inf and pass nothing on, whatever comes back."""
    q, k, v, log_f, do = draw(2, 4, 2, 40, 70, 16)
    dlse = torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    first = first_visible_key(40, 70, attention_mask=padding(70, (9, 70), (0, 50)).to(DEVICE))
    see = visible(40, 70, attention_mask=padding(70, (9, 70), (0, 50))).to(DEVICE)
    seen = see.any(-1).expand(2, 4, -1)

    def by_definition(q, k, v, log_f):
        c = log_f.cumsum(-1)
        s = (q @ k.repeat_interleave(2, 1).mT).mul(0.25) + c[..., 30:, None] - c[..., None, :]
        return reference(q, k, v, log_f, see=see), s.masked_fill(~see, -torch.inf)[seen].logsumexp(-1)

    def fast(q, k, v, log_f):
        stop = bounds_fox.stop_query(first, 70)
        return triton_fox.attend(q, k, v, log_f.double().cumsum(-1), first, stop, 0.25, None, None)

    def differentiate(attention, dlse, *inputs):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        o, lse = attention(*leaves)
        return lse.detach(), torch.autograd.grad((o, lse), leaves, (do.to(o.dtype), dlse.to(o.dtype)))

    inputs = q, k, v, log_f
    exact_lse, exact = differentiate(by_definition, dlse[seen], *(x.double() for x in inputs))
    _, plain = differentiate(by_definition, dlse[seen], *inputs)
    lse, got = differentiate(fast, dlse.masked_fill(~seen, torch.nan).mT.contiguous().mT, *inputs)
    largest = exact_lse.abs().max()  # what the logits, a few numbers of this size, add up to
    assert (lse[seen] - exact_lse).abs().max() <= 8 * EPS * largest and (lse[~seen] == -torch.inf).all()
    check_budget((exact_lse, *got), (exact_lse, *plain), (exact_lse, *exact), (*inputs, do))


def test_expanded_upstream_gradient():
    *inputs, do = draw(1, 1, 1, 20, 20, 16)
    ones = torch.ones(()).to(do).expand_as(do)
    exact = run_exact(*inputs, ones)
    check_budget(
        run(forgetting_attention_triton, *inputs, ones), run(reference, *inputs, ones), exact, (*inputs, ones)
    )


@pytest.mark.parametrize("shape", [(0, 2, 1, 8, 8, 16), (1, 2, 1, 0, 8, 16), (1, 2, 1, 0, 0, 16)])
def test_zero_length(shape):
    q, k, v, log_f, do = draw(*shape)
    o, dq, dk, *_ = run(forgetting_attention_triton, q, k, v, log_f, do)
    assert o.shape == dq.shape == q.shape and (dk == 0).all()


def test_same_inputs_same_bits():
    inputs = draw(1, 4, 2, 50, 50, 16, dtype=torch.bfloat16)
    first, second = (run(forgetting_attention_triton, *inputs) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


def test_custom_ops_are_registered_correctly():
    q, k, v, log_f, _ = draw(2, 2, 1, 20, 24, 16)
    c = log_f.cumsum(-1)
    bound = first_visible_key(20, 24, window=7, device=DEVICE)
    ops = torch.ops.hf_longctx
    inputs = [x.requires_grad_() for x in (q, k, v, c)]
    stop = bounds_fox.stop_query(bound, 24)
    torch.library.opcheck(
        ops.fox_forward, (*inputs, torch.zeros_like(c), bound, stop, torch.ones(2, 2, device=DEVICE), 0.25)
    )
    gates, end = c.detach().view(2, 1, 2, 24, 1), torch.tensor(24, device=DEVICE)
    few, heads = [x.detach() for x in (q[:, :, -3:], k, v)], torch.ones(2, device=DEVICE)
    torch.library.opcheck(ops.fox_decode, (*few, gates, None, end, heads, 0.25, 1.0, 1.0, -10.0))


@pytest.mark.parametrize("rows", ["train", "starts", "mask", "packed", "decode"])
def test_compiles_to_one_graph(rows):
    q, k, v, log_f, do = draw(1, 2, 1, 5 if rows == "decode" else 24, 24, 16)
    kwargs = {
        "starts": {"starts": torch.tensor([5], device=DEVICE)},
        "mask": {"attention_mask": padding(24, (3, 20)).to(DEVICE)},
        "packed": {"cu_seqlens": torch.tensor([0, 9, 24], device=DEVICE)},
    }.get(rows, {})
    attention = torch.compile(
        lambda *x: forgetting_attention_triton(*x, log_pruning_tolerance=-10.0, **kwargs),
        fullgraph=True,
        backend="aot_eager",
    )
    if rows == "decode":
        got, want = ([f(q, k, v, log_f)] for f in (attention, forgetting_attention_triton))
    else:
        got, want = run(attention, q, k, v, log_f, do), run(forgetting_attention_triton, q, k, v, log_f, do, **kwargs)
    for x, y in zip(got, want):
        check_close(x, y, y.abs().max(), 20 * math.exp(-10.0))


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion on the device ends the process's CUDA context")
def test_compiled_graph_refuses_holes():
    q, k, v, log_f, _ = draw(1, 1, 1, 8, 8, 16)
    attention = torch.compile(
        lambda mask: forgetting_attention_triton(q, k, v, log_f, attention_mask=mask),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(RuntimeError, match="holes"):
        attention(torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]]))


def test_autocast_and_checkpointing():
    q, k, v, log_f, do = draw(1, 2, 1, 20, 20, 16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        mixed = forgetting_attention_triton(q, k.bfloat16(), v, log_f)
    assert mixed.dtype == torch.bfloat16

    def checkpointed(*inputs):
        return torch.utils.checkpoint.checkpoint(forgetting_attention_triton, *inputs, use_reentrant=False)

    for x, y in zip(run(checkpointed, q, k, v, log_f, do), run(forgetting_attention_triton, q, k, v, log_f, do)):
        assert torch.equal(x, y)


# --- the bound, and bad input ----------------------------------------------------------------------------------------


def test_first_visible_key():
    assert first_visible_key(3, 5) is None
    assert first_visible_key(2, 4, attention_mask=torch.ones(2, 4)) is None
    assert first_visible_key(2, 4, window=2).tolist() == [[[1, 2]]]
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    assert first_visible_key(4, 4, attention_mask=mask).tolist() == [[[1, 1, 1, 1]], [[0, 0, 4, 4]], [[4, 4, 4, 4]]]
    spans = {"starts": torch.tensor([1, 0, 0]), "lengths": torch.tensor([3, 2, 0])}
    assert torch.equal(first_visible_key(4, 4, **spans), first_visible_key(4, 4, attention_mask=mask))
    assert first_visible_key(5, 5, cu_seqlens=torch.tensor([0, 2, 2, 5])).tolist() == [[[0, 0, 2, 2, 2]]]


def change(**new):
    return lambda inputs: {**inputs, **new}


def alter(names, function):
    return lambda inputs: {**inputs, **{name: function(inputs[name]) for name in names}}


NO_START = torch.zeros(2, dtype=torch.long)
HOLES = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]] * 2)
LONG = torch.zeros(1, 1, 8, dtype=torch.long)
LOG_F = ("log_f",)
BAD = {
    "bf16 gate": (alter(LOG_F, lambda x: x.bfloat16()), ValueError, "float32"),
    "gate per kv head": (alter(LOG_F, lambda x: x[:, :1]), ValueError, "one gate per query head"),
    "gate too short": (alter(LOG_F, lambda x: x[..., :3]), ValueError, "log_f is"),
    "mixed dtypes": (alter("v", lambda x: x.bfloat16()), ValueError, "share one dtype"),
    "float64": (alter("qkv", lambda x: x.double()), NotImplementedError, "float64"),
    "mixed devices": (alter("v", lambda x: x.to("meta")), ValueError, "move them together"),
    "three dimensions": (alter("q", lambda x: x[0]), ValueError, "must be"),
    "heads do not divide": (alter("kv", lambda x: x.repeat(1, 3, 1, 1)), ValueError, "divides"),
    "more queries than keys": (alter("q", lambda x: x.repeat(1, 1, 2, 1)), ValueError, "queries for"),
    "large head": (alter("qkv", lambda x: x.repeat(1, 1, 1, 20)), NotImplementedError, "head size 320"),
    "positive tolerance": (change(log_pruning_tolerance=1.0), ValueError, "at most 0"),
    "two descriptions": (change(starts=NO_START, cu_seqlens=torch.tensor([0, 8])), ValueError, "one of them"),
    "bound and window": (change(window=3, first_key=LONG.int()), ValueError, "already holds"),
    "bound of int64": (change(first_key=LONG), ValueError, "int32"),
    "starts of another batch": (change(starts=NO_START.repeat(2)), ValueError, "another batch size"),
    "no window": (change(window=0), ValueError, "starts at 1"),
    "mask too short": (change(attention_mask=HOLES[:, :7]), ValueError, "one entry per key"),
    "mask with holes": (change(attention_mask=HOLES), NotImplementedError, "between real"),
    "falling cu_seqlens": (change(cu_seqlens=torch.tensor([0, 5, 3, 8])), ValueError, "must rise"),
    "cu_seqlens too short": (change(cu_seqlens=torch.tensor([0, 5])), ValueError, "must rise"),
    "float cu_seqlens": (change(cu_seqlens=torch.tensor([0.0, 8.0])), ValueError, "vector of integers"),
    "packed batch": (change(cu_seqlens=torch.tensor([0, 8])), ValueError, "batch of one"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name):
    spoil, error, words = BAD[name]
    inputs = dict(zip(("q", "k", "v", "log_f"), draw(2, 2, 1, 8, 8, 16)))
    inputs = {
        n: x.to(DEVICE) if torch.is_tensor(x) and x.device.type == "cpu" else x for n, x in spoil(inputs).items()
    }
    with pytest.raises(error, match=words):
        forgetting_attention_triton(**inputs)


def test_without_triton_import_works_and_the_call_explains(monkeypatch):
    folder = types.ModuleType("fox_without_triton")
    folder.__path__ = [str(Path(triton_fox.__file__).parent)]
    monkeypatch.setitem(sys.modules, "fox_without_triton", folder)
    monkeypatch.setitem(sys.modules, "triton", None)
    alone = importlib.import_module("fox_without_triton.triton_fox")
    with pytest.raises(ImportError, match="pip install"):
        alone.forgetting_attention_triton(*draw(1, 1, 1, 4, 4, 16)[:4])


def test_source_keeps_to_plain_pointers():
    source = Path(kernels_fox.__file__).read_text()
    assert not re.search(r"block_ptr|tensor_descriptor|atomic|autotune", source.replace("No atomics", ""))
