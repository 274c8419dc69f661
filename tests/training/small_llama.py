"""A small Llama with random weights, and the demo's tokenizer."""

import torch
from demo_model import DEMO, VOCABULARY
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def save_llama(folder, **changes):
    """Save the model and the tokenizer, and return the folder's name."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | changes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return str(folder)
