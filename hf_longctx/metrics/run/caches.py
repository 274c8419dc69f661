"""Compressed caches: what does a model forget if the cache of its context is quantized, windowed or pruned?

The engine reads the context of an input in one pass, as `generate` reads a prompt. Attention is then exact, and the
cache is compressed at the end of the pass. The engine reads all further tokens with the compressed cache. A pass never
has more tokens than `exact_block` allows, so the logits equal those of one token per pass.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, LlamaConfig, QuantizedCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer

from .model import text_config


SPELLINGS = (
    "full, quantized:BITS, window:TOKENS, or module.NAME:ARGUMENT of a Cache class or a press, such as "
    "hf_longctx.fox.PrunedCache:1e-3 or kvpress.SnapKVPress:0.5"
)


class ContextCache(NamedTuple):
    """A cache for the context of an input.

    Attributes:
        name: name in the settings of a result.
        create: function that creates an empty cache for a model.
        press: object of kvpress that compresses the cache. None if the cache compresses itself.
    """

    name: str
    create: Callable[[nn.Module], Cache]
    press: Any = None


class CountingLayer(DynamicLayer):
    """A layer that drops tokens. It reports the number of tokens that it has seen.

    The model derives positions and masks from this number, so they remain correct.

    Attributes:
        window: number of tokens to keep, including the first `sinks` tokens.
    """

    is_croppable = False

    def __init__(self, window: float = math.inf, sinks: int = 0):
        super().__init__()
        self.window, self.sinks, self.seen = window, sinks, 0

    @property
    def exact_block(self) -> float:
        """The number of tokens that the model may read in one pass; see `exact_block`."""
        return max(1, self.window - self.kept + 1)

    def update(self, key_states, value_states, *args, **kwargs):
        self.seen += key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if keys.shape[-2] > self.window:
            newest = keys.shape[-2] - int(self.window) + self.sinks
            self.keys, self.values = (
                torch.cat([x[..., : self.sinks, :], x[..., newest:, :]], -2) for x in (keys, values)
            )
        return keys, values

    def get_seq_length(self):
        return self.seen

    def get_mask_sizes(self, query_length):
        return self.kept + query_length, self.seen - self.kept

    @property
    def kept(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]


def full_cache(model: nn.Module) -> Cache:
    return DynamicCache(config=text_config(model))


def counting_cache(model: nn.Module, window: float = math.inf, sinks: int = 0) -> Cache:
    """Create a cache that keeps the first `sinks` and the newest tokens, at most `window` tokens in total.

    Layers with a sliding window of their own keep this window.

    Raises:
        ValueError: the model does not have a layer with full attention.
    """
    cache = full_cache(model)
    if not any(type(layer) is DynamicLayer for layer in cache.layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise ValueError(
            f"windows and presses require a layer with full attention, but the cache of {type(model).__name__} only has "
            f"layers of type {kinds}. Use another cache."
        )
    cache.layers = [CountingLayer(window, sinks) if type(x) is DynamicLayer else x for x in cache.layers]
    return cache


# Names ---------------------------------------------------------------------------------------------------------------


def context_cache(cache: Any) -> ContextCache:
    """Return the cache that a name such as "quantized:4" or an object describes.

    In a name, colons separate the arguments, and options are written as name=value. A name with a dot is an object in
    a module. The objects are:

    - a Cache class, or a function that returns a Cache. The first argument is the model.
    - a press of kvpress.
    - an object with the methods `apply(model)` and `cache()`, such as windows. If its class has `from_pretrained`, the
      argument in the name is a folder.

    Raises:
        ValueError: the name or the object is invalid.
        ImportError: a package is missing.

    >>> context_cache("window:1024:sinks=0").name
    'window:1024:sinks=0'
    """
    if isinstance(cache, ContextCache):
        return cache
    if not isinstance(cache, str):
        name = f"{cache.__module__}.{getattr(cache, '__qualname__', type(cache).__qualname__)}"
        return ContextCache(name, *of_object(cache))
    kind, *words = cache.split(":")
    arguments = [literal(word) for word in words if not is_option(word)]
    options = {name: literal(value) for name, _, value in (word.partition("=") for word in words if is_option(word))}
    try:
        return ContextCache(cache, *of_name(kind, arguments, options))
    except ModuleNotFoundError as error:
        if f"{error.name}.".startswith(kind.partition(".")[0] + ".") and "." in str(error.name):
            raise ValueError(f"cache must be {SPELLINGS}, got {cache!r}: {error}.") from error
        raise ImportError(f"cache={cache} needs {error.name}: pip install {error.name}") from error
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"cache must be {SPELLINGS}, got {cache!r}: {error}.") from error


def is_option(word: str) -> bool:
    """Return whether a word has the form name=value. A path may also contain "="."""
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()


def literal(word: str) -> Any:
    """Parse a number. Any other word is a string."""
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def of_name(kind: str, arguments: list, options: dict[str, Any]) -> tuple[Callable[[nn.Module], Cache], Any]:
    """Return the function that creates a cache, and its press or None."""
    if kind == "full":
        if arguments or options:
            raise ValueError("the full cache does not have options")
        return full_cache, None
    if kind == "quantized":
        (bits,) = arguments
        quantized: Any = partial(QuantizedCache, **{"backend": "quanto", **options, "nbits": bits})
        quantized(config=LlamaConfig(num_hidden_layers=1))  # checks the options
        return lambda model: quantized(config=text_config(model)), None
    if kind == "window":
        (window,), sinks = arguments, options.pop("sinks", 4)
        if options or not isinstance(window, int) or not isinstance(sinks, int) or not 0 <= sinks < window:
            raise ValueError(f"the window must be a number of tokens above the number of sinks ({sinks})")
        return partial(counting_cache, window=window, sinks=sinks), None
    module, _, name = kind.rpartition(".")
    found: Any = getattr(importlib.import_module(module), name)
    if not isinstance(found, type) or issubclass(found, Cache):
        return lambda model: found(model, *arguments, **options), None
    return of_object(getattr(found, "from_pretrained", found)(*arguments, **options))


def of_object(value: Any) -> tuple[Callable[[nn.Module], Cache], Any]:
    """Like `of_name`, for an object in place of a name."""
    if hasattr(value, "forward_hook"):
        return counting_cache, value
    if hasattr(value, "apply") and hasattr(value, "cache"):
        return partial(applied, value), None
    if not callable(value):
        raise ValueError(f"cache must be {SPELLINGS}, or a function of the model, got {value!r}.")
    return value, None


def applied(windows: Any, model: nn.Module) -> Cache:
    windows.apply(model)
    return windows.cache()


# Reading -------------------------------------------------------------------------------------------------------------


@contextmanager
def pressing(press: Any, model: nn.Module, cache: Cache) -> Iterator[None]:
    """Apply a press of kvpress, if any, to the context that is read inside the `with` statement.

    kvpress 0.5 needs two arguments that transformers 5.24 renamed and removed. We do not compress layers with a
    sliding window of their own.

    Raises:
        ValueError: the press masks keys instead of dropping them.
    """
    if press is None:
        yield
        return

    def with_arguments(module, inputs, arguments, output):
        if not isinstance(cache.layers[module.layer_idx], CountingLayer):
            return output
        hidden = arguments["hidden_states"]
        missing = {"past_key_values": cache, "cache_position": torch.arange(hidden.shape[1], device=hidden.device)}
        return hook(module, inputs, missing | arguments, output)

    hook = press.forward_hook
    press.forward_hook = with_arguments
    try:
        with press(model):
            yield
    finally:
        del press.forward_hook
    masked: list[Any] = [x for x in model.modules() if getattr(x, "masked_key_indices", None) is not None]
    for module in masked:
        module.masked_key_indices = None
    if masked:
        raise ValueError(
            f"{type(press).__name__} must drop keys, but it only masks them, and the cache does not become smaller. Use "
            "another press."
        )


def exact_block(cache: Cache) -> float:
    """Return the number of tokens that the next pass may read, at least 1. Without a limit, it is infinite.

    The logits of this pass equal those of one token per pass, because older tokens do not change before its last
    token. A layer of another package may define the number as its attribute `exact_block`.
    """

    def block(layer: Any) -> float:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            return math.inf
        if isinstance(layer, QuantizedLayer) and layer.is_initialized:
            residual = layer.keys.shape[-2] if layer.keys.dim() == 4 else 0
            # The token that fills the residual has its own pass: older versions of transformers do not quantize
            # after a pass that overfills it.
            return max(1, layer.residual_length - 1 - residual)
        return getattr(layer, "exact_block", 1)

    return min(map(block, cache.layers), default=1)


@contextmanager
def attention_restored(model: nn.Module) -> Iterator[None]:
    """Restore the attention implementation afterwards, because windows replace it."""
    config: Any = text_config(model)
    before = getattr(config, "_attn_implementation", None)
    try:
        yield
    finally:
        if before != getattr(config, "_attn_implementation", None):
            set_attention: Any = model.set_attn_implementation
            set_attention(before)


# Descriptions --------------------------------------------------------------------------------------------------------


def cache_bytes(cache: Cache) -> int:
    """Return the memory of all tensors in a cache, in bytes."""
    return sum(leaf.nbytes for leaf in leaves(cache, set()) if isinstance(leaf, torch.Tensor))


def fingerprint(compressed: ContextCache, model: nn.Module) -> str:
    """Return a SHA-256 of a cache's options. Two functions, or two folders of windows, may have the same name."""
    with attention_restored(model):
        described = leaves([compressed.create(model), compressed.press], set())
        described = [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in described]
    return hashlib.sha256(json.dumps([compressed.name, described]).encode()).hexdigest()


def leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors, numbers, strings and types in an object, each object once. Models are left out."""
    if value is None or isinstance(value, bool | int | float | str):
        yield value
        return
    if id(value) in seen or isinstance(value, type | nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
        if not parts:
            yield value
        for name in parts:  # a quantized tensor consists of other tensors
            yield from leaves(getattr(value, name), seen)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield str(name)
            yield from leaves(part, seen)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part, seen)
    elif hasattr(value, "__dict__"):
        yield type(value).__name__
        yield from leaves(vars(value), seen)


def requested_cache(model: nn.Module) -> str | None:
    """Describe the cache that the generation config asks for, if it is not the full cache.

    The description of a quantized cache is its name, such as "quantized:4". transformers ignores "hybrid".
    """
    config = getattr(model, "generation_config", None)
    kind, options = (getattr(config, name, None) for name in ("cache_implementation", "cache_config"))
    if kind == "quantized":
        options = {"nbits": 4, "backend": "quanto"} | (options or {})
        bits, backend = options.pop("nbits"), options.pop("backend")
        options = ({} if backend == "quanto" else {"backend": backend}) | options
        return ":".join([f"quantized:{bits}", *(f"{name}={value}" for name, value in options.items())])
    if kind in (None, "dynamic", "hybrid"):
        return f"cache_config={options}" if options else None
    return str(kind)
