"""Speed of the Triton forgetting-attention kernels beside everything else that computes the same or nearly the same.

    python scripts/bench_attention.py --device cuda --out bench_triton

(this script, under the name that also measures on a CPU) writes bench_triton.json and bench_triton.md: device, versions
and commit; measured ceilings; TFLOP/s forward and backward; the gain from pruning; decode latency. FLOPs are
4 B H T^2 D / 2 forward and 2.5 times that backward, the usual count for causal attention, and twice that in both
directions; bytes are each input and output once. The share of the roofline is the least time that both allow at the
measured ceilings, over the time taken. Competitors that cannot run are listed with the reason. FlashAttention-3 is not among them; cuDNN comes nearest to it. What
the goals ask about comes first, and both files are written after every row, so that a run that is stopped loses nothing. `--device cpu` is a dry run
in Triton's interpreter: it tells that the script works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton

from hf_longctx.fox import bidirectional_forgetting_attention, bounds_fox, tiles_fox
from hf_longctx.fox import triton_fox as fox
from hf_longctx.fox.attention_fox import GATE_PARTS, GATE_QUERY, fold_keys, folded_attention


ON_GPU = torch.cuda.is_available()
LOGIT_BOUND = 8.0  # |scale * q.k| in the pruning runs, as QK-norm would promise it
TOLERANCE = -10.0  # arXiv 2504.06949


# Competitors: functions of q, k, v, (B, H, T, D), and log_f, (B, H, T).


def ours(q, k, v, log_f):
    return fox.forgetting_attention_triton(q, k, v, log_f)


def ours_bounded(q, k, v, log_f):
    """As of a model with QK-norm; the random logits exceed the bound a little and seldom, which costs nothing here."""
    return fox.forgetting_attention_triton(q, k, v, log_f, logit_bound=LOGIT_BOUND)


def plain_sdpa(backend):
    def attention(q, k, v, log_f):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def folded(q, k, v, log_f):
    """What every attention implementation of transformers runs: stock attention computes the decay."""
    return folded_attention(q, k, v, log_f, q.shape[-1] ** -0.5)  # without the checks, which wait for the device


def flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # one for each size; beyond it, flex_attention would run uncompiled
    compiled, masks = torch.compile(flex_attention, dynamic=False) if ON_GPU else flex_attention, {}

    def attention(q, k, v, log_f):
        T = q.shape[2]
        if T not in masks:
            masks[T] = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=q.device)
        c = log_f.detach().cumsum(-1)  # timed without dc
        return compiled(q, k, v, score_mod=lambda s, b, h, i, j: s + c[b, h, i] - c[b, h, j], block_mask=masks[T])

    return attention


def fla():
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    def attention(q, k, v, log_f):
        return parallel_forgetting_attn(*(x.transpose(1, 2) for x in (q, k, v, log_f))).transpose(1, 2)

    return attention


def official():
    from forgetting_transformer import forgetting_attention

    return lambda q, k, v, log_f: forgetting_attention(q, k, v, log_f, head_first=True)


COMPETITORS = {  # name: (makes the function, computes what ours does)
    "ours": (lambda: ours, True),
    "ours, bounded logits": (lambda: ours_bounded, True),
    "ours, both ways": (lambda: bidirectional_forgetting_attention, False),
    "SDPA flash (no gate)": (lambda: plain_sdpa(SDPBackend.FLASH_ATTENTION), False),
    "SDPA cuDNN (no gate)": (lambda: plain_sdpa(SDPBackend.CUDNN_ATTENTION), False),
    "folded gate, SDPA": (lambda: folded, True),
    "FlexAttention score_mod, no gate gradient": (flex, True),
    "FLA": (fla, True),
    "official": (official, True),
}


# Measuring.


def seconds(fn, device) -> float:
    """Median of many runs by device events; on CPU one run by the clock."""
    if device == "cuda":
        return triton.testing.do_bench(fn, warmup=50, rep=300, return_mode="median") * 1e-3
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def draw(B, H, T, D, device, Hkv=None, Tq=None, log_f=None, grad=True):
    """Random inputs with slowly fading gates (half-lives of about 4 to 700 tokens), or a constant log f."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = (B, Tq or T, H, D), (B, T, Hkv or H, D), (B, T, Hkv or H, D)  # as projections leave them
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for shape in shapes)
    if log_f is None:
        gates = F.logsigmoid(torch.linspace(2, 7, H, device=device)[:, None] + torch.randn(B, H, T, device=device))
    else:
        gates = torch.full((B, H, T), log_f, device=device)
    return [x.requires_grad_(grad) for x in (q, k, v, gates)]


