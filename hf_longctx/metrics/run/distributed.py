"""Run a metric as tasks that processes share, that a journal keeps, and whose progress is shown.

A metric says how a task is measured and what all tasks amount to; `run_distributed` does the rest:

    def work(worker):
        worker.measure({task: cost}, measure)

    run_distributed(reader, "needle", work, result, depends_on=settings, trial=ids, run=Run(journal="needle.jsonl"))
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import transformers
from tqdm.auto import tqdm

from ... import __version__
from ..checks import check_kind, whole_number
from ..result import Result
from .engine import TOKENS_PER_PASS
from .journal import Journal
from .model import size_and_hardware
from .reader import Reader


# A bar counts cost, not inputs, so that the time left is right although long inputs are slow.
BAR = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
R = TypeVar("R", bound=Result)
VERSIONS = {"hf-longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


@dataclass(frozen=True)
class Run:
    """Options of a run that change the numbers by rounding at most.

    Where torch.distributed is initialized (`torchrun`, `accelerate launch`), every process, with its own copy of the
    model, measures a share, and all return the whole result. An exception that leaves a metric once measuring has
    begun, also KeyboardInterrupt, has an attribute `result`: that of what was measured until then, or None.

    Attributes:
        journal: path of a file that gets a line for every finished part at once. Given again after a crash, the run
            goes on from there, and ends with the same file. Process k > 0 of several writes to `PATH.k`. None: no
            file.
        tokens_per_pass: memory budget: most tokens in a forward pass, see `engine.Engine`.
        progress: show a progress bar, in work to do: long inputs count for more than their tokens.

    Raises:
        ValueError: tokens_per_pass is below 1, or progress is neither True nor False.
    """

    journal: str | os.PathLike | None = None
    tokens_per_pass: int | None = None
    progress: bool = False

    def __post_init__(self):
        if self.tokens_per_pass is not None:
            whole_number("tokens_per_pass", self.tokens_per_pass, 1)
        check_kind(bool, progress=self.progress)


class Worker(NamedTuple):
    """One of the processes that share a measurement.

    Attributes:
        journal: keeps the tasks that this process has finished.
        bar: shows its progress, in the cost of tasks.
        rank, processes: its number, and how many there are.
    """

    journal: Journal
    bar: tqdm
    rank: int
    processes: int

    def tasks(self, costs: dict[Any, float]) -> list:
        """Return the tasks of this process: the costliest are dealt out first, to the process with least to do."""
        loads, owner = [0.0] * self.processes, {}
        for task in sorted(costs, key=lambda task: costs[task], reverse=True):
            owner[task] = loads.index(min(loads))
            loads[owner[task]] += costs[task]
        return [task for task in costs if owner[task] == self.rank]

    def measure(
        self, costs: dict[Any, float], measure: Callable[[Any], Any], name: Callable[[Any], str] = str
    ) -> None:
        """Measure the tasks of this process.

        Args:
            costs: cost of every task, see `Reader.cost`. A task is a key of the journal: a number or a tuple, say.
            measure: returns the result of a task, as JSON values.
            name: returns the name of a task, for the bar.
        """
        tasks = self.tasks(costs)
        self.bar.reset(sum(costs[task] for task in tasks))
        for task in tasks:
            self.measure_task(task, costs[task], measure, name)

    def measure_task(
        self, task: Any, cost: float, measure: Callable[[Any], Any], name: Callable[[Any], str] = str
    ) -> None:
        """Measure one task, unless the journal has it."""
        if task not in self.journal.done:
            self.bar.set_postfix_str(name(task))
            self.journal.append(task, measure(task))
        self.bar.update(cost)


def run_distributed(
    reader: Reader,
    name: str,
    work: Callable[[Worker], None],
    result: Callable[[dict], R | None],
    *,
    depends_on: dict[str, Any],
    trial: np.ndarray,
    run: Run | None,
) -> R:
    """Let every process do its tasks, and make the result of all journals.

    Args:
        name: name of the progress bar.
        work: measures the tasks of a worker, within `reader.reading`.
        result: makes the result from `{task: what was measured}`; None if that does not suffice for one. Its settings
            get weights, device, tokens per pass, versions and, if an exception ended the run, `interrupted`.
        depends_on: settings that the measured numbers depend on, as JSON values.
        trial: ids of a typical input, (T,).
        run: None is `Run()`.
    """
    run = run or Run()
    rank, processes = process_place(reader)
    journal = run.journal
    identity = reader.identity()
    if journal is not None:
        depends_on = depends_on | identity
    if processes > 1:
        depends_on = depends_on | {"process": rank, "processes": processes}
        journal = f"{journal}.{rank}" if journal is not None and rank else journal
    failure = None
    bar_options = {"bar_format": BAR, "total": 0, "smoothing": 0, "disable": not run.progress or rank > 0}
    with Journal(journal, depends_on) as finished, tqdm(desc=name, **bar_options) as progress:
        try:
            with reader.reading(trial, run.tokens_per_pass):
                work(Worker(finished, progress, rank, processes))
        except BaseException as error:
            failure = error
    entries = finished.done
    if processes > 1 and not isinstance(failure, KeyboardInterrupt):
        entries, failure = exchange(entries, failure, processes)
    outcome = result(entries)
    if outcome is not None:
        tokens_per_pass = run.tokens_per_pass
        if tokens_per_pass is None and reader.device is not None:
            tokens_per_pass = TOKENS_PER_PASS["cpu" if reader.device == "cpu" else "accelerator"]
        facts = {"device": reader.device, "tokens_per_pass": tokens_per_pass, "versions": VERSIONS}
        facts |= size_and_hardware(getattr(reader, "model", None), reader.device)
        facts |= {} if failure is None else {"interrupted": describe(failure)}
        outcome = outcome.with_settings(**identity, **facts)
    if failure is None:
        assert outcome is not None
        return outcome
    failure.result = outcome  # ty: ignore[missing-attribute] - for the caller, on any exception
    measured = "nothing had been measured" if outcome is None else outcome.summary()
    failure.add_note(f"What had been measured is in this error's .result: {measured}")
    raise failure


def describe(failure: BaseException) -> str:
    """Describe what ended a run, in one line."""
    if isinstance(failure, KeyboardInterrupt):
        return "Ctrl-C"
    return (str(failure) or type(failure).__name__).splitlines()[0][:200]


def process_place(reader: Reader) -> tuple[int, int]:
    """Return the number of this process and of all that share the work: (0, 1) unless each has the whole model."""
    if not several_processes() or reader.is_distributed:
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def several_processes() -> bool:
    """Return whether torch.distributed is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_rank() -> int:
    """Return the rank of this process in torch.distributed; 0 without it."""
    return torch.distributed.get_rank() if several_processes() else 0


def wait() -> None:
    """Wait until all processes of torch.distributed are here."""
    if several_processes():
        torch.distributed.barrier()


def exchange(entries: dict, failure: BaseException | None, processes: int) -> tuple[dict, BaseException | None]:
    """Collect what all processes measured, and a failure if one of them had one."""
    everyone: list[Any] = [None] * processes
    torch.distributed.all_gather_object(everyone, (entries, repr(failure) if failure else None))
    for rank, (_, message) in enumerate(everyone):
        if message and failure is None:
            failure = RuntimeError(f"process {rank} failed: {message}")
    return {key: result for entries, _ in everyone for key, result in entries.items()}, failure


def labels(corpus_name: str | None, train_length: int | None) -> dict[str, Any]:
    """Return the settings that change no number: name of the text and context of training in tokens, where known.

    Raises:
        ValueError: one is not what it should be.
    """
    check_kind(str | None, corpus_name=corpus_name)
    train_length = None if train_length is None else whole_number("train_length", train_length, 1)
    named = {"corpus": corpus_name, "train_length": train_length}
    return {name: value for name, value in named.items() if value is not None}
