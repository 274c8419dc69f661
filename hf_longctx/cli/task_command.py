"""Generation of a task's command from its class.

The class's docstring becomes the help text. The class's fields become options, except for arrays of token ids.
"""

import argparse
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..metrics.task import NO_CLAIM, Option, Task, options
from . import shared


METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", dict: "JSON"}


class TaskCommand:
    """A task's command, with the attributes that `cli.parser` expects: `__doc__`, `add_arguments` and `run`."""

    def __init__(self, task: type[Task]):
        self.task, self.options = task, [option for option in options(task) if option.kind is not np.ndarray]
        examples = task.examples.replace("\n  ", "\n  hf-longctx ")
        self.__doc__ = (
            f"{inspect.getdoc(task)}\n\nWrites OUTPUT.json and OUTPUT.png. An interrupted run writes its partial result, "
            f"and resumes if --journal is\ngiven. Under torchrun or accelerate launch, the processes share the work.\n\nExamples:"
            f"{examples}\n"
        )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        shared.add_served(shared.add_model(parser))
        group = parser.add_argument_group(self.task.name)
        if self.task.reads_text:
            shared.add_text(group)
        for option in self.options:
            if option.name != "seed":  # add_model already adds --seed
                add_option(group, option)
        shared.add_train_length(group)
        group = parser.add_argument_group("run")
        shared.add_cache(group)
        for name in ("bos", "eos"):
            group.add_argument(
                f"--{name}-token-id",
                type=int,
                metavar="ID",
                help=f"{name.upper()} token id (default: from the tokenizer)",
            )
        group.add_argument(
            "--journal",
            metavar="FILE",
            help="file that records finished trials, so that a killed run resumes",
        )
        group.add_argument(
            "--dry-run",
            action="store_true",
            help="print the maximum number of requests to a server, and do not measure; with --endpoint, the server is "
            "tested",
        )
        group.add_argument(
            "--tokens-per-pass",
            type=int,
            metavar="N",
            help="maximum tokens per forward pass (default: 512 on a CPU, 4096 elsewhere)",
        )
        group.add_argument(
            "--output",
            default=self.task.result.kind,
            metavar="PATH",
            help="path for the JSON and the figure. The suffix .svg or .pdf sets the figure's format; otherwise, it "
            "is PNG (default: %(default)s)",
        )

    def run(self, args: argparse.Namespace) -> None:
        from ..metrics.run.runner import Run, run
        from ..metrics.task import Subject

        shared.create_folder(Path(args.output).parent)
        chosen: dict[str, Any] = {option.name: getattr(args, option.name) for option in self.options}
        task = self.task(**chosen)  # raises an error for an invalid option
        if getattr(args, "text", None) is not None and not task.uses_text():
            raise ValueError("--text is not used with these options; omit it.")
        run_options = Run(args.journal, args.tokens_per_pass, progress=True)
        tokenizer, claims, open_reader = shared.open_model(args)
        lengths = [np.atleast_1d(value)[-1] for name, value in chosen.items() if "length" in name and value]
        longest = int(max([claims.claimed_context or NO_CLAIM, *lengths]))
        corpus = shared.load_corpus(args.text, tokenizer, longest) if task.uses_text() else None
        subject_of = partial(
            Subject,
            tokenizer=tokenizer,
            tokens=corpus and corpus.tokens,
            bos_token_id=args.bos_token_id,
            eos_token_id=args.eos_token_id,
            corpus_name=corpus and corpus.name,
            train_length=args.train_length,
        )
        prepared = task.on(subject_of(claims))  # raises errors before the weights are loaded
        if args.dry_run:
            return print_requests(prepared)
        subject = subject_of(open_reader())
        shared.measure_and_write(args, partial(run, task, subject, run_options), train_length=args.train_length)


def print_requests(task: Task) -> None:
    """Print the maximum number of requests of a task to a server."""
    from ..metrics.run.cost import request_counts

    reader, counts = task.subject.reader, request_counts(task)
    print(f"{task.name} sends up to this number of requests:")
    for returned, count in counts.items():
        print(f"{count:>9,} if {returned}")
    if way := reader.settings().get("served_with"):
        print(f"{reader.identity()['endpoint']}: {way}")


def add_option(group: argparse._ActionsContainer, option: Option) -> None:
    """Add the option for a dataclass field to the parser."""
    text, default = option.help, option.default
    if default is not None and option.kind is not bool and "default" not in text:
        text += f" (default: {', '.join(map(str, default)) if option.listed else default})"
    how: dict[str, Any] = {"default": default, "help": text}
    if option.kind is bool:
        how["action"] = argparse.BooleanOptionalAction
    elif option.choices:
        how["choices"] = option.choices
    elif option.listed:
        how |= {"nargs": "+", "action": Numbers, "metavar": METAVARS[option.kind], "type": str, "const": option.kind}
    else:
        how |= {"type": json_object if option.kind is dict else option.kind, "metavar": METAVARS[option.kind]}
    group.add_argument(f"--{option.name.replace('_', '-')}", **how)


def json_object(text: str) -> dict[str, Any]:
    """Parse the JSON value of a dictionary option."""
    return json.loads(text)


class Numbers(argparse.Action):
    """An action that parses numbers of type `const`, separated by spaces or commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        kind: Any = self.const
        try:
            setattr(namespace, self.dest, [kind(word) for value in values for word in value.split(",") if word])
        except ValueError as error:
            raise argparse.ArgumentError(self, f"{error}; give numbers, such as 500,1000") from None
