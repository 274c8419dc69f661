"""Shared arguments and functions of the commands: model names, model loading, exit codes."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Return exit code 2 for a usage error, as argparse does, or 1 if the same call may succeed on retry.

    >>> exit_code(FileNotFoundError(2, "No such file")), exit_code(OSError(28, "No space left on device"))
    (2, 1)
    """
    of_a_name = type(error) is OSError and error.errno is None  # raised by from_pretrained if it does not find a model
    return 2 if isinstance(error, MISTAKES) or of_a_name else 1


def add_model(parser: ArgumentParser) -> Any:
    """Add arguments for the model, its dtype and device; see `load_model`."""
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


def source(args: Namespace, file: bool = False) -> dict[str, Any]:
    """Check the model's name, and return the options of `add_remote_code` as arguments for `from_pretrained`.

    Args:
        file: also accept the path of a config.json.

    Raises:
        ValueError: the model is a file or a missing folder, or a revision is given for a folder.
    """
    if not (file and Path(args.model).is_file()):
        check_model_name(args.model)
    if args.revision is not None and Path(args.model).is_dir():
        raise ValueError(f"--revision {args.revision} is for a model on the Hub, but {args.model} is a folder.")
    revision = {} if args.revision is None else {"revision": args.revision}
    return {"trust_remote_code": args.trust_remote_code, **revision}


def check_model_name(name: str) -> None:
    """Raise ValueError unless `name` is a folder or could be a Hub name."""
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{name} is a file; give the folder with the model: {path.parent}.")
    if not path.exists() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise ValueError(f"the folder {name} does not exist. Give a folder with a model, or a Hub name.")


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


def load_model(args: Namespace) -> tuple[Any, Any]:
    """Load the model, on its device and in eval mode, and its tokenizer."""
    return load_weights(args), load_tokenizer(args)


def load_weights(args: Namespace) -> Any:
    """Load the model on its device, in eval mode."""
    from ..metrics.run.model import load_language_model

    options, device = source(args), choose_device(args.device)
    with loading(args.model):
        model = load_language_model(args.model, dtype=args.dtype, **options)
    return model.to(device).eval()


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Convert transformers' errors about damaged files to a ValueError that names the model."""
    try:
        yield
    except EXPECTED:
        raise
    except Exception as error:  # for example, SafetensorError
        raise ValueError(
            f"{name} cannot be loaded ({type(error).__name__}: {error}); its files are damaged, or its config.json "
            "has a value that transformers does not support."
        ) from error


def load_tokenizer(args: Namespace) -> Any:
    """Load the model's tokenizer only."""
    from transformers import AutoTokenizer

    options = source(args)
    try:
        return AutoTokenizer.from_pretrained(args.model, **options)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{args.model} does not contain a tokenizer that can be loaded ({str(error).splitlines()[0]}). "
            f"Save a tokenizer there: tokenizer.save_pretrained({args.model!r})."
        ) from error
