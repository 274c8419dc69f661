"""Read from a config the claimed context and the groups of layers with their rotary frequencies and reach.

Full attention must distinguish tokens up to distance claimed context - 1, sliding attention up to window - 1. A group
uses the frequencies that transformers computes for its scaling type, or a model's buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..checks import as_int
from .base import MAX_CONTEXT
from .bounds import rope_inv_freq
from .reading import LENGTHS, ROPE_UNLESS, Source, positive


# Facts that only modeling code contains; `python -m scripts.rope_types` derives the types from transformers' code.
BASE_IN_CODE = {"codegen": 10_000.0, "gptj": 10_000.0, "roformer": 10_000.0}
ROPE_ON_SLIDING_LAYERS_ONLY = (
    *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini"),
)
NTK_ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text")  # dynamic: base * alpha ** (d / (d - 2))
NOT_ATTENTION = ("conv", "linear_attention", "mamba", "moe", "recurrent")
# Parameters that each rope type reads, and parameters that do not change any frequency.
READS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor alpha",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow truncate",
    "longrope": "factor original_max_position_embeddings short_factor long_factor",
    "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
    "proportional": "factor",
}
CHANGES_NO_FREQUENCY = (
    "type rope_type rope_theta partial_rotary_factor attention_factor attn_factor mscale mscale_all_dim short_mscale "
    "long_mscale llama_4_scaling_beta finetuned original_max_position_embeddings max_position_embeddings mrope_section "
    "mrope_interleaved interleaved"
)
MIN_TRAINING_LENGTH = 2048  # tokens; see `scaled_length`


class NoRopeError(ValueError):
    """The model does not use a rotary position embedding.

    Args:
        config: config of the model.
        reason: evidence in the config.
    """

    def __init__(self, config: Any, reason: str):
        super().__init__(
            f"{type(config).__name__} has no rotary position embedding that its config describes, so RoPE bounds "
            f"nothing: {reason}."
        )


class Rope(NamedTuple):
    """The rotary embedding of a group of layers; inv_freq (n,) float64 rotates the first 2n dimensions of a head."""

    type: str
    base: float
    inv_freq: np.ndarray
    head_dim: int


# The claimed context ------------------------------------------------------------------------------------------------


def claimed_context(source: Source) -> tuple[int, str]:
    """Return the context that a model claims, in tokens, and the setting that claims it; adds to `source.notes`.

    This is the largest claim in the config or the tokenizer's config.

    Raises:
        ValueError: no setting claims a length, or a claim is not a number of tokens.
    """
    config, notes = source.config, source.notes
    claims = stated_lengths(source)
    stated = claims.get("max_position_embeddings", max(claims.values(), default=None))
    claims |= scaled_length(source, stated, max(claims.values(), default=0) != stated)
    condensed = getattr(config, "rope_condense_ratio", None)
    if condensed and stated:
        claims["rope_condense_ratio"] = int(positive("rope_condense_ratio", condensed) * stated)
        notes.append(f"rope_condense_ratio = {condensed:g} needs code of FastChat: plain RoPE is judged")
    of_tokenizer: Any = source.tokenizer.get("model_max_length")
    if isinstance(of_tokenizer, int | float) and 1 < of_tokenizer <= MAX_CONTEXT:  # 1e30 stands for no limit
        claims["model_max_length of the tokenizer"] = int(of_tokenizer)
    if not claims:
        raise ValueError(f"{type(config).__name__} has no max_position_embeddings; pass context_length instead.")
    by = max(claims, key=lambda name: claims[name])
    if by in LENGTHS and not any(map(source.names, LENGTHS)):
        notes.append(f"{by} = {claims[by]} is the default of {type(config).__name__}; config.json names none")
    elif stated is not None and claims[by] > stated and not ("max_pos" in by or by.startswith("factor")):
        notes.append(f"max_position_embeddings is {stated}; {by} claims {claims[by]} tokens")
    chunks = getattr(config, "dual_chunk_attention_config", None)
    if isinstance(chunks, dict):
        native = chunks.get("original_max_position_embeddings", "fewer")
        notes.append(
            f"the claim rests on dual_chunk_attention_config ({native} tokens without it), which transformers ignores: "
            "plain RoPE is judged"
        )
    return claims[by], by


def stated_lengths(source: Source) -> dict[str, int]:
    """Return a config's lengths by name; class defaults only count if config.json does not set any length."""
    config, lengths = source.config, {}
    named = any(map(source.names, LENGTHS))
    for name in LENGTHS:
        length = getattr(config, name, None)
        length = source.file.get(name) if length is None else length
        attribute = getattr(type(config), "attribute_map", {}).get(name, name)
        assumed = not source.known or length == getattr(type(config), attribute, None)
        if length is not None and not (named and assumed and not source.names(name)):
            lengths[name] = as_int(name, length, 1)
    return lengths


