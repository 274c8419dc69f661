"""Read the claimed context and the RoPE frequencies of each layer from a model's config.

The input is a model, a config, a parsed config.json, or a string: the name or folder of a model. If transformers
supports the model type, it parses the config. It also computes the frequencies of every RoPE scaling type. For other
model types, we read the config like a Llama config. We also accept other field names that models on the Hub use. The
model's own code runs only with `trust_remote_code`.

With a claimed context of N tokens, full attention attends over distances up to N - 1. Sliding-window attention attends
over distances up to window - 1.
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
from .layer_fields import LOCAL_BASES, READ, WINDOWED, read_layers
from .layers import LayerGroup, layer_config, of_transformers, parameters_of, required_int, rope_key


# Names of settings in transformers, and alternative names in config.json.
SPELLINGS = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "head_dim": ("kv_channels", "attention_head_dim", "d_head"),
    "rope_theta": ("rotary_emb_base", "rope_base", "rotary_base", "rope_freq_base", "global_rope_theta"),
    "partial_rotary_factor": ("rotary_pct", "rope_pct", "rotary_percent", "rotary_emb_fraction"),
    "qk_rope_head_dim": ("rope_head_dim",),
    "original_max_position_embeddings": ("original_seq_len", "initial_context_length"),
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
# If one of these settings has a value that is not listed here, the model does not use RoPE.
ROPE_UNLESS = {
    **dict.fromkeys(("alibi", "use_alibi", "no_rope", "mla_use_nope", "use_mla_nope"), (False, None)),
    **dict.fromkeys(("use_mem_rope", "use_rope", "use_rotary", "use_rotary_embeddings"), (True, None)),
    **dict.fromkeys(("position_embedding_type", "position_embedding", "pos_emb"), ("rope", "rotary", "rope_gptj")),
}
# Settings with the same meaning in model types that transformers does not support.
SHARED_FIELDS = ("dual_chunk_attention_config", "rope_condense_ratio")
SAME_ROPE_TYPE = {"su": "longrope", "mrope": "default", "origin": "default"}
ABOUT_ROPE = re.compile(r"rope|rotary|rotate|ntk|alibi|yarn")
ABOUT_LAYERS = re.compile(  # names of fields that may say what a layer attends to
    r"(?<!conv_)window|sliding|(?<!qk_)nope|swa_layers|swa_head_dim|layer_pattern|attention_chunk|attn_type"
    r"|^layer_types?$|^(attn|attention)_types?|(local|global|full)_(attn|attention|layer)"
)
# YaRN in files that transformers does not read: Mistral's params.json, DeepSeek's inference/config.json, and gpt-oss's
# original/config.json. The first is nested under "yarn". Each maps names to those of transformers.
YARN = (
    {"factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings"}
    | {"alpha": "beta_slow", "beta": "beta_fast"},
    {"rope_factor": "factor", "original_seq_len": "original_max_position_embeddings"}
    | {"beta_slow": "beta_slow", "beta_fast": "beta_fast"},
    {"rope_scaling_factor": "factor", "initial_context_length": "original_max_position_embeddings"}
    | {"rope_ntk_alpha": "beta_slow", "rope_ntk_beta": "beta_fast"},
)

# Settings in the code of a model type, but not in its config. `python -m scripts.rope_types` lists these model types.
BASE_IN_CODE = {"codegen": 10_000.0, "gptj": 10_000.0, "roformer": 10_000.0}
NTK_ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text")  # dynamic scaling: base * alpha ** (d / (d - 2))
# Parameters that determine the frequencies of each rope type.
READS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor alpha",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow truncate",
    "longrope": "factor original_max_position_embeddings short_factor long_factor",
    "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
    "proportional": "factor",
}
# Parameters that do not affect the frequencies.
CHANGES_NO_FREQUENCY = (
    "type rope_type rope_theta partial_rotary_factor attention_factor attn_factor mscale mscale_all_dim short_mscale "
    "long_mscale llama_4_scaling_beta finetuned original_max_position_embeddings max_position_embeddings mrope_section "
    "mrope_interleaved interleaved"
)
# Fields by which the layer types of a model type that transformers does not support differ in base, share or scaling.
BY_LAYER_TYPE = {*LOCAL_BASES, "compress_rope_theta", "partial_rotary_factors", "yarn_only_types"}
MIN_TRAINING_LENGTH = 2048  # in tokens; see `scaled_length`


class NoRopeError(ValueError):
    """Raised if a model does not use a rotary position embedding.

    Args:
        config: config of the model.
        reason: reason for this conclusion, for the error message.
    """

    def __init__(self, config: Any, reason: str):
        super().__init__(
            f"{type(config).__name__} does not describe a rotary position embedding, so the RoPE bound does not "
            f"apply: {reason}."
        )


class Rope(NamedTuple):
    """The rotary embedding of a group of layers. inv_freq (n,) float64 rotates the first 2n dimensions of a head."""

    type: str
    base: float
    inv_freq: np.ndarray
    head_dim: int


# The config ---------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """Information about a model from its config and tokenizer files, without the weights.

    Attributes:
        config: copy of the text decoder's config.
        name: name for the report. For a local model, it is the last component of the path.
        file: the text decoder's fields in config.json; empty if not available.
        tokenizer: parsed tokenizer_config.json; empty if not available.
        notes: sentences about the assumptions that we made.
        known: whether transformers has a config class for the model type.
    """

    config: Any
    name: str
    file: dict[str, Any]
    tokenizer: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    known: bool = True

    def names(self, setting: str) -> bool:
        """Return whether config.json contains a setting of the text decoder. Without a config.json, return True."""
        parts = [self.file, *(self.file.get(key) for key in ("rope_parameters", "rope_scaling", "yarn"))]
        parts += [part for rope in parts[1:] if isinstance(rope, dict) for part in rope.values()]
        keys = {key for part in parts if isinstance(part, dict) for key, value in part.items() if value is not None}
        return not self.file or not keys.isdisjoint((setting, *SPELLINGS.get(setting, ())))


def read_source(model: Any, **options: Any) -> Source:
    """Read a model's config and tokenizer config, without its weights.

    Args:
        model: a transformers model or config, a parsed config.json, or a string: a model name, a folder, or the path
            of a config.json.
        options: keywords of `from_pretrained` for a model given by its name, such as revision.

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
        name = str(model.get("_name_or_path") or model.get("model_type") or "config.json")[:200]
        file = model
    else:
        model = getattr(model, "config", model)
        if not isinstance(model, PreTrainedConfig):
            raise ValueError(
                f"the model must be a PreTrainedModel, a PreTrainedConfig, a parsed config.json, or the name of a model, "
                f"got a {type(model).__name__}."
            )
        name = model.name_or_path or type(model).__name__
        if model.name_or_path:
            with suppress(OSError, ValueError):
                file, tokenizer = read_files(name, local_files_only=True)
    name = public_name(str(Path(name).parent) if Path(name).is_file() else name)
    return read_decoder(model, name, file, tokenizer)


