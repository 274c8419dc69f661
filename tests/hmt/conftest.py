"""A tiny wrapper in float64, where "equal" means equal up to `ROUNDING`."""

import pytest
import torch
from tiny_hmt import VOCAB, tiny_llama

from hf_longctx.hmt import HMTConfig, HMTWrapper


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
