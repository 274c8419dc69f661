"""Evaluate a model with all metrics, and summarize the results on one page.

Metrics: forgetting curve, per-token loss, needle in a haystack, line retrieval and RoPE bound. If a metric does not
support the model, the page explains why. The folder --output receives a self-contained report.html, JSON results and
figures. The same command resumes after an interruption, unless the weights or the corpus have changed. Under torchrun
or accelerate launch, the processes share the work. In Python: hf_longctx.metrics.measure_all.

Examples:
  hf-longctx report gpt2 --text book.txt --output gpt2_report
  torchrun --nproc-per-node 8 -m hf_longctx report MODEL --train-length 8192
"""

import argparse
from pathlib import Path

from . import shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_served(shared.add_model(parser))
    group = parser.add_argument_group("report")
    shared.add_text(group)
    shared.add_cache(group)
    group.add_argument(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help="longest input to evaluate (default: the context that the model claims)",
    )
    group.add_argument(
        "--repeats",
        type=int,
        default=10,
        metavar="N",
        help="forgetting curve: repeats per length (default: %(default)s)",
    )
    shared.add_train_length(group)
    group.add_argument(
        "--output",
        default="report",
        metavar="FOLDER",
        help="output folder (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    from ..metrics import measure_all
    from ..metrics.task import NO_CLAIM

    shared.create_folder(Path(args.output))
    tokenizer, claims, open_reader = shared.open_model(args)
    longest = args.context_length or claims.claimed_context or NO_CLAIM
    corpus = shared.load_corpus(args.text, tokenizer, longest)
    report = measure_all(
        open_reader(),
        tokenizer,
        corpus.tokens,
        args.output,
        context_length=args.context_length,
        train_length=args.train_length,
        repeats=args.repeats,
        seed=args.seed,
        corpus_name=corpus.name,
        progress=True,
    )
    if report is not None:
        print(f"wrote {report.page}")
