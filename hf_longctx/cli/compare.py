"""Plot saved results of several models in one figure, and print a table that compares them.

All files must come from one command: `curve`, `loss`, `needle` or `lines`. A paired test at every length compares each
model with the first model. The test uses only documents that both models have read. The table shows effective lengths
with intervals, by three rules: ours, RULER's and NoLiMa's.

Examples:
  hf-longctx compare gpt2.json llama.json --names GPT-2 Llama --output both.svg
  hf-longctx compare gpt2.json llama.json --output both.md
"""

import argparse
from pathlib import Path

from . import shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="result files, in the order of the figure")
    parser.add_argument(
        "--output",
        default="comparison.png",
        metavar="PATH",
        help="PNG, SVG or PDF for a figure, or .md for the table (default: %(default)s)",
    )
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="one model name per file (default: the names in the files)"
    )
    parser.add_argument("--title", help="title of the figure")


def run(args: argparse.Namespace) -> None:
    from ..metrics import read_result
    from ..metrics.report.comparison import compare, named

    files = [Path(file) for file in args.files]
    if args.names is not None and not len(args.names) == len(set(args.names)) == len(files):
        raise ValueError(
            f"--names has {len(args.names)} names for {len(files)} files. Give each file a different name."
        )
    output = shared.figure_path(args.output)
    results = [read_result(file) for file in files]
    models = dict(zip(args.names, results)) if args.names else named(list(zip(files, results)))
    print(f"{compare(models, output, title=args.title)}wrote {output}")
