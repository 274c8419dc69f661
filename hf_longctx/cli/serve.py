"""Serve a model over an OpenAI-compatible API: `transformers serve`, with FoX and HMT known to it.

All options are those of `transformers serve`, and follow MODEL; `hf-longctx serve MODEL --help` lists them. It needs
fastapi, uvicorn and openai: pip install 'hf-longctx[serve]'.

Other programs of other projects know FoX where they run `import hf_longctx`, or where they load a folder that
`save_pretrained` has written with `trust_remote_code=True`.

Limits of transformers' server: with --continuous-batching, `stop` has no effect, and a negative temperature or
max_tokens none either. vLLM has neither limit: see hf_longctx/vllm/README.md.

Examples:
  hf-longctx serve model_cards/fox-demo --port 8000
  hf-longctx serve MODEL --continuous-batching --dtype bfloat16
"""

import functools
from argparse import REMAINDER, ArgumentParser, Namespace
from typing import Any

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model; NAME@REVISION")
    parser.add_argument("options", nargs=REMAINDER, metavar="...", help="options of `transformers serve`")


async def refuse(request: Any, error: Exception) -> Any:
    """Answer a request whose values cannot be used, as OpenAI does, in the place of an empty 500."""
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)


def run(args: Namespace) -> None:
    import typer
    from jinja2 import TemplateError
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("serving needs more packages: pip install 'hf-longctx[serve]'")
    if "--help" not in args.options:
        shared.check_model_name(args.model)
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, server

    from ..fox import FoxForCausalLM
    from ..hmt import HMTWrapper

    class FastestFox(FoxForCausalLM):
        @classmethod
        def from_pretrained(cls, *args: Any, attn_implementation: str | None = None, **options: Any) -> Any:
            return FoxForCausalLM.from_pretrained(*args, attn_implementation=attn_implementation or "auto", **options)

    # the server looks for a model's class in this module, not in the Auto classes
    library: Any = model_manager.transformers
    library.FoxForCausalLM, library.HMTWrapper = FastestFox, HMTWrapper
    library_server: Any = server
    build_server = library_server.build_server

    def build(*args: Any, **options: Any) -> Any:
        server = build_server(*args, **options)
        for error in (ValueError, TemplateError):  # temperature=-1; a role that a chat template does not know
            server.add_exception_handler(error, refuse)
        return server

    library_server.build_server = build

    class Server(Serve):
        __doc__ = Serve.__doc__

        @functools.wraps(Serve.__init__)
        def __init__(self, *args: Any, **options: Any):
            try:
                super().__init__(*args, **options)
            finally:  # transformers leaves the thread of continuous batching running
                if state := getattr(self, "_generation_state", None):
                    state.shutdown()

    app = typer.Typer(add_completion=False)
    app.command()(Server)
    try:
        app([args.model, *args.options], prog_name="hf-longctx serve")
    except AttributeError as error:  # no such class in transformers
        raise ValueError(f"transformers' server cannot load {args.model}: {error}.") from error
