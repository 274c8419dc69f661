"""The processes of torch.distributed that share a measurement. This file knows no metric."""

from __future__ import annotations

from typing import Any

import torch

from .reader import Reader


def rank_and_world_size(reader: Reader) -> tuple[int, int]:
    """Return the rank of this process and the number of all that share the work: (0, 1) unless each has the model."""
    if not several_processes() or reader.is_distributed:
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def several_processes() -> bool:
    """Return whether torch.distributed is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_rank() -> int:
    """Return the rank of this process in torch.distributed; 0 without it."""
    return torch.distributed.get_rank() if several_processes() else 0


def exchange(scores: dict, failure: BaseException | None, processes: int) -> tuple[dict, BaseException | None]:
    """Collect the scores of all processes, and a failure if one of them had one."""
    if processes == 1:
        return scores, failure
    everyone: list[Any] = [None] * processes
    torch.distributed.all_gather_object(everyone, (scores, repr(failure) if failure else None))
    for rank, (_, message) in enumerate(everyone):
        if message and failure is None:
            failure = RuntimeError(f"process {rank} failed: {message}")
    return {key: score for scores, _ in everyone for key, score in scores.items()}, failure