@contextmanager
def readable() -> Iterator[None]:
    """If an invalid value in a config causes an exception, raise a ValueError instead."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError, OSError):
        raise
    except Exception as error:  # an invalid value in a file can raise any exception
        raise ValueError(
            f"the config contains a value of the wrong type or size ({type(error).__name__}: {error}). Compare "
            "config.json with a file that transformers has saved."
        ) from error


def read_files(name: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and tokenizer_config.json. For a missing tokenizer config, return {}."""
    from transformers import PreTrainedConfig
    from transformers.utils import cached_file

    options = {key: value for key, value in options.items() if key in ("revision", "token", "local_files_only")}
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    folder = str(Path(name).parent) if Path(name).is_file() else name
    config, _ = PreTrainedConfig.get_config_dict(name, **options)
    path = cached_file(folder, "tokenizer_config.json", **options, **quiet)
    return config, {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def read_decoder(model: Any, name: str, file: dict[str, Any], tokenizer: dict[str, Any]) -> Source:
    """Select the text decoder of a config or a parsed config.json. Return its `Source`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = text_part(file)
    if not isinstance(model, dict):
        decoder = model.get_text_config(decoder=True)
        if isinstance(decoder, dict):  # the config class does not define this sub-config
            model = {"model_type": model.model_type, **decoder}
        elif decoder.model_type in CONFIG_MAPPING:
            return known_source(copy.deepcopy(decoder), name, file, tokenizer)
        else:
            model = decoder.to_dict()
    whole, model = model, text_part(model)
    fields, kind = copy.deepcopy(model), model.get("model_type")
    fields |= {key: read_rope(fields[key]) for key in ("rope_parameters", "rope_scaling") if fields.get(key)}
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        notes = []
        return Source(plain_config(fields, notes), name, file, tokenizer, notes, known=False)
    config = CONFIG_MAPPING[kind].from_dict(fields)
    decoder = config.get_text_config(decoder=True)
    layers = {"num_hidden_layers", *SPELLINGS["num_hidden_layers"]}
    if decoder is not config and (model is not whole or not layers.isdisjoint(fields)):
        # The fields describe the text decoder, and the config class is for a multimodal model.
        decoder = type(decoder).from_dict({key: value for key, value in fields.items() if key != "model_type"})
    return known_source(decoder, name, file, tokenizer)


def known_source(config: Any, name: str, file: dict[str, Any], tokenizer: dict[str, Any]) -> Source:
    """Return the `Source` of a config with a registered class."""
    source = Source(config, name, file, tokenizer)
    count = getattr(config, "num_hidden_layers", None)
    if count and not of_transformers(config):  # another package has registered the class
        fields, kinds = config.to_dict(), getattr(config, "layer_types", None)
        if kinds:  # may be a property, as in FoxConfig
            fields["layer_types"] = kinds
        for field_name, value in read_layers(fields, count, source.notes).items():
            if getattr(config, field_name, None) != value:
                setattr(config, field_name, value)
    return source


def text_part(file: dict[str, Any]) -> dict[str, Any]:
    """Return the text decoder's sub-config in a parsed config.json. Without a sub-config, return the whole file."""
    while (part := next((file[key] for key in TEXT_PARTS if isinstance(file.get(key), dict)), None)) is not None:
        file = {"model_type": file.get("model_type"), **part}
    return file


def read_rope(value: Any) -> dict[str, Any]:
    """Normalize RoPE parameters: drop null values, and use transformers' rope types.

    The parameters are flat or per layer type.
    """
    if not isinstance(value, dict):
        raise ValueError(f"rope_parameters must be a JSON object, got {value!r}.")
    if any(isinstance(entry, dict) for entry in value.values()):  # an entry per layer type; null means no RoPE
        return {key: read_rope(entry) if isinstance(entry, dict) else entry for key, entry in value.items()}
    rope = {key: entry for key, entry in value.items() if entry is not None}
    return rope | {key: SAME_ROPE_TYPE.get(rope[key], rope[key]) for key in ("type", "rope_type") if key in rope}


def plain_config(file: dict[str, Any], notes: list[str]) -> Any:
    """Convert a config that transformers does not support. Add a note on each assumption."""
    from transformers import PreTrainedConfig

    kind = file.get("model_type")
    notes.append(f"transformers does not support the model type {kind!r}; we read its config.json like a Llama config")
    file = {key: value for key, value in file.items() if value is not None}
    fields = {name: file[name] for name in LENGTHS if name in file}
    if fields:  # transformers functions read max_position_embeddings
        fields.setdefault("max_position_embeddings", next(iter(fields.values())))
    for name, others in SPELLINGS.items():
        spelling = next((spelling for spelling in (name, *others) if spelling in file), None)
        fields |= {} if spelling is None else {name: file[spelling]}
    fields |= {name: file[name] for name in (*SHARED_FIELDS, *ROPE_UNLESS) if name in file}
    fields |= read_layers(file, fields.get("num_hidden_layers") or 0, notes)
    rope, rope_fields = foreign_yarn(file)
    rope = rope or fields.get("rope_parameters") or {}
    base = fields.get("rope_theta", rope.get("rope_theta"))
    if kind == "chatglm":  # its code rotates half of each head, although config.json does not say so
        fields.setdefault("partial_rotary_factor", 0.5)
    if "qk_rope_head_dim" in fields:  # multi-head latent attention
        rotated = fields.pop("qk_rope_head_dim")
        whole = file.get("qk_head_dim") or fields.get("head_dim") or rotated
        fields["qk_head_dim"] = rotated + file["qk_nope_head_dim"] if "qk_nope_head_dim" in file else whole
        fields["head_dim"] = rotated
        fields.pop("partial_rotary_factor", None)
        rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    if "rotary_dim" in file and "partial_rotary_factor" not in fields:
        head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        fields["partial_rotary_factor"] = file["rotary_dim"] / head_dim
    about = {key for key, value in file.items() if ABOUT_ROPE.search(key) and value is not False}
    if base is None and about - ROPE_UNLESS.keys() - READ:
        base = 10_000.0
        notes.append("base = 10000 is Llama's default; config.json does not set a base")
    if "rope_ratio" in file and base is not None:
        base *= file["rope_ratio"]
        notes.append(f"rope_ratio multiplies the base by {file['rope_ratio']:g}")
    about |= {key for key, value in file.items() if ABOUT_LAYERS.search(key) and value}
    if file.get("swa_head_dim") == fields.get("head_dim"):
        about.discard("swa_head_dim")
    read = {
        *fields,
        *(other for others in SPELLINGS.values() for other in others),
        *READ,
        *ROPE_UNLESS,
        *BY_LAYER_TYPE,
    }
    unread = sorted(about - read - rope_fields - {"qk_rope_head_dim", "rotary_dim", "rope_ratio", "original_rope"})
    if unread:
        notes.append(f"not read: {', '.join(unread)}")
    config: Any = PreTrainedConfig()
    object.__setattr__(config, "model_type", kind if isinstance(kind, str) else "")
    fields |= {"rope_theta": base, "rope_parameters": rope}
    for name, value in (fields | rope_by_layer_type(file, fields)).items():
        setattr(config, name, value)
    return config


def foreign_yarn(file: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return YaRN parameters in another format than transformers', and the fields that contain them; see `YARN`."""
    nested: Any = file.get("yarn")
    for fields, names in zip((nested if isinstance(nested, dict) else {}, file, file), YARN):
        if {*list(names)[:2]} <= fields.keys():
            truncate = {"truncate": False} if "rope_ntk_alpha" in names else {}  # as in gpt-oss's code
            found = {names[name]: fields[name] for name in names if name in fields}
            return {"rope_type": "yarn", **found, **truncate}, {"yarn", *names}
    return {}, set()


def rope_by_layer_type(file: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return nested rope_parameters if the layer types of an unknown model type differ in base, share or scaling.

    Raises:
        ValueError: layers of one type differ.
    """
    rope, base, kinds = fields["rope_parameters"], fields["rope_theta"], fields["layer_types"]
    if file.keys().isdisjoint(BY_LAYER_TYPE) and not isinstance(base, list):
        return {}
    if not kinds or any(isinstance(value, dict) for value in rope.values()):
        return {}

    def of_kind(name: str, values: Any, kind: str) -> Any:
        if not isinstance(values, list):
            return values
        found = [value for layer, value in zip(kinds, values) if layer == kind]
        if len(values) < len(kinds) or any(value != found[0] for value in found):
            raise ValueError(
                f"{name} must be one number, or a list with the same number for all layers of a type, got {values!r}."
            )
        return found[0]

    local = next((name for name in LOCAL_BASES if name in file), None)
    compressed = file.get("compress_rope_theta")
    nested = {}
    for kind in dict.fromkeys(kinds):
        windowed = bool(WINDOWED.search(kind))
        theta = of_kind("rope_theta", base, kind)
        if windowed and local is not None:
            theta = file[local]
        if not windowed and compressed is not None:
            theta = compressed
        scaled = kind in file["yarn_only_types"] if file.get("yarn_only_types") else not windowed
        nested[kind] = ({**rope} if scaled else {"rope_type": "default"}) | {"rope_theta": theta}
        share = of_kind("partial_rotary_factors", file.get("partial_rotary_factors"), kind)
        share = rope.get("partial_rotary_factor") if share is None else share
        nested[kind] |= {} if share is None else {"partial_rotary_factor": share}
    return {"rope_parameters": nested, "rope_theta": None}


# The claimed context ------------------------------------------------------------------------------------------------


def claimed_context(source: Source) -> tuple[int, str]:
    """Return the claimed context and the setting that claims it.

    The claimed context is the largest length in the config or the tokenizer's config. We add notes to `source.notes`.

    Raises:
        ValueError: no setting claims a length, or a claim is not a number of tokens.
    """
    config, notes = source.config, source.notes
    claims = stated_lengths(source)
    stated = claims.get("max_position_embeddings", max(claims.values(), default=None))
    claims |= scaled_length(source, stated, max(claims.values(), default=0) != stated)
    of_tokenizer: Any = source.tokenizer.get("model_max_length")
    if isinstance(of_tokenizer, int | float) and 1 < of_tokenizer <= MAX_CONTEXT:  # 1e30 means unlimited
        claims["model_max_length of the tokenizer"] = int(of_tokenizer)
    if not claims:
        raise ValueError(f"{type(config).__name__} does not set max_position_embeddings. Pass context_length instead.")
    by = max(claims, key=lambda name: claims[name])
    if by in LENGTHS and not any(map(source.names, LENGTHS)):
        notes.append(f"{by} = {claims[by]} is the default of {type(config).__name__}; config.json does not set it")
    elif stated is not None and claims[by] > stated and "max_pos" not in by:
        notes.append(f"max_position_embeddings is {stated}; {by} claims {claims[by]} tokens")
    for name, program in (("dual_chunk_attention_config", "vLLM"), ("rope_condense_ratio", "FastChat")):
        if getattr(config, name, None):
            notes.append(f"{name} only has an effect in {program}; we check plain RoPE, as in transformers")
    return claims[by], by


def stated_lengths(source: Source) -> dict[str, int]:
    """Return the lengths in a config, keyed by name. If config.json sets a length, ignore class defaults."""
    config = source.config
    lengths = {}
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
    """Return the scaled length (factor times original length), keyed by the setting that determines it.

    If a config does not contain the original length, max_position_embeddings may be the original or the scaled length.
    With dynamic scaling and YaRN, we assume that it is the original length, as transformers does. With linear scaling,
    we assume that it is the scaled length if max_position_embeddings / factor is above 2048 tokens, and the original
    length otherwise. If we guess, we add a note.

    Args:
        stated: max_position_embeddings.
        longer: whether another setting contains a longer length. If so, we do not guess.
    """
    rope, notes = source.config.rope_parameters, source.notes
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in nested or [rope]:
        scaling, factor = parameters.get("rope_type"), parameters.get("factor")
        original = parameters.get("original_max_position_embeddings")
        if scaling not in ("yarn", "linear", "dynamic") or not factor or factor <= 1 or parameters.get("alpha"):
            continue
        if original and (scaling != "yarn" or source.names("original_max_position_embeddings")):
            return {f"factor of {scaling}": int(factor * original)}
        if not stated or nested or longer:
            continue
        scaled, is_scaled = int(factor * stated), scaling == "linear" and stated > MIN_TRAINING_LENGTH * factor
        if scaling == "yarn" or (scaling == "linear" and stated >= MIN_TRAINING_LENGTH * factor):
            when, other, tokens = ("with", "before", scaled) if is_scaled else ("before", "after", stated)
            notes.append(
                f"we assume that max_position_embeddings = {stated} is the length {when} {scaling} scaling by {factor:g}; "
                f"if it is the length {other} scaling, check {tokens} tokens"
            )
        if not is_scaled:
            return {f"{factor:g} times max_position_embeddings, by {scaling} scaling": scaled}
    return {}


def with_rope_parameters(source: Source) -> Any:
    """Return the config of a source, with all its RoPE settings collected in `rope_parameters`.

    Raises:
        NoRopeError: the model does not use RoPE.
    """
    config = source.config
    if not may_rotate(config):
        raise NoRopeError(config, f"the attention of {config.model_type} does not rotate queries and keys")
    if config.model_type in BASE_IN_CODE:
        config.rope_parameters = {"rope_type": "default", "rope_theta": BASE_IN_CODE[config.model_type]}
        source.notes.append("the base is fixed in this model's code; its config does not contain it")
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
    """Return whether a model type may use RoPE: its config class has a field for RoPE settings."""
    settings = {"rope_parameters", "rope_theta"} & getattr(type(config), "__dataclass_fields__", {}).keys()
    return bool(settings) or not of_transformers(config) or config.model_type in BASE_IN_CODE


# Frequencies --------------------------------------------------------------------------------------------------------


def rope_of_layers(source: Source, group: LayerGroup, layers: list[int], claimed: int) -> Rope:
    """Compute the RoPE frequencies of a group of layers. Add a note on each assumption.

    Args:
        group: what the layers have in common.
        layers: indices of the layers.
        claimed: context length in tokens; the frequencies of some rope types depend on it.

    Raises:
        ValueError: the parameters are incomplete, or result in invalid frequencies.
        NotImplementedError: the rope type is unknown.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = source.config
    parameters = parameters_of(source.config, group.kind)
    base = group.base
    assert parameters is not None  # the layers of the group apply RoPE
    check_parameters(source, parameters)
    rope_type = parameters["rope_type"]
    parameters["rope_theta"] = base
    layer = layer_config(config, layers[0])
    if getattr(layer, "head_dim", None) is None:
        layer.head_dim = required_int(layer, "hidden_size") // required_int(layer, "num_attention_heads")
    head_dim = required_int(layer, "head_dim")
    alpha = parameters.get("alpha") if rope_type == "dynamic" else None
    if rope_type == "default" or alpha:
        rotary_dim = rotary_dimensions(config, parameters, head_dim)
        scaled = base * alpha ** (rotary_dim / (rotary_dim - 2)) if alpha else base
        inv_freq = rope_inv_freq(scaled, rotary_dim)
    else:
        layer_type = rope_key(config, group.kind)
        try:
            frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=claimed, layer_type=layer_type)
        except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"rope_parameters of type {rope_type!r} are not complete, or a value has the wrong type or length "
                f"({error!r}): {parameters}."
            ) from error
        inv_freq = frequencies.double().numpy()
        if not (np.isfinite(inv_freq) & (inv_freq >= 0)).all():
            raise ValueError(
                f"rope_parameters must result in finite frequencies >= 0, got {parameters}. "
                "All numbers must be positive."
            )
    whole = getattr(layer, "qk_head_dim", None) or head_dim
    if 2 * len(inv_freq) > whole:
        raise ValueError(
            f"head_dim must be at most the size of a query head, got {2 * len(inv_freq)} rotated dimensions in heads of "
            f"{whole}. With qk_rope_head_dim, head_dim must equal it."
        )
    return Rope(rope_type, float(base), inv_freq, whole)


def check_parameters(source: Source, parameters: dict[str, Any]) -> None:
    """Add notes on assumed parameters, and on parameters that the rope type does not use.

    Raises:
        ValueError: transformers does not define a parameter, so its effect on the frequencies is unknown.
        NotImplementedError: the rope type is unknown.
    """
    config = source.config
    notes = source.notes
    rope_type = parameters["rope_type"]
    if rope_type not in READS:
        raise NotImplementedError(f"rope_type must be one of {', '.join(READS)}, got {rope_type!r}.")
    readable = {*" ".join(READS.values()).split()} - {"alpha"}
    reads = set(READS[rope_type].split())
    if source.known and config.model_type not in NTK_ALPHA:
        reads.discard("alpha")
    layer_types = {*(getattr(config, "layer_types", None) or ())}
    others = {key for key, value in parameters.items() if value is not None}
    others -= {*CHANGES_NO_FREQUENCY.split(), *reads, *layer_types}
    if others & readable:
        notes.append(f"{rope_type} RoPE does not use {', '.join(sorted(others & readable))} from rope_parameters")
    if others - readable:
        raise ValueError(
            f"{rope_type} RoPE of {config.model_type or 'transformers'} does not use these entries of rope_parameters: "
            f"{', '.join(sorted(others - readable))}. If the model's code also ignores them, remove them."
        )
    base = parameters.get("rope_theta")
    unnamed = source.known and not source.names("rope_theta")
    if unnamed and base == getattr(type(config), "default_theta", None):
        notes.append(f"base = {base:g} is the default of {type(config).__name__}; config.json does not set it")
    if "mrope_section" in parameters:
        notes.append("multimodal RoPE (mrope) is checked for text; all its sections then use the same positions")


def rotary_dimensions(config: Any, parameters: dict[str, Any], head_dim: int) -> int:
    """Return the number of dimensions of a head that rotate in plain RoPE."""
    share = parameters.get("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share) if 0 < share <= 1 else 0
    if config.model_type in BASE_IN_CODE:
        rotary_dim = getattr(config, "rotary_dim", None) or head_dim
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor * head_dim must be an even number from 2 to {head_dim}, got {share!r} * {head_dim}. "
            "RoPE rotates pairs."
        )
    return rotary_dim
