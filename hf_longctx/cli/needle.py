"""Hide one sentence in long texts, and see whether the model finds it: needle in a haystack, without a judge.

Writes OUTPUT.json and a heat map OUTPUT.png, length by depth.

Examples:
  hf-longctx needle gpt2 --text book.txt
  hf-longctx needle MODEL --mode standard --lengths 4096 8192 16384 --depths 5
  hf-longctx needle model_cards/fox-demo --lengths 400 500 --depths 3 --no-replies --text stdlib
"""

import argparse
from functools import partial

from . import measuring, shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_served(shared.add_model(parser))
    group = parser.add_argument_group("needle")
    measuring.add_text(group)
    group.add_argument(
        "--mode",
        choices=("easy", "standard"),
        default="easy",
        help="easy: the needle holds the question too, which suits models without instruction tuning (default)",
    )
    group.add_argument(
        "--lengths",
        action=measuring.Numbers,
        nargs="+",
        metavar="TOKENS",
        help="of prompt and answer (default: 8, evenly spaced up to the claimed context, but those too short for it)",
    )
    group.add_argument("--depths", type=int, default=11, metavar="N", help="how many (default: %(default)s)")
    measuring.add_repeats(group, "haystacks per length", default=1)
    measuring.add_no_replies(group)
    group.add_argument(
        "--score",
        choices=("match_rate", "exact_rate", "probability"),
        help="what the picture shows: answer found in the reply (default), given token for token (default with "
        "--no-replies), its probability",
    )
    measuring.add_train_length(group)
    measuring.add_run(parser, output="needle")


def run(args: argparse.Namespace) -> None:
    from ..metrics import Run, needle_in_a_haystack
    from ..metrics.checks import check_lengths
    from ..metrics.report.defaults import NO_CLAIM, needle_lengths
    from ..metrics.retrieval.haystack import draw_begins, haystack_length, needle_pieces
    from ..metrics.retrieval.measure import encoder

    if args.no_replies and args.score == "match_rate":
        raise ValueError("--score match_rate looks into replies, and there are none with --no-replies. Drop one.")
    measuring.check(args)
    tokenizer, claimed, open_reader = measuring.open_model(args)
    lengths = args.lengths or needle_lengths(claimed or NO_CLAIM, tokenizer, args.mode)
    pieces = needle_pieces(encoder(tokenizer), 0, args.mode)
    rooms = [haystack_length(length, pieces) for length in check_lengths(lengths)]
    tokens, corpus_name = measuring.load_corpus(args.text, tokenizer, lengths[-1])
    draw_begins(len(tokens), rooms[-1], args.repeats, args.seed)
    measure = partial(
        needle_in_a_haystack,
        open_reader(),
        tokenizer,
        tokens,
        lengths=lengths,
        depths=[i / (args.depths - 1) for i in range(args.depths)],
        mode=args.mode,
        repeats=args.repeats,
        seed=args.seed,
        generate=not args.no_replies,
        bos_token_id=measuring.default(args.bos_token_id, tokenizer.bos_token_id),
        corpus_name=corpus_name,
        train_length=args.train_length,
        run=Run(args.journal, progress=True),
    )
    measuring.measure_and_write(args, measure, score=args.score, train_length=args.train_length)
