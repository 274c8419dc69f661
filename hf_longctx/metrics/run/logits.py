"""Compute logits with one forward pass of any causal language model."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

from .model import first_parameter


OPTIONS = ("use_cache", "logits_to_keep")
# Name of the cache argument since transformers 5.24, and its older name, which remote code still uses
CACHES = ("cache", "past_key_values")


def last_logits(model: nn.Module, ids: np.ndarray, keep: int, accepted: set[str], cache: Any = None) -> torch.Tensor:
    """Return the logits (B, keep, V) at the last `keep` positions of inputs (B, T), from one forward pass.

    Causal models in transformers accept `logits_to_keep`, so they do not compute the other logits.

    Args:
        model: a causal language model.
        ids: input ids, (B, T) int64.
        keep: number of positions.
        accepted: names returned by `accepted_options`.
        cache: cache of the preceding tokens, which is updated in place.

    Raises:
        ValueError: the model returns fewer than `keep` logits.
    """
    options: dict[str, Any] = {"use_cache": cache is not None, "logits_to_keep": keep}
    if cache is not None:  # passing None would remove the virtual tokens of a PEFT model
        options |= dict.fromkeys(CACHES, cache)
    options = {name: value for name, value in options.items() if name in accepted}
    output = model(torch.from_numpy(ids).to(input_device(model)), **options)
    if not isinstance(output, tuple) and not hasattr(output, "logits"):
        raise TypeError(
            f"the model must return logits, got {type(output).__name__}. Load it with AutoModelForCausalLM."
        )
    logits = output[0] if isinstance(output, tuple) else output.logits
    if logits.shape[1] < keep:
        raise ValueError(
            f"{type(model).__name__} must return logits for the last {keep} of {ids.shape[1]} positions, got "
            f"{logits.shape[1]} positions. Its forward should support logits_to_keep, or return all logits."
        )
    return logits[:, logits.shape[1] - keep :]  # drops the logits of PEFT's virtual tokens


def argmax(logits: torch.Tensor) -> np.ndarray:
    """Return the argmax of logits (..., V) as (...) int64. Ties give the lowest index, and a NaN gives -1."""
    best = logits.max(-1)  # also detects NaN, without a second pass over the logits
    return best.indices.masked_fill(best.values.isnan(), -1).cpu().numpy()


def accepted_options(model: nn.Module) -> set[str]:
    """Return the names of the arguments in `OPTIONS` and `CACHES` that the model's forward accepts.

    If the forward accepts **kwargs, all `OPTIONS` count as accepted, and the name of the cache argument is taken from
    the first inner module with such an argument.
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
    """Return the name of the cache in a model's arguments and output: one of `CACHES`."""
    return next(name for name in CACHES if name in accepted_options(model))


def input_device(model: nn.Module) -> torch.device:
    """Return the device for the model's input ids."""
    device = first_parameter(model).device
    # parameters on "meta" are offloaded, and accelerate moves the input to the execution device
    return torch.device("cpu") if device.type == "meta" else device
