"""Ask for the number in one of many lines, as LongEval does, and count the right answers by the number of lines.

Writes OUTPUT.json and OUTPUT.png.
"""

from . import shared


def add_arguments(parser):
    shared.add_model(parser)
    shared.add_endpoint(parser)
    parser.add_argument(
        "--lines",
        type=int,
        nargs="+",
        metavar="N",
        help="lines in a record (default: 5, 10, 20 ... as far as the claimed context reaches)",
    )
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="records of each (default: %(default)s)")
    parser.add_argument(
        "--no-replies", action="store_true", help="score the answer's tokens only; the model generates nothing"
    )
    shared.add_measuring(parser, output="line_retrieval")


def run(args):
    from ..metrics import line_retrieval
    from ..metrics.run.reader import reader_for

    shared.join_processes()
    model, tokenizer = shared.load_model(args)
    shared.measure(
        args,
        tokenizer,
        line_retrieval,
        model,
        tokenizer,
        lines=args.lines or default_lines(tokenizer, reader_for(model).claimed_context or 4096),
        repeats=args.repeats,
        seed=args.seed,
        generate=not args.no_replies,
    )


def default_lines(tokenizer, context):
    """5, 10, 20 ... lines, as far as they are sure to fit into the context; 5 in any case."""
    from ..metrics.retrieval.lines import NAMES

    found = [5]
    while 2 * found[-1] <= len(NAMES) and needed(tokenizer, 2 * found[-1]) <= context:
        found.append(2 * found[-1])
    return found


def needed(tokenizer, lines):
    """Tokens that are sure to suffice for a record of so many lines, its question and the reply."""
    from ..metrics.retrieval.lines import draw_record

    return 1.1 * len(tokenizer(draw_record(lines, seed=0, repeat=0).text, verbose=False)["input_ids"]) + 200
