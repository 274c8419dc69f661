"""Read the config of any model: a name, a folder, a JSON object, a config or a model.

A type that transformers knows is read by its class. The plain fields of any other are read as a Llama would, under the
names that code on the Hub gives them, and no code of the model runs.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import public_name


# The names of transformers, and what else a config.json calls the same setting.
SPELLINGS = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "head_dim": ("kv_channels", "attention_head_dim", "d_head"),
    "rope_theta": ("rotary_emb_base", "rope_base", "rotary_base", "rope_freq_base"),
    "partial_rotary_factor": ("rotary_pct", "rope_pct", "rotary_percent", "rotary_emb_fraction"),
    "rope_parameters": ("rope_scaling",),
    "rope_type": ("type",),
}
LENGTHS = (
    *("max_position_embeddings", "model_max_length", "max_sequence_length", "max_seq_length", "max_seq_len"),
    *("n_positions", "n_ctx", "seq_length", "seq_len", "context_length", "max_context_length"),
)
TEXT_PARTS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config", "decoder")
SAME_ROPE_TYPE = {"su": "longrope", "mrope": "default", "origin": "default", None: "default"}
LLAMA_BASE = 10_000.0
ABOUT_ROPE = re.compile(r"rope|rotary|rotate|ntk|alibi|yarn")


@dataclass
class Source:
    """What is known of a model without its weights.

    Attributes:
        config: the config of its text decoder.
        name: a name that means the same elsewhere: of a local model the last component of its path.
        file: the content of config.json; None if it is not on this machine.
        text: the part of `file` that describes the text decoder; empty if there is no file.
        tokenizer: the content of tokenizer_config.json; empty if it is not on this machine.
        notes: what had to be assumed.
        known: whether transformers has a class for its type.
    """

    config: Any
    name: str
    file: dict[str, Any] | None = None
    text: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    known: bool = True


def read_source(model: Any, **options: Any) -> Source:
    """Read what is known of a model without its weights.

    Args:
        model: a model or config of transformers, the content of config.json, or a name, a folder or a config.json.
        options: keywords of `from_pretrained` for a name, such as revision.

    Raises:
        ValueError: the config cannot be read.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(model, str | Path):
        name, trust = str(model), options.pop("trust_remote_code", False)
        file, tokenizer = read_files(name, **options)
        if trust and "auto_map" in file:
            model = AutoConfig.from_pretrained(name, trust_remote_code=True, **options)
        else:
            model = file
    elif isinstance(model, dict):
        name, file, tokenizer = str(model.get("_name_or_path") or model.get("model_type") or "config.json"), model, {}
    else:
        config = getattr(model, "config", model)
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(
                f"rope_report got a {type(model).__name__}; it needs a PreTrainedModel, a PreTrainedConfig, the content "
                "of a config.json, or the name of a model."
            )
        name, file, tokenizer = config.name_or_path or type(model).__name__, None, {}
        if config.name_or_path:
            with suppress(OSError, ValueError):
                file, tokenizer = read_files(name, local_files_only=True)
        model = config
    name = public_name(str(Path(name).parent) if Path(name).is_file() else name)
    with readable(name):
        return read_decoder(model, file, tokenizer, name)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn whatever a value of a wrong type or size breaks into one ValueError that names the config."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError, OSError):
        raise
    except Exception as error:  # the content of a file can break any line that reads it
        raise ValueError(
            f"the config of {name} holds a value of a wrong type or size ({type(error).__name__}: {error}); compare its "
            "config.json with one that transformers saves."
        ) from error


def read_files(name: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and of tokenizer_config.json; an empty dict for a tokenizer without one."""
    from transformers import PreTrainedConfig
    from transformers.utils import cached_file

    options = {key: value for key, value in options.items() if key in ("revision", "token", "local_files_only")}
    if Path(name).is_file():
        config, folder = json.loads(Path(name).read_text(encoding="utf-8")), str(Path(name).parent)
    else:
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


def read_decoder(model: Any, file: dict[str, Any] | None, tokenizer: dict[str, Any], name: str) -> Source:
    """Return the source of a config or of the content of config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text, notes = file or {}, []
    while isinstance(model, dict):
        kind: Any = model.get("model_type")
        part: Any = next((model[key] for key in TEXT_PARTS if isinstance(model.get(key), dict)), None)
        known = kind in CONFIG_MAPPING if isinstance(kind, str) else False
        composite = known and is_composite(CONFIG_MAPPING[kind])
        if part is not None and not composite:  # the type of the whole is not known, or is that of its text decoder
            model = text = {"model_type": kind, **part}
        elif not known:
            return Source(plain_config(model, notes), name, file, model, tokenizer, notes, known=False)
        else:
            check_layers(model)
            text = part or model
            model = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(model))
            if composite and part is None and names(text, "num_hidden_layers"):  # a flat file of a composite model
                model = type(model.get_text_config(decoder=True)).from_dict(copy.deepcopy(text))
    decoder = model.get_text_config(decoder=True)
    if isinstance(decoder, dict):
        return read_decoder({"model_type": model.model_type, **decoder}, file, tokenizer, name)
    part: Any = next((text[key] for key in TEXT_PARTS if isinstance(text.get(key), dict)), text)
    known = decoder.model_type in CONFIG_MAPPING
    if not known:
        fields = {
            key: getattr(decoder, key) for key in (*SPELLINGS, *LENGTHS) if getattr(decoder, key, None) is not None
        }
        decoder = plain_config(decoder.to_dict() | fields | {"model_type": decoder.model_type}, notes)
    return Source(copy.deepcopy(decoder), name, file, part, tokenizer, notes, known)


