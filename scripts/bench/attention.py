"""Forgetting attention against plain attention on a CPU: time and memory, forward and backward.

    python -m scripts.bench.attention [--lengths 1024 4096 16384]

Times are medians of alternating rounds, ratios are to plain causal SDPA within a round, and memory is what one call
adds to the peak of a fresh process. Dense bias and eager are left out beyond --largest-quadratic. For a GPU, see
scripts.bench.gpu.check.
"""

import statistics

import torch
import torch.nn.functional as F

from hf_longctx.fox import forgetting_attention
from scripts.bench import common


TABLE = """
| T | direction | attention | median ms | to plain | MB added |
| {length} | {direction} | {name} | {median_ms:.1f} | {ratio_to_plain:.2f}x | {added_mb:.0f} |
"""


def draw(length, heads=8, head_dim=64):
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
QUADRATIC = ("dense bias", "eager")  # 8 GB a matrix at 16k


@torch.no_grad()
def forward(function, tensors):
    return common.timed(function, *tensors)[0]


def backward(function, tensors):
    o = function(*(x.detach().requires_grad_() for x in tensors))
    return common.timed(o.backward, torch.ones_like(o))[0]


DIRECTIONS = {"forward": forward, "backward": backward}


def added_mb(name, length, direction):
    """MB that one call adds to the memory of this process, which already holds the inputs."""
    run = DIRECTIONS[direction]
    run(CONTENDERS[name], draw(64))  # what the first call of all loads does not count
    return common.added_mb(run, CONTENDERS[name], draw(length))[0]


def measure(args):
    for length in args.lengths:
        names = [name for name in CONTENDERS if name not in QUADRATIC or length <= args.largest_quadratic]
        tensors = draw(length)
        for direction, run in DIRECTIONS.items():
            turns = {name: lambda run=run, name=name: run(CONTENDERS[name], tensors) for name in names}  # noqa: B023
            seconds = common.alternate(turns, args.rounds)
            for name in names:
                yield {
                    "length": length,
                    "direction": direction,
                    "name": name,
                    "median_ms": 1e3 * statistics.median(seconds[name]),
                    "ratio_to_plain": common.median_ratio(seconds[name], seconds["plain SDPA"]),
                    "added_mb": common.in_fresh_process(added_mb, name, length, direction),
                }


def table(result):
    rows = [row for row in result["rows"] if row["length"] >= 4096]
    return "float32, B=1, H=8, D=64.\n\n" + common.markdown(rows or result["rows"], TABLE)


def main(arguments=None):
    options = {"lengths": [1024, 4096, 16384], "rounds": 7, "largest_quadratic": 4096}
    parser = common.make_parser(__spec__.name, __doc__, **options)
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
