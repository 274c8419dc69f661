"""Serve a model over an OpenAI-compatible API, using `transformers serve` with support for FoX and HMT.

Give options of `transformers serve` after MODEL; `hf-longctx serve MODEL --help` lists these options. Serving requires
fastapi, uvicorn and openai: pip install 'hf-longctx[serve]'.

transformers' server has limitations. Invalid values, such as a negative temperature, return status 500.
--continuous-batching ignores `stop` and a negative max_tokens. An HMT rereads each conversation from its beginning,
and does not support continuous batching. vLLM serves a FoX without these limitations; see hf_longctx/vllm/README.md.

Examples:
  hf-longctx serve model_cards/fox-demo --port 8000
  hf-longctx serve MODEL --continuous-batching --dtype bfloat16
"""

import functools
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress
from typing import Any

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="folder or Hub name (NAME or NAME@REVISION) of a causal language model"
    )
    parser.add_argument("options", nargs=REMAINDER, metavar="...", help="options of `transformers serve`")


def run(args: Namespace) -> None:
    import transformers
    import typer
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("serving needs more packages: pip install 'hf-longctx[serve]'")
    if "--help" not in args.options:
        shared.check_model_name(args.model)
    from transformers.cli.serve import Serve

    from ..fox import FoxForCausalLM
    from ..hmt import HMTWrapper

    # the server looks up model classes in this module, not in the Auto classes, and has no option for other classes
    library: Any = transformers
    library.FoxForCausalLM, library.HMTWrapper = FoxForCausalLM, HMTWrapper

    class Server(Serve):
        __doc__ = Serve.__doc__

        @functools.wraps(Serve.__init__)
        def __init__(self, *args: Any, **options: Any) -> None:
            try:
                super().__init__(*args, **options)
            finally:  # otherwise the thread of continuous batching keeps the process alive after Ctrl-C
                with suppress(AttributeError):  # kill_server expects a thread, but a blocking server has none
                    self.kill_server()

    app = typer.Typer(add_completion=False)
    app.command()(Server)
    try:
        app([args.model, *args.options], prog_name="hf-longctx serve")
    except AttributeError as error:  # transformers does not define the model's class
        raise ValueError(f"transformers' server cannot load {args.model}: {error}.") from error
