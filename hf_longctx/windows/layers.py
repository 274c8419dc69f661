"""The attention layers of a transformers model, and the models that are not supported."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel


SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# Models that use AttentionInterface in another way than those that are supported
UNUSUAL = {
    "diffllama": "its attention reads the cached keys twice",
    "doge": "its attention computes a mask of its own",
    "dory": "its layers are read several times",
    "jetmoe": "its attention repeats the cached keys",
}


def attention_layers(model: nn.Module) -> list[Any]:
    """Return the attention module of each decoder layer, in order.

    Raises:
        NotImplementedError: head windows do not support the model's attention.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"`model` must be a transformers model, got {type(model).__name__}. Load one with "
            "AutoModelForCausalLM.from_pretrained."
        )
    if any(getattr(getattr(module, "config", None), "model_type", None) == "hmt" for module in model.modules()):
        raise NotImplementedError(
            "`model` must be a model without a memory, got an HMT. Its segments need masks that windows do not support."
        )
    found = [module for module in model.modules() if hasattr(module, "num_key_value_groups")]
    layers: list[Any] = sorted(
        (module for module in found if isinstance(getattr(module, "layer_idx", None), int)),
        key=lambda module: module.layer_idx,
    )
    if reason := unsupported(model, layers):
        names = type(decoder_of(model, layers)).__name__
        raise NotImplementedError(
            f"`model` must be a decoder whose layers all have softmax attention with key heads, got {names}: {reason}. "
            "Llama, Mistral, Qwen, Gemma 3, OLMo 2, Phi-3, Granite, SmolLM3 and gpt-oss are supported."
        )
    return layers


def unsupported(model: nn.Module, layers: list[Any]) -> str | None:
    """Return why head windows cannot be applied to these layers. None: they can."""
    if not layers:
        return "no attention layer with `num_key_value_groups` was found"
    config, decoder = layers[0].config, decoder_of(model, layers)
    types = set(getattr(config, "layer_types", None) or SUPPORTED_LAYERS)
    if types - SUPPORTED_LAYERS:
        return f"it has layers of type {', '.join(sorted(types - SUPPORTED_LAYERS))}"
    if config.model_type in UNUSUAL:
        return UNUSUAL[config.model_type]
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention does not have separate key heads"
    if getattr(config, "is_encoder_decoder", False) or not all(getattr(layer, "is_causal", True) for layer in layers):
        return "its attention is not causal"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some layers share the keys of other layers"
    if [layer.layer_idx for layer in layers] != list(range(config.num_hidden_layers)):
        return f"it has {config.num_hidden_layers} layers, and {len(layers)} attention modules"
    if len(set(map(key_heads, layers))) > 1:
        return "its layers have different numbers of key heads"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention logits are capped, which SDPA does not support"
    if not decoder._can_set_attn_implementation():
        return "its attention does not use transformers' AttentionInterface"
    return None


def decoder_of(model: nn.Module, layers: list[Any]) -> Any:
    """Return the smallest transformers model that contains all layers; without one, `model`."""
    wanted, smallest = set(map(id, layers)), model
    for module in model.modules():  # from the outside to the inside
        if isinstance(module, PreTrainedModel) and wanted <= set(map(id, module.modules())):
            smallest = module
    return smallest


def own_window(layer: Any, context: int) -> int | None:
    """Return the sliding window of a layer. None: it has none, or none that is shorter than the context."""
    window = getattr(layer, "sliding_window", getattr(layer.config, "sliding_window", None))
    return None if window is None or window >= context else window


def key_heads(layer: Any) -> int:
    """Return the number of key heads of an attention module."""
    return layer.config.num_attention_heads // layer.num_key_value_groups
