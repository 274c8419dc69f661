"""Draw saved results of several models into one picture, and print their numbers side by side.

The files are what `curve` wrote, or what `loss` wrote: all of one kind.

Examples:
  hf-longctx compare gpt2.json llama.json --names GPT-2 Llama --output both.svg
  hf-longctx compare gpt2.json llama.json --output both.md
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from . import measuring


if TYPE_CHECKING:
    from ..metrics import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="in the order of the picture")
    parser.add_argument(
        "--output",
        default="comparison.png",
        metavar="PATH",
        help="PNG, SVG or PDF; .md for the table (default: %(default)s)",
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="one for each file (default: the models' names)")
    parser.add_argument("--title", help="heading of the picture")
    parser.add_argument(
        "--test-sources",
        action="store_true",
        help="test whether the LM accuracies of curves differ that differ in --irrelevant-text only (Liu et al., "
        "appendix A)",
    )


def run(args: argparse.Namespace) -> None:
    from ..metrics import irrelevant_source_test, read_result
    from ..metrics.report.comparison import compare, named

    files = [Path(file) for file in args.files]
    if args.names is not None and (len(args.names) != len(files) or len(set(args.names)) != len(files)):
        raise ValueError(
            f"--names has {len(args.names)} names for {len(files)} files; give each file a different one."
        )
    results = [read_result(file) for file in files]
    results = dict(zip(args.names, results)) if args.names else named(list(zip(files, results)))
    if args.test_sources:
        check_sources(results.values())
    output = measuring.picture_path(args.output, (*measuring.PICTURES, ".md"))
    print(compare(results, output, title=args.title), end="")
    print(f"wrote {output}")
    if args.test_sources:
        for test in irrelevant_source_test(results):
            print(f"length {test.length}: p = {test.anova_p:.3g} (ANOVA), {test.kruskal_p:.3g} (Kruskal-Wallis)")


def check_sources(results: "Iterable[Result]") -> None:
    """Raise ValueError unless the results are forgetting curves that differ in their irrelevant text only."""
    for name in ("kind", "model", "protocol", "data_type", "seed", "corpus_sha256"):
        values = {result.kind if name == "kind" else result.settings.get(name) for result in results}
        if len(values) > 1 or (name == "kind" and values != {"forgetting_curve"}):
            raise ValueError(
                f"--test-sources compares forgetting curves that differ in their irrelevant text only; their {name} is "
                f"{' and '.join(map(str, values))}."
            )
