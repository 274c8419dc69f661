"""Find the fastest tiles of `hf_longctx.fox.tiles_fox.TILES` for this machine's GPU.

    python -m scripts.bench.gpu.tune

Candidates are the neighbours of the table's tiles. compile.py compiles them on all cores, the nearest first, and those
that do not fit on the chip or spill much in the hot loop are dropped. The others alternate on the GPU, called through
the real launchers: causal attention in bfloat16, with pruning bounds that prune nothing, and with logits bounded as
after QK-norm. A tile whose result differs from that of the current tile is never chosen. Times are medians over
rounds, by device events around the kernel; "faster" is the median per-round ratio to the current tile. A batch
has --tokens, and --width is heads times head_dim. TFLOP/s of dq and dk/dv count five of the seven products that the
two passes compute, as usual; TB/s of decoding count keys, values and gates.

Rows for TILES are printed at the end. Pruning works in blocks of the largest tile, so larger tiles prune less, which
is not measured here. `--device cpu` is a dry run in Triton's interpreter, which compiles nothing.
"""

import itertools
import math
import os
import statistics
import time
from unittest import mock

import torch
import torch.nn.functional as F


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from hf_longctx.fox import tiles_fox
from hf_longctx.fox import triton_fox as fox
from hf_longctx.fox.attention_fox import GATE_PARTS, GATE_QUERY, fold_keys
from scripts.bench import common
from scripts.bench.gpu import budget


LOGIT_BOUND = 8.0  # bound on |scale * q.k| under QK-norm, for head_dim=64
# In units of the two products of the forward pass; the three of dq and four of dk/dv count as five.
USEFUL_PRODUCTS = {"forward": 1.0, "dq": 1.5 * 5 / 7, "dkdv": 2.0 * 5 / 7}
MANY_SPILLS = 0.1  # share of the instructions in the hot loop
ROW_TOLERANCE = 0.03  # bfloat16 results of two tiles, row by row
ROUNDS = {"cuda": 15, "cpu": 1}
CLEARLY_FASTER = 1.01  # the gain for which a tile replaces the current one
TABLE = """
| tile | registers | spills | instructions | serialized | shared | blocks | ms | TFLOP/s | TB/s | faster | difference |\
 dropped |
| {tile} | {registers} | {hot_loop_spills} | {instructions_per_logit:.3g} | {serialized} | {shared} | {blocks_per_sm} |\
 {ms:.3g} | {TFLOP/s:.3g} | {TB/s:.3g} | {faster:.3g} | {difference:.1e} | {dropped} |
"""


