"""Merge the adapter of a finished `finetune` run into its base: after --load-in-4bit, into the whole model.

Examples:
  hf-longctx merge run --base MODEL
  hf-longctx merge run --output merged
"""

from argparse import ArgumentParser, Namespace

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--base", metavar="MODEL", help="folder or Hub name (default: the model that the run began with)"
    )
    parser.add_argument("--output", metavar="FOLDER", help="of the merged model (default: RUN/merged)")


def run(args: Namespace) -> None:
    if args.base:
        shared.check_model_name(args.base)
    try:
        from ..training.merge import merge
    except ImportError as error:
        raise ImportError(f"merging needs more packages ({error}): pip install 'hf-longctx[training]'") from None
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    print(merge(args.run_folder, args.base, args.output))
