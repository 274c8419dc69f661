"""Run a task: measure its trials, record their scores in a journal, and return the complete or partial result."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
import transformers
from tqdm.auto import tqdm

from ... import __version__
from ..checks import as_int
from ..task import Answered, Ask, Key, Missing, Predict, Request, Score, Subject, Task, TaskResult, Trial
from . import distributed
from .engine import TOKENS_PER_PASS, UnsupportedInput
from .journal import Journal
from .model import size_and_hardware
from .reader import Reader


BAR = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"  # the bar advances by the cost of a trial
OVERFLOW = "A common cause is float16 overflow: load the model in torch.bfloat16 or torch.float32."
VERSIONS = {"hf-longctx": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


@dataclass(frozen=True)
class Run:
    """Options of a run. They change the result only by rounding errors.

    If torch.distributed is initialized (`torchrun`, `accelerate launch`), the processes share the trials. Each process
    has a copy of the model. All processes return the complete result. If an exception or Ctrl-C ends the run after
    measuring has begun, the exception has an attribute `result`: the partial result, or None.

    Attributes:
        journal: path of a file that records every finished trial. After a crash, a run with the same path resumes, and
            produces the same file. With several processes, process k > 0 writes to `PATH.k`. Default: no file.
        tokens_per_pass: maximum number of tokens per forward pass, to limit memory; see `engine.Engine`.
        progress: whether to show a progress bar.

    Raises:
        ValueError: tokens_per_pass is below 1.
    """

    journal: str | os.PathLike | None = None
    tokens_per_pass: int | None = None
    progress: bool = False

    def __post_init__(self):
        if self.tokens_per_pass is not None:
            as_int("tokens_per_pass", self.tokens_per_pass, 1)


def run(task: Task, subject: Subject, run: Run | None = None) -> Any:
    """Run the task and return its result.

    Raises:
        ValueError: an option is invalid, the journal belongs to another run, nothing could be measured, or a logit is
            NaN. Invalid options raise the error before the model runs.
        BaseException: the error that ended the run early. Its attribute `result` is the partial result, or None.
    """
    run, reader = run or Run(), subject.reader
    rank, processes = distributed.rank_and_world_size(reader)
    subject.processes = processes
    task = task.on(subject)
    depends_on, labels = task.settings()
    longest = max(trial.tokens for trial in task.trials({}))
    if reader.position_limit is None and reader.claimed_context is not None and longest > reader.claimed_context:
        warnings.warn(
            f"the longest input has {longest} tokens, but the model claims to support only {reader.claimed_context} "
            "(max_position_embeddings). The run continues.",
            stacklevel=3,
        )
    path, settings = run.journal, {"metric": task.result.kind, **depends_on}
    if processes > 1:
        settings |= {"process": rank, "processes": processes}
    if path is not None:
        path, settings = f"{path}.{rank}" if rank else path, settings | reader.identity() | reader.fingerprint()
    options: dict[str, Any] = dict(total=0, smoothing=0, disable=not run.progress or rank > 0)
    with Journal(path, settings) as journal, tqdm(desc=task.name, bar_format=BAR, **options) as bar:
        failure = read_all(task, run, journal, bar, rank)
    known = depends_on | labels | facts(reader, run) | cache_facts(journal.done)
    outcome = result_of(task, scores_of(journal.done), known, failure)
    if failure is None and not outcome.scores:  # raises ValueError: all inputs are too long
        reasons = [*dict.fromkeys(outcome.missing.values())]
        kind = ValueError if all(reason.startswith("beyond") for reason in reasons) else UnsupportedInput
        failure = kind(f"nothing could be measured: {'; '.join(reasons)}.")
    if failure is None:
        return outcome
    failure.result = outcome if outcome.scores or outcome.missing else None  # ty: ignore[missing-attribute]
    said = outcome.summary() if outcome.scores else "nothing had been measured"
    failure.add_note(f"What had been measured is in this error's .result: {said}")
    raise failure


def read_all(task: Task, run: Run, journal: Journal, bar: tqdm, rank: int) -> BaseException | None:
    """Measure all trials of a task. If an exception ended the run early, return it.

    Each score is immediately written to the journal. At the end, `journal.done` contains the scores of all processes.
    """
    reader = task.subject.reader
    processes = task.subject.processes
    failure = None
    typical = first_ids(task.requests(min(task.trials({}), key=lambda trial: trial.tokens).key)[0])
    try:
        if processes > 1:
            journal.done, _ = distributed.exchange(journal.done, None)
        with reader.reading(typical[: reader.position_limit], run.tokens_per_pass):
            while trials := [trial for trial in task.trials(scores_of(journal.done)) if trial.key not in journal.done]:
                # a different process gets the most expensive trial in each round
                place = (rank + len(journal.done) // processes) % processes
                costs = {trial.key: trial.inputs * trial.tokens for trial in trials}
                mine = sorted(costs, key=lambda key: -costs[key])[place::processes]
                bar.total = (bar.total or 0) + sum(costs[key] for key in mine)
                try:
                    for group in batches(task, [trial for trial in trials if trial.key in mine]):
                        bar.set_postfix_str(f"{group[0].tokens:,} tokens")
                        for trial, score in zip(group, measure(task, group)):
                            size = reader.cache_size() if reader.cache else None
                            journal.append(trial.key, {"score": score, "cache": size} if size else score)
                            bar.update(costs[trial.key])
                except Exception as error:
                    failure = error
                if processes > 1:
                    journal.done, failure = distributed.exchange(journal.done, failure)
                if failure is not None:
                    return failure
    except BaseException as error:
        failure = error
    return failure


def scores_of(entries: dict[Key, Any]) -> dict[Key, Any]:
    """Convert the entries of a journal to scores. An entry may contain the size of a cache; see `cache_facts`.

    A score {"missing": reason} becomes a `Missing`.
    """
    scores = {key: entry["score"] if is_sized(entry) else entry for key, entry in entries.items()}
    return {
        key: Missing(score["missing"]) if isinstance(score, dict) and score.keys() == {"missing"} else score
        for key, score in scores.items()
    }


def is_sized(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() == {"score", "cache"}


def cache_facts(entries: dict[Key, Any]) -> dict[str, int]:
    """Return the number of tokens and bytes of the largest cache in a journal as settings. Without one, return {}."""
    return dict(
        zip(("cache_tokens", "cache_bytes"), max([e["cache"] for e in entries.values() if is_sized(e)], default=()))
    )


def facts(reader: Reader, run: Run) -> dict[str, Any]:
    """Return settings that only change the result by rounding errors: device, versions, ..."""
    tokens_per_pass = run.tokens_per_pass
    if tokens_per_pass is None and reader.device is not None:
        tokens_per_pass = TOKENS_PER_PASS["cpu" if reader.device == "cpu" else "accelerator"]
    how: dict[str, Any] = {
        "device": reader.device,
        "tokens_per_pass": tokens_per_pass,
        "versions": VERSIONS,
        **reader.identity(),
    }
    how |= {"notes": [*reader.notes]} if reader.notes else {}
    return how | size_and_hardware(getattr(reader, "model", None), reader.device)


def result_of(
    task: Task, scores: dict[Key, Any], settings: dict[str, Any], failure: BaseException | None
) -> TaskResult:
    """Create the result from the scores of the task's trials. A journal may contain other scores. We ignore them."""
    trials = [trial.key for trial in task.trials(scores)]
    measured = {key: scores[key] for key in trials if key in scores and not isinstance(scores[key], Missing)}
    missing = {key: str(scores[key]) for key in trials if isinstance(scores.get(key), Missing)}
    if failure is not None:
        missing |= dict.fromkeys([key for key in trials if key not in scores], "interrupted")
        cause = "Ctrl-C" if isinstance(failure, KeyboardInterrupt) else str(failure) or type(failure).__name__
        settings = settings | {"interrupted": cause.splitlines()[0][:200]}
    measured, missing = task.summarize(measured, missing)
    return task.result(measured, settings, missing)