def is_composite(config_class: Any) -> bool:
    """Return whether configs of a class hold the config of a text decoder."""
    return not set(TEXT_PARTS).isdisjoint(getattr(config_class, "sub_configs", {}))


def check_layers(file: dict[str, Any]) -> None:
    """Raise ValueError if lists with an entry for each layer would not fit into memory."""
    for name in ("num_hidden_layers", *SPELLINGS["num_hidden_layers"]):
        if isinstance(file.get(name), int) and file[name] > 100_000:
            raise ValueError(f"{name} must be at most 100000, got {file[name]}.")


def plain_config(file: dict[str, Any], notes: list[str]) -> Any:
    """Return a config with the plain fields of a type that transformers does not know, and add what is assumed."""
    from transformers import PreTrainedConfig

    kind = file.get("model_type")
    check_layers(file)
    file = {key: value for key, value in file.items() if value is not None}
    fields = {name: file[name] for name in LENGTHS if name in file}
    if fields:  # transformers' own functions ask for this name
        fields.setdefault("max_position_embeddings", next(iter(fields.values())))
    for name, others in SPELLINGS.items():
        spelling = next((spelling for spelling in (name, *others) if spelling in file), None)
        if spelling is not None and spelling != "type":
            fields[name] = file[spelling]
    rope = read_dict(file, "rotary") | read_dict(fields, "rope_parameters")  # internlm's has base and scaling_factor
    if "base" in rope:
        fields.setdefault("rope_theta", rope.pop("base"))
    if "rotary" in file:
        rope.setdefault("factor", rope.pop("scaling_factor", 1.0))
    if rope:
        rope_type = rope.pop("type", None) if "rope_type" not in rope else rope["rope_type"]
        rope["rope_type"] = SAME_ROPE_TYPE.get(rope_type, rope_type)
    if kind == "chatglm":  # rotates half of each head, by code that config.json does not repeat
        fields.setdefault("partial_rotary_factor", 0.5)
    if "qk_rope_head_dim" in file:  # multi-head latent attention
        fields |= {"head_dim": file["qk_rope_head_dim"]}
        fields["qk_head_dim"] = file["qk_rope_head_dim"] + file.get("qk_nope_head_dim", 0)
    if "rotary_dim" in file and "partial_rotary_factor" not in fields:
        head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        fields["partial_rotary_factor"] = file["rotary_dim"] / head_dim
    about = {key: value for key, value in file.items() if ABOUT_ROPE.search(key) and value is not False}
    base = fields.get("rope_theta", rope.get("rope_theta"))
    notes.append(f"transformers does not know the model type {kind!r}; its config.json is read as a Llama would")
    if base is None and about.keys() - {"alibi"}:
        base = LLAMA_BASE
        notes.append(f"base = {base:g} is Llama's default; config.json names none")
    if "rope_ratio" in file and base is not None:
        base *= file["rope_ratio"]
        notes.append(f"rope_ratio multiplies the base by {file['rope_ratio']:g}")
    same = (
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "no_rope_layers",
        "position_embedding_type",
        "alibi",
    )
    fields |= {
        key: file[key] for key in (*same, "original_max_position_embeddings", "rope_condense_ratio") if key in file
    }
    read = {*fields, *(other for others in SPELLINGS.values() for other in others), "qk_rope_head_dim", "rotary_dim"}
    unread = sorted(about.keys() - read - {"rope_ratio", "rotary", "original_rope"})
    if unread:
        notes.append(f"not read: {', '.join(unread)}")
    config: Any = PreTrainedConfig()
    object.__setattr__(config, "model_type", kind if isinstance(kind, str) else "")
    for name, value in fields.items():
        setattr(config, name, value)
    config.rope_theta, config.rope_parameters = base, rope
    return config


def read_dict(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the JSON object of that name, empty if there is none."""
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r}.")
    return dict(value or {})


def names(file: dict[str, Any], name: str) -> bool:
    """Return whether a setting of the text decoder stands in a file, where parts are nested."""
    if not {name, *SPELLINGS.get(name, ())}.isdisjoint(file):
        return True
    if name == "max_position_embeddings" and not file.keys().isdisjoint(LENGTHS):
        return True
    parts = [part for key, part in file.items() if isinstance(part, dict) and not key.startswith(("vision", "audio"))]
    return any(names(part, name) for part in parts)
