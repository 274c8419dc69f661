"""Draw the forget-gate heat map and the attention map of FoX heads.

Writes one figure, like Figure 3 of the paper (Lin et al. 2025). By default it shows four heads, from the fastest to
the slowest decay.

Examples:
  hf-longctx gates model_cards/fox-demo --tokens 128 --output gates.svg
  hf-longctx gates model_cards/fox-demo --layers 0 --heads 0 1
"""

from argparse import ArgumentParser, Namespace
from statistics import median

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    shared.add_model(parser)
    group = parser.add_argument_group("figure")
    shared.add_text(group)
    group.add_argument(
        "--tokens", type=int, default=768, metavar="N", help="number of tokens to read (default: %(default)s)"
    )
    group.add_argument("--layers", type=int, nargs="+", metavar="LAYER", help="layers to draw, counted from 0")
    group.add_argument("--heads", type=int, nargs="+", metavar="HEAD", help="heads to draw, counted from 0")
    group.add_argument(
        "--output", default="gates.png", metavar="PATH", help="PNG, SVG or PDF file (default: %(default)s)"
    )


def run(args: Namespace) -> None:
    from ..fox.plot import plot_forget_gates

    output = shared.figure_path(args.output)
    tokenizer = shared.load_tokenizer(args)
    tokens = shared.load_corpus(args.text, tokenizer, longest=args.tokens).tokens[: args.tokens].tolist()
    maps = plot_forget_gates(shared.load_weights(args), tokens, output, layers=args.layers, heads=args.heads)
    times = sorted(head_map.decay_time for head_map in maps)
    print(
        f"decay times of {len(times)} heads: {times[0]:,.1f} to {times[-1]:,.0f} tokens, median {median(times):,.0f}\n"
        f"wrote {output} for {len(tokens)} tokens"
    )
