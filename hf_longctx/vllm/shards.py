"""Tensor parallelism for weights with one or more rows per head, such as those of gates and token shifts.

vLLM's linear layers shard the large matrices. Gates and token shifts do not use these layers, because vLLM could
quantize the layers' weights. The errors of a quantized gate would accumulate over the whole context.
"""

from functools import partial

import torch
from torch import nn


def load_rows(parameter: nn.Parameter, loaded: torch.Tensor, *, rank: int, ranks: int) -> None:
    """Copy this rank's rows of a checkpoint weight. vLLM calls this function as a `weight_loader`.

    If there are more ranks than key heads, several ranks copy the same rows.

    Raises:
        ValueError: the shape of the weight does not match the config.
    """
    total, local = len(loaded), len(parameter)
    if loaded.shape[1:] != parameter.shape[1:] or total % local or ranks % (total // local):
        raise ValueError(
            f"a weight of a gate, token shift or norm has shape {tuple(loaded.shape)}, but config.json requires "
            f"{tuple(parameter.shape)} on each of {ranks} ranks. Save the model again with save_pretrained."
        )
    first = rank * (total // local) // ranks * local
    parameter.data.copy_(loaded[first : first + local])


def sharded(module: nn.Module, rank: int, ranks: int) -> nn.Module:
    """Set `load_rows` as the weight loader of a module's parameters. They contain only this rank's rows."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        setattr(parameter, "weight_loader", partial(load_rows, rank=rank, ranks=ranks))  # noqa: B010 (vLLM's protocol)
    return module
