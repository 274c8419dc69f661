"""Readers, through which metrics use a model: the base class `Reader`, and the reader for a model in this process.

`served.ServedModel` and `prompts.OfflineModel` are the other readers. A metric never depends on the kind of reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..checks import public_name
from .engine import Engine
from .logits import input_device
from .model import check_decoder, first_parameter, position_limit, text_config, vocabulary_size, weights_hash


class Reader:
    """A causal language model that reads token ids. Any object with these members can be measured.

    Attributes:
        vocab_size: size of the vocabulary; `math.inf` if unknown.
        position_limit: maximum number of input tokens; None if unlimited.
        claimed_context: claimed context in tokens, or None.
        device: device of the model, such as "cuda:0"; None if unknown.
        can_reply: whether the model supports `reply`.
        is_distributed: whether the model is sharded over processes, which then cannot share work.
        configs: configs of transformers that may name special ids, the most important first.
    """

    vocab_size: int | float = math.inf
    position_limit: int | None = None
    claimed_context: int | None = None
    device: str | None = None
    can_reply: bool = True
    is_distributed: bool = False
    configs: Sequence[Any] = ()

    def settings(self) -> dict[str, Any]:
        """Return the model's entries in the settings of a result; "model" is its name."""
        raise NotImplementedError

    def identity(self) -> dict[str, str]:
        """Return what identifies the model in addition to its name, for the settings of results and journals."""
        return {}

    def configured_id(self, name: str) -> int | None:
        """Return the model's "bos_token_id" or "eos_token_id"; None if no config sets it."""
        for config in self.configs:
            value = getattr(config, name, None)
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) else value  # chat models list several EOS ids
        return None

    def cost(self, tokens: int) -> float:
        """Return the relative cost of an input of this length; one token of a short input costs 1."""
        return tokens

    def reading(self, trial: np.ndarray, tokens_per_pass: int | None) -> AbstractContextManager:
        """Prepare the model; the methods below are only called inside `with reader.reading(...)`.

        Args:
            trial: ids of a typical input, (T,).
            tokens_per_pass: maximum number of tokens per forward pass; see `engine.Engine`.
        """
        return nullcontext()

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        """Return greedy next-token predictions at some positions of inputs of one length.

        Args:
            inputs: (R, T) int64.
            prefix: length of the prefix that inputs may share, at most `positions.start`.
            positions: consecutive input positions, ascending.

        Returns:
            (R, len(positions)) int64, the most likely next id at each position; -1 where a logit is NaN.

        Raises:
            engine.OutOfMemory: memory runs out even in the smallest passes.
        """
        raise NotImplementedError

    def score(self, ids: np.ndarray, targets: np.ndarray, positions: range) -> tuple[np.ndarray, np.ndarray]:
        """Score targets after some positions of one input.

        Args:
            ids: (T,) int64.
            targets: (len(positions),) int64, the last of which follows `ids`.
            positions: consecutive input positions, ascending, up to T - 1.

        Returns:
            The log-probability of each target (nats, float64) and the most likely id (int64) at its position.

        Raises:
            engine.OutOfMemory: memory runs out even in the smallest passes.
        """
        raise NotImplementedError

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer: Any) -> str:
        """Return the greedy response to a prompt (T,), of at most `tokens` tokens."""
        raise NotImplementedError


def reader_for(model: nn.Module | Reader) -> Reader:
    """Return a reader unchanged, or wrap a torch model in a `LocalReader`.

    Raises:
        TypeError: `model` is neither.
    """
    if isinstance(model, nn.Module):
        return LocalReader(model)
    if not hasattr(model, "reading") or isinstance(model, type):
        raise TypeError(
            f"model must be a causal language model or a reader, got {model if isinstance(model, str) else type(model)}. Load "
            "AutoModelForCausalLM.from_pretrained(name), or use ServedModel(url) or OfflineModel(llm)."
        )
    return model


