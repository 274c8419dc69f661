"""Forgetting attention against plain attention, side by side in one run: time and memory, forward and backward.

    python scripts/bench_attention.py [--lengths 1024 4096 16384] [--json FILE]
    python scripts/bench_attention.py --device cuda --out bench_triton

On a GPU, all of it is bench_triton.py: see its --help. On a CPU, prints a Markdown table of medians and of ratios to plain causal SDPA, and writes JSON. The contenders take turns, so that
whatever else the machine does hits all of them. Memory is what one call adds to the peak of a fresh process.
"""

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from hf_longctx.fox import forgetting_attention


def inputs(length, heads=8, head_dim=64):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, head_dim, generator=g) for _ in range(3))
    return q, k, v, F.logsigmoid(torch.randn(1, heads, length, generator=g) + 3)


def plain(q, k, v, log_f):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def decay_bias(log_f):
    """D_ij = c_i - c_j, -inf above the diagonal: (B, H, T, T)."""
    c = log_f.cumsum(-1)
    future = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool).triu(1)
    return (c[..., :, None] - c[..., None, :]).masked_fill(future, -torch.inf)


def dense_bias(q, k, v, log_f):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=decay_bias(log_f))


def eager(q, k, v, log_f):
    return (q @ k.mT * q.shape[-1] ** -0.5 + decay_bias(log_f)).softmax(-1) @ v


CONTENDERS = {"plain SDPA": plain, "folded gate": forgetting_attention, "dense bias": dense_bias, "eager": eager}
QUADRATIC = ("dense bias", "eager")  # 8 GB a matrix at 16k: left out beyond --largest-quadratic


def forward(function, tensors):
    with torch.no_grad():
        function(*tensors)


def backward(function, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    begin = time.perf_counter()
    out.backward(torch.ones_like(out))
    return time.perf_counter() - begin


def seconds(run, *args):
    begin = time.perf_counter()
    own = run(*args)  # the backward pass times itself, without the forward pass before it
    return own if own is not None else time.perf_counter() - begin


def peak_mb():
    """Highest memory of this process so far. Not ru_maxrss, which a child inherits from its parent."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def growth(name, length, direction):
    """MB that one call adds to the peak memory of this process, which already holds the inputs."""
    run = {"forward": forward, "backward": backward}[direction]
    run(CONTENDERS[name], inputs(64))  # what the first call of all loads does not count
    tensors = inputs(length)
    before = peak_mb()
    run(CONTENDERS[name], tensors)
    return peak_mb() - before


def growth_in_fresh_process(*case):
    code = f"import sys; sys.path.insert(0, {sys.path[0]!r}); import bench_attention as b; print(b.growth(*{case!r}))"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)


def measure(lengths, repeats, largest_quadratic):
    rows = []
    for length in lengths:
        names = [n for n in CONTENDERS if n not in QUADRATIC or length <= largest_quadratic]
        tensors = inputs(length)
        for direction in (forward, backward):
            times = {name: [] for name in names}
            for _ in range(repeats + 1):
                for name in names:
                    times[name].append(seconds(direction, CONTENDERS[name], tensors))
            medians = {name: statistics.median(t[1:]) for name, t in times.items()}  # the first round warms up
            for name in names:
                rows.append(
                    {
                        "length": length,
                        "direction": direction.__name__,
                        "name": name,
                        "median_ms": round(1e3 * medians[name], 2),
                        "ratio_to_plain": round(medians[name] / medians["plain SDPA"], 3),
                        "peak_growth_mb": round(growth_in_fresh_process(name, length, direction.__name__), 1),
                    }
                )
                print(table_row(rows[-1]), flush=True)
    return rows


def table_row(row):
    return (
        f"| {row['length']} | {row['direction']} | {row['name']} | {row['median_ms']:.1f} | "
        f"{row['ratio_to_plain']:.2f}x | {row['peak_growth_mb']:.0f} |"
    )


def machine():
    """What the figures depend on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": model, "threads": torch.get_num_threads(), "torch": torch.__version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="timed rounds (default: %(default)s)")
    parser.add_argument(
        "--largest-quadratic", type=int, default=4096, metavar="TOKENS", help="for dense bias and eager"
    )
    parser.add_argument("--json", default="bench_attention.json", metavar="FILE")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: run bench_triton.py")
    args, others = parser.parse_known_args()
    if args.device == "cuda":
        bench_triton = importlib.import_module("bench_triton")  # and Triton with it, which a CPU does not need
        bench_triton.main(sys.argv[1:])
        return
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")

    where = machine()
    print(f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}; float32, B=1 H=8 D=64\n")
    print("| T | direction | attention | median ms | to plain | MB added |\n|---|---|---|---|---|---|")
    rows = measure(args.lengths, args.repeats, args.largest_quadratic)
    with open(args.json, "w") as file:
        json.dump(
            {"machine": where, "shape": {"B": 1, "H": 8, "D": 64, "dtype": "float32"}, "rows": rows}, file, indent=1
        )


if __name__ == "__main__":
    main()
