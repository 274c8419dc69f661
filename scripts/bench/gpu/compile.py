"""Compile every kernel specialisation of `hf_longctx.fox.tiles_fox.TILES` to a cubin and report its resources.

    python -m scripts.bench.gpu.compile --capability 90 --head-dim 64 128

No GPU is needed: registers, spills, shared memory and tensor-core instructions are read from the cubin with the
cuobjdump that comes with Triton. Kernels are compiled as their launchers launch them, so that a GPU finds them in
Triton's cache, each in its own process. --bounded 0 compiles without padding, pruning and a bound on the logits,
--bounded 1 with all three. Keys are folded as in a cache, and eight query heads share --kv-heads key heads. The norms
of fused_fox.py are followed by a gate with --bounded 0, and preceded by a token shift with --bounded 1.

Versions of Triton compile differently, so each version has its own JSON file. To use a version that is not installed:
`pip install --no-deps --target FOLDER triton==3.6.0`, then set PYTHONPATH=FOLDER.
"""

import itertools
import math
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from unittest import mock


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hf_longctx.fox import fused_fox, tiles_fox
from hf_longctx.fox import triton_fox as fox
from hf_longctx.fox.attention_fox import GATE_PARTS, folded_width
from hf_longctx.fox.launch_fox import launch_options
from scripts.bench import common


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ATTENTION = ("running_sum", "split_sum", "forward", "dq", "dkdv", "decode", "prune", "merge")
KERNELS = (*ATTENTION, "fused_norm", "fused_norm_backward")
# Bytes of shared memory per multiprocessor and per block; registers, warps and blocks per multiprocessor (CUDA C++
# programming guide, table of technical specifications per compute capability).
LIMITS = {
    80: (167936, 166912, 65536, 64, 32),
    86: (102400, 101376, 65536, 48, 16),
    90: (233472, 232448, 65536, 64, 32),
    100: (233472, 232448, 65536, 64, 32),
}
TENSOR_CORE = r"\b(HMMA|HGMMA|UTC\w*MMA)\b"  # Ampere, Hopper, Blackwell
SPILL = r"\b(?:LDL|STL)\b"
# The assembler puts a wait of the warpgroup after every product whose registers it cannot distinguish from those of
# other instructions, and the tensor cores then idle most of the time.
COUNTED = {
    "products": TENSOR_CORE,
    "spills": SPILL,
    "waits": r"WARPGROUP\.DEPBAR",
    "exponentials": r"MUFU\.EX2",
}
TABLE = """
| kernel | head_dim | heads of a key head | products | registers | spilled bytes | blocks per multiprocessor |\
 instructions per logit | error |
| {kernel} | {head_dim} | {group} | {products} | {registers} | {spill_bytes} | {blocks_per_sm} |\
 {instructions_per_logit:.1f} | {error} |
"""
FIELDS = ("capability", "dtype", "kernel", "head_dim", "kv_heads", "bounded")


