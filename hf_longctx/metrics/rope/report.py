"""Check the rotary embeddings in a model's config against the bound of arXiv 2405.14591.

print(rope_report("meta-llama/Llama-3.1-8B"))

We check groups of layers with the same rotary embedding and attention window. Dimensions of a head that do not rotate
have frequency 0. We also report the bound without these dimensions. If at least half of the dimensions do not rotate,
B_m is never negative for any base. The bound is then inconclusive.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import Any

import numpy as np

from ..checks import as_int
from ..result import Number, Result, Table
from .bound import MAX_CONTEXT, rope_base_bound, rope_context_bound, rope_decay
from .config import (
    NoRopeError,
    Rope,
    Source,
    claimed_context,
    read_source,
    readable,
    rope_of_layers,
    with_rope_parameters,
)
from .layers import layer_groups, parameters_of


SEARCHED = 1 << 22  # minimum number of distances to search for the first B_m < 0
LENGTH_DEPENDENT = ("dynamic", "longrope")
MINIMUM_BASE_UP_TO = 1 << 20  # in tokens; for longer contexts, eq. 18 takes minutes
CAVEAT = (
    "A screening number. It considers one layer, and assumes that all components of q and k have the same distribution. "
    "Stacked layers see further. The paper therefore calls the boundary not very strict. Many good models violate it at "
    "their claimed context. Below the boundary, the paper found low perplexity but poor retrieval at a distance: "
    "measure before you conclude."
)


@dataclass(frozen=True)
class RopeLayers:
    """The bound for a group of layers with the same rotary embedding and window. Distances are in tokens.

    Attributes:
        layer_type: name of the layer type in layer_types or rope_parameters of the config.
        layers: number of layers. None if the config does not specify it.
        rope_type: RoPE scaling type. Without RoPE, rope_type and all later attributes except max_distance are None.
        base: rope_theta.
        head_dim: dimensions of a query or key head.
        rotary_dim: dimensions of a head that rotate.
        max_distance: largest distance between a query and a key in these layers, at the claimed context.
        context_bound: L_theta of eq. 17. The first distance with B_m < 0 is context_bound + 1. None if B_m >= 0 for
            all m up to the larger of 4194304 and max_distance.
        rotary_only_bound: context_bound of the rotating dimensions alone.
        negative_distances: number of distances m in 0..max_distance with B_m < 0.
        last_negative: largest m in 0..max_distance with B_m < 0. None if negative_distances is 0.
        lowest_decay: minimum of B_m for m in 0..max_distance, to three decimals. B_0 is head_dim / 2.
        minimum_base: the smallest base with three significant digits that satisfies the bound for plain RoPE on the
            same dimensions, up to max_distance. Some larger bases fail. None in four cases: it was not requested;
            max_distance is above 1048576; the RoPE type is "proportional"; at least half of the head does not rotate.
            In the last case, every base satisfies the bound.
        settled_base: all bases with three significant digits from settled_base to 16 times minimum_base satisfy the
            bound. None if the last of them does not, or if minimum_base is None.
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
    settled_base: float | None = None
    inv_freq: list[float] | None = field(default=None, compare=False, repr=False)

    @property
    def verdict(self) -> str:
        """Verdict: 'no RoPE', 'inconclusive' (at least half of the head does not rotate), 'violated' or 'holds'."""
        if self.rotary_dim is None or self.head_dim is None:
            return "no RoPE"
        if 2 * self.rotary_dim <= self.head_dim:
            return "inconclusive"
        return "violated" if self.negative_distances else "holds"

    @property
    def detail(self) -> str:
        """Explain the verdict on this group in a few words."""
        if self.verdict == "violated":
            assert self.negative_distances is not None and self.context_bound is not None
            share = f"{self.negative_distances} of {self.max_distance + 1} distances"
            first = self.context_bound + 1
            where = f"at {first}" if self.negative_distances == 1 else f"between {first} and {self.last_negative}"
            return f"B_m < 0 at {share} ({100 * self.negative_distances / (self.max_distance + 1):.2g} %), {where}"
        if self.verdict == "inconclusive":
            return "half of the head or more does not rotate, so no base violates the bound"
        return f"up to distance {self.max_distance}" if self.rope_type else ""


