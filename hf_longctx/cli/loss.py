"""Measure how the loss falls with the context that came before: per-token loss and perplexity (Lin et al. 2025).

Writes OUTPUT.json and OUTPUT.png. Where the loss stays level, more context is of no use to the model.
"""

from . import shared


def add_arguments(parser):
    shared.add_model(parser)
    shared.add_endpoint(parser)
    shared.add_text(parser)
    parser.add_argument(
        "--context-length", type=int, metavar="TOKENS", help="tokens per sequence (default: the claimed context)"
    )
    parser.add_argument(
        "--sequences", type=int, metavar="N", help="how many (default: as many as the text has, but at most 32)"
    )
    parser.add_argument(
        "--train-length", type=int, metavar="TOKENS", help="context of training, marked in the picture"
    )
    shared.add_measuring(parser, output="position_loss")


def run(args):
    from ..metrics import position_loss
    from ..metrics.run.reader import reader_for

    shared.join_processes()
    model, tokenizer = shared.load_model(args)
    claimed = reader_for(model).claimed_context
    tokens = shared.load_tokens(args, tokenizer, claimed if args.context_length is None else args.context_length)
    if args.context_length is None:
        args.context_length = min(claimed or 4096, len(tokens))
    shared.measure(
        args,
        tokenizer,
        position_loss,
        model,
        tokens,
        context_length=args.context_length,
        sequences=args.sequences,
        tokenizer=tokenizer,
        picture={"train_length": args.train_length},
    )