class LocalReader(Reader):
    """A reader for a torch model whose `forward(input_ids)` returns logits or an output with `.logits`, (B, T, V).

    Raises:
        ValueError: the model is an encoder-decoder, or turns out not to be causal (see `engine.check_causal`).
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.config = text_config(model)
        check_decoder(self.config)
        self.configs = self.config, getattr(model, "generation_config", None)
        self.vocab_size = vocabulary_size(model)
        self.position_limit = position_limit(model)
        self.claimed_context = getattr(self.config, "max_position_embeddings", None)
        self.device = str(input_device(model))
        self.can_reply = hasattr(model, "generate")
        self.is_distributed = any(hasattr(p, "full_tensor") for p in model.parameters())  # tensor parallel or FSDP

    def settings(self) -> dict[str, Any]:
        return {
            "model": public_name(getattr(self.model.config, "_name_or_path", None) or type(self.model).__name__),
            "dtype": str(first_parameter(self.model).dtype).removeprefix("torch."),
            "attention": getattr(self.config, "_attn_implementation", None),
        }

    def identity(self) -> dict[str, str]:
        revision = getattr(self.model.config, "_commit_hash", None)  # of a model from the Hub
        return {"weights_sha256": weights_hash(self.model)} | ({"revision": revision} if revision else {})

    def cost(self, tokens: int) -> float:
        """Return the cost: that of matrix products grows linearly with the tokens, that of attention quadratically."""
        embedding = sum(p.numel() for m in self.model.modules() if isinstance(m, nn.Embedding) for p in m.parameters())
        matrices = max(sum(p.numel() for p in self.model.parameters()) - embedding, 1)
        attends = getattr(self.config, "num_attention_heads", None) is not None
        width = self.config.num_hidden_layers * self.config.hidden_size if attends else 0
        return tokens * (1 + tokens * width / matrices)

    @contextmanager
    def reading(self, trial: np.ndarray, tokens_per_pass: int | None) -> Iterator[None]:
        """Set eval and inference mode, and restore every module's training flag afterwards."""
        self._engine_arguments = np.resize(trial, max(len(trial), 3)), tokens_per_pass
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            for module in training:
                module.training = True
            self.__dict__.pop("engine", None)

    @cached_property
    def engine(self) -> Engine:
        """Create the engine lazily, because it runs the model."""
        return Engine(self.model, *self._engine_arguments)

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        return self.engine.with_less_memory(self.engine.predict, inputs, prefix, positions)

    def score(self, ids: np.ndarray, targets: np.ndarray, positions: range) -> tuple[np.ndarray, np.ndarray]:
        return self.engine.with_less_memory(self._score, ids, targets, positions)

    def _score(self, ids, targets, positions):
        log_probs, best = [], []
        for logits in self.engine.logits(ids, positions):  # (n, V), the next n positions
            labels = torch.from_numpy(targets[len(best) :][: len(logits)]).to(logits.device)
            log_probs += (-F.cross_entropy(logits.float(), labels, reduction="none")).tolist()
            best += logits.argmax(-1).tolist()
        return np.array(log_probs), np.array(best)

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer) -> str:
        self.engine.forget_lengths()
        ids = torch.from_numpy(prompt)[None].to(self.engine.device)
        pad = getattr(self.model.generation_config, "pad_token_id", None)
        generate: Any = self.model.generate
        output = generate(
            input_ids=ids,  # PEFT takes it by name only
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            pad_token_id=0 if pad is None else pad,  # one row has no padding
        )
        return tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)


class UnloadedModel(Reader):
    """A model's configuration, used to check options before its weights are loaded. It cannot read sequences.

    Args:
        config: config of the language model.
        name: name of the model.
    """

    def __init__(self, config: Any, name: str):
        self.configs, self.name = [config], name
        self.vocab_size = getattr(config, "vocab_size", None) or math.inf
        self.claimed_context = getattr(config, "max_position_embeddings", None)

    def settings(self) -> dict[str, Any]:
        return {"model": public_name(self.name)}


def special_ids(reader: Reader, bos: int | None, eos: int | None) -> tuple[int, int]:
    """Return BOS and EOS: the caller's, else the model's, else the other one of the two.

    Raises:
        ValueError: neither is known, or one is not in the vocabulary.
    """
    bos = reader.configured_id("bos_token_id") if bos is None else bos
    eos = reader.configured_id("eos_token_id") if eos is None else eos
    if bos is None and eos is None:
        raise ValueError(
            "the model's configuration has neither a BOS nor an EOS token, and each sequence must begin with one. Give "
            "bos_token_id, or --bos-token-id: any id that separates documents in the training data."
        )
    bos, eos = (eos if bos is None else bos), (bos if eos is None else eos)
    for name, value in (("bos_token_id", bos), ("eos_token_id", eos)):
        if not isinstance(value, Integral) or not 0 <= value < reader.vocab_size:
            raise ValueError(f"{name} must be one of the model's {reader.vocab_size} ids, got {value!r}.")
    assert bos is not None and eos is not None
    return int(bos), int(eos)
