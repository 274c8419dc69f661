"""What the RoPE bound (`rope_bounds`, arXiv 2405.14591) says about a model, read from its config.

    print(rope_report(AutoConfig.from_pretrained("...")))

Layers that share a rotary embedding and a reach form a group: full attention must tell tokens apart up to distance
claimed context - 1, sliding attention up to window - 1. A group is measured with the frequencies that its scaling type
gives (by transformers' own functions; from the model's buffers if a model is passed). Dimensions of a head that do not
rotate count as frequency 0, which is Theorem 1 with those dimensions kept; the figure without them is given too. Where
they are half of the head or more, B_m cannot be negative for any base, and the bound is inconclusive.
"""

from __future__ import annotations

import copy
import json
import math
import textwrap
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from ..result import Overview, Result, Table
from .bounds import (
    rope_base_bound,
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
LOOKED_AT = 1 << 22  # distances in which the end of B_m >= 0 is sought, where a model needs fewer
LONGEST = 10**8  # tokens of context; more take minutes
LENGTH_DEPENDENT = ("dynamic", "longrope")

# What modeling code fixes and no config says.
BASE_IN_CODE = {"codegen": 10_000.0, "gptj": 10_000.0, "roformer": 10_000.0}
ROPE_ON_SLIDING_LAYERS_ONLY = (
    *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1"),
)
PARTIAL_IN_REMOTE_CODE = (
    "rotary_pct",
    "rope_pct",
    "rotary_emb_fraction",
)  # what partial_rotary_factor is called there
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
        context_bound: L_theta of eq. 17, so that B_m < 0 first at context_bound + 1; None if there is no violation up
            to m = 4194304 and max_distance.
        rotary_only_bound: the same over the rotating dimensions alone.
        negative_distances: how many m in 0..max_distance have B_m < 0.
        last_negative: the last of them; None if there is none.
        lowest_decay: the smallest B_m of m in 0..max_distance, to three decimals; B_0 = head_dim / 2.
        minimum_base: eq. 18 for max_distance, for plain RoPE on the same dimensions; None if every base does
            (half of the head or more does not rotate) or if not computed (not asked for, more than 1048576 tokens,
            or proportional RoPE, whose exponents differ). Above it, bases that do and bases that do not alternate.
        two_digit_base: the first base of two significant digits that would do.
        settled_base: every base from here to search_limit would do; None as for minimum_base, or if search_limit
            itself would not.
        search_limit: the largest base looked at, 16 times minimum_base.
        heads, heads_holding: query heads measured (eq. 19), and those of them without violation up to max_distance.
        weighted_bound: L_theta of the average measured head, every head's weights scaled to one sum; None if there is
            no violation up to max_distance, or nothing was measured.
        inv_freq: the rotary_dim / 2 frequencies, in radians per token.
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
    last_negative: int | None = None
    lowest_decay: float | None = None
    minimum_base: float | None = None
    two_digit_base: float | None = None
    settled_base: float | None = None
    search_limit: float | None = None
    heads: int | None = None
    heads_holding: int | None = None
    weighted_bound: int | None = None
    inv_freq: list[float] | None = field(default=None, compare=False, repr=False)

    @property
    def verdict(self) -> str:
        """'no RoPE', 'inconclusive' (half of the head or more does not rotate), 'violated' or 'holds'."""
        if self.rope_type is None:
            return "no RoPE"
        if 2 * self.rotary_dim <= self.head_dim:
            return "inconclusive"
        return "violated" if self.negative_distances else "holds"

    @property
    def detail(self) -> str:
        """What the verdict rests on, to be put after it."""
        if self.verdict == "violated":
            share = f"{self.negative_distances} of {self.max_distance + 1} distances"
            first = self.context_bound + 1
            where = f"at {first}" if self.negative_distances == 1 else f"between {first} and {self.last_negative}"
            return f"B_m < 0 at {share} ({100 * self.negative_distances / (self.max_distance + 1):.2g} %), {where}"
        if self.verdict == "inconclusive":
            return "half of the head or more does not rotate, so that no base violates the bound"
        return f"up to distance {self.max_distance}" if self.rope_type else ""

    def __str__(self):
        count = "" if self.layers is None else f" ({self.layers} layer{'s' * (self.layers != 1)})"
        lines = [f"{self.layer_type}{count}: {self.verdict}"]
        if self.rope_type is None:
            return lines[0]
        lines += [
            f"  RoPE              {self.rope_type}, base {self.base:g}, {self.rotary_dim} of {self.head_dim} dimensions",
            f"  B_m >= 0 needed   up to m = {self.max_distance}",
            f"  B_m >= 0 found    {_up_to(self.context_bound)}",
        ]
        if self.verdict == "inconclusive":
            lines[-1] = f"  B_m >= 0 found    always: {self.detail}"
        if self.verdict == "violated":
            depth = f"; the lowest is {self.lowest_decay:g}, beside B_0 = {self.head_dim // 2}"
            lines.append(f"  violated          {self.detail}{depth}")
        if self.rotary_dim < self.head_dim:
            lines.append(f"                    {_up_to(self.rotary_only_bound)} over the rotating dimensions alone")
        lines += [f"  {line}" for line in self._bases()]
        if self.heads:
            average = "as far as needed" if self.weighted_bound is None else _up_to(self.weighted_bound)
            lines.append(
                f"  by q, k variance  {self.heads_holding} of {self.heads} heads hold; their average {average}"
            )
        return "\n".join(lines)

    def _bases(self):
        """Lines about the bases that would do, or why there are none."""
        if self.minimum_base is not None:
            scaling = "" if self.rope_type == "default" else ", without scaling"
            yield f"minimum base      {self.minimum_base:.7g}; of two digits {self.two_digit_base:g}{scaling}"
            searched = f"up to {self.search_limit:.2g}, where the search ended"
            if self.settled_base is None:
                yield f"larger bases      some fail again, {searched}"
            else:
                yield f"larger bases      some fail again; none does above {self.settled_base:.7g}, {searched}"
        elif self.max_distance > MINIMUM_BASE_UP_TO:
            yield f"minimum base      not computed: the search takes minutes beyond {MINIMUM_BASE_UP_TO} tokens"
        elif self.rope_type == "proportional":
            yield "minimum base      not computed: proportional RoPE has exponents of its own"


@dataclass(frozen=True)
class RopeReport(Result):
    """The bound for a model, one `RopeLayers` per group of layers: print it, or take `to_dict` or `to_json`."""

    kind = "rope"
    title = "RoPE bound"

    model: str
    claimed_context: int
    claimed_by: str
    groups: tuple[RopeLayers, ...]
    notes: tuple[str, ...]
    caveat: str = CAVEAT

    @property
    def verdict(self) -> str:
        """The worst verdict of its groups: 'violated', 'inconclusive' or 'holds'."""
        verdicts = {group.verdict for group in self.groups}
        return next(verdict for verdict in ("violated", "inconclusive", "holds", "no RoPE") if verdict in verdicts)

    @property
    def holds(self) -> bool | None:
        """Whether the bound holds in every group of layers with RoPE; None if it is inconclusive in one."""
        return {"holds": True, "violated": False}.get(self.verdict)

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": self.model, "claimed_context": self.claimed_context, "claimed_by": self.claimed_by}

    def explanation(self) -> str:
        return "Whether the RoPE base keeps B_m at or above 0 over the distances that the claimed context needs."

    def summary(self) -> str:
        decisive = [group for group in self.groups if group.verdict == self.verdict]
        several = len(self.groups) > 1
        details = "; ".join(f"{group.layer_type}: {group.detail}" if several else group.detail for group in decisive)
        return f"{self.verdict} at {self.claimed_context} tokens ({self.claimed_by}): {details}"

    def overview(self) -> list[Overview]:
        negative = sum(group.negative_distances or 0 for group in self.groups)
        needed = sum(group.max_distance + 1 for group in self.groups if group.rope_type)
        sample = f"B_m < 0 at {negative} of {needed} distances"
        return [Overview(f"at {self.claimed_context} tokens", self.verdict, sample=sample)]

    def remarks(self) -> list[str]:
        return [*self.notes, self.caveat]

    def table(self) -> Table:
        columns = ("layers", "RoPE", "base", "B_m >= 0 needed up to", "B_m >= 0 up to", "B_m < 0 at")
        columns += ("minimum base", "all bases from", "verdict")
        rows = [
            (
                group.layer_type if group.layers is None else f"{group.layers} {group.layer_type}",
                group.rope_type or "-",
                "-" if group.base is None else f"{group.base:g}",
                group.max_distance,
                "-" if group.context_bound is None else group.context_bound,
                "-" if group.negative_distances is None else group.negative_distances,
                *("-" if base is None else f"{base:.7g}" for base in (group.minimum_base, group.settled_base)),
                group.verdict,
            )
            for group in self.groups
        ]
        return Table(columns, rows)

    def to_dict(self) -> dict:
        """Everything as plain JSON types, verdicts included."""
        groups = [{**asdict(group), "verdict": group.verdict} for group in self.groups]
        return {
            **asdict(self),
            "groups": groups,
            "notes": list(self.notes),
            "verdict": self.verdict,
            "holds": self.holds,
        }

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
        groups = [RopeLayers(*(group[f.name] for f in fields(RopeLayers))) for group in document["groups"]]
        named = {f.name: document[f.name] for f in fields(cls)}
        return cls(**named | {"groups": tuple(groups), "notes": tuple(document["notes"])})

    def plot(self, path, *, train_length: int | None = None, title: str | None = None) -> None:
        from .plot import plot_bound

        plot_bound(self, path, train_length=train_length, title=title)

    def __str__(self):
        title = f"RoPE bound of {self.model} at {self.claimed_context} tokens ({self.claimed_by})"
        remarks = [textwrap.fill(text, 110) for text in (*(f"note: {note}" for note in self.notes), self.caveat)]
        return "\n".join((title, *map(str, self.groups), *remarks))


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
        context_length: the claim to check, in tokens; default the config's max_position_embeddings, or what its
            yarn scaling claims (factor times original_max_position_embeddings) if that is more. Dynamic and longrope
            frequencies depend on it.
        input_ids: (B, T) token ids on the model's device, to measure q and k on and weigh the cosines of every head by
            their variances (eq. 19); needs a model, see `measure_qk_spread`.
        minimum_base: whether to compute eq. 18 too, which takes nearly all of the time (seconds for 128k tokens).

    Returns:
        RopeReport. Its notes name what is assumed, such as defaults of the config class.

    Raises:
        NoRopeError: the model has no RoPE; a ValueError.
        ValueError: its config lacks what would have to be guessed, or holds what no RoPE has (it is named); an
            argument is out of its range.
        NotImplementedError: the rope type is unknown, or q and k of this model cannot be measured.
    """
    model = model_or_config if hasattr(model_or_config, "config") else None
    original_config = model_or_config if model is None else model.config
    config = _with_rope_parameters(original_config)
    notes = []
    if context_length is None:
        claimed, claimed_by = _claim(config, notes)
    else:
        claimed, claimed_by = context_length, "given"
    if not isinstance(claimed, Integral) or not 2 <= claimed <= LONGEST:
        raise ValueError(
            f"The context to check is {claimed!r} ({claimed_by}); it must be an integer from 2 to {LONGEST}, in tokens."
        )
    if input_ids is not None and model is None:
        raise ValueError("input_ids came with a config; measuring queries and keys needs the model itself.")
    spread = None if input_ids is None else measure_qk_spread(model, input_ids)

    groups = []
    if config.model_type in BASE_IN_CODE:
        notes.append("the base is fixed in this model's code; its config does not name it")
    for (kind, base), layers in _layer_groups(config).items():
        reach = min(claimed, _window(config, kind, layers) or claimed) - 1
        if not base:
            groups.append(RopeLayers(kind, len(layers), reach))
            continue
        rope = _frequencies(config, kind, base, layers, claimed)
        notes += _assumed(config, kind, base)
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
        raise NoRopeError(f"{_no_rope(config)}: neither rope_parameters nor rope_theta is set.")
    for name, on in (
        ("alibi", (False, None)),
        ("use_mem_rope", (True,)),
        ("position_embedding_type", ("rope", "rotary")),
    ):
        if getattr(config, name, on[0]) not in on:
            raise NoRopeError(f"{_no_rope(config)}: {name} is {getattr(config, name)!r}.")
    if parameters and not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters is {parameters!r}; it must be a dictionary, or one per layer type.")
    config.rope_parameters = parameters or {}
    config.standardize_rope_params()
    return config


def _claim(config, notes):
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


def _assumed(config, kind, base):
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


def _layer_groups(config):
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


def _window(config, kind, layers):
    """How many tokens such a layer sees; None if all."""
    name = "sliding_window" if "sliding" in kind else "attention_chunk_size" if "chunked" in kind else None
    window = getattr(_layer_config(config, layers), name, None) if name else None
    if window is not None and (not _is_integer(window) or window < 2):
        raise ValueError(f"{name} is {window!r}; it must be an integer, 2 tokens or more, or None for no window.")
    return window


def _frequencies(config, kind, base, layers, claimed):
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
    if not _is_integer(value) or value < 1:
        raise ValueError(f"{name} is {value!r} in {type(config).__name__}; it must be a positive integer.")
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
    looked_at = max(reach, LOOKED_AT)
    bound = rope_context_bound(inv_freq=theta, limit=looked_at)
    holds = bound is None or bound >= reach
    negative, last_negative, lowest = _negative_distances(theta, reach)
    minimum = {}
    if minimum_base and still < len(rotating) and rope.type != "proportional" and reach <= MINIMUM_BASE_UP_TO:
        bases = rope_base_bound(reach, 2 * len(rotating), non_rotary_dims=2 * still)
        names = ("two_digit_base", "settled_base", "search_limit")
        minimum = {"minimum_base": bases.base, **{name: getattr(bases, name) for name in names}}
    return RopeLayers(
        layer_type=kind,
        layers=len(layers) or None,
        max_distance=reach,
        rope_type=rope.type,
        base=rope.base,
        head_dim=rope.head_dim,
        rotary_dim=2 * len(rotating),
        context_bound=bound,
        rotary_only_bound=rope_context_bound(inv_freq=rotating, limit=looked_at),
        negative_distances=0 if holds else negative,
        last_negative=None if holds else last_negative,
        lowest_decay=round(lowest, 3),
        inv_freq=rotating.tolist(),
        **minimum,
        **({} if spread is None else _weighted_bound(rope, layers, reach, spread)),
    )


def _negative_distances(theta, reach):
    """How many B_m of m = 0..reach are below 0, the last such m, and the smallest B_m."""
    negative, last, lowest = 0, None, math.inf
    for first in range(0, reach + 1, LOOKED_AT):  # bounds the memory
        decay = rope_decay(range(first, min(first + LOOKED_AT, reach + 1)), inv_freq=theta)
        below = np.flatnonzero(decay < 0)
        negative, lowest = negative + len(below), min(lowest, float(decay.min()))
        last = first + int(below[-1]) if len(below) else last
    return negative, last, lowest


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


def _is_integer(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value):
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
