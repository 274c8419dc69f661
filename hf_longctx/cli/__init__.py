"""The command line, `hf-longctx COMMAND`: one module per command, whose docstring is its help text.

The commands of tasks, such as `curve`, are made of their classes by `task_command`. Any other command has a module
with `add_arguments(parser)` and `run(args)`; those of `TRAINING`, whose settings are transformers', have `run(words)`
and their own parser. It imports what is slow to import inside `run`.

Exit codes: 0; 2 where the call has to be changed (an unknown option, a file that is not there, settings that do not
fit); 1 where it failed although it is right (a full disk, no memory, no network, a training whose numbers overflow);
128 + the number of the signal that stopped it: 130 for Ctrl-C, 143 for SIGTERM, 141 where nobody reads the
output. An error is one line on stderr.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Collection
from typing import Any

from .. import __version__
from ..metrics import tasks  # noqa: F401 - registers them
from ..metrics.task import Task
from . import shared
from .task_command import TaskCommand


NAMES = """
    compare rope report lm-eval
    read serve gates
    train finetune convert
    push env
"""
TRAINING = ("train", "finetune")
COMMANDS: dict[str, Any] = {name: TaskCommand(task) for name, task in Task.tasks.items()}
COMMANDS |= {name: importlib.import_module(f".{name.replace('-', '_')}", __name__) for name in NAMES.split()}


def parser(with_arguments: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the argument parser of all commands, where only some need their arguments: those that are called."""
    top = argparse.ArgumentParser(
        prog="hf-longctx", description="Long-context research in the Hugging Face ecosystem."
    )
    top.add_argument("--version", action="version", version=f"hf-longctx {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        p = commands.add_parser(
            name,
            help=(command.__doc__ or "").partition("\n")[0],
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in with_arguments and name not in TRAINING:
            command.add_arguments(p)
        p.set_defaults(run=command.run)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words and words[0] in TRAINING:
            COMMANDS[words[0]].run(words[1:])
        else:
            if words[:1] != [
                "lm-eval"
            ]:  # whose words are those of another program; the others are spelled as in transformers
                words = [re.sub("^--[a-z0-9_]+", lambda name: name[0].replace("_", "-"), word) for word in words]
            args = parser(words).parse_args(words)
            args.run(args)
        print(end="", flush=True)
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end
        return 141
    except shared.EXPECTED as error:
        print("hf-longctx: error:", *str(error).split(), file=sys.stderr)
        return shared.exit_code(error)
    except Exception as error:
        if type(error) is not Exception:
            raise
        # tokenizers raise no other; as where a vocabulary without an unknown token meets a word that it lacks
        print(f"hf-longctx: error: the tokenizer of this model cannot encode the text ({error}).", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hf-longctx: interrupted", file=sys.stderr)
        return 130
    return 0
