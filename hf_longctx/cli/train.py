"""Train a Forgetting Transformer from scratch; the same command goes on with a run that was stopped.

Examples:
  hf-longctx train --data text.jsonl --tokenizer model_cards/fox-demo --steps 1000 --output run
  hf-longctx train --config run/config.yaml --output run
  torchrun --nproc-per-node 8 -m hf_longctx train --preset 360M --pro --data tokens.npy --tokenizer gpt2 --output run
"""

import dataclasses
from argparse import ArgumentParser, Namespace
from typing import Any

from ..training.recipes import FinetuneSettings, RunSettings, TrainSettings
from ..training.settings import add_settings, read_settings, write_settings
from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, TrainSettings)


def run(args: Namespace) -> None:
    run_training(args, TrainSettings)


def add_run_arguments(parser: ArgumentParser, settings: type[RunSettings]) -> None:
    """Add the arguments of every training; see `run_training`."""
    parser.add_argument("--config", metavar="FILE", help="YAML of settings; options go before it")
    parser.add_argument("--print-config", action="store_true", help="print all settings and end")
    parser.add_argument("--dry-run", action="store_true", help="three steps, to see speed and memory; writes nothing")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="go on after the last checkpoint (default), begin again, or go on after that checkpoint and drop later ones",
    )
    add_settings(parser.add_argument_group("settings"), settings)


def run_training(args: Namespace, kind: type[RunSettings]) -> None:
    """Train with the settings that the arguments name; a stopped run exits with 128 + the number of the signal."""
    settings = read_settings(kind, args.config, vars(args))
    if settings.steps and settings.epochs:
        raise ValueError("--steps and --epochs contradict each other; leave one out.")
    model = settings.model if isinstance(settings, FinetuneSettings) else None
    for name in (model, settings.tokenizer):
        if name:
            shared.check_model_name(name)
    if args.print_config:
        needed = ("model", "data", "tokenizer", "output")
        placeholders = {name: name.upper() for name in needed if getattr(settings, name, "") is None}
        resolved: Any = dataclasses.replace(settings, **placeholders).resolve()
        resolved.steps = None if resolved.epochs else resolved.steps
        print(write_settings(resolved), end="")
        return
    try:
        from ..training.run import dry_run, train
    except ImportError as error:
        raise ImportError(f"training needs more packages ({error}): pip install 'hf-longctx[training]'") from None
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one for every saved checkpoint
    if args.dry_run:
        dry_run(settings)
    elif number := train(settings, args.resume):
        raise SystemExit(128 + number)
