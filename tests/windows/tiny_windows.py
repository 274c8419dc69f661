"""Small models of each supported family, windows for them, and attention with windows written as its definition."""

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.masking_utils import sdpa_mask

from hf_longctx.fox.compat_fox import CACHE  # the name of the cache argument
from hf_longctx.windows import HeadWindows


SIZES = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
HALF = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=24)),
    "mistral without sliding windows": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen2 with sliding windows": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, layer_types=HALF),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=24, layer_types=HALF)),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SIZES)),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SIZES, sliding_window=None)),
    "phi3 with a sliding window": (Phi3ForCausalLM, Phi3Config(**SIZES, sliding_window=24)),
    "granite": (GraniteForCausalLM, GraniteConfig(**SIZES, attention_multiplier=0.3)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1])),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **SIZES, head_dim=16, sliding_window=24, layer_types=HALF, num_local_experts=2, num_experts_per_tok=2
        ),
    ),
}
# Windows above, below and at the layers' own; groups of adjacent and of distant heads; one layer with a single group.
WINDOWS = [[-1, 16, 5, 16], [8, 8, 8, 8], [-1, -1, 24, 1]]


def make(family="llama", dtype=torch.float64, seed=0):
    """Return a model whose attention is far from uniform."""
    torch.manual_seed(seed)
    model_class, config = FAMILIES[family]
    config = type(config).from_dict(config.to_dict())
    model = model_class._from_config(config, experts_implementation="eager") if family == "gpt-oss" else None
    model = (model or model_class(config)).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def windowed(family="llama", windows=WINDOWS, sinks=3, **options):
    """Return a model and the windows that are applied to it."""
    windows = HeadWindows(windows, sinks)
    return windows.apply(make(family, **options)), windows


def tokens(rows=2, length=70, seed=1):
    return torch.randint(3, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


# Masks of two rows of 70 tokens: padding on the left, on the right, in the middle, and none.
PADDING = {
    "no mask": [],
    "a mask without padding": [slice(0, 0)],
    "left": [slice(0, 9)],
    "right": [slice(60, 70)],
    "middle": [slice(30, 45)],
    "left and middle": [slice(0, 9), slice(33, 41)],
    "a single token, then padding": [slice(1, 50)],
}


def padding_mask(name, rows=2, length=70):
    """Return a mask in which the first row has the padding; None for "no mask"."""
    if name == "no mask":
        return None
    mask = torch.ones(rows, length, dtype=torch.long)
    for part in PADDING[name]:
        mask[0, part] = 0
    return mask


@torch.no_grad()
def in_chunks(model, ids, mask, cache, sizes):
    """Return the logits of tokens that are read in chunks. The mask starts with the cached tokens."""
    logits, begin = [], 0
    before = cache.get_seq_length()
    for size in sizes:
        end = begin + size
        part = None if mask is None else mask[:, : before + end]
        logits.append(model(ids[:, begin:end], attention_mask=part, **{CACHE: cache}).logits)
        begin = end
    assert begin == ids.shape[1]
    return torch.cat(logits, 1)


def difference(a, b, mask=None):
    """Return the largest difference of two logits, without padding."""
    delta = (a - b).abs().amax(-1)
    return (delta if mask is None else delta[mask.bool()]).max().item()


@torch.no_grad()
def dense_logits(model, windows, ids, mask=None, documents=None, **kwargs):
    """Return the logits of a model without windows whose attention is restricted by dense masks, in one call.

    documents: (B, T), the document of each token in a packed row.
    """
    real = torch.ones_like(ids) if mask is None else mask
    documents = torch.zeros_like(ids) if documents is None else documents
    index = torch.stack(
        [
            torch.stack(
                [((documents[b, :t] == documents[b, t]) & (real[b, :t] == 1)).sum() for t in range(ids.shape[1])]
            )
            for b in range(len(ids))
        ]
    )  # (B, T): number of earlier tokens of the same sequence

    def attention(module, query, key, value, attention_mask, scaling, s_aux=None, **kwargs):
        row = windows.windows[module.layer_idx]
        k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        scores = query @ k.mT * scaling
        age = index[:, :, None] - index[:, None, :]  # (B, T, T)
        for head in range(query.shape[1]):
            window = row[head // module.num_key_value_groups]
            if window >= 0:
                outside = (age >= window) & (index[:, None] >= windows.sinks)
                scores[:, head].masked_fill_(outside, -torch.inf)
        scores = scores.masked_fill(~attention_mask, -torch.inf)
        if s_aux is not None:
            extra = s_aux.view(1, -1, 1, 1).to(scores).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, extra], -1)
        weights = scores.softmax(-1).nan_to_num()[..., : k.shape[2]]
        return (weights @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("dense_windows", attention)
    AttentionMaskInterface.register(
        "dense_windows", lambda **arguments: sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    )
    model.set_attn_implementation("dense_windows")
    return model(ids, attention_mask=mask, use_cache=False, **kwargs).logits
