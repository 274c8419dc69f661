"""Speed of the Triton forgetting-attention kernels beside everything else that computes the same or nearly the same.

    python -m scripts.bench.gpu.bench

FLOPs are 4 B H T^2 D / 2 forward and 2.5 times that backward, the usual count for causal attention, and twice that in
both directions; bytes are each input and output once. "of roofline" is the least time that both allow at the measured
ceilings, as a share of the time taken. Competitors that cannot run are listed with the reason; those that are not
installed, once. The figures that matter most are measured first, and no row begins after --minutes. A batch has
--tokens, or one longer sequence; --width is heads times head size. `--device cpu` is a dry run in Triton's
interpreter: it shows that the script works, and nothing about speed.
"""

import functools
import math
import os
import statistics
import time

import torch
import torch.nn.functional as F


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from hf_longctx.fox import key_ranges_fox, tiles_fox
from hf_longctx.fox import triton_fox as fox
from hf_longctx.fox.attention_fox import GATE_PARTS, GATE_QUERY, fold_keys
from scripts.bench import common
from scripts.bench.gpu.peers import (
    COMPETITORS,
    FLEX_BLOCK,
    LOGIT_BOUND,
    TOLERANCE,
    competitor,
    flex,
    official,
    ours,
    ours_bounded,
    ours_pruned,
)
from scripts.bench.gpu.pruned_blocks import count_pruned_blocks


ROUNDS = {"cuda": 100, "cpu": 1}
SECONDS = 0.3  # for the rounds of one contender, beyond the first three
TABLES = {
    "attention": """
| name | D | T | B | H | TFLOP/s forward | backward | of roofline forward | backward | difference from ours | error |
| {name} | {D} | {T} | {B} | {H} | {forward_tflops:.3g} | {backward_tflops:.3g} | {forward_of_roofline:.2f} |\
 {backward_of_roofline:.2f} | {difference_from_ours:.1e} | {error} |
""",
    "pruning": """
| name | D | T | B | H | pruned by ours | ms forward | backward | speed-up forward | backward | both | error |
| {name} | {D} | {T} | {B} | {H} | {share_pruned:.2f} | {forward_ms:.3g} | {backward_ms:.3g} | {forward_speedup:.2f} |\
 {backward_speedup:.2f} | {both_speedup:.2f} | {error} |
""",
    "prologue": """
| D | T | B | H | us | of the forward pass | running sum us | us of torch.cumsum | error |
| {D} | {T} | {B} | {H} | {prologue_us:.1f} | {share_of_forward:.2f} | {running_sum_us:.1f} | {cumsum_us:.1f} | {error} |
""",
    "host": """
| D | T | us in inference | us in training | error |
| {D} | {T} | {inference_us:.0f} | {training_us:.0f} | {error} |
""",
    "decode": """
| B | T | us | us in a graph | TB/s | of a copy's | us pruned | us of plain SDPA | error |
| {B} | {T} | {us:.1f} | {graph_us:.1f} | {tb_per_s:.3g} | {share_of_copy:.2f} | {pruned_graph_us:.1f} |\
 {plain_sdpa_graph_us:.1f} | {error} |
""",
}
TITLES = {
    "attention": "Causal attention",
    "pruning": "Adaptive computation pruning, beside the same kernels without",
    "prologue": "What a pruned forward pass does before its kernel",
    "host": "What a forward pass costs the host: calls that are not waited for",
    "decode": "Decoding one token",
}


# Measuring.


@functools.cache
def scratch(device):
    """The memory that is overwritten before each timed call, as large as that of triton.testing.do_bench."""
    return torch.empty(2**28, dtype=torch.uint8, device=device) if device == "cuda" else None


def seconds_in_turn(functions, device):
    until = time.monotonic() + SECONDS * len(functions)
    return common.time_in_turn(functions, ROUNDS[device], until, device=device, scratch=scratch(device))


def median_seconds(function, device):
    return statistics.median(seconds_in_turn({"": function}, device)[""])


