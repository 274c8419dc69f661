"""Logits of one input by one plain forward pass, and the likeliest ids.

`predict_plainly` is the definition of a prediction; engine.py gives the same for less.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

from .model import first_parameter


OPTIONS = ("use_cache", "logits_to_keep")
CACHES = (
    "cache",
    "past_key_values",
)  # the names of a cache, in transformers 5.24 and before; remote code keeps the old


def predict_plainly(model: nn.Module, ids: np.ndarray, positions: range) -> np.ndarray:
    """Return greedy next-token predictions, (len(positions),) int64, by `logits_plainly`; -1 where a logit is NaN."""
    return argmax(logits_plainly(model, ids, positions))


def logits_plainly(model: nn.Module, ids: np.ndarray, positions: range) -> torch.Tensor:
    """Return logits at some consecutive positions of one input (T,), by one forward pass without a cache; (P, V).

    Only the logits of these positions are computed, never (T, V), where the model's forward takes `logits_to_keep`,
    as the causal models in transformers do.

    Raises:
        ValueError: the model returns neither the requested logits nor those of all positions.
    """
    keep = torch.arange(positions.start, positions.stop)
    learned_prompt = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if learned_prompt or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        # PEFT's virtual tokens in front would shift an index, and accelerate would move a tensor to the first device,
        # while the hidden states end on the last one
        keep = len(ids) - positions.start
    options = {"use_cache": False, "logits_to_keep": keep}
    options = {name: options[name] for name in options.keys() & accepted_options(model)}
    logits = output_logits(model(torch.from_numpy(ids)[None].to(input_device(model)), **options))[0]  # (rows, V)
    if len(logits) >= len(ids) or len(logits) == len(ids) - positions.start:  # no logits_to_keep, or a number to keep
        logits = logits[len(logits) - len(ids) + positions.start :][: len(positions)]
    check_returned(model, len(logits) == len(positions), len(logits), len(positions), len(ids))
    return logits


def argmax(logits: torch.Tensor) -> np.ndarray:
    """Return the index of the largest of (..., V), the first of equal ones, or -1 where one is NaN; (...) int64."""
    best = logits.max(-1)  # NaN wins a maximum, so that no second pass over the logits is needed to find it
    return best.indices.masked_fill(best.values.isnan(), -1).cpu().numpy()


def output_logits(output: Any) -> torch.Tensor:
    """Return the logits in the output of a model.

    Raises:
        TypeError: there are none.
    """
    if not isinstance(output, tuple) and not hasattr(output, "logits"):
        raise TypeError(
            f"the model returns {type(output).__name__}, which has no logits. Load it with its head: AutoModelForCausalLM."
        )
    return output[0] if isinstance(output, tuple) else output.logits


def check_returned(model: nn.Module, right: bool, returned: int, requested: int, length: int) -> None:
    """Raise ValueError if the model has returned another number of logits than requested."""
    if not right:
        raise ValueError(
            f"{type(model).__name__} returned logits for {returned} positions; {requested} were asked for, and the input "
            f"has {length}. Its forward should honour logits_to_keep or return all logits."
        )


def accepted_options(model: nn.Module) -> set[str]:
    """Return which of `OPTIONS` the model's forward takes, by name or through **kwargs, and its name for a cache.

    Where wrappers take **kwargs, the name is that of the first module in them that has one.
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
    """Return the name of the cache in the arguments and outputs of a model, one of `CACHES`."""
    return next(name for name in CACHES if name in accepted_options(model))


def input_device(model: nn.Module) -> torch.device:
    """Return where the model takes its ids."""
    device = first_parameter(model).device
    # on "meta" the weights are offloaded, and accelerate moves the input to where they will be
    return torch.device("cpu") if device.type == "meta" else device
