"""Pictures of the evidence: small panels with shared axes, at most six lines, named where they end."""

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hf_longctx.metrics import style


LABEL_GAP = 0.085  # between two names, as a share of the height of a panel


class Line(NamedTuple):
    """A line of a panel.

    Attributes:
        name: what stands at its end; one name has one colour in all panels.
        x: positions.
        seeds: for each position the values of all seeds; the line is their mean, an area their range.
        control: draw it grey and dashed.
    """

    name: str
    x: Sequence[float]
    seeds: Sequence[Sequence[float]]
    control: bool = False


def draw_panels(
    path: Path,
    title: str,
    panels: dict[str, list[Line]],
    *,
    across: str | Sequence[str],
    up: str | Sequence[str],
    notes: str = "",
    columns: int = 3,
    share: bool = True,
    percent: bool = False,
    ticks: dict[float, str] | None = None,
    log: Sequence[str] = (),
    marks: dict[str, float] | None = None,
) -> None:
    """Draw a picture of small panels.

    Args:
        path: of the PNG.
        title: what the picture shows, as a sentence.
        panels: the lines of each panel, by its heading.
        across, up: names of the axes, of all panels or of each.
        notes: how the figures were made, below the panels.
        columns: panels in a row.
        share: whether all panels have the same axes; lines are then named once in a row of panels.
        percent: whether the y axis runs from 0 % to 100 %.
        ticks: labels of the x axis, by position.
        log: "x", "y" for logarithmic axes; "y2" for that of the second panel alone.
        marks: dashed verticals, by their name.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = style.figure(style.WIDTH * (1.6 if columns > 1 else 1.15), 0.9 + 2.5 * rows)
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False).flat
    lines = {line.name: line.control for several in panels.values() for line in several}
    coloured = iter(style.MODELS)
    colours = {name: style.QUIET if control else next(coloured) for name, control in lines.items()}
    for place, (heading, several) in enumerate(panels.items()):
        axes = grid[place]
        for line in several:
            draw_line(axes, line, colours[line.name])
        axes.set_title(textwrap.fill(heading, 34), fontsize=9, color=style.INK)
        style.grid(axes)
        names = [across if isinstance(across, str) else across[place], up if isinstance(up, str) else up[place]]
        first, last = place % columns == 0, place == len(panels) - 1 or place % columns == columns - 1
        below = not share or place + columns >= len(panels)
        style.strip_frame(axes, names[0] if below else "", names[1] if first or not share else "", labelsize=8)
        axes.tick_params(labelbottom=below)
        if "x" in log:
            axes.set_xscale("log")
        if "y" in log or f"y{place + 1}" in log:
            axes.set_yscale("log")
        if ticks:
            axes.set_xticks(list(ticks), list(ticks.values()))
            axes.minorticks_off()
        for name, x in (marks or {}).items():
            axes.axvline(x, color=style.QUIET, linewidth=0.8, linestyle=(0, (5, 3)))
            axes.text(x, 1, f" {name}", transform=axes.get_xaxis_transform(), fontsize=7, color=style.QUIET, va="top")
        if percent:
            style.percent_axis(axes)
        if last or not share:
            name_lines(axes, several, colours, room=place % columns == columns - 1 or not share)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    style.draw_title(figure, title)
    if notes:
        style.small_print(figure, notes)
    figure.savefig(path, dpi=110)


def draw_line(axes, line: Line, colour: str) -> None:
    """Draw the mean over seeds as a line, and their range as an area."""
    means = [sum(values) / len(values) for values in line.seeds]
    dashes = (0, (3, 2)) if line.control else "-"
    axes.plot(line.x, means, color=colour, linestyle=dashes, linewidth=1.1 if line.control else 1.8)
    if max(map(len, line.seeds)) > 1:
        low, high = map(min, line.seeds), map(max, line.seeds)
        axes.fill_between(line.x, list(low), list(high), color=colour, alpha=0.18, linewidth=0)


def name_lines(axes, lines: Sequence[Line], colours: dict[str, str], room: bool) -> None:
    """Write the names of lines beside their ends, apart from each other.

    Args:
        room: whether the picture has to be made wider for the names; else an empty panel is beside these axes.
    """
    axes.autoscale_view()  # the transform below needs the limits
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {}
    for line in lines:
        ends[line.name] = to_axes.transform((line.x[-1], sum(line.seeds[-1]) / len(line.seeds[-1])))[1]
    heights = spread(list(ends.values()), LABEL_GAP)
    for (name, end), height in zip(ends.items(), heights):
        text = axes.annotate(
            textwrap.fill(name, 30),
            (1.0, end),
            (1.07, height),
            xycoords="axes fraction",
            fontsize=8,
            color=colours[name],
            va="center",
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
            annotation_clip=False,
        )
        text.set_in_layout(room)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights apart, in their order, until neighbours are at least `gap` from each other.

    >>> [round(height, 2) for height in spread([0.5, 0.5, 0.9], 0.1)]
    [0.45, 0.55, 0.9]
    """
    groups = [[height, [i]] for height, i in sorted((height, i) for i, height in enumerate(heights))]
    joined = True
    while joined:
        joined = False
        for (low, below), (high, above) in itertools.pairwise(groups):
            if high - low < gap * (len(below) + len(above)) / 2 - 1e-9:
                middle = (low * len(below) + high * len(above)) / (len(below) + len(above))
                place = groups.index([low, below])
                groups[place : place + 2] = [[middle, below + above]]
                joined = True
                break
    moved = [0.0] * len(heights)
    for middle, members in groups:
        for rank, i in enumerate(members):
            moved[i] = middle + gap * (rank - (len(members) - 1) / 2)
    return moved
