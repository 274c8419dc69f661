"""Hide one sentence in long texts, and see whether the model finds it: needle in a haystack, without a judge.

Writes OUTPUT.json and a heat map OUTPUT.png, length by depth.

Examples:
  hf-longctx needle gpt2 --text book.txt
  hf-longctx needle MODEL --mode standard --lengths 4096 8192 16384 --depths 5
  hf-longctx needle MODEL --chat-template --text buch.txt --needle "Die Kuh Berta steht auf der Alm." \
      --question "Wo steht die Kuh Berta? Antwort: auf der" --answer "Alm"
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
        help="easy: the needle holds the question too, which suits models without instruction tuning (default, but with "
        "--needle)",
    )
    group.add_argument("--needle", metavar="TEXT", help="sentence to hide, in the language of the text")
    group.add_argument("--question", metavar="TEXT", help="with --answer: what is asked at the end, all of it")
    group.add_argument("--answer", metavar="TEXT", help="what the model is to say after the question")
    measuring.add_chat_template(group)
    group.add_argument(
        "--lengths",
        action=measuring.Numbers,
        nargs="+",
        metavar="TOKENS",
        help="of prompt and answer (default: 8, evenly spaced up to the claimed context, but those too short for it)",
    )
    group.add_argument("--depths", type=int, default=11, metavar="N", help="how many (default: %(default)s)")
    measuring.add_repeats(group, "haystacks per length and depth", default=1)
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
    from ..metrics.retrieval.wording import chat_frame, wording

    if args.no_replies and args.score == "match_rate":
        raise ValueError("--score match_rate looks into replies, and there are none with --no-replies. Drop one.")
    measuring.check(args)
    mode = args.mode or ("easy" if args.needle is None else "standard")
    own = dict(needle=args.needle, question=args.question, answer=args.answer)
    words = wording(mode, **own)
    tokenizer, claimed, open_reader = measuring.open_model(args)
    frame = chat_frame(tokenizer) if args.chat_template else None
    lengths = args.lengths or needle_lengths(claimed or NO_CLAIM, tokenizer, words, frame)
    pieces = needle_pieces(encoder(tokenizer), 0, words, frame)
    rooms = [haystack_length(length, pieces) for length in check_lengths(lengths)]
    tokens, corpus_name = measuring.load_corpus(args.text, tokenizer, lengths[-1])
    draw_begins(len(tokens), rooms[-1], args.repeats * args.depths, args.seed)  # says whether the text is long enough
    measure = partial(
        needle_in_a_haystack,
        open_reader(),
        tokenizer,
        tokens,
        lengths=lengths,
        depths=[i / (args.depths - 1) for i in range(args.depths)],
        mode=mode,
        **own,
        chat_template=args.chat_template,
        repeats=args.repeats,
        seed=args.seed,
        generate=not args.no_replies,
        bos_token_id=measuring.default(args.bos_token_id, tokenizer.bos_token_id),
        corpus_name=corpus_name,
        train_length=args.train_length,
        run=Run(args.journal, progress=True),
    )
    measuring.measure_and_write(args, measure, score=args.score, train_length=args.train_length)
