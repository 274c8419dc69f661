"""Read the config of any model: a name, a folder, a JSON object, a config or a model.

transformers reads the model types that it supports. For any other type, we read the plain fields as for a Llama, under
the names that code on the Hub uses. The model's own code runs only with `trust_remote_code`.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import public_name


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
POSITIVE = (
    *("factor", "alpha", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow"),
)
LLAMA_BASE = 10_000.0
ABOUT_ROPE = re.compile(r"rope|rotary|rotate|ntk|alibi|yarn")


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
        spellings = {setting, *SPELLINGS.get(setting, ())}
        ropes = {key: self.file.get(key) for key in ("rope_parameters", "rope_scaling")}
        return not self.file or not spellings.isdisjoint(self.file) or is_inside(ropes, spellings)


def is_inside(part: Any, names: set[str]) -> bool:
    """Return whether a JSON object contains one of these keys, at any depth."""
    return isinstance(part, dict) and (
        not names.isdisjoint(part) or any(is_inside(value, names) for value in part.values())
    )


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
    with readable(name):
        return read_decoder(model, name, file, tokenizer)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn any error from a value of the wrong type or size into a ValueError that names the config."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError, OSError):
        raise
    except Exception as error:  # the content of a file can break any line that reads it
        raise ValueError(
            f"the config of {name} contains a value of the wrong type or size ({type(error).__name__}: {error}). "
            "Compare its config.json with one that transformers has saved."
        ) from error


def read_files(name: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and tokenizer_config.json; the latter is empty if the file is missing."""
    from transformers import PreTrainedConfig
    from transformers.utils import cached_file

    options = {key: value for key, value in options.items() if key in ("revision", "token", "local_files_only")}
    if Path(name).is_file():
        config, folder = json.loads(Path(name).read_text(encoding="utf-8")), str(Path(name).parent)
    else:
        with readable(name):
            config, folder = PreTrainedConfig.get_config_dict(name, **options)[0], name
    if not isinstance(config, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(config).__name__}.")
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    path = cached_file(folder, "tokenizer_config.json", **options, **quiet)
    try:
        tokenizer = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except ValueError:
        tokenizer = {}
    return config, tokenizer if isinstance(tokenizer, dict) else {}


def read_decoder(model: Any, name: str, file: dict[str, Any], tokenizer: dict[str, Any]) -> Source:
    """Return the `Source` of a config object or of the contents of a config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    while isinstance(model, dict):
        kind, part = model.get("model_type"), text_part(model)
        config_class: Any = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
        # other classes ignore a part; without a class, the part alone has a known type
        composite = not set(TEXT_PARTS).isdisjoint(getattr(config_class, "sub_configs", None) or ())
        if part is not None and not composite:
            model = {"model_type": kind, **part}
        elif config_class is None:
            break
        else:
            fields, flat = readable_fields(model), composite and part is None and layers_named(model)
            model = config_class.from_dict(fields)
            if flat:
                model = type(model.get_text_config(decoder=True)).from_dict(fields)
    file, notes = with_part_on_top(file), []
    if not isinstance(model, dict):
        decoder = model.get_text_config(decoder=True)
        if isinstance(decoder, dict):
            return read_decoder({"model_type": model.model_type, **decoder}, name, file, tokenizer)
        if decoder.model_type in CONFIG_MAPPING:
            return Source(copy.deepcopy(decoder), name, file, tokenizer)
        aliases = {key: getattr(decoder, key, None) for key in (*SPELLINGS, *LENGTHS)}
        aliases = {key: value for key, value in aliases.items() if value is not None}
        model = decoder.to_dict() | aliases | {"model_type": decoder.model_type}
    return Source(plain_config(readable_fields(model), notes), name, file, tokenizer, notes, known=False)


def text_part(file: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of a config.json that describes the text decoder; None if there is none."""
    return next((file[key] for key in TEXT_PARTS if isinstance(file.get(key), dict)), None)


def with_part_on_top(file: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with the text decoder's fields moved to the top level."""
    while (part := text_part(file)) is not None:
        file = {key: value for key, value in file.items() if value is not part} | part
    return file


def layers_named(file: dict[str, Any]) -> str | None:
    """Return the key of the number of layers in a config.json."""
    return next((name for name in ("num_hidden_layers", *SPELLINGS["num_hidden_layers"]) if name in file), None)


def readable_fields(file: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config.json with RoPE parameters in the spelling of transformers.

    Raises:
        ValueError: there are too many layers for memory, or a RoPE parameter is not a number.
    """
    file, layers = copy.deepcopy(file), layers_named(file)
    if layers and isinstance(file[layers], int) and file[layers] > 100_000:
        raise ValueError(f"{layers} must be at most 100000, got {file[layers]}.")
    return file | {name: read_rope(file[name]) for name in ("rope_parameters", "rope_scaling") if file.get(name)}


def read_rope(value: Any) -> dict[str, Any]:
    """Return RoPE parameters, nested ones included, without null and with transformers' names of rope types."""
    if not isinstance(value, dict):
        raise ValueError(f"rope_parameters must be a JSON object, got {value!r}.")
    rope = {}
    for key, entry in value.items():
        if isinstance(entry, dict):
            rope[key] = read_rope(entry)  # parameters of a layer type
        elif key in POSITIVE and entry is not None:
            rope[key] = positive(f"{key} of rope_parameters", entry)
        elif key in ("type", "rope_type"):
            rope |= {key: SAME_ROPE_TYPE.get(entry, entry)} if entry is not None else {}
        elif key not in POSITIVE:
            rope[key] = entry
    return rope


def positive(name: str, value: Any) -> float:
    """Return a number above 0; raise ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}.")
    return value


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
        base *= positive("rope_ratio", file["rope_ratio"])
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
