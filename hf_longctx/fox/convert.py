"""Lossless converters between FoX and other implementations of the same architecture.

Each implementation has one table of names for both directions. `convert_folder.py` converts files.
"""

import copy
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_fox import FoxConfig
from .modeling_fox import FoxForCausalLM, decay_time_bias


# Module names: {name in FoX: name in the other implementation}. Modules not listed here have the same names.
FLA_MODULES = {
    "embed_tokens": "embeddings",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attn",
}
OFFICIAL_MODULES = FLA_MODULES | {
    "f_proj": "fgate_proj",
    "g_proj": "ogate_proj",
    "o_norm": "output_norm",
    "k_shift_proj": "k_proj.shift_proj",
    "v_shift_proj": "v_proj.shift_proj",
    "up_proj": "gate_proj",  # one matrix: the rows of FoX's gate_proj, followed by its up_proj
}
LLAMA_MODULES = {"f_proj": None}  # a Llama has no forget gate

# Configuration fields: {name in the other implementation: name in FoX}. Other fields have the same name in both.
# `read_config` and `write_config` compute the fields in `COMPUTED`.
FIELDS = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "fgate_type": "forget_gate",
    "qk_norm_share_param_across_head": "qk_norm_shared",
    "use_output_norm": "output_norm",
    "use_k_shift": "k_shift",
    "use_v_shift": "v_shift",
}
COMPUTED = ("intermediate_size", "hidden_act", "max_position_embeddings")


