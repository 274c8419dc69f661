"""The name of the cache argument: transformers 5.24 renamed `past_key_values` to `cache`. HMT accepts both names."""

import functools
import inspect

from transformers import GenerationMixin


RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


@functools.cache
def cache_name(model_class: type) -> str | None:
    """Return the name of a model's cache argument, or None if its forward does not take a cache.

    Remote code keeps the old name with every version of transformers.
    """
    parameters = inspect.signature(model_class.forward).parameters  # ty: ignore[missing-attribute]
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


__all__ = ["RENAMED", "cache_name"]
