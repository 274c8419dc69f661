"""The parts of a FoX (Pro) layer beside the attention: eager, compiled by inductor, and at the speed of memory.

    python -m scripts.bench.neighbours [--device cpu|cuda] [--length 2048]

Neighbours are QK-norm, the token shift of keys and values, both together, and output norm with output gate, from the
results of the projections to the inputs of the attention or of the next projection. "floor" is a plain copy that
moves as many bytes as the neighbour has inputs and outputs (in the backward pass: inputs, gradients of the outputs,
gradients of the inputs), so no kernel can do better. "reached" is the time that compiling saves, as a share of what
the floor would save; "of layer" is the eager neighbour's share of the eager layer's time (on a GPU with the Triton
kernels). Contenders take turns; figures are medians of rounds, ratios medians of the ratio within a round.
"""

import statistics

import torch

from hf_longctx.fox import FoxConfig, FoxModel
from hf_longctx.fox.fused_fox import Shift, fused_norm
from hf_longctx.fox.modeling_fox import shift_norm_gate
from scripts.bench import common


TABLE = """
| pass | neighbour | eager ms | compiled ms | floor ms | of layer |
| {direction} | {name} | {eager_ms:.2f} | {compiled_ms:.2f} | {floor_ms:.2f} | {of_layer:.1%} |
"""
LAYER = "attention layer"
DEFAULTS = {"cpu": {"length": 2048, "hidden": 768, "dtype": "float32"},
            "cuda": {"length": 16384, "hidden": 2048, "dtype": "bfloat16"}}  # fmt: skip


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
    """Name: (function, inputs); the last is the layer itself."""

    def draw():
        x = torch.randn(1, args.length, args.hidden, device=args.device)
        return x.to(layer.q_proj.weight.dtype).requires_grad_()

    def draw_heads():
        return draw().detach().unflatten(2, (-1, args.head_dim)).requires_grad_()

    def norm(q, k):
        return layer.q_norm(q), layer.k_norm(k)

    def shift(weights, k, v):
        return tuple(fused_norm(x, shift=Shift(weights)) for x in (k, v))

    def shift_and_norm(weights, q, k, v):
        k = shift_norm_gate(layer.k_norm, k, Shift(weights))
        return layer.q_norm(q), k, fused_norm(v, shift=Shift(weights))

    def norm_and_gate(o, gate):
        return (shift_norm_gate(layer.o_norm, o, gate=gate, activation=layer.config.output_gate),)

    x, gate, q, k, v, o = draw(), draw(), *(draw_heads() for _ in range(4))
    weights = q.detach()[..., 0].float().sigmoid().requires_grad_()  # one per token and head
    return {
        "QK-norm": (norm, (q, k)),
        "token shift": (shift, (weights, k, v)),
        "token shift + QK-norm": (shift_and_norm, (weights, q, k, v)),
        "output norm + gate": (norm_and_gate, (o, gate)),
        LAYER: (lambda x: layer(x)[:1], (x,)),
    }


def copies(inputs, outputs):
    """(from, to) of copies that move as many bytes as the forward pass, and as the backward pass."""
    n_in, n_out = (sum(x.nbytes for x in tensors) for tensors in (inputs, outputs))
    return [
        tuple(torch.zeros(size // 2, dtype=torch.uint8, device=inputs[0].device) for _ in range(2))
        for size in (n_in + n_out, n_in + n_out + n_in)
    ]


def make_turns(layer, args):
    """{(name, variant, direction): a function that returns the seconds of one run}; forward comes before backward."""
    scratch = torch.empty(2**31, dtype=torch.uint8, device="cuda") if args.device == "cuda" else None
    weights, turns, results = list(layer.parameters()), {}, {}

    def timed(function, *tensors):
        return common.timed(function, *tensors, device=args.device, scratch=scratch)

    def add(name, variant, function, inputs):
        def forward():
            seconds, results[name, variant] = timed(function, *inputs)
            return seconds

        def backward():
            outputs = results.pop((name, variant))
            ones = [torch.ones_like(x) for x in outputs]
            grad = lambda: torch.autograd.grad(outputs, (*inputs, *weights), ones, allow_unused=True)  # noqa: E731
            return timed(grad)[0]

        turns[name, variant, "forward"], turns[name, variant, "backward"] = forward, backward

    for name, (function, inputs) in neighbours(layer, args).items():
        add(name, "eager", function, inputs)
        add(name, "compiled", torch.compile(function), inputs)
        for direction, (source, target) in zip(("forward", "backward"), copies(inputs, function(*inputs))):
            turns[name, "floor", direction] = lambda source=source, target=target: timed(target.copy_, source)[0]
    return turns


def measure(args):
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    seconds = common.alternate(make_turns(make_layer(args), args), args.rounds)  # the first round compiles
    for direction in ("forward", "backward"):
        whole = seconds[LAYER, "eager", direction]
        for name in dict.fromkeys(name for name, *_ in seconds):
            eager, compiled, floor = (seconds[name, v, direction] for v in ("eager", "compiled", "floor"))
            row = {
                "direction": direction,
                "name": name,
                "eager_ms": 1e3 * statistics.median(eager),
                "compiled_ms": 1e3 * statistics.median(compiled),
                "faster": common.median_ratio(eager, compiled),
            }
            if name != LAYER:
                row["floor_ms"] = 1e3 * statistics.median(floor)
                row["reached"] = statistics.median((e - c) / (e - f) for e, c, f in zip(eager, compiled, floor))
                row["of_layer"] = common.median_ratio(eager, whole)
            yield row


def table(result):
    s = result["settings"]
    text = f"FoX (Pro), width {s['hidden']}, heads of {s['head_dim']}, T={s['length']}, {s['dtype']}."
    return f"{text}\n\n{common.markdown(result['rows'], TABLE)}"


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, device="cpu", head_dim=64, rounds=15)
    parser.add_argument("--length", type=int, metavar="TOKENS", help="default: 2048, on a GPU 16384")
    parser.add_argument("--hidden", type=int, metavar="N", help="width (default: 768, on a GPU 2048)")
    parser.add_argument("--dtype", help="default: float32, on a GPU bfloat16")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
