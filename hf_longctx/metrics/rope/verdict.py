"""What the RoPE bound (`rope_bounds`, arXiv 2405.14591) says about a model, read from its config.

    print(rope_report(AutoConfig.from_pretrained("...")))

Layers that share a rotary embedding and a reach form a group: full attention must tell tokens apart up to distance
claimed context - 1, sliding attention up to window - 1. A group is measured with the frequencies that its scaling type
gives (by transformers' own functions; from the model's buffers if a model is passed). Dimensions of a head that do not
rotate count as frequency 0, which is Theorem 1 with those dimensions kept; the figure without them is given too.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from ..result import Result, Table
from .bounds import (
    rope_base_scan,
    rope_base_table,
    rope_context_bound,
    rope_decay,
    rope_inv_freq,
    rope_variance_weights,
)
from .spread import measure_qk_spread


CAVEAT = (
    "A screening number. It looks at one layer and takes all components of q and k as alike; stacked layers see "
    "further, so the paper itself calls the boundary not very strict, and many good models violate it at the length "
    "they claim. Below it the paper found low perplexity but poor retrieval at a distance: measure before concluding."
)
MINIMUM_BASE_UP_TO = 1 << 20  # tokens; eq. 18 takes minutes beyond
LENGTH_DEPENDENT = ("dynamic", "longrope")

# What modeling code fixes and no config says.
BASE_IN_CODE = {"codegen": 10_000.0, "gptj": 10_000.0, "roformer": 10_000.0}
ROPE_ON_SLIDING_LAYERS_ONLY = (
    *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1"),
)
NOT_ATTENTION = ("conv", "linear_attention", "mamba", "moe", "recurrent")


@dataclass(frozen=True)
class RopeLayers:
    """The bound for layers that share a rotary embedding and a reach. Distances are in tokens.

    Attributes:
        layer_type: as in the config's layer_types, or its key in rope_parameters.
        layers: how many there are; None if the config does not tell.
        rope_type: the scaling type; None if these layers have no rotary embedding, and nothing below then applies.
        base: rope_theta.
        head_dim, rotary_dim: dimensions of a query or key head, and those of them that rotate.
        max_distance: the largest distance these layers attend over at the claimed context.
        context_bound: L_theta of eq. 17; None if there is no violation up to m = 4194304.
        rotary_only_bound: the same over the rotating dimensions alone.
        negative_distances: how many m in 0..max_distance have B_m < 0.
        minimum_base: eq. 18 for max_distance, for plain RoPE on the same dimensions; None if every base does
            (half of the head or more does not rotate) or if not computed (not asked for, more than 1048576 tokens,
            or proportional RoPE, whose exponents differ).
        two_digit_base: the first base of two significant digits that would do.
        heads, heads_holding: query heads measured (eq. 19), and those of them without violation up to max_distance.
        weighted_bound: L_theta of the average measured head, every head's weights scaled to one sum; None if there is
            no violation up to max_distance, or nothing was measured.
    """

    layer_type: str
    layers: int | None
    max_distance: int
    rope_type: str | None = None
    base: float | None = None
    head_dim: int | None = None
    rotary_dim: int | None = None
    context_bound: int | None = None
    rotary_only_bound: int | None = None
    negative_distances: int | None = None
    minimum_base: float | None = None
    two_digit_base: float | None = None
    heads: int | None = None
    heads_holding: int | None = None
    weighted_bound: int | None = None

    @property
    def verdict(self) -> str:
        """'no RoPE', 'holds' or 'violated'."""
        if self.rope_type is None:
            return "no RoPE"
        return "violated" if self.negative_distances else "holds"

    def __str__(self):
        count = "" if self.layers is None else f" ({self.layers} layer{'s' * (self.layers != 1)})"
        lines = [f"{self.layer_type}{count}: {self.verdict}"]
        if self.rope_type is None:
            return lines[0]
        reach = _up_to(self.context_bound)
        if self.negative_distances:
            reach += f", negative at {self.negative_distances} of those needed"
        if 2 * self.rotary_dim <= self.head_dim:
            reach = "always, whatever the base: half of the dimensions or more do not rotate"
        turning = f"{self.rotary_dim} of {self.head_dim} dimensions"
        lines += [
            f"  RoPE              {self.rope_type}, base {self.base:g}, {turning}",
            f"  B_m >= 0 needed   up to m = {self.max_distance}",
            f"  B_m >= 0 found    {reach}",
        ]
        if self.rotary_dim < self.head_dim:
            lines.append(f"                    {_up_to(self.rotary_only_bound)} over the rotating dimensions alone")
        if self.minimum_base is not None:
            plain = "" if self.rope_type == "default" else ", without scaling"
            lines.append(f"  minimum base      {self.minimum_base:.7g}; of two digits {self.two_digit_base:g}{plain}")
        if self.heads:
            average = "as far as needed" if self.weighted_bound is None else _up_to(self.weighted_bound)
            lines.append(
                f"  by q, k variance  {self.heads_holding} of {self.heads} heads hold; their average {average}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class RopeReport(Result):
    """The bound for a model, one `RopeLayers` per group of layers: print it, or take `to_dict` or `to_json`."""

    kind = "rope"
    title = "RoPE bound"
    has_picture = False

    model: str
    claimed_context: int
    claimed_by: str
    groups: tuple[RopeLayers, ...]
    notes: tuple[str, ...]
    caveat: str = CAVEAT

    @property
    def holds(self) -> bool:
        """Whether no group violates the bound at the claimed context."""
        return all(group.verdict != "violated" for group in self.groups)

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": self.model, "claimed_context": self.claimed_context, "claimed_by": self.claimed_by}

    def explanation(self) -> str:
        return "Whether the RoPE base keeps B_m at or above 0 over the distances that the claimed context needs."

    def summary(self) -> str:
        verdict = "holds" if self.holds else "violated"
        return f"{verdict} at {self.claimed_context} tokens ({self.claimed_by})"

    def table(self) -> Table:
        columns = ("layers", "RoPE", "base", "B_m >= 0 needed up to", "B_m >= 0 up to", "verdict")
        rows = [
            (
                group.layer_type if group.layers is None else f"{group.layers} {group.layer_type}",
                group.rope_type or "-",
                "-" if group.base is None else f"{group.base:g}",
                group.max_distance,
                "-" if group.context_bound is None else group.context_bound,
                group.verdict,
            )
            for group in self.groups
        ]
        return Table(columns, rows)

    def to_dict(self) -> dict:
        """Everything as plain JSON types, verdicts included."""
        groups = [{**asdict(group), "verdict": group.verdict} for group in self.groups]
        return {**asdict(self), "groups": groups, "notes": list(self.notes), "holds": self.holds}

    document = to_dict

    def to_json(self, **kwargs) -> str:
        """`to_dict` by `json.dumps`, which takes the keywords."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def mismatch(cls, document: dict[str, Any]) -> str | None:
        if {"claimed_context", "groups"} <= document.keys():
            return None
        return "this JSON is no RoPE report: it lacks claimed_context or groups."

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> RopeReport:
        groups = [RopeLayers(*(group[field.name] for field in fields(RopeLayers))) for group in document["groups"]]
        named = {field.name: document[field.name] for field in fields(cls)}
        return cls(**named | {"groups": tuple(groups), "notes": tuple(document["notes"])})

    def __str__(self):
        title = f"RoPE bound of {self.model} at {self.claimed_context} tokens ({self.claimed_by})"
        return "\n".join((title, *map(str, self.groups), *(f"note: {note}" for note in self.notes), self.caveat))


