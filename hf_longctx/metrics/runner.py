"""Runs a model over the inputs of a metric. The metrics themselves know no model; only this file does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from .curve import (
    DATA_TYPES,
    CurvePoint,
    ForgettingCurve,
    Sample,
    check_ids,
    check_lengths,
    input_tokens,
    longest_length,
    model_input,
    order_samples,
    random_samples,
    scored_logits,
)
from .engine import Engine, evaluating, first_parameter, text_config


class PositionLimitError(ValueError):
    """The model has no position for an input this long.

    Attributes:
        limit: positions the model has, in tokens.
        longest_length: the longest length that can be measured, (limit - 3) // 2.
        curve: the `ForgettingCurve` of the lengths up to there.
    """

    def __init__(self, message: str, limit: int):
        super().__init__(message)
        self.limit = limit
        self.longest_length = longest_length(limit)


def forgetting_curve(
    model: nn.Module,
    tokens: Sequence[int] | None,
    *,
    lengths: Sequence[int],
    repeats: int = 10,
    seed: int = 0,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    data_type: str = "order",
    irrelevant_tokens: Sequence[int] | None = None,
    id_range: tuple[int, int] | None = None,
    progress: bool = False,
) -> ForgettingCurve:
    """Measure how far a causal language model can copy what it has read (Liu et al. 2024, section 3).

    At each length n the model reads `[bos] S [bos] S [eos]` and `[bos] I [bos] S [eos]`, 2n + 3 tokens each, `repeats`
    times with another target S, and its greedy predictions of the second half of the last S are counted. The model
    runs in its own dtype, on its own device, in eval mode; its training flags are restored.

    Args:
        model: a causal language model: `forward(input_ids)` returns logits (or an output with `.logits`), (B, T, V).
        tokens: the corpus, a flat sequence, array or tensor of ids, encoded without special tokens. At least three
            times the longest length. Not used, and may be None, for random data.
        lengths: target lengths in tokens, strictly ascending; see `linear_lengths` and `log_lengths`.
        repeats: targets per length.
        seed: of Python's `random.Random`, which draws where the targets start.
        bos_token_id, eos_token_id: default to those of the model's config, then of its generation config. Without a
            BOS the EOS takes its place. Without an EOS the BOS does: nothing that is scored comes after it.
        data_type: "order": S is a stretch of the corpus. "random": S and I are uniform random ids.
        irrelevant_tokens: I is the end of these ids; by default, the end of the corpus.
        id_range: lowest and highest id of random data, both included. Default (10, vocabulary size - 1), as the first
            ids are special tokens in many vocabularies. The BOS and EOS are never drawn.
        progress: show a progress bar, in tokens.

    Returns:
        `ForgettingCurve` with one point per length.

    Raises:
        ValueError: an argument does not fit; raised before the model runs. Or the model returns NaN.
        PositionLimitError: the model's position table is too short for some length. Raised after the others have been
            measured.

    Any exception that leaves this function once measuring has begun, also out-of-memory and KeyboardInterrupt, has an
    attribute `curve` with the lengths measured until then.
    """
    lengths = check_lengths(lengths)
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}. The paper uses 10.")
    vocab_size = vocabulary_size(model)
    bos, eos = special_ids(model, bos_token_id, eos_token_id, vocab_size)
    settings = {
        "model": getattr(model.config, "_name_or_path", None) or type(model).__name__,
        "dtype": str(first_parameter(model).dtype).removeprefix("torch."),
        "data_type": data_type,
        "seed": seed,
        "repeats": repeats,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }

    if data_type == "order":
        if id_range is not None:
            raise ValueError('id_range is for data_type="random"; data_type="order" takes its ids from tokens.')
        corpus = check_ids(_on_cpu(tokens), "tokens", vocab_size)
        settings["corpus_tokens"] = len(corpus)
        if irrelevant_tokens is not None:
            irrelevant_tokens = check_ids(_on_cpu(irrelevant_tokens), "irrelevant_tokens", vocab_size)
            settings["irrelevant_tokens"] = len(irrelevant_tokens)
        samples = order_samples(corpus, lengths, repeats, seed, irrelevant_tokens)
    elif data_type == "random":
        if irrelevant_tokens is not None:
            raise ValueError('data_type="random" draws its own irrelevant ids: drop irrelevant_tokens.')
        low, high = id_range or (10, vocab_size - 1)
        if not 0 <= low <= high < vocab_size:
            raise ValueError(f"id_range=({low}, {high}) must lie within the model's ids, 0 .. {vocab_size - 1}.")
        settings["id_range"] = [low, high]
        samples = random_samples((low, high), lengths, repeats, seed, skip=frozenset({bos, eos}))
    else:
        raise ValueError(f"data_type must be one of {DATA_TYPES}, got {data_type!r}.")

    limit = position_limit(model)
    if limit is None:
        warn_beyond_claim(model, lengths)

    engine, points = None, []
    bar = tqdm(total=2 * repeats * sum(map(input_tokens, lengths)), unit="tok", unit_scale=True, disable=not progress)
    try:
        with bar, evaluating(model):
            for length, draws in zip(lengths, samples):
                if limit is not None and input_tokens(length) > limit:
                    raise PositionLimitError(
                        f"length {length} needs an input of {input_tokens(length)} tokens, and the model's position "
                        f"table ends at {limit}. The longest measurable length is {longest_length(limit)}; the "
                        "curve up to there is this error's .curve.",
                        limit,
                    )
                engine = engine or Engine(model, model_input(draws[0].target, draws[0].target, bos, eos))
                points.append(measure_point(engine, length, draws, bos, eos, bar))
    except BaseException as error:
        error.curve = ForgettingCurve(points, settings)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(
                f"{len(points)} of {len(lengths)} lengths had been measured: they are in this error's .curve."
            )
        raise
    return ForgettingCurve(points, settings)


def measure_point(
    engine: Engine, length: int, samples: Sequence[Sample], bos: int, eos: int, bar: tqdm | None = None
) -> CurvePoint:
    """Count the right predictions of every sample at one length."""
    scored = scored_logits(length)
    correct = {}
    for kind, prefixes in (("copy", [s.target for s in samples]), ("LM", [s.irrelevant for s in samples])):
        inputs = np.stack([model_input(prefix, s.target, bos, eos) for prefix, s in zip(prefixes, samples)])
        predicted = engine.predict(inputs, 1 + length, scored)
        check_no_nan(predicted, length, kind, scored, inputs.shape[1])
        correct[kind] = (predicted == inputs[:, scored.start + 1 : scored.stop + 1]).sum(1).tolist()
        if bar is not None:
            bar.update(inputs.size)
    begins = None if samples[0].begin is None else [sample.begin for sample in samples]
    return CurvePoint(length, correct["copy"], correct["LM"], begins)


def check_no_nan(predicted: np.ndarray, length: int, kind: str, positions: range, tokens: int) -> None:
    """Raise ValueError if a prediction is -1, naming the first by repeat and position."""
    bad = np.argwhere(predicted == -1)
    if len(bad):
        repeat, index = bad[0]
        raise ValueError(
            f"length {length}, repeat {repeat}, {kind} input: the logits at position {positions[index]} of {tokens} are "
            "NaN, so there is no prediction to count. A common cause is float16 overflow: load the model in "
            "torch.bfloat16 or torch.float32."
        )


def vocabulary_size(model: nn.Module) -> int:
    """How many ids the model can embed."""
    with suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings().num_embeddings
    return text_config(model).vocab_size


def special_ids(model: nn.Module, bos: int | None, eos: int | None, vocab_size: int) -> tuple[int, int]:
    """BOS and EOS as given, or else as the model's configurations say, each standing in for the other if missing.

    Raises:
        ValueError: there is neither, or one is not in the vocabulary.
    """

    def configured(name):
        for config in (text_config(model), getattr(model, "generation_config", None)):
            value = getattr(config, name, None)
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) else value  # chat models list several EOS ids

    bos = configured("bos_token_id") if bos is None else bos
    eos = configured("eos_token_id") if eos is None else eos
    if bos is None and eos is None:
        raise ValueError(
            "the model's configuration has neither a BOS nor an EOS token, and the protocol puts one before each "
            "text. Name one: bos_token_id=..., any id that separates documents in the training data."
        )
    bos, eos = (eos if bos is None else bos), (bos if eos is None else eos)
    for name, value in (("bos_token_id", bos), ("eos_token_id", eos)):
        if not 0 <= value < vocab_size:
            raise ValueError(f"{name} is {value}, but the model's vocabulary has {vocab_size} ids.")
    return bos, eos


POSITION = re.compile(r"(^|_)(wpe|pos|position|positions|positional)(_|$)")
NOT_OF_TEXT = re.compile(r"(^|[._])(rel|relative|rotary|vision|visual|image|audio|patch)([._]|$)")


def position_limit(model: nn.Module) -> int | None:
    """How many tokens fit into the model's table of absolute positions; None if it has no such table.

    Looks for the table itself, learned or fixed, because `max_position_embeddings` is the end of one in some models
    (GPT-2, OPT) and only a claim in others (rotary, ALiBi). A model that `reads_in_segments` uses the table for one
    segment at a time, so it limits no input.
    """
    if getattr(model, "reads_in_segments", False):
        return None

    def named(items):
        return (x for name, x in items if POSITION.search(name.rpartition(".")[2]) and not NOT_OF_TEXT.search(name))

    limits = []
    for table in named(model.named_modules()):
        if isinstance(table, nn.Embedding):
            # OPT and BART keep their first rows free, as .offset says; RoBERTa starts after its padding row
            start = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
            limits.append(table.num_embeddings - start)
    for table in named((*model.named_parameters(), *model.named_buffers())):
        if table.is_floating_point() and table.ndim > 1:  # (..., positions, width), as in GPT-J and CTRL
            limits.append(table.shape[-2])
    return min(limits, default=None)


def warn_beyond_claim(model: nn.Module, lengths: Sequence[int]) -> None:
    """Warn once if inputs get longer than the positions a model without a position table claims to support."""
    claim = getattr(text_config(model), "max_position_embeddings", None)
    if claim is not None and input_tokens(lengths[-1]) > claim:
        warnings.warn(
            f"lengths above {longest_length(claim)} need more than the {claim} positions (max_position_embeddings) "
            "that the model claims to support. They are measured all the same.",
            stacklevel=3,
        )


def _on_cpu(ids):
    return ids.cpu() if isinstance(ids, torch.Tensor) else ids
