"""Return the logits of one forward pass, from any model."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

from .model import first_parameter


OPTIONS = ("use_cache", "logits_to_keep")
# Names of the cache argument, in transformers 5.24 and before; remote code still uses the old one
CACHES = ("cache", "past_key_values")


def last_logits(model: nn.Module, ids: np.ndarray, keep: int, accepted: set[str], cache: Any = None) -> torch.Tensor:
    """Return the logits at the last `keep` positions of inputs (B, T) from one forward pass, (B, keep, V).

    The other logits are not computed if the model's forward takes `logits_to_keep`, as causal models in transformers
    do.

    Args:
        accepted: `accepted_options` of the model.
        cache: cache of the preceding tokens, which is updated in place.

    Raises:
        ValueError: the model returns fewer than `keep` logits.
    """
    options: dict[str, Any] = {"use_cache": cache is not None, "logits_to_keep": keep}
    if cache is not None:  # None would override the prefix of a PEFT model
        options |= dict.fromkeys(CACHES, cache)
    options = {name: value for name, value in options.items() if name in accepted}
    output = model(torch.from_numpy(ids).to(input_device(model)), **options)
    if not isinstance(output, tuple) and not hasattr(output, "logits"):
        raise TypeError(
            f"the model returns {type(output).__name__}, which has no logits. Load it with its head: AutoModelForCausalLM."
        )
    logits = output[0] if isinstance(output, tuple) else output.logits
    if logits.shape[1] < keep:
        raise ValueError(
            f"{type(model).__name__} returned logits for {logits.shape[1]} positions; {keep} were requested, and the input "
            f"has {ids.shape[1]}. Its forward should honour logits_to_keep or return all logits."
        )
    return logits[:, logits.shape[1] - keep :]  # PEFT's virtual tokens come first


def argmax(logits: torch.Tensor) -> np.ndarray:
    """Return the argmax of logits (..., V), the lowest index on ties, or -1 if one is NaN; (...) int64."""
    best = logits.max(-1)  # max propagates NaN, which saves a second pass over the logits
    return best.indices.masked_fill(best.values.isnan(), -1).cpu().numpy()


def accepted_options(model: nn.Module) -> set[str]:
    """Return which of `OPTIONS` the model's forward takes, by name or through **kwargs, and its name for a cache.

    If a wrapper takes **kwargs, the cache name comes from its first inner module that has one.
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


def cache_argument(model: nn.Module) -> str:
    """Return the name of a model's cache argument and output, one of `CACHES`."""
    return next(name for name in CACHES if name in accepted_options(model))


def input_device(model: nn.Module) -> torch.device:
    """Return the device for the model's input ids."""
    device = first_parameter(model).device
    # weights on "meta" are offloaded, and accelerate moves the input to their execution device
    return torch.device("cpu") if device.type == "meta" else device
