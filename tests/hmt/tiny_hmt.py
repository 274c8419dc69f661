"""A small Llama in float64, and how far rounding can move its logits, for the tests."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


VOCAB = 61
# Logits of `tiny_llama` are of order 1. This is a million times what float64 rounds at that size, and far less than
# what a wrong mask, position or memory changes (1e-4 and more).
ROUNDING = 1e6 * torch.finfo(torch.float64).eps
# Its norms and RoPE are in float32, and a token that is read twice has two parts of its gradient.
NORM = 8 * torch.finfo(torch.float32).eps


def tiny_llama(**settings):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, **settings}
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **sizes,
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():  # far from the near-uniform start, so that every input matters visibly
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    return model
