"""What a model gives for one input: its logits by one plain forward pass, and the likeliest ids.

`predict_plainly` is the definition of a prediction; engine.py gives the same for less.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .model import first_parameter


def predict_plainly(model: nn.Module, ids: np.ndarray, positions: range) -> np.ndarray:
    """Greedy next-token predictions, (len(positions),) int64, from `logits_plainly`; -1 where a logit is NaN."""
    return argmax(logits_plainly(model, ids, positions))


def logits_plainly(model: nn.Module, ids: np.ndarray, positions: range) -> torch.Tensor:
    """Logits at some consecutive positions of one input (T,), by one forward pass without a cache; (P, V).

    Only the logits of these positions are computed, never (T, V), where the model's forward takes `logits_to_keep`,
    as the causal models in transformers do.

    Raises:
        ValueError: the model returns neither the requested logits nor those of all positions.
    """
    keep = torch.arange(positions.start, positions.stop)
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        # accelerate would move an index tensor to the first device, while the hidden states end on the last one
        keep = len(ids) - positions.start
    options = accepted(model, use_cache=False, logits_to_keep=keep)
    logits = output_logits(model(torch.from_numpy(ids)[None].to(input_device(model)), **options))[0]  # (rows, V)
    if len(logits) in (len(ids), len(ids) - positions.start):  # no logits_to_keep, or a number to keep
        logits = logits[len(logits) - len(ids) + positions.start :][: len(positions)]
    if len(logits) != len(positions):
        raise wrong_logits(model, len(logits), len(positions), len(ids))
    return logits


def argmax(logits: torch.Tensor) -> np.ndarray:
    """Index of the largest of (..., V), the first of equal ones, or -1 where one is NaN; (...) int64."""
    best = logits.max(-1)  # NaN wins a maximum, so that no second pass over the logits is needed to find it
    return best.indices.masked_fill(best.values.isnan(), -1).cpu().numpy()


def argmax_tiled(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: tuple[int, int]
) -> np.ndarray:
    """`argmax(hidden @ weight.T + bias)`, (B, P) int64, with no more logits at a time than a tile has.

    Args:
        hidden, weight, bias: (B, P, D), (V, D) and (V,).
        tile: positions and vocabulary rows.
    """
    rows, columns = tile
    indices = []
    for part in hidden.reshape(-1, hidden.shape[-1]).to(weight.device).split(rows):
        best, index = None, None
        for start in range(0, len(weight), columns):
            some = slice(start, start + columns)
            tile_best = F.linear(part, weight[some], None if bias is None else bias[some]).max(-1)
            if best is None:
                best, index = tile_best
                continue
            better = (tile_best.values > best) | tile_best.values.isnan()  # not >=: the first of equal logits counts
            best = torch.where(better, tile_best.values, best)
            index = torch.where(better, tile_best.indices + start, index)
        indices.append(index.masked_fill(best.isnan(), -1))
    return torch.cat(indices).view(hidden.shape[:2]).cpu().numpy()


def output_logits(output) -> torch.Tensor:
    if not isinstance(output, tuple) and not hasattr(output, "logits"):
        raise TypeError(
            f"the model returns {type(output).__name__}, which has no logits. Load it with its head: AutoModelForCausalLM."
        )
    return output[0] if isinstance(output, tuple) else output.logits


def wrong_logits(model, returned, requested, length):
    return ValueError(
        f"{type(model).__name__} returned logits for {returned} positions; {requested} were asked for, and the input has "
        f"{length}. Its forward should honour logits_to_keep or return all logits."
    )


def accepted(model: nn.Module, **options) -> dict:
    """Those options that the model's forward takes, by name or through **kwargs as wrappers do."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in options.items() if takes_any or name in parameters}


def input_device(model: nn.Module) -> torch.device:
    """Where the model takes its ids."""
    device = first_parameter(model).device
    # on "meta" the weights are offloaded, and accelerate moves the input to where they will be
    return torch.device("cpu") if device.type == "meta" else device
