"""Requests of token ids to lm-eval's models: a text does not always encode back to the ids that it was decoded from.

A request type is a method of lm-eval's models. `add_request_types` adds two to those that have a tokenizer. A request
names a sample; the ids are made here, where the tokenizer is known, and are those of this package's own metrics.

A PyTorch model answers through its `LocalReader`. Others (vllm, completions endpoints) only tell the log-probability
of a few tokens after others, and whether they are all the likeliest: right tokens are counted by bisection, in 1 +
about 2 e log2(k/e) requests for e errors among k tokens, and losses come in blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import groupby, pairwise
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from lm_eval.api.model import TemplateLM, hash_args
from torch import nn
from tqdm import tqdm

from ..corpus import load_tokens
from ..metrics.checks import check_token_ids
from ..metrics.curve.measure import check_id_range
from ..metrics.curve.protocol import (
    input_tokens,
    model_inputs,
    order_samples,
    random_samples,
    scored_logits,
    scored_tokens,
)
from ..metrics.loss.result import window_starts
from ..metrics.run.reader import LocalReader, special_ids
from ..metrics.run.scoring import token_losses


class Asked(NamedTuple):
    """A model of lm-eval, and what this package needs to know of it.

    Attributes:
        reader: of the PyTorch model within it, None if there is none.
    """

    lm: Any
    reader: LocalReader | None
    bos: int
    eos: int
    vocab_size: float

    @classmethod
    def of(cls, lm: Any) -> Asked:
        tokenizer, model = lm.tokenizer, cast(Any, getattr(lm, "model", None))
        if not hasattr(tokenizer, "all_special_ids"):
            raise ValueError(
                f"this task sends token ids, and the model's tokenizer is {tokenizer!r}; give one of transformers: "
                "--model_args tokenizer_backend=huggingface,tokenizer=NAME"
            )
        local = isinstance(model, nn.Module) and getattr(lm, "mixed_precision_dtype", None) is None
        reader = LocalReader(model) if local else None
        known: Any = reader or SimpleNamespace(vocab_size=len(tokenizer), configured_id=lambda name: None)
        bos, eos = special_ids(known, tokenizer.bos_token_id, tokenizer.eos_token_id)
        return cls(lm, reader, bos, eos, known.vocab_size)

    def corpus(self, text: str | None, longest: int) -> np.ndarray:
        tokens = load_tokens(self.lm.tokenizer, text, at_least=max(1_000_000, 10 * longest)).tokens
        return check_token_ids(tokens, f"the text {text}", self.vocab_size)

    def check_room(self, tokens: int, what: str) -> None:
        """Raise ValueError where lm-eval would cut off the beginning of an input without a word."""
        if tokens > self.lm.max_length:
            raise ValueError(
                f"{what} needs {tokens} tokens, and the model takes {self.lm.max_length}. Measure less far, or give more: "
                "--model_args max_length=N"
            )

    def log_probs(self, spans: Iterable[tuple[list[int], int, int]]) -> list[tuple[float, bool]]:
        """Return for each (ids, a, b) the log-probability of ids[a:b] after ids[:a], and whether all are likeliest."""
        requests = [(None, ids[:a], ids[a:b]) for ids, a, b in spans]  # None: not for the cache
        return self.lm._loglikelihood_tokens(requests, disable_tqdm=True)


def greedy_counts(asked: Asked, settings: dict[str, Any], samples: list[tuple[int, str, int]]) -> Iterator[int]:
    """Count the right predictions of the forgetting curve, for each sample (length, "copy" or "LM", repeat)."""
    lengths, longest = settings["lengths"], settings["lengths"][-1]
    asked.check_room(input_tokens(longest), f"length {longest}")
    drawing = lengths, settings["repeats"], settings["seed"]
    if settings["data_type"] == "order":
        drawn = order_samples(asked.corpus(settings["text"], longest), *drawing)
    else:
        vocabulary: Any = asked
        id_range, skip, _ = check_id_range(vocabulary, None, None, asked.lm.tokenizer)
        drawn = random_samples(id_range, *drawing, skip=skip | {asked.bos, asked.eos})
    for (length, kind), group in groupby(samples, key=itemgetter(0, 1)):
        inputs = model_inputs(kind, [drawn[length][repeat] for *_, repeat in group], asked.bos, asked.eos)
        if asked.reader is not None:
            scored = scored_logits(length)
            predictions = asked.reader.predict(inputs, 1 + length, scored)
            yield from (predictions == inputs[:, scored.start + 1 : scored.stop + 1]).sum(1).tolist()
        else:  # without the EOS, which is never scored
            yield from (count_by_bisection(asked, ids[:-1].tolist(), scored_tokens(length)) for ids in inputs)


def count_by_bisection(asked: Asked, ids: list[int], scored: int) -> int:
    """Count how many of the last `scored` ids are the likeliest after those before them."""
    right, spans = 0, [(len(ids) - scored, len(ids))]
    while spans:  # each round is one batch
        verdicts, halves = asked.log_probs((ids, a, b) for a, b in spans), []
        for (a, b), (_, all_likeliest) in zip(spans, verdicts):
            if all_likeliest:
                right += b - a
            elif b - a > 1:
                halves += [(a, (a + b) // 2), ((a + b) // 2, b)]
        spans = halves
    return right


def block_losses(asked: Asked, settings: dict[str, Any], samples: list[tuple[int]]) -> Iterator[list[float]]:
    """Return the mean loss of each block of positions, in nats, for each sequence by its number."""
    length, edges = settings["context_length"], block_edges(settings)
    asked.check_room(length + 1, f"context_length {length}")
    corpus = asked.corpus(settings["text"], length)
    starts = window_starts(len(corpus), length, settings["sequences"])
    for (sequence,) in samples:
        ids = np.append(asked.bos, corpus[starts[sequence] : starts[sequence] + length])
        if asked.reader is not None:
            losses = token_losses(asked.reader, ids[:-1], ids[1:], f"sequence {sequence}")
            yield [float(losses[a:b].mean()) for a, b in edges]
        else:
            replies = asked.log_probs((ids.tolist(), a + 1, b + 1) for a, b in edges)
            yield [-log_prob / (b - a) for (log_prob, _), (a, b) in zip(replies, edges)]


def block_edges(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Return begin and end of the blocks of positions, counted from 0.

    >>> block_edges({"context_length": 10, "blocks": 3})
    [(0, 3), (3, 6), (6, 10)]
    """
    edges = np.linspace(0, settings["context_length"], settings["blocks"] + 1).astype(int).tolist()
    return [*pairwise(edges)]


def add_request_types() -> None:
    """Add the request types to lm-eval's models."""
    for answer in (greedy_counts, block_losses):
        setattr(TemplateLM, answer.__name__, request_type(answer))


def request_type(answer):
    """Make a method of lm-eval's models of a generator of replies, which `--use_cache` keeps."""

    name = answer.__name__

    def method(self, requests, disable_tqdm=False):
        known = {} if self.cache_hook.dbdict is None else self.cache_hook.dbdict
        keys = [hash_args(name, request.args) for request in requests]
        missing = sorted((*request.args, key) for key, request in zip(keys, requests) if key not in known)
        asked = Asked.of(self)
        ready = nullcontext() if asked.reader is None else asked.reader.reading(np.arange(32) % asked.vocab_size, None)
        with ready, tqdm(total=len(missing), desc=name, disable=disable_tqdm or self.rank > 0) as bar:
            for settings, group in groupby(missing, key=itemgetter(0)):
                samples = {key: sample for _, *sample, key in group}
                for key, reply in zip(samples, answer(asked, json.loads(settings), [*samples.values()])):
                    known[key] = reply  # at once, so that a killed run goes on from here
                    bar.update()
        return [known[key] for key in keys]

    return method
