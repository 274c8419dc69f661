"""Serve a model over an OpenAI-compatible API: `transformers serve`, with FoX known to it.

All options are those of `transformers serve`, and follow MODEL; `hf-longctx serve MODEL --help` lists them. It needs
fastapi, uvicorn and openai: pip install 'hf-longctx[serve]'.

Other programs of other projects know FoX where they run `import hf_longctx`, or where they load a folder that
`save_pretrained` has written with `trust_remote_code=True`.

Examples:
  hf-longctx serve model_cards/fox-demo --port 8000
  hf-longctx serve MODEL --continuous-batching --dtype bfloat16
"""

from argparse import REMAINDER, ArgumentParser, Namespace
from typing import Any

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model; NAME@REVISION")
    parser.add_argument("options", nargs=REMAINDER, metavar="...", help="options of `transformers serve`")


def run(args: Namespace) -> None:
    import typer
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("serving needs more packages: pip install 'hf-longctx[serve]'")
    if "--help" not in args.options:
        shared.check_model_name(args.model)
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    from ..fox import FoxForCausalLM

    # the server looks for a model's class in this module, not in the Auto classes
    library: Any = model_manager.transformers
    library.FoxForCausalLM = FoxForCausalLM
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    try:
        app([args.model, *args.options], prog_name="hf-longctx serve")
    except AttributeError as error:  # no such class in transformers
        raise ValueError(f"transformers' server cannot load {args.model}: {error}.") from error
