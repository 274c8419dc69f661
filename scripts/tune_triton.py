"""The best tiles of `hf_longctx.fox.tiles_fox.TILES` for the GPU at hand.

    python scripts/tune_triton.py --json tune_triton.json
    python scripts/tune_triton.py --compile-only 90 --json tiles_90.json

Candidates are the neighbours of the table's tiles. compile_triton.py compiles them on all cores, which needs no GPU, and
drops what does not fit on the chip or spills much in the hot loop. The others take turns on the GPU, put into the table one
at a time and called through the real launchers: bfloat16, causal, with the bounds that pruning gives but nothing pruned,
and logits bounded as by QK-norm. A tile whose result differs from that of the present tile is never chosen. Times are
medians over rounds, by device events around the kernel itself; `faster` is the median of the ratio to the present tile
within a round. TFLOP/s count the products that a kernel computes, TB/s of decoding the keys, values and gates. Printed at
the end: rows to put into TILES. Pruning works in blocks of the forward tile, and prunes less in larger ones: not measured
here.

FILE is written after every step. A run that finds the FILE of an earlier one leaves out what that one found to fail, such
as a tile that took the device down. `--device cpu` is a dry run in Triton's interpreter, which tells nothing about speed.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from bench_triton import LOGIT_BOUND, ON_GPU, about, draw, draw_decoding, flops, folded, fox, put_tile, table, tiles_of

from hf_longctx.fox import bounds_fox, tiles_fox
from hf_longctx.fox.attention_fox import GATE_QUERY


PRODUCTS = {"forward": 1.0, "dq": 1.5, "dkdv": 2.0}  # in units of the two products of the forward pass
MANY_SPILLS = 0.1  # of the instructions in the hot loop
ROW_TOLERANCE = 0.03  # bfloat16 results of two tiles, row by row
ROUNDS = {"cuda": 15, "cpu": 2}
CLEARLY_FASTER = 1.01  # what a tile must gain to replace the present one


# What to try.


def neighbours(kernel: str, tile: tiles_fox.Tile) -> list[tiles_fox.Tile]:
    """The present tile, and those around it, the nearest first."""

    def fits(x):
        rows = x.BN if kernel == "dkdv" else x.BM
        # fewer rows per warp leave tensor cores idle, more do not fit in registers; decoding has 16 in all
        return min(x.BM, x.BN) >= 16 and x.stages >= 1 and (kernel == "decode" or 16 <= rows // x.warps <= 32)

    def distance(x):
        return sum(abs(math.log2(a / b)) for a, b in zip(x[:3], tile[:3])) + abs(x.stages - tile.stages)

    around = itertools.product(
        [tile.BM] if kernel == "decode" else [tile.BM // 2, tile.BM, tile.BM * 2],
        [tile.BN // 2, tile.BN, tile.BN * 2],
        [2, 4, 8] if kernel == "decode" else [4, 8],
        [tile.stages - 1, tile.stages, tile.stages + 1],
    )
    others = [x for x in itertools.starmap(tiles_fox.Tile, around) if fits(x) and x != tile]
    return [tile, *sorted(others, key=distance)]


def decoding_heads(H: int) -> int:
    """Key heads of the decoding problem, which is about reading them."""
    return max(1, H // 4)


class Problem:
    """Inputs of every kernel for one head size, and the launchers."""

    def __init__(self, D: int, B: int, H: int, T: int, device: str):
        self.shape, self.scale = (B, H, T, D), D**-0.5
        q, k, v, log_f = self.drawn = draw(B, H, T, D, device, grad=False)
        c = log_f.double().cumsum(-1)
        first = torch.zeros(1, 1, T, dtype=torch.int32, device=device)
        self.inputs = (q, k, v, c.float(), (c - c.float()).float(), first, bounds_fox.stop_query(first, T))
        self.bound = torch.full((B, H), LOGIT_BOUND, device=device)
        self.saved, self.do = None, torch.randn_like(q)
        self.few = draw_decoding(B, H, decoding_heads(H), T, D, device)
        self.first = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        self.end = torch.tensor([T], device=device)

    def run(self, kernel: str) -> tuple[torch.Tensor, ...]:
        """The results of the launcher that a kernel belongs to."""
        if kernel == "forward":
            return fox.fox_forward(*self.inputs, self.bound, self.scale)
        if kernel == "decode":
            unit = -GATE_QUERY * self.scale
            return (fox.attend_few(*self.few, unit, self.first, self.end, self.scale),)
        if self.saved is None:
            self.saved = fox.fox_forward(*self.inputs, self.bound, self.scale)
        return fox.fox_backward(self.do, torch.zeros_like(self.saved[1]), *self.inputs, *self.saved, self.scale)

    def rate(self, kernel: str, seconds: float) -> dict[str, float]:
        if kernel == "decode":
            return {"TB/s": sum(x.nbytes for x in self.few[1:]) / seconds / 1e12}
        return {"TFLOP/s": PRODUCTS[kernel] * flops(*self.shape) / seconds / 1e12}

    def difference_from_sdpa(self, o: torch.Tensor) -> float:
        """Of the first rows, from plain attention on folded keys: whether what all tiles agree on is right."""
        want = folded(*(x[:, :, :2048] for x in self.drawn))
        return ((o[:, :, :2048] - want).float().norm() / want.float().norm()).item()


def cases(
    kernel: str, D: int, present: tiles_fox.Tile, capability: int, B: int, H: int, most: int | None
) -> list[dict]:
    """What compile_triton.py is to compile for a kernel, the present tile first."""
    case = {"capability": capability, "kernel": kernel, "dtype": "bf16", "head_dim": D, "bounded": True}
    case |= {"B": B, "H": H, "Hkv": decoding_heads(H) if kernel == "decode" else H}
    return [case | {"tile": list(tile)} for tile in neighbours(kernel, present)[:most]]


# What is known of each tile: one row.


def name_of(row: dict) -> tuple:
    return row["head_dim"], row["kernel"], tuple(row["tile"])


class Report:
    """Everything found so far, as it stands in a file."""

    def __init__(self, path: Path, about: dict, settings: dict):
        self.path, self.contents = path, {"about": about, "settings": settings, "rows": [], "tiles": {}}
        before = json.loads(path.read_text()) if path.exists() else {"about": None}
        same = before["about"] == about
        self.failed = {name_of(row): row for row in before["rows"] if "error" in row} if same else {}

    @property
    def rows(self) -> list[dict]:
        return self.contents["rows"]

    def save(self) -> None:
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.contents, indent=1) + "\n")
        draft.replace(self.path)


# Compiling.


def compiled(cases: list[dict], jobs: int | None, until: float) -> Iterator[dict]:
    """Reports of compile_triton.py as they come, until then. It is a process of its own, since this one may interpret."""
    process = subprocess.Popen(
        [
            sys.executable,
            Path(__file__).with_name("compile_triton.py"),
            "--cases",
            *(["--jobs", str(jobs)] if jobs else []),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        start_new_session=True,  # so that its compilers end with it
    )

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
            raise SystemExit("error: compile_triton.py failed, see above")
    finally:
        timer.cancel()
        kill()
        process.wait()


def why_dropped(row: dict) -> str | None:
    if "error" in row:
        return row["error"]
    if row["shared"] > row["shared_limit"]:
        return f"{row['shared']} bytes of shared memory, {row['shared_limit']} fit"
    if row["blocks_per_sm"] < 1:
        return "more registers than there are"
    if row["hot_loop_spills"] > MANY_SPILLS * row["hot_loop_instructions"]:
        return f"{row['hot_loop_spills']} spills among {row['hot_loop_instructions']} instructions of the hot loop"
    return None


def compile_tiles(report: Report, groups: list[list[dict]], jobs: int | None, until: float) -> None:
    """Adds a row for each case; those that failed in an earlier run are added as they were."""
    nearest_first = [case for rank in itertools.zip_longest(*groups) for case in rank if case is not None]
    report.rows.extend(report.failed[name_of(case)] for case in nearest_first if name_of(case) in report.failed)
    for row in compiled([case for case in nearest_first if name_of(case) not in report.failed], jobs, until):
        if reason := why_dropped(row):
            row["dropped"] = reason
        report.rows.append(row)
        report.save()
    order = [name_of(case) for cases in groups for case in cases]
    report.rows.sort(key=lambda row: order.index(name_of(row)))


# Timing.


def seconds_of(kernel: str, problem: Problem, evicted: torch.Tensor) -> float:
    """Seconds of one launch of a kernel. `evicted` empties the cache before, and keeps the GPU busy until it is launched."""
    launch, taken = fox.launch, []

    def timed(this, *args, **constants):
        if this is not getattr(fox, f"{kernel}_kernel"):
            launch(this, *args, **constants)
        elif evicted.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            evicted.zero_()
            begin.record()
            launch(this, *args, **constants)
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e-3)
        else:
            begin = time.perf_counter()
            launch(this, *args, **constants)
            taken.append(time.perf_counter() - begin)

    with mock.patch.object(fox, "launch", timed):
        problem.run(kernel)
    return taken[0]


def difference(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> float:
    """The largest relative difference of a row of any result; of a small row, relative to the median one."""
    worst = 0.0
    for x, y in zip(got, want):
        size = y.float().norm(dim=-1)
        off = ((x.float() - y.float()).norm(dim=-1) / size.clamp(min=size.median())).max().item()
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def tried(row: dict, problem: Problem, device: str, report: Report) -> tuple[torch.Tensor, ...] | None:
    """What a kernel gives with the tile of `row`; None if it fails, and the end if it takes the device down."""
    row["error"] = row["dropped"] = "the run that tried it ended there"
    report.save()
    try:
        put_tile(row["kernel"], row["head_dim"], tiles_fox.Tile(*row["tile"]), device)
        got = problem.run(row["kernel"])
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        row["error"] = row["dropped"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        report.save()
        if device == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                raise SystemExit(f"error: {name_of(row)} took the device down; run again, it is left out") from lost
        return None
    del row["error"], row["dropped"]
    return got


def time_tiles(rows: list[dict], problem: Problem, device: str, until: float, report: Report) -> tuple | None:
    """Adds to the rows of one kernel what their tiles take. Returns the result of the first that runs, if any."""
    kernel, half = rows[0]["kernel"], (time.monotonic() + until) / 2
    running, want = [], None
    for row in rows:
        if running and time.monotonic() > half:
            row["dropped"] = "no time left"
        elif (got := tried(row, problem, device, report)) is not None:
            row["difference"] = difference(got, got if want is None else want)
            if row["difference"] <= ROW_TOLERANCE:
                running.append(row)
                want = got if want is None else want
            else:
                row["dropped"] = f"differs by {row['difference']:.2g}" if want else "gives what is not finite"
    evicted = torch.empty(2**30 if device == "cuda" else 1, dtype=torch.uint8, device=device)
    taken = [[] for _ in running]
    for i in range(1 + ROUNDS[device]):
        if i > 3 and time.monotonic() > until:
            break
        for row, own in zip(running, taken):
            put_tile(kernel, row["head_dim"], tiles_fox.Tile(*row["tile"]), device)
            own.append(seconds_of(kernel, problem, evicted))
    for row, own in zip(running, taken):
        seconds = statistics.median(own[1:])  # the first round warms up
        row |= {"ms": seconds * 1e3, "rounds": len(own) - 1, **problem.rate(kernel, seconds)}
        row["faster"] = statistics.median(first / mine for first, mine in zip(taken[0][1:], own[1:]))
    report.save()
    return want


def fastest(rows: list[dict]) -> tiles_fox.Tile:
    """The fastest tile; the present one if none is clearly faster."""
    best = max(rows, key=lambda row: row.get("faster", 0.0))
    return tiles_fox.Tile(*(best if best.get("faster", 0.0) >= CLEARLY_FASTER else rows[0])["tile"])


def tune(
    report: Report, groups: list[list[dict]], problem: Problem, device: str, deadline: float
) -> dict[str, tiles_fox.Tile]:
    """Times the tiles of each kernel for one head size. Returns the fastest, if they also give the same together."""
    D, tiles, wanted = problem.shape[-1], {}, {}
    with mock.patch.dict(tiles_of(device)):
        for i, rows in enumerate(groups):
            kernel, now = rows[0]["kernel"], time.monotonic()
            # The present tile is the measure whatever it needs, unless it fails.
            runnable = [row for row in rows if "dropped" not in row or (row is rows[0] and "error" not in row)]
            until = now + (deadline - now) / (len(groups) - i)
            wanted[kernel] = time_tiles(runnable, problem, device, until, report) if runnable else None
            tiles[kernel] = fastest(rows)
            put_tile(kernel, D, tiles[kernel], device)
            print(shown(rows), flush=True)
        if wanted.get("forward"):
            off = problem.difference_from_sdpa(wanted["forward"][0])
            print(f"D = {D}: the forward pass is off from SDPA by {off:.1e}\n", flush=True)
        # the dq pass was timed beside another dk/dv tile, in blocks of which it prepares what that pass reads
        off = max((difference(problem.run(kernel), want) for kernel, want in wanted.items() if want), default=0.0)
    if off > ROW_TOLERANCE:
        print(f"D = {D}: together, {tiles} change the results by {off:.2g}; the present tiles stay\n", flush=True)
        return {}
    return tiles


# Showing.


def shown(rows: list[dict]) -> str:
    """Markdown: the tiles of one kernel, the fastest first where they were timed, and those that were dropped."""
    kept = sorted((row for row in rows if "dropped" not in row), key=lambda row: -row.get("faster", 0.0))
    columns = [
        "tile",
        "registers",
        "hot_loop_spills",
        "instructions_per_logit",
        "serialized",
        "shared",
        "blocks_per_sm",
        "occupancy",
    ]
    columns += [c for c in ("ms", "TFLOP/s", "TB/s", "faster", "difference") if any(c in row for row in kept)]
    dropped = "".join(f"\n- {row['tile']}: {row['dropped']}" for row in rows if "dropped" in row)
    return f"## {rows[0]['kernel']}, D = {rows[0]['head_dim']}\n\n{table(kept, columns)}\n{dropped}\n"


def pasted(key: tuple[int, int], rows: dict[int, tiles_fox.Tiles]) -> str:
    """Rows of TILES as its source has them."""

    def line(D, row):
        return f"        {D}: Tiles({', '.join(f'Tile{tuple(tile)}' for tile in row)}),"

    return "\n".join([f"    {key}: {{", *(line(D, row) for D, row in rows.items()), "    },"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", help="default: 64 128")
    parser.add_argument("--kernel", nargs="+", default=list(tiles_fox.Tiles._fields), choices=tiles_fox.Tiles._fields)
    parser.add_argument("--length", type=int, default=16384, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32768, help="in a batch (default: %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="heads times head size (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="ends then, with what it has (default: %(default)s)"
    )
    parser.add_argument("--candidates", type=int, metavar="N", help="for each kernel and head size (default: all)")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: all cores)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--compile-only", type=int, metavar="CAPABILITY", help="such as 90; needs no GPU, times nothing"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("tune_triton.json"), metavar="FILE", help="default: %(default)s"
    )
    args = parser.parse_args(arguments)
    begin, allowed = time.monotonic(), 60 * args.minutes
    dry = args.device == "cpu"
    if not (dry or ON_GPU or args.compile_only):
        parser.error("no CUDA device is visible; --device cpu makes a dry run, and --compile-only needs none")
    if dry:
        args.length, args.tokens, args.width = 64, 64, 32
    capability = args.compile_only or (90 if dry else tiles_fox.capability_of(torch.device("cuda")))
    key, B = tiles_fox.nearest_key(capability, 2), max(1, args.tokens // args.length)
    present = {D: tiles_fox.TILES[key][tiles_fox.padded(D)] for D in args.head_dim or ([16] if dry else [64, 128])}
    torch.manual_seed(0)

    settings = {"B": B, "T": args.length, "width": args.width, "dtype": "bfloat16"}
    report = Report(args.json, about("cuda" if ON_GPU else "cpu") | {"capability": capability}, settings)
    groups = [
        cases(kernel, D, getattr(row, kernel), capability, B, args.width // D, args.candidates)
        for D, row in present.items()
        for kernel in args.kernel
    ]
    compile_tiles(report, groups, args.jobs, begin + allowed * (1.0 if args.compile_only else 0.6))
    left = sum("dropped" not in row for row in report.rows)
    print(
        f"compiled {len(report.rows)} of {sum(map(len, groups))} tiles in {time.monotonic() - begin:.0f} s, {left} left\n",
        flush=True,
    )
    by_kernel = [list(rows) for _, rows in itertools.groupby(report.rows, key=lambda row: name_of(row)[:2])]
    if args.compile_only:
        print("\n".join(map(shown, by_kernel)))
        return
    measures = [
        name_of(group[0]) for group in groups
    ]  # the present tiles: without one there is nothing to compare with
    best = {}
    for i, (D, row) in enumerate(present.items()):
        own = [rows for rows in by_kernel if rows[0]["head_dim"] == D and name_of(rows[0]) in measures]
        now = time.monotonic()
        until = now + (begin + allowed - now) / (len(present) - i)
        problem = Problem(D, B, args.width // D, args.length, args.device)
        best[tiles_fox.padded(D)] = row._replace(**tune(report, own, problem, args.device, until))
        report.contents["tiles"] = {D: tiles._asdict() for D, tiles in best.items()}
        report.save()
    print(f"To put into TILES:\n\n{pasted(key, best)}")


if __name__ == "__main__":
    main()
