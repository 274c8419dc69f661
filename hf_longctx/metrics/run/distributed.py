"""How a metric is run: in parts that a journal keeps, that processes share, and whose progress is shown.

A metric says how a part is measured and what the parts amount to; `run_distributed` does the rest:

    def work(worker):
        worker.measure(parts, cost, measure)

    run_distributed(reader, "needle", work, result, depends_on=settings, trial=ids, run=Run(journal="needle.jsonl"))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tqdm.auto import tqdm

from ... import __version__
from ..checks import positive_int
from ..result import Result
from .engine import pass_and_tile
from .journal import Journal
from .reader import Reader


@dataclass(frozen=True)
class Run:
    """How a metric is run, which changes no number but by rounding.

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
        ValueError: tokens_per_pass is below 1.
    """

    journal: str | os.PathLike | None = None
    tokens_per_pass: int | None = None
    progress: bool = False

    def __post_init__(self):
        if self.tokens_per_pass is not None:
            positive_int("tokens_per_pass", self.tokens_per_pass)


class Worker(NamedTuple):
    """One of the processes that share a measurement.

    Attributes:
        journal: what it has measured.
        bar: its progress.
        rank, processes: its number, and how many there are.
    """

    journal: Journal
    bar: tqdm
    rank: int
    processes: int

    def tasks(self, parts: Sequence, cost: Callable[[Any], float]) -> list:
        """The parts that this process measures: the costliest are dealt out first, to the process with least to do."""
        loads, shares = [0.0] * self.processes, [set() for _ in range(self.processes)]
        for i in sorted(range(len(parts)), key=lambda i: cost(parts[i]), reverse=True):
            least = loads.index(min(loads))
            loads[least] += cost(parts[i])
            shares[least].add(i)
        return [parts[i] for i in sorted(shares[self.rank])]

    def measure(
        self,
        parts: Sequence,
        cost: Callable[[Any], float],
        measure: Callable[[Any], Any],
        name: Callable[[Any], str] = str,
    ) -> None:
        """Measure those of this process's parts that the journal does not have.

        Args:
            measure: returns JSON values.
            name: of a part, for the bar.
        """
        parts = self.tasks(parts, cost)
        self.bar.reset(sum(map(cost, parts)))
        for part in parts:
            if part not in self.journal.done:
                self.bar.set_postfix_str(name(part))
                self.journal.append(part, measure(part))
            self.bar.update(cost(part))


def run_distributed(
    reader: Reader,
    name: str,
    work: Callable[[Worker], None],
    result: Callable[[dict], Result | None],
    *,
    depends_on: dict[str, Any],
    trial: np.ndarray,
    run: Run | None,
) -> Result:
    """Let every process do its share of the work, and make the result of all journals.

    Args:
        name: of the progress bar.
        work: measures what the journal does not have, within `reader.reading`.
        result: of the journal's entries; None if they do not suffice for one. Its settings get what says how it was
            run: which weights, device, tokens per pass, versions; and `interrupted`, if
            an exception ended the run, by what.
        depends_on: settings that the entries depend on, as JSON values.
        trial: ids of a typical input.
        run: None is `Run()`.
    """
    run = Run() if run is None else run
    if not isinstance(run, Run):
        raise TypeError(f"run is {run!r}; give Run(journal=..., tokens_per_pass=..., progress=...).")
    rank, processes = process_place(reader)
    journal = run.journal
    identity = reader.identity()
    if journal is not None:
        depends_on = depends_on | identity
    if processes > 1:
        depends_on = depends_on | {"process": rank, "processes": processes}
        journal = f"{journal}.{rank}" if journal is not None and rank else journal
    failure = None
    with Journal(journal, depends_on) as progress, progress_bar(name, run.progress and rank == 0) as bar:
        try:
            with reader.reading(trial, run.tokens_per_pass):
                work(Worker(progress, bar, rank, processes))
        except BaseException as error:
            failure = error
    entries = progress.done
    if processes > 1 and not isinstance(failure, KeyboardInterrupt):
        entries, failure = exchange(entries, failure, processes)
    outcome = result(entries)
    if outcome is not None:
        tokens_per_pass = run.tokens_per_pass
        if tokens_per_pass is None and reader.device is not None:
            tokens_per_pass, _ = pass_and_tile(torch.device(reader.device))
        facts = {"device": reader.device, "tokens_per_pass": tokens_per_pass, "versions": versions()}
        facts |= {} if failure is None else {"interrupted": describe(failure)}
        outcome = outcome.with_settings(**identity, **facts)
    if failure is None:
        return outcome
    failure.result = outcome
    measured = "nothing had been measured" if outcome is None else outcome.summary()
    failure.add_note(f"What had been measured is in this error's .result: {measured}")
    raise failure


def describe(failure: BaseException) -> str:
    """What ended a run, in one line."""
    if isinstance(failure, KeyboardInterrupt):
        return "Ctrl-C"
    return (str(failure) or type(failure).__name__).splitlines()[0][:200]


def process_place(reader: Reader) -> tuple[int, int]:
    """Number of this process and of all that share the work: (0, 1) unless each has the whole model to itself."""
    if not several_processes() or reader.is_distributed:
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_rank() -> int:
    """Rank of this process in torch.distributed; 0 without it."""
    return torch.distributed.get_rank() if several_processes() else 0


def wait() -> None:
    """Until all processes of torch.distributed are here."""
    if several_processes():
        torch.distributed.barrier()


def exchange(entries: dict, failure: BaseException | None, processes: int) -> tuple[dict, BaseException | None]:
    """What all processes measured, and a failure if one of them had one."""
    everyone = [None] * processes
    torch.distributed.all_gather_object(everyone, (entries, repr(failure) if failure else None))
    for rank, (_, message) in enumerate(everyone):
        if message and failure is None:
            failure = RuntimeError(f"process {rank} failed: {message}")
    return {key: result for entries, _ in everyone for key, result in entries.items()}, failure


def progress_bar(name: str, show: bool) -> tqdm:
    """A bar of work, so that the time left is right although long inputs are slow; `reset(total)` says how much."""
    form = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    return Bar(desc=name, bar_format=form, total=0, smoothing=0, disable=not show)


class Bar(tqdm):
    """A bar that never passes its end: costs are floats, and their sums are rounded."""

    def update(self, n: float = 1) -> bool | None:
        return super().update(min(n, self.total - self.n))


def versions() -> dict[str, str]:
    return {"hf-longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def labels(corpus_name: str | None, train_length: int | None) -> dict[str, Any]:
    """Settings that name things and change no number: the text, and the context of training in tokens, where known."""
    named = {"corpus": corpus_name, "train_length": train_length}
    return {name: value for name, value in named.items() if value is not None}
