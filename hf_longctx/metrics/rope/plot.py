"""Plot B_m over the distance m, with its first negative value and the largest distance of the claimed context."""

from __future__ import annotations

from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import style
from .bound import rope_decay


if TYPE_CHECKING:
    from matplotlib.axes import Axes


BINS = 800  # number of bins on the x axis; each bin shows the minimum and maximum of B_m
MAX_EXCESS = 8  # upper limit of the x axis, as a multiple of max_distance


def plot_bound(
    report: Any, path: str | PathLike, *, train_length: int | None = None, title: str | None = None
) -> None:
    """Plot B_m (eq. 16) for each group of layers with RoPE in a `RopeReport`.

    A dashed line marks the largest distance in the claimed context. Dots mark the distances with B_m < 0. A dotted
    line marks the smallest of these distances. If some dimensions do not rotate, a thin horizontal line shows their
    contribution to B_m.
    """
    groups = [group for group in report.groups if group.rope_type is not None]
    figure = style.figure(style.WIDTH, 1 + 3.8 * len(groups))
    for axes, group in zip(figure.subplots(len(groups), squeeze=False)[:, 0], groups):
        draw_decay(axes, group, train_length)
        layers = f"{group.layer_type} " if len(report.groups) > 1 else ""
        words = f"{layers}{group.verdict}: {group.detail}"
        place: dict[str, Any] = dict(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0, columnspacing=1.5)
        handles = axes.get_legend_handles_labels()[0]
        style.fitted_legend(figure, axes, handles, words, title_fontsize=10, fontsize=9.5, **place)
    axes.set_xlabel("distance m (tokens)")
    style.draw_title(figure, title or style.heading(report))
    style.small_print(figure, f"claimed context: {report.claimed_context:,} tokens ({report.claimed_by})")
    style.save(figure, path)


def draw_decay(axes: Axes, group: Any, train_length: int | None) -> None:
    """Plot B_m for a group of layers. Mark its largest distance, and the first distance with B_m < 0."""
    needed, bound = group.max_distance, group.context_bound
    right = needed if bound is None else min(max(needed, bound), MAX_EXCESS * needed)
    # on a linear axis, a bound far below the claimed context would not be visible
    logarithmic = bound is not None and bound < needed / 50
    edges = np.geomspace(1, right * 1.1 + 2, BINS + 1) if logarithmic else np.linspace(0, right * 1.1 + 2, BINS + 1)
    at, lowest, highest = decay_range(group, np.unique(edges.astype(int)))

    axes.fill_between(at, lowest, highest, color=style.LM, linewidth=1.2, label="$B_m$")
    axes.axhline(0, color=style.INK, linewidth=0.8)
    negative = lowest < 0
    if negative.any():
        axes.plot(at[negative], lowest[negative], ".", color=style.COPY, markersize=5, label="$B_m < 0$")
    at_rest = group.head_dim - group.rotary_dim
    if at_rest:
        label = f"0 without the {at_rest} dimensions that do not rotate"
        axes.axhline(at_rest // 2, color=style.QUIET, linewidth=0.8, linestyle=(0, (6, 2, 1, 2)), label=label)
    if bound is not None and bound <= right:
        label = f"first $B_m < 0$: {bound + 1:,}"
        axes.axvline(bound + 1, color=style.COPY, linewidth=1.4, linestyle=":", label=label)
    axes.axvline(needed, color=style.INK, linewidth=1.4, linestyle="--", label=f"needed up to {needed:,}")
    if train_length is not None and train_length <= at[-1]:
        axes.axvline(train_length, color=style.PROBABILITY, linewidth=1.2, label=f"training: {train_length:,}")
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xlim(at[0], at[-1])
    axes.xaxis.set_major_formatter(style.TOKENS)
    style.grid(axes)
    axes.set_axisbelow(True)
    style.strip_frame(axes, up=f"$B_m$ ($B_0$ = {group.head_dim // 2})", labelsize=9.5)


def decay_range(group: Any, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each range between two consecutive edges, return its start and the minimum and maximum of B_m."""
    theta = np.append(group.inv_freq, np.zeros(group.head_dim // 2 - len(group.inv_freq)))
    ranges = [rope_decay(range(first, end), inv_freq=theta) for first, end in pairwise(edges)]
    return edges[:-1], np.array([part.min() for part in ranges]), np.array([part.max() for part in ranges])
