"""Shared arguments, checks and output of the evaluation commands."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import shared


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..corpus import Corpus
    from ..metrics import Reader
    from ..metrics.result import Result

FIGURES = (".png", ".svg", ".pdf")
OTHER_FORMATS = (".gif", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".eps", ".ps")


# Arguments ----------------------------------------------------------------------------------------------------------


def add_served(parser: argparse._ActionsContainer) -> None:
    """Add arguments for a served model."""
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="URL of a server that serves MODEL, such as http://localhost:8000/v1; then only the tokenizer is loaded. "
        "Forgetting curves also work with llama.cpp's server; other metrics require vLLM",
    )
    parser.add_argument(
        "--served-as",
        metavar="NAME",
        help="name of the model on the --endpoint server, if the server has several models",
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that contains the API key of --endpoint"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="timeout of a request to --endpoint, in seconds (default: 600)",
    )
    parser.add_argument(
        "--retries", type=int, metavar="N", help="retries per failed request to --endpoint (default: 4)"
    )
    parser.add_argument("--concurrency", type=int, metavar="N", help="concurrent requests to --endpoint (default: 8)")


def add_text(parser: argparse._ActionsContainer) -> None:
    """Add the argument for a corpus; see `hf_longctx.corpus`."""
    parser.add_argument(
        "--text",
        metavar="SOURCE",
        help='text file; .jsonl, .json, .parquet or .csv file with a "text" column; folder of such files; dataset name; '
        "pg19; or stdlib, English from CPython. Files can be gzipped (default: pg19 if the Hub responds, else stdlib)",
    )


def add_train_length(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--train-length", type=int, metavar="TOKENS", help="training context length, marked in figures"
    )


# Checks before anything is loaded -----------------------------------------------------------------------------------


def check(args: argparse.Namespace, folder: bool = False) -> None:
    """Raise ValueError if --output (a folder if `folder` is set) or --journal is not writable."""
    check_writable("--output", args.output, folder)
    if getattr(args, "journal", None) is not None:
        check_writable("--journal", args.journal)


def check_writable(option: str, name: str, folder: bool = False) -> None:
    """Raise ValueError if the file `name`, or the folder if `folder` is set, is not writable."""
    path = Path(name).absolute()
    if not folder and path.suffix.lower() in OTHER_FORMATS:
        raise ValueError(f"{option} must end with one of {', '.join(FIGURES)}, got {name}.")
    if not folder and (path.is_dir() or name.endswith("/")):
        raise ValueError(f"{option} must be a file, got the folder {name}. Give a file in this folder.")
    if not folder and path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {name} is not writable; give another file.")
    parent = next(parent for parent in (*[path] * folder, *path.parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:  # os.access does not notice /proc or a full disk
        why = f"{parent} is not a writable folder ({error.strerror})"
        raise ValueError(f"{option} {name} cannot be written: {why}.") from error


def figure_path(name: str, endings: Sequence[str] = FIGURES) -> Path:
    """Return the path of a figure, and create its folder. If the path has no suffix, add .png.

    >>> figure_path("a/b").name, figure_path("a/b.svg").name
    ('b.png', 'b.svg')
    """
    path = Path(name)
    if path.suffix not in endings:
        if path.suffix[1:].isalpha():
            raise ValueError(f"--output must end with one of {', '.join(endings)}, got {name}.")
        path = path.with_name(f"{path.name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# Models and corpora -------------------------------------------------------------------------------------------------


def open_model(args: argparse.Namespace) -> "tuple[PreTrainedTokenizerBase, Reader, Callable[[], Reader]]":
    """Load a model's tokenizer and config, so that options can be checked before the weights are loaded.

    Under torchrun or accelerate launch, the process group is initialized first.

    Returns:
        the tokenizer; a reader for the checks, possibly without weights; a function that returns the loaded reader.
    """
    from transformers import AutoConfig

    from ..metrics import LocalReader, ServedModel
    from ..metrics.run.model import check_decoder
    from ..metrics.run.reader import UnloadedModel

    options = served_options(args)
    join_processes()
    if args.endpoint is not None:
        tokenizer = shared.load_tokenizer(args)
        reader = ServedModel(args.endpoint, tokenizer=tokenizer, vocab_size=len(tokenizer), **options)
        return tokenizer, reader, lambda: reader
    shared.choose_device(args.device)
    try:
        config = AutoConfig.from_pretrained(args.model, **shared.source(args)).get_text_config()
    except Exception:  # the model is an adapter, or loading its weights raises a clearer error
        local = LocalReader(shared.load_weights(args))
        return shared.load_tokenizer(args), local, lambda: local
    check_decoder(config)
    tokenizer = shared.load_tokenizer(args)
    return tokenizer, UnloadedModel(config, args.model), lambda: LocalReader(shared.load_weights(args))


def served_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for `ServedModel`.

    Raises:
        ValueError: an endpoint option is given without --endpoint, or the key's environment variable is not set.
    """
    options = {"model": args.served_as, "api_key": args.api_key_env, "timeout": args.timeout}
    options |= {"retries": args.retries, "concurrency": args.concurrency}
    options = {name: value for name, value in options.items() if value is not None}
    if options and args.endpoint is None:
        raise ValueError("--served-as, --api-key-env, --timeout, --retries and --concurrency require --endpoint.")
    if "api_key" in options:
        options["api_key"] = os.environ.get(args.api_key_env)
        if not options["api_key"]:
            raise ValueError(f"--api-key-env {args.api_key_env}: this environment variable is not set, or empty.")
    return options


def join_processes() -> None:
    """Under torchrun or accelerate launch, select this process's device and initialize the process group."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        return
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()


def load_corpus(source: str | None, tokenizer: "PreTrainedTokenizerBase", longest: int | None = None) -> "Corpus":
    """Load a corpus by its name (see `add_text`), and print its name and size.

    Reading stops after a million tokens, or after ten times the `longest` input if that is more.
    """
    from ..corpus import load_tokens

    corpus = load_tokens(tokenizer, source, at_least=max(1_000_000, 10 * (longest or 0)))
    log(f"text: {corpus.name}, {len(corpus.tokens)} tokens")
    return corpus


# Output ------------------------------------------------------------------------------------------------------------


def log(message: str) -> None:
    """Print a line to stderr, in the main process only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(message, file=sys.stderr)


def measure_and_write(args: argparse.Namespace, measure: "Callable[[], Result]", **options: Any) -> None:
    """Run a measurement. The main process prints the summary, and writes the JSON and the figure to --output.

    If an exception interrupts the measurement, the partial result is written first.

    Args:
        options: keyword arguments for the result's `plot`.
    """
    from ..metrics.result import run_measurement
    from ..metrics.run.distributed import process_rank

    output, ending = Path(args.output), ".png"
    if output.suffix in (".json", *FIGURES):
        ending = ".png" if output.suffix == ".json" else output.suffix
        output = output.with_suffix("")
    document, figure = (output.with_name(output.name + suffix) for suffix in (".json", ending))
    output.parent.mkdir(parents=True, exist_ok=True)
    result, failure = run_measurement(measure)
    if result is not None and process_rank() == 0:
        print(result.summary(), flush=True)  # printed before saving, which fails if the disk is full
        result.save(document)
        print(f"wrote {document}")
        result.plot(figure, **options)
        print(f"wrote {figure}")
    if failure is not None:
        raise failure