def draw(B, H, T, D, device, Hkv=None, Tq=None, log_f=None, grad=True):
    """Random inputs with slowly fading gates (half-lives of about 4 to 700 tokens), or a constant log f."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = (B, Tq or T, H, D), (B, T, Hkv or H, D), (B, T, Hkv or H, D)  # the layout of projections
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for shape in shapes)
    if log_f is None:
        gates = F.logsigmoid(torch.linspace(2, 7, H, device=device)[:, None] + torch.randn(B, H, T, device=device))
    else:
        gates = torch.full((B, H, T), log_f, device=device)
    return [x.requires_grad_(grad) for x in (q, k, v, gates)]


def both_passes(attention, inputs):
    """The forward pass (as in training) and the backward pass, as functions without arguments."""
    o = attention(*inputs)
    do = torch.randn_like(o)
    used = [x for x, dx in zip(inputs, torch.autograd.grad(o, inputs, do, retain_graph=True, allow_unused=True))
            if dx is not None]  # fmt: skip
    return {
        "forward": lambda: attention(*inputs),
        "backward": lambda: torch.autograd.grad(o, used, do, retain_graph=True),
    }


def flops(B, H, T, D):
    return 2 * B * H * T * T * D


def bytes_moved(B, H, T, D, itemsize):
    """Least traffic forward (q, k, v, o, log f, lse) and backward (q, k, v, o, log f, their gradients, lse)."""
    row, gate = B * H * T * D * itemsize, B * H * T * 4
    return 4 * row + 2 * gate, 8 * row + 3 * gate


def roofline(flop, moved, taken, limits):
    """The least time that the measured ceilings allow, as a share of the time taken."""
    least = max(flop / limits["matmul_tflops"], moved / limits["copy_tb_per_s"]) / 1e12
    return least / taken


def ceilings(device):
    """Rates of a large matrix product and of a large copy, on random data."""
    n, size = (8192, 2**31) if device == "cuda" else (256, 2**20)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    x = torch.randn(size // 2, device=device, dtype=dtype)
    y = torch.empty_like(x)
    return {
        "matmul_tflops": 2 * n**3 / median_seconds(lambda: a @ b, device) / 1e12,
        "copy_tb_per_s": 2 * x.nbytes / median_seconds(lambda: y.copy_(x), device) / 1e12,
    }


def attention_row(name, D, T, B, H, device, limits):
    attention, row = competitor(name), {}
    if COMPETITORS[name][1]:
        small = draw(1, H, min(T, 512), D, device, grad=False)
        expected, actual = ours(*small), attention(*small)
        row["difference_from_ours"] = ((actual - expected).float().norm() / expected.float().norm()).item()
    inputs = draw(B, H, T, D, device)
    seconds = seconds_in_turn(both_passes(attention, inputs), device)
    flop = flops(B, H, T, D)
    moved = bytes_moved(B, H, T, D, inputs[0].itemsize)
    for direction, work, traffic in (("forward", flop, moved[0]), ("backward", 2.5 * flop, moved[1])):
        median = statistics.median(seconds[direction])
        row[f"{direction}_ms"] = median * 1e3
        row[f"{direction}_tflops"] = work / median / 1e12
        row[f"{direction}_of_roofline"] = roofline(work, traffic, median, limits)
    return row


def pruning_row(name, share_aimed_at, D, T, B, H, device):
    """A constant gate that makes everything further than w tokens prunable, which is (1 - w / T)^2 of the blocks."""
    threshold = 2 * LOGIT_BOUND + math.log(T) - TOLERANCE
    log_f = -threshold / (T * (1 - share_aimed_at**0.5)) if share_aimed_at else 0.0
    inputs = draw(B, H, T, D, device, log_f=log_f)
    with count_pruned_blocks() as blocks:
        ours_pruned(*inputs)
    if name == "ours":
        dense, pruned = ours_bounded, ours_pruned
    elif name == "official":
        dense, pruned = official(), official(-threshold)
    else:
        bound = torch.full((B, H), LOGIT_BOUND, device=device)
        c = fox.fox_running_sum(inputs[3].detach(), None)
        kept = fox.fox_prune(c, None, bound, T, FLEX_BLOCK, FLEX_BLOCK, TOLERANCE)
        dense, pruned = flex(), flex(kept[..., ::FLEX_BLOCK] // FLEX_BLOCK)
    dense, pruned = both_passes(dense, inputs), both_passes(pruned, inputs)
    functions = {("dense", d): run for d, run in dense.items()} | {("pruned", d): run for d, run in pruned.items()}
    seconds, row = seconds_in_turn(functions, device), {"share_pruned": blocks.pruned / blocks.total}
    for direction in dense:
        row[f"{direction}_ms"] = statistics.median(seconds["pruned", direction]) * 1e3
        row[f"{direction}_speedup"] = common.median_ratio(seconds["dense", direction], seconds["pruned", direction])
    totals = [list(map(sum, zip(*(seconds[kind, d] for d in dense)))) for kind in ("dense", "pruned")]
    return row | {"both_speedup": common.median_ratio(*totals)}


def prologue_row(D, T, B, H, device):
    """Without a bound of the logits, which costs the norms of queries and keys."""
    inputs = draw(B, H, T, D, device, grad=False)
    q, k, log_f = inputs[0], inputs[1], inputs[3]
    tiles = fox.tiles_for(q.device, D, q.dtype)

    def prologue():
        c = fox.fox_running_sum(log_f, None)
        bound = key_ranges_fox.bound_from_norms(q, k, D**-0.5, None, None)
        kept = fox.fox_prune(c, None, bound, T, *tiles_fox.prune_blocks(tiles), TOLERANCE)
        key_ranges_fox.find_query_end(kept, T)
        fox.split_sum(c, tiles.forward.BN)

    functions = {
        "prologue_us": prologue,
        "running_sum_us": lambda: fox.fox_running_sum(log_f, None),
        "cumsum_us": lambda: log_f.double().cumsum(-1),
        "forward_us": lambda: ours(*inputs),
    }
    seconds = seconds_in_turn(functions, device)
    share = common.median_ratio(seconds["prologue_us"], seconds["forward_us"])
    return {name: 1e6 * statistics.median(x) for name, x in seconds.items()} | {"share_of_forward": share}


def host_row(D, T, device):
    """Time of Python and of launches, for so few tokens that the GPU is done before."""
    row, calls = {}, 50 if device == "cuda" else 1
    for name, grad in (("inference_us", False), ("training_us", True)):
        inputs = draw(1, 2, T, D, device, grad=grad)
        ours(*inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            ours(*inputs)
        row[name] = 1e6 * (time.perf_counter() - begin) / calls
    return row


def draw_decoding(B, H, Hkv, T, D, device, log_f=None):
    """Inputs of `triton_decode`: one query of each head; keys, values and gates as in a cache of folded keys."""
    q, k, v, log_f = draw(B, H, T, D, device, Hkv=Hkv, Tq=1, log_f=log_f, grad=False)
    keys = fold_keys(k, log_f.cumsum(-1), D**-0.5)
    values = F.pad(v, (0, keys.shape[-1] - D))  # a cache pads values to the width of keys
    gates = keys[..., D : D + GATE_PARTS * (H // Hkv)].unflatten(-1, (H // Hkv, GATE_PARTS)).transpose(2, 3)
    return q, keys[..., :D], values[..., :D], gates


def decode_row(B, T, device, limits):
    """One new token, 32 query heads on 8 key heads of 128, from the folded keys of a cache, as a model decodes.

    Bytes are keys, values and gates, each read once; the columns that pad a folded key are not read. Beside it: ours
    when nine tenths of the keys are forgotten, and plain attention without a gate.
    """
    H, Hkv, D = (32, 8, 128) if device == "cuda" else (4, 2, 16)
    scale = D**-0.5
    near = 2 * LOGIT_BOUND + math.log(T) - TOLERANCE  # how far the decay falls until a key is forgotten
    q, keys, values, gates = draw_decoding(B, H, Hkv, T, D, device, log_f=-near / (0.1 * T))
    k, v = keys.contiguous(), values.contiguous()
    bound = torch.full((H,), LOGIT_BOUND, device=device)

    def decode(tolerance=None):
        return fox.triton_decode(q, keys, values, gates, -GATE_QUERY * scale, None, None, scale, tolerance, bound)

    def plain():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    functions = {
        "us": decode,
        "graph_us": captured(decode, device),
        "pruned_graph_us": captured(lambda: decode(TOLERANCE), device),
        "plain_sdpa_graph_us": captured(plain, device),
    }
    seconds = {name: statistics.median(values) for name, values in seconds_in_turn(functions, device).items()}
    rate = (k.nbytes + v.nbytes + gates.nbytes) / seconds["graph_us"] / 1e12
    microseconds = {name: 1e6 * median for name, median in seconds.items()}
    return microseconds | {"tb_per_s": rate, "share_of_copy": rate / limits["copy_tb_per_s"]}


def captured(function, device):
    """The function as a CUDA graph, because launches cost more than the work of a short context."""
    if device != "cuda":
        return function
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def launched_tiles(device):
    """The part of the table that a device launches from."""
    capability = tiles_fox.capability_of(torch.device(device))
    return tiles_fox.TILES[tiles_fox.nearest_key(capability, 2 if device == "cuda" else 4)]


def put_tile(kernel, head_dim, tile, device):
    """Replaces a tile of the table, to try another one."""
    tiles, D = launched_tiles(device), tiles_fox.padded(head_dim)
    tiles[D] = tiles[D]._replace(**{kernel: tile})


def plan(args):
    """(section, arguments, function that measures a row) of every row, the most important rows first."""
    on_gpu = args.device == "cuda"
    first = 16384 if on_gpu else 64

    def sizes(T, D):
        return {"D": D, "T": T, "B": max(1, args.tokens // T), "H": args.width // D}

    for B in (1, 8) if on_gpu else (1,):
        for T in (65536, 4096, 16384, 262144) if on_gpu else (64,):
            yield "decode", {"B": B, "T": T}, decode_row
    for D in args.head_dim:
        yield "prologue", sizes(first, D), prologue_row
        yield "host", {"D": D, "T": min(first, 128)}, host_row
        for share in (0.7, 0.0, 0.5, 0.9) if on_gpu else (0.7,):
            for name in ("ours", "official", "FlexAttention") if share else ("ours",):
                yield "pruning", {"name": name, "share_aimed_at": share, **sizes(first, D)}, pruning_row
    for T in sorted(args.lengths, key=lambda T: (first != T, T)):
        for D in args.head_dim:
            for name in COMPETITORS:
                yield "attention", {"name": name, **sizes(T, D)}, attention_row


def measure(args):
    until = time.monotonic() + 60 * args.minutes
    if args.device == "cpu":
        args.tokens, args.width = 64, 16
        args.lengths, args.head_dim = args.lengths or [64], args.head_dim or [16]
    args.lengths = args.lengths or [2048, 4096, 8192, 16384, 32768, 65536, 131072]
    args.head_dim = args.head_dim or [64, 128]
    for kernel, numbers in (choice.split("=") for choice in args.tile):
        for D in args.head_dim:
            put_tile(kernel, D, tiles_fox.Tile(*map(int, numbers.split(","))), args.device)
    torch.manual_seed(0)
    limits, absent = ceilings(args.device), set()
    yield {"section": "ceilings", **limits}
    for section, fields, measure_row in plan(args):
        if fields.get("name") in absent:
            continue
        row = {"section": section, **fields}
        if time.monotonic() > until:
            yield row | {"error": "no time left"}
            continue
        options = {"device": args.device} | ({"limits": limits} if section in ("attention", "decode") else {})
        try:
            row |= measure_row(**fields, **options)
        except Exception as error:  # out of memory, a package that is not there, a compiler's refusal, ...
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if isinstance(error, ImportError):
                absent.add(fields.get("name"))
        yield row


def table(result):
    limits = [row for row in result["rows"] if row["section"] == "ceilings"]
    text = [f"Ceilings: {row['matmul_tflops']:.3g} TFLOP/s, {row['copy_tb_per_s']:.3g} TB/s." for row in limits]
    if result["settings"]["device"] == "cpu":
        text.insert(0, "A dry run in Triton's interpreter, whose times mean nothing.")
    absent = [row["name"] for row in result["rows"] if row.get("error", "").startswith("ModuleNotFoundError")]
    if absent:
        text.append(f"Not installed there: {', '.join(absent)}.")
    for section, template in TABLES.items():
        rows = [row for row in result["rows"] if row["section"] == section and row.get("name") not in absent]
        if rows:
            text.append(f"**{TITLES[section]}**\n\n{common.markdown(rows, template)}")
    return "\n\n".join(text)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, device="cuda", tokens=32768, width=2048, minutes=8.0)
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="default: 2k to 128k")
    parser.add_argument("--head-dim", type=int, nargs="+", help="default: 64 128")
    parser.add_argument("--tile", nargs="*", default=[], metavar="KERNEL=BM,BN,WARPS,STAGES", help="try another tile")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
