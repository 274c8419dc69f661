"""What stands beside the attention in a FoX (Pro) layer: as it is, compiled by inductor, and at the speed of memory.

    python scripts/bench_neighbours.py [--device cpu|cuda] [--length 2048] [--json FILE]

Neighbours are QK-norm, the token shift of keys and values, both together, and output norm with output gate, from what
projections give to what the attention or the next projection takes. "floor" is a plain copy that moves as many bytes
as the neighbour has inputs and outputs (in the backward pass: inputs, gradients of the outputs, gradients of the inputs),
so no kernel can do better. "reached" is what compiling saves, as a share of what the floor would save; "of layer" is
the eager neighbour's share of the eager layer's time, which on a GPU runs the Triton kernels. Contenders take turns, so that
whatever else the machine does hits all of them; figures are medians of rounds, ratios medians of the ratio within one.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from bench_attention import machine

from hf_longctx.fox import FoxConfig, FoxModel
from hf_longctx.fox.inputs_fox import PLAIN_ROWS
from hf_longctx.fox.state_fox import CachedLayer


def make_layer(args):
    """The attention of a FoX (Pro) with random weights."""
    config = FoxConfig.pro(
        vocab_size=16,
        hidden_size=args.hidden,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=args.hidden // args.head_dim,
        decay_time_min=8,
        decay_time_max=args.length,
    )
    torch.manual_seed(0)
    model = FoxModel(config).to(args.device, getattr(torch, args.dtype))
    model.set_attn_implementation("forgetting_triton" if args.device == "cuda" else "sdpa")
    return model.layers[0].self_attn


def neighbours(layer, args):
    """Name: (function, its inputs); last the layer itself."""

    def draw():
        x = torch.randn(1, args.length, args.hidden, device=args.device)
        return x.to(layer.q_proj.weight.dtype).requires_grad_()

    def draw_heads():
        return draw().detach().unflatten(2, (-1, args.head_dim)).requires_grad_()

    local = copy.deepcopy(layer)
    local.k_shift_proj = local.v_shift_proj = torch.nn.Identity()

    def norm(q, k):
        return layer.q_norm(q), layer.k_norm(k)

    def shift(weights, k, v):
        return local.token_shift(weights, k, v, PLAIN_ROWS, CachedLayer(local, None, k))

    def shift_and_norm(weights, q, k, v):
        k, v = shift(weights, k, v)
        return *norm(q, k), v

    def norm_and_gate(o, gate):
        return (layer.o_norm(o).flatten(2) * layer.g_act(gate),)

    x, gate, q, k, v, o = draw(), draw(), *(draw_heads() for _ in range(4))
    weights = q.detach()[..., 0].clone().requires_grad_()  # one per token and head
    return {
        "QK-norm": (norm, (q, k)),
        "token shift": (shift, (weights, k, v)),
        "token shift + QK-norm": (shift_and_norm, (weights, q, k, v)),
        "output norm + gate": (norm_and_gate, (o, gate)),
        "attention layer": (lambda x: layer(x)[:1], (x,)),
    }


def copies(inputs, outputs):
    """What moves as many bytes as the forward pass, and as the backward pass: (from, to) each."""
    given, made = (sum(x.nbytes for x in tensors) for tensors in (inputs, outputs))
    return [
        tuple(torch.zeros(size // 2, dtype=torch.uint8, device=inputs[0].device) for _ in range(2))
        for size in (given + made, given + made + given)
    ]


def seconds(evicted, function, *args, **kwargs):
    """Seconds, and the result. On a GPU, `evicted` empties the cache before and keeps it busy until all is launched."""
    if not evicted.is_cuda:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        return time.perf_counter() - begin, result
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    evicted.zero_()
    begin.record()
    result = function(*args, **kwargs)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3, result


def measure(layer, args):
    """{name: {variant: ([seconds forward], [seconds backward])}} in rounds, of which the first compiles and warms up."""
    evicted = torch.empty(2**31 if args.device == "cuda" else 0, dtype=torch.uint8, device=args.device)
    weights = list(layer.parameters())
    contenders, taken = [], {}
    for name, (function, inputs) in neighbours(layer, args).items():
        variants = {"eager": function, "compiled": torch.compile(function)}
        contenders.append((name, variants, inputs, copies(inputs, function(*inputs))))
        taken[name] = {variant: ([], []) for variant in (*variants, "floor")}
    for _ in range(1 + args.rounds):
        for name, variants, inputs, moved in contenders:
            for variant, function in variants.items():
                forward, outputs = seconds(evicted, function, *inputs)
                ones = [torch.ones_like(x) for x in outputs]
                given = ((*outputs,), (*inputs, *weights), ones)
                backward, _ = seconds(evicted, torch.autograd.grad, *given, allow_unused=True)
                taken[name][variant][0].append(forward)
                taken[name][variant][1].append(backward)
            for own, (source, target) in zip(taken[name]["floor"], moved):
                own.append(seconds(evicted, target.copy_, source)[0])
    return taken


def rows_of(taken):
    for i, direction in enumerate(("forward", "backward")):
        layer = taken["attention layer"]["eager"][i][1:]
        for name, variants in taken.items():
            eager, compiled, floor = (variants[v][i][1:] for v in ("eager", "compiled", "floor"))
            row = {"direction": direction, "name": name}
            row |= {
                f"{k}_ms": round(1e3 * statistics.median(x), 3) for k, x in (("eager", eager), ("compiled", compiled))
            }
            row["faster"] = round(statistics.median(e / c for e, c in zip(eager, compiled)), 3)
            if name != "attention layer":
                row["floor_ms"] = round(1e3 * statistics.median(floor), 3)
                saved = statistics.median((e - c) / (e - f) for e, c, f in zip(eager, compiled, floor))
                row["reached"] = round(saved, 3)
                row["of_layer"] = round(statistics.median(e / whole for e, whole in zip(eager, layer)), 4)
            yield row


def markdown(rows):
    head = "| pass | neighbour | eager ms | compiled ms | floor ms | faster | reached | of layer |"
    lines = [head, "|" + "---|" * 8]
    for row in rows:
        beside = ["", "", ""]
        if "floor_ms" in row:
            beside = [f"{row['floor_ms']:.2f}", f"{row['reached']:.0%}", f"{row['of_layer']:.1%}"]
        cells = [row["direction"], row["name"], f"{row['eager_ms']:.2f}", f"{row['compiled_ms']:.2f}", beside[0]]
        lines.append("| " + " | ".join([*cells, f"{row['faster']:.2f}x", *beside[1:]]) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--length", type=int, metavar="TOKENS", help="default: 2048, on a GPU 16384")
    parser.add_argument("--hidden", type=int, metavar="N", help="width (default: 768, on a GPU 2048)")
    parser.add_argument("--head-dim", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--dtype", help="default: float32, on a GPU bfloat16")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="default: scripts/results/bench_neighbours.json, _cuda.json on a GPU"
    )
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.json = args.json or Path(__file__).parent / "results" / f"bench_neighbours{'_cuda' * on_gpu}.json"
    args.length = args.length or (16384 if on_gpu else 2048)
    args.hidden = args.hidden or (2048 if on_gpu else 768)
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")

    where = machine() | {"transformers": transformers.__version__}
    where["device"] = torch.cuda.get_device_name() if on_gpu else where["cpu"]
    print(
        f"{where['device']}, {where['threads']} threads, torch {where['torch']}; FoX (Pro), width {args.hidden}, heads of "
        f"{args.head_dim}, T={args.length}, {args.dtype}\n"
    )
    rows = list(rows_of(measure(make_layer(args), args)))
    print(markdown(rows))
    settings = {name: x for name, x in vars(args).items() if name != "json"}
    args.json.write_text(json.dumps({"machine": where, "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
