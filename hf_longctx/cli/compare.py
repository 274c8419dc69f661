"""Draw saved results of several models into one picture, and print their numbers side by side.

The files are what `curve` wrote, or what `loss` wrote: all of one kind.
"""

from pathlib import Path


def add_arguments(parser):
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="in the order of the picture")
    parser.add_argument(
        "--output", default="comparison.png", metavar="PATH", help="PNG, SVG or PDF (default: %(default)s)"
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="one for each file (default: the models' names)")
    parser.add_argument("--title", help="heading of the picture")


def run(args):
    from dataclasses import replace

    from ..metrics import ForgettingCurve, PositionLoss
    from ..metrics.report.comparison import comparison_table, named, plot_comparison
    from ..metrics.result import read_result
    from ..metrics.retrieval.plot import plot_losses

    files = [Path(file) for file in args.files]
    if args.names is not None and (len(args.names) != len(files) or len(set(args.names)) != len(files)):
        raise ValueError(f"--names has {len(args.names)} names for {len(files)} files; give each file one of its own.")
    results = [read_result(file) for file in files]
    kinds = {type(result) for result in results}
    results = dict(zip(args.names, results)) if args.names else named(list(zip(files, results)))
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    title = {} if args.title is None else {"title": args.title}
    if kinds == {ForgettingCurve}:
        trained = {name: curve.settings.get("train_length") for name, curve in results.items()}
        trained = {name: length for name, length in trained.items() if length is not None}
        plot_comparison(results, output, train_lengths=trained, **title)
        print(comparison_table(results, trained), end="")
    elif kinds == {PositionLoss}:
        losses = [replace(loss, settings={**loss.settings, "model": name}) for name, loss in results.items()]
        plot_losses(losses, output, **title)
        for name, loss in results.items():
            print(f"{name}: {loss.summary()}")
    else:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"these files hold {found}; give forgetting curves only, or per-token losses only.")
    print(f"wrote {output}")