class NoRopeError(ValueError):
    """The model has no rotary position embedding."""


def rope_report(
    model_or_config, *, context_length: int | None = None, input_ids=None, minimum_base: bool = True
) -> RopeReport:
    """Whether a model's rotary embedding satisfies B_m >= 0 over its context, and which base would.

    Reads `rope_parameters` of transformers 5, flat or per layer type, and the older rope_theta with rope_scaling; the
    rope types default, linear, dynamic, yarn, longrope, llama3 and proportional; partial rotary embeddings; sliding
    windows; layers without RoPE. Of a model of several parts it takes the text decoder.

    Args:
        model_or_config: a `PreTrainedModel` or a `PreTrainedConfig`.
        context_length: the claim to check, in tokens; default the config's max_position_embeddings. Dynamic and
            longrope frequencies depend on it.
        input_ids: (B, T) token ids on the model's device, to measure q and k on and weigh the cosines of every head by
            their variances (eq. 19); needs a model, see `measure_qk_spread`.
        minimum_base: whether to compute eq. 18 too, which takes nearly all of the time (seconds for 128k tokens).

    Returns:
        RopeReport.

    Raises:
        NoRopeError: the model has no RoPE; a ValueError.
        ValueError: its config lacks what would have to be guessed (it is named); an argument is
            out of its range.
        NotImplementedError: the rope type is unknown, or q and k of this model cannot be measured.
    """
    model = model_or_config if hasattr(model_or_config, "config") else None
    original_config = model_or_config if model is None else model.config
    config = _with_rope_parameters(original_config)
    claimed_by = "max_position_embeddings" if context_length is None else "given"
    claimed = _need(config, claimed_by) if context_length is None else context_length
    if not isinstance(claimed, Integral) or claimed < 2:
        raise ValueError(f"The context to check is {claimed!r} ({claimed_by}); it must be an integer, 2 or more.")
    if input_ids is not None and model is None:
        raise ValueError("input_ids came with a config; measuring queries and keys needs the model itself.")
    spread = None if input_ids is None else measure_qk_spread(model, input_ids)

    groups, notes = [], []
    if config.model_type in BASE_IN_CODE:
        notes.append("the base is fixed in this model's code; its config does not name it")
    for (kind, base), layers in _layer_groups(config).items():
        reach = min(claimed, _window(config, kind, layers) or claimed) - 1
        if not base:
            groups.append(RopeLayers(kind, len(layers), reach))
            continue
        rope = _frequencies(config, kind, base, layers, claimed)
        if rope.type in LENGTH_DEPENDENT:
            notes.append(f"{rope.type} frequencies depend on the length; taken at {claimed} tokens")
        elif model is not None and not getattr(config, "layer_rope_theta", None):
            rope = _as_held(rope, model, kind, notes)
        groups.append(_bound(rope, kind, layers, reach, spread, minimum_base))
    if not any(group.rope_type for group in groups):
        raise NoRopeError(f"{_no_rope(config)}: none of its layers is an attention layer with RoPE.")
    name = original_config.name_or_path or type(model_or_config).__name__
    return RopeReport(name, int(claimed), claimed_by, tuple(groups), tuple(dict.fromkeys(notes)))