@dataclass(frozen=True)
class RopeReport(Result):
    """The RoPE bound of a model, with `RopeLayers` for each group of layers."""

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
        """The worst verdict of all groups: 'violated', 'inconclusive', 'holds' or 'holds within windows'.

        'holds within windows' means that no layer with RoPE attends over the whole claimed context.
        """
        verdicts = {group.verdict for group in self.groups}
        worst = next(verdict for verdict in ("violated", "inconclusive", "holds", "no RoPE") if verdict in verdicts)
        reach = max((group.max_distance for group in self.groups if group.rope_type), default=0)
        return worst + " within windows" * (worst == "holds" and reach < self.claimed_context - 1)

    @property
    def passed(self) -> bool | None:
        """Whether the bound holds in all layers with RoPE, within their attention windows. None if inconclusive."""
        return {"holds": True, "holds within windows": True, "violated": False}.get(self.verdict)

    holds = passed

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": self.model, "claimed_context": self.claimed_context, "claimed_by": self.claimed_by}

    def explanation(self) -> str:
        return "Whether the RoPE base keeps B_m at or above 0 over the distances that the claimed context needs."

    def summary(self) -> str:
        decisive = [group for group in self.groups if self.verdict.startswith(group.verdict)]
        several = len(self.groups) > 1
        details = "; ".join(f"{group.layer_type}: {group.detail}" if several else group.detail for group in decisive)
        return f"{self.verdict} at {self.claimed_context} tokens ({self.claimed_by}): {details}"

    def numbers(self) -> list[Number]:
        negative = sum(group.negative_distances or 0 for group in self.groups)
        needed = sum(group.max_distance + 1 for group in self.groups if group.rope_type)
        sample = f"B_m < 0 at {negative} of {needed} distances"
        return [Number("", f"at {self.claimed_context} tokens", self.verdict, sample=sample)]

    def table(self) -> Table:
        columns = ("layers", "RoPE", "dimensions that rotate", "B_m >= 0 needed", "B_m >= 0 found")
        columns += ("over the rotating dimensions alone", "lowest B_m", "minimum base", "all bases from", "verdict")
        return Table(columns, [self._row(group) for group in self.groups])

    def _row(self, group: RopeLayers) -> tuple:
        layers = group.layer_type if group.layers is None else f"{group.layers} {group.layer_type}"
        if group.rope_type is None or group.head_dim is None:
            return (layers, *["-"] * 8, group.verdict)
        bases = ("-", "-")
        if group.minimum_base is not None:
            unscaled = "" if group.rope_type == "default" else ", without scaling"
            settled = "none" if group.settled_base is None else f"{group.settled_base:g}"
            bases = (f"{group.minimum_base:g}{unscaled}", f"{settled}, up to {16 * group.minimum_base:.2g}")
        return (
            *(layers, f"{group.rope_type}, base {group.base:g}", f"{group.rotary_dim} of {group.head_dim}"),
            *(f"up to m = {group.max_distance}", _up_to(group.context_bound), _up_to(group.rotary_only_bound)),
            *(f"{group.lowest_decay:g} (B_0 = {group.head_dim // 2})", *bases, group.verdict),
        )

    def to_dict(self) -> dict:
        """Return the report as plain JSON types, including the verdicts."""
        groups = [{**asdict(group), "verdict": group.verdict} for group in self.groups]
        notes = list(self.notes)
        return {**asdict(self), "groups": groups, "notes": notes, "verdict": self.verdict, "holds": self.passed}

    document = to_dict

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> RopeReport:
        groups = tuple(RopeLayers(*(group[f.name] for f in fields(RopeLayers))) for group in document["groups"])
        named: dict[str, Any] = {f.name: document[f.name] for f in fields(cls)}
        named |= {"groups": groups, "notes": tuple(document["notes"])}
        return cls(**named)

    def plot(self, path: str | PathLike, *, train_length: int | None = None, title: str | None = None) -> None:
        from .plot import plot_bound

        plot_bound(self, path, train_length=train_length, title=title)

    def __str__(self) -> str:
        columns, rows = self.table()
        lines = [f"RoPE bound of {self.model} at {self.claimed_context} tokens ({self.claimed_by})"]
        for group, row in zip(self.groups, rows):
            lines.append(f"{row[0]}: {group.verdict}{': ' * bool(group.detail)}{group.detail}")
            lines += [f"  {column:36}{value}" for column, value in zip(columns[1:-1], row[1:-1]) if value != "-"]
        notes = [textwrap.fill(text, 110) for text in (*(f"note: {note}" for note in self.notes), self.caveat)]
        return "\n".join((*lines, *notes))


def _up_to(bound: int | None) -> str:
    return f"up to m = {bound} ({bound + 1} tokens)" if bound is not None else "at every m searched"


