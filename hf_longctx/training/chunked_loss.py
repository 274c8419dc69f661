"""Chunked cross entropy for any causal language model: with a large vocabulary, logits dominate memory.

The model's forward pass is unchanged, except that its head returns the hidden states. The loss computes the logits one
chunk of tokens at a time and recomputes them in the backward pass, so only one chunk is in memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPast


LOGITS_AT_ONCE = 2**24  # 64 MiB in float32; with a large vocabulary, smaller chunks slow down the matmuls


class ChunkedCrossEntropy:
    """A context manager in which a model computes its loss in chunks, and returns hidden states instead of logits.

    Soft caps (Gemma) and logit scales (Granite, Cohere, Falcon-H1) from the model's config are applied.

    Args:
        model: a causal language model for which `can_chunk_loss` returns True.
        logits_at_once: chunk size in logits; a chunk has at least one token.
    """

    def __init__(self, model: Any, logits_at_once: int = LOGITS_AT_ONCE):
        self.model, self.head, self.logits_at_once = model, model.get_output_embeddings(), logits_at_once
        self.project, self.functions = self.head.forward, (self.remember, self.loss)

    def __enter__(self):
        self.head.forward, self.model.loss_function = self.functions
        return self

    def __exit__(self, *error):
        del self.head.forward, self.model._loss_function

    def remember(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Store the input of the head, and return it."""
        self.hidden_states = hidden_states
        return hidden_states

    def loss(
        self, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
    ) -> torch.Tensor:
        """Compute transformers' `ForCausalLMLoss` from the stored hidden states; a scalar, fp32."""
        hidden_states = self.hidden_states.flatten(0, -2)  # (tokens, hidden)
        del self.hidden_states
        if shift_labels is None:
            shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
        shift_labels = shift_labels.flatten().to(hidden_states.device)
        tokens = max(1, self.logits_at_once // self.model.config.get_text_config().vocab_size)
        chunks = list(zip(hidden_states.split(tokens), shift_labels.split(tokens)))

        def sum_of(chunk, targets):
            scores = scale_logits(self.model, self.project(chunk)).float()
            return F.cross_entropy(scores, targets, ignore_index=ignore_index, reduction="sum")

        if len(chunks) == 1:
            loss = sum_of(*chunks[0])
        else:
            loss = torch.stack([checkpoint(sum_of, *chunk, use_reentrant=False) for chunk in chunks]).sum()
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != ignore_index).sum()
        return loss / num_items_in_batch


def scale_logits(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """Apply the scale and the soft cap of the model's config to the logits."""
    config = model.config.get_text_config()
    for name in ("logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            logits = logits * getattr(config, name)
    if getattr(config, "logits_scaling", None) is not None:
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def can_chunk_loss(model: Any) -> bool:
    """Return whether the chunked loss matches the model's own loss on random decoder states."""
    head, decoder = model.get_output_embeddings(), model.base_model
    if head is None or decoder is model or model.loss_function is not ForCausalLMLoss:
        return False
    weight = head.weight
    width = model.config.get_text_config().hidden_size
    states = 10 * torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0))
    states = states.to(weight.device, weight.dtype)
    ids = torch.arange(5, device=weight.device)[None]
    decoder.forward = lambda *args, **kwargs: DecoderOutput(last_hidden_state=states)
    try:
        own = model(input_ids=ids, labels=ids, use_cache=False)
        with ChunkedCrossEntropy(model):
            chunked = model(input_ids=ids, labels=ids, use_cache=False)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # the model computes its loss in another way
    finally:
        del decoder.forward
    return torch.allclose(own.loss, chunked.loss, rtol=1e-5)


class DecoderOutput(BaseModelOutputWithPast):
    """A decoder output with hidden states only: other fields, such as Mamba's cache, are None."""

    def __getattr__(self, name):
        return None


__all__ = ["ChunkedCrossEntropy", "can_chunk_loss"]
