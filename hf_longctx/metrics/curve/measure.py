"""The forgetting curve of a model: checks the arguments, then measures, in one process or several.

What is measured is in protocol.py, how a model predicts in run/reader.py; here they meet.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from torch import nn

from ..checks import check_lengths, check_token_ids, positive_int
from ..run.distributed import Run, exchange, labels, run_distributed
from ..run.journal import content_hash
from ..run.reader import Reader, as_array, check_positions, reader_for, special_ids
from .adaptive import BUDGET, locate
from .counts import Measurement, sample_input, tally
from .protocol import (
    input_tokens,
    longest_length,
    nested_order_samples,
    nested_random_samples,
    order_samples,
    random_samples,
)
from .result import ForgettingCurve


DATA_TYPES = ("order", "random")


class PositionLimitError(ValueError):
    """The model has no position for the input at a length.

    Attributes:
        limit: positions the model has, in tokens.
        longest_length: the longest length that can be measured, (limit - 3) // 2.
        result: the `ForgettingCurve` of the lengths up to there.
    """

    def __init__(self, length: int, limit: int):
        self.limit, self.longest_length = limit, longest_length(limit)
        super().__init__(
            f"length {length} needs an input of {input_tokens(length)} tokens, and the model's position table ends at "
            f"{limit}. The longest measurable length is {self.longest_length}; the curve up to there has been measured."
        )


def forgetting_curve(
    model: nn.Module | Reader,
    tokens: Sequence[int] | None,
    *,
    lengths: Sequence[int],
    repeats: int = 10,
    seed: int = 0,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    data_type: str = "order",
    irrelevant_tokens: Sequence[int] | None = None,
    irrelevant_name: str | None = None,
    id_range: tuple[int, int] | None = None,
    protocol: str = "reference",
    confidence: float = 0.95,
    tokenizer=None,
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
        protocol: "reference": every length has its own targets, as the paper's program draws them. "nested": targets
            of all lengths begin alike, and so do their irrelevant texts, so that less has to be read: another estimate
            of the same curve, whose points are correlated. "adaptive": the inputs of "reference", but only at those of
            the `lengths`, and with only so many of the `repeats`, that the fine and the coarse length depend on; give
            a fine grid. See adaptive.py.
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
    lengths = check_lengths(lengths)
    repeats, seed = positive_int("repeats", repeats), positive_int("seed", seed, -math.inf)
    check_choices(data_type, protocol, confidence)
    bos, eos = special_ids(reader, bos_token_id, eos_token_id)
    draw_order, draw_random, measure = PROTOCOLS[protocol]
    settings = reader.settings() | {
        "tokenizer": getattr(tokenizer, "name_or_path", tokenizer),
        "protocol": protocol,
        "data_type": data_type,
        "seed": seed,
        "repeats": repeats,
        "lengths": lengths,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    if protocol == "adaptive":
        settings["confidence"] = confidence
    if data_type == "order":
        corpus, irrelevant, data = check_corpus(reader, tokens, irrelevant_tokens, id_range)
        samples = draw_order(corpus, lengths, repeats, seed, irrelevant)
    else:
        id_range, skip, data = check_id_range(reader, id_range, irrelevant_tokens, tokenizer)
        samples = draw_random(id_range, lengths, repeats, seed, skip=skip | {bos, eos})
    samples = dict(zip(lengths, samples))
    settings |= data
    limit = reader.position_limit
    if limit is None:
        check_positions(reader, input_tokens(lengths[-1]), f"length {lengths[-1]}")
    fitting = [length for length in lengths if limit is None or input_tokens(length) <= limit]

    needed = set(fitting)

    def work(worker):
        measure(Measurement(reader, samples, bos, eos, worker), fitting, repeats, confidence)
        if protocol == "adaptive":
            needed.clear()  # what it left out, its two lengths do not depend on

    def result(entries):
        points, missing = tally(entries, samples)
        missing |= {length: f"beyond the model's {limit} positions" for length in lengths if length not in fitting}
        missing |= dict.fromkeys(needed - {p.length for p in points} - missing.keys(), "interrupted")
        return ForgettingCurve(points, settings | names, dict(sorted(missing.items())))

    names = labels(corpus_name, train_length) | ({"irrelevant_text": irrelevant_name} if irrelevant_name else {})
    names |= token_size(tokenizer, corpus) if data_type == "order" else {}
    trial = sample_input(samples[lengths[0]][0], "copy", bos, eos)
    curve = run_distributed(reader, "forgetting curve", work, result, depends_on=settings, trial=trial, run=run)
    if fitting != lengths:
        error = PositionLimitError(lengths[len(fitting)], limit)
        error.result = curve
        raise error
    return curve


# Protocols: each measures the share of one process ------------------------------------------------------------------


def measure_reference(work: Measurement, lengths: Sequence[int], repeats: int, confidence: float) -> None:
    """Processes share the lengths."""
    lengths = work.worker.tasks(lengths, work.cost)
    work.expect(2 * repeats * sum(map(work.cost, lengths)))
    for length in lengths:
        work.measure(length, 0, repeats)


def measure_nested(work: Measurement, lengths: Sequence[int], repeats: int, confidence: float) -> None:
    """Processes share the repeats."""
    shared_repeats = range(work.worker.rank, repeats, work.worker.processes)
    work.expect(2 * len(shared_repeats) * sum(map(work.cost, lengths)))
    if shared_repeats and lengths:
        work.measure_nested(lengths, shared_repeats)


def measure_adaptively(work: Measurement, lengths: Sequence[int], repeats: int, confidence: float) -> None:
    """Measure where `locate` needs it; each process measures some of the repeats of every point.

    If memory is short for a length, nothing above it is measured.
    """

    class TooLong(Exception):
        pass

    rank, processes = work.worker.rank, work.worker.processes

    def measure(length, first, stop):
        begin, end = (first + (stop - first) * i // processes for i in (rank, rank + 1))
        entries, failure = work.journal.done, None
        try:
            if begin < end:
                work.measure(length, begin, end)
        except Exception as error:
            failure = error
        if processes > 1:
            entries, failure = exchange(entries, failure, processes)
        if failure is not None:
            raise failure
        points, missing = tally({key: value for key, value in entries.items() if key[0] == length}, work.samples)
        if missing:
            raise TooLong(length)
        (point,) = points
        return point.first(stop)

    work.expect(BUDGET * work.cost(lengths[-1]) if lengths else 0)
    while lengths:
        try:
            locate(lengths, measure, repeats=repeats, confidence=confidence)
            break
        except TooLong as error:
            lengths = [length for length in lengths if length < error.args[0]]


# How samples are drawn from a corpus and from random ids, and how they are measured.
PROTOCOLS = {
    "reference": (order_samples, random_samples, measure_reference),
    "nested": (nested_order_samples, nested_random_samples, measure_nested),
    "adaptive": (order_samples, random_samples, measure_adaptively),
}


# Arguments ----------------------------------------------------------------------------------------------------------


def check_choices(data_type: str, protocol: str, confidence: float) -> None:
    for name, value, choices in (("data_type", data_type, DATA_TYPES), ("protocol", protocol, tuple(PROTOCOLS))):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
    if not isinstance(confidence, float) or not 0 < confidence < 1:
        raise ValueError(f"confidence must be a number between 0 and 1, such as 0.95, got {confidence!r}.")


def check_corpus(reader: Reader, tokens, irrelevant_tokens, id_range):
    """Corpus and irrelevant text (or None) as arrays of ids, and what the settings say about them."""
    if id_range is not None:
        raise ValueError('id_range is for data_type="random"; data_type="order" takes its ids from tokens.')
    if tokens is None:
        raise ValueError(
            'tokens is None, and data_type="order" needs the ids of a text. For random ids: data_type="random".'
        )
    corpus = check_token_ids(as_array(tokens), "tokens", reader.vocab_size)
    data = {"corpus_tokens": len(corpus), "corpus_sha256": content_hash(corpus)}
    if irrelevant_tokens is None:
        return corpus, None, data
    irrelevant = check_token_ids(as_array(irrelevant_tokens), "irrelevant_tokens", reader.vocab_size)
    data |= {"irrelevant_tokens": len(irrelevant), "irrelevant_sha256": content_hash(irrelevant)}
    return corpus, irrelevant, data


def token_size(tokenizer, corpus) -> dict[str, float]:
    """For the settings: mean bytes of a token of the corpus, in UTF-8; nothing if the tokenizer is unknown."""
    if not hasattr(tokenizer, "decode"):
        return {}
    sample = corpus[:10_000].tolist()
    text = tokenizer.decode(sample, clean_up_tokenization_spaces=False)
    return {"bytes_per_token": round(len(text.encode()) / len(sample), 2)}


def check_id_range(reader: Reader, id_range, irrelevant_tokens, tokenizer):
    """Lowest and highest random id, those between that are never drawn, and what the settings say about them."""
    if irrelevant_tokens is not None:
        raise ValueError('data_type="random" draws irrelevant ids at random: drop irrelevant_tokens.')
    if id_range is None and reader.vocab_size == math.inf:
        raise ValueError(f"the size of the vocabulary of {reader!r} is unknown: give it vocab_size, or give id_range.")
    try:
        low, high = map(operator.index, id_range or (10, reader.vocab_size - 1))
    except (TypeError, ValueError):
        raise ValueError(f"id_range must be two ids, the lowest and the highest, got {id_range!r}.") from None
    if not 0 <= low <= high < reader.vocab_size:
        raise ValueError(f"id_range=({low}, {high}) must lie within the model's ids, 0 .. {reader.vocab_size - 1}.")
    skip = undrawn_ids(tokenizer, low, high) if hasattr(tokenizer, "get_vocab") else frozenset()
    data = {"id_range": [low, high]}
    if skip:
        data |= {"skipped_ids": len(skip), "skipped_sha256": content_hash(sorted(skip))}
    return (low, high), skip, data


def undrawn_ids(tokenizer, low: int, high: int) -> frozenset[int]:
    """Ids from `low` to `high` that text does not have: special and added tokens, and rows without a token."""
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return frozenset(range(low, high + 1)) - (set(tokenizer.get_vocab().values()) - added)
