"""Plotting for the experiments: panels in one row, with one legend and at most six lines."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hf_longctx.metrics import style


if TYPE_CHECKING:
    from matplotlib.lines import Line2D


class Line(NamedTuple):
    """A line of a panel.

    Attributes:
        name: legend entry; the colour of a name is the same in all panels.
        x: positions.
        seeds: values of all seeds for each position; the line is their mean, the area their range.
        control: draw the line grey and dashed.
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
    percent: bool = False,
    ticks: dict[float, str] | None = None,
    log: bool = False,
    marks: dict[str, float] | None = None,
) -> None:
    """Draw a figure of panels in one row.

    Args:
        path: path of the PNG.
        title: title of the figure, a sentence.
        panels: lines of each panel, by heading.
        across: label of the x axis, for all panels or for each.
        up: label of the y axis, for all panels or for each.
        notes: description of the measurement, below the panels.
        percent: whether the y axis runs from 0 % to 100 %.
        ticks: labels of the x axis, by position.
        log: whether the x axis is logarithmic.
        marks: dashed vertical lines, by name.
    """
    figure = style.figure(style.WIDTH * (1.6 if len(panels) > 1 else 1.15), 3.4)
    grid = figure.subplots(1, len(panels), squeeze=False).flat
    lines = {line.name: line.control for several in panels.values() for line in several}
    coloured, handles = iter(style.MODELS), {}
    colours = {name: style.QUIET if control else next(coloured) for name, control in lines.items()}
    for place, (heading, several) in enumerate(panels.items()):
        axes = grid[place]
        for line in several:
            handles[line.name] = draw_line(axes, line, colours[line.name])
        axes.set_title(textwrap.fill(heading, 34), fontsize=9, color=style.INK)
        style.grid(axes)
        names = [across if isinstance(across, str) else across[place], up if isinstance(up, str) else up[place]]
        style.strip_frame(axes, *names, labelsize=8)
        if log:
            axes.set_xscale("log")
        if ticks:
            axes.set_xticks(list(ticks), list(ticks.values()))
            axes.minorticks_off()
        for name, x in (marks or {}).items():
            axes.axvline(x, color=style.QUIET, linewidth=0.8, linestyle=(0, (5, 3)))
            axes.text(x, 1, f" {name}", transform=axes.get_xaxis_transform(), fontsize=7, color=style.QUIET, va="top")
        if percent:
            style.percent_axis(axes)
    style.titled_legend(figure, list(handles.values()), title, fontsize=8, columns=3)
    if notes:
        style.small_print(figure, notes)
    figure.savefig(path, dpi=110)


def draw_line(axes, line: Line, colour: str) -> "Line2D":
    """Draw the mean over seeds as a line, and their range as an area; return the line."""
    means = [sum(values) / len(values) for values in line.seeds]
    dashes = (0, (3, 2)) if line.control else "-"
    width = 1.1 if line.control else 1.8
    marker = "o" if len(line.x) < 5 and not line.control else None  # a line of one point would be invisible
    (drawn,) = axes.plot(
        line.x, means, color=colour, linestyle=dashes, linewidth=width, marker=marker, markersize=4, label=line.name
    )
    if max(map(len, line.seeds)) > 1:
        low, high = map(min, line.seeds), map(max, line.seeds)
        axes.fill_between(line.x, list(low), list(high), color=colour, alpha=0.18, linewidth=0)
    return drawn
