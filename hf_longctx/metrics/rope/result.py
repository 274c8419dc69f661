"""The verdict of the RoPE bound for each group of a model's layers, as text, table and JSON.

Layers with the same rotary embedding and reach form a group. Dimensions of a head that do not rotate count as
frequency 0, as in Theorem 1 of arXiv 2405.14591 with those dimensions kept; the bound without them is reported too. If
they are half of the head or more, no base makes B_m negative, and the bound is inconclusive.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import Any

from ..result import Number, Result, Table


CAVEAT = (
    "A screening number. It considers one layer and assumes that all components of q and k have the same distribution. "
    "Stacked layers see further, so the paper calls the boundary not very strict, and many good models violate it at the "
    "context that they claim. Below it the paper found low perplexity but poor retrieval at a distance: measure before "
    "you conclude."
)


@dataclass(frozen=True)
class RopeLayers:
    """The bound for layers that share a rotary embedding and a reach. Distances are in tokens.

    Attributes:
        layer_type: layer type as in the config's layer_types, or its key in rope_parameters.
        layers: number of layers; None if the config does not say.
        rope_type: the scaling type; None if these layers do not use RoPE, in which case the rest is None too.
        base: rope_theta.
        head_dim: dimensions of a query or key head.
        rotary_dim: dimensions of a head that rotate.
        max_distance: the largest distance these layers attend over at the claimed context.
        context_bound: L_theta of eq. 17, so that B_m < 0 first at context_bound + 1; None if there is no violation up
            to m = 4194304 and max_distance.
        rotary_only_bound: the same over the rotating dimensions alone.
        negative_distances: how many m in 0..max_distance have B_m < 0.
        last_negative: the last of these distances; None if there is none.
        lowest_decay: the smallest B_m of m in 0..max_distance, to three decimals; B_0 = head_dim / 2.
        minimum_base: eq. 18 for max_distance, for plain RoPE on the same dimensions; None if every base satisfies the
            bound (half of the head or more does not rotate) or if not computed (not requested, more than 1048576
            tokens, or proportional RoPE, whose exponents differ). Above it, bases that hold alternate with bases that
            fail.
        two_digit_base: the first base with two significant digits that holds.
        settled_base: every base from here to search_limit holds; None as for minimum_base, or if search_limit fails.
        search_limit: the largest base searched, 16 times minimum_base.
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
    inv_freq: list[float] | None = field(default=None, compare=False, repr=False)

    @property
    def verdict(self) -> str:
        """Either 'no RoPE', 'inconclusive' (half of the head or more does not rotate), 'violated' or 'holds'."""
        if self.rotary_dim is None or self.head_dim is None:
            return "no RoPE"
        if 2 * self.rotary_dim <= self.head_dim:
            return "inconclusive"
        return "violated" if self.negative_distances else "holds"

    @property
    def detail(self) -> str:
        """The reason for the verdict."""
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
    """The bound of a model, with `RopeLayers` for each group of layers: print it, or use `to_dict` or `to_json`."""

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
        """The worst verdict of its groups: 'violated', 'inconclusive' or 'holds'.

        It is 'holds within windows' if no layer with RoPE sees the whole claimed context.
        """
        verdicts = {group.verdict for group in self.groups}
        worst = next(verdict for verdict in ("violated", "inconclusive", "holds", "no RoPE") if verdict in verdicts)
        reach = max((group.max_distance for group in self.groups if group.rope_type), default=0)
        return worst + " within windows" * (worst == "holds" and reach < self.claimed_context - 1)

    @property
    def passed(self) -> bool | None:
        """Whether the bound holds in every group of layers with RoPE, also within windows; None if inconclusive."""
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
            settled = "none" if group.settled_base is None else f"{group.settled_base:.7g}"
            bases = (
                f"{group.minimum_base:.7g}; of two digits {group.two_digit_base:g}{unscaled}",
                f"{settled}; the search ended at {group.search_limit:.2g}",
            )
        return (
            *(layers, f"{group.rope_type}, base {group.base:g}", f"{group.rotary_dim} of {group.head_dim}"),
            *(f"up to m = {group.max_distance}", _up_to(group.context_bound), _up_to(group.rotary_only_bound)),
            *(f"{group.lowest_decay:g} (B_0 = {group.head_dim // 2})", *bases, group.verdict),
        )

    def to_dict(self) -> dict:
        """Return everything as plain JSON types, verdicts included."""
        groups = [{**asdict(group), "verdict": group.verdict} for group in self.groups]
        notes = list(self.notes)
        return {**asdict(self), "groups": groups, "notes": notes, "verdict": self.verdict, "holds": self.passed}

    document = to_dict

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> RopeReport:
        groups = [RopeLayers(*(group[f.name] for f in fields(RopeLayers))) for group in document["groups"]]
        named: dict[str, Any] = {f.name: document[f.name] for f in fields(cls)}
        named |= {"groups": tuple(groups), "notes": tuple(document["notes"])}
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