def time_both(attention, inputs, device) -> tuple[float, float]:
    """Seconds forward (as in training) and backward."""
    forward = seconds(lambda: attention(*inputs), device)
    o = attention(*inputs)
    do = torch.randn_like(o)
    wanted = [x for x, used in zip(inputs, torch.autograd.grad(o, inputs, do, retain_graph=True, allow_unused=True))
              if used is not None]  # fmt: skip
    return forward, seconds(lambda: torch.autograd.grad(o, wanted, do, retain_graph=True), device)


def flops(B, H, T, D) -> float:
    return 2 * B * H * T * T * D


def bytes_moved(B, H, T, D, itemsize) -> tuple[int, int]:
    """Least traffic forward (q, k, v, o; log f, lse) and backward (q, k, v, o, do, dq, dk, dv; log f, lse and dlog f)."""
    row, gate = B * H * T * D * itemsize, B * H * T * 4
    return 4 * row + 2 * gate, 8 * row + 3 * gate


def roofline(flop, moved, taken, limits) -> float:
    """The least time that the measured ceilings allow, as a share of the time taken."""
    least = max(flop / limits["matmul_tflops"], moved / limits["copy_tb_per_s"]) / 1e12
    return least / taken


def ceilings(device) -> dict:
    """What the chip gives a large matrix product and a large copy, on random data."""
    n, size = (8192, 2**31) if device == "cuda" else (256, 2**20)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    x = torch.randn(size // 2, device=device, dtype=dtype)
    y = torch.empty_like(x)
    return {
        "matmul_tflops": 2 * n**3 / seconds(lambda: a @ b, device) / 1e12,
        "copy_tb_per_s": 2 * x.nbytes / seconds(lambda: y.copy_(x), device) / 1e12,
    }


@functools.cache
def competitor(name: str):
    return COMPETITORS[name][0]()


def attention_row(name, D, T, B, H, device, limits) -> dict:
    attention, row = competitor(name), {}
    if COMPETITORS[name][1]:
        small = draw(1, H, min(T, 512), D, device, grad=False)
        want, got = ours(*small), attention(*small)
        row["difference_from_ours"] = ((got - want).float().norm() / want.float().norm()).item()
    inputs = draw(B, H, T, D, device)
    forward, backward = time_both(attention, inputs, device)
    flop = flops(B, H, T, D) * (2 if name == "ours, both ways" else 1)
    moved = bytes_moved(B, H, T, D, inputs[0].itemsize)
    return row | {
        "forward_ms": forward * 1e3,
        "backward_ms": backward * 1e3,
        "forward_tflops": flop / forward / 1e12,
        "backward_tflops": 2.5 * flop / backward / 1e12,
        "forward_of_roofline": roofline(flop, moved[0], forward, limits),
        "backward_of_roofline": roofline(2.5 * flop, moved[1], backward, limits),
    }


def pruning_row(share_wanted, D, T, B, H, device) -> dict:
    """A constant gate that makes everything further than w tokens prunable, which is (1 - w / T)^2 of the blocks."""
    threshold = 2 * LOGIT_BOUND + math.log(T) - TOLERANCE
    log_f = -threshold / (T * (1 - share_wanted**0.5)) if share_wanted else 0.0
    inputs = draw(B, H, T, D, device, log_f=log_f)

    def pruned(q, k, v, log_f):
        return fox.forgetting_attention_triton(
            q, k, v, log_f, log_pruning_tolerance=TOLERANCE, logit_bound=LOGIT_BOUND
        )

    with bounds_fox.count_pruned_blocks() as blocks:
        pruned(*inputs)
    dense, fast = time_both(ours_bounded, inputs, device), time_both(pruned, inputs, device)
    return {
        "share_pruned": blocks.pruned / blocks.total,
        "forward_ms": fast[0] * 1e3,
        "backward_ms": fast[1] * 1e3,
        "forward_speedup": dense[0] / fast[0],
        "backward_speedup": dense[1] / fast[1],
        "both_speedup": sum(dense) / sum(fast),
    }


def draw_decoding(B, H, Hkv, T, D, device, log_f=None):
    """One query of each head, and what a cache of folded keys holds for it: q, keys, values, gates of `attend_few`."""
    q, k, v, log_f = draw(B, H, T, D, device, Hkv=Hkv, Tq=1, log_f=log_f, grad=False)
    keys = fold_keys(k, log_f.cumsum(-1), D**-0.5)
    values = F.pad(v, (0, keys.shape[-1] - D))  # as far apart as the keys
    gates = keys[..., D : D + GATE_PARTS * (H // Hkv)].unflatten(-1, (H // Hkv, GATE_PARTS)).transpose(2, 3)
    return q, keys[..., :D], values[..., :D], gates


def decode_row(B, T, device, copy) -> dict:
    """One new token, 32 query heads on 8 key heads of 128, from the folded keys of a cache, as a model decodes.

    Bytes are keys, values and gates, each read once; the columns that pad a folded key are not read. Beside it: plain
    attention without a gate, and ours when nine tenths of the keys are forgotten.
    """
    H, Hkv, D = (32, 8, 128) if device == "cuda" else (4, 2, 16)
    scale = D**-0.5
    near = 2 * LOGIT_BOUND + math.log(T) - TOLERANCE  # how far the decay falls until a key is forgotten
    q, keys, values, gates = draw_decoding(B, H, Hkv, T, D, device, log_f=-near / (0.1 * T))
    k, v = keys.contiguous(), values.contiguous()
    bound = torch.full((H,), LOGIT_BOUND, device=device)

    def decode(tolerance=None):
        return fox.attend_few(q, keys, values, gates, -GATE_QUERY * scale, None, None, scale, tolerance, bound)

    def plain():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    taken, moved = graph_seconds(decode, device), k.nbytes + v.nbytes + gates.nbytes
    return {
        "us": seconds(decode, device) * 1e6,
        "graph_us": taken * 1e6,
        "tb_per_s": moved / taken / 1e12,
        "share_of_copy": moved / taken / 1e12 / copy,
        "pruned_graph_us": graph_seconds(lambda: decode(TOLERANCE), device) * 1e6,
        "plain_sdpa_graph_us": graph_seconds(plain, device) * 1e6,
    }


def graph_seconds(fn, device) -> float:
    """Seconds in a captured CUDA graph: launches cost more than the work of a short context."""
    if device != "cuda":
        return seconds(fn, device)
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return seconds(graph.replay, device)


def table(rows: list[dict], columns: list[str]) -> str:
    """Markdown."""

    def cell(x):
        return "" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x)

    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(cell(row.get(c)) for c in columns) + " |" for row in rows])


