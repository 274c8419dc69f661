"""Shared arguments and functions of the commands: models, corpora, output and exit codes."""

import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any


# MISTAKES are usage errors. FAILURES are errors in a valid call: disk, network, memory, non-finite numbers
MISTAKES = (
    ValueError,
    ImportError,
    NotImplementedError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
FAILURES = (OSError, RuntimeError, FloatingPointError, MemoryError)
EXPECTED = (*MISTAKES, *FAILURES)


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error: 2 for a usage error, 1 for a failure of a valid call.

    >>> exit_code(FileNotFoundError(2, "No such file")), exit_code(OSError(28, "No space left on device"))
    (2, 1)
    """
    of_a_name = type(error) is OSError and error.errno is None  # raised by from_pretrained if it does not find a model
    return 2 if isinstance(error, MISTAKES) or of_a_name else 1


# Arguments -----------------------------------------------------------------------------------------------------------


def add_model(parser: ArgumentParser) -> Any:
    """Add arguments for the model, its dtype and device; see `load_weights`."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="model dtype (default: auto, the checkpoint's dtype)",
    )
    group.add_argument("--device", help="device, such as cpu, cuda:1 or mps (default: an accelerator if available)")
    add_remote_code(group)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: %(default)s)")
    return group


def add_remote_code(parser: Any) -> None:
    """Add arguments for a model's revision and remote code; see `source`."""
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of MODEL on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository")


def add_served(parser: Any) -> None:
    """Add arguments for a served model."""
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="URL of a server for MODEL, such as http://localhost:8000/v1; only the tokenizer is loaded here. "
        "Forgetting curves work with any server that decodes greedily; other metrics require vLLM",
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


def add_cache(parser: Any) -> None:
    """Add the argument for a cache of contexts; see `LocalReader`."""
    parser.add_argument(
        "--cache",
        metavar="CACHE",
        help="cache for contexts: full, quantized:BITS, window:TOKENS, or module.NAME:ARGUMENT of a Cache class or a press, "
        "such as hf_longctx.fox.PrunedCache:1e-3 or kvpress.SnapKVPress:0.5. The context is read in one pass, and then "
        "compressed (default: the full cache)",
    )


def add_text(parser: Any) -> None:
    """Add the argument for a corpus; see `hf_longctx.corpus`."""
    parser.add_argument(
        "--text",
        metavar="SOURCE",
        help='one of: a text file; a .jsonl, .json, .parquet or .csv file with a "text" column; a folder of such '
        "files; a dataset name; pg19; stdlib (English text from CPython). Files can be gzipped (default: pg19 if the "
        "Hub responds, else stdlib)",
    )


def add_train_length(parser: Any) -> None:
    parser.add_argument(
        "--train-length", type=int, metavar="TOKENS", help="training context length, marked in figures"
    )


# Models and corpora --------------------------------------------------------------------------------------------------


def check_model_name(name: str) -> None:
    """Raise ValueError unless `name` is a folder or could be a Hub name."""
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{name} is a file; give the folder with the model: {path.parent}.")
    if not path.exists() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise ValueError(f"the folder {name} does not exist. Give a folder with a model, or a Hub name.")


def source(args: Namespace) -> dict[str, Any]:
    """Return the options of `add_remote_code` as arguments for `from_pretrained`.

    Raises:
        ValueError: a revision is given for a folder. transformers would ignore it.
    """
    if args.revision is not None and Path(args.model).is_dir():
        raise ValueError(f"--revision {args.revision} is for a model on the Hub, but {args.model} is a folder.")
    revision = {} if args.revision is None else {"revision": args.revision}
    return {"trust_remote_code": args.trust_remote_code, **revision}


def choose_device(name: str | None) -> str:
    """Return the named device. Without a name, return an accelerator if there is one, else cpu.

    Raises:
        ValueError: the named device is not available.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if name is None:
        return available[-1]
    if name.partition(":")[0] not in available:
        raise ValueError(
            f"device {name} is not available: PyTorch {torch.__version__} found {' and '.join(available)}."
        )
    return name


def load_weights(args: Namespace) -> Any:
    """Load the model on its device, in eval mode. An error about damaged files becomes a ValueError."""
    from ..metrics.run.model import load_language_model

    check_model_name(args.model)
    options, device = source(args), choose_device(args.device)
    try:
        model = load_language_model(args.model, dtype=args.dtype, **options)
    except EXPECTED:
        raise
    except Exception as error:  # for example, SafetensorError
        raise ValueError(
            f"{args.model} cannot be loaded ({type(error).__name__}: {error}). Either its files are damaged, or its "
            "config.json has a value that transformers does not support."
        ) from error
    return model.to(device).eval()


def load_tokenizer(args: Namespace) -> Any:
    """Load the model's tokenizer only."""
    from transformers import AutoTokenizer

    check_model_name(args.model)
    options = source(args)
    try:
        return AutoTokenizer.from_pretrained(args.model, **options)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{args.model} does not contain a tokenizer that can be loaded ({str(error).splitlines()[0]}). "
            f"Add a tokenizer: tokenizer.save_pretrained({args.model!r})."
        ) from error


