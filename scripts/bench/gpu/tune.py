"""The best tiles of `hf_longctx.fox.tiles_fox.TILES` for the GPU at hand.

    python -m scripts.bench.gpu.tune
    python -m scripts.bench.gpu.tune --compile-only 90 --output tiles_90.json

Candidates are the neighbours of the table's tiles. scripts/bench/gpu/compile.py compiles them on all cores, without a
GPU. Those that do not fit on the chip or spill much in the hot loop are dropped. The others take turns on the GPU, put
into the table one at a time and called through the real launchers: bfloat16, causal, with the bounds of pruning but
nothing pruned, and logits bounded as by QK-norm. A tile whose result differs from that of the present tile is never
chosen. Times are medians over rounds, by device events around the kernel itself; `faster` is the median of the ratio
to the present tile within a round. A batch has --tokens, and --width is heads times head size. TFLOP/s of dq and dk/dv
count five of the seven products that the two compute, as is usual; TB/s of decoding the keys, values and gates.
Printed at the end: rows to put into TILES. Pruning works in blocks of the largest tile, and prunes less in larger
ones: not measured here.

The JSON is written after every step. A run that finds the JSON of an earlier one leaves out the tiles that failed
there, such as a tile that took the device down. `--device cpu` is a dry run in Triton's interpreter, which shows
nothing about speed.
"""

import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from unittest import mock

import torch

from hf_longctx.fox import key_ranges_fox, tiles_fox
from hf_longctx.fox.attention_fox import GATE_QUERY
from scripts.bench import common
from scripts.bench.gpu.bench import draw, draw_decoding, flops, fox, launched_tiles, put_tile
from scripts.bench.gpu.peers import LOGIT_BOUND, folded


# in units of the two products of the forward pass; three of dq and four of dk/dv stand for five
USEFUL_PRODUCTS = {"forward": 1.0, "dq": 1.5 * 5 / 7, "dkdv": 2.0 * 5 / 7}
MANY_SPILLS = 0.1  # of the instructions in the hot loop
ROW_TOLERANCE = 0.03  # bfloat16 results of two tiles, row by row
ROUNDS = {"cuda": 15, "cpu": 1}
CLEARLY_FASTER = 1.01  # the gain for which a tile replaces the present one
TABLE = """
| tile | registers | spills | instructions | serialized | shared | blocks | occupancy |\
 ms | TFLOP/s | TB/s | faster | difference |
| {tile} | {registers} | {hot_loop_spills} | {instructions_per_logit:.3g} | {serialized} | {shared} |\
 {blocks_per_sm} | {occupancy:.0%} | {ms:.3g} | {TFLOP/s:.3g} | {TB/s:.3g} | {faster:.3g} | {difference:.1e} |
"""


# What to try.