class Target:
    """A Triton driver for a GPU that is absent. One number is both device and capability."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


def call_launcher(kernel, dtype, D, bounded, B, H, Hkv):
    """Call the launcher of a kernel on uninitialized tensors; keys are folded, as in a cache."""
    T, scale, group = 64, D**-0.5, H // Hkv
    keys = torch.empty(B, Hkv, T, folded_width(D, group, torch.device("cuda")), dtype=dtype)
    k = v = keys[..., :D]
    first = torch.empty(1, 1, T, dtype=torch.int32) if bounded else None
    if kernel not in ATTENTION:
        launch_fused_norm(kernel, torch.empty(B, T, H, D, dtype=dtype), bounded)
    elif kernel == "running_sum":
        fox.launch_running_sum(torch.empty(B, H, T), first)
    elif kernel in ("split_sum", "forward", "dq", "dkdv"):
        q, o, do = (torch.empty(B, T, H, D, dtype=dtype).transpose(1, 2) for _ in range(3))
        c, lse = torch.empty(B, H, T, dtype=torch.float64), torch.empty(B, H, T)
        if kernel == "forward" or (kernel == "split_sum" and not bounded):  # the backward pass needs the query ends
            known = bounded or kernel == "split_sum"
            fox.launch_forward(q, k, v, c, first, torch.empty(B, H) if known else None, scale)
        else:
            fox.launch_backward(do, q, k, v, c, first, o, lse, scale)
    else:
        gates = keys[..., D : D + GATE_PARTS * group].unflatten(-1, (group, GATE_PARTS)).transpose(2, 3)
        q, end = torch.empty(B, H, 1, D, dtype=dtype), torch.tensor([T])
        first = torch.empty(1, 1, 1, dtype=torch.int32) if bounded else None
        bound = torch.empty(H) if kernel == "prune" else None
        fox.launch_decode(q, k, v, gates, 1.0, first, end, scale, -10.0, bound)


def launch_fused_norm(kernel, x, shifted):
    """Launch QK-norm after the token shift of packed documents, or a norm with a gate after it."""
    B, T, H, D = x.shape
    weight, share, index = torch.empty(H * D), torch.empty(B, T, 2 * H), torch.empty(1, T, dtype=torch.int64)
    y = x.flatten(2)
    inputs = (y, weight, None, y, y, weight, share, index, index) if shifted else (x, weight, y, *(None,) * 6)
    if kernel == "fused_norm":
        fused_fox.launch_fused_norm(*inputs, D, 1e-6, "silu", x.dtype)
    else:
        gradients = (x, x, x) if shifted else (x, None, None)
        fused_fox.launch_fused_norm_backward(*gradients, *inputs, D, 1e-6, "silu")


def compile_launch(capability, kernel, tiles, *case):
    """Return the compiled kernel of a launch, and its tile."""
    launches, module = [], fox if kernel in ATTENTION else fused_fox

    def compile_only(this, programs, tile, *args, **constants):
        if this is getattr(module, f"{kernel}_kernel"):
            options = launch_options(tile) | constants
            launches.append((this.warmup(*args, grid=(programs,), **options), tile))

    driver.set_active(Target(capability))
    with mock.patch.object(module, "launch", compile_only), mock.patch.object(fox, "tiles_for", lambda *_: tiles):
        call_launcher(kernel, *case)
    return launches[0]


def cuobjdump(option, cubin):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True).stdout


def hot_loop(sass):
    """Return instruction counts of the loop with most of the work: the innermost one with the fewest per logit."""
    code = [(int(a, 16), text) for a, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    jumps = [(int(m[1], 16), a) for a, text in code if (m := re.search(r"\bBRA\b.*0x([0-9a-f]+)", text))]
    loops = [(lo, hi) for lo, hi in jumps if lo < hi]
    best = dict.fromkeys(("instructions", *COUNTED), 0)
    for lo, hi in loops:
        body = [text for a, text in code if lo <= a <= hi]
        counts = {what: sum(bool(re.search(pattern, text)) for text in body) for what, pattern in COUNTED.items()}
        counts["instructions"] = len(body)
        contains_a_loop = any(lo <= other[0] and other[1] <= hi for other in loops if other != (lo, hi))
        if contains_a_loop or not (counts["products"] and counts["exponentials"]):
            continue
        fewer = counts["instructions"] * best["exponentials"] < best["instructions"] * counts["exponentials"]
        if fewer or not best["products"]:
            best = counts
    return best


def nearest_limits(capability):
    """Return the key of `LIMITS` for a capability, or else for the capability whose tiles it uses."""
    return max(c for c in LIMITS if c <= tiles_fox.nearest_key(capability, 2)[0])


def report(capability, kernel, dtype, head_dim, bounded, tile=None, B=2, H=8, kv_heads=2):
    """Compile one specialisation, with the table's tile or another one, and read its resources.

    Triton specialises on sizes that are 1 or multiples of 16, and so on the batch B and the heads H and `kv_heads`.
    """
    tiles = tiles_fox.TILES[tiles_fox.nearest_key(capability, DTYPES[dtype].itemsize)][tiles_fox.padded(head_dim)]
    if tile is not None:
        tiles = tiles._replace(**{kernel: tiles_fox.Tile(*tile)})
    compiled, tile = compile_launch(capability, kernel, tiles, DTYPES[dtype], head_dim, bounded, B, H, kv_heads)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = cuobjdump("--dump-resource-usage", cubin), cuobjdump("--dump-sass", cubin)
    registers, stack = (int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    shared, loop = compiled.metadata.shared, hot_loop(sass)
    per_sm, per_block, all_registers, all_warps, all_blocks = LIMITS[nearest_limits(capability)]
    blocks = min(
        per_sm // (shared + 1024),  # the driver keeps 1 KiB per block
        all_registers // (-(-registers // 8) * 8 * 32 * tile.warps),
        all_warps // tile.warps,
        all_blocks,
    )
    return {
        "capability": capability,
        "kernel": kernel,
        "dtype": dtype,
        "head_dim": head_dim,
        "kv_heads": kv_heads,
        "group": H // kv_heads,
        "bounded": bounded,
        "products": tile.products,
        "tile": list(tile),
        "registers": registers,
        "spill_bytes": stack,
        "hot_loop_instructions": loop["instructions"],
        "hot_loop_spills": loop["spills"],
        "instructions_per_logit": loop["instructions"] * 32 * tile.warps / (tile.BM * tile.BN),
        "serialized": loop["waits"] >= loop["products"] > 2,
        "shared": shared,
        "shared_limit": per_block,
        "tensor_core": "+".join(sorted(set(re.findall(TENSOR_CORE, sass)))) or "no tensor cores",
        "blocks_per_sm": blocks,
    }


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["hf_longctx.fox.triton_fox", "triton.compiler"])  # processes then start quickly


def send_report(pipe, case):
    try:
        pipe.send(report(**case))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"})


def report_from_process(case, until):
    """Return `case` and its report, or the error; a compiler that crashes takes no other case with it."""
    if time.monotonic() > until:
        return case | {"error": "no time left"}
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=send_report, args=(sender, case))
    process.start()
    sender.close()
    try:
        row = receiver.recv()
    except EOFError:
        row = {"error": "the compiler crashed"}
    process.join()
    return case | row


def reports(cases, jobs, until=math.inf):
    """Yield the reports of cases, the arguments of `report`, as they finish, `jobs` at a time; none begins later."""
    with ThreadPoolExecutor(jobs) as threads:
        tasks = [threads.submit(report_from_process, case, until) for case in cases]
        yield from (task.result() for task in as_completed(tasks))


def measure(args):
    cases = [dict(zip(FIELDS, case)) for case in itertools.product(*(getattr(args, name) for name in FIELDS))]
    yield from reports([case | {"bounded": bool(case["bounded"])} for case in cases], args.jobs)


def table(result):
    def group_of(row):
        return row["capability"], row["dtype"], row["bounded"]

    def order(row):
        return *group_of(row), KERNELS.index(row["kernel"]), row["head_dim"], row["kv_heads"]

    tables = []
    for (capability, dtype, bounded), rows in itertools.groupby(sorted(result["rows"], key=order), key=group_of):
        logits = "bounded" if bounded else "unbounded"
        tables.append(f"sm_{capability}, {dtype}, {logits} logits:\n\n{common.markdown(list(rows), TABLE)}")
    return "\n\n".join(tables)


def main(arguments=None):
    options = {"capability": [80, 90, 100], "head_dim": [16, 32, 64, 128, 256], "kv_heads": [2], "bounded": [0, 1]}
    version = ".".join(triton.__version__.split(".")[:2])
    parser = common.make_parser(__spec__.name, __doc__, name=f"gpu_compile_{version}", **options)
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=DTYPES, help="dtypes (default: both)")
    parser.add_argument(
        "--kernel", nargs="+", default=list(KERNELS), choices=KERNELS, help="kernels to compile (default: all)"
    )
    cores = min(32, len(os.sched_getaffinity(0)))  # each compiler takes memory
    parser.add_argument(
        "--jobs", type=int, default=cores, metavar="N", help="number of processes (default: all cores)"
    )
    rows = common.run(parser, measure, table, arguments)["rows"]
    if any("error" in row for row in rows):
        raise SystemExit("error: some kernels did not compile")


if __name__ == "__main__":
    main()
