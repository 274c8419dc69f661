"""Measure one model by all metrics, into one folder.

    report = measure_all(model, tokenizer, tokens, "report", corpus_name="my text")

A further metric is one function and one entry of `METRICS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..curve.measure import forgetting_curve
from ..curve.protocol import default_lengths, log_lengths, longest_length
from ..curve.result import ForgettingCurve
from ..loss.measure import position_loss
from ..loss.result import PositionLoss
from ..output import run_measurement
from ..result import Result, read_result, writing
from ..retrieval.haystack import NeedleGrid
from ..retrieval.lines import LineRetrieval
from ..retrieval.measure import line_retrieval, needle_in_a_haystack
from ..retrieval.wording import wording
from ..rope.measure import rope_report
from ..rope.result import RopeReport
from ..run.distributed import Run, labels, process_rank, wait
from ..run.journal import content_hash
from ..run.reader import Reader, reader_for
from .arguments import check_unchanged, resolved, write_arguments
from .card import card_snippet, eval_results
from .defaults import NO_CLAIM, line_counts, needle_lengths, record_tokens
from .page import write_report


POINTS = 16  # lengths of the forgetting curve
# What a metric raises where a model, a text or an installation does not suit it.
EXPECTED = (ValueError, OSError, ImportError, RuntimeError, NotImplementedError)


class Report(NamedTuple):
    """The files that `measure_all` wrote, and their results."""

    page: Path  # report.html
    card: Path | None  # model_card.md; None if no result has a number for a model card
    results: dict[str, Result]  # by the names in METRICS: NAME.json, and a picture NAME.png
    missing: dict[str, str]  # the reason why a metric was not measured, or not to its end, by its title


class Subject(NamedTuple):
    """The arguments of `measure_all` that a metric may need."""

    reader: Reader
    tokenizer: Any
    tokens: Sequence[int] | np.ndarray
    config: Any
    context_length: int | None
    train_length: int | None
    repeats: int
    seed: int
    corpus_name: str | None

    @property
    def context(self) -> int:
        """The longest input to measure with."""
        return (self.reader.claimed_context or NO_CLAIM) if self.context_length is None else self.context_length

    @property
    def names(self) -> dict[str, Any]:
        """Keywords of the metrics that read a text."""
        bos = self.tokenizer.bos_token_id
        return dict(bos_token_id=bos, corpus_name=self.corpus_name, train_length=self.train_length)

    def arguments(self) -> dict[str, Any]:
        """Return all that the results depend on, as JSON values."""
        return {
            **self.reader.settings(),
            "context_length": self.context_length,
            "train_length": self.train_length,
            "repeats": self.repeats,
            "seed": self.seed,
            "model": resolved(str(self.reader.settings()["model"])),
            "text": resolved(self.corpus_name),
            "corpus_sha256": content_hash(self.tokens),
            **self.reader.identity(),
        }


def measure_curve(subject: Subject, run: Run) -> ForgettingCurve:
    """Measure the forgetting curve, up to half of the context."""
    if subject.context_length is None:
        ends = subject.reader.claimed_context, len(subject.tokens)
        lengths = default_lengths(*ends, POINTS, log_lengths, subject.repeats)
    else:
        lengths = log_lengths(longest_length(subject.context_length), POINTS)
    return forgetting_curve(
        subject.reader,
        subject.tokens,
        lengths=lengths,
        repeats=subject.repeats,
        seed=subject.seed,
        eos_token_id=subject.tokenizer.eos_token_id,
        tokenizer=subject.tokenizer,
        run=run,
        **subject.names,
    )


def measure_loss(subject: Subject, run: Run) -> PositionLoss:
    """Measure the per-token loss over the context, as far as the text reaches."""
    context_length = subject.context_length
    if context_length is None:
        context_length = min(subject.context, len(subject.tokens))
    options: dict[str, Any] = dict(context_length=context_length, tokenizer=subject.tokenizer, run=run)
    return position_loss(subject.reader, subject.tokens, **options, **subject.names)


def measure_needle(subject: Subject, run: Run) -> NeedleGrid:
    """Measure the needle in a haystack, in the easy mode."""
    lengths = needle_lengths(subject.context, subject.tokenizer, wording("easy"))
    options: dict[str, Any] = dict(lengths=lengths, mode="easy", seed=subject.seed, run=run)
    return needle_in_a_haystack(subject.reader, subject.tokenizer, subject.tokens, **options, **subject.names)


def measure_lines(subject: Subject, run: Run) -> LineRetrieval:
    """Measure line retrieval."""
    counts = line_counts(subject.context, subject.tokenizer)
    if subject.context_length is not None and record_tokens(counts[0], subject.tokenizer) > subject.context_length:
        raise ValueError(f"{subject.context_length} tokens are too few for a record of {counts[0]} lines.")
    bos = subject.tokenizer.bos_token_id
    return line_retrieval(
        subject.reader, subject.tokenizer, lines=counts, seed=subject.seed, bos_token_id=bos, run=run
    )


def check_rope(subject: Subject, run: Run) -> RopeReport:
    """Check the RoPE base, which needs the configuration only."""
    if subject.config is None:
        raise ValueError("the configuration of a served model is not known: give config=...")
    return rope_report(subject.config, context_length=subject.context_length)


# What is measured, in the order of the page, by the names of the files: the class of the result, and the function.
METRICS: dict[str, tuple[type[Result], Callable[[Subject, Run], Result]]] = {
    "curve": (ForgettingCurve, measure_curve),
    "loss": (PositionLoss, measure_loss),
    "needle": (NeedleGrid, measure_needle),
    "lines": (LineRetrieval, measure_lines),
    "rope": (RopeReport, check_rope),
}


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
    """Measure forgetting curve, per-token loss, needle in a haystack, line retrieval and RoPE bound of a model.

    `folder` gets report.html, which needs no other file; NAME.json and NAME.png for each of the metrics curve, loss,
    needle, lines and rope; and model_card.md, numbers and picture for a model card. A metric that this model, text or
    installation does not allow is named on the page, with the reason.

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
    folder, reader, rank = Path(folder), reader_for(model), process_rank()
    log = partial(print, file=sys.stderr) if progress and rank == 0 else lambda line: None
    labels(corpus_name, train_length)
    if config is None:
        config = getattr(getattr(reader, "model", None), "config", None)
    subject = Subject(reader, tokenizer, tokens, config, context_length, train_length, repeats, seed, corpus_name)
    measured_before = open_folder(folder, subject.arguments())
    missing = {}
    for name, (result_class, measure) in METRICS.items():
        if name in measured_before:
            log(f"{result_class.title}: measured before")
            continue
        log(f"{result_class.title}:")
        try:
            measure_metric(name, partial(measure, subject), folder, train_length, progress, log)
        except EXPECTED as error:
            missing[result_class.title] = str(error)
            log(f"{result_class.title}: {error}")
    wait()  # until every process has removed its journals
    if rank > 0:
        return None
    if not any((folder / "unfinished").iterdir()):  # else something is left to go on with
        (folder / "unfinished").rmdir()
    model_name = str(reader.settings()["model"])
    title = Path(model_name).resolve().name if Path(model_name).is_dir() else model_name
    return write_pages(folder, title, missing)


def open_folder(folder: Path, arguments: dict[str, Any]) -> set[str]:
    """Return the names of the metrics that were measured before; the first process writes the arguments.

    Raises:
        ValueError: the folder holds a report with other arguments.
    """
    check_unchanged(folder, arguments)
    measured_before = {name for name in METRICS if (folder / f"{name}.json").exists()}
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


def write_pages(folder: Path, model_name: str, missing: dict[str, str]) -> Report:
    """Write report.html and model_card.md of the finished results, and of what unfinished ones had measured.

    Raises:
        ValueError: nothing was measured.
    """
    files = {metric: (folder / f"{metric}.json", folder / "unfinished" / f"{metric}.json") for metric in METRICS}
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
