"""Draw saved results of several models into one picture, and print their numbers side by side.

The files are what `curve` wrote, or what `loss` wrote: all of one kind.

Examples:
  hf-longctx compare gpt2.json llama.json --names GPT-2 Llama --output both.svg
"""

from pathlib import Path


def add_arguments(parser):
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="in the order of the picture")
    parser.add_argument(
        "--output",
        default="comparison.png",
        metavar="PATH",
        help="PNG, SVG or PDF; .md for the table (default: %(default)s)",
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="one for each file (default: the models' names)")
    parser.add_argument("--title", help="heading of the picture")


def run(args):
    from ..metrics import read_result
    from ..metrics.report.comparison import compare, named

    files = [Path(file) for file in args.files]
    if args.names is not None and (len(args.names) != len(files) or len(set(args.names)) != len(files)):
        raise ValueError(
            f"--names has {len(args.names)} names for {len(files)} files; give each file a different one."
        )
    results = [read_result(file) for file in files]
    results = dict(zip(args.names, results)) if args.names else named(list(zip(files, results)))
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    print(compare(results, output, title=args.title), end="")
    print(f"wrote {output}")