def open_model(args: Namespace) -> tuple[Any, Any, Callable[[], Any]]:
    """Load a model's tokenizer and config. Options can then be checked before the weights are loaded.

    Under torchrun or accelerate launch, the process group is initialized first.

    Returns:
        three objects: the tokenizer; a model for checking options, possibly without weights; a function that returns
        the model to measure.
    """
    from transformers import AutoConfig

    from ..metrics import LocalReader, ServedModel
    from ..metrics.run.caches import context_cache
    from ..metrics.run.model import check_decoder
    from ..metrics.run.reader import UnloadedModel

    options, cache = served_options(args), args.cache
    join_processes()
    if args.endpoint is not None:
        if cache is not None:
            raise ValueError("--cache requires a local model, because a server chooses its own cache. Drop --cache.")
        tokenizer = load_tokenizer(args)
        journal = getattr(args, "journal", None)
        options["journal"] = journal and f"{journal}.responses{os.environ.get('RANK', '')}"
        reader = ServedModel(args.endpoint, tokenizer=tokenizer, vocab_size=len(tokenizer), **options)
        return tokenizer, reader, lambda: reader
    choose_device(args.device)
    cache = None if cache is None else context_cache(cache)
    try:
        config = AutoConfig.from_pretrained(args.model, **source(args)).get_text_config()
    except Exception:  # the model is an adapter, or loading its weights raises a clearer error
        local = LocalReader(load_weights(args), cache)
        return load_tokenizer(args), local, lambda: local
    check_decoder(config)
    tokenizer = load_tokenizer(args)
    return tokenizer, UnloadedModel(config, args.model, cache), lambda: LocalReader(load_weights(args), cache)


def served_options(args: Namespace) -> dict[str, Any]:
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


def load_corpus(source: str | None, tokenizer: Any, longest: int = 0) -> Any:
    """Load a corpus by its name (see `add_text`), and print its name and size.

    Reading stops after max(1_000_000, 10 * longest) tokens. `longest` is the length of the longest input.
    """
    from ..corpus import load_tokens

    corpus = load_tokens(tokenizer, source, at_least=max(1_000_000, 10 * longest))
    log(f"text: {corpus.name}, {len(corpus.tokens)} tokens")
    return corpus


# Output --------------------------------------------------------------------------------------------------------------


def log(message: str) -> None:
    """Print a line to stderr, in the main process only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(message, file=sys.stderr)


def create_folder(folder: Path) -> None:
    """Create the folder of --output; raise ValueError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--output: {folder} is not a writable folder ({error.strerror}).") from error


def figure_path(name: str) -> Path:
    """Return the path of a figure, and create its folder. If the path has no suffix, add .png.

    >>> figure_path("b").name, figure_path("b.svg").name
    ('b.png', 'b.svg')
    """
    path = Path(name)
    create_folder(path.parent)
    return path if path.suffix else path.with_suffix(".png")


def measure_and_write(args: Namespace, measure: Callable[[], Any], **options: Any) -> None:
    """Run a measurement. The main process prints the summary, and writes the JSON and the figure to --output.

    If an exception interrupts the measurement, the partial result is written before the exception is raised.

    Args:
        options: keyword arguments for the result's `plot`.
    """
    from ..metrics.result import run_measurement
    from ..metrics.run.distributed import process_rank

    output = Path(args.output)
    ending = ".png"
    if output.suffix in (".json", ".png", ".svg", ".pdf"):
        ending = ".png" if output.suffix == ".json" else output.suffix
        output = output.with_suffix("")
    document, figure = (output.with_name(output.name + suffix) for suffix in (".json", ending))
    result, failure = run_measurement(measure)
    if result is not None and process_rank() == 0:
        print(result.summary(), flush=True)  # printed first, because saving fails if the disk is full
        result.save(document)
        print(f"wrote {document}")
        result.plot(figure, **options)
        print(f"wrote {figure}")
    if failure is not None:
        raise failure
