"""Train the small FoX (Pro) of the demo from scratch; run again after an interruption, it goes on.

Examples:
  hf-longctx train-demo fox --steps 600
  hf-longctx train-demo fox --text book.txt --context 1024
"""

from . import shared


def add_arguments(parser):
    parser.add_argument("output", metavar="FOLDER")
    shared.add_text(parser, default="the training part of stdlib")
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--context", type=int, default=768, metavar="TOKENS", help="training context (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")


def run(args):
    from ..corpus import load_text, stdlib_text

    try:
        from ..training.copying import train_demo_model
    except ImportError as error:
        raise ImportError(f"training needs more packages ({error}): pip install 'hf-longctx[training]'") from None
    text = stdlib_text("train") if args.text is None else load_text(args.text)
    train_demo_model(text, args.output, steps=args.steps, context=args.context, seed=args.seed)
    print(f"wrote the model and its training log to {args.output}")
