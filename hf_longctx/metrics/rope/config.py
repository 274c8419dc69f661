"""The rotary embeddings that a config of transformers describes: groups of layers, their frequencies and their reach.

Full attention must tell tokens apart up to distance claimed context - 1, sliding attention up to window - 1. A group
has the frequencies that its scaling type gives (by transformers' own functions), or those in the buffers of a model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .bounds import rope_inv_freq
from .claim import default_note
from .model_types import NO_ROPE, NTK_ALPHA, ROPE_ON_SLIDING_LAYERS_ONLY
from .reading import SPELLINGS, Source


# What modeling code fixes and no config says; see also `model_types`.
BASE_IN_CODE = {"codegen": 10_000.0, "gptj": 10_000.0, "roformer": 10_000.0}
NOT_ATTENTION = ("conv", "linear_attention", "mamba", "moe", "recurrent")
# Settings with which a model has no RoPE unless they have one of these values.
ROPE_UNLESS = {"alibi": (False, None), "use_mem_rope": (True,), "position_embedding_type": ("rope", "rotary")}
# What each rope type reads, and what changes no frequency.
READS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor alpha",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow truncate",
    "longrope": "factor original_max_position_embeddings short_factor long_factor",
    "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
    "proportional": "factor",
}
CHANGES_NO_FREQUENCY = frozenset(
    [
        "type",
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "attention_factor",
        "attn_factor",
        "mscale",
        "mscale_all_dim",
        "short_mscale",
        "long_mscale",
        "llama_4_scaling_beta",
        "finetuned",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "mrope_section",
        "mrope_interleaved",
        "interleaved",
    ]
)


class NoRopeError(ValueError):
    """The model has no rotary position embedding.

    Args:
        config: of the model.
        reason: what shows it.
    """

    def __init__(self, config: Any, reason: str):
        super().__init__(
            f"{type(config).__name__} has no rotary position embedding that its config tells of, so RoPE bounds "
            f"nothing: {reason}."
        )


class Rope(NamedTuple):
    """The rotary embedding of some layers; inv_freq is (n,), float64, and rotates the first 2n of head_dim."""

    type: str
    base: float
    inv_freq: np.ndarray
    head_dim: int


def with_rope_parameters(source: Source) -> Any:
    """Return the config of a source, with its RoPE in `rope_parameters` whatever it was spelled as.

    Raises:
        NoRopeError: there is none.
    """
    config = source.config
    if config.model_type in NO_ROPE:
        raise NoRopeError(config, f"the attention of {config.model_type} rotates nothing")
    for name in SPELLINGS["partial_rotary_factor"]:
        if getattr(config, "partial_rotary_factor", None) is None and getattr(config, name, None) is not None:
            config.partial_rotary_factor = getattr(config, name)
    if config.model_type in BASE_IN_CODE:
        config.rope_parameters = {"rope_type": "default", "rope_theta": BASE_IN_CODE[config.model_type]}
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not parameters and getattr(config, "rope_theta", None) is None:
        unknown = "" if source.known else f", and transformers does not know the model type {config.model_type!r}"
        raise NoRopeError(config, f"neither rope_parameters nor rope_theta is set{unknown}")
    for name, values in ROPE_UNLESS.items():
        if getattr(config, name, values[0]) not in values:
            raise NoRopeError(config, f"{name} is {getattr(config, name)!r}")
    config.rope_parameters = parameters or {}
    if not isinstance(config.rope_parameters, dict):
        raise ValueError(f"rope_parameters must be a JSON object, got {parameters!r}.")
    try:
        config.standardize_rope_params()
    except KeyError as error:  # transformers before 5.23 looks each layer type up
        raise ValueError(
            f"rope_parameters has no entry for layer type {error}; it has {', '.join(config.rope_parameters)}."
        ) from error
    return config


def assumptions(source: Source, kind: str, base: float) -> list[str]:
    """Return notes on what the config does not say and is assumed of layers of this kind."""
    config, notes = source.config, []
    if base == getattr(type(config), "default_theta", None) and config.model_type not in BASE_IN_CODE:
        notes += default_note(source, "rope_theta", f"base = {base:g}") if source.known else []
    if "mrope_section" in parameters_of(config, kind):
        notes.append("multimodal RoPE (mrope) is judged on text, where all its sections count the same positions")
    return notes


def parameters_of(config: Any, kind: str) -> dict[str, Any]:
    """Return the rope_parameters of one layer type."""
    nested = config.rope_parameters.get(kind)
    return nested if isinstance(nested, dict) else config.rope_parameters


def layer_groups(config: Any) -> dict[tuple[str, float], list[int]]:
    """Group the attention layers: their indices by layer type and base; base 0 means without RoPE."""
    nested = [key for key, value in config.rope_parameters.items() if isinstance(value, dict)]
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * required_int(config, "num_hidden_layers")
    if nested and not set(nested) & set(kinds):  # named after something else, like DeepSeek-V4's "main" and "compress"
        return {(key, required_base(config.rope_parameters[key])): [] for key in nested}

    groups: dict[tuple[str, float], list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind in NOT_ATTENTION or i in (getattr(config, "cross_attention_layers", None) or ()):
            continue
        if nested and kind not in config.rope_parameters:
            raise ValueError(f"rope_parameters has no entry for layer type {kind!r}; it has {', '.join(nested)}.")
        parameters = config.rope_parameters[kind] if nested else config.rope_parameters
        base = 0 if parameters is None or not rotates(config, i, kind) else required_base(parameters)
        if getattr(config, "layer_rope_theta", None):
            base = config.layer_rope_theta[i]
        groups.setdefault((kind, base), []).append(i)
    return groups


def rotates(config: Any, i: int, kind: str) -> bool:
    """Return whether layer i rotates queries and keys, as far as its config or the modeling code of its type tells."""
    if getattr(config, "no_rope_layers", None):
        return bool(config.no_rope_layers[i])  # 1 where there is RoPE, despite the name
    if config.model_type in ROPE_ON_SLIDING_LAYERS_ONLY and getattr(config, "sliding_window", None):
        prefix = getattr(config, "prefix_dense_sliding_window_pattern", None)
        return kind == "sliding_attention" or (prefix == 1 and config.mlp_layer_types[i] == "dense")
    return True


def layer_config(config: Any, layers: list[int]) -> Any:
    """Return the config of these layers: some configs (Gemma 4's) give layers dimensions of their own."""
    return config.per_layer_config[layers[0]] if layers and getattr(config, "is_heterogeneous", False) else config


def attention_window(config: Any, kind: str, layers: list[int]) -> int | None:
    """Return how many tokens such a layer sees; None if all."""
    name = "sliding_window" if "sliding" in kind else "attention_chunk_size" if "chunked" in kind else None
    tokens = getattr(layer_config(config, layers), name, None) if name else None
    if tokens is not None and tokens < 2:
        raise ValueError(f"{name} is {tokens!r}; it must be 2 tokens or more, or None for no window.")
    return tokens


def rope_of_layers(config: Any, kind: str, base: float, layers: list[int], claimed: int) -> Rope:
    """Compute the frequencies of a group by its rope type.

    Args:
        claimed: tokens of context, for types whose frequencies depend on the length.

    Raises:
        ValueError: the parameters are incomplete, or give what is not a frequency.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = parameters_of(config, kind)
    parameters["rope_theta"] = base
    layer = layer_config(config, layers)
    if getattr(layer, "head_dim", None) is None:
        layer.head_dim = required_int(layer, "hidden_size") // required_int(layer, "num_attention_heads")
    head_dim, rope_type = required_int(layer, "head_dim"), parameters["rope_type"]
    alpha = parameters.get("alpha") if rope_type == "dynamic" else None
    if rope_type == "default" or alpha:
        rotary_dim = rotary_dimensions(config, parameters, head_dim)
        scaled = base * alpha ** (rotary_dim / (rotary_dim - 2)) if alpha else base
        inv_freq = rope_inv_freq(scaled, rotary_dim)
    else:
        layer_type = None if parameters is config.rope_parameters else kind
        try:
            frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=claimed, layer_type=layer_type)
        except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"rope_parameters of type {rope_type!r} are not complete, or one has a wrong type or length: {error!r} "
                f"in {parameters}."
            ) from error
        inv_freq = frequencies.double().numpy()
        if not (np.isfinite(inv_freq) & (inv_freq >= 0)).all():
            raise ValueError(
                f"rope_parameters give a negative, infinite or NaN frequency: {parameters}; its numbers must be positive."
            )
    return Rope(rope_type, float(base), inv_freq, getattr(layer, "qk_head_dim", None) or head_dim)


def check_parameters(source: Source, parameters: dict[str, Any]) -> None:
    """Note which settings of a group its rope type does not use.

    Raises:
        ValueError: a setting is not one of transformers, so that what it does to the frequencies is not known.
        NotImplementedError: the rope type is unknown.
    """
    config, rope_type = source.config, parameters["rope_type"]
    if rope_type not in READS:
        raise NotImplementedError(f"rope type {rope_type!r} is not supported; supported are {', '.join(READS)}.")
    reads = set(READS[rope_type].split())
    if source.known and config.model_type not in NTK_ALPHA:
        reads.discard("alpha")
    kinds = {*(getattr(config, "layer_types", None) or ()), "rope_theta"}
    others = [
        key for key, value in parameters.items() if value is not None and key not in CHANGES_NO_FREQUENCY | reads
    ]
    unused = sorted(set(others) & set(" ".join(READS.values()).replace("alpha", "").split()))
    if unused:
        source.notes.append(f"{rope_type} RoPE does not use {', '.join(unused)}, which rope_parameters names")
    unknown = sorted(set(others) - set(unused) - kinds)
    if unknown:
        raise ValueError(
            f"rope_parameters has {', '.join(unknown)}, which {rope_type} RoPE of {config.model_type or 'transformers'} does "
            "not read; remove what its code ignores too."
        )


def rotary_dimensions(config: Any, parameters: dict[str, Any], head_dim: int) -> int:
    """Return how many dimensions of a head rotate in plain RoPE."""
    share = parameters.get("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share) if 0 < share <= 1 else 0
    if config.model_type in BASE_IN_CODE:
        rotary_dim = getattr(config, "rotary_dim", None) or head_dim
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor is {share!r} and head_dim {head_dim}; their product must be an even number of "
            f"dimensions, which RoPE rotates in pairs, from 2 to {head_dim}."
        )
    return rotary_dim


def with_model_frequencies(rope: Rope, model: Any, kind: str, notes: list[str]) -> Rope:
    """Replace the frequencies by those in the model's own buffer, which it computes with, where it has one."""
    text_config = model.config.get_text_config(decoder=True)
    for module in model.modules():
        if getattr(module, "config", None) is not text_config:
            continue
        buffer = getattr(module, f"{kind}_inv_freq", getattr(module, "inv_freq", None))
        if buffer is not None and not buffer.is_meta:
            inv_freq = buffer.double().cpu().numpy()
            if inv_freq.shape != rope.inv_freq.shape or not np.allclose(inv_freq, rope.inv_freq, rtol=1e-5, atol=0):
                notes.append("the model's own frequencies are not those of its config (a cast?); the model's are used")
            return rope._replace(inv_freq=inv_freq)
    return rope


def required_int(config: Any, name: str) -> int:
    """Return a positive number that the config must have."""
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(
            f"{type(config).__name__} has no {name}, which the bound needs"
            + ("; pass context_length instead." if name == "max_position_embeddings" else "; no default is assumed.")
        )
    if value < 1:
        raise ValueError(f"{name} is {value!r} in {type(config).__name__}; it must be a positive integer.")
    return value


def required_base(parameters: dict[str, Any]) -> float:
    """Return rope_theta, which the parameters must have."""
    if parameters.get("rope_theta") is None:
        raise ValueError(f"The config names no base: rope_theta is missing in {parameters}; no default is assumed.")
    rope_inv_freq(parameters["rope_theta"], 2)  # refuses a base that cannot be one, whatever the scaling
    return parameters["rope_theta"]
