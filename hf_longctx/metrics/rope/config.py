"""The rotary embeddings that a config of transformers tells of: groups of layers, their frequencies and their reach.

Full attention must tell tokens apart up to distance claimed context - 1, sliding attention up to window - 1. A group
has the frequencies that its scaling type gives (by transformers' own functions), or those in the buffers of a model.
"""

from __future__ import annotations

import copy
import math
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np

from .bounds import rope_inv_freq


# What modeling code fixes and no config says.
BASE_IN_CODE = {"codegen": 10_000.0, "gptj": 10_000.0, "roformer": 10_000.0}
ROPE_ON_SLIDING_LAYERS_ONLY = (
    *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1"),
)
# What partial_rotary_factor is called in code on the Hub.
PARTIAL_IN_REMOTE_CODE = ("rotary_pct", "rope_pct", "rotary_emb_fraction")
NOT_ATTENTION = ("conv", "linear_attention", "mamba", "moe", "recurrent")


class NoRopeError(ValueError):
    """The model has no rotary position embedding."""


class Rope(NamedTuple):
    """The rotary embedding of some layers; inv_freq is (n,), float64, and rotates the first 2n of head_dim."""

    type: str
    base: float
    inv_freq: np.ndarray
    head_dim: int


def with_rope_parameters(config):
    """A copy of the text decoder's config, its RoPE spelled as `rope_parameters` whatever it was spelled as."""
    from transformers import PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        raise ValueError(
            f"rope_report got a {type(config).__name__}; it needs a PreTrainedModel or a PreTrainedConfig, such as "
            "AutoConfig.from_pretrained(NAME)."
        )
    config = copy.deepcopy(config.get_text_config(decoder=True))
    for name in PARTIAL_IN_REMOTE_CODE:
        if getattr(config, "partial_rotary_factor", None) is None and getattr(config, name, None) is not None:
            config.partial_rotary_factor = getattr(config, name)
    if config.model_type in BASE_IN_CODE:
        config.rope_parameters = {"rope_type": "default", "rope_theta": BASE_IN_CODE[config.model_type]}
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not parameters and getattr(config, "rope_theta", None) is None:
        raise NoRopeError(f"{no_rope(config)}: neither rope_parameters nor rope_theta is set.")
    for name, on in (
        ("alibi", (False, None)),
        ("use_mem_rope", (True,)),
        ("position_embedding_type", ("rope", "rotary")),
    ):
        if getattr(config, name, on[0]) not in on:
            raise NoRopeError(f"{no_rope(config)}: {name} is {getattr(config, name)!r}.")
    if parameters and not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters is {parameters!r}; it must be a dictionary, or one per layer type.")
    config.rope_parameters = parameters or {}
    config.standardize_rope_params()
    return config


def claim(config, notes):
    """(tokens of context that a config claims, where it says so)."""
    claimed = _need(config, "max_position_embeddings")
    name = getattr(config, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    if claimed == getattr(type(config), name, None):
        notes.append(_default(config, f"{name} = {claimed}"))
    for parameters in _all_parameters(config):
        factor, original = (parameters.get(name) for name in ("factor", "original_max_position_embeddings"))
        yarn = parameters.get("rope_type") == "yarn" and _is_real(factor) and _is_real(original)
        if yarn and factor * original > claimed:
            notes.append(f"max_position_embeddings is {claimed}; yarn claims {factor:g} times {original} tokens")
            return int(factor * original), "factor of yarn"
    return claimed, "max_position_embeddings"


def assumptions(config, kind, base):
    """What the config does not say and is assumed of the layers."""
    if base == getattr(config, "default_theta", None) and config.model_type not in BASE_IN_CODE:
        yield _default(config, f"base = {base:g}")
    if "mrope_section" in _parameters(config, kind):
        yield "multimodal RoPE (mrope) is judged on text, where all its sections count the same positions"


def _default(config, setting):
    return f"{setting} is the default of {type(config).__name__}, and stands also where config.json names none"


def _parameters(config, kind):
    """The rope_parameters of one layer type."""
    nested = config.rope_parameters.get(kind)
    return nested if isinstance(nested, dict) else config.rope_parameters


def _all_parameters(config):
    """rope_parameters, or those of every layer type."""
    nested = [value for value in config.rope_parameters.values() if isinstance(value, dict)]
    return nested or [config.rope_parameters]


def layer_groups(config):
    """{(layer type, base): its layers' indices} over the attention layers; base 0 means no RoPE."""
    nested = [key for key, value in config.rope_parameters.items() if isinstance(value, dict)]
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * _need(config, "num_hidden_layers")
    if not isinstance(kinds, (list, tuple)) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"layer_types is {kinds!r}; it must be a list with one name for each layer.")
    if nested and not set(nested) & set(kinds):  # named after something else, like DeepSeek-V4's "main" and "compress"
        return {(key, _need_base(config.rope_parameters[key])): [] for key in nested}

    groups = {}
    for i, kind in enumerate(kinds):
        if kind in NOT_ATTENTION:
            continue
        if nested and kind not in config.rope_parameters:
            raise ValueError(f"rope_parameters has no entry for layer type {kind!r}; it has {', '.join(nested)}.")
        parameters = config.rope_parameters[kind] if nested else config.rope_parameters
        base = 0 if parameters is None or not _rotates(config, i, kind) else _need_base(parameters)
        if getattr(config, "layer_rope_theta", None):
            base = config.layer_rope_theta[i]
        groups.setdefault((kind, base), []).append(i)
    return groups