def markdown(report: dict) -> str:
    about = "\n".join(f"- {key}: {value}" for key, value in report["about"].items())
    attention = ["name", "D", "T", "B", "H", "forward_tflops", "backward_tflops", "forward_of_roofline",
                 "backward_of_roofline", "difference_from_ours", "error"]  # fmt: skip
    pruning = ["D", "T", "B", "H", "share_pruned", "forward_speedup", "backward_speedup", "both_speedup", "error"]
    decode = [
        "B",
        "T",
        "us",
        "graph_us",
        "tb_per_s",
        "share_of_copy",
        "pruned_graph_us",
        "plain_sdpa_graph_us",
        "error",
    ]
    return (
        f"# Forgetting attention: speed\n\n{about}\n\n"
        f"## Causal attention\n\n{table(report['attention'], attention)}\n\n"
        f"## Adaptive computation pruning\n\n{table(report['pruning'], pruning)}\n\n"
        f"## Decoding one token\n\n{table(report['decode'], decode)}\n"
    )


def tiles_of(device: str) -> dict[int, tiles_fox.Tiles]:
    """The part of the table that a device launches from."""
    return tiles_fox.TILES[
        tiles_fox.nearest_key(tiles_fox.capability_of(torch.device(device)), 2 if device == "cuda" else 4)
    ]


