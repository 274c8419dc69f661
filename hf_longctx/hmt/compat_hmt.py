"""The name of the cache: transformers 5.24 renamed `past_key_values` to `cache`. HMT takes both with every version."""

import functools
import inspect

from transformers import GenerationMixin


RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


@functools.cache
def cache_name(model_class: type) -> str | None:
    """Return the name under which the forward of a model takes a cache, or None if it does not take one.

    Code outside transformers keeps the old name with every version.
    """
    parameters = inspect.signature(model_class.forward).parameters  # ty: ignore[missing-attribute]
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


__all__ = ["RENAMED", "cache_name"]