def _rotates(config, i, kind):
    """Whether layer i rotates its queries and keys, as far as its config or the modeling code of its type tells."""
    if getattr(config, "no_rope_layers", None):
        return bool(config.no_rope_layers[i])  # 1 where there is RoPE, despite the name
    if config.model_type in ROPE_ON_SLIDING_LAYERS_ONLY and getattr(config, "sliding_window", None):
        dense = (
            getattr(config, "prefix_dense_sliding_window_pattern", None) == 1 and config.mlp_layer_types[i] == "dense"
        )
        return kind == "sliding_attention" or dense
    return True


def _layer_config(config, layers):
    """The config as these layers see it: some configs (Gemma 4's) give layers dimensions of their own."""
    return config.per_layer_config[layers[0]] if layers and getattr(config, "is_heterogeneous", False) else config


def window(config, kind, layers):
    """How many tokens such a layer sees; None if all."""
    name = "sliding_window" if "sliding" in kind else "attention_chunk_size" if "chunked" in kind else None
    tokens = getattr(_layer_config(config, layers), name, None) if name else None
    if tokens is not None and (not _is_integer(tokens) or tokens < 2):
        raise ValueError(f"{name} is {tokens!r}; it must be an integer, 2 tokens or more, or None for no window.")
    return tokens


def frequencies(config, kind, base, layers, claimed):
    """The group's frequencies by its rope type, at a length of `claimed` tokens for types that depend on it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = _parameters(config, kind)
    parameters["rope_theta"] = base
    layer = _layer_config(config, layers)
    if getattr(layer, "head_dim", None) is None:
        layer.head_dim = _need(layer, "hidden_size") // _need(layer, "num_attention_heads")
    head_dim = _need(layer, "head_dim")
    rope_type, factor = parameters["rope_type"], parameters.get("factor")
    if factor is not None and not (_is_real(factor) and factor > 0):
        raise ValueError(
            f"factor is {factor!r} in rope_parameters of type {rope_type!r}; it must be a number above 0."
        )
    if rope_type == "default":
        share = parameters.get("partial_rotary_factor", 1.0)
        rotary_dim = int(head_dim * share) if _is_real(share) and 0 < share <= 1 else 0
        if config.model_type in BASE_IN_CODE:
            rotary_dim = getattr(config, "rotary_dim", None) or head_dim
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor is {share!r} and head_dim {head_dim}; their product must be an even number of "
                f"dimensions, which RoPE rotates in pairs, from 2 to {head_dim}."
            )
        inv_freq = rope_inv_freq(base, rotary_dim)
    elif isinstance(rope_type, str) and rope_type in ROPE_INIT_FUNCTIONS:
        layer_type = None if parameters is config.rope_parameters else kind
        try:
            inv_freq, _ = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=claimed, layer_type=layer_type)
        except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"rope_parameters of type {rope_type!r} are not complete, or one has a wrong type or length: {error!r} "
                f"in {parameters}."
            ) from error
        inv_freq = inv_freq.double().numpy()
        if not (np.isfinite(inv_freq) & (inv_freq >= 0)).all():
            raise ValueError(
                f"rope_parameters give a negative, infinite or NaN frequency: {parameters}; its numbers must be positive."
            )
    else:
        types = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
        raise NotImplementedError(f"rope type {rope_type!r} is not supported; supported are {types}.")
    return Rope(rope_type, float(base), inv_freq, getattr(layer, "qk_head_dim", None) or head_dim)


def as_held(rope, model, kind, notes):
    """The same with the frequencies in the model's own buffer, where it has one: what is really computed with."""
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


def _need(config, name):
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(
            f"{type(config).__name__} has no {name}, which the bound needs"
            + ("; pass context_length instead." if name == "max_position_embeddings" else "; no default is assumed.")
        )
    if not _is_integer(value) or value < 1:
        raise ValueError(f"{name} is {value!r} in {type(config).__name__}; it must be a positive integer.")
    return value


def _need_base(parameters):
    if parameters.get("rope_theta") is None:
        raise ValueError(f"The config names no base: rope_theta is missing in {parameters}; no default is assumed.")
    rope_inv_freq(parameters["rope_theta"], 2)  # refuses a base that cannot be one, whatever the scaling
    return parameters["rope_theta"]


def no_rope(config):
    return f"{type(config).__name__} has no rotary position embedding that its config tells of, so RoPE bounds nothing"


def _is_integer(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value):
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
