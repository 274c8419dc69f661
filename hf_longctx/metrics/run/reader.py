"""Readers: the interface between metrics and models.

This file defines the base class `Reader`, and `LocalReader` for a PyTorch model in this process. The other readers are
`served.ServedModel` and `prompts.OfflineModel`.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin

from ..checks import public_name
from .caches import ContextCache, applied, context_cache, fingerprint, requested_cache
from .engine import CACHES, Engine
from .model import (
    check_decoder,
    first_parameter,
    input_device,
    position_limit,
    text_config,
    vocabulary_size,
    weights_hash,
)
from .questions import Responded, ask


IGNORED = (
    'The generation config asks for a cache ("{}") that is not measured: the result is that of the full cache. To measure '
    'a compressed cache, pass its name, such as --cache quantized:4 or LocalReader(model, cache="quantized:4").'
)


class Reader:
    """The interface of a causal language model. An object of any subclass can be measured.

    Attributes:
        vocab_size: size of the vocabulary; `math.inf` if unknown.
        position_limit: maximum number of input tokens; None if unlimited.
        claimed_context: claimed context in tokens; None if unknown.
        device: device of the model, such as "cuda:0"; None if unknown.
        can_reply: whether the model supports `reply`.
        batches_questions: whether the reader has a method `ask`; see `LocalReader.ask`.
        is_distributed: whether the model is sharded over processes. All processes must then read the same inputs.
        cache: cache for contexts; see `caches`. None for the full cache.
        configs: configs or tokenizers that may set special ids. The first one that sets an id takes precedence.
        notes: what could not be shown about the model, as sentences for the result.
    """

    vocab_size: int | float = math.inf
    position_limit: int | None = None
    claimed_context: int | None = None
    device: str | None = None
    can_reply: bool = True
    batches_questions: bool = False
    is_distributed: bool = False
    cache: ContextCache | None = None
    configs: Sequence[Any] = ()
    notes: Sequence[str] = ()

    def settings(self) -> dict[str, Any]:
        """Return the settings that a result stores about the model. "model" is the name of the model."""
        raise NotImplementedError

    def identity(self) -> dict[str, str]:
        """Return settings that identify the model, such as a hash of the weights. The name is not included."""
        return {}

    def fingerprint(self) -> dict[str, Any]:
        """Return predictions that identify a model without a hash; see `journal.difference`. A journal stores them."""
        return {}

    def configured_id(self, name: str) -> int | None:
        """Return the model's "bos_token_id" or "eos_token_id". Return None if the configs do not set it."""
        for config in self.configs:
            value = getattr(config, name, None)
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) else value  # chat models may have several EOS ids
        return None

    def questions_per_batch(self, tokens: int) -> int:
        """Return the number of questions of `tokens` tokens each, including the response, to answer together."""
        return 1

    def reading(self, trial: np.ndarray, tokens_per_pass: int | None) -> AbstractContextManager:
        """Return a context manager that prepares the model. `predict`, `score` and `reply` are only called inside it.

        Args:
            trial: ids of a typical input, (T,).
            tokens_per_pass: maximum number of tokens per forward pass; see `engine.Engine`.
        """
        return nullcontext()

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        """Return the greedy next-token predictions at some positions of several inputs.

        Args:
            inputs: input ids, (R, T) int64.
            prefix: length of the prefix to share, at most `positions.start`. Inputs with the same prefix may share it.
            positions: consecutive input positions, ascending.

        Returns:
            the most likely next id at each position, (R, len(positions)) int64; -1 where a logit is NaN.

        Raises:
            engine.OutOfMemory: memory runs out even in the smallest passes.
        """
        raise NotImplementedError

    def score(
        self, ids: np.ndarray, targets: np.ndarray, positions: range, context: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities of the tokens that follow some positions of an input.

        Args:
            ids: input ids, (T,) int64.
            targets: the token after each position, (len(positions),) int64.
            positions: consecutive input positions, ascending, up to T - 1.
            context: number of input tokens to read before the cache is compressed. Only passed if `cache` is set.

        Returns:
            the log-probability of each target (nats, float64), and the most likely id at each position (int64).

        Raises:
            engine.OutOfMemory: memory runs out even in the smallest passes.
        """
        raise NotImplementedError

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer: Any, context: int = 0) -> str:
        """Return the greedy response to a prompt (T,) int64, with at most `tokens` tokens. See `score`."""
        raise NotImplementedError

    def cache_size(self) -> tuple[int, int] | None:
        """Return the number of tokens and bytes of the largest cache of a context since the last call, if known."""
        return None


def reader_for(model: nn.Module | Reader) -> Reader:
    """Return a `LocalReader` for a PyTorch model. If `model` is already a reader, return it.

    Raises:
        TypeError: `model` is not a PyTorch model or a reader.
    """
    if isinstance(model, nn.Module):
        return LocalReader(model)
    if not isinstance(model, Reader):
        raise TypeError(
            "model must be a causal language model or a `Reader`, got "
            f"{model if isinstance(model, str) else type(model)}. Pass AutoModelForCausalLM.from_pretrained(name), "
            "ServedModel(url) or OfflineModel(llm)."
        )
    return model


class LocalReader(Reader):
    """A reader for a PyTorch model in this process.

    The output of `forward(input_ids)` has an attribute `logits` (B, T, V), or is a tuple that begins with the logits.

    Args:
        model: a causal language model.
        cache: cache for contexts: a name such as "quantized:4", or a function that creates a `Cache` for the model;
            see `caches.context_cache`. Default: the full cache.

    Raises:
        ValueError: the model is an encoder-decoder, or the cache is invalid. (The first forward pass checks whether
            the model is causal.)
    """

    def __init__(self, model: nn.Module, cache: Any = None):
        self.model, self.cache = model, None if cache is None else context_cache(cache)
        self.config = text_config(model)
        check_decoder(self.config)
        self.configs = self.config, getattr(model, "generation_config", None)
        self.vocab_size = vocabulary_size(model)
        self.position_limit = position_limit(model)
        self.claimed_context = getattr(self.config, "max_position_embeddings", None)
        self.device = str(input_device(model))
        self.can_reply = hasattr(model, "generate")
        # tensor parallelism and FSDP store parameters as DTensors
        self.is_distributed = any(hasattr(p, "full_tensor") for p in model.parameters())
        self.ignored_cache = requested_cache(model) if self.cache is None else None
        if self.ignored_cache is not None:
            self.notes = [IGNORED.format(self.ignored_cache)]
            warnings.warn(self.notes[0], stacklevel=2)

    def settings(self) -> dict[str, Any]:
        return {
            "model": public_name(getattr(self.model.config, "_name_or_path", None) or type(self.model).__name__),
            "dtype": str(first_parameter(self.model).dtype).removeprefix("torch."),
            "attention": getattr(self.config, "_attn_implementation", None),
            **({} if self.cache is None else {"cache": self.cache.name}),
            **({} if self.ignored_cache is None else {"ignored_cache": self.ignored_cache}),
        }

    def identity(self) -> dict[str, str]:
        revision = getattr(self.model.config, "_commit_hash", None)  # only set for a model from the Hub
        cache = {} if self.cache is None else {"cache_sha256": fingerprint(self.cache, self.model)}
        return {"weights_sha256": weights_hash(self.model)} | ({"revision": revision} if revision else {}) | cache

    @contextmanager
    def reading(self, trial: np.ndarray, tokens_per_pass: int | None) -> Iterator[None]:
        """Set eval and inference mode, and restore every module's training flag afterwards."""
        self._engine_arguments = np.resize(trial, max(len(trial), 3)), tokens_per_pass
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.inference_mode(), applied(self.cache and self.cache.windows, self.model):
                yield
        finally:
            for module in training:
                module.training = True
            self.__dict__.pop("engine", None)

    @cached_property
    def engine(self) -> Engine:
        """The engine. It is created on first use, because its constructor runs the model."""
        return Engine(self.model, *self._engine_arguments, self.cache)

    def cache_size(self) -> tuple[int, int] | None:
        if "engine" not in self.__dict__:  # no input was supported so far
            return None
        size = self.engine.largest
        self.engine.largest = (0, 0)
        return size if size[0] else None

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        return self.engine.with_less_memory(self.engine.predict, inputs, prefix, positions)

    def score(
        self, ids: np.ndarray, targets: np.ndarray, positions: range, context: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        return self.engine.with_less_memory(self._score, ids, targets, positions, context)

    def _score(self, ids, targets, positions, context):
        log_probs, best = [], []
        for logits in self.engine.logits(ids, positions, context):  # (n, V) for the next n positions
            labels = torch.from_numpy(targets[len(best) :][: len(logits)]).to(logits.device)
            log_probs += (-F.cross_entropy(logits.float(), labels, reduction="none")).tolist()
            best += logits.argmax(-1).tolist()
        return np.array(log_probs), np.array(best)

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer: Any, context: int = 0) -> str:
        self.engine.forget_lengths()
        prefilled = {} if self.cache is None else self._prefilled(prompt, context)
        return tokenizer.decode(self._generate(prompt[None], tokens, prefilled)[0])

    def _generate(self, prompts, tokens, prefilled):
        """Return the ids of the greedy responses to prompts (B, T), without EOS. `prefilled` contains their cache."""
        # `generate` must use our cache, whatever cache the generation config asks for
        options: dict[str, Any] = {} if self.ignored_cache is None else {"cache_implementation": None}
        if prefilled:
            options = {"cache_implementation": None, "use_cache": True} | prefilled
        ids = torch.from_numpy(prompts).to(self.engine.device)
        config = getattr(self.model, "generation_config", None)
        pad = getattr(config, "pad_token_id", None)
        generate: Any = self.model.generate
        output = generate(
            input_ids=ids,  # PEFT requires a keyword argument
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            pad_token_id=0 if pad is None else pad,  # any id works, because we drop the ids after EOS
            **options,
        )
        ends = eos_ids([config])
        return [before_end(row, ends) for row in output[:, prompts.shape[1] :].tolist()]

    @property
    def batches_questions(self) -> bool:
        """Whether `ask` is supported: the model continues caches exactly, and uses the `generate` of transformers."""
        model: Any = self.model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        own = getattr(type(model), "generate", GenerationMixin.generate)
        plain = inspect.unwrap(own) is inspect.unwrap(GenerationMixin.generate)  # a FoX adapts its arguments
        return self.cache is None and plain and self.engine.reuses_prefixes

    def questions_per_batch(self, tokens: int) -> int:
        return self.engine.questions_per_batch(tokens) if self.batches_questions else 1

    def ask(
        self, prompts: np.ndarray, answers: Sequence[np.ndarray], replies: Sequence[int], thinks: bool, tokenizer: Any
    ) -> list[Responded]:
        """Answer questions of one length; see `questions.ask`. Only supported if `batches_questions` is True."""
        found: list[Responded] = []
        while len(found) < len(prompts):
            rest = slice(len(found), None)
            arguments = prompts[rest], answers[rest], replies[rest], thinks, tokenizer
            found += self.engine.with_less_memory(ask, self.engine, self._generate, *arguments)
        return found

    def _prefilled(self, prompt, context):
        """Return the compressed cache of all tokens of a prompt but the last, as an argument of `generate`."""
        cache = self.engine.read_context(prompt[:context])
        [*self.engine.read(prompt[None, context:-1], cache, 0)]
        return {name: cache for name in CACHES if name in self.engine.accepted}


def eos_ids(configs: Sequence[Any]) -> set[int]:
    """Return all EOS ids of configs. Configs of chat models may have several."""
    ends: set[int] = set()
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        ends.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return ends


def before_end(ids: Sequence[int], ends: set[int]) -> list[int]:
    """Return generated ids before the first EOS.

    >>> before_end([5, 2, 0, 0], {2})
    [5]
    """
    return [*ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids))]]