def rope_report(
    model_or_config: Any,
    *,
    context_length: int | None = None,
    minimum_base: bool = True,
    model_kwargs: dict[str, Any] | None = None,
) -> RopeReport:
    """Check whether a model's rotary embedding satisfies B_m >= 0 over its context. Also find bases with B_m >= 0.

    The config may contain `rope_parameters` of transformers 5 (flat or per layer type), or `rope_theta` and
    `rope_scaling` of earlier versions. We support the RoPE types "default", "linear", "dynamic", "yarn", "longrope",
    "llama3" and "proportional". We also support partial rotary embeddings, sliding windows, and layers without RoPE.
    In multimodal models, we check the text decoder. If transformers does not support the model type, we read its
    config like a Llama config.

    Args:
        model_or_config: a `PreTrainedModel`, a `PreTrainedConfig`, a parsed config.json, or a string: a model name, a
            folder, or the path of a config.json.
        context_length: context to check, in tokens. Dynamic and longrope frequencies depend on it. Default: the
            largest length in the config or the tokenizer's config; see `config.claimed_context`.
        minimum_base: whether to also find the minimum base (eq. 18). This takes seconds for 128k tokens.
        model_kwargs: keywords of `from_pretrained` for a model given by its name, such as revision.

    Returns:
        RopeReport. Its notes list the assumptions, such as defaults of the config class.

    Raises:
        NoRopeError: the model does not use RoPE. This exception is a ValueError.
        ValueError: a setting is missing or unknown, or an argument is out of range.
        NotImplementedError: the rope type is unknown.
    """
    with readable():
        return _report(read_source(model_or_config, **(model_kwargs or {})), context_length, minimum_base)


def _report(source: Source, context_length: int | None, minimum_base: bool) -> RopeReport:
    config, notes = with_rope_parameters(source), source.notes
    claimed, claimed_by = claimed_context(source) if context_length is None else (context_length, "given")
    claimed = as_int(f"the context to check ({claimed_by})", claimed, 2)
    if claimed > MAX_CONTEXT:
        raise ValueError(
            f"the context to check ({claimed_by}) must be at most {MAX_CONTEXT} tokens, got {claimed}. Longer contexts take "
            "minutes."
        )
    groups = []
    for group, layers in layer_groups(source).items():
        reach = claimed - 1 if group.reach is None else min(claimed - 1, group.reach)
        if not group.base:
            groups.append(RopeLayers(group.kind, len(layers), reach))
            continue
        rope = rope_of_layers(source, group, layers, claimed)
        alpha = (parameters_of(config, group.kind) or {}).get("alpha")
        if rope.type in LENGTH_DEPENDENT and not alpha:
            notes.append(f"{rope.type} frequencies depend on the length; we use the frequencies for {claimed} tokens")
        why_not = "proportional RoPE has exponents of its own" if rope.type == "proportional" else None
        if reach > MINIMUM_BASE_UP_TO:
            why_not = f"the search takes minutes beyond {MINIMUM_BASE_UP_TO} tokens"
        if minimum_base and why_not is not None:
            notes.append(f"the minimum base is not computed: {why_not}")
        groups.append(_bound(rope, group.kind, len(layers), reach, minimum_base and why_not is None))
    if not any(group.rope_type for group in groups):
        raise NoRopeError(config, "none of its layers is an attention layer with RoPE")
    return RopeReport(source.name, claimed, claimed_by, tuple(groups), tuple(dict.fromkeys(notes)))


def _bound(rope: Rope, kind: str, layers: int, reach: int, minimum_base: bool) -> RopeLayers:
    """Compute the bound for a group of layers that attend over distances up to `reach`."""
    rotating = rope.inv_freq[rope.inv_freq > 0]
    at_rest = rope.head_dim // 2 - len(rotating)
    theta = np.append(rotating, np.zeros(at_rest))
    searched = max(reach, SEARCHED)
    bound = rope_context_bound(inv_freq=theta, limit=searched)
    holds = bound is None or bound >= reach
    decay = rope_decay(range(reach + 1), inv_freq=theta)
    negative = np.array([]) if holds else np.flatnonzero(decay < 0)
    minimum = {}
    if minimum_base and at_rest < len(rotating):
        bases = rope_base_bound(reach, 2 * len(rotating), non_rotary_dims=2 * at_rest)
        minimum = {"minimum_base": bases.base, "settled_base": bases.settled_base}
    return RopeLayers(
        layer_type=kind,
        layers=layers or None,
        max_distance=reach,
        rope_type=rope.type,
        base=rope.base,
        head_dim=rope.head_dim,
        rotary_dim=2 * len(rotating),
        context_bound=bound,
        rotary_only_bound=rope_context_bound(inv_freq=rotating, limit=searched),
        negative_distances=len(negative),
        last_negative=int(negative[-1]) if len(negative) else None,
        lowest_decay=round(float(decay.min()), 3),
        inv_freq=rotating.tolist(),
        **minimum,
    )
