"""Ask for the number in one of many lines, as LongEval does, and count the right answers by the number of lines.

Writes OUTPUT.json and OUTPUT.png.

Examples:
  hf-longctx lines gpt2
  hf-longctx lines model_cards/fox-demo --lines 5 10 --repeats 2 --no-replies
"""

import argparse
from functools import partial

from . import measuring, shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_served(shared.add_model(parser))
    group = parser.add_argument_group("lines")
    group.add_argument(
        "--lines",
        action=measuring.Numbers,
        nargs="+",
        metavar="N",
        help="lines in a record (default: 5, 10, 20 ... as far as the claimed context reaches)",
    )
    measuring.add_repeats(group, "records of each number of lines")
    measuring.add_chat_template(group)
    measuring.add_no_replies(group)
    measuring.add_run(parser, output="line_retrieval")


def run(args: argparse.Namespace) -> None:
    from ..metrics import Run, line_retrieval
    from ..metrics.report.defaults import NO_CLAIM, line_counts
    from ..metrics.retrieval.lines import draw_record

    measuring.check(args)
    for n in args.lines or ():
        draw_record(n, args.seed, 0)
    tokenizer, claimed, open_reader = measuring.open_model(args)
    lines = args.lines or line_counts(claimed or NO_CLAIM, tokenizer)
    measure = partial(
        line_retrieval,
        open_reader(),
        tokenizer,
        lines=lines,
        repeats=args.repeats,
        chat_template=args.chat_template,
        seed=args.seed,
        generate=not args.no_replies,
        bos_token_id=measuring.default(args.bos_token_id, tokenizer.bos_token_id),
        run=Run(args.journal, progress=True),
    )
    measuring.measure_and_write(args, measure)
