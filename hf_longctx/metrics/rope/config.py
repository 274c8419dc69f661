"""Read the rotary embeddings of any model from its config: the claimed context, and the frequencies of its layers.

A model is given by its name, its folder, a JSON object, a config or the model itself. transformers reads the model
types that it supports, and computes the frequencies of every scaling type. For any other type, we read the plain
fields as for a Llama, under the names that code on the Hub uses. The model's own code runs only with
`trust_remote_code`.

Full attention must distinguish tokens up to distance claimed context - 1, sliding attention up to window - 1.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checks import as_int, public_name
from .bound import MAX_CONTEXT, rope_inv_freq


# Settings by their names in transformers, with alternative names in config.json.
SPELLINGS = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "head_dim": ("kv_channels", "attention_head_dim", "d_head"),
    "rope_theta": ("rotary_emb_base", "rope_base", "rotary_base", "rope_freq_base"),
    "partial_rotary_factor": ("rotary_pct", "rope_pct", "rotary_percent", "rotary_emb_fraction"),
    "rope_parameters": ("rope_scaling",),
}
LENGTHS = (
    *("max_position_embeddings", "model_max_length", "max_sequence_length", "max_sequence_len", "max_seq_length"),
    *("max_seq_len", "n_positions", "n_ctx", "seq_length", "seq_len", "sequence_length"),
    *("context_length", "context_size", "context_window", "max_context_length", "max_context_len", "max_model_len"),
)
TEXT_PARTS = (
    *("text_config", "llm_config", "language_config", "language_model_config", "thinker_config", "decoder"),
    *("llm", "language_model", "text_model"),
)
# A model does not use RoPE if one of these settings has another value.
ROPE_UNLESS = {
    **dict.fromkeys(("alibi", "use_alibi", "no_rope"), (False, None)),
    **dict.fromkeys(("use_mem_rope", "use_rope", "use_rotary", "use_rotary_embeddings"), (True, None)),
    **dict.fromkeys(("position_embedding_type", "position_embedding", "pos_emb"), ("rope", "rotary")),
}
# Settings with the same meaning in types unknown to transformers.
SHARED_FIELDS = (
    *("layer_types", "sliding_window", "use_sliding_window", "no_rope_layers", "rope_condense_ratio"),
    *("original_max_position_embeddings", "dual_chunk_attention_config"),
)
SAME_ROPE_TYPE = {"su": "longrope", "mrope": "default", "origin": "default"}
LLAMA_BASE = 10_000.0
ABOUT_ROPE = re.compile(r"rope|rotary|rotate|ntk|alibi|yarn")

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


# The config ---------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """The information about a model that does not need its weights.

    Attributes:
        config: copy of the text decoder's config.
        name: portable name; for a local model, the last component of its path.
        file: content of config.json, with the text decoder's fields on top; empty if it is not on this machine.
        tokenizer: content of tokenizer_config.json; empty if it is not on this machine.
        notes: assumptions.
        known: whether transformers has a config class for the model type.
    """

    config: Any
    name: str
    file: dict[str, Any]
    tokenizer: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    known: bool = True

    def names(self, setting: str) -> bool:
        """Return whether config.json sets a setting of the text decoder; True if the file is not available."""
        parts = [self.file, self.file.get("rope_parameters"), self.file.get("rope_scaling")]
        parts += [part for rope in parts[1:] if isinstance(rope, dict) for part in rope.values()]
        keys = {key for part in parts if isinstance(part, dict) for key, value in part.items() if value is not None}
        return not self.file or not keys.isdisjoint((setting, *SPELLINGS.get(setting, ())))


def read_source(model: Any, **options: Any) -> Source:
    """Read the `Source` of a model, without its weights.

    Args:
        model: a model or config of transformers, the content of config.json, or a name, a folder or a config.json.
        options: keywords of `from_pretrained` for a name, such as revision.

    Raises:
        ValueError: the config cannot be read.
    """
    from transformers import AutoConfig, PreTrainedConfig

    file, tokenizer = {}, {}
    if isinstance(model, str | Path):
        name, trust = str(model), options.pop("trust_remote_code", False)
        file, tokenizer = read_files(name, **options)
        run_code = trust and "auto_map" in file
        model = AutoConfig.from_pretrained(name, trust_remote_code=True, **options) if run_code else file
    elif isinstance(model, dict):
        names = [model.get(key) for key in ("_name_or_path", "model_type")]
        name = next((name[:200] for name in names if isinstance(name, str) and name), "config.json")
        file = model
    else:
        model = getattr(model, "config", model)
        if not isinstance(model, PreTrainedConfig):
            raise ValueError(
                f"rope_report got a {type(model).__name__}; it needs a PreTrainedModel, a PreTrainedConfig, the content "
                "of a config.json, or the name of a model."
            )
        name = model.name_or_path or type(model).__name__
        if model.name_or_path:
            with suppress(OSError, ValueError):
                file, tokenizer = read_files(name, local_files_only=True)
    name = public_name(str(Path(name).parent) if Path(name).is_file() else name)
    return read_decoder(model, name, file, tokenizer)


@contextmanager
def readable() -> Iterator[None]:
    """Turn any error from a value of the wrong type or size into a ValueError."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError, OSError):
        raise
    except Exception as error:  # the content of a file can break any line that reads it
        raise ValueError(
            f"the config contains a value of the wrong type or size ({type(error).__name__}: {error}). Compare its "
            "config.json with one that transformers has saved."
        ) from error


