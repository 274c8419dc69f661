"""The figure of a forgetting curve."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import numpy as np

from .. import style
from .lengths import METHODS


SMALL_PRINT = {"data_type": "{} data", "dtype": "{}", "seed": "seed {}"}  # settings in the footnote


def draw_curve(figure: Any, curve: Any, title: str, train_length: int | None = None) -> None:
    """Draw copy and LM accuracy over the length of the target, with a one-sentence conclusion.

    Lines show means over repeats, ribbons show one population standard deviation on each side, and triangles show the
    worst repeat. The background shows significant results: green where a length passes as fine, blue where it passes
    as coarse, and red beyond the reach of memory. The upper axis shows the input length: 2n + 3 tokens for a target of
    n tokens. A vertical line marks an input of `train_length` tokens. See `Result.plot`.
    """
    axes = figure.add_subplot()
    lengths = [p.length for p in curve.points]
    log = logarithmic(lengths)
    left, right = (lengths[0] / 1.1, lengths[-1] * 1.1) if log else (0, lengths[-1] * 1.025)
    keys = shade_areas(axes, curve, left, right)
    draw_accuracy(axes, lengths, [(p.copy_mean, p.copy_std) for p in curve.points], style.COPY, "o", "copy accuracy")
    worst: Any = dict(linestyle="none", marker="v", markersize=3, color=style.COPY, alpha=0.6, zorder=4)
    axes.plot(lengths, [p.copy_worst for p in curve.points], **worst, label="copy accuracy of the worst repeat")
    draw_accuracy(axes, lengths, [(p.lm_mean, p.lm_std) for p in curve.points], style.LM, "s", "LM accuracy")
    axes.axhline(0.99, color=style.INK, linewidth=0.8, linestyle=":", zorder=2, label="99 %: copied word for word")
    said = f"{curve.copies_in_words()} {curve.exact_in_words()}"
    notes = [f"mean and standard deviation of {curve.repeats_in_words}", *["all tokens scored"] * curve.whole]
    notes += ["see the notes on the server"] * bool(curve.doubts)
    notes += [form.format(curve.settings[name]) for name, form in SMALL_PRINT.items() if name in curve.settings]
    if train_length is not None and (train_length - 3) / 2 > right:
        notes.append(f"training context of {train_length:,} tokens not reached")
    elif train_length is not None:
        words = f"training context: {train_length:,} tokens"
        style.mark_training(axes, (train_length - 3) / 2).set_label(words)

    scale: dict[str, Any] = {"value": "log", "base": 2} if log else {"value": "linear"}
    axes.set_xscale(**scale)
    axes.set_xlim(left, right)
    axes.xaxis.set_major_formatter(style.TOKENS)
    style.percent_axis(axes)
    style.grid(axes)
    style.strip_frame(axes, "length of the passage to copy (tokens)", "tokens predicted correctly")

    reads = axes.twiny()  # secondary_xaxis loses its ticks on a logarithmic scale
    reads.set_xscale(**scale)
    reads.set_xlim(left, right)
    ticks = [2**i for i in range(64)] if log else style.MaxNLocator(6).tick_values(0, 2 * right)
    ticks = [tick for tick in ticks if left <= (tick - 3) / 2 <= right]
    reads.set_xticks([(tick - 3) / 2 for tick in ticks], [f"{tick:,.0f}" for tick in ticks])
    reads.minorticks_off()
    style.strip_frame(reads, "tokens the model reads", colour=style.QUIET, length=3)

    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    style.titled_legend(figure, [*lines, *keys], title)
    style.small_print(figure, *notes, said=said)


def logarithmic(lengths) -> bool:
    """Return whether the axis should be logarithmic: the median length is far below the longest length.

    >>> logarithmic([8, 64, 512]), logarithmic([8, 48, 88, 128])
    (True, False)
    """
    return len(lengths) > 2 and lengths[len(lengths) // 2] < 0.25 * lengths[-1]


def area_of(point, intervals) -> str:
    """Return the verdict at a length: "fine", "coarse" or "amnesia" if it is significant, otherwise "unsure"."""
    fine, coarse = (intervals[method] for method in METHODS)
    if 2 * point.copied > point.repeats and point.length <= fine.low:
        return "fine"
    if point.passes("coarse") and point.length <= coarse.low:
        return "coarse"
    return "unsure" if coarse.high is None or point.length < coarse.high else "amnesia"


def areas(curve, left: float, right: float, log: bool) -> list[tuple[float, float, str]]:
    """Split the x axis from `left` to `right` into areas (start, end, verdict), each with a single verdict.

    The boundary between two measured lengths is their mean. On a logarithmic axis, it is their geometric mean.
    """
    intervals = {method: curve.interval(method) for method in METHODS}
    lengths = [p.length for p in curve.points]
    middles = [(a * b) ** 0.5 if log else (a + b) / 2 for a, b in pairwise(lengths)]
    edges = [left, *middles, right]
    stretches = [(*ends, area_of(point, intervals)) for ends, point in zip(pairwise(edges), curve.points)]
    groups = [list(group) for _, group in groupby(stretches, key=lambda stretch: stretch[2])]
    return [(group[0][0], group[-1][1], group[0][2]) for group in groups]


def shade_areas(axes, curve, left: float, right: float) -> list[style.Patch]:
    """Shade the areas with a significant verdict, and return their legend handles."""
    stretches = areas(curve, left, right, logarithmic([p.length for p in curve.points]))
    drawn = {area for _, _, area in stretches} - {"unsure"}
    for start, end, area in stretches:
        if area in drawn:
            axes.axvspan(start, end, color=style.AREAS[area], linewidth=0, zorder=0)
    return [
        style.Patch(color=style.AREAS[area], label=style.AREA_LABELS[area]) for area in style.AREAS if area in drawn
    ]


def draw_accuracy(axes, lengths, moments, colour, marker, label) -> None:
    """Draw a line of means with a ribbon of one standard deviation on each side."""
    means, deviations = np.transpose(moments)
    ribbon = np.clip([means - deviations, means + deviations], 0, 1)
    axes.fill_between(lengths, *ribbon, color=colour, alpha=0.2, linewidth=0, zorder=3)
    axes.plot(lengths, means, color=colour, marker=marker, markersize=4.5, linewidth=2, label=label, zorder=4)