def neighbours(kernel, tile):
    """Return the current tile, and those around it, the nearest first."""

    def fits(x):
        rows = x.BN if kernel == "dkdv" else x.BM
        # fewer rows per warp leave tensor cores idle, more do not fit in registers; decoding has 16 in total
        return min(x.BM, x.BN) >= 16 and x.stages >= 1 and (kernel == "decode" or 16 <= rows // x.warps <= 32)

    def distance(x):
        added = abs(x.stages - tile.stages) + abs(x.products - tile.products)
        return sum(abs(math.log2(a / b)) for a, b in zip(x[:3], tile[:3])) + added

    around = itertools.product(
        [tile.BM] if kernel == "decode" else [tile.BM // 2, tile.BM, tile.BM * 2],
        [tile.BN // 2, tile.BN, tile.BN * 2],
        [2, 4, 8] if kernel == "decode" else [4, 8],
        [tile.stages - 1, tile.stages, tile.stages + 1],
        [False, True] if kernel == "forward" else [False],
    )
    others = [x for x in itertools.starmap(tiles_fox.Tile, around) if fits(x) and x != tile]
    return [tile, *sorted(others, key=distance)]


def launched_tiles(device):
    """Return the part of the table that a device launches from."""
    capability = tiles_fox.capability_of(torch.device(device))
    return tiles_fox.TILES[tiles_fox.nearest_key(capability, 2 if device == "cuda" else 4)]


def put_tile(kernel, head_dim, tile, device):
    """Replace a tile of the table, to try another one."""
    tiles, D = launched_tiles(device), tiles_fox.padded(head_dim)
    tiles[D] = tiles[D]._replace(**{kernel: tiles_fox.Tile(*tile)})


class Problem:
    """Inputs of every kernel for one head_dim, and the launchers."""

    def __init__(self, D, B, H, T, device):
        self.shape, self.scale, self.saved = (B, H, T, D), D**-0.5, None
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        *inputs, log_f, self.do = budget.draw(B, H, H, T, T, D, dtype, openness=4.0, device=device)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)  # the memory layout of projections
        first = torch.zeros(1, 1, T, dtype=torch.int32, device=device)
        self.inputs = (q, k, v, fox.launch_running_sum(log_f, None), first)
        self.bound = torch.full((B, H), LOGIT_BOUND, device=device)
        # decoding: one query for each head; keys, values and gates as in a cache of folded keys
        k, v = (x[:, : self.key_heads(H)] for x in (k, v))
        keys, group = fold_keys(k, log_f.cumsum(-1), self.scale), H // k.shape[1]
        gates = keys[..., D : D + GATE_PARTS * group].unflatten(-1, (group, GATE_PARTS)).transpose(2, 3)
        self.cached = (keys[..., :D], F.pad(v, (0, keys.shape[-1] - D))[..., :D], gates)
        self.last = torch.zeros(1, 1, 1, dtype=torch.int32, device=device), torch.tensor([T], device=device)

    @staticmethod
    def key_heads(H):
        return max(1, H // 4)

    def run(self, kernel):
        """Return the results of the launcher that a kernel belongs to."""
        if kernel == "decode":
            q, gate_scale = self.inputs[0][:, :, -1:], -GATE_QUERY * self.scale
            return (fox.triton_decode(q, *self.cached, gate_scale, *self.last, self.scale),)
        if kernel == "forward":
            return fox.launch_forward(*self.inputs, self.bound, self.scale)
        if self.saved is None:
            self.saved = self.run("forward")
        return fox.launch_backward(self.do, *self.inputs, *self.saved, self.scale)

    def rate(self, kernel, seconds):
        if kernel == "decode":
            return {"TB/s": sum(x.nbytes for x in self.cached) / seconds / 1e12}
        B, H, T, D = self.shape
        return {"TFLOP/s": USEFUL_PRODUCTS[kernel] * 2 * B * H * T**2 * D / seconds / 1e12}


def compile_tiles(kernel, problem, until):
    """Return a row for each candidate that was compiled, the current tile first, with the reason to drop it."""
    B, H, _, D = problem.shape
    candidates = neighbours(kernel, getattr(launched_tiles("cuda")[tiles_fox.padded(D)], kernel))
    from scripts.bench.gpu.compile import reports  # compile.py cannot be imported if kernels are interpreted

    case = {"capability": tiles_fox.capability_of(torch.device("cuda")), "kernel": kernel, "dtype": "bf16"}
    case |= {"head_dim": D, "bounded": True, "B": B, "H": H}
    case |= {"kv_heads": problem.key_heads(H) if kernel == "decode" else H}
    rows = list(reports([case | {"tile": list(tile)} for tile in candidates], min(32, os.cpu_count()), until))
    for row in rows:
        if reason := reason_to_drop(row):
            row["dropped"] = reason
    return sorted(rows, key=lambda row: candidates.index(tuple(row["tile"])))


def reason_to_drop(row):
    if "error" in row:
        return row.pop("error")
    if row["shared"] > row["shared_limit"]:
        return f"{row['shared']} bytes of shared memory, {row['shared_limit']} fit"
    if row["blocks_per_sm"] < 1:
        return "more registers than there are"
    if row["hot_loop_spills"] > MANY_SPILLS * row["hot_loop_instructions"]:
        return f"{row['hot_loop_spills']} spills among {row['hot_loop_instructions']} instructions of the hot loop"
    return None


def launch_seconds(kernel, problem, scratch):
    """Return the seconds of one launch of a kernel, without those of other kernels that its launcher starts."""
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
    """Return the largest difference of a row of any result, relative to that row or to the median row, if larger."""
    worst = 0.0
    for x, y in zip(actual, expected):
        size = y.float().norm(dim=-1)
        off = ((x.float() - y.float()).norm(dim=-1) / size.clamp(min=size.median())).max().item()
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def time_tiles(rows, problem, device, until):
    """Add times and rates to the rows of one kernel. Return the results of the first tile that runs, if any."""
    kernel, half = rows[0]["kernel"], (time.monotonic() + until) / 2
    running, expected = [], None
    for row in rows:
        if running and time.monotonic() > half:
            row["dropped"] = "no time left"
            continue
        try:
            put_tile(kernel, row["head_dim"], row["tile"], device)
            results = problem.run(kernel)
            row["difference"] = difference(results, results if expected is None else expected)
        except Exception as error:
            row["dropped"] = common.one_line(error, 300)
            continue
        if row["difference"] <= ROW_TOLERANCE:
            running.append(row)
            expected = results if expected is None else expected
        else:
            row["dropped"] = f"differs by {row['difference']:.2g}" if expected else "results are not finite"
    scratch = torch.empty(2**30 if device == "cuda" else 1, dtype=torch.uint8, device=device)

    def time_once(row):
        put_tile(kernel, row["head_dim"], row["tile"], device)
        return launch_seconds(kernel, problem, scratch)

    turns = {tuple(row["tile"]): lambda row=row: time_once(row) for row in running}
    seconds = common.alternate(turns, ROUNDS[device], until)
    for row in running:
        median = statistics.median(seconds[tuple(row["tile"])])
        row |= {"ms": median * 1e3, **problem.rate(kernel, median)}
        row["faster"] = common.median_ratio(seconds[tuple(running[0]["tile"])], seconds[tuple(row["tile"])])
    return expected


def fastest(rows):
    """Return the fastest tile; the current one if none is clearly faster."""
    best = max(rows, key=lambda row: row.get("faster", 0.0))
    return tiles_fox.Tile(*(best if best.get("faster", 0.0) >= CLEARLY_FASTER else rows[0])["tile"])


def measure(args):
    if args.device == "cpu":
        args.length, args.tokens, args.width, args.head_dim = 64, 64, 32, [16]
    torch.manual_seed(0)
    pairs = list(itertools.product(args.head_dim, args.kernel))
    now = begin = time.monotonic()
    for D in args.head_dim:
        problem = Problem(D, max(1, args.tokens // args.length), args.width // D, args.length, args.device)
        current, expected = launched_tiles(args.device)[tiles_fox.padded(D)], {}
        with mock.patch.dict(launched_tiles(args.device)):
            for kernel in args.kernel:
                left = begin + 60 * args.minutes - now
                until = now + left / (len(pairs) - pairs.index((D, kernel)))
                if args.device == "cuda":
                    rows = compile_tiles(kernel, problem, now + 0.6 * (until - now))
                else:
                    tiles = neighbours(kernel, getattr(current, kernel))[:2]
                    rows = [{"kernel": kernel, "head_dim": D, "tile": list(tile)} for tile in tiles]
                # The current tile is the reference even if its compiled resources are a reason to drop it.
                runnable = [row for row in rows if "dropped" not in row or row is rows[0]]
                expected[kernel] = time_tiles(runnable, problem, args.device, until)
                put_tile(kernel, D, fastest(rows), args.device)
                yield from rows
                now = time.monotonic()
            # The dq pass prepares the input of the dk/dv pass in blocks of its tile, and was timed with another one.
            off = max((difference(problem.run(kernel), x) for kernel, x in expected.items() if x), default=0.0)
            chosen = launched_tiles(args.device)[tiles_fox.padded(D)]
        yield {"head_dim": D, "off": off, "tiles": chosen if off <= ROW_TOLERANCE else current}


def table(result):
    """Return the tiles of each kernel, the fastest first, and rows to put into TILES."""
    tiles = [row for row in result["rows"] if "kernel" in row]
    parts = []
    for (D, kernel), rows in itertools.groupby(tiles, key=lambda row: (row["head_dim"], row["kernel"])):
        rows = sorted(rows, key=lambda row: -row.get("faster", 0.0))
        parts.append(f"## {kernel}, head_dim={D}\n\n{common.markdown(rows, TABLE)}")
    lines = [
        f"    {tiles_fox.padded(row['head_dim'])}: Tiles({', '.join(f'Tile{tuple(tile)}' for tile in row['tiles'])}),"
        for row in result["rows"]
        if "tiles" in row
    ]
    return "\n\n".join([*parts, "To put into TILES:", "\n".join(lines)])


def main(arguments=None):
    sizes = {"length": 16384, "tokens": 32768, "width": 2048, "head_dim": [64, 128]}
    parser = common.make_parser(__spec__.name, __doc__, **sizes, minutes=8.0, device="cuda")
    kernels = tiles_fox.Tiles._fields
    parser.add_argument(
        "--kernel", nargs="+", default=list(kernels), choices=kernels, help="kernels to tune (default: all)"
    )
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