def scaled_length(source: Source, stated: int | None, longer: bool) -> dict[str, int]:
    """Return the scaled length, i.e. the scaling factor times the original length; adds a note if it is a guess.

    If a config does not name the original length, max_position_embeddings may be the original or the scaled length. We
    take it as the original with dynamic scaling and YaRN, like transformers, and with linear scaling if the model
    would otherwise have been trained on 2048 tokens or fewer.

    Args:
        stated: max_position_embeddings.
        longer: whether the config states a longer length under another name, which makes a guess unnecessary.
    """
    rope, notes = source.config.rope_parameters, source.notes
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in nested or [rope]:
        scaling, factor = parameters.get("rope_type"), parameters.get("factor")
        original = parameters.get("original_max_position_embeddings")
        if scaling not in ("yarn", "linear", "dynamic") or not factor or factor <= 1 or parameters.get("alpha"):
            continue
        if original and (scaling != "yarn" or source.names("original_max_position_embeddings")):
            if stated and factor * original > stated:
                notes.append(
                    f"max_position_embeddings is {stated}; {scaling} claims {factor:g} times {original} tokens"
                )
            return {f"factor of {scaling}": int(factor * original)}
        if not stated or nested or longer:
            continue
        scaled, is_scaled = int(factor * stated), scaling == "linear" and stated > MIN_TRAINING_LENGTH * factor
        if scaling == "yarn" or (scaling == "linear" and stated >= MIN_TRAINING_LENGTH * factor):
            when, other, tokens = ("with", "before", scaled) if is_scaled else ("before", "after", stated)
            notes.append(
                f"max_position_embeddings = {stated} is taken to be the length {when} {scaling} scaling by {factor:g}; where "
                f"it is that {other} scaling, check {tokens} tokens"
            )
        if not is_scaled:
            return {f"{factor:g} times max_position_embeddings, by {scaling} scaling": scaled}
    return {}


# Groups of layers ---------------------------------------------------------------------------------------------------


def with_rope_parameters(source: Source) -> Any:
    """Return the config of a source, with RoPE settings of any spelling in `rope_parameters`.

    Raises:
        NoRopeError: the model does not use RoPE.
    """
    config = source.config
    if not may_rotate(config):
        raise NoRopeError(config, f"the attention of {config.model_type} rotates nothing")
    if config.model_type in BASE_IN_CODE:
        config.rope_parameters = {"rope_type": "default", "rope_theta": BASE_IN_CODE[config.model_type]}
        source.notes.append("the base is fixed in this model's code; its config does not name it")
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


def may_rotate(config: Any) -> bool:
    """Return whether a model type may apply RoPE: its config class in transformers then has a field for it."""
    settings = {"rope_parameters", "rope_theta"} & getattr(type(config), "__dataclass_fields__", {}).keys()
    of_transformers = type(config).__module__.startswith("transformers.models.")
    return bool(settings) or not of_transformers or config.model_type in BASE_IN_CODE


def parameters_of(config: Any, kind: str) -> dict[str, Any]:
    """Return the rope_parameters of one layer type."""
    nested = config.rope_parameters.get(kind)
    return nested if isinstance(nested, dict) else config.rope_parameters


def layer_groups(config: Any) -> dict[tuple[str, float], list[int]]:
    """Return the indices of the attention layers by layer type and base; base 0 stands for no RoPE."""
    nested = [key for key, value in config.rope_parameters.items() if isinstance(value, dict)]
    kinds, count = getattr(config, "layer_types", None), required_int(config, "num_hidden_layers")
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"layer_types must be a list with the type of each of {count} layers, got {kinds!r}.")
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
    """Return whether layer i rotates queries and keys, according to the config or the model type's code."""
    if getattr(config, "no_rope_layers", None):
        return bool(config.no_rope_layers[i])  # 1 where there is RoPE, despite the name
    if config.model_type in ROPE_ON_SLIDING_LAYERS_ONLY and getattr(config, "sliding_window", None):
        prefix = getattr(config, "prefix_dense_sliding_window_pattern", None)
        return kind == "sliding_attention" or (prefix == 1 and config.mlp_layer_types[i] == "dense")
    return True


def layer_config(config: Any, layers: list[int]) -> Any:
    """Return the config of these layers: configs such as Gemma 4's give layers their own dimensions."""
    return config.per_layer_config[layers[0]] if layers and getattr(config, "is_heterogeneous", False) else config


def attention_window(config: Any, kind: str, layers: list[int]) -> int | None:
    """Return the window of such layers in tokens; None for full attention."""
    name = "sliding_window" if "sliding" in kind else "attention_chunk_size" if "chunked" in kind else None
    tokens = getattr(layer_config(config, layers), name, None) if name else None
    return None if tokens is None else as_int(str(name), tokens, 2)


# Frequencies --------------------------------------------------------------------------------------------------------


