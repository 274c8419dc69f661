"""Chunked cross entropy for any causal language model. With a large vocabulary, unchunked logits dominate memory.

We replace the forward method of the model's head. The new method returns the hidden states. The rest of the model's
forward pass is unchanged. The loss computes the logits of one chunk of tokens at a time. The backward pass recomputes
them, so memory contains only one chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPast


LOGITS_AT_ONCE = 2**23  # 32 MiB in float32, enough rows for a fast matmul


def chunk_loss(model: Any, logits_at_once: int = LOGITS_AT_ONCE) -> bool:
    """Replace a model's loss with a chunked loss. The model then returns hidden states instead of logits.

    Soft caps (Gemma) and logit scales (Granite, Cohere, Falcon-H1) from the model's config are applied. We compare
    the chunked loss with the original loss on random decoder states. If they differ, the model is left unchanged.

    Args:
        model: a causal language model.
        logits_at_once: maximum number of logits in a chunk. A chunk always has at least one token.

    Returns:
        whether both losses are equal.
    """
    head, decoder = model.get_output_embeddings(), model.base_model
    if head is None or decoder is model or model.loss_function is not ForCausalLMLoss:
        return False
    config = model.config.get_text_config()
    project = head.forward
    inputs = []
    scales = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier")]
    divisor = getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)

    def remember(hidden_states: torch.Tensor) -> torch.Tensor:
        inputs[:] = [hidden_states]
        return hidden_states

    def sum_of(chunk: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = project(chunk)
        for scale in scales:
            logits = logits if scale is None else logits * scale
        logits = logits if divisor is None else logits / divisor
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")

    def loss(logits, labels, vocab_size=None, num_items_in_batch=None, shift_labels=None, **kwargs) -> torch.Tensor:
        """Compute transformers' `ForCausalLMLoss` from the head's input. Return a float32 scalar."""
        hidden_states = inputs.pop().flatten(0, -2)  # (tokens, hidden)
        if shift_labels is None:
            shift_labels = F.pad(labels[..., 1:], (0, 1), value=-100)
        shift_labels = shift_labels.flatten().to(hidden_states.device)
        tokens = max(1, logits_at_once // config.vocab_size)
        chunks = list(zip(hidden_states.split(tokens), shift_labels.split(tokens)))
        if len(chunks) == 1:
            total = sum_of(*chunks[0])
        else:
            total = torch.stack([checkpoint(sum_of, *chunk, use_reentrant=False) for chunk in chunks]).sum()
        return total / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    states = 10 * torch.randn(1, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    output = DecoderOutput(last_hidden_state=states.to(head.weight.device, head.weight.dtype))
    ids = torch.arange(5, device=head.weight.device)[None]
    decoder.forward = lambda *args, **kwargs: output
    try:
        with torch.no_grad():
            own = model(input_ids=ids, labels=ids, use_cache=False).loss
            head.forward, model.loss_function = remember, loss
            is_equal = torch.allclose(own, model(input_ids=ids, labels=ids, use_cache=False).loss, rtol=1e-5)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        is_equal = False  # this model computes its loss differently
    finally:
        del decoder.forward
    if not is_equal:
        vars(head).pop("forward", None)
        model.loss_function = ForCausalLMLoss
    return is_equal


class DecoderOutput(BaseModelOutputWithPast):
    """A decoder output that contains hidden states only. Other fields, such as Mamba's cache, are None."""

    def __getattr__(self, name):
        return None


__all__ = ["chunk_loss"]
