"""Tensor parallelism of weights with one or more rows per head.

vLLM's linear layers shard the large matrices. Gates and token shifts do not use these layers and are thus never
quantized, because errors of a gate accumulate over the whole context.
"""

from functools import partial

import torch
from torch import nn


def load_rows(parameter: nn.Parameter, loaded: torch.Tensor, *, rank: int, ranks: int) -> None:
    """Copy this rank's rows of a checkpoint weight; a `weight_loader` of vLLM. Ranks can share the rows of a key head.

    Raises:
        ValueError: number or width of the heads in the checkpoint differ from its config.
    """
    total, local = len(loaded), len(parameter)
    if loaded.shape[1:] != parameter.shape[1:] or total % local or ranks % (total // local):
        raise ValueError(
            f"a weight of a gate, token shift or norm is {tuple(loaded.shape)}; config.json says {tuple(parameter.shape)} "
            f"on each of {ranks} ranks. Save the model again with save_pretrained."
        )
    first = rank * (total // local) // ranks * local
    parameter.data.copy_(loaded[first : first + local])


def sharded(module: nn.Module, rank: int, ranks: int) -> nn.Module:
    """Set the weight loader of a module's parameters, which contain one rank's rows."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        setattr(parameter, "weight_loader", partial(load_rows, rank=rank, ranks=ranks))  # noqa: B010 (vLLM's protocol)
    return module
