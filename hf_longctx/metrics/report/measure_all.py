"""Run all tasks on a model, and write a report of the results to a folder.

report = measure_all(model, tokenizer, tokens, "report", corpus_name="my text")
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import tasks  # noqa: F401 - registers the tasks
from ..result import Result, run_measurement
from ..rope.report import RopeReport, rope_report
from ..run.distributed import process_rank
from ..run.journal import OtherRun
from ..run.runner import Run
from ..run.runner import run as run_task
from ..task import Subject, Task
from .page import write_report


# Exceptions raised if a metric does not support the model, the corpus or the installed packages.
EXPECTED = (ValueError, OSError, ImportError, RuntimeError, NotImplementedError)


class Report(NamedTuple):
    """The report page that `measure_all` wrote, and the results on it."""

    page: Path  # report.html
    results: dict[str, Result]  # keyed by task name; saved as NAME.json with the figure NAME.png
    missing: dict[str, str]  # reasons why metrics were not measured or not completed, keyed by title


def measure_all(
    model: Any,
    tokenizer: Any,
    tokens: Sequence[int] | np.ndarray,
    folder: str | PathLike,
    *,
    context_length: int | None = None,
    train_length: int | None = None,
    repeats: int = 10,
    seed: int = 0,
    corpus_name: str | None = None,
    progress: bool = False,
) -> Report | None:
    """Run all tasks (curve, lines, loss, needle) on a model, and check its RoPE bound.

    We write a self-contained report.html to `folder`, and two files per metric: NAME.json and NAME.png. If a metric
    does not support the model, the corpus or the installed packages, the page gives the reason.

    After an interruption, call this function again to resume from the journals in `folder`/journals. With
    torch.distributed, the processes share the work.

    Args:
        model: a causal language model, or a reader such as `ServedModel`. We do not change its dtype or device.
        tokenizer: tokenizer of the model.
        tokens: token ids of the corpus, a flat sequence without special tokens.
        context_length: length of the longest input, in tokens (default: the claimed context).
        train_length: training context in tokens, to mark in the figures.
        repeats: number of targets per length of the forgetting curve.
        seed: random seed of all metrics.
        corpus_name: name of the corpus in the settings of the results and in the model card.
        progress: whether to print the current metric and a progress bar to stderr.

    Returns:
        `Report` in the first process. In all other processes, None.

    Raises:
        ValueError: no metric could be measured, or the folder contains journals of a different run (model, corpus or
            arguments).
    """
    folder, rank = Path(folder), process_rank()
    log = partial(print, file=sys.stderr) if progress and rank == 0 else lambda line: None
    names: dict[str, Any] = {"corpus_name": corpus_name, "train_length": train_length}
    subject = Subject(model, tokenizer, tokens, context=context_length, **names)
    # The config of a served model is read from the folder or repository of its tokenizer.
    config = getattr(getattr(subject.reader, "model", None), "config", None) or getattr(tokenizer, "name_or_path", "")

    def check_rope(run: Run) -> RopeReport:
        return rope_report(config)  # check the claimed context, even if context_length is shorter

    metrics: dict[str, Any] = {
        name: (task.result.title, partial(run_task, task.in_report(repeats=repeats, seed=seed), subject))
        for name, task in Task.tasks.items()
    }
    results, missing = {}, {}
    for name, (title, measure) in (metrics | {"rope": (RopeReport.title, check_rope)}).items():
        log(f"{title}:")
        run = Run(folder / "journals" / f"{name}.jsonl", progress=progress)
        result, failure = run_measurement(partial(measure, run))
        if result is not None:
            results[name] = result
            log(result.summary())
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                result.save(folder / f"{name}.json")
                result.plot(folder / f"{name}.png", train_length=train_length)
        if failure is not None:
            if isinstance(failure, OtherRun) or not isinstance(failure, EXPECTED):
                raise failure
            missing[title] = str(failure)
            log(f"{title}: {failure}")
    if not results:
        reasons = " ".join(f"{title}: {reason}" for title, reason in missing.items())
        raise ValueError(f"nothing could be measured. {reasons}")
    if rank > 0:
        return None
    write_report([*results.values()], folder / "report.html", missing=missing)
    return Report(folder / "report.html", results, missing)