def batches(task: Task, trials: Sequence[Trial]) -> Iterator[list[Trial]]:
    """Divide trials into groups to measure together: consecutive trials of one length that fit into a batch."""
    limits: dict[int, int] = {}
    group: list[Trial] = []
    for trial in trials:
        if trial.tokens not in limits:
            limits[trial.tokens] = task.subject.reader.questions_per_batch(trial.tokens) if task.asks else 1
        same = not group or group[0].tokens == trial.tokens
        if not same or sum(other.inputs for other in group) + trial.inputs > limits[trial.tokens]:
            if group:
                yield group
            group = []
        group.append(trial)
    if group:
        yield group


def measure(task: Task, trials: Sequence[Trial]) -> list[Any]:
    """Return the score of each trial. Questions of all trials are answered together.

    If the model does not support the inputs of a trial, its score is `{"missing": reason}`.
    """
    subject, limit = task.subject, task.subject.reader.position_limit
    if limit is not None and trials[0].tokens > limit:
        return [{"missing": f"beyond the model's {limit} positions"}] * len(trials)
    requests = [task.requests(trial.key) for trial in trials]
    try:
        responses = iter(answers(subject.reader, [*chain(*requests)], subject.tokenizer))
    except (UnsupportedInput, NotFinite) as error:
        if len(trials) > 1:  # find out which of them
            return [score for trial in trials for score in measure(task, [trial])]
        if isinstance(error, UnsupportedInput):
            return [{"missing": str(error)}]
        raise ValueError(f"{task.name}, trial {trials[0].key}: {error} {OVERFLOW}") from None
    return [task.score(trial.key, [*islice(responses, len(part))]) for trial, part in zip(trials, requests)]


