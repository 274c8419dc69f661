"""What the RoPE bound costs: all distances of one base, the two-digit table, the exact table.

    OMP_NUM_THREADS=1 python -m scripts.bench.rope

"direct cosines" is eq. 16 of arXiv 2405.14591 as numpy computes it one frequency at a time. Wall-clock and CPU
seconds are both reported; on a busy machine, trust the CPU seconds.
"""

import statistics
import time

import numpy as np

from hf_longctx.metrics import rope_base_scan, rope_base_table, rope_decay, rope_inv_freq
from scripts.bench import common


# The paper's 1k to 1M, with 1k read as 1000 and as 1024.
LENGTHS = sorted([*(1000 * 2**i for i in range(10)), 1_000_000, *(1024 * 2**i for i in range(11))])
BASE, HEAD_DIM = 1e6, 128
TABLE = """
| task | head size | wall s | CPU s | largest difference |
| {task} | {head_dim} | {wall_s:.3g} | {cpu_s:.3g} | {largest_difference:.1e} |
"""


def direct_cosines(distances):
    decay = np.zeros(distances)
    for theta in rope_inv_freq(BASE, HEAD_DIM):
        decay += np.cos(np.arange(distances, dtype=np.float64) * theta)
    return decay


def matrix_product(distances):
    return rope_decay(range(distances), base=BASE, head_dim=HEAD_DIM)


def measure(args):
    cpu, results = {}, {}

    def run_once(name, function, *inputs):
        begin = time.process_time()
        seconds, results[name] = common.timed(function, *inputs)
        cpu.setdefault(name, []).append(time.process_time() - begin)
        return seconds

    one_base = {
        f.__name__: lambda f=f: run_once(f.__name__, f, args.distances) for f in (matrix_product, direct_cosines)
    }
    for name, seconds in common.alternate(one_base, args.rounds).items():
        yield {
            "task": f"{args.distances} distances, base {BASE:g}, {name.replace('_', ' ')}",
            "head_dim": HEAD_DIM,
            "wall_s": statistics.median(seconds),
            "cpu_s": statistics.median(cpu[name][1:]),
            "largest_difference": float(np.abs(results[name] - results["direct_cosines"]).max()),
        }
    lengths = [length for length in LENGTHS if length <= args.longest]
    for task, function in (("two-digit table", rope_base_scan), ("exact table", rope_base_table)):
        for head_dim in args.head_dims:
            seconds = run_once(task, function, lengths, head_dim)
            row = {"task": f"{task} to {lengths[-1]}", "head_dim": head_dim, "wall_s": seconds, "cpu_s": cpu[task][-1]}
            yield row | {"bases": {str(length): base for length, base in results[task].items()}}


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128], help="head sizes of the tables")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="of the one-base comparison")
    parser.add_argument("--distances", type=int, default=1_000_001, metavar="TOKENS", help="of one base")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], metavar="TOKENS", help="of the tables")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
