"""Draw saved results of several models into one figure, and print their numbers side by side.

The files must come from one of `curve`, `loss`, `needle` or `lines`. Each model is tested against the first, length by
length, on the texts that both have read. The effective length has an interval, under three rules. With --counts, it is
computed for any other benchmark from a table that begins with length,correct,total or model,length,correct,total.

Examples:
  hf-longctx compare gpt2.json llama.json --names GPT-2 Llama --output both.svg
  hf-longctx compare gpt2.json llama.json --output both.md
  hf-longctx compare --counts ruler.csv
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from . import measuring


if TYPE_CHECKING:
    from ..metrics import ForgettingCurve, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE.json", help="results, in the order of the figure")
    parser.add_argument("--counts", metavar="FILE.csv", help="numbers of right answers by length, instead of results")
    parser.add_argument(
        "--output",
        default="comparison.png",
        metavar="PATH",
        help="PNG, SVG or PDF for a figure, or .md for the table (default: %(default)s)",
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="a name for each file (default: the models' names)")
    parser.add_argument("--title", help="title of the figure")
    parser.add_argument(
        "--test-sources",
        action="store_true",
        help="test whether the LM accuracies of curves differ that differ in --irrelevant-text only (Liu et al., "
        "appendix A)",
    )


def run(args: argparse.Namespace) -> None:
    from ..metrics import irrelevant_source_test, read_result
    from ..metrics.report.comparison import compare, compare_counts, named
    from ..metrics.report.effective import read_counts

    if bool(args.files) == bool(args.counts):
        raise ValueError("give result files, or --counts FILE.csv, and not both.")
    if args.counts is not None:
        if args.names is not None or args.test_sources:
            raise ValueError(
                "--names and --test-sources are for result files; a column model names those of --counts."
            )
        models, output = read_counts(args.counts), measuring.picture_path(args.output, (*measuring.PICTURES, ".md"))
        print(compare_counts(models, output, title=args.title), end="")
        print(f"wrote {output}")
        return
    files = [Path(file) for file in args.files]
    if args.names is not None and (len(args.names) != len(files) or len(set(args.names)) != len(files)):
        raise ValueError(
            f"--names has {len(args.names)} names for {len(files)} files; give each file a different one."
        )
    results = [read_result(file) for file in files]
    results = dict(zip(args.names, results)) if args.names else named(list(zip(files, results)))
    curves = curves_of_sources(results) if args.test_sources else None
    output = measuring.picture_path(args.output, (*measuring.PICTURES, ".md"))
    print(compare(results, output, title=args.title), end="")
    print(f"wrote {output}")
    if curves is not None:
        for test in irrelevant_source_test(curves):
            print(f"length {test.length}: p = {test.anova_p:.3g} (ANOVA), {test.kruskal_p:.3g} (Kruskal-Wallis)")


def curves_of_sources(results: "dict[str, Result]") -> "dict[str, ForgettingCurve]":
    """Return the results; raise ValueError unless they are curves that differ in their irrelevant text only."""
    from ..metrics import ForgettingCurve

    for name in ("kind", "model", "protocol", "data_type", "seed", "corpus_sha256"):
        values = {result.kind if name == "kind" else result.settings.get(name) for result in results.values()}
        if len(values) > 1 or (name == "kind" and values != {"forgetting_curve"}):
            raise ValueError(
                f"--test-sources compares forgetting curves that differ in their irrelevant text only; their {name} is "
                f"{' and '.join(map(str, values))}."
            )
    return {name: result for name, result in results.items() if isinstance(result, ForgettingCurve)}
