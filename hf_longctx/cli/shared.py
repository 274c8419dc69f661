"""What several commands have in common: naming a model, loading it, reading a text."""

import os
import sys
from dataclasses import replace
from pathlib import Path


def add_model(parser):
    """Arguments that name a model and how to run it; see `load_model`."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto (the checkpoint's, default), float32, bfloat16, float16",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: an accelerator if there is one)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that comes with the weights")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: %(default)s)")


def add_endpoint(parser):
    """Arguments of the commands that can measure a served model."""
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="measure MODEL where it is served, such as http://localhost:8000/v1 of vLLM; only its tokenizer is loaded "
        "here (a key: OPENAI_API_KEY)",
    )
    parser.add_argument("--served-as", metavar="NAME", help="name of MODEL there, if several are served")


def add_text(parser, default="pg19 where a hub can be reached, else stdlib"):
    """Argument that names a text for `hf_longctx.corpus`."""
    parser.add_argument(
        "--text",
        metavar="SOURCE",
        help="text file, folder of *.txt, dataset name, pg19, or stdlib for English from CPython "
        f"(default: {default})",
    )


def load_model(args):
    """The model, on its device, in eval mode, and its tokenizer. Or, see `add_endpoint`, a served model.

    A command that runs others loads them once, for all, into `args.loaded`.
    """
    if getattr(args, "loaded", None) is not None:
        return args.loaded
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if getattr(args, "endpoint", None):
        from ..metrics import ServedModel

        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
        return ServedModel(args.endpoint, args.served_as, vocab_size=len(tokenizer)), tokenizer
    if args.device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        args.device = "cpu" if accelerator is None else accelerator.type
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    except ValueError as error:
        raise ValueError(
            f"{args.model} holds a model but no tokenizer that can be loaded ({str(error).splitlines()[0]}). "
            f"Put one there: tokenizer.save_pretrained({args.model!r})."
        ) from error
    return model.to(args.device).eval(), tokenizer


def load_tokens(args, tokenizer, longest=None):
    """Ids of the text that `add_text` names, without special tokens; says which text it is, also in `args.corpus`.

    From a dataset no more documents are read than make a million tokens, or ten times the `longest` stretch needed.
    A command that runs others reads it once, for all, into `args.loaded_text`.
    """
    from ..corpus import load_tokens

    corpus = getattr(args, "loaded_text", None)
    if corpus is None:
        corpus = load_tokens(tokenizer, args.text, at_least=max(1_000_000, 10 * (longest or 0)))
        say(f"text: {corpus.name}, {len(corpus.tokens)} tokens")
    args.corpus = corpus.name
    return corpus.tokens


def say(message):
    """A line on stderr, of one process only where several run."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(message, file=sys.stderr)


def join_processes() -> int:
    """Under torchrun or accelerate launch, join the other processes, on a device of our own, if not yet done.

    Returns our rank. Only process 0 writes files and prints.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        return 0
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
    return torch.distributed.get_rank()


def add_measuring(parser, output):
    """Arguments of the commands that measure: see `measure`."""
    parser.add_argument("--bos-token-id", type=int, metavar="ID", help="default: the tokenizer's, or the model's")
    parser.add_argument(
        "--journal", metavar="FILE", help="keep every finished part there; with the same FILE, a killed run goes on"
    )
    parser.add_argument("--output", default=output, metavar="PATH", help="without ending (default: %(default)s)")


def described(args, result):
    """The result, its settings naming the text that it was measured on and the context of training, where known."""
    known = {name: getattr(args, name, None) for name in ("corpus", "train_length")}
    known = {name: value for name, value in known.items() if value is not None}
    return replace(result, settings={**result.settings, **known})


def measure(args, tokenizer, function, /, *arguments, picture=None, **options):
    """Call a function that measures; write what it returns, or what it had until an exception, as JSON and picture.

    The processes of a launcher share the work, if `join_processes` was called before the model was loaded.

    Args:
        picture: options of the result's `plot`.
    """
    from ..metrics import Run

    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)

    def write(result):
        if join_processes() > 0:
            return
        result = described(args, result)
        result.save(output.with_name(output.name + ".json"))
        result.plot(output.with_name(output.name + ".png"), **(picture or {}))
        print(result.summary())
        print(f"wrote {output}.png and {output}.json")

    bos = tokenizer.bos_token_id if args.bos_token_id is None else args.bos_token_id
    try:
        result = function(*arguments, bos_token_id=bos, run=Run(journal=args.journal, progress=True), **options)
    except BaseException as error:
        if getattr(error, "result", None) is not None:
            write(error.result)
        raise
    write(result)
