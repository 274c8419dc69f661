"""Which labels are scored, and the mean loss."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .configuration_hmt import HMTConfig
from .memory_hmt import HMTState
from .segments_hmt import PassOutput


if TYPE_CHECKING:
    from .modeling_hmt import HMTWrapper


def targets_of(
    config: HMTConfig, labels: Tensor, mask: Tensor | None, state: HMTState, score_from: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target of each position of the call, (B, T), -100 where not scored.

    Args:
        labels: (B, T).
        mask: (B, T), bool, or None without padding.
        state: before the call.
        score_from: as in `HMTWrapper.forward`.

    Returns:
        the targets; how many are scored; how many are labelled.
    """
    length, token_mask = config.segment_length, torch.ones_like(labels, dtype=torch.bool)
    if mask is not None and not state.padded:
        token_mask = mask
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    both = token_mask & torch.nn.functional.pad(token_mask[:, 1:], (0, 1), value=False)
    targets = targets.masked_fill(~both, -100)
    n_labelled = (targets != -100).sum()
    if config.loss_scope == "last":
        to_the_end = token_mask.flip(1).cumsum(1).flip(1)
        targets = targets.masked_fill(to_the_end > length + 1, -100)
    if score_from is not None:
        opened = torch.tensor([n % length for n in state.lengths], device=labels.device)
        place = (opened[:, None] + token_mask.cumsum(1) - 1) % length  # in its segment
        targets = targets.masked_fill(place < score_from, -100)
    return targets, (targets != -100).sum(), n_labelled


def mean_loss(
    model: "HMTWrapper",
    outputs: list[PassOutput],
    n_scored: Tensor,
    n_labelled: Tensor,
    num_items_in_batch: Tensor | int | None,
) -> Tensor:
    """Return the mean cross entropy of the scored labels; with `num_items_in_batch` this call's share of it."""
    losses = [x.loss for x in outputs if x.loss is not None]
    if scored := [x.scored for x in outputs if x.scored is not None]:
        hidden, targets = map(torch.cat, zip(*scored))
        losses.append(model.lm.loss_without_logits(hidden, targets).float())
    loss = torch.stack(losses).sum()
    loss = loss / n_scored.clamp(min=1).to(loss)  # without any scored label the loss is 0, not nan
    if num_items_in_batch is not None:
        loss = loss * (n_labelled / num_items_in_batch).to(loss)
    if model.training and torch.distributed.is_available() and torch.distributed.is_initialized():
        # DDP needs a gradient of every parameter, and a text of one segment recalls nothing
        loss = loss + 0 * sum(p.sum() for p in model.memory.parameters())
    return loss


__all__ = ["mean_loss", "targets_of"]
