"""Measure the forgetting curve of a model, in one process or several.

protocol.py says what a model reads, run/reader.py how it predicts; this file counts the right predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checks import (
    check_kind,
    check_lengths,
    check_token_ids,
    tokenizer_name,
    whole_number,
)
from ..run.distributed import Run, Worker, exchange, labels, run_distributed
from ..run.engine import Unreadable
from ..run.journal import content_hash
from ..run.reader import Reader, check_positions, reader_for, special_ids
from ..run.scoring import OVERFLOW
from .adaptive import BUDGET, locate
from .protocol import Sample, input_tokens, longest_length, model_inputs, order_samples, random_samples, scored_logits
from .result import CurvePoint, ForgettingCurve


DATA_TYPES = ("order", "random")
PROTOCOLS = ("reference", "adaptive")


class PositionLimitError(ValueError):
    """The model has no position for the input at a length.

    Attributes:
        limit: positions the model has, in tokens.
        longest_length: the longest length that can be measured, (limit - 3) // 2.
        result: the `ForgettingCurve` of the lengths up to there.
    """

    def __init__(self, length: int, limit: int):
        self.limit, self.longest_length = limit, longest_length(limit)
        self.result: ForgettingCurve | None = None
        super().__init__(
            f"length {length} needs an input of {input_tokens(length)} tokens, and the model's position table ends at "
            f"{limit}. The longest measurable length is {self.longest_length}; the curve up to there has been measured."
        )


def forgetting_curve(
    model: nn.Module | Reader,
    tokens: Sequence[int] | np.ndarray | None,
    *,
    lengths: Sequence[int],
    repeats: int = 10,
    seed: int = 0,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    data_type: str = "order",
    irrelevant_tokens: Sequence[int] | np.ndarray | None = None,
    irrelevant_name: str | None = None,
    id_range: tuple[int, int] | None = None,
    protocol: str = "reference",
    confidence: float = 0.95,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    corpus_name: str | None = None,
    train_length: int | None = None,
    run: Run | None = None,
) -> ForgettingCurve:
    """Measure how far a causal language model can copy what it has read (Liu et al. 2024, section 3).

    At each length n the model reads `[bos] S [bos] S [eos]` and `[bos] I [bos] S [eos]`, 2n + 3 tokens each, `repeats`
    times with another target S, and its greedy predictions of the second half of the last S are counted. The model
    runs in its own dtype, on its own device, in eval mode; its training flags are restored.

    Args:
        model: a causal language model: `forward(input_ids)` returns logits (or an output with `.logits`), (B, T, V).
            Or a reader, such as `ServedModel`.
        tokens: the corpus, a flat sequence, array or tensor of ids, encoded without special tokens. At least three
            times the longest length. Not used, and may be None, for random data.
        lengths: target lengths in tokens, strictly ascending; see `linear_lengths` and `log_lengths`.
        repeats: targets per length.
        seed: of Python's `random.Random`, which draws where the targets start.
        bos_token_id, eos_token_id: default to those of the model's config, then of its generation config. If the BOS
            is missing, the EOS is used. If the EOS is missing, the BOS is used; it is never scored.
        data_type: "order": S is a stretch of the corpus. "random": S and I are uniform random ids.
        irrelevant_tokens: I is the end of these ids; by default, the end of the corpus.
        irrelevant_name: name of their text, for the settings.
        id_range: lowest and highest id of random data, both included. Default (10, vocabulary size - 1), as the first
            ids are special tokens in many vocabularies. Never drawn are the BOS, the EOS and what `undrawn_ids` of the
            tokenizer names; without a tokenizer nothing else is known, so that chat markers and untrained rows may be
            drawn.
        protocol: "reference": every length has its own targets, as the paper's program draws them. "adaptive": the
            same inputs, but only at those of the `lengths`, and with only so many of the `repeats`, that the fine and
            the coarse length depend on; give a fine grid. See adaptive.py.
        confidence: at which the adaptive protocol is satisfied, between 0 and 1.
        tokenizer: name it, or give it, to have its name in the settings. Random data take its special ids from it.
        corpus_name, train_length: name of the corpus and context length of the training, in tokens, for the settings.
        run: journal, memory budget and progress bar; see `Run`, also for several processes and interruptions.

    Returns:
        `ForgettingCurve` with one point per length. A length for which memory is short even in the smallest passes has
        no point, but is in `not_measured`, with the reason; so is one beyond the model's positions, and one that was
        not reached before an exception ended the run ("interrupted").

    Raises:
        ValueError: an argument does not fit; raised before the model runs. Or the model returns NaN. Or the journal is
            of another run.
        PositionLimitError: the model's position table is too short for some length. Raised after the others have been
            measured.
    """
    reader = reader_for(model)
    lengths, repeats, seed = check_lengths(lengths), whole_number("repeats", repeats, 1), whole_number("seed", seed)
    check_kind(str | None, irrelevant_name=irrelevant_name)
    check_choices(data_type, protocol, confidence)
    bos, eos = special_ids(reader, bos_token_id, eos_token_id)
    settings = reader.settings() | {
        "tokenizer": None if tokenizer is None else tokenizer_name(tokenizer, or_name=True),
        "protocol": protocol,
        "data_type": data_type,
        "seed": seed,
        "repeats": repeats,
        "lengths": lengths,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    names = labels(corpus_name, train_length) | ({"irrelevant_text": irrelevant_name} if irrelevant_name else {})
    if protocol == "adaptive":
        settings["confidence"] = confidence
    if data_type == "order":
        corpus, irrelevant, data = check_corpus(reader, tokens, irrelevant_tokens, id_range)
        targets = order_samples(corpus, lengths, repeats, seed, irrelevant)
        names |= token_size(tokenizer, corpus) if hasattr(tokenizer, "decode") else {}
    else:
        id_range, skip, data = check_id_range(reader, id_range, irrelevant_tokens, tokenizer)
        targets = random_samples(id_range, lengths, repeats, seed, skip=skip | {bos, eos})
    settings |= data
    limit = reader.position_limit
    if limit is None:
        check_positions(reader, input_tokens(lengths[-1]), f"length {lengths[-1]}")
    fitting = lengths if limit is None else [length for length in lengths if input_tokens(length) <= limit]

    measurement = Measurement(reader, targets, fitting, repeats, bos, eos, settings | names, confidence)
    curve = run_distributed(
        reader,
        "forgetting curve",
        measurement.run_adaptive if protocol == "adaptive" else measurement.run,
        measurement.result,
        depends_on=settings,
        trial=model_inputs("copy", targets[lengths[0]][:1], bos, eos)[0],
        run=run,
    )
    if limit is not None and fitting != lengths:
        error = PositionLimitError(lengths[len(fitting)], limit)
        error.result = curve
        raise error
    return curve


@dataclass
class Measurement:
    """A curve while it is measured.

    A task is `(length, first, stop)`: both kinds of input at one length, repeats first to stop - 1. Its result is
    `{"copy": counts, "LM": counts}` of right predictions, one per repeat, or `{"not_measured": reason}`.

    Attributes:
        samples: by length, one per repeat.
        lengths: those that the model has positions for.
        settings: of the result.
        complete: whether the lengths without a point were left out on purpose.
    """

    reader: Reader
    samples: dict[int, list[Sample]]
    lengths: list[int]
    repeats: int
    bos: int
    eos: int
    settings: dict[str, Any]
    confidence: float
    complete: bool = False

    def run(self, worker: Worker) -> None:
        """Measure all repeats of the lengths that this process shares with others."""
        inputs = 2 * self.repeats
        costs = {(n, 0, self.repeats): inputs * self.reader.cost(input_tokens(n)) for n in self.lengths}
        worker.measure(costs, self.count, task_name)

    def run_adaptive(self, worker: Worker) -> None:
        """Measure where `locate` needs it; each process measures some of the repeats of every point.

        If memory is short for a length, nothing above it is measured.
        """

        def measure(length: int, first: int, stop: int) -> CurvePoint:
            begin, end = (first + (stop - first) * (worker.rank + i) // worker.processes for i in (0, 1))
            entries, failure = worker.journal.done, None
            try:
                if begin < end:
                    cost = 2 * (end - begin) * self.reader.cost(input_tokens(length))
                    worker.measure_task((length, begin, end), cost, self.count, task_name)
            except Exception as error:
                failure = error
            if worker.processes > 1:
                entries, failure = exchange(entries, failure, worker.processes)
            if failure is not None:
                raise failure
            points, reasons = self.points({task: entry for task, entry in entries.items() if task[0] == length})
            missing.update(reasons)
            if missing:
                raise Unreadable(missing[length])
            return points[0].first(stop)

        lengths, missing = self.lengths, {}
        worker.bar.reset(BUDGET * self.reader.cost(input_tokens(lengths[-1])) if lengths else 0)
        while lengths:
            try:
                locate(lengths, measure, repeats=self.repeats, confidence=self.confidence)
                break
            except Unreadable:
                lengths = [length for length in lengths if length < min(missing)]
                missing.clear()
        self.complete = True  # the two lengths of the curve do not depend on the others

    def count(self, task: tuple[int, int, int]) -> dict[str, Any]:
        """Count the right predictions of a task.

        Raises:
            ValueError: a logit is NaN.
        """
        length, first, stop = task
        samples, scored, counts = self.samples[length][first:stop], scored_logits(length), {}
        for kind in ("copy", "LM"):
            inputs = model_inputs(kind, samples, self.bos, self.eos)
            try:
                predictions = self.reader.predict(inputs, 1 + length, scored)
            except Unreadable as error:
                return {"not_measured": str(error)}
            bad = np.argwhere(predictions == -1)
            if len(bad):
                raise ValueError(
                    f"length {length}, repeat {first + bad[0][0]}, {kind} input: the logits at position "
                    f"{scored[bad[0][1]]} of {inputs.shape[1]} are NaN, so there is no prediction to count. {OVERFLOW}"
                )
            right = predictions == inputs[:, scored.start + 1 : scored.stop + 1]
            counts[kind] = right.sum(1).tolist()
        return counts

    def result(self, entries: dict[tuple[int, int, int], dict[str, Any]]) -> ForgettingCurve:
        """Make the curve of the tasks that were measured, by one or several processes."""
        points, missing = self.points(entries)
        beyond = f"beyond the model's {self.reader.position_limit} positions"
        missing |= dict.fromkeys(self.samples.keys() - set(self.lengths), beyond)
        if not self.complete:
            missing |= dict.fromkeys(self.samples.keys() - {p.length for p in points} - missing.keys(), "interrupted")
        return ForgettingCurve(points, self.settings, dict(sorted(missing.items())))

    def points(self, entries: dict[tuple[int, int, int], dict[str, Any]]) -> tuple[list[CurvePoint], dict[int, str]]:
        """Join the tasks of each length to a point, and say why lengths have none."""
        missing = {length: entry["not_measured"] for (length, *_), entry in entries.items() if "not_measured" in entry}
        points = []
        for length in sorted({length for length, *_ in entries} - missing.keys()):
            tasks = sorted(task for task in entries if task[0] == length)
            copy, lm = ([count for task in tasks for count in entries[task][kind]] for kind in ("copy", "LM"))
            samples = [sample for _, first, stop in tasks for sample in self.samples[length][first:stop]]
            begins = [sample.begin for sample in samples if sample.begin is not None]
            points.append(CurvePoint(length, copy, lm, begins or None))
        return points, missing


def task_name(task: tuple[int, int, int]) -> str:
    """Name a task for the progress bar."""
    return f"length {task[0]:,}, {input_tokens(task[0]):,} tokens"


def check_choices(data_type: str, protocol: str, confidence: float) -> None:
    """Raise ValueError for a misspelt choice, or a confidence that is not between 0 and 1."""
    for name, value, choices in (("data_type", data_type, DATA_TYPES), ("protocol", protocol, PROTOCOLS)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
    if not isinstance(confidence, float) or not 0 < confidence < 1:
        raise ValueError(f"confidence must be a number between 0 and 1, such as 0.95, got {confidence!r}.")


def check_corpus(reader: Reader, tokens, irrelevant_tokens, id_range):
    """Return corpus and irrelevant text (or None) as arrays of ids, and their settings."""
    if id_range is not None:
        raise ValueError('id_range is for data_type="random"; data_type="order" takes its ids from tokens.')
    if tokens is None:
        raise ValueError(
            'tokens is None, and data_type="order" needs the ids of a text. For random ids: data_type="random".'
        )
    corpus = check_token_ids(tokens, "tokens", reader.vocab_size)
    data = {"corpus_tokens": len(corpus), "corpus_sha256": content_hash(corpus)}
    if irrelevant_tokens is None:
        return corpus, None, data
    irrelevant = check_token_ids(irrelevant_tokens, "irrelevant_tokens", reader.vocab_size)
    data |= {"irrelevant_tokens": len(irrelevant), "irrelevant_sha256": content_hash(irrelevant)}
    return corpus, irrelevant, data


def token_size(tokenizer, corpus) -> dict[str, float]:
    """Return the mean bytes of a token of the corpus in UTF-8, as settings."""
    sample = corpus[:10_000].tolist()
    text = tokenizer.decode(sample, clean_up_tokenization_spaces=False)
    return {"bytes_per_token": round(len(text.encode()) / len(sample), 2)}


def check_id_range(reader: Reader, id_range, irrelevant_tokens, tokenizer):
    """Return lowest and highest random id, the ids between that are never drawn, and their settings."""
    if irrelevant_tokens is not None:
        raise ValueError('data_type="random" draws irrelevant ids at random: drop irrelevant_tokens.')
    if id_range is None and reader.vocab_size == math.inf:
        raise ValueError(f"the size of the vocabulary of {reader!r} is unknown: give it vocab_size, or give id_range.")
    try:
        default: Any = (10, reader.vocab_size - 1)
        low, high = (whole_number("id_range", i) for i in id_range or default)
    except (TypeError, ValueError):
        raise ValueError(f"id_range must be two ids, the lowest and the highest, got {id_range!r}.") from None
    if not 0 <= low <= high < reader.vocab_size:
        raise ValueError(f"id_range=({low}, {high}) must lie within the model's ids, 0 .. {reader.vocab_size - 1}.")
    skip = undrawn_ids(tokenizer, low, high) if hasattr(tokenizer, "get_vocab") else frozenset()
    data: dict[str, Any] = {"id_range": [low, high]}
    if skip:
        data |= {"skipped_ids": len(skip), "skipped_sha256": content_hash(sorted(skip))}
    return (low, high), skip, data


def undrawn_ids(tokenizer, low: int, high: int) -> frozenset[int]:
    """Return the ids from `low` to `high` that text does not have: special and added tokens, rows without a token."""
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return frozenset(range(low, high + 1)) - (set(tokenizer.get_vocab().values()) - added)
