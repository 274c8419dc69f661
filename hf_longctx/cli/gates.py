"""Draw what the heads of a FoX forget, and where they look: the forget gate matrix and the attention map of each.

Writes one picture, like Figure 3 of the paper (Lin et al. 2025). Without --layers and --heads it shows four heads,
from the one that forgets fastest to the slowest.

Examples:
  hf-longctx gates model_cards/fox-demo --tokens 128 --output gates.svg
  hf-longctx gates model_cards/fox-demo --layers 0 --heads 0 1
"""

from argparse import ArgumentParser, Namespace
from statistics import median

from . import measuring, shared


def add_arguments(parser: ArgumentParser) -> None:
    shared.add_model(parser)
    group = parser.add_argument_group("picture")
    measuring.add_text(group)
    group.add_argument(
        "--tokens", type=int, default=768, metavar="N", help="read this much of the text (default: %(default)s)"
    )
    group.add_argument("--layers", type=int, nargs="+", metavar="LAYER", help="from 0 (default: all, or see above)")
    group.add_argument("--heads", type=int, nargs="+", metavar="HEAD", help="from 0 (default: all, or see above)")
    group.add_argument("--output", default="gates.png", metavar="PATH", help="PNG, SVG or PDF (default: %(default)s)")


def run(args: Namespace) -> None:
    from ..fox.plot import plot_forget_gates

    measuring.check(args)
    tokenizer = shared.load_tokenizer(args)
    tokens = measuring.load_corpus(args.text, tokenizer, longest=args.tokens).tokens[: args.tokens].tolist()
    output = measuring.figure_path(args.output)
    maps = plot_forget_gates(shared.load_weights(args), tokens, output, layers=args.layers, heads=args.heads)
    times = sorted(head_map.decay_time for head_map in maps)
    print(
        f"decay times of {len(times)} heads: {times[0]:,.1f} to {times[-1]:,.0f} tokens, median {median(times):,.0f}\n"
        f"wrote {output}, of {len(tokens)} tokens"
    )