def put_tile(kernel: str, head_dim: int, tile: tiles_fox.Tile, device: str) -> None:
    """Puts a tile in place of the table's, to try it."""
    tiles, D = tiles_of(device), tiles_fox.padded(head_dim)
    tiles[D] = tiles[D]._replace(**{kernel: tile})


def about(device: str) -> dict:
    """What the figures depend on."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
        )
        commit = found.stdout.strip() or "unknown"
    except OSError:  # no git
        commit = "unknown"
    peers = {}
    for package in ("flash-linear-attention", "forgetting-transformer"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # absent, or imported from a folder
            peers[package] = importlib.metadata.version(package)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, Triton interpreter (dry run)",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        **peers,
        "commit": commit,
    }


def filled(row: dict, measure: Callable[..., dict], until: float, **more) -> dict:
    """The row with what `measure` of it finds, or why it could not."""
    if time.monotonic() > until:
        return row | {"error": "no time left"}
    try:
        return row | measure(**row, **more)
    except Exception as error:  # out of memory, a package that is not there, a compiler's refusal, ...
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="default: 2k to 128k")
    parser.add_argument("--head-dim", type=int, nargs="+", default=None, help="default: 64 128")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per batch, where one sequence is shorter")
    parser.add_argument("--width", type=int, default=2048, help="heads times head size")
    parser.add_argument("--tile", nargs="*", default=[], metavar="KERNEL=BM,BN,WARPS,STAGES", help="try another tile")
    parser.add_argument("--minutes", type=float, default=8.0, help="begins nothing after them (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench_triton"), help="path without suffix")
    args = parser.parse_args(arguments)
    until = time.monotonic() + 60 * args.minutes
    on_gpu = args.device == "cuda"
    if on_gpu and not ON_GPU:
        parser.error("no CUDA device is visible; --device cpu makes a dry run in Triton's interpreter")
    lengths = args.lengths or ([2048, 4096, 8192, 16384, 32768, 65536, 131072] if on_gpu else [64])
    head_dims = args.head_dim or ([64, 128] if on_gpu else [16])
    if not on_gpu:
        args.tokens, args.width = 64, 32
    for kernel, numbers in (choice.split("=") for choice in args.tile):
        for D in head_dims:
            put_tile(kernel, D, tiles_fox.Tile(*map(int, numbers.split(","))), args.device)
    torch.manual_seed(0)

    measured, device = ceilings(args.device), args.device
    report = {"about": about(device) | {"tiles": " ".join(args.tile) or "table"} | measured}
    report |= {"attention": [], "pruning": [], "decode": []}
    first = 16384 if on_gpu else 96

    def sizes(T, D):
        return {"D": D, "T": T, "B": max(1, args.tokens // T), "H": args.width // D}

    contexts = [65536, 4096, 16384, 262144] if on_gpu else [96]
    work = [("decode", {"B": B, "T": T}, decode_row, {"copy": measured["copy_tb_per_s"]})
            for B in ((1, 8) if on_gpu else (1,)) for T in contexts]  # fmt: skip
    work += [("pruning", sizes(first, D) | {"share_wanted": share}, pruning_row, {})
             for D in head_dims for share in (0.7, 0.0, 0.5, 0.9)]  # fmt: skip
    work += [("attention", {"name": name} | sizes(T, D), attention_row, {"limits": measured})
             for T in sorted(lengths, key=lambda T: (first != T, T)) for D in head_dims for name in COMPETITORS]  # fmt: skip
    for section, row, measure, more in work:
        report[section].append(filled(row, measure, until, device=device, **more))
        print(report[section][-1], flush=True)
        args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