def read_files(name: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and tokenizer_config.json; the latter is empty if the file is missing."""
    from transformers import PreTrainedConfig
    from transformers.utils import cached_file

    options = {key: value for key, value in options.items() if key in ("revision", "token", "local_files_only")}
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    folder = str(Path(name).parent) if Path(name).is_file() else name
    config, _ = PreTrainedConfig.get_config_dict(name, **options)
    path = cached_file(folder, "tokenizer_config.json", **options, **quiet)
    return config, {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def read_decoder(model: Any, name: str, file: dict[str, Any], tokenizer: dict[str, Any]) -> Source:
    """Return the `Source` of a config object or of the content of a config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = with_part_on_top(file)
    if not isinstance(model, dict):
        decoder = model.get_text_config(decoder=True)
        if isinstance(decoder, dict):  # a part that the config class does not know
            model = {"model_type": model.model_type, **decoder}
        elif decoder.model_type in CONFIG_MAPPING:
            return Source(copy.deepcopy(decoder), name, file, tokenizer)
        else:
            aliases = {key: getattr(decoder, key, None) for key in (*SPELLINGS, *LENGTHS)}
            aliases = {key: value for key, value in aliases.items() if value is not None}
            model = decoder.to_dict() | aliases | {"model_type": decoder.model_type}
    whole = model
    while (part := text_part(model)) is not None:
        model = {"model_type": model.get("model_type"), **part}
    fields, kind = copy.deepcopy(model), model.get("model_type")
    fields |= {key: read_rope(fields[key]) for key in ("rope_parameters", "rope_scaling") if fields.get(key)}
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        notes = []
        return Source(plain_config(fields, notes), name, file, tokenizer, notes, known=False)
    config = CONFIG_MAPPING[kind].from_dict(fields)
    decoder = config.get_text_config(decoder=True)
    layers = {"num_hidden_layers", *SPELLINGS["num_hidden_layers"]}
    if decoder is not config and (model is not whole or not layers.isdisjoint(fields)):
        # the fields are those of the text decoder, in a class for several parts
        decoder = type(decoder).from_dict({key: value for key, value in fields.items() if key != "model_type"})
    return Source(decoder, name, file, tokenizer)


def text_part(file: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of a config.json that describes the text decoder; None if there is none."""
    return next((file[key] for key in TEXT_PARTS if isinstance(file.get(key), dict)), None)


def with_part_on_top(file: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with the text decoder's fields moved to the top level."""
    while (part := text_part(file)) is not None:
        file = {key: value for key, value in file.items() if value is not part} | part
    return file


def read_rope(value: Any) -> dict[str, Any]:
    """Return RoPE parameters, nested ones included, without null and with transformers' names of rope types."""
    if not isinstance(value, dict):
        raise ValueError(f"rope_parameters must be a JSON object, got {value!r}.")
    if any(isinstance(entry, dict) for entry in value.values()):  # by layer type; null for layers without RoPE
        return {key: read_rope(entry) if isinstance(entry, dict) else entry for key, entry in value.items()}
    rope = {key: entry for key, entry in value.items() if entry is not None}
    return rope | {key: SAME_ROPE_TYPE.get(rope[key], rope[key]) for key in ("type", "rope_type") if key in rope}


def plain_config(file: dict[str, Any], notes: list[str]) -> Any:
    """Return a config with the plain fields of a type unknown to transformers; adds notes on assumptions."""
    from transformers import PreTrainedConfig

    kind = file.get("model_type")
    notes.append(f"transformers does not know the model type {kind!r}; its config.json is read as a Llama would")
    file = {key: value for key, value in file.items() if value is not None}
    fields = {name: file[name] for name in LENGTHS if name in file}
    if fields:  # transformers' own functions ask for this name
        fields.setdefault("max_position_embeddings", next(iter(fields.values())))
    for name, others in SPELLINGS.items():
        spelling = next((spelling for spelling in (name, *others) if spelling in file), None)
        fields |= {} if spelling is None else {name: file[spelling]}
    fields |= {name: file[name] for name in (*SHARED_FIELDS, *ROPE_UNLESS) if name in file}
    rope = dict(fields.get("rope_parameters") or {})
    if "rotary" in file:  # internlm's
        rope |= {"factor": 1.0} | read_rope(file["rotary"])
        rope["factor"] = rope.pop("scaling_factor", rope["factor"])
    base = fields.get("rope_theta", rope.pop("base", rope.get("rope_theta")))
    if kind == "chatglm":  # rotates half of each head, by code that config.json does not repeat
        fields.setdefault("partial_rotary_factor", 0.5)
    if "qk_rope_head_dim" in file:  # multi-head latent attention
        fields["head_dim"] = file["qk_rope_head_dim"]
        fields["qk_head_dim"] = fields["head_dim"] + file.get("qk_nope_head_dim", 0)
    if "rotary_dim" in file and "partial_rotary_factor" not in fields:
        head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        fields["partial_rotary_factor"] = file["rotary_dim"] / head_dim
    about = {key for key, value in file.items() if ABOUT_ROPE.search(key) and value is not False} - ROPE_UNLESS.keys()
    if base is None and about:
        base = LLAMA_BASE
        notes.append(f"base = {base:g} is Llama's default; config.json names none")
    if "rope_ratio" in file and base is not None:
        base *= file["rope_ratio"]
        notes.append(f"rope_ratio multiplies the base by {file['rope_ratio']:g}")
    read = {*fields, *(other for others in SPELLINGS.values() for other in others)}
    unread = sorted(about - read - {"qk_rope_head_dim", "rotary_dim", "rope_ratio", "rotary", "original_rope"})
    if unread:
        notes.append(f"not read: {', '.join(unread)}")
    config: Any = PreTrainedConfig()
    object.__setattr__(config, "model_type", kind if isinstance(kind, str) else "")
    for name, value in (fields | {"rope_theta": base, "rope_parameters": rope}).items():
        setattr(config, name, value)
    return config


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
        claims["rope_condense_ratio"] = int(condensed * stated)
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
    config.standardize_rope_params()
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
