"""What is scored, and the mean loss."""

import torch


def targets_of(config, labels, mask, state, score_from):
    """What each position of the call predicts, (B, T), -100 where not scored; how many are scored and labelled."""
    if labels is None:
        return None, None, None
    length, real = config.segment_length, torch.ones_like(labels, dtype=torch.bool)
    if mask is not None and not state.padded:
        real = mask
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    both = real & torch.nn.functional.pad(real[:, 1:], (0, 1), value=False)
    targets = targets.masked_fill(~both, -100)
    n_labelled = (targets != -100).sum()
    if config.loss_scope == "last":
        to_the_end = real.flip(1).cumsum(1).flip(1)
        targets = targets.masked_fill(to_the_end > length + 1, -100)
    if score_from is not None:
        opened = torch.tensor([n % length for n in state.lengths], device=labels.device)
        place = (opened[:, None] + real.cumsum(1) - 1) % length  # in its segment
        targets = targets.masked_fill(place < score_from, -100)
    return targets, (targets != -100).sum(), n_labelled


def mean_loss(model, readings, n_scored, n_labelled, num_items_in_batch):
    """Mean cross entropy of the scored labels; with `num_items_in_batch` this call's share of the batch's mean."""
    losses = [x.loss for x in readings if x.loss is not None]
    if scored := [x.scored for x in readings if x.scored is not None]:
        losses.append(model.lm.loss_without_logits(*map(torch.cat, zip(*scored))).float())
    loss = torch.stack(losses).sum()
    loss = loss / n_scored.clamp(min=1).to(loss)  # without any scored label the loss is 0, not nan
    if num_items_in_batch is not None:
        loss = loss * (n_labelled / num_items_in_batch).to(loss)
    if model.training and torch.distributed.is_available() and torch.distributed.is_initialized():
        # DDP needs a gradient of every parameter, and a text of one segment recalls nothing
        loss = loss + 0 * sum(p.sum() for p in model.memory.parameters())
    return loss


__all__ = ["mean_loss", "targets_of"]