class UnloadedModel(Reader):
    """A stand-in for a model that has only its config. We check options with it before the weights are loaded.

    Args:
        config: config of the language model.
        name: name of the model.
        cache: cache for contexts, or None.
    """

    def __init__(self, config: Any, name: str, cache: ContextCache | None = None):
        self.configs, self.name, self.cache = [config], name, cache
        self.vocab_size = getattr(config, "vocab_size", None) or math.inf
        self.claimed_context = getattr(config, "max_position_embeddings", None)

    def settings(self) -> dict[str, Any]:
        return {"model": public_name(self.name)}


def special_ids(reader: Reader, bos: int | None, eos: int | None) -> tuple[int, int]:
    """Return the ids of BOS and EOS.

    If an id is None, we use the id from the model's configs. If only one of the two ids is known, we use it for both.

    Raises:
        ValueError: both ids are unknown, or an id is not in the vocabulary.
    """
    bos = reader.configured_id("bos_token_id") if bos is None else bos
    eos = reader.configured_id("eos_token_id") if eos is None else eos
    if bos is None and eos is None:
        raise ValueError(
            "the model's config must have a BOS or EOS token. Each input begins with this token. Set "
            "bos_token_id or --bos-token-id to the id that separates documents in the training data."
        )
    bos, eos = (eos if bos is None else bos), (bos if eos is None else eos)
    for name, value in (("bos_token_id", bos), ("eos_token_id", eos)):
        if not isinstance(value, Integral) or not 0 <= value < reader.vocab_size:
            raise ValueError(f"{name} must be one of the model's {reader.vocab_size} ids, got {value!r}.")
    assert bos is not None and eos is not None
    return int(bos), int(eos)
