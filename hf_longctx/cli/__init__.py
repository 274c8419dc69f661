"""The command line, `hf-longctx COMMAND`.

`task_command` generates a task's command, such as `curve`, from the task's class. Every other command has a module
with `add_arguments(parser)` and `run(args)`. The module's docstring is the command's help text. The commands in
`TRAINING` use `TrainingArguments` and its parser. Slow imports happen inside `run`. All options are accepted with
hyphens and with underscores; see `spelling`.

Exit codes: 0 for success; 2 for a usage error (an unknown option, a missing file, incompatible settings); 1 if a valid
call failed (disk full, out of memory, no network, NaN in training); 128 + N if signal N stopped the command. For
example, Ctrl-C gives 130, SIGTERM gives 143, and a closed output pipe gives 141. An error is one line on stderr.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Collection
from typing import Any

from .. import __version__
from ..metrics import tasks  # noqa: F401 - importing the tasks registers them
from ..metrics.task import Task
from . import shared, train
from .spelling import respell, suggestion
from .task_command import TaskCommand


NAMES = """
    compare rope report lm-eval
    read serve gates
    train finetune convert
    push env
"""
TRAINING = {"train": "PretrainConfig", "finetune": "FinetuneConfig"}
COMMANDS: dict[str, Any] = {name: TaskCommand(task) for name, task in Task.tasks.items()}
COMMANDS |= {name: importlib.import_module(f".{name.replace('-', '_')}", __name__) for name in NAMES.split()}


def parser(with_arguments: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser for all commands. Only the commands in `with_arguments` get their arguments."""
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


def option_names(top: argparse.ArgumentParser, command: str) -> list[str]:
    """Return the options of a command, such as "--output"."""
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    chosen = commands.choices.get(command, top)
    return [option for option in chosen._option_string_actions if option.startswith("--")]


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words and words[0] in TRAINING:
            train.run(TRAINING[words[0]], words[1:], COMMANDS[words[0]].__doc__)
        else:
            top = parser(words)
            options = option_names(top, words[0] if words else "")
            args, unknown = top.parse_known_args(respell(words, options))
            if args.command == "read" and not any(word.startswith("-") for word in unknown):
                args.questions += unknown  # argparse does not accept them after an option
            elif unknown:
                top.error(f"unrecognized arguments: {' '.join(unknown)}.{suggestion(unknown, options)}")
            args.run(args)
        print(end="", flush=True)
    except BrokenPipeError:  # the reader of our output, such as `head`, has exited
        # Otherwise Python reports the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except shared.EXPECTED as error:
        print("hf-longctx: error:", *str(error).split(), file=sys.stderr)
        return shared.exit_code(error)
    except Exception as error:
        if type(error) is not Exception:
            raise
        # The tokenizers library raises a plain Exception, for example if its vocabulary lacks an unknown token.
        print(f"hf-longctx: error: the tokenizer of this model cannot encode the text ({error}).", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hf-longctx: interrupted", file=sys.stderr)
        return 130
    return 0
