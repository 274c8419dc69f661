"""A tiny wrapper in float64, where "equal" means equal up to 1e-9."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.hmt import HMTConfig, HMTWrapper


VOCAB = 61


def tiny_llama(**settings):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **sizes,
        **settings,
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():  # far from the near-uniform start, so that every input matters visibly
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    return model


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return tiny_llama()


@pytest.fixture
def make_wrapper(llama):
    """Wrap the tiny Llama; keywords go to HMTConfig (default: segments of 8 tokens, 3 sensory, 4 memories)."""

    def make(**settings):
        settings = {"segment_length": 8, "sensory_tokens": 3, "memory_size": 4, **settings}
        torch.manual_seed(1)
        return HMTWrapper.from_backbone(llama, HMTConfig(**settings))

    return make


@pytest.fixture
def tokens():
    """Random rows of tokens, (2, 43): five full segments and a short one."""
    return torch.randint(3, VOCAB, (2, 43), generator=torch.Generator().manual_seed(2))