def rope_of_layers(source: Source, kind: str, base: float, layers: list[int], claimed: int) -> Rope:
    """Compute the frequencies of a group by its rope type; adds a note on each assumption.

    Args:
        claimed: tokens of context, for types whose frequencies depend on the length.

    Raises:
        ValueError: the parameters are incomplete, or their frequencies are not valid.
        NotImplementedError: the rope type is unknown.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, parameters = source.config, parameters_of(source.config, kind)
    check_parameters(source, parameters)
    rope_type, parameters["rope_theta"] = parameters["rope_type"], base
    layer = layer_config(config, layers)
    if getattr(layer, "head_dim", None) is None:
        layer.head_dim = required_int(layer, "hidden_size") // required_int(layer, "num_attention_heads")
    head_dim = required_int(layer, "head_dim")
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
                f"rope_parameters of type {rope_type!r} are not complete, or one has the wrong type or length: {error!r} "
                f"in {parameters}."
            ) from error
        inv_freq = frequencies.double().numpy()
        if not (np.isfinite(inv_freq) & (inv_freq >= 0)).all():
            raise ValueError(
                f"rope_parameters must give finite frequencies >= 0, got {parameters}. Its numbers must be positive."
            )
    return Rope(rope_type, float(base), inv_freq, getattr(layer, "qk_head_dim", None) or head_dim)


def check_parameters(source: Source, parameters: dict[str, Any]) -> None:
    """Add notes on assumed parameters of a group, and on parameters that its rope type does not use.

    Raises:
        ValueError: transformers does not define a parameter, so its effect on the frequencies is unknown.
        NotImplementedError: the rope type is unknown.
    """
    config, notes, rope_type = source.config, source.notes, parameters["rope_type"]
    if rope_type not in READS:
        raise NotImplementedError(f"rope type {rope_type!r} is not supported; supported are {', '.join(READS)}.")
    readable = {*" ".join(READS.values()).split()} - {"alpha"}
    reads = set(READS[rope_type].split())
    if source.known and config.model_type not in NTK_ALPHA:
        reads.discard("alpha")
    layer_types = {*(getattr(config, "layer_types", None) or ())}
    others = {key for key, value in parameters.items() if value is not None}
    others -= {*CHANGES_NO_FREQUENCY.split(), *reads, *layer_types}
    if others & readable:
        notes.append(
            f"{rope_type} RoPE does not use {', '.join(sorted(others & readable))}, which rope_parameters sets"
        )
    if others - readable:
        raise ValueError(
            f"rope_parameters has {', '.join(sorted(others - readable))}, which {rope_type} RoPE of "
            f"{config.model_type or 'transformers'} does not read. Remove it if the model's code ignores it too."
        )
    base = parameters.get("rope_theta")
    if base == getattr(type(config), "default_theta", None) and not source.names("rope_theta"):
        notes.append(f"base = {base:g} is the default of {type(config).__name__}; config.json names none")
    if "mrope_section" in parameters:
        notes.append("multimodal RoPE (mrope) is judged on text, where all its sections count the same positions")


def rotary_dimensions(config: Any, parameters: dict[str, Any], head_dim: int) -> int:
    """Return how many dimensions of a head rotate in plain RoPE."""
    share = parameters.get("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share) if 0 < share <= 1 else 0
    if config.model_type in BASE_IN_CODE:
        rotary_dim = getattr(config, "rotary_dim", None) or head_dim
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor * head_dim must be an even number from 2 to {head_dim}, because RoPE rotates pairs, "
            f"got {share!r} * {head_dim}."
        )
    return rotary_dim


def with_model_frequencies(rope: Rope, model: Any, kind: str, notes: list[str]) -> Rope:
    """Replace the frequencies with those in the model's buffer, if it has one."""
    text_config = model.config.get_text_config(decoder=True)
    for module in model.modules():
        if getattr(module, "config", None) is not text_config:
            continue
        buffer = getattr(module, f"{kind}_inv_freq", getattr(module, "inv_freq", None))
        if buffer is not None and not buffer.is_meta:
            inv_freq = buffer.double().cpu().numpy()
            if inv_freq.shape != rope.inv_freq.shape or not np.allclose(inv_freq, rope.inv_freq, rtol=1e-5, atol=0):
                notes.append("the model's frequencies differ from those of its config (a cast?); the model's are used")
            return rope._replace(inv_freq=inv_freq)
    return rope


def required_int(config: Any, name: str) -> int:
    """Return a required positive integer from the config."""
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"{type(config).__name__} has no {name}, which the bound needs. No default is assumed.")
    return as_int(name, value, 1)


def required_base(parameters: dict[str, Any]) -> float:
    """Return the required rope_theta from the parameters."""
    if parameters.get("rope_theta") is None:
        raise ValueError(f"rope_theta is missing in {parameters}. No default is assumed.")
    rope_inv_freq(parameters["rope_theta"], 2)  # raises for an invalid base
    return parameters["rope_theta"]
