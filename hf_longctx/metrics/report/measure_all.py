"""Measure one model by all tasks, into one folder.

report = measure_all(model, tokenizer, tokens, "report", corpus_name="my text")
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import tasks  # noqa: F401 - registers them
from ..output import run_measurement
from ..read import read_result
from ..result import Result, writing
from ..rope.measure import rope_report
from ..rope.result import RopeReport
from ..run.distributed import process_rank, wait
from ..run.journal import content_hash
from ..run.runner import Run
from ..run.runner import run as run_task
from ..task import Subject, Task
from .arguments import check_unchanged, write_arguments
from .card import card_snippet, eval_results
from .page import write_report


# What a metric raises where a model, a text or an installation does not suit it.
EXPECTED = (ValueError, OSError, ImportError, RuntimeError, NotImplementedError)


class Report(NamedTuple):
    """The files that `measure_all` wrote, and their results."""

    page: Path  # report.html
    card: Path | None  # model_card.md; None if no result has a number for a model card
    results: dict[str, Result]  # by the names of the tasks: NAME.json, and a figure NAME.png
    missing: dict[str, str]  # the reason why a metric was not measured, or not to its end, by its title


def metrics(subject: Subject, config: Any, **options: Any) -> dict[str, tuple[str, Callable[[Run], Result]]]:
    """Return title and measuring function of all tasks and of the RoPE bound, in the order of the page."""

    def check_rope(run: Run) -> RopeReport:
        if config is None:
            raise ValueError("the configuration of a served model is not known: give config=...")
        return rope_report(config)  # at the claimed context, however short the measured one is

    measured = {
        name: (task.result.title, partial(run_task, task.in_report(**options), subject))
        for name, task in Task.tasks.items()
    }
    return measured | {"rope": (RopeReport.title, check_rope)}


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
    config: Any = None,
    progress: bool = False,
) -> Report | None:
    """Measure a model by all tasks (curve, lines, loss, needle) and check its RoPE bound.

    `folder` gets report.html, which needs no other file; NAME.json and NAME.png for each metric; and model_card.md,
    numbers and figure for a model card. A metric that this model, text or installation does not allow is named on the
    page, with the reason.

    Called again after an interruption, it goes on from there, by the journals in `folder`/unfinished. What has been
    measured is not measured again. Where torch.distributed is initialized, the processes share the work.

    Args:
        model: a causal language model, in its own dtype, on its own device; or a reader, such as `ServedModel`.
        tokenizer: that of the model.
        tokens: the text, a flat sequence of ids, encoded without special tokens.
        context_length: the longest input to measure with, in tokens. Default: the context that the model claims.
        train_length: context length of the training, in tokens, marked in the pictures.
        repeats: targets per length of the forgetting curve.
        seed: of all that is drawn.
        corpus_name: name of the text, for settings and model card.
        config: for the RoPE bound. Default: the model's; a served model shows none.
        progress: print on stderr which metric is being measured, with progress bars.

    Returns:
        `Report` with the files; None in all processes but the first.

    Raises:
        ValueError: nothing could be measured, or the folder holds a report of another model, text or argument.
    """
    folder, rank = Path(folder), process_rank()
    log = partial(print, file=sys.stderr) if progress and rank == 0 else lambda line: None
    names: dict[str, Any] = {"corpus_name": corpus_name, "train_length": train_length}
    subject = Subject(model, tokenizer, tokens, context=context_length, **names)
    model_settings = subject.reader.settings()
    if config is None:
        config = getattr(getattr(subject.reader, "model", None), "config", None)
    arguments = model_settings | {"context_length": context_length, "train_length": train_length}
    arguments |= {"repeats": repeats, "seed": seed}
    arguments |= {"text": subject.labels.get("corpus"), "corpus_sha256": content_hash(subject.text)}
    chosen = metrics(subject, config, repeats=repeats, seed=seed)
    measured_before = open_folder(folder, arguments | subject.reader.identity(), chosen.keys())
    missing = {}
    for name, (metric_title, measure) in chosen.items():
        if name in measured_before:
            log(f"{metric_title}: measured before")
            continue
        log(f"{metric_title}:")
        try:
            measure_metric(name, measure, folder, train_length, progress, log)
        except EXPECTED as error:
            missing[metric_title] = str(error)
            log(f"{metric_title}: {error}")
    wait()  # until every process has removed its journals
    if rank > 0:
        return None
    if not any((folder / "unfinished").iterdir()):  # else something is left to go on with
        (folder / "unfinished").rmdir()
    return write_pages(folder, str(model_settings["model"]), missing, chosen.keys())


def open_folder(folder: Path, arguments: dict[str, Any], names: Collection[str]) -> set[str]:
    """Return the names of the metrics that were measured before; the first process writes the arguments.

    Raises:
        ValueError: the folder holds a report with other arguments.
    """
    check_unchanged(folder, arguments)
    measured_before = {name for name in names if (folder / f"{name}.json").exists()}
    wait()  # until every process has looked
    if process_rank() == 0:
        write_arguments(folder, arguments)
        (folder / "unfinished").mkdir(exist_ok=True)
    wait()
    return measured_before


def measure_metric(
    name: str,
    measure: Callable[[Run], Result],
    folder: Path,
    train_length: int | None,
    progress: bool,
    log: Callable[[str], None],
) -> None:
    """Measure in `folder`/unfinished, and move NAME.json and NAME.png into `folder` when they are complete.

    Raises:
        Exception: what `measure` raises, after what it had measured has been written into unfinished.
    """
    journal, document, picture = (folder / "unfinished" / f"{name}.{ending}" for ending in ("jsonl", "json", "png"))
    result, failure = run_measurement(partial(measure, Run(journal, progress=progress)))
    rank = process_rank()
    if result is not None and rank == 0:
        log(result.summary())
        result.save(document)
        with writing(picture):
            result.plot(picture, train_length=train_length)
    if failure is not None:
        raise failure
    if rank == 0:
        for path in (picture, document):  # the JSON last: it says that the measurement is complete
            path.replace(folder / path.name)
    (Path(f"{journal}.{rank}") if rank else journal).unlink(missing_ok=True)


def write_pages(folder: Path, model_name: str, missing: dict[str, str], names: Collection[str]) -> Report:
    """Write report.html and model_card.md of the finished results, and of what unfinished ones had measured.

    Raises:
        ValueError: nothing was measured.
    """
    files = {metric: (folder / f"{metric}.json", folder / "unfinished" / f"{metric}.json") for metric in names}
    files = {metric: next((path for path in paths if path.exists()), None) for metric, paths in files.items()}
    results = {metric: read_result(path) for metric, path in files.items() if path is not None}
    measured = [*results.values()]
    if not results:
        reasons = " ".join(f"{title}: {reason}" for title, reason in missing.items())
        raise ValueError(f"nothing could be measured. {reasons}")
    page, card = folder / "report.html", None
    write_report(measured, page, title=f"How far {model_name} remembers", missing=missing)
    if eval_results(measured):
        card = folder / "model_card.md"
        picture = "curve.png" if (folder / "curve.png").exists() else None
        card.write_text(card_snippet(model_name, measured, picture), encoding="utf-8")
    return Report(page, card, results, missing)