class NotFinite(ValueError):
    """The logits at a position are NaN or infinite."""


def answers(reader: Reader, requests: Sequence[Request], tokenizer: Any) -> list[Any]:
    """Return the model's responses to requests. Questions with prompts of one length are answered together."""
    found: dict[int, Any] = {}
    groups: dict[tuple[int, bool], list[int]] = {}  # indices of questions
    for i, request in enumerate(requests):
        if isinstance(request, Ask) and reader.batches_questions:
            groups.setdefault((len(request.prompt), request.thinks), []).append(i)
        else:
            found[i] = answer(reader, request, tokenizer)
    for (_, thinks), indices in groups.items():
        asked: list[Any] = [requests[i] for i in indices]
        prompts, right = np.stack([request.prompt for request in asked]), [request.answer for request in asked]
        responses = cast(Any, reader).ask(prompts, right, [request.reply for request in asked], thinks, tokenizer)
        for i, request, (log_probs, best, reply) in zip(indices, asked, responses):
            check_finite(log_probs, len(request.prompt), finite=False)
            found[i] = Answered(total(log_probs), bool((best == request.answer).all()), reply)
    return [found[i] for i in range(len(requests))]


def answer(reader: Reader, request: Request, tokenizer: Any) -> Any:
    """Return the model's response to a request; see `task.Predict`, `task.Score` and `task.Ask`."""
    if isinstance(request, Predict):
        predictions, positions = reader.predict(*request), request.positions
        bad = np.argwhere(predictions == -1)
        if len(bad):
            raise NotFinite(f"input {bad[0][0]}: the logits at position {positions[bad[0][1]]} are NaN.")
        return predictions == request.rows[:, positions.start + 1 : positions.stop + 1]
    if isinstance(request, Score):
        return score(reader, request.ids, request.first)[0]
    ids = np.concatenate([request.prompt, request.answer])
    context = {"context": request.context} if reader.cache else {}
    log_probs, best = score(reader, ids, len(request.prompt), finite=False, **context)
    exact = bool((best == request.answer).all())
    reply = None
    if request.reply:
        say = partial(reader.reply, request.prompt, request.reply, tokenizer, **context)
        reply = tokenizer.decode(request.answer) if exact and not request.thinks else say()
    return Answered(total(log_probs), exact, reply)


def total(log_probs: np.ndarray) -> float:
    """Return the sum of log-probabilities, at least -1e9, because JSON does not support infinity."""
    return float(max(log_probs.sum(), -1e9))


def score(
    reader: Reader, ids: np.ndarray, first: int, finite: bool = True, **context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities of ids[first:], and the most likely ids at their positions.

    Raises:
        NotFinite: a log-probability is NaN. If `finite` is True, infinite values also raise this error.
    """
    log_probs, best = reader.score(ids[:-1], ids[first:], range(first - 1, len(ids) - 1), **context)
    check_finite(log_probs, first, finite)
    return log_probs, best


def check_finite(log_probs: np.ndarray, first: int, finite: bool) -> None:
    """Raise NotFinite if a log-probability of the tokens from `first` on is NaN, or infinite if `finite` is True."""
    bad = np.flatnonzero(~np.isfinite(log_probs) if finite else np.isnan(log_probs))
    if len(bad):
        raise NotFinite(
            f"the log-probability of token {first + bad[0]} is {log_probs[bad[0]]}: the logits at position "
            f"{first + bad[0] - 1} are not finite."
        )


def first_ids(request: Request) -> np.ndarray:
    """Return the first input of a request, to pass as `trial` to `Reader.reading`."""
    if isinstance(request, Predict):
        return request.rows[0]
    return request.ids[:-1] if isinstance(request, Score) else request.prompt
