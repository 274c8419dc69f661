"""Check whether a model's RoPE base supports the context that it claims (arXiv 2405.14591).

Only the config is read. The bound is for screening: many good models violate it at their claimed context. The figure
plots B_m (eq. 16 of the paper) against the distance m. It marks the first negative B_m and the range of the claimed
context.

Examples:
  hf-longctx rope meta-llama/Llama-3.1-8B
  hf-longctx rope MODEL --context-length 65536 --output rope.svg
"""

import argparse
from pathlib import Path

from . import shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a model, or path to a config.json")
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help="context to check (default: the context that the model claims)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--output", metavar="PATH", help="PNG, SVG or PDF file for a figure of the bound (default: no figure)"
    )
    shared.add_remote_code(parser)


def run(args: argparse.Namespace) -> None:
    from ..metrics import rope_report

    if not Path(args.model).is_file():  # a config.json
        shared.check_model_name(args.model)
    output = None if args.output is None else shared.figure_path(args.output)
    report = rope_report(args.model, context_length=args.context_length, model_kwargs=shared.source(args))
    print(report.to_json() if args.json else report)
    if output is not None:
        report.plot(output)
        shared.log(f"wrote {output}")
