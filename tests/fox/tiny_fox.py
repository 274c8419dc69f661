"""Small FoX models for the tests, one of every kind."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_longctx.fox import FoxConfig
from hf_longctx.fox.triton_fox import why_not


SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
TINY = dict(**SIZES, pad_token_id=0)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VARIANTS = {
    "llama": lambda: FoxConfig(**TINY),
    "pro": lambda: FoxConfig.pro(**TINY),
    "pro with grouped heads and rope": lambda: FoxConfig.pro(**TINY, num_key_value_heads=2, rope_parameters=ROPE),
    "one gate per key head": lambda: FoxConfig(**TINY, num_key_value_heads=2, forget_gate_per_kv_head=True),
    "window": lambda: FoxConfig(**TINY, sliding_window=7),
    "pro with a window": lambda: FoxConfig.pro(**TINY, sliding_window=7),
    "only v shift, shared norm, biases": lambda: FoxConfig(
        **TINY, v_shift=True, qk_norm=True, qk_norm_shared=True, qkv_bias=True
    ),
    "bias only": lambda: FoxConfig(**TINY, forget_gate="bias_only", decay_time_min=2, decay_time_max=64),
    "fixed": lambda: FoxConfig(**TINY, forget_gate="fixed", decay_time_min=2, decay_time_max=64),
    "no gate": lambda: FoxConfig(**TINY, forget_gate="none", num_key_value_heads=2, rope_parameters=ROPE),
}
# Attention implementations for tests in several processes, on a CPU: Triton's kernels must be interpreted there.
NO_TRITON = why_not(8, device=torch.device("cpu"))
BACKENDS = ["sdpa"] if NO_TRITON else ["sdpa", "forgetting_triton"]
skip_without_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
every_variant = pytest.mark.parametrize("variant", VARIANTS)
both_blocks = pytest.mark.parametrize("variant", ["llama", "pro with grouped heads and rope"])


def make_from(config, dtype=torch.float32, seed=0):
    """Return a causal language model of a config. All its parameters are far from their initial values."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def make(variant, backend="sdpa", seed=0):
    """Return a small FoX; see `make_from`."""
    model = make_from(VARIANTS[variant](), seed=seed)
    model.set_attn_implementation(backend)
    return model


def close_gates(model, log_f=-400.0):
    for layer in model.model.layers:
        layer.self_attn.f_proj.weight.data.zero_()
        layer.self_attn.f_proj.bias.data.fill_(log_f)  # log sigmoid(x) is about x far below 0
    return model


def checkpointed(model):
    """Enable checkpointing. transformers 5.23 renamed the method."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def tokens(batch=2, length=24, seed=1):
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, *args, **kwargs):
    return model(*args, **kwargs).logits


@torch.no_grad()
def in_chunks(model, ids, cache, chunks, mask=None):
    """Read rows in chunks into a cache. Return the logits. `mask` has a column for each token."""
    pieces, begin = [], int(cache.get_seq_length())
    for chunk in ids.split(chunks, dim=1):
        begin += chunk.shape[1]
        pieces.append(model(chunk, attention_mask=None if mask is None else mask[:, :begin], cache=cache).logits)
    return torch.cat(pieces, dim=1)


def filled(model, ids=tokens(2, 9)):  # noqa: B008 (it is only read)
    """Return a cache in which a model has read `ids`."""
    cache = DynamicCache(config=model.config)
    logits(model, ids, None, None, cache)  # positional, because Llama's argument has another name before 5.24
    return cache


def check_logits(got, want):
    """Assert that they agree up to rounding in float32, which the norms of small keys enlarge up to 40 times."""
    torch.testing.assert_close(got, want, atol=200 * torch.finfo(torch.float32).eps * want.abs().max().item(), rtol=0)
