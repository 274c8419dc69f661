"""Ask for the number in one of many lines, as LongEval does, and count the right answers by the number of lines.

Writes OUTPUT.json and OUTPUT.png.

Examples:
  hf-longctx lines gpt2
  hf-longctx lines model_cards/fox-demo --lines 5 10 --repeats 2 --no-replies
"""

from functools import partial

from . import shared


def add_arguments(parser):
    shared.add_served(shared.add_model(parser))
    group = parser.add_argument_group("lines")
    group.add_argument(
        "--lines",
        action=shared.Numbers,
        nargs="+",
        metavar="N",
        help="lines in a record (default: 5, 10, 20 ... as far as the claimed context reaches)",
    )
    shared.add_repeats(group, "records of each number of lines")
    shared.add_no_replies(group)
    shared.add_run(parser, output="line_retrieval")


def run(args):
    from ..metrics import Run, line_retrieval
    from ..metrics.report.defaults import NO_CLAIM, line_counts
    from ..metrics.retrieval.lines import draw_record

    shared.check(args)
    for n in args.lines or ():
        draw_record(n, args.seed, 0)
    tokenizer, claimed, open_reader = shared.open_model(args)
    lines = args.lines or line_counts(claimed or NO_CLAIM, tokenizer)
    measure = partial(
        line_retrieval,
        open_reader(),
        tokenizer,
        lines=lines,
        repeats=args.repeats,
        seed=args.seed,
        generate=not args.no_replies,
        bos_token_id=shared.coalesce(args.bos_token_id, tokenizer.bos_token_id),
        run=Run(args.journal, progress=True),
    )
    shared.write_measured(args, measure)
