"""What the RoPE bound costs: all distances of one base, the two-digit table, the exact table.

    OMP_NUM_THREADS=1 python scripts/bench_rope.py --json bench_rope.json

Wall-clock and CPU seconds are both given: on a busy machine believe the second.
"""

import argparse
import json
import os
import platform
import statistics
import time

import numpy as np

from hf_longctx.metrics.rope.bounds import rope_base_scan, rope_base_table, rope_decay, rope_inv_freq


# The paper's 1k to 1M, with 1k read as 1000 and as 1024.
LENGTHS = sorted([*(1000 * 2**i for i in range(10)), 1_000_000, *(1024 * 2**i for i in range(11))])


def timed(function):
    """(result, wall-clock seconds, CPU seconds of this process)"""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def direct_cosines(size, base, head_dim):
    """Eq. 16 as numpy would be asked for it, one frequency at a time to spare memory."""
    m, decay = np.arange(size, dtype=np.float64), np.zeros(size)
    for theta in rope_inv_freq(base, head_dim):
        decay += np.cos(m * theta)
    return decay


def bench_one_base(size, base, head_dim, repeats):
    fast, slow = [], []
    for _ in range(repeats):  # alternating, so that both meet the same neighbours
        decay, *seconds = timed(lambda: rope_decay(range(size), base=base, head_dim=head_dim))
        fast.append(seconds)
        exact, *seconds = timed(lambda: direct_cosines(size, base, head_dim))
        slow.append(seconds)
    wall = [statistics.median(run[0] for run in runs) for runs in (fast, slow)]
    cpu = [statistics.median(run[1] for run in runs) for runs in (fast, slow)]
    return {
        "distances": size,
        "wall_s": {"matrix_product": wall[0], "direct_cosines": wall[1], "ratio": wall[1] / wall[0]},
        "cpu_s": {"matrix_product": cpu[0], "direct_cosines": cpu[1], "ratio": cpu[1] / cpu[0]},
        "largest_difference": float(np.abs(decay - exact).max()),
    }


def bench_table(function, head_dim):
    table, wall, cpu = timed(lambda: function(LENGTHS, head_dim))
    return {"head_dim": head_dim, "wall_s": wall, "cpu_s": cpu, "bases": {str(k): v for k, v in table.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128], help="head dimensions of the tables")
    parser.add_argument("--repeats", type=int, default=9, help="alternating runs of the one-base comparison")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    args = parser.parse_args()

    result = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "one_base": bench_one_base(1_000_001, 1e6, 128, args.repeats),
        "two_digit_table": [],
        "exact_table": [],
    }
    one = result["one_base"]
    for clock in ("wall_s", "cpu_s"):
        seconds = one[clock]
        print(
            f"all m to 1M, base 1e6, d=128 ({clock[:-2]}): {1e3 * seconds['matrix_product']:.1f} ms by matrix "
            f"product, {1e3 * seconds['direct_cosines']:.0f} ms by cosines, ratio {seconds['ratio']:.0f}"
        )
    print(f"  largest difference {one['largest_difference']:.1e}")
    for name, function in (("two_digit_table", rope_base_scan), ("exact_table", rope_base_table)):
        for head_dim in args.head_dims:
            row = bench_table(function, head_dim)
            result[name].append(row)
            print(f"{name} to {LENGTHS[-1]}, d={head_dim}: {row['wall_s']:.2f} s wall, {row['cpu_s']:.2f} s CPU")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
