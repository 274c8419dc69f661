"""Error budgets for the tests of the operator and its kernels, on this device; see scripts/bench/gpu/budget.py."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_longctx.fox import triton_fox


sys.path.append(str(Path(__file__).resolve().parents[2]))  # after the installed package
from scripts.bench.gpu.budget import EPS, RESULTS, error, find_errors, floors, run, run_exact, run_plain
from scripts.bench.gpu.budget import draw as draw_on


__all__ = ["RESULTS", "error", "floors", "run", "run_exact", "run_plain"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
draw = partial(draw_on, device=DEVICE)

runs_triton = [
    pytest.mark.skipif(
        triton_fox.why_not(16, torch.float32, torch.device(DEVICE)) is not None,
        reason="triton is not installed, or was imported without TRITON_INTERPRET=1 where there is no GPU",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy warns at exp2(-inf) and log2(0)
]


def on_triton(test):
    """Marks a test that runs kernels."""
    for mark in runs_triton:
        test = mark(test)
    return test


def padding(T, *spans):
    """attention_mask with real tokens at [start, stop) of each row."""
    mask = torch.zeros(len(spans), T, dtype=torch.long, device=DEVICE)
    for row, (start, stop) in zip(mask, spans):
        row[start:stop] = 1
    return mask


def check_budget(fast, plain, exact, inputs, scale=None, **limits):
    """Assert that `fast` errs within its budget; arguments of `find_errors`."""
    for name, (f, p, allowed) in find_errors(fast, plain, exact, inputs, scale, **limits).items():
        assert f <= allowed, f"{name}: fast {f:.1e}, plain {p:.1e}, allowed {allowed:.1e}"


def check_run(fast, inputs, limits=None, **options):
    """`check_budget` of the definition with these options; `fast` may be the output alone."""
    plain, exact = (f(*inputs, **options) for f in (run_plain, run_exact))
    check_budget(fast, plain, exact, inputs, options.get("scale"), **limits or {})


def check_close(x, y, size, share=0.0):
    """Assert that two float32 sums of terms of at most `size` agree, up to a `share` that one of them omits."""
    torch.testing.assert_close(x, y, atol=float(size) * (16 * EPS + share), rtol=0)


# --- golden vectors; the README next to the data describes the format ---


def load_cases(folder, kind):
    for case in json.loads((folder / "manifest.json").read_text())["cases"]:
        if case["kind"] == kind:
            yield case, load_file(folder / case["file"])


def weights(tensors, prefix="weights/"):
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def check_golden(case, tensors, key, got):
    """Assert that `got` agrees with `tensors[key]` as closely as the case asks; returns True if it asks."""
    checks = [c for c in case["compare"] if c["key"] == key]
    for c in checks:
        want = tensors[key].double()
        excess = (got.detach().double() - want).abs() - (c["atol"] + c["rtol"] * want.abs())
        if "where" in c:
            name, cut = re.fullmatch(r"([^\[]+)(?:\[:, :(\d+)\])?", c["where"]).groups()
            mask = tensors[name].bool()
            excess = excess[mask[:, : int(cut)] if cut else mask]
        assert excess.max() <= 0, f"{case['name']} {key}: {excess.max():.2e} beyond the tolerance"
    return bool(checks)
