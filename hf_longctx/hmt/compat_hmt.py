"""The name of the cache, which depends on the version of transformers.

transformers 5.24 renamed `past_key_values` to `cache`. HMT uses the new name, and accepts and returns both names with
every version from 5.15 on.
"""

import functools
import inspect
from collections.abc import Callable

from transformers import GenerationMixin
from transformers.utils import deprecation


RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


@functools.cache
def cache_name(model_class: type) -> str | None:
    """Return the name under which the forward of a model takes a cache, or None if it takes none.

    Code outside transformers keeps the old name with every version.
    """
    parameters = inspect.signature(model_class.forward).parameters  # ty: ignore[missing-attribute]
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def accept_both_names(function: Callable) -> Callable:
    """Return a method with an argument `cache` that accepts `past_key_values` too, with transformers' own warning.

    There is no warning before 5.24, where `past_key_values` is the name that transformers uses.
    """
    if RENAMED:
        function = deprecation.deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")(function)

    @functools.wraps(function)
    def renamed(*args, **kwargs):
        if "cache" in kwargs and "past_key_values" in kwargs:
            if kwargs["cache"] is not None and kwargs["past_key_values"] is not None:
                raise ValueError("`cache` and `past_key_values` are names of the same argument. Give only `cache`.")
            del kwargs["cache" if kwargs["cache"] is None else "past_key_values"]
        if not RENAMED and "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        return function(*args, **kwargs)

    return renamed


__all__ = ["RENAMED", "accept_both_names", "cache_name"]