# --- reading the config ---------------------------------------------------------------------------------------------


class _Rope(NamedTuple):
    """The rotary embedding of some layers; inv_freq is (n,), float64, and rotates the first 2n of head_dim."""

    type: str
    base: float
    inv_freq: np.ndarray
    head_dim: int


def _with_rope_parameters(config):
    """A copy of the text decoder's config, its RoPE spelled as `rope_parameters` whatever it was spelled as."""
    if not hasattr(config, "get_text_config"):
        raise ValueError(
            f"rope_report got a {type(config).__name__}; it needs a PreTrainedModel or a PreTrainedConfig."
        )
    config = copy.deepcopy(config.get_text_config(decoder=True))
    if config.model_type in BASE_IN_CODE:
        config.rope_parameters = {"rope_type": "default", "rope_theta": BASE_IN_CODE[config.model_type]}
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not parameters and getattr(config, "rope_theta", None) is None:
        raise NoRopeError(f"{_no_rope(config)}: neither rope_parameters nor rope_theta is set.")
    for name, on in (
        ("alibi", (False, None)),
        ("use_mem_rope", (True,)),
        ("position_embedding_type", ("rope", "rotary")),
    ):
        if getattr(config, name, on[0]) not in on:
            raise NoRopeError(f"{_no_rope(config)}: {name} is {getattr(config, name)!r}.")
    config.rope_parameters = parameters or {}
    config.standardize_rope_params()
    return config


def _layer_groups(config):
    """{(layer type, base): its layers' indices} over the attention layers; base 0 means no RoPE."""
    nested = [key for key, value in config.rope_parameters.items() if isinstance(value, dict)]
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * _need(config, "num_hidden_layers")
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


def _window(config, kind, layers):
    """How many tokens such a layer sees; None if all."""
    name = "sliding_window" if "sliding" in kind else "attention_chunk_size" if "chunked" in kind else None
    return getattr(_layer_config(config, layers), name, None) if name else None


