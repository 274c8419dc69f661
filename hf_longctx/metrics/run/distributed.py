"""Distribute a measurement over the processes of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from .reader import Reader


def rank_and_world_size(reader: Reader | None = None) -> tuple[int, int]:
    """Return the rank of this process, and the number of processes that share the trials.

    Without torch.distributed, or if the model itself is sharded over the processes, return (0, 1).
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or (reader and reader.is_distributed):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def process_rank() -> int:
    """Return the rank of this process. Return 0 if torch.distributed is not initialized."""
    return rank_and_world_size()[0]


def exchange(scores: dict, failure: BaseException | None) -> tuple[dict, BaseException | None]:
    """Gather the scores of all processes.

    Returns:
        the scores, and an exception. If this process failed, the exception is its own. If only other processes
        failed, the exception is a RuntimeError about the first of them. If no process failed, it is None.
    """
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (scores, repr(failure) if failure else None))
    for rank, (_, message) in enumerate(everyone):
        if message and failure is None:
            failure = RuntimeError(f"process {rank} failed: {message}")
    return {key: score for scores, _ in everyone for key, score in scores.items()}, failure
