"""Compressed caches: what does a model forget if the cache of its context is quantized, windowed or pruned?

The engine reads the context of an input in one pass, as `generate` reads a prompt. Attention is then exact, and the
cache is compressed at the end of the pass. The engine reads all further tokens with the compressed cache, in passes of
at most `exact_block` tokens. The logits equal those of one token per pass.
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


NAMES = "full, quantized:BITS, window:TOKENS, or module.NAME:ARGUMENT, such as kvpress.SnapKVPress:0.5"


class ContextCache(NamedTuple):
    """A cache for the context of an input.

    Attributes:
        name: name in the settings of a result.
        create: function that creates an empty cache for a model.
        press: press of kvpress that compresses the cache. None if the cache compresses itself.
        windows: object whose method `apply` prepares a model for the cache, until `remove`. None if there is none.
    """

    name: str
    create: Callable[[nn.Module], Cache]
    press: Any = None
    windows: Any = None

    def new(self, model: nn.Module) -> Cache:
        """Return an empty cache for a model. Raise ValueError if the model does not support it."""
        try:
            cache: Any = self.create(model)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"cache={self.name} does not support {type(model).__name__}: {error}.") from error
        if not isinstance(cache, Cache):
            raise ValueError(f"cache={self.name} must create a Cache of transformers, got {type(cache).__name__}.")
        return cache


class CountingLayer(DynamicLayer):
    """A layer that may drop tokens, and reports the number of tokens that it has seen.

    The model derives positions and masks from this number, so they remain correct. With a window, the layer stores
    `window` tokens: the first `sinks` tokens and the newest tokens.
    """

    is_croppable = False

    def __init__(self, window: float = math.inf, sinks: int = 0):
        super().__init__()
        self.window, self.sinks, self.seen = window, sinks, 0

    @property
    def stored(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    @property
    def exact_block(self) -> float:
        return max(1, self.window - self.stored + 1)

    def update(self, key_states, value_states, *args, **kwargs):
        self.seen += key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.stored > self.window:
            newest = self.stored - int(self.window) + self.sinks
            self.keys, self.values = (torch.cat([x[:, :, : self.sinks], x[:, :, newest:]], 2) for x in (keys, values))
        return keys, values

    def get_seq_length(self):
        return self.seen

    def get_mask_sizes(self, query_length):
        return self.stored + query_length, self.seen - self.stored


def full_cache(model: nn.Module) -> Cache:
    return DynamicCache(config=text_config(model))


def counting_cache(model: nn.Module, window: float = math.inf, sinks: int = 0) -> Cache:
    """Create a cache of `CountingLayer`s. Layers with a sliding window of their own keep this window."""
    cache = full_cache(model)
    if all(type(layer) is not DynamicLayer for layer in cache.layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise ValueError(
            f"windows and presses need a DynamicLayer in the cache, but {type(model).__name__} has {kinds}."
        )
    cache.layers = [CountingLayer(window, sinks) if type(x) is DynamicLayer else x for x in cache.layers]
    return cache


def context_cache(cache: Any) -> ContextCache:
    """Return the cache that a name such as "quantized:4:backend=hqq" or an object describes.

    Objects, and names of the form module.NAME, may be:

    - a function or a Cache class. The first argument is the model.
    - a press of kvpress.
    - windows with the methods `apply(model)`, `remove(model)` and `cache()`. In a name, the argument is a folder.

    Raises:
        ValueError: the name or the object is invalid.
        ImportError: a package is missing.
    """
    if isinstance(cache, ContextCache):
        return cache
    if not isinstance(cache, str):
        kind = cache if hasattr(cache, "__qualname__") else type(cache)
        return of_object(f"{kind.__module__}.{kind.__qualname__}", cache)
    kind, *words = cache.split(":")
    arguments, options = [], {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():  # a folder may also contain "="
            options[name] = literal(value)
        else:
            arguments.append(literal(word))
    try:
        if kind in SHORT_NAMES:
            return ContextCache(cache, SHORT_NAMES[kind](*arguments, **options))
        module, _, name = kind.rpartition(".")
        found: Any = getattr(importlib.import_module(module), name)
        if hasattr(found, "from_pretrained"):
            return of_object(cache, found.from_pretrained(cache.partition(":")[2]))
        if isinstance(found, type) and not issubclass(found, Cache):
            return of_object(cache, found(*arguments, **options))
        if not callable(found):
            raise TypeError(f"{name} must be a function or a class")
        return ContextCache(cache, lambda model: found(model, *arguments, **options))
    except ModuleNotFoundError as error:
        raise ImportError(f"cache={cache} needs {error.name}. Install it with pip.") from error
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"cache must be {NAMES}, got {cache!r}: {error}.") from error


def literal(word: str) -> Any:
    """Parse a number. Any other word is a string."""
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError, TypeError):
        return word


def of_object(name: str, value: Any) -> ContextCache:
    if hasattr(value, "forward_hook"):
        if getattr(value, "rerotate_keys", False):
            raise ValueError(f"{name} rotates keys to other positions, which is not supported. Use another press.")
        return ContextCache(name, counting_cache, press=value)
    if hasattr(value, "apply"):
        return ContextCache(name, lambda model: value.cache(), windows=value)
    if not callable(value):
        raise ValueError(f"cache must be {NAMES}, or a function of the model, got {value!r}.")
    return ContextCache(name, value)


def quantized(bits: int, backend: str = "quanto", **options: Any) -> Callable[[nn.Module], Cache]:
    create: Any = partial(QuantizedCache, backend, nbits=bits, **options)
    create(config=LlamaConfig(num_hidden_layers=1))  # checks the options
    return lambda model: create(config=text_config(model))


def window(tokens: int, sinks: int = 4) -> Callable[[nn.Module], Cache]:
    if not isinstance(tokens, int) or not isinstance(sinks, int) or not 0 <= sinks < tokens:
        raise ValueError(f"a window must have more than {sinks} tokens, the number of sinks")
    return partial(counting_cache, window=tokens, sinks=sinks)


SHORT_NAMES: dict[str, Callable[..., Callable]] = {
    "full": lambda: full_cache,
    "quantized": quantized,
    "window": window,
}


@contextmanager
def applied(windows: Any, model: nn.Module) -> Iterator[None]:
    """Prepare a model for windows, if any, inside the `with` statement.

    Raises:
        ValueError: windows have been applied already.
    """
    if windows is None:
        yield
        return
    if any(hasattr(module, "head_windows") for module in model.modules()):
        raise ValueError(
            "a model to which windows are applied cannot be measured with a cache of windows, because they would be "
            "removed at its end. Call windows.remove(model) first."
        )
    windows.apply(model)
    try:
        yield
    finally:
        windows.remove(model)


@contextmanager
def pressing(press: Any, model: nn.Module, cache: Cache) -> Iterator[None]:
    """Read a context with a press of kvpress, or without a press.

    kvpress 0.5 needs two arguments that transformers 5.24 renamed and removed.

    Raises:
        ValueError: the press masks keys instead of dropping them.
    """
    if press is None:
        yield
        return

    def with_arguments(module, inputs, arguments, output):
        if not isinstance(cache.layers[module.layer_idx], CountingLayer):  # the layer has a window of its own
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
        raise ValueError(f"a press must drop keys, but {type(press).__name__} only masks them. Use another press.")


def exact_block(cache: Cache) -> float:
    """Return the number of tokens that the next pass may read: older tokens do not change before its last token.

    A layer of another package may define this number as its attribute `exact_block`.
    """

    def block(layer: Any) -> float:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            return math.inf
        if isinstance(layer, QuantizedLayer) and layer.is_initialized:
            # The token that fills the residual is read alone: older versions of transformers do not quantize after a
            # longer pass that fills it.
            return max(1, layer.residual_length - 1 - (layer.keys.shape[-2] if layer.keys.dim() == 4 else 0))
        return getattr(layer, "exact_block", 1)

    return min(map(block, cache.layers), default=1)


def cache_bytes(cache: Cache) -> int:
    """Return the memory of all tensors in a cache, in bytes."""
    return sum(leaf.nbytes for leaf in leaves(cache, set()) if isinstance(leaf, torch.Tensor))


def fingerprint(compressed: ContextCache, model: nn.Module) -> str:
    """Return a SHA-256 of a cache's options. Two functions, or two versions of a folder, may have the same name."""
    described = leaves([*compressed, compressed.new(model)], set())
    described = [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in described]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors, numbers and strings in an object, each object once. Models are left out."""
    if value is None or isinstance(value, bool | int | float | str):
        yield value
    elif id(value) not in seen and not isinstance(value, type | nn.Module):
        seen.add(id(value))
        if hasattr(value, "__tensor_flatten__"):  # a quantized tensor consists of other tensors
            value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        elif isinstance(value, torch.Tensor):
            yield value
            value = ()
        elif not isinstance(value, dict | list | tuple):
            value = {"type": type(value).__name__, **getattr(value, "__dict__", {})}
        for part in [x for pair in value.items() for x in pair] if isinstance(value, dict) else value:
            yield from leaves(part, seen)


def requested_cache(model: nn.Module) -> str | None:
    """Return the name of the cache that the generation config asks for. For the full cache, return None."""
    config = getattr(model, "generation_config", None)
    kind, options = getattr(config, "cache_implementation", None), {**(getattr(config, "cache_config", None) or {})}
    bits = [str(options.pop("nbits", 4))] if kind == "quantized" else []
    kind = [] if kind in (None, "dynamic", "hybrid") else [kind]  # transformers ignores "hybrid"
    return ":".join([*kind, *bits, *(f"{name}={value}" for name, value in options.items())]) or None