def _frequencies(config, kind, base, layers, claimed):
    """The group's frequencies by its rope type, at a length of `claimed` tokens for types that depend on it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    nested = isinstance(config.rope_parameters.get(kind), dict)
    parameters = config.rope_parameters[kind] if nested else config.rope_parameters
    parameters["rope_theta"] = base
    layer = _layer_config(config, layers)
    head_dim = getattr(layer, "head_dim", None)
    if head_dim is None:
        head_dim = config.head_dim = _need(layer, "hidden_size") // _need(layer, "num_attention_heads")
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        if config.model_type in BASE_IN_CODE:
            rotary_dim = getattr(config, "rotary_dim", None) or head_dim
        inv_freq = rope_inv_freq(base, rotary_dim)
    elif rope_type in ROPE_INIT_FUNCTIONS:
        try:
            layer_type = kind if nested else None
            inv_freq, _ = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=claimed, layer_type=layer_type)
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"rope_parameters of type {rope_type!r} are not complete: {error!r} in {parameters}."
            ) from error
        inv_freq = inv_freq.double().numpy()
    else:
        types = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
        raise NotImplementedError(f"rope type {rope_type!r} is not supported; supported are {types}.")
    return _Rope(rope_type, float(base), inv_freq, getattr(layer, "qk_head_dim", None) or head_dim)


def _as_held(rope, model, kind, notes):
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
    return value


def _need_base(parameters):
    if parameters.get("rope_theta") is None:
        raise ValueError(f"The config names no base: rope_theta is missing in {parameters}; no default is assumed.")
    rope_inv_freq(parameters["rope_theta"], 2)  # refuses a base that cannot be one, whatever the scaling
    return parameters["rope_theta"]


def _no_rope(config):
    return f"{type(config).__name__} has no rotary position embedding that its config tells of, so RoPE bounds nothing"


# --- measuring ------------------------------------------------------------------------------------------------------


def _bound(rope, kind, layers, reach, spread, minimum_base):
    """`RopeLayers` of one group."""
    rotating = rope.inv_freq[rope.inv_freq > 0]
    still = rope.head_dim // 2 - len(rotating)
    theta = np.append(rotating, np.zeros(still))
    bound = rope_context_bound(inv_freq=theta)
    holds = bound is None or bound >= reach
    minimum = {}
    if minimum_base and still < len(rotating) and rope.type != "proportional" and reach <= MINIMUM_BASE_UP_TO:
        size = {"head_dim": 2 * len(rotating), "non_rotary_dims": 2 * still}
        minimum["minimum_base"] = rope_base_table([reach], **size)[reach]
        minimum["two_digit_base"] = rope_base_scan([reach], **size)[reach]
    return RopeLayers(
        layer_type=kind,
        layers=len(layers) or None,
        max_distance=reach,
        rope_type=rope.type,
        base=rope.base,
        head_dim=rope.head_dim,
        rotary_dim=2 * len(rotating),
        context_bound=bound,
        rotary_only_bound=rope_context_bound(inv_freq=rotating),
        negative_distances=0 if holds else int((rope_decay(range(reach + 1), inv_freq=theta) < 0).sum()),
        **minimum,
        **({} if spread is None else _weighted_bound(rope, layers, reach, spread)),
    )


def _weighted_bound(rope, layers, reach, spread):
    """Eq. 19 for every head of the layers, and for the average of them."""
    if not layers or not spread.keys() >= set(layers):
        raise NotImplementedError(
            f"Queries and keys were measured in layers {sorted(spread)}, not in all of {layers}."
        )
    rotated = 2 * len(rope.inv_freq)
    weights = []
    for i in layers:
        q, k, interleaved = spread[i]
        moving = rope_variance_weights(q[:, :rotated], k[:, :rotated], interleaved=interleaved)
        weights.append(np.append(moving, (q * k)[:, rotated:].sum(1, keepdims=True), axis=1))
    weights = np.concatenate(weights)
    theta = np.append(rope.inv_freq, 0.0)  # all that does not rotate adds one constant
    bounds = [rope_context_bound(inv_freq=theta, weights=w, limit=reach) for w in weights]
    average = (weights / weights.sum(1, keepdims=True)).mean(0)
    return {
        "heads": len(weights),
        "heads_holding": bounds.count(None),
        "weighted_bound": rope_context_bound(inv_freq=theta, weights=average, limit=reach),
    }


def _up_to(bound):
    return f"up to m = {bound} ({bound + 1} tokens)" if bound is not None else "at every m looked at"
