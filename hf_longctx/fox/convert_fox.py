"""Checkpoint converters for FoX: a table of names, and nothing lost on the way."""

import re

import torch

from .configuration_fox import FoxConfig
from .modeling_fox import FoxForCausalLM


# Layout of the authors' implementation -> ours. `mlp.gate_proj` holds gate and up projection in one matrix: see below.
OFFICIAL_NAMES = [
    (r"model\.embeddings\.", "model.embed_tokens."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.fgate_proj\.", ".self_attn.f_proj."),
    (r"\.attn\.fgate_bias$", ".self_attn.f_proj.bias"),
    (r"\.attn\.ogate_proj\.", ".self_attn.g_proj."),
    (r"\.attn\.output_norm\.", ".self_attn.o_norm."),
    (r"\.attn\.([kv])_proj\.linear\.", r".self_attn.\1_proj."),
    (r"\.attn\.([kv])_proj\.shift_proj\.", r".self_attn.\1_shift_proj."),
    (r"\.attn\.", ".self_attn."),
]
OFFICIAL_MODEL_TYPES = ("forgetting_transformer-project_fox", "transformer-project_fox")


def from_official(state_dict: dict[str, torch.Tensor], config_dict: dict) -> FoxForCausalLM:
    """Build a FoX from a checkpoint of the authors' implementation (forgetting-transformer, commit 883f260).

    Args:
        state_dict: its tensors by name. `lm_head.weight` may be absent when the embeddings are tied.
        config_dict: its config.json; fields that it leaves out have the authors' defaults.

    Returns:
        The model in the dtype of `state_dict`, in evaluation mode, with logits equal to the original's.

    Raises:
        ValueError: the configuration cannot be represented, or tensors are missing or unknown (all are listed).
    """
    config = official_config(config_dict)
    tensors = {}
    for name, tensor in state_dict.items():
        for pattern, ours in OFFICIAL_NAMES:
            name = re.sub(pattern, ours, name)
        if name.endswith(".mlp.gate_proj.weight"):
            gate, up = tensor.chunk(2, dim=0)
            tensors[name], tensors[name.replace("gate_proj", "up_proj")] = gate, up
        else:
            tensors[name] = tensor
    if config.tie_word_embeddings:
        tensors.setdefault("lm_head.weight", tensors.get("model.embed_tokens.weight"))

    config.dtype = next(iter(state_dict.values())).dtype
    model = FoxForCausalLM(config).to(config.dtype).eval()
    expected = model.state_dict()
    problems = [f"missing: {name}" for name in expected.keys() - tensors.keys()]
    problems += [f"unknown: {name}" for name in tensors.keys() - expected.keys()]
    problems += [
        f"shape of {name} is {tuple(tensors[name].shape)}, not {tuple(expected[name].shape)}"
        for name in expected.keys() & tensors.keys()
        if expected[name].shape != tensors[name].shape
    ]
    if problems:
        raise ValueError("the checkpoint does not fit its configuration:\n  " + "\n  ".join(sorted(problems)))
    model.load_state_dict(tensors)
    return model


def official_config(config_dict: dict) -> FoxConfig:
    """The FoxConfig that computes what the authors' implementation computes with `config_dict`."""
    get = config_dict.get
    model_type = get("model_type", OFFICIAL_MODEL_TYPES[0])
    if model_type not in OFFICIAL_MODEL_TYPES:
        raise ValueError(
            f"model_type is {model_type!r}; an official FoX checkpoint has one of {OFFICIAL_MODEL_TYPES}."
        )
    heads = get("num_heads", 32)
    if get("num_kv_heads") not in (None, heads):
        raise ValueError(f"num_kv_heads={get('num_kv_heads')}: the authors' implementation has no grouped heads.")
    hidden_size = get("hidden_size", 2048)
    intermediate_size = get("intermediate_size")
    if intermediate_size is None:
        width = int(hidden_size * (get("hidden_ratio") or 4) * 2 / 3)
        intermediate_size = -(-width // 256) * 256
    plain_transformer = model_type == OFFICIAL_MODEL_TYPES[1]
    use_rope = get("use_rope", plain_transformer)
    activations = {"swish": "silu", "sigmoid": "sigmoid"}
    if get("hidden_act", "swish") not in activations:
        raise ValueError(f"hidden_act={get('hidden_act')!r}: the authors' implementation knows {list(activations)}.")
    return FoxConfig(
        vocab_size=get("vocab_size", 32000),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=get("num_hidden_layers", 24),
        num_attention_heads=heads,
        hidden_act=activations[get("hidden_act", "swish")],
        max_position_embeddings=get("max_position_embeddings", 2048) or 16384,
        initializer_range=get("initializer_range", 0.02),
        rms_norm_eps=get("norm_eps", 1e-6),
        use_cache=get("use_cache", True),
        tie_word_embeddings=get("tie_word_embeddings", False),
        pad_token_id=get("pad_token_id"),
        bos_token_id=get("bos_token_id", 1),
        eos_token_id=get("eos_token_id", 2),
        forget_gate="none" if plain_transformer else get("fgate_type", "full"),
        decay_time_min=get("decay_time_min"),
        decay_time_max=get("decay_time_max"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope_base", 500000.0)} if use_rope else None,
        qk_norm=get("qk_norm", False),
        qk_norm_shared=get("qk_norm_share_param_across_head", False),
        output_gate=get("ogate_act", "sigmoid") if get("use_output_gate", False) else None,
        output_norm=get("use_output_norm", False),
        k_shift=get("use_k_shift", False),
        v_shift=get("use_v_shift", False),
    )