# Default values that the three configuration classes share. Each `Layout` adds the defaults of its own class.
DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 2048, "hidden_ratio": 4, "intermediate_size": None, "num_hidden_layers": 24,
    "num_heads": 32, "num_kv_heads": None, "hidden_act": "swish", "initializer_range": 0.02, "norm_eps": 1e-6,
    "use_cache": True, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Module names and configuration fields of another implementation."""

    title: str
    model_type: str
    modules: dict[str, str]
    defaults: dict[str, Any]
    activations: tuple[str, ...] = ("swish",)
    constants: dict[str, object] = field(default_factory=dict)  # {FoX field: fixed value}
    refused: dict[str, str] = field(default_factory=dict)  # {other field that must be None: reason}


OFFICIAL = Layout(
    title="the authors' implementation",
    model_type="forgetting_transformer-project_fox",
    modules=OFFICIAL_MODULES,
    defaults=DEFAULTS | {
        "max_position_embeddings": 2048, "use_rope": False, "rope_base": 500000.0, "fgate_type": "full",
        "fgate_bias_init": False, "decay_time_min": None, "decay_time_max": None, "qk_norm": False,
        "qk_norm_share_param_across_head": False, "use_k_shift": False, "use_v_shift": False, "use_output_gate": False,
        "ogate_act": "sigmoid", "use_output_norm": False,
    },
    activations=("swish", "sigmoid"),
    refused={"num_kv_heads": "it does not support grouped heads"},
)  # fmt: skip
OFFICIAL_TRANSFORMER = Layout(
    title="the authors' Transformer",
    model_type="transformer-project_fox",
    modules=OFFICIAL_MODULES,
    defaults=DEFAULTS
    | {"max_position_embeddings": 2048, "use_rope": True, "rope_base": 500000.0, "window_size": None},
    constants={"forget_gate": "none"},
)
FLA = Layout(
    title="flash-linear-attention",
    model_type="forgetting_transformer",
    modules=FLA_MODULES,
    defaults=DEFAULTS
    | {"qk_norm": False, "qkv_bias": False, "use_output_gate": False, "window_size": None, "attnres_block_size": None},
    refused={
        "window_size": "it applies the window only in decoding, not in training or prefill, so the meaning of the weights "
        "is undefined. If they were trained with it, remove window_size from the configuration",
        "attnres_block_size": "FoX does not support attention residuals",
    },
)
LAYOUTS = {"official": (OFFICIAL, OFFICIAL_TRANSFORMER), "fla": (FLA,)}  # `write_config` uses the first layout

LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
# Default `decay_time` of `from_llama`, in multiples of the context length.
OPEN_GATE_CONTEXTS = 1e5


def from_official(state_dict: dict[str, torch.Tensor], config_dict: dict) -> FoxForCausalLM:
    """Build a FoX from a checkpoint of the authors' implementation (forgetting-transformer, commit 883f260).

    Args:
        state_dict: the tensors of the checkpoint by name. `lm_head.weight` may be missing if the embeddings are tied.
        config_dict: the content of its config.json. Missing fields default to the authors' values.

    Returns:
        The model in the `common_dtype` of `state_dict`, on the CPU, in evaluation mode. Its logits equal those of the
        authors' implementation.

    Raises:
        ValueError: FoX does not support the configuration; or tensors are missing, are unknown or have another shape.
            The message lists these tensors.
    """
    return build(read_config("official", config_dict), OFFICIAL_MODULES, state_dict)


def from_fla(state_dict: dict[str, torch.Tensor], config_dict: dict) -> FoxForCausalLM:
    """Build a FoX from a ForgettingTransformer of flash-linear-attention (0.6.0), as in `from_official`."""
    return build(read_config("fla", config_dict), FLA_MODULES, state_dict)


def from_llama(model: PreTrainedModel, decay_time: float | None = None) -> FoxForCausalLM:
    """Turn a causal LM of the Llama, Mistral, Qwen2 or Qwen3 family into a FoX, ready to be fine-tuned.

    The FoX retains all types of RoPE, grouped heads, the biases of Qwen2, the QK-norm of Qwen3 and a sliding window.
    Each query head gets a forget gate with weight 0 and a bias for which f = exp(-1 / decay_time).

    Args:
        model: the model with its language-modelling head. It is copied, not modified.
        decay_time: number of tokens in which a gate forgets by a factor e. Default: 1e5 * max_position_embeddings, so
            an attention logit changes by at most 1e-5 over the whole context. In our measurements (four layers, 2048
            tokens, fp32), the model's logits changed by 5e-7 with initial weights. With weights 10 times larger
            (logits up to 9), they changed by 1.4e-4. With weights 25 times larger (logits up to 20), they changed by
            1e-3. The gradient of a gate is proportional to 1 / decay_time. To train the gates from the first step,
            choose about ten times max_position_embeddings, and accept a larger change.

    Returns:
        The model in the dtype and on the device of `model`, in evaluation mode, with its generation settings.

    Raises:
        ValueError: the model belongs to another family; the output projection or the MLP has biases; only some layers
            have a sliding window; or the RoPE is not supported.
    """
    config = read_llama_config(model.config.to_dict(), decay_time)
    fox = build(config, LLAMA_MODULES, model.state_dict())
    nn.Module.to(fox, model.device)
    fox.generation_config = copy.deepcopy(model.generation_config)
    return fox


def to_official(model: FoxForCausalLM) -> tuple[dict[str, torch.Tensor], dict]:
    """Convert a FoX to a checkpoint of the authors' implementation. Inverse of `from_official`.

    Returns:
        (state_dict, config_dict) for the authors' implementation. Tensors share memory with the model where possible.

    Raises:
        ValueError: the authors' implementation does not support some features of the model. The message lists them.
    """
    return export_state_dict("official", model)


def to_fla(model: FoxForCausalLM) -> tuple[dict[str, torch.Tensor], dict]:
    """Convert a FoX to (state_dict, config_dict) of flash-linear-attention, as in `to_official`."""
    return export_state_dict("fla", model)


def build(config: FoxConfig, modules: Mapping[str, str | None], state_dict: dict[str, torch.Tensor]) -> FoxForCausalLM:
    """Build a FoX with the tensors of another implementation. `modules` maps FoX's module names to the other names."""
    tensors = tensors_of_fox(config, modules, state_dict)
    dtype = common_dtype(x.dtype for name, x in tensors.items() if "f_proj" not in name)  # f_proj is always float32
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.load_state_dict(tensors, strict=not config.tie_word_embeddings)  # `tensors` does not contain a tied lm_head
    model.tie_weights()
    return model


def export_state_dict(kind: str, model: FoxForCausalLM) -> tuple[dict[str, torch.Tensor], dict]:
    """Return (state_dict, config_dict) of `model` for the implementation `kind`, "official" or "fla"."""
    config_dict = write_config(kind, model.config)
    state_dict = tensors_of_others(model.config, LAYOUTS[kind][0].modules, model.state_dict())
    if model.config.tie_word_embeddings:
        state_dict["lm_head.weight"] = state_dict["model.embeddings.weight"]
    return state_dict, {**config_dict, "torch_dtype": str(model.dtype).removeprefix("torch.")}


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype to which all `dtypes` can be cast without loss."""
    return functools.reduce(torch.promote_types, dtypes)


def tensors_of_fox(
    config: FoxConfig, modules: Mapping[str, str | None], state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Convert the state dict of another implementation to FoX. `modules` maps FoX's module names to the other names.

    The tensors share memory with `state_dict`, except for new forget gates.
    """
    _, theirs, places = correspondence(config, modules)
    check_tensors(config, theirs, state_dict)
    tensors = {name: state_dict[place[0]][place[1] : place[2]] for name, place in places.items() if place}
    if new := places.keys() - tensors.keys():
        shortest, longest = config.decay_time_min, config.decay_time_max
        assert shortest is not None and longest is not None  # `read_llama_config` sets both
        bias = decay_time_bias(config.num_attention_heads, shortest, longest)
        weight = torch.zeros(config.num_attention_heads, config.hidden_size)
        tensors |= {name: (weight if name.endswith(".weight") else bias).clone() for name in new}
    return {name: tensors[name] for name in places}


