"""Draw the losses of trainings over their steps, those of other texts, and how fast the gates forget.

Examples:
  hf-longctx plot run
  hf-longctx plot fox llama --output losses.svg
"""

from argparse import ArgumentParser, Namespace

from . import measuring


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of train or finetune, finished or not")
    parser.add_argument(
        "--output", default="losses.png", metavar="PATH", help="PNG, SVG or PDF (default: %(default)s)"
    )


def run(args: Namespace) -> None:
    from ..training.plot import plot_runs

    output = measuring.picture_path(args.output)
    plot_runs(args.runs, output)
    print(f"wrote {output}")
