"""What several commands have in common: naming a model, loading it, reading a text, writing what was measured."""

import argparse
import os
import sys
from pathlib import Path


PICTURES = (".png", ".svg", ".pdf")
# the least that an option may be, by its name in the namespace
LEAST = {
    **dict.fromkeys(("repeats", "sequences", "tokens_per_pass", "train_length", "context_length", "tokens"), 1),
    **dict.fromkeys(("points", "depths"), 2),
}
# What is wrong with a call, and what can fail although it is right: the disk, the network, memory, the numbers.
MISTAKES = (
    *(ValueError, ImportError, NotImplementedError),
    *(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError),
)
FAILURES = (OSError, RuntimeError, FloatingPointError, MemoryError)
EXPECTED = (*MISTAKES, *FAILURES)


def exit_code(error):
    """2 if the call has to be changed, as after argparse's own errors, and 1 if the same call may succeed later.

    >>> exit_code(FileNotFoundError(2, "No such file")), exit_code(OSError(28, "No space left on device"))
    (2, 1)
    """
    of_a_name = type(error) is OSError and error.errno is None  # from_pretrained's, where a model is not found
    return 2 if isinstance(error, MISTAKES) or of_a_name else 1


def add_model(parser):
    """Arguments that name a model and how to run it; see `load_model`."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto (the checkpoint's, default), float32, bfloat16, float16",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: an accelerator if there is one)")
    add_remote_code(group)
    group.add_argument("--seed", type=seed, default=0, metavar="N", help="random seed (default: %(default)s)")
    return group


def seed(text):
    """An integer that numpy and PyTorch both take as a seed."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} must be from 0 to 2**63 - 1")
    return value


def add_remote_code(parser):
    """Arguments that say which files of a model are taken; see `source`."""
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of MODEL on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument(
        "--code-revision",
        metavar="REVISION",
        help="branch, tag or commit of the code, where the code is in another repository than the weights",
    )


def add_served(group):
    """Arguments of the commands that can measure a served model."""
    group.add_argument(
        "--endpoint",
        metavar="URL",
        help="measure MODEL where it is served, such as http://localhost:8000/v1 of vLLM; only its tokenizer is loaded",
    )
    group.add_argument("--served-as", metavar="NAME", help="endpoint: name of MODEL there, if several are served")
    group.add_argument("--api-key-env", metavar="NAME", help="endpoint: environment variable that holds its key")
    group.add_argument("--timeout", type=float, metavar="SECONDS", help="endpoint: of one request (default: 600)")
    group.add_argument("--retries", type=int, metavar="N", help="endpoint: of a failed request (default: 4)")
    group.add_argument("--concurrency", type=int, metavar="N", help="endpoint: requests in flight (default: 8)")


def served_options(args):
    """Options of `ServedModel`; ValueError for one without --endpoint, and for a key that is not set."""
    options = {"model": args.served_as, "api_key": args.api_key_env, "timeout": args.timeout}
    options |= {"retries": args.retries, "concurrency": args.concurrency}
    options = {name: value for name, value in options.items() if value is not None}
    if options and args.endpoint is None:
        raise ValueError(
            "--served-as, --api-key-env, --timeout, --retries and --concurrency are for a served model; give its --endpoint."
        )
    if "api_key" in options:
        options["api_key"] = os.environ.get(args.api_key_env)
        if not options["api_key"]:
            raise ValueError(
                f"--api-key-env {args.api_key_env}: there is no such environment variable, or it is empty."
            )
    return options


def add_text(parser, default="pg19 where a hub can be reached, else stdlib"):
    """Argument that names a text for `hf_longctx.corpus`."""
    parser.add_argument(
        "--text",
        metavar="SOURCE",
        help="text file, .jsonl, .json or .parquet with a column text (each also .gz), folder of such files, dataset "
        f"name, pg19, or stdlib for English from CPython (default: {default})",
    )


