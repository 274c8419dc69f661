"""Measure how the loss falls with the context that came before: per-token loss and perplexity (Lin et al. 2025).

Writes OUTPUT.json and OUTPUT.png. Where the loss stays level, more context is of no use to the model.

Examples:
  hf-longctx loss gpt2 --text book.txt
  hf-longctx loss model_cards/fox-demo --context-length 256 --sequences 2 --text stdlib
"""

from functools import partial

from . import shared


def add_arguments(parser):
    shared.add_served(shared.add_model(parser))
    group = parser.add_argument_group("loss")
    shared.add_text(group)
    group.add_argument(
        "--context-length", type=int, metavar="TOKENS", help="tokens per sequence (default: the claimed context)"
    )
    group.add_argument(
        "--sequences", type=int, metavar="N", help="how many (default: as many as the text has, but at most 32)"
    )
    shared.add_train_length(group)
    shared.add_run(parser, output="position_loss")


def run(args):
    from ..metrics import Run, position_loss
    from ..metrics.loss.measure import check_starts
    from ..metrics.report.defaults import NO_CLAIM

    shared.check(args)
    tokenizer, claimed, open_reader = shared.open_model(args)
    claimed = claimed or NO_CLAIM
    tokens, corpus_name = shared.load_corpus(args.text, tokenizer, shared.coalesce(args.context_length, claimed))
    context_length = shared.coalesce(args.context_length, min(claimed, len(tokens)))
    check_starts(None, args.sequences, len(tokens), context_length)
    measure = partial(
        position_loss,
        open_reader(),
        tokens,
        context_length=context_length,
        sequences=args.sequences,
        bos_token_id=shared.coalesce(args.bos_token_id, tokenizer.bos_token_id),
        tokenizer=tokenizer,
        corpus_name=corpus_name,
        train_length=args.train_length,
        run=Run(args.journal, progress=True),
    )
    shared.write_measured(args, measure, train_length=args.train_length)
