"""Compute the logits at some positions of many inputs, using chunked inputs, batches and shared prefixes.

The plain method is one forward pass per input. An `Engine` computes the same logits in less time and with less memory:

- The common prefix of several inputs is read once. After each input, the cache is cropped to the prefix.
- Long inputs are read in chunks with a maximum number of tokens, and short inputs are batched.

An engine first compares the chunked logits of a short input with the logits from a single pass. It uses a cache only
if the model supports caching and the logits are equal.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .caches import ContextCache, CountingLayer, cache_bytes, exact_block, full_cache, pressing
from .model import first_parameter, input_device, text_config


# Maximum numbers of tokens and logits per pass: small on a CPU to save memory, large on an accelerator for speed
TOKENS_PER_PASS = {"cpu": 512, "accelerator": 4096}
LOGITS_PER_PASS = {"cpu": 2**23, "accelerator": 2**26}
CACHED_PASSES = 16  # maximum size of the cache of a batch of questions, in passes
TRIAL_TOKENS = 32
SMALLEST_PASS = 16
OPTIONS = ("use_cache", "logits_to_keep")
# Names of the cache argument. Versions before transformers 5.24, and remote code, use the second name.
CACHES = ("cache", "past_key_values")

T = TypeVar("T")


class UnsupportedInput(RuntimeError):
    """The model does not support an input. The message gives the reason. The model may support other inputs."""


class OutOfMemory(UnsupportedInput):
    """Memory runs out even with the minimum number of tokens per forward pass."""


class Engine:
    """Compute the predictions and logits of a model. The model must be in eval and inference mode.

    Args:
        model: a causal language model.
        trial: ids of a typical input, (T,) int64, T >= 3. We run the first 32 ids to detect what the model supports.
        tokens_per_pass: maximum number of tokens in a forward pass, and in the cache of a batch. The cache of a batch
            of questions may have 16 times as many tokens. If the model does not support chunked inputs, each input is
            read in one pass regardless of its length. Default: 512 on a CPU, 4096 on other devices.
        compressed: cache for contexts; see `caches`. Default: the full cache, shared between inputs.

    Raises:
        ValueError: the model is not causal (see `check_causal`), or does not support a compressed cache.

    Attributes:
        tokens_per_pass: the argument or its default, reduced if memory runs out.
        logits_per_pass: maximum number of logits (positions times vocabulary) per forward pass.
        accepted: names of arguments that the model's forward accepts; see `accepted_options`.
        reuses_prefixes: whether the model's cache can be extended and cropped.
        largest: number of tokens and bytes of the largest cache of a context.
    """

    def __init__(
        self,
        model: nn.Module,
        trial: np.ndarray,
        tokens_per_pass: int | None = None,
        compressed: ContextCache | None = None,
    ):
        self.compressed = compressed
        self.largest = (0, 0)
        self.model, self.config = model, text_config(model)
        self.device = input_device(model)
        kind = "cpu" if self.device.type == "cpu" else "accelerator"
        self.tokens_per_pass, self.logits_per_pass = tokens_per_pass or TOKENS_PER_PASS[kind], LOGITS_PER_PASS[kind]
        self.accepted = accepted_options(model)
        scalings = [getattr(module, "rope_type", None) for module in model.modules()]
        scalings = [name for kind in scalings for name in (kind.values() if isinstance(kind, dict) else [kind])]
        rope_types = {name for name in scalings if isinstance(name, str)}
        # dynamic RoPE retains the scaling of the longest input so far; an input without scaling resets it
        self._rescales = any("dynamic" in name for name in rope_types)
        trial = trial[None, :TRIAL_TOKENS]
        self._first_id = trial[:, :1]
        logits = self.last_logits(trial, trial.shape[1])
        self.vocab_size = logits.shape[-1]
        check_causal(model, trial, logits, lambda ids: self.last_logits(ids, ids.shape[1]))
        # If an input exceeds a length, "dynamic" and "longrope" change all frequencies. Cached keys are then invalid.
        fixed = not self._rescales and "longrope" not in rope_types
        takes_cache = "use_cache" in self.accepted and not self.accepted.isdisjoint(CACHES)
        self.reuses_prefixes = fixed and takes_cache and self._continues_exactly(trial, logits)
        if compressed and not self.reuses_prefixes:
            raise ValueError(
                f"cache={compressed.name} requires a model that continues a cache exactly, got {type(model).__name__}. "
                "Measure this model without a cache."
            )

    def last_logits(self, ids: np.ndarray, keep: int, cache: Any = None) -> torch.Tensor:
        """Return the logits (B, keep, V) at the last `keep` positions of inputs (B, T), from one forward pass.

        If the model accepts `logits_to_keep`, it does not compute the other logits.

        Args:
            ids: input ids, (B, T) int64.
            keep: number of positions.
            cache: cache of the preceding tokens. It is updated in place.

        Raises:
            ValueError: the model returns fewer than `keep` logits.
        """
        options: dict[str, Any] = {"use_cache": cache is not None, "logits_to_keep": keep}
        if cache is not None:  # passing None would remove the virtual tokens of a PEFT model
            options |= dict.fromkeys(CACHES, cache)
        options = {name: value for name, value in options.items() if name in self.accepted}
        output = self.model(torch.from_numpy(ids).to(self.device), **options)
        if not isinstance(output, tuple) and not hasattr(output, "logits"):
            raise TypeError(
                f"the model must return logits, got {type(output).__name__}. Load it with AutoModelForCausalLM."
            )
        logits = output[0] if isinstance(output, tuple) else output.logits
        if logits.shape[1] < keep:
            raise ValueError(
                f"{type(self.model).__name__} must return logits for the last {keep} of {ids.shape[1]} positions, got "
                f"{logits.shape[1]} positions. Its forward should support logits_to_keep, or return all logits."
            )
        return logits[:, logits.shape[1] - keep :]  # drops the logits of PEFT's virtual tokens

    def with_less_memory(self, work: Callable[..., T], *args: Any) -> T:
        """Return `work(*args)`. Whenever memory runs out, divide `tokens_per_pass` by 4 and retry.

        Raises:
            OutOfMemory: memory runs out even with 16 tokens per pass, the minimum.
        """
        while True:
            try:
                return work(*args)
            except (RuntimeError, MemoryError) as error:
                out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
                if not out_of_memory and "allocate memory" not in str(error):  # torch's error for the CPU's memory
                    raise
                if self.tokens_per_pass <= SMALLEST_PASS:
                    raise OutOfMemory("out of memory, even in the smallest passes") from error
            self.tokens_per_pass = max(SMALLEST_PASS, self.tokens_per_pass // 4)

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        """Return the greedy next-token predictions of inputs (R, T); see `reader.Reader.predict`."""
        if self.compressed or not self.reuses_prefixes:  # not every compressed cache can be copied or batched
            return np.stack([np.concatenate([*map(argmax, self.logits(row, positions, prefix))]) for row in inputs])
        best = np.empty((len(inputs), len(positions)), dtype=np.int64)
        batch, rows = max(1, self.tokens_per_pass // inputs.shape[1]), inputs[:, : positions.stop]
        groups: dict[bytes, list[int]] = {}  # indices of the rows with each prefix
        for index, row in enumerate(rows):
            groups.setdefault(row[:prefix].tobytes(), []).append(index)
        alone = [group[0] for group in groups.values() if len(group) == 1]
        shared = [group for group in groups.values() if len(group) > 1]
        for group in shared + [alone] * bool(alone):
            length = 0 if group is alone else prefix
            cache = DynamicCache(config=self.config)
            [*self.read(rows[group[:1], :length], cache, 0)]
            for start in range(0, len(group), batch):
                some = group[start : start + batch]
                parts = self.read_after(cache, rows[some, length:], len(positions))
                best[some] = np.concatenate([*map(argmax, parts)], axis=1)
        return best

    def questions_per_batch(self, tokens: int) -> int:
        """Return the number of questions of `tokens` tokens each to read together; at least 1."""
        return max(1, CACHED_PASSES * self.tokens_per_pass // tokens)

    def logits(self, ids: np.ndarray, positions: range, context: int = 0) -> Iterator[torch.Tensor]:
        """Yield the logits at consecutive positions of an input (T,), in chunks (n, V) of n positions.

        If the cache is compressed, the first `context` tokens are the context, and `positions` are not before its end.
        """
        if self.reuses_prefixes:
            context = context if self.compressed else 0
            cache = self.read_context(ids[:context]) if self.compressed else DynamicCache(config=self.config)
            yield from (part[0] for part in self.read(ids[None, context : positions.stop], cache, len(positions)))
            if self.compressed:
                self.check_cache(cache, positions.stop, record=not context)
            return
        self.forget_lengths()
        logits = self.last_logits(ids[None], len(ids) - positions.start)[0, : len(positions)]
        yield from logits.split(max(1, self.logits_per_pass // self.vocab_size))

    def read_context(self, ids: np.ndarray) -> Cache:
        """Read a context (t,) in one pass, and return its compressed cache. An empty context gives an empty cache.

        Raises:
            UnsupportedInput: a press does not support the length of the context, or does not drop any keys.
            ValueError: the model does not support the cache.
        """
        assert self.compressed is not None
        name, press = self.compressed.name, self.compressed.press
        cache: Any = self.compressed.new(self.model)
        try:
            if ids.size:
                with pressing(press, self.model, cache):
                    self.last_logits(ids[None], 1, cache)
        except AssertionError as error:  # kvpress checks lengths with assertions
            raise UnsupportedInput(f"{name} does not support a context of {ids.size} tokens: {error}") from error
        if hasattr(cache, "prune"):  # a `PrunedCache` would drop keys before the next pass
            cache.prune()
        self.check_cache(cache, ids.size, record=True)
        stored = {layer.stored for layer in cache.layers if isinstance(layer, CountingLayer)}
        if press and stored == {ids.size}:
            raise UnsupportedInput(f"{name} did not drop any keys from a context of {ids.size} tokens")
        if press and len(stored) > 1:  # transformers creates one mask for all layers
            raise ValueError(f"cache={name} must store the same number of keys in all layers, got {sorted(stored)}.")
        return cache

    def check_cache(self, cache: Cache, tokens: int, record: bool) -> None:
        """Check that a cache counts dropped tokens, because positions depend on it. Record its size if asked to."""
        if cache.get_seq_length() != tokens:
            raise ValueError(
                f"get_seq_length of {type(cache).__name__} must return the number of tokens that it has seen, got "
                f"{cache.get_seq_length()} after {tokens} tokens."
            )
        if record:
            self.largest = max(self.largest, (tokens, cache_bytes(cache)))

    def forget_lengths(self) -> None:
        """Reset the scaling of dynamic RoPE. Otherwise, the scaling of an earlier, longer input may remain."""
        if self._rescales:
            self.last_logits(self._first_id, 1)

    def read(self, ids: np.ndarray, cache: Cache, scored: int) -> Iterator[torch.Tensor]:
        """Read ids (B, t) after the cached tokens, in chunks of at most `tokens_per_pass` tokens. Extend the cache.

        Yields:
            the logits of the last `scored` positions, in chunks (B, n, V) of n positions.
        """
        length = ids.shape[1]
        unscored = ids.shape[1] - scored
        start = 0
        step = max(1, self.tokens_per_pass // len(ids))
        rows = max(1, self.logits_per_pass // (len(ids) * self.vocab_size))
        changes = self.compressed and self.compressed.create is not full_cache
        while start < length:
            first = max(start, unscored)
            block = exact_block(cache) if changes else math.inf
            stop = min(start + step, length, first + rows, length if block == math.inf else start + int(block))
            logits = self.last_logits(ids[:, start:stop], max(stop - first, 1), cache=cache)
            if stop > first:
                yield logits
            start = stop

    def read_after(
        self, cache: DynamicCache, ids: np.ndarray, scored: int, shared: bool = True
    ) -> Iterator[torch.Tensor]:
        """Like `read`, but the cache is not changed.

        Args:
            shared: whether the cache has one sequence, and each row of ids (B, t) continues it. If False, the cache
                has B sequences, and each row continues its own.
        """
        if (len(ids) == 1 or not shared) and all(type(layer) is DynamicLayer for layer in cache.layers):
            yield from self.read(ids, cache, scored)
            cache.crop(-ids.shape[1])
            return
        branch = copy.deepcopy(cache)  # other types of layers cannot be cropped, because they drop or overwrite tokens
        if shared and len(ids) > 1 and cache.get_seq_length():
            first: Any = torch.zeros(len(ids), dtype=torch.long, device=self.device)
            branch.reorder_cache(first)
        yield from self.read(ids, branch, scored)

    def _continues_exactly(self, ids, logits):
        """Return whether chunked logits from a cropped cache equal the logits of one pass, up to rounding."""
        if not isinstance(self.config, PreTrainedConfig) or getattr(self.model, "_is_stateful", False):
            return False
        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            return False  # PEFT stores its virtual tokens in its own cache
        if not getattr(self.model, "_supports_default_dynamic_cache", lambda: True)():
            return False
        a, b = ids.shape[1] // 3, 2 * ids.shape[1] // 3
        cache = DynamicCache(config=self.config)
        parts = [self.last_logits(ids[:, :a], a, cache=cache)]
        if cache.get_seq_length() != a or not getattr(cache, "is_croppable", True):
            return False
        [*self.read_after(cache, ids[:, a:], 1)]
        parts += [self.last_logits(ids[:, i:j], j - i, cache=cache) for i, j in ((a, b), (b, ids.shape[1]))]
        difference, reference = torch.cat(parts, 1).float() - logits.float(), logits.float() - logits.float().mean()
        if first_parameter(self.model).dtype in (torch.float32, torch.float64):
            return bool(difference.norm() <= 1e-3 * reference.norm())
        # In half precision, rounding errors are a few per cent, and more at single tokens with massive activations,
        # even without a cache. A wrong position or mask gives a much larger error at most tokens of a chunk.
        errors = difference.norm(dim=-1) / reference.norm(dim=-1)
        return bool(
            torch.stack([part.median() for part in errors.split([a, b - a, ids.shape[1] - b], 1)]).max() <= 0.1
        )


def argmax(logits: torch.Tensor) -> np.ndarray:
    """Return the argmax over the last axis of logits (..., V), as int64. Ties give the lowest index. NaN gives -1."""
    best = logits.max(-1)  # also detects NaN, without a second pass over the logits
    return best.indices.masked_fill(best.values.isnan(), -1).cpu().numpy()


def accepted_options(model: nn.Module) -> set[str]:
    """Return the names of the arguments in `OPTIONS` and `CACHES` that the model's forward accepts.

    If the forward accepts **kwargs, all `OPTIONS` count as accepted. In this case, we take the name of
    the cache argument from the first inner module with a cache argument.
    """
    accepted: set[str] = set()
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if module is model:
            accepted = {name for name in OPTIONS if takes_any or name in parameters}
        if cache := [name for name in CACHES if name in parameters]:
            return accepted | {cache[0]}
        if not takes_any:
            break
    return accepted


def check_causal(
    model: nn.Module, ids: np.ndarray, logits: torch.Tensor, read: Callable[[np.ndarray], torch.Tensor]
) -> None:
    """Check that changing the second half of an input does not change the logits of its first half.

    The second half begins at an odd index, to detect models that look ahead within blocks of even size. The check does
    not detect NaN logits. The runner reports them.

    Args:
        model: the model, for its name and dtypes.
        ids: the input, (1, T) int64, T >= 3.
        logits: logits of the input, (1, T, V).
        read: function that returns the logits (1, T, V) of other ids.

    Raises:
        ValueError: the first half depends on the second.
    """
    if logits.shape[1] < ids.shape[1]:  # the model returns too few logits
        return
    boundary = ids.shape[1] // 2 | 1
    distinct = np.unique(ids) if (ids != ids[0, 0]).any() else np.unique([ids[0, 0], 0, 1])
    others = distinct[(np.searchsorted(distinct, ids) + 1) % len(distinct)]
    changed = read(np.concatenate([ids[:, :boundary], others[:, boundary:]], axis=1))
    before, after = (x[:, :boundary].float() for x in (logits, changed))
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1}  # unquantized
    eps = max(torch.finfo(dtype).eps for dtype in dtypes or {torch.float32})
    # The tolerance allows for rounding: a mixture of experts groups the tokens differently if some of them change.
    if (after - before).norm() > max(8 * eps, 1e-4) * (before - before.mean()).norm():
        raise ValueError(
            f"{type(model).__name__} is not causal: its logits depend on later tokens. Load a model that was "
            'trained as a causal language model. A BERT also needs config.is_decoder=True. An XLNet also needs attn_type="uni". '
            "Do not quantize activations with one scale for all tokens, as torch's dynamic int8 does."
        )
