"""Measure how the loss falls with the context that came before: per-token loss and perplexity (Lin et al. 2025).

Writes OUTPUT.json and OUTPUT.png. Where the loss stays level, more context is of no use to the model.

Examples:
  hf-longctx loss gpt2 --text book.txt
  hf-longctx loss model_cards/fox-demo --context-length 256 --sequences 2 --text stdlib
"""

import argparse
from functools import partial

from . import measuring, shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_served(shared.add_model(parser))
    group = parser.add_argument_group("loss")
    measuring.add_text(group)
    group.add_argument(
        "--context-length", type=int, metavar="TOKENS", help="tokens per sequence (default: the claimed context)"
    )
    group.add_argument(
        "--sequences", type=int, metavar="N", help="how many (default: as many as the text has, but at most 32)"
    )
    measuring.add_train_length(group)
    measuring.add_run(parser, output="position_loss")


def run(args: argparse.Namespace) -> None:
    from ..metrics import Run, position_loss
    from ..metrics.loss.measure import check_starts
    from ..metrics.report.defaults import NO_CLAIM

    measuring.check(args)
    tokenizer, claimed, open_reader = measuring.open_model(args)
    claimed = claimed or NO_CLAIM
    tokens, corpus_name = measuring.load_corpus(args.text, tokenizer, measuring.default(args.context_length, claimed))
    context_length = measuring.default(args.context_length, min(claimed, len(tokens)))
    check_starts(None, args.sequences, len(tokens), context_length)
    measure = partial(
        position_loss,
        open_reader(),
        tokens,
        context_length=context_length,
        sequences=args.sequences,
        bos_token_id=measuring.default(args.bos_token_id, tokenizer.bos_token_id),
        tokenizer=tokenizer,
        corpus_name=corpus_name,
        train_length=args.train_length,
        run=Run(args.journal, progress=True),
    )
    measuring.measure_and_write(args, measure, train_length=args.train_length)