def neighbours(kernel, tile):
    """The present tile, and those around it, the nearest first."""

    def fits(x):
        rows = x.BN if kernel == "dkdv" else x.BM
        # fewer rows per warp leave tensor cores idle, more do not fit in registers; decoding has 16 in all
        return min(x.BM, x.BN) >= 16 and x.stages >= 1 and (kernel == "decode" or 16 <= rows // x.warps <= 32)

    def distance(x):
        added = abs(x.stages - tile.stages) + abs(x.products - tile.products)
        return sum(abs(math.log2(a / b)) for a, b in zip(x[:3], tile[:3])) + added

    around = itertools.product(
        [tile.BM] if kernel == "decode" else [tile.BM // 2, tile.BM, tile.BM * 2],
        [tile.BN // 2, tile.BN, tile.BN * 2],
        [2, 4, 8] if kernel == "decode" else [4, 8],
        [tile.stages - 1, tile.stages, tile.stages + 1],
        [0, 1, 2] if kernel == "forward" else [0],
    )
    others = [x for x in itertools.starmap(tiles_fox.Tile, around) if fits(x) and x != tile]
    return [tile, *sorted(others, key=distance)]


def decoding_heads(H):
    """Key heads of the decoding problem, which is about reading them."""
    return max(1, H // 4)


class Problem:
    """Inputs of every kernel for one head size, and the launchers."""

    def __init__(self, D, B, H, T, device):
        self.shape, self.scale = (B, H, T, D), D**-0.5
        q, k, v, log_f = self.drawn = draw(B, H, T, D, device, grad=False)
        c = fox.fox_running_sum(log_f, None)
        first = torch.zeros(1, 1, T, dtype=torch.int32, device=device)
        self.inputs = (q, k, v, c, first, key_ranges_fox.find_query_end(first, T))
        self.bound = torch.full((B, H), LOGIT_BOUND, device=device)
        self.saved, self.do = None, torch.randn_like(q)
        self.few = draw_decoding(B, H, decoding_heads(H), T, D, device)
        self.first = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        self.end = torch.tensor([T], device=device)

    def run(self, kernel):
        """The results of the launcher that a kernel belongs to."""
        if kernel == "forward":
            return fox.fox_forward(*self.inputs, self.bound, self.scale)
        if kernel == "decode":
            gate_scale = -GATE_QUERY * self.scale
            return (fox.triton_decode(*self.few, gate_scale, self.first, self.end, self.scale),)
        if self.saved is None:
            self.saved = fox.fox_forward(*self.inputs, self.bound, self.scale)
        return fox.fox_backward(self.do, torch.zeros_like(self.saved[1]), *self.inputs, *self.saved, self.scale)

    def rate(self, kernel, seconds):
        if kernel == "decode":
            return {"TB/s": sum(x.nbytes for x in self.few[1:]) / seconds / 1e12}
        return {"TFLOP/s": USEFUL_PRODUCTS[kernel] * flops(*self.shape) / seconds / 1e12}

    def difference_from_sdpa(self, o):
        """Relative difference of the first rows from SDPA on folded keys, because all tiles may be wrong."""
        expected = folded(*(x[:, :, :2048] for x in self.drawn))
        return ((o[:, :, :2048] - expected).float().norm() / expected.float().norm()).item()


def cases(kernel, D, present, capability, B, H, most):
    """The candidates for a kernel as compile.py takes them, the present tile first."""
    case = {"capability": capability, "kernel": kernel, "dtype": "bf16", "head_dim": D, "bounded": True}
    case |= {"B": B, "H": H, "kv_heads": decoding_heads(H) if kernel == "decode" else H}
    return [case | {"tile": list(tile)} for tile in neighbours(kernel, present)[:most]]


# The results, one row for each tile.


def row_key(row):
    return row["head_dim"], row["kernel"], tuple(row["tile"])


class Report:
    """The results so far, kept in a file. `failed`: rows of an earlier run there, of the same device and commit."""

    def __init__(self, path, result):
        self.path, self.contents = path, result | {"tiles": {}}
        self.rows = result["rows"]
        before = json.loads(path.read_text()) if path.exists() else {"rows": []}
        same = all(before.get(key) == result[key] for key in ("device", "versions", "commit"))
        self.failed = {row_key(row): row for row in before["rows"] if same and "error" in row}

    def save(self):
        common.save(self.path, self.contents)


# Compiling.


def compiled(cases, jobs, until):
    """Reports of compile.py as they come, from another process, because this one may interpret kernels."""
    command = [sys.executable, "-m", "scripts.bench.gpu.compile", "--cases", *(["--jobs", str(jobs)] if jobs else [])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    # a session of its own, so that its compilers end with it
    process = subprocess.Popen(command, **pipes, cwd=common.ROOT, env=environment, start_new_session=True)

    def kill():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(until - time.monotonic(), kill)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # killed already: no time was left
            process.stdin.write("".join(json.dumps(case) + "\n" for case in cases))
            process.stdin.close()
        yield from map(json.loads, process.stdout)
        if process.wait() > 0:
            raise SystemExit("error: scripts.bench.gpu.compile failed, see above")
    finally:
        timer.cancel()
        kill()
        process.wait()


def reason_to_drop(row):
    if "error" in row:
        return row["error"]
    if row["shared"] > row["shared_limit"]:
        return f"{row['shared']} bytes of shared memory, {row['shared_limit']} fit"
    if row["blocks_per_sm"] < 1:
        return "more registers than there are"
    if row["hot_loop_spills"] > MANY_SPILLS * row["hot_loop_instructions"]:
        return f"{row['hot_loop_spills']} spills among {row['hot_loop_instructions']} instructions of the hot loop"
    return None


def compile_tiles(report, groups, jobs, until):
    """Adds a row for each case; those that failed in an earlier run are added as they were."""
    nearest_first = [case for rank in itertools.zip_longest(*groups) for case in rank if case is not None]
    report.rows.extend(report.failed[row_key(case)] for case in nearest_first if row_key(case) in report.failed)
    for row in compiled([case for case in nearest_first if row_key(case) not in report.failed], jobs, until):
        if reason := reason_to_drop(row):
            row["dropped"] = reason
        report.rows.append(row)
        report.save()
    order = [row_key(case) for cases in groups for case in cases]
    report.rows.sort(key=lambda row: order.index(row_key(row)))
    report.save()


# Timing.


def launch_seconds(kernel, problem, scratch):
    """Seconds of one launch of a kernel, without those of the other kernels that its launcher starts."""
    launch, seconds = fox.launch, []

    def timed(this, *args, **constants):
        if this is getattr(fox, f"{kernel}_kernel"):
            run = lambda: launch(this, *args, **constants)  # noqa: E731
            seconds.append(common.timed(run, device=scratch.device.type, scratch=scratch)[0])
        else:
            launch(this, *args, **constants)

    with mock.patch.object(fox, "launch", timed):
        problem.run(kernel)
    return seconds[0]


def difference(actual, expected):
    """The largest difference of a row of any result, relative to that row or to the median row, if larger."""
    worst = 0.0
    for x, y in zip(actual, expected):
        size = y.float().norm(dim=-1)
        off = ((x.float() - y.float()).norm(dim=-1) / size.clamp(min=size.median())).max().item()
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def try_tile(row, problem, device, report):
    """The results with the tile of `row`, or None if it fails. Ends the program if the tile takes the device down."""
    row["error"] = row["dropped"] = "the run that tried it ended there"
    report.save()
    try:
        put_tile(row["kernel"], row["head_dim"], tiles_fox.Tile(*row["tile"]), device)
        results = problem.run(row["kernel"])
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        row["error"] = row["dropped"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        report.save()
        if device == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                raise SystemExit(f"error: {row_key(row)} took the device down; run again, it is left out") from lost
        return None
    del row["error"], row["dropped"]
    return results


def time_tiles(rows, problem, device, until, report):
    """Adds times and rates to the rows of one kernel. Returns the results of the first tile that runs, if any."""
    kernel, half = rows[0]["kernel"], (time.monotonic() + until) / 2
    running, expected = [], None
    for row in rows:
        if running and time.monotonic() > half:
            row["dropped"] = "no time left"
        elif (results := try_tile(row, problem, device, report)) is not None:
            row["difference"] = difference(results, results if expected is None else expected)
            if row["difference"] <= ROW_TOLERANCE:
                running.append(row)
                expected = results if expected is None else expected
            else:
                row["dropped"] = f"differs by {row['difference']:.2g}" if expected else "results are not finite"
    scratch = torch.empty(2**30 if device == "cuda" else 1, dtype=torch.uint8, device=device)

    def time_once(row):
        put_tile(kernel, row["head_dim"], tiles_fox.Tile(*row["tile"]), device)
        return launch_seconds(kernel, problem, scratch)

    turns = {row_key(row): lambda row=row: time_once(row) for row in running}
    seconds = common.alternate(turns, ROUNDS[device], until)
    for row in running:
        median = statistics.median(seconds[row_key(row)])
        row |= {"ms": median * 1e3, "rounds": len(seconds[row_key(row)]), **problem.rate(kernel, median)}
        row["faster"] = common.median_ratio(seconds[row_key(running[0])], seconds[row_key(row)])
    report.save()
    return expected


def fastest(rows):
    """The fastest tile; the present one if none is clearly faster."""
    best = max(rows, key=lambda row: row.get("faster", 0.0))
    return tiles_fox.Tile(*(best if best.get("faster", 0.0) >= CLEARLY_FASTER else rows[0])["tile"])


def tune(report, groups, problem, device, deadline):
    """Times the tiles of each kernel for one head size. Returns the fastest, if they agree when used together."""
    D, tiles, expected = problem.shape[-1], {}, {}
    with mock.patch.dict(launched_tiles(device)):
        for i, rows in enumerate(groups):
            kernel, now = rows[0]["kernel"], time.monotonic()
            # The present tile is the measure whatever it needs, unless it fails.
            runnable = [row for row in rows if "dropped" not in row or (row is rows[0] and "error" not in row)]
            until = now + (deadline - now) / (len(groups) - i)
            expected[kernel] = time_tiles(runnable, problem, device, until, report) if runnable else None
            tiles[kernel] = fastest(rows)
            put_tile(kernel, D, tiles[kernel], device)
            print(table(rows), flush=True)
        if expected.get("forward"):
            off = problem.difference_from_sdpa(expected["forward"][0])
            print(f"D = {D}: the forward pass is off from SDPA by {off:.1e}\n", flush=True)
        # The dq pass prepares the input of the dk/dv pass in blocks of its tile, and was timed with another one.
        off = max((difference(problem.run(kernel), x) for kernel, x in expected.items() if x), default=0.0)
    if off > ROW_TOLERANCE:
        print(f"D = {D}: together, {tiles} change the results by {off:.2g}; the present tiles stay\n", flush=True)
        return {}
    return tiles


# Showing.


def table(rows):
    """Markdown: the tiles of one kernel, the fastest first where they were timed, and those that were dropped."""
    kept = sorted((row for row in rows if "dropped" not in row), key=lambda row: -row.get("faster", 0.0))
    dropped = "".join(f"\n- {row['tile']}: {row['dropped']}" for row in rows if "dropped" in row)
    return f"## {rows[0]['kernel']}, D = {rows[0]['head_dim']}\n\n{common.markdown(kept, TABLE)}\n{dropped}\n"


def by_kernel(rows):
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row_key(row)[:2])]


def source(key, rows):
    """Rows of TILES as in tiles_fox.py."""

    def line(D, row):
        return f"        {D}: Tiles({', '.join(f'Tile{tuple(tile)}' for tile in row)}),"

    return "\n".join([f"    {key}: {{", *(line(D, row) for D, row in rows.items()), "    },"])


def main(arguments=None):
    kernels, begin = tiles_fox.Tiles._fields, time.monotonic()
    sizes = {"length": 16384, "tokens": 32768, "width": 2048}
    parser = common.make_parser(__spec__.name, __doc__, **sizes, minutes=8.0, device="cuda")
    parser.add_argument("--head-dim", type=int, nargs="+", help="default: 64 128")
    parser.add_argument("--kernel", nargs="+", default=list(kernels), choices=kernels)
    parser.add_argument("--candidates", type=int, metavar="N", help="for each kernel and head size (default: all)")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: all cores)")
    parser.add_argument("--compile-only", type=int, metavar="CAPABILITY", help="such as 90; no GPU, no times")
    args = parser.parse_args(arguments)
    if args.table is not None:
        print("\n".join(map(table, by_kernel(json.loads(args.table.read_text())["rows"]))))
        return
    dry = args.device == "cpu"
    if dry:
        args.length, args.tokens, args.width = 64, 64, 32
    if args.compile_only:
        args.device = "cpu"
    result = common.describe_run(parser, args, arguments)
    capability = args.compile_only or (90 if dry else tiles_fox.capability_of(torch.device("cuda")))
    key, B = tiles_fox.nearest_key(capability, 2), max(1, args.tokens // args.length)
    present = {D: tiles_fox.TILES[key][tiles_fox.padded(D)] for D in args.head_dim or ([16] if dry else [64, 128])}
    torch.manual_seed(0)
    settings = {"B": B, "T": args.length, "width": args.width, "dtype": "bfloat16"}
    device = [result["machine"]["device"], capability]
    report, allowed = Report(args.output, result | {"settings": settings, "device": device}), 60 * args.minutes
    groups = [
        cases(kernel, D, getattr(row, kernel), capability, B, args.width // D, args.candidates)
        for D, row in present.items()
        for kernel in args.kernel
    ]
    compile_tiles(report, groups, args.jobs, begin + allowed * (1.0 if args.compile_only else 0.6))
    left = sum("dropped" not in row for row in report.rows)
    count = f"{len(report.rows)} of {sum(map(len, groups))} tiles"
    print(f"compiled {count} in {time.monotonic() - begin:.0f} s, {left} left\n", flush=True)
    if args.compile_only:
        print("\n".join(map(table, by_kernel(report.rows))))
        return
    present_tiles = {row_key(group[0]) for group in groups}  # without its present tile, a kernel has no comparison
    best = {}
    for i, (D, row) in enumerate(present.items()):
        kernels = [
            rows for rows in by_kernel(report.rows) if rows[0]["head_dim"] == D and row_key(rows[0]) in present_tiles
        ]
        now = time.monotonic()
        until = now + (begin + allowed - now) / (len(present) - i)
        problem = Problem(D, B, args.width // D, args.length, args.device)
        best[tiles_fox.padded(D)] = row._replace(**tune(report, kernels, problem, args.device, until))
        report.contents["tiles"] = {D: tiles._asdict() for D, tiles in best.items()}
        report.save()
    print(f"To put into TILES:\n\n{source(key, best)}")


if __name__ == "__main__":
    main()
