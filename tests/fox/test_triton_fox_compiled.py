"""Compilation of the kernels without a GPU: every row of the tile table fits the chip, and graphs hold kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run


pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
# About 25 minutes in total on two cores. Run it when you change a kernel or a tile.
exhaustive = pytest.mark.skipif(
    not os.environ.get("HF_LONGCTX_COMPILE_ALL"), reason="compiles for minutes; HF_LONGCTX_COMPILE_ALL=1 runs it"
)
PRODUCING = ("forward", "dq", "dkdv", "decode")  # kernels with matrix products
PRODUCTS = {80: "HMMA", 86: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def compile_all(tmp_path, *options):
    """Compile in a new process, because this process may interpret kernels."""
    target, environment = tmp_path / "report.json", {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "scripts.bench.gpu.compile", "--output", str(target), *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(target.read_text())["rows"]


def check(rows, capability, dtype):
    for row in rows:
        assert row["shared"] <= row["shared_limit"], row
        assert row["blocks_per_sm"] >= 1, row
        if row["kernel"] not in PRODUCING:
            continue
        assert "MMA" in row["tensor_core"], row
        if dtype != "fp32" and row["head_dim"] in (16, 32, 64, 128):
            assert row["hot_loop_spills"] <= 0.05 * row["hot_loop_instructions"], row  # some addresses are read back
            assert not row["serialized"] or row["head_dim"] == 16, row
            if row["kernel"] != "decode":  # 16 rows are too few for the warpgroup instructions
                assert PRODUCTS[capability] in row["tensor_core"], row


REPORTS = """
import json, sys
for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
    del sys.modules[name]  # was imported to interpret
from scripts.bench.gpu.compile import report
cases = ("dkdv", 64, True), ("forward", 32, True), ("forward", 64, False)
cases += ("fused_norm", 64, False), ("fused_norm_backward", 64, False), ("fused_norm_backward", 64, True)
print(json.dumps([report(90, kernel, "bf16", head_dim, bounded) for kernel, head_dim, bounded in cases]))
"""


def test_common_sizes(tmp_path):
    """Bounds add loops to the kernels. The forward pass also has a variant without a bound on the logits."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = run(["python", "-c", REPORTS], env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    check(rows, 90, "bf16")
    assert not any(row["spill_bytes"] for row in rows if row["kernel"].startswith("fused"))


# Options of scripts.bench.gpu.compile. Specialised on groups of one head, the dk/dv pass of Hopper would wait for each
# of its products; fp16 has the tiles of bf16.
CASES = ["--capability 90 --kernel dkdv --dtype bf16 --head-dim 64 --bounded 1 --kv-heads 8"]
CASES += [f"--capability {capability} --dtype {dtype}" for capability in PRODUCTS for dtype in ("bf16", "fp32")]
CASES += ["--capability 90 --dtype fp16 --head-dim 64 128", "--capability 90 --dtype bf16 --head-dim 72 80 96 192"]


@exhaustive
@pytest.mark.parametrize("case", CASES)
def test_whole_table(tmp_path, case):
    options = case.split()
    rows = compile_all(tmp_path, *options)
    assert "--head-dim" in options or len(rows) == 5 * 10 * 2  # head sizes, kernels, with and without bounds
    check(rows, int(options[1]), options[options.index("--dtype") + 1])


GRAPHS = """
import json, torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses import FakeTensorMode
from triton.runtime import driver
from hf_longctx.fox.triton_fox import triton_attention
from scripts.bench.gpu.compile import Target

driver.set_active(Target(90))
graphs = []

def record(graph, inputs):
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    kernels = [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in calls if "kernel_idx" in node.kwargs]
    graphs.append([kernel.fn.__name__ for kernel in kernels] + [str(n.target) for n in calls if "fox_" in str(n.target)])
    return graph

attention = torch.compile(
    lambda *x: triton_attention(*x, log_pruning_tolerance=-10.0, logit_bound=9.0),
    fullgraph=True,
    backend=aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition),
)
with FakeTensorMode():
    inputs = [torch.empty(1, heads, 2048, 64, requires_grad=True) for heads in (2, 1, 1)]
    attention(*inputs, torch.empty(1, 2, 2048, requires_grad=True)).sum().backward()
print(json.dumps(graphs))
"""


def test_kernels_are_nodes_of_the_graph():
    """Inductor launches them itself; the operators are gone."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", GRAPHS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    forward, backward = json.loads(done.stdout)
    # The backward pass splits the sum again. PyTorch decides which of the graphs contains this call.
    assert forward[:4] == ["running_sum_kernel", "prune_kernel", "split_sum_kernel", "forward_kernel"]
    assert backward[-3:] == ["dq_kernel", "dkdv_kernel", "running_sum_kernel"]
    assert forward[4:] + backward[:-3] == ["split_sum_kernel"]
