"""Sequence parallelism: N processes share each row, so that rows can be N times as long (Ulysses, arXiv 2309.14509).

Each process has one of N equal parts of every row; embeddings, projections, MLPs and the loss need no more. Attention
needs all keys: there the processes exchange parts for heads (all-to-all), so that each has whole rows of H / N heads.
Gates travel with their heads, so their cumulative sum, packed documents and windows are those of a single process. The
token shift needs the last token of the part before.

Gradients need nothing of their own: Trainer divides the sum over a process' own labels by the count of all labels, and
DDP and FSDP add up what all processes have.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .data import stack
from .trainer import LongContextTrainer


class SequenceShard:
    """The part of each row that this process has, and its exchange with the processes that have the other parts.

    FoX takes it as `shard` (fox/state_fox.py); t = T / N.

    Args:
        size: N, processes that share a row: neighbours by rank.

    Raises:
        ValueError: N does not divide the number of processes.
    """

    def __init__(self, size: int):
        self.group: Any = dist.new_subgroups(size)[0]
        self.size, self.rank = size, dist.get_rank(self.group)

    def collate(self, rows: list[dict[str, torch.Tensor]], options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make a batch of rows of `make_row`: ids and labels of this part, (B, t), and all positions, (B, T).

        Labels are shifted before they are divided, because the last token of a part predicts the first of the next.
        """
        batch = stack(rows)
        labels = self.part(F.pad(batch["labels"][:, 1:], (0, 1), value=-100))
        return {
            "input_ids": self.part(batch["input_ids"]),
            "position_ids": batch["position_ids"],
            "labels": labels,  # Trainer takes a batch without them for one without a loss
            "shift_labels": labels,
            "shard": self,
            **(options or {}),
        }

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of this process, (B, t, ...), of whole rows, (B, T, ...)."""
        return x.chunk(self.size, dim=1)[self.rank].contiguous()

    def token_before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last token of the previous part, (B, 1, ...), for x, (B, t, ...); 0 for the first part."""
        ranks = torch.arange(self.size, device=x.device).view(-1, *[1] * x.ndim)
        to_next = torch.where(ranks == self.rank + 1, x[None, :, -1:], 0.0)  # (N, B, 1, ...)
        return AllToAll.apply(to_next, self.group)[self.rank - 1]  # the first part receives 0 from the last

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange parts of all heads, (B, H, t, ...), for whole rows of some heads, (B, H / N, T, ...)."""
        x = x.unflatten(1, (self.size, -1)).movedim(1, 0)  # (N, B, H / N, t, ...)
        return AllToAll.apply(x, self.group).movedim(0, 2).flatten(2, 3)

    def to_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange whole rows of some heads, (B, T, H / N, ...), for parts of all heads, (B, t, H, ...)."""
        x = x.unflatten(1, (self.size, -1)).movedim(1, 0)  # (N, B, t, H / N, ...)
        return AllToAll.apply(x, self.group).movedim(0, 2).flatten(2, 3)


class SequenceParallelTrainer(LongContextTrainer):
    """Trainer whose processes share sequences in groups.

    Args:
        shard: the part of this process.
        kwargs: as for `Trainer`.
    """

    def __init__(self, *, shard: SequenceShard, **kwargs):
        super().__init__(**kwargs)
        self.shard = shard

    def get_train_dataloader(self):
        return self.share_rows(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset=None):
        return self.share_rows(super().get_eval_dataloader(eval_dataset))

    def share_rows(self, loader: Any) -> Any:
        """Give the processes of a group the same rows, of a loader that accelerate has divided among all processes."""
        dealer = loader.batch_sampler if hasattr(loader.batch_sampler, "num_processes") else loader.dataset
        dealer.num_processes //= self.shard.size
        dealer.process_index //= self.shard.size
        dealer.even_batches = dealer.num_processes > 1  # a single group has the last rows without others to fill up
        return loader

    def prediction_step(self, *args, **kwargs):
        self.gather_function = self.gather_losses
        return super().prediction_step(*args, **kwargs)

    def gather_losses(self, losses: torch.Tensor) -> torch.Tensor:
        """Gather the losses of all groups' rows, of which each process has a part.

        Args:
            losses: (B,), the sum over the part divided by the mean number of labels of a process.

        Returns:
            (groups * B,), or less in the last batch.
        """
        gathered: Any = self.accelerator.gather(losses)
        state = self.accelerator.gradient_state
        rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return gathered.view(-1, self.shard.size, len(losses)).mean(1).flatten()[:rows]


class AllToAll(torch.autograd.Function):
    """All-to-all exchange: x[i] of (N, ...) goes to process i; the result, (N, ...), is in the order of the senders.

    Gradients go back the same ways.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.group), None


def check_model(model, size: int) -> None:
    """Raise ValueError if `size` processes cannot share the rows of this model."""
    config = model.config
    if config.model_type != "fox":
        raise ValueError(
            f"--sequence_parallel {size} is for FoX, and this model is a {config.model_type}. Leave it out, or take a "
            "FoX, which --recipe fox-from-llama makes of a Llama."
        )
    if config.num_key_value_heads % size:
        raise ValueError(
            f"--sequence_parallel {size} does not divide the {config.num_key_value_heads} key heads of the model, which "
            "the processes share. Take a divisor."
        )


def check_arguments(arguments) -> None:
    """Raise ValueError if accelerate is to divide rows, by `TrainingArguments` or by `accelerate launch`."""
    config = getattr(arguments, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        size = getattr(config, name, None) or os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", 1)
        if int(size) > 1:
            raise ValueError(
                f"accelerate's parallelism_config has {name}={size}, which divides rows without what the gates and the "
                f"token shift of FoX need from other parts. Set it to 1, and use --sequence_parallel {size}."
            )


__all__ = ["SequenceParallelTrainer", "SequenceShard", "check_arguments", "check_model"]
