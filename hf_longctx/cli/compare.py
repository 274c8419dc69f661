"""Plot saved results of several models in one figure, and print a table that compares them.

All files must come from one command: `curve`, `loss`, `needle` or `lines`. A paired test at every length compares each
model with the first, on the documents that both models have read. Effective lengths are reported with intervals,
under our rule and the rules of RULER and NoLiMa. With --counts, effective lengths are computed for any benchmark, from
a CSV with columns length,correct,total or model,length,correct,total.

Examples:
  hf-longctx compare gpt2.json llama.json --names GPT-2 Llama --output both.svg
  hf-longctx compare gpt2.json llama.json --output both.md
  hf-longctx compare --counts ruler.csv
"""

import argparse
from pathlib import Path

from . import shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE.json", help="result files, in the order of the figure")
    parser.add_argument(
        "--counts", metavar="FILE.csv", help="CSV of correct answers by length, instead of result files"
    )
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
    from ..metrics.report.comparison import compare, compare_counts, named
    from ..metrics.report.effective import read_counts

    if bool(args.files) == bool(args.counts):
        raise ValueError("give either result files or --counts FILE.csv.")
    files = [Path(file) for file in args.files]
    if args.names is not None and not len(args.names) == len(set(args.names)) == len(files):
        raise ValueError(f"--names has {len(args.names)} names for {len(files)} files; give each a different name.")
    output = shared.figure_path(args.output)
    if args.counts is not None:
        text = compare_counts(read_counts(args.counts), output, title=args.title)
    else:
        results = [read_result(file) for file in files]
        models = dict(zip(args.names, results)) if args.names else named(list(zip(files, results)))
        text = compare(models, output, title=args.title)
    print(f"{text}wrote {output}")
