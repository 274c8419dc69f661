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
    raise ImportError(f"transformers has a name for the cache that FoX does not know; {REPAIR}")


def accept_both_names(function: Callable) -> Callable:
    """Return a function with an argument `cache` that also accepts `past_key_values`, with transformers' own warning.

    Before 5.24, where `generate` uses the old name, the signature shows that name and nothing warns.
    """
    if CACHE == "cache":
        return deprecation.deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(function)
    renamed: Any = rename_cache(function, CACHE, "cache")
    signature = inspect.signature(function)
    parameters = [p.replace(name=CACHE) if p.name == "cache" else p for p in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=parameters)  # which transformers inspects
    return renamed


def adapt(function: Callable) -> Callable:
    """Return a function of transformers that accepts and returns both names, as it does since 5.24."""
    return function if CACHE == "cache" else rename_cache(function, "cache", CACHE)


def rename_cache(function: Callable, old: str, new: str) -> Callable:
    """Return a function that also takes its argument `new` under the name `old`, and whose output has both names."""

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
    """Raise TypeError if an unknown keyword argument is a cache, which would otherwise be ignored."""
    if type(value).__name__.endswith("Cache"):
        repair = "pass it as `cache`." if IS_TESTED else REPAIR
        raise TypeError(f"FoX does not know the argument {name!r}, a {type(value).__name__}: {repair}")


class BothNames:
    """Add the name `cache` to an output of a version before 5.24."""

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
        # a name of this module, for pickle
        BOTH_NAMES[kind] = globals()[kind.__name__] = type(kind.__name__, (BothNames, kind), {"__module__": __name__})
