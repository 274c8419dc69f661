"""Sequence parallelism: N processes share sequences that are N times as long (Ulysses, arXiv 2309.14509).

Each process stores one of N equal parts of every sequence. Embeddings, projections, MLPs and the loss need only this
part. Attention needs whole sequences. An all-to-all exchange therefore gives each process the whole sequences for
H / N heads. Gates are exchanged with their heads, so cumulative sums, packed documents and windows are computed as in
a single process. The token shift also needs the last token of the previous part.

Gradients do not need extra communication. Trainer divides a process's summed loss by the total number of labels, and
DDP and FSDP add the gradients of all processes.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .data import collate
from .trainer import LongContextTrainer


class SequenceShard:
    """Selects this process's part of each sequence, and exchanges tensors with the processes of the other parts.

    `collate` adds the shard to each batch, and FoX uses it for attention (fox/state_fox.py). In the shapes below, T is
    the length of a sequence, and t = T / N is the length of a part.

    Args:
        size: N, the number of processes that share a sequence; their ranks are consecutive.

    Raises:
        ValueError: N does not divide the number of processes.
    """

    def __init__(self, size: int):
        self.group: Any = dist.new_subgroups(size)[0]
        self.size, self.rank = size, dist.get_rank(self.group)

    def collate(self, rows: list[dict[str, torch.Tensor]], options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Collate outputs of `make_sequence` into a batch for this process.

        The batch contains the ids and labels of this part, (B, t), and the positions of the whole sequence, (B, T).
        Labels are shifted before the split, because the last token of a part predicts the first token of the next.
        """
        batch = collate(rows)
        labels = self.part(F.pad(batch["labels"][:, 1:], (0, 1), value=-100))
        return {
            "input_ids": self.part(batch["input_ids"]),
            "position_ids": batch["position_ids"],
            "labels": labels,  # Trainer computes a loss only for batches with labels
            "shift_labels": labels,
            "shard": self,
            **(options or {}),
        }

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's part, (B, t, ...), of whole sequences, (B, T, ...)."""
        return x.chunk(self.size, dim=1)[self.rank].contiguous()

    def token_before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last token, (B, 1, ...), of the previous part. For the first part, return zeros.

        Args:
            x: this part, (B, t, ...).
        """
        ranks = torch.arange(self.size, device=x.device).view(-1, *[1] * x.ndim)
        to_next = torch.where(ranks == self.rank + 1, x[None, :, -1:], 0.0)  # (N, B, 1, ...)
        return AllToAll.apply(to_next, self.group)[self.rank - 1]  # the last part sends zeros to the first

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange parts of the sequences with all heads for whole sequences with a part of the heads.

        Args:
            x: (B, H, t, ...), this process's part of the sequences.

        Returns:
            (B, H / N, T, ...), whole sequences.
        """
        x = x.unflatten(1, (self.size, -1)).movedim(1, 0)  # (N, B, H / N, t, ...)
        return AllToAll.apply(x, self.group).movedim(0, 2).flatten(2, 3)

    def to_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Reverse the exchange of `to_heads`. Here, positions come before heads.

        Args:
            x: (B, T, H / N, ...), whole sequences.

        Returns:
            (B, t, H, ...), this process's part of the sequences.
        """
        x = x.unflatten(1, (self.size, -1)).movedim(1, 0)  # (N, B, t, H / N, ...)
        return AllToAll.apply(x, self.group).movedim(0, 2).flatten(2, 3)


class SequenceParallelTrainer(LongContextTrainer):
    """A Trainer in which groups of processes share sequences.

    Args:
        shard: this process's `SequenceShard`.
        kwargs: arguments of `Trainer`.
    """

    def __init__(self, *, shard: SequenceShard, **kwargs):
        super().__init__(**kwargs)
        self.shard = shard

    def get_train_dataloader(self):
        return self.share_rows(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset=None):
        return self.share_rows(super().get_eval_dataloader(eval_dataset))

    def share_rows(self, loader: Any) -> Any:
        """Give all processes of a group the same sequences. accelerate would split the batches among all processes."""
        sampler = loader.batch_sampler
        sampler.num_processes //= self.shard.size
        sampler.process_index //= self.shard.size
        sampler.even_batches = sampler.num_processes > 1  # a single group does not need to pad the last batch
        return loader

    def prediction_step(self, *args, **kwargs):
        self.gather_function = self.gather_losses
        return super().prediction_step(*args, **kwargs)

    def gather_losses(self, losses: torch.Tensor) -> torch.Tensor:
        """Average the losses of the processes of each group, and gather the averages of all groups.

        Args:
            losses: (B,), B copies of this process's loss: the sum over its tokens in the batch, divided by the mean
                number of labels per process.

        Returns:
            (groups * B,). The last batch can be smaller.
        """
        gathered: Any = self.accelerator.gather(losses)
        state = self.accelerator.gradient_state
        rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return gathered.view(-1, self.shard.size, len(losses)).mean(1).flatten()[:rows]


class AllToAll(torch.autograd.Function):
    """An all-to-all exchange. Every process sends x[i] to process i.

    x is (N, ...). The result is (N, ...), ordered by sender. The backward pass reverses the exchange.
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
    """Raise ValueError if `size` processes cannot share the sequences of this model."""
    config = model.config
    if config.model_type != "fox":
        raise ValueError(
            f"--sequence_parallel {size} supports FoX only, got model type {config.model_type}. Omit this option, or "
            "first convert a Llama to a FoX with --recipe fox-from-llama."
        )
    if config.num_key_value_heads % size:
        raise ValueError(
            f"--sequence_parallel must divide the number of key heads ({config.num_key_value_heads}), got {size}. Each "
            "process computes an equal number of heads."
        )


__all__ = ["SequenceParallelTrainer", "SequenceShard", "check_model"]