def tensors_of_others(
    config: FoxConfig, modules: Mapping[str, str | None], state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Convert the state dict of a FoX to another implementation. Inverse of `tensors_of_fox`."""
    ours, _, places = correspondence(config, modules)
    check_tensors(config, ours, state_dict)
    parts: dict[str, list[torch.Tensor]] = {}
    for name, place in places.items():
        parts.setdefault(place[0], []).append(state_dict[name])
    return {name: x[0] if len(x) == 1 else torch.cat(x) for name, x in parts.items()}


def check_tensors(
    config: FoxConfig, shapes: dict[str, tuple[int, ...]], state_dict: Mapping[str, torch.Tensor]
) -> None:
    """Compare tensors with `shapes`. Raise a ValueError that lists missing and unknown tensors and wrong shapes."""
    # Old Llama checkpoints also contain RoPE frequencies. The configuration determines these.
    names = {name for name in state_dict if not name.endswith("rotary_emb.inv_freq")}
    problems = [f"missing: {name}" for name in shapes.keys() - names]
    problems += [
        f"shape of {name} is {tuple(state_dict[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in names and tuple(state_dict[name].shape) != shape
    ]
    unknown = names - shapes.keys()
    if config.tie_word_embeddings and "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")
        embeddings = next(name for name in shapes if name.startswith("model.embed"))
        if embeddings in names and not torch.equal(state_dict["lm_head.weight"], state_dict[embeddings]):
            problems.append(f"tie_word_embeddings is true, but lm_head.weight is not equal to {embeddings}")
    problems += [f"unknown: {name}" for name in unknown]
    if problems:
        raise ValueError("the tensors do not match the configuration:\n  " + "\n  ".join(sorted(problems)))


def correspondence(config, modules):
    """Return {name: shape} for FoX, {name: shape} for the other implementation, and {FoX name: location}.

    A location is (name, first row, end row) in the other implementation. The location of a new forget gate is None.
    """
    with torch.device("meta"):
        ours = {name: tuple(tensor.shape) for name, tensor in FoxForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del ours["lm_head.weight"]
    for x in ("k", "v"):
        if getattr(config, f"{x}_shift"):  # in the other implementations, the projection then has two layers
            modules = modules | {f"{x}_proj": f"{x}_proj.linear"}
    theirs, places = {}, {}
    for name, (rows, *columns) in ours.items():
        parts = [modules.get(part, part) for part in name.split(".")]
        if None in parts:
            places[name] = None
            continue
        their_name = ".".join(parts)
        if config.forget_gate != "full":  # in the other implementations, the gate is then a parameter
            their_name = their_name.replace("fgate_proj.bias", "fgate_bias")
        first = theirs[their_name][0] if their_name in theirs else 0
        theirs[their_name] = (first + rows, *columns)
        places[name] = (their_name, first, first + rows)
    return ours, theirs, places


def read_config(kind: str, config_dict: dict) -> FoxConfig:
    """Convert a configuration of the implementation `kind`, "official" or "fla", to a FoxConfig."""
    layouts = {layout.model_type: layout for layout in LAYOUTS[kind]}
    model_type = config_dict.get("model_type", LAYOUTS[kind][0].model_type)
    if model_type not in layouts:
        raise ValueError(f"model_type must be one of {tuple(layouts)} for this format, got {model_type!r}.")
    layout = layouts[model_type]
    theirs = layout.defaults | {name: value for name, value in config_dict.items() if name in layout.defaults}
    for name, why in layout.refused.items():
        if theirs[name] is not None:
            raise ValueError(f"{name}={theirs[name]!r} cannot be converted from or to {layout.title}: {why}.")
    if theirs["hidden_act"] not in layout.activations:
        raise ValueError(
            f"hidden_act must be one of {layout.activations} for {layout.title}, got {theirs['hidden_act']!r}."
        )
    if theirs["intermediate_size"] is None:
        width = int(theirs["hidden_size"] * (theirs["hidden_ratio"] or 4) * 2 / 3)
        theirs["intermediate_size"] = -(-width // 256) * 256
    fields = {FIELDS.get(name, name): value for name, value in theirs.items() if name not in COMPUTED}
    fields = {name: value for name, value in fields.items() if name in FoxConfig.__annotations__}
    if theirs.get("max_position_embeddings"):
        fields["max_position_embeddings"] = theirs["max_position_embeddings"]
    return FoxConfig(
        **fields,
        **layout.constants,
        intermediate_size=theirs["intermediate_size"],
        hidden_act="silu" if theirs["hidden_act"] == "swish" else str(theirs["hidden_act"]),
        rope_parameters={"rope_type": "default", "rope_theta": theirs["rope_base"]}
        if theirs.get("use_rope")
        else None,
        output_gate=theirs.get("ogate_act", "sigmoid") if theirs.get("use_output_gate") else None,
    )


def write_config(kind: str, config: FoxConfig) -> dict:
    """Convert a FoxConfig to a configuration of the implementation `kind`. Inverse of `read_config`.

    Raises:
        ValueError: the implementation does not support the values of some fields. The message lists these fields.
    """
    layout = LAYOUTS[kind][0]
    rope = config.rope_parameters or {}
    values = {name: getattr(config, FIELDS.get(name, name), default) for name, default in layout.defaults.items()}
    values |= {
        "hidden_act": {"silu": "swish"}.get(config.hidden_act, config.hidden_act),
        "use_rope": bool(rope),
        "use_output_gate": config.output_gate is not None,
    }
    if config.num_key_value_heads == config.num_attention_heads:
        values["num_kv_heads"] = None
    if rope:
        values["rope_base"] = rope["rope_theta"]
    if config.output_gate is not None:
        values["ogate_act"] = config.output_gate
    if config.forget_gate in ("bias_only", "fixed"):
        values["fgate_bias_init"] = config.decay_time_min is not None
    else:
        values["decay_time_min"] = values["decay_time_max"] = None
    config_dict = {name: values[name] for name in layout.defaults}

    back = read_config(kind, config_dict)
    # These fields affect initial weights or default arguments, but not the logits.
    free = {"decay_time_min", "decay_time_max", "max_position_embeddings"}
    if not config.qk_norm:
        free |= {"qk_norm_shared", "qk_norm_eps"}
    lost = [
        f"{name}={getattr(config, name)!r} (would become {getattr(back, name)!r})"
        for name in FoxConfig.__annotations__
        if name not in free and getattr(config, name) != getattr(back, name)
    ]
    if lost:
        raise ValueError(f"this FoX cannot be converted to {layout.title}: " + ", ".join(lost) + ".")
    return {"model_type": layout.model_type, "architectures": ["ForgettingTransformerForCausalLM"], **config_dict}


def read_llama_config(config_dict: dict, decay_time: float | None = None) -> FoxConfig:
    """Convert the configuration of a `LLAMA_FAMILY` model to a FoxConfig with one forget gate per query head."""
    model_type = config_dict.get("model_type")
    if model_type not in LLAMA_FAMILY:
        raise ValueError(f"model_type must be one of {LLAMA_FAMILY} for conversion to FoX, got {model_type!r}.")
    if config_dict.get("quantization_config"):
        raise ValueError("quantized models are not supported. Convert the unquantized model, and quantize the FoX.")
    config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(config_dict))
    problems = []
    if getattr(config, "attention_bias", False):
        problems.append("attention_bias=True adds a bias to the output projection")
    if getattr(config, "mlp_bias", False):
        problems.append("mlp_bias=True")
    rope = config.rope_parameters
    per_layer = any(isinstance(value, dict) for value in rope.values())
    if per_layer or rope.get("rope_type") not in ("default", *ROPE_INIT_FUNCTIONS):
        problems.append(f"rope_parameters={rope} is not one supported RoPE for all layers")
    window = getattr(config, "sliding_window", None) if model_type != "llama" else None
    if model_type in ("qwen2", "qwen3"):
        windowed = {layer_type == "sliding_attention" for layer_type in config.layer_types}
        if len(windowed) > 1:
            problems.append("only some layers have a sliding window")
        window = window if windowed == {True} else None
    if problems:
        raise ValueError(f"this {model_type} model cannot be converted to a FoX: {'; '.join(problems)}.")
    if decay_time is None:
        decay_time = OPEN_GATE_CONTEXTS * config.max_position_embeddings
    elif not 0 < decay_time < float("inf"):
        raise ValueError(f"decay_time must be a positive number of tokens, got {decay_time}.")
    fields = {name: getattr(config, name) for name in FoxConfig.__annotations__ if hasattr(config, name)}
    if fields["pad_token_id"] == -1:  # early Llama configurations use -1 for None
        fields["pad_token_id"] = None
    fields |= dict(
        attention_dropout=config.attention_dropout or 0.0,
        decay_time_min=decay_time,
        decay_time_max=decay_time,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        qk_norm_shared=model_type == "qwen3",
        qk_norm_eps=config.rms_norm_eps,
        sliding_window=window,
    )
    return FoxConfig(**fields)
