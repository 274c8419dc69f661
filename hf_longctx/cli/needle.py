"""Hide one sentence in long texts, and see whether the model finds it: needle in a haystack, without a judge.

Writes OUTPUT.json and a heat map OUTPUT.png, length by depth.
"""

from . import shared


ROOM_FOR_REPLIES = 32


def add_arguments(parser):
    shared.add_model(parser)
    shared.add_endpoint(parser)
    shared.add_text(parser)
    parser.add_argument(
        "--mode",
        choices=("easy", "standard"),
        default="easy",
        help="easy: the needle holds the question too, which suits models without instruction tuning (default)",
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="of prompt and answer (default: 8, evenly spaced up to the claimed context, but those too short for it)",
    )
    parser.add_argument("--depths", type=int, default=11, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="haystacks per length (default: %(default)s)"
    )
    parser.add_argument(
        "--no-replies", action="store_true", help="score the answer's tokens only; the model generates nothing"
    )
    parser.add_argument(
        "--score",
        choices=("match_rate", "exact_rate", "probability"),
        help="what the picture shows: answer found in the reply (default), given token for token (default with "
        "--no-replies), its probability",
    )
    parser.add_argument(
        "--train-length", type=int, metavar="TOKENS", help="context of training, marked in the picture"
    )
    shared.add_measuring(parser, output="needle")


def run(args):
    from ..metrics import needle_in_a_haystack
    from ..metrics.run.reader import reader_for

    if args.no_replies and args.score == "match_rate":
        raise ValueError("--score match_rate looks into replies, and there are none with --no-replies. Drop one.")
    shared.join_processes()
    model, tokenizer = shared.load_model(args)
    lengths = args.lengths or default_lengths(reader_for(model).claimed_context or 4096, tokenizer, args.mode)
    tokens = shared.load_tokens(args, tokenizer, max(lengths))
    if args.depths < 2:
        raise ValueError(f"--depths is {args.depths}; it must be at least 2, the beginning and the end.")
    shared.measure(
        args,
        tokenizer,
        needle_in_a_haystack,
        model,
        tokenizer,
        tokens,
        lengths=lengths,
        depths=[i / (args.depths - 1) for i in range(args.depths)],
        mode=args.mode,
        repeats=args.repeats,
        seed=args.seed,
        generate=not args.no_replies,
        picture={"score": args.score, "train_length": args.train_length},
    )


def default_lengths(context, tokenizer, mode):
    """Eight lengths up to the context, without those too short for needle and question."""
    from ..metrics.retrieval.haystack import needle_pieces
    from ..metrics.retrieval.measure import encoder

    longest = context - ROOM_FOR_REPLIES
    needed = needle_pieces(encoder(tokenizer), 0, mode).tokens
    return [length for length in (longest * i // 8 for i in range(1, 9)) if length > needed] or [longest]
