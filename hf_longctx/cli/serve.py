"""Serve a model over an OpenAI-compatible API: `transformers serve`, with FoX and HMT known to it.

All options are those of `transformers serve`, and follow MODEL; `hf-longctx serve MODEL --help` lists them. It needs
fastapi, uvicorn and openai: pip install 'hf-longctx[serve]'.

An HMT reads only what is new of a conversation that a request names, by the header X-Conversation-Id or by `user` in
its body. As in OpenAI's API, each request holds the whole conversation. --conversations bounds those in memory;
--conversation-folder keeps them on disk too, where their files stay until they are deleted.

Other programs of other projects know FoX where they run `import hf_longctx`, or where they load a folder that
`save_pretrained` has written with `trust_remote_code=True`.

Limits of transformers' server: with --continuous-batching, `stop` has no effect, and a negative temperature or
max_tokens none either. vLLM has neither limit: see hf_longctx/vllm/README.md.

Examples:
  hf-longctx serve model_cards/fox-demo --port 8000
  hf-longctx serve MODEL --continuous-batching --dtype bfloat16
  hf-longctx serve HMT_FOLDER --conversation-folder states
"""

import functools
import inspect
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from . import shared


CONVERSATION: ContextVar[str | None] = ContextVar("conversation", default=None)  # that of the request


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model; NAME@REVISION")
    parser.add_argument("options", nargs=REMAINDER, metavar="...", help="options of `transformers serve`")


class Conversing(NamedTuple):
    """An HMT whose `generate` goes on from the states of a conversation."""

    model: Any
    conversations: Any
    name: str

    def generate(self, **inputs: Any) -> Any:
        return self.conversations.generate(self.model, self.name, **inputs)


async def name_conversation(request: Any, call_next: Any) -> Any:
    """Note which conversation a request belongs to."""
    name = request.headers.get("X-Conversation-Id")
    if name is None and request.method == "POST":
        with suppress(ValueError):  # no JSON: the server refuses it
            body = await request.json()
            name = body.get("user") if isinstance(body, dict) else None
    CONVERSATION.set(None if name is None else str(name))
    return await call_next(request)


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
    from transformers.cli.serving import model_manager, server, utils

    from ..fox import FoxForCausalLM
    from ..hmt import HMTWrapper
    from ..hmt.conversations import Conversations

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
        # temperature=-1; a role that a chat template does not know; continuous batching of an HMT
        for error in (ValueError, TemplateError, NotImplementedError):
            server.add_exception_handler(error, refuse)
        server.middleware("http")(name_conversation)
        return server

    library_server.build_server = build
    library_utils: Any = utils
    SequentialManager: Any = utils.GenerateManager

    class Server(Serve):
        __doc__ = Serve.__doc__

        @functools.wraps(Serve.__init__)
        def __init__(
            self, *args: Any, conversations: int = 16, conversation_folder: Path | None = None, **options: Any
        ):
            kept = Conversations(conversations, conversation_folder)

            def conversing(model: Any) -> Any:
                name = CONVERSATION.get()
                return Conversing(model, kept, name) if name and isinstance(model, HMTWrapper) else model

            class Manager(SequentialManager):
                def generate_streaming(self, model: Any, *args: Any, **options: Any) -> Any:
                    return super().generate_streaming(conversing(model), *args, **options)

                async def generate_non_streaming(self, model: Any, *args: Any, **options: Any) -> Any:
                    return await super().generate_non_streaming(conversing(model), *args, **options)

            library_utils.GenerateManager = Manager
            try:
                super().__init__(*args, **options)
            finally:  # transformers leaves the thread of continuous batching running
                if state := getattr(self, "_generation_state", None):
                    state.shutdown()

    signature = inspect.signature(Serve.__init__)
    parameters = list(signature.parameters.values())[1:]
    for name, kind, default, text in (
        ("conversations", int, 16, "Conversations with an HMT whose states stay in memory."),
        ("conversation_folder", Path | None, None, "Folder that keeps the states of all conversations with an HMT."),
    ):
        option = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        parameters.append(option.replace(annotation=Annotated[kind, typer.Option(help=text)]))
    typed: Any = Server
    typed.__signature__ = signature.replace(parameters=parameters)
    app = typer.Typer(add_completion=False)
    app.command()(Server)
    try:
        app([args.model, *args.options], prog_name="hf-longctx serve")
    except AttributeError as error:  # no such class in transformers
        raise ValueError(f"transformers' server cannot load {args.model}: {error}.") from error