class Numbers(argparse.Action):
    """Whole numbers, apart by spaces or commas."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            setattr(namespace, self.dest, [int(word) for value in values for word in value.split(",") if word])
        except ValueError as error:
            raise argparse.ArgumentError(self, f"{error}; give whole numbers, such as 500,1000") from None


def add_repeats(parser, of, default=10):
    parser.add_argument("--repeats", type=int, default=default, metavar="N", help=f"{of} (default: %(default)s)")


def add_train_length(parser):
    parser.add_argument(
        "--train-length", type=int, metavar="TOKENS", help="context of training, marked in the pictures"
    )


def add_no_replies(parser):
    parser.add_argument(
        "--no-replies", action="store_true", help="score the answer's tokens only; the model generates nothing"
    )


def add_run(parser, output):
    """Arguments of the commands that measure one metric; see `write_measured`."""
    group = parser.add_argument_group("run")
    group.add_argument("--bos-token-id", type=int, metavar="ID", help="default: the tokenizer's, or the model's")
    group.add_argument(
        "--journal", metavar="FILE", help="keep every finished part there; with the same FILE, a killed run goes on"
    )
    group.add_argument(
        "--output",
        default=output,
        metavar="PATH",
        help="of JSON and picture, which is a PNG unless PATH ends with .svg or .pdf (default: %(default)s)",
    )
    return group


def check(args, folder=False):
    """What can be known before anything is loaded; `folder` says whether --output names one.

    Raises:
        ValueError: a number is too small, or a file cannot be written.
    """
    for name, least in LEAST.items():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
    check_writable("--output", args.output, folder)
    if getattr(args, "journal", None) is not None:
        check_writable("--journal", args.journal)


def check_writable(option, name, folder=False):
    """ValueError if no file, or folder, of that name can be written."""
    path = Path(name).absolute()
    if not folder and (path.is_dir() or name.endswith("/")):
        raise ValueError(f"{option} {name} is a folder; name a file in it.")
    if not folder and path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {name} is a file that you may not write.")
    parent = next(parent for parent in (*[path] * folder, *path.parents) if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{option} {name} cannot be written: {parent} is no folder that you may write into.")


def picture_path(name, endings=PICTURES):
    """The file of a picture, whose ending, one of `endings`, may be left out; its folder is made.

    >>> picture_path("a/b").name, picture_path("a/b.svg").name
    ('b.png', 'b.svg')
    """
    path = Path(name)
    if path.suffix not in endings:
        if path.suffix[1:].isalpha():
            raise ValueError(f"--output {name} ends with {path.suffix}; it may end with {', '.join(endings)}.")
        path = path.with_name(f"{path.name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def open_model(args):
    """What is known of a model before its weights are loaded; joins other processes first.

    Returns:
        the tokenizer, the context that the model claims, in tokens, or None, and a function that makes the reader.
    """
    from transformers import AutoConfig

    from ..metrics import LocalReader, ServedModel
    from ..metrics.run.model import check_decoder

    options = served_options(args)
    join_processes()
    if args.endpoint is not None:
        tokenizer = load_tokenizer(args)
        reader = ServedModel(args.endpoint, tokenizer=tokenizer, vocab_size=len(tokenizer), **options)
        return tokenizer, reader.claimed_context, lambda: reader
    choose_device(args.device)
    try:
        config = AutoConfig.from_pretrained(args.model, **source(args)).get_text_config()
    except Exception:  # an adapter has none, and loading the model says best what is wrong with another
        reader = LocalReader(load_weights(args))
        return load_tokenizer(args), reader.claimed_context, lambda: reader
    check_decoder(config)
    claimed = getattr(config, "max_position_embeddings", None)
    return load_tokenizer(args), claimed, lambda: LocalReader(load_weights(args))


def source(args, file=False):
    """Options of `from_pretrained` from those of `add_remote_code`, which are checked, as is the name of the model.

    It may lead to a `file`, config.json, where no more is needed.

    Raises:
        ValueError: a name that can only be a path leads to no folder, or an option would be ignored.
    """
    if not (file and Path(args.model).is_file()):
        check_model_name(args.model)
    if args.revision is not None and Path(args.model).is_dir():
        raise ValueError(f"--revision {args.revision} is for a model on the Hub, and {args.model} is a folder.")
    if args.code_revision is not None and not args.trust_remote_code:
        raise ValueError("--code-revision needs --trust-remote-code; without it, no code of the model is run.")
    options = {"revision": args.revision, "code_revision": args.code_revision}
    return {"trust_remote_code": args.trust_remote_code} | {k: v for k, v in options.items() if v is not None}


def check_model_name(name):
    """Raise ValueError if a name that can only be a path leads to no folder, or to a file."""
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{name} is a file; give the folder that holds the model: {path.parent}.")
    if not path.exists() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise ValueError(f"there is no folder {name}; give a folder with a model, or its name on the Hub.")


def choose_device(name):
    """The device of that name, or by default an accelerator if there is one; ValueError if the device is missing."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if name is None:
        return available[-1]
    if name.partition(":")[0] not in available:
        raise ValueError(
            f"--device {name} cannot be had: PyTorch {torch.__version__} sees {' and '.join(available)} here."
        )
    return name


def load_model(args):
    """The model, on its device, in eval mode, and its tokenizer."""
    return load_weights(args), load_tokenizer(args)


def load_weights(args):
    """The model, on its device, in eval mode."""
    from ..metrics.run.model import load_language_model

    options, device = source(args), choose_device(args.device)
    try:
        model = load_language_model(args.model, dtype=args.dtype, **options)
    except EXPECTED:
        raise
    except Exception as error:  # SafetensorError, or whatever a value in config.json breaks
        raise ValueError(
            f"{args.model} cannot be loaded ({type(error).__name__}: {error}); its files are damaged, or its config.json "
            "has a value that transformers does not know."
        ) from error
    return model.to(device).eval()


def load_tokenizer(args):
    """The tokenizer of the model, whose weights are not loaded."""
    from transformers import AutoTokenizer

    options = source(args)
    try:
        return AutoTokenizer.from_pretrained(args.model, **options)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{args.model} holds no tokenizer that can be loaded ({str(error).splitlines()[0]}). "
            f"Put one there: tokenizer.save_pretrained({args.model!r})."
        ) from error


def load_corpus(source, tokenizer, longest=None):
    """The text of that name (see `add_text`) as a `corpus.Corpus`; says on stderr which text it is.

    From a dataset no more documents are read than make a million tokens, or ten times the `longest` stretch needed.
    """
    from ..corpus import load_tokens

    corpus = load_tokens(tokenizer, source, at_least=max(1_000_000, 10 * (longest or 0)))
    say(f"text: {corpus.name}, {len(corpus.tokens)} tokens")
    return corpus


def coalesce(*values):
    """The first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def say(message):
    """Print a line on stderr, in one process only where several run."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(message, file=sys.stderr)


def join_processes():
    """Under torchrun or accelerate launch, join the other processes, each on a device of its own."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        return
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()


def write_measured(args, measure, **picture):
    """`measure_into` --output; `picture` are options of the result's `plot`."""
    from ..metrics.report.measure_all import measure_into

    output, ending = Path(args.output), ".png"
    if output.suffix in (".json", *PICTURES):
        ending = ".png" if output.suffix == ".json" else output.suffix
        output = output.with_suffix("")

    measure_into(
        output,
        measure,
        tell=lambda result: print(result.summary(), flush=True),
        wrote=lambda path: print(f"wrote {path}"),
        ending=ending,
        **picture,
    )
