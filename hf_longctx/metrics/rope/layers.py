"""Find out which layers of a model apply RoPE, with which base, and how far each layer attends.

For the model types of transformers, the modeling code decides. It ignores the fields of a config.json that its config
class does not define, for example the `sliding_window` of a Llama. For other model types, see `layer_fields`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..checks import as_int
from .bound import rope_inv_freq
from .layer_fields import WINDOWED


# Facts about the code of a model type that its config does not contain. `python -m scripts.rope_types` lists them.
ROPE_ON_SLIDING_LAYERS_ONLY = (
    *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini"),
)
WINDOW_UNUSED = (  # the config class defines sliding_window, but no attention mask depends on it
    *("deepseek_ocr2_encoder", "kyutai_speech_to_text", "moshi", "moshi_depth"),
    *("qwen3_omni_moe_talker_code_predictor", "qwen3_omni_moe_talker_text", "qwen3_omni_moe_text"),
)
WINDOW_IGNORES_LAYER_TYPES = ("minimax",)  # every attention layer has the window
INCLUSIVE_WINDOW = (  # bidirectional attention: the largest distance is the window, not window - 1
    *("embedding_gemma2_text", "modernbert", "neomme", "openai_privacy_filter", "t5_gemma_module", "ultrabert"),
)

NOT_ATTENTION = re.compile(r"conv|linear|mamba|moe|recurrent|ssm|delta|kda|lightning|rwkv|mlp")  # in a layer type


class LayerGroup(NamedTuple):
    """What the layers of a group have in common. Base 0 means no RoPE. Distances are in tokens."""

    kind: str
    base: float
    reach: int | None  # largest distance to a key; None for full attention


def layer_groups(source: Any) -> dict[LayerGroup, list[int]]:
    """Group the indices of the attention layers of a `Source`. Add a note on each field that the code ignores."""
    config = source.config
    kinds = layer_kinds(config, source.notes)
    groups: dict[LayerGroup, list[int]] = {}
    for i, kind in enumerate(kinds):
        if NOT_ATTENTION.search(kind) or i in (getattr(config, "cross_attention_layers", None) or ()):
            continue
        parameters = parameters_of(config, kind)
        base = 0 if parameters is None or not rotates(config, i, kind) else required_base(parameters)
        if getattr(config, "layer_rope_theta", None):
            base = config.layer_rope_theta[i]
        groups.setdefault(LayerGroup(kind, base, attention_reach(config, i, kind)), []).append(i)
    return groups


def layer_kinds(config: Any, notes: list[str]) -> list[str]:
    """Return the layer type of each layer, as far as the code of the model type distinguishes them."""
    count = required_int(config, "num_hidden_layers")
    if not of_transformers(config):
        return config.layer_types
    window, kinds = layer_setting(config, 0, "sliding_window"), getattr(config, "layer_types", None)
    has_window = defines(config, "sliding_window") and config.model_type not in WINDOW_UNUSED
    settings = {name: getattr(config, name, None) for name in ("attention_chunk_size", "no_rope_layers")}
    for name, value in {"sliding_window": window, "layer_types": kinds, **settings}.items():
        if value and not (has_window if name == "sliding_window" else defines(config, name)):
            short = f" = {value}" if isinstance(value, int) else ""
            notes.append(f"the code of {config.model_type} in transformers ignores {name}{short}")
    if not kinds or not defines(config, "layer_types"):
        kinds = ["sliding_attention" if window and has_window else "full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"layer_types must be a list with the type of each of {count} layers, got {kinds!r}.")
    return kinds


def attention_reach(config: Any, i: int, kind: str) -> int | None:
    """Return the largest distance from a query to a key in layer i. For full attention, return None."""
    if not of_transformers(config):
        window = config.layer_windows[i]
        return None if window is None else window - 1
    name = "attention_chunk_size" if "chunked" in kind else "sliding_window"
    everywhere = config.model_type in WINDOW_IGNORES_LAYER_TYPES
    if not (WINDOWED.search(kind) or everywhere) or not defines(config, name) or config.model_type in WINDOW_UNUSED:
        return None
    tokens = layer_setting(config, i, name)
    if not tokens:
        return None
    return as_int(name, tokens, 2) - (config.model_type not in INCLUSIVE_WINDOW)


def rotates(config: Any, i: int, kind: str) -> bool:
    """Return whether layer i applies RoPE, according to the config or the code of the model type."""
    if not of_transformers(config):
        return config.rotating_layers[i]
    if defines(config, "no_rope_layers") and config.no_rope_layers:
        return bool(config.no_rope_layers[i])  # despite its name, this list contains 1 for layers with RoPE
    if config.model_type in ROPE_ON_SLIDING_LAYERS_ONLY and getattr(config, "sliding_window", None):
        prefix = getattr(config, "prefix_dense_sliding_window_pattern", None)
        return kind == "sliding_attention" or (prefix == 1 and config.mlp_layer_types[i] == "dense")
    return True


def of_transformers(config: Any) -> bool:
    return type(config).__module__.startswith("transformers.models.")


def defines(config: Any, name: str) -> bool:
    """Return whether the config class defines a setting. Other settings in a file have no effect on its code."""
    named = {"sliding_window": ("sliding_window", "local_attention")}.get(name, (name,))
    known = {*getattr(type(config), "__dataclass_fields__", {}), *getattr(type(config), "attribute_map", {})}
    return hasattr(type(config), name) or not known.isdisjoint(named)


def layer_config(config: Any, i: int) -> Any:
    """Return the config of layer i. In models such as Gemma 4, layers have different dimensions."""
    return config.per_layer_config[i] if getattr(config, "is_heterogeneous", False) else config


def layer_setting(config: Any, i: int, name: str) -> Any:
    return getattr(layer_config(config, i), name, None)


def rope_key(config: Any, kind: str) -> str | None:
    """Return the key of a layer type in nested rope_parameters. For flat rope_parameters, return None.

    Raises:
        ValueError: nested rope_parameters do not have an entry for the layer type.
    """
    nested = [key for key, value in config.rope_parameters.items() if isinstance(value, dict)]
    if not nested:
        return None
    if {"main", "compress"} <= {*nested}:  # DeepSeek-V4
        return "main" if kind == "sliding_attention" else "compress"
    if kind not in config.rope_parameters:
        raise ValueError(f"rope_parameters must have an entry for layer type {kind!r}, got only {', '.join(nested)}.")
    return kind


def parameters_of(config: Any, kind: str) -> dict[str, Any] | None:
    """Return the rope_parameters of a layer type. None means that its layers do not apply RoPE."""
    key = rope_key(config, kind)
    return config.rope_parameters if key is None else config.rope_parameters[key]


def required_int(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"{type(config).__name__} must set {name}. The bound depends on it.")
    return as_int(name, value, 1)


def required_base(parameters: dict[str, Any]) -> float:
    if parameters.get("rope_theta") is None:
        raise ValueError(f"rope_theta is missing in {parameters}. Add it to the config.")
    rope_inv_freq(parameters["rope_theta"], 2)  # raises ValueError for an invalid base
    return parameters["rope_theta"]
