"""Cross entropy without all logits at once: for long rows and large vocabularies they take most of the memory.

Of 64k tokens and a vocabulary of 50k, logits in float32 are 13 GB, and a plain loss holds three times as much. Here
PyTorch goes through the rows in pieces and makes the gradients with the loss, so a piece's logits are enough.
"""

import torch
import torch.nn.functional as F
from torch import nn


LOGITS_AT_ONCE = 2**23  # 32 MiB in float32, enough rows for a fast product


def can_skip_logits(head: nn.Module) -> bool:
    """Return whether `loss_without_logits` can replace a head: a plain linear layer, whose weight is all here.

    An adapter or a quantized head computes something else, tensor parallelism divides the weight, and PyTorch before
    2.13 lacks the function.
    """
    return hasattr(F, "linear_cross_entropy") and type(head) is nn.Linear and type(head.weight) is nn.Parameter


def loss_without_logits(
    hidden_states: torch.Tensor,
    head: nn.Linear,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    **kwargs,
) -> torch.Tensor:
    """Compute transformers' `ForCausalLMLoss` of `head(hidden_states)`; a scalar, fp32.

    Logits and sums are those of float32 at least, since PyTorch returns the sum over all tokens in the dtype of the
    weights: in bfloat16 it has 8 bits. A copy of the weight and its gradient in float32 is the price.

    Args:
        hidden_states: (B, T, hidden), or (tokens, hidden).
        head: as `can_skip_logits` allows.
        labels: (B, T) or (tokens,), int64, shifted here; or
        shift_labels: of the same shape, already shifted: of position t the token t + 1.
        num_items_in_batch: scored labels in the whole batch. None: the mean over these.
        ignore_index: the label that is not scored.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    shift_labels = shift_labels.to(hidden_states.device).flatten()
    rows = max(1, LOGITS_AT_ONCE // head.out_features)
    dtype = torch.promote_types(head.weight.dtype, torch.float32)
    loss = F.linear_cross_entropy(
        hidden_states.flatten(0, -2).to(dtype),
        head.weight.to(dtype),
        shift_labels,
        linear_bias=None if head.bias is None else head.bias.to(dtype),
        reduction="sum",
        ignore_index=ignore_index,
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None, acc_policy="accurate"),
    )
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != ignore_index).sum()
    return loss.float() / num_items_in_batch
