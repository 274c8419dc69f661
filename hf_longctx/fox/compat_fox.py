"""Support for both names of the cache.

transformers 5.24 renamed `past_key_values` to `cache` in models, masks and outputs. FoX uses the new name, and accepts
and returns both names with every version since 5.15.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers import modeling_outputs
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import deprecation

from .configuration_fox import IS_TESTED, REPAIR


CACHE = next((f.name for f in fields(BaseModelOutputWithPast) if f.name in ("cache", "past_key_values")), "")
if not CACHE:
    raise ImportError(f"FoX does not know the name of the cache in this transformers; {REPAIR}")


def accept_both_names(function: Callable) -> Callable:
    """Make a function with an argument `cache` also accept `past_key_values`, with transformers' own warning.

    Before 5.24, `generate` uses the old name, so the signature shows that name and no warning is issued.
    """
    if CACHE == "cache":
        return deprecation.deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(function)
    renamed: Any = rename_cache(function, CACHE, "cache")
    signature = inspect.signature(function)
    parameters = [p.replace(name=CACHE) if p.name == "cache" else p for p in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=parameters)  # transformers inspects it
    return renamed


def adapt(function: Callable) -> Callable:
    """Make a transformers function accept and return both names, as it does since 5.24."""
    return function if CACHE == "cache" else rename_cache(function, "cache", CACHE)


def rename_cache(function: Callable, old: str, new: str) -> Callable:
    """Make a function accept its argument `new` under the name `old` too, and return outputs with both names."""

    @functools.wraps(function)
    def renamed(*args, **kwargs):
        if old in kwargs:
            cache = kwargs.pop(old)
            if cache is not None and kwargs.get(new) is not None:
                raise ValueError("`cache` and `past_key_values` are names of the same argument. Pass only `cache`.")
            if kwargs.get(new) is None:
                kwargs[new] = cache
        output = function(*args, **kwargs)
        return BOTH_NAMES[type(output)](**output) if type(output) in BOTH_NAMES else output

    return renamed


def check_unknown(name: str, value: Any) -> None:
    """Raise TypeError if an unknown keyword argument is a cache, instead of ignoring it."""
    if type(value).__name__.endswith("Cache"):
        repair = "pass it as `cache`." if IS_TESTED else REPAIR
        raise TypeError(f"FoX does not know the argument {name!r}, a {type(value).__name__}: {repair}")


class BothNames:
    """An output that also has the name `cache`, for transformers before 5.24."""

    past_key_values: Any

    @property
    def cache(self):
        return self.past_key_values

    @cache.setter
    def cache(self, value):
        self.past_key_values = value

    def __getitem__(self, key):
        return super().__getitem__("past_key_values" if key == "cache" else key)  # ty: ignore[missing-attribute]

    def __contains__(self, key):
        return super().__contains__("past_key_values" if key == "cache" else key)  # ty: ignore[missing-attribute]

    def get(self, key, default=None):
        return super().get("past_key_values" if key == "cache" else key, default)  # ty: ignore[missing-attribute]


BOTH_NAMES: dict[type, type] = {}
if CACHE != "cache":
    for kind in (
        BaseModelOutputWithPast,
        modeling_outputs.CausalLMOutputWithPast,
        modeling_outputs.SequenceClassifierOutputWithPast,
        GenerateDecoderOnlyOutput,
        GenerateBeamDecoderOnlyOutput,
    ):
        # defined in this module, so that pickle finds it
        BOTH_NAMES[kind] = globals()[kind.__name__] = type(kind.__name__, (BothNames, kind), {"__module__": __name__})
