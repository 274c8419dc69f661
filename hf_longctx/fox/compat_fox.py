"""Support for both names of the cache, and for `slice_logits_to_keep` of transformers 5.23.

transformers 5.24 renamed `past_key_values` to `cache` in models, masks and outputs. FoX uses the new name. With every
version since 5.15, FoX accepts and returns both names.
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


try:
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:

    def slice_logits_to_keep(hidden_states, logits_to_keep):
        """Return the hidden states of the last `logits_to_keep` positions (0: all).

        If `logits_to_keep` is a tensor, it contains the positions.
        """
        last = isinstance(logits_to_keep, int)
        return hidden_states[:, slice(-logits_to_keep, None) if last else logits_to_keep]


CACHE = "cache" if "cache" in {f.name for f in fields(BaseModelOutputWithPast)} else "past_key_values"


def accept_both_names(function: Callable) -> Callable:
    """Let a function with an argument `cache` also accept `past_key_values`.

    Since transformers 5.24, the old name causes transformers' own warning. In earlier versions, `generate` uses the
    old name. With these versions, the signature shows the old name, and no warning appears.
    """
    if CACHE == "cache":
        return deprecation.deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(function)
    renamed: Any = rename_cache(function, CACHE, "cache")
    signature = inspect.signature(function)
    parameters = [p.replace(name=CACHE) if p.name == "cache" else p for p in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=parameters)  # transformers inspects it
    return renamed


def adapt(function: Callable) -> Callable:
    """Let a function of transformers accept and return both names. Since 5.24, transformers does this itself."""
    return function if CACHE == "cache" else rename_cache(function, "cache", CACHE)


def rename_cache(function: Callable, old: str, new: str) -> Callable:
    """Let a function accept its argument `new` also under the name `old`, and return outputs with both names."""

    @functools.wraps(function)
    def renamed(*args, **kwargs):
        if old in kwargs:
            cache = kwargs.pop(old)
            if kwargs.get(new) is None:
                kwargs[new] = cache
        output = function(*args, **kwargs)
        return BOTH_NAMES[type(output)](**output) if type(output) in BOTH_NAMES else output

    return renamed


class BothNames:
    """A model output whose `past_key_values` is also available as `cache`, for transformers before 5.24."""

    past_key_values: Any

    @property
    def cache(self):
        return self.past_key_values

    @cache.setter
    def cache(self, value):
        self.past_key_values = value


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
