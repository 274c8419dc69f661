"""Plotting for the experiments: small panels with shared axes and one legend, at most six lines."""

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
    columns: int = 3,
    share: bool = True,
    percent: bool = False,
    ticks: dict[float, str] | None = None,
    log: Sequence[str] = (),
    marks: dict[str, float] | None = None,
) -> None:
    """Draw a figure of small panels.

    Args:
        path: path of the PNG.
        title: title of the figure, a sentence.
        panels: lines of each panel, by heading.
        across, up: axis labels, for all panels or for each.
        notes: description of the measurement, below the panels.
        columns: panels per row.
        share: whether all panels share axes.
        percent: whether the y axis runs from 0 % to 100 %.
        ticks: labels of the x axis, by position.
        log: "x", "y" for logarithmic axes; "y2" for the second panel's y axis only.
        marks: dashed vertical lines, by name.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = style.figure(style.WIDTH * (1.6 if columns > 1 else 1.15), 0.9 + 2.5 * rows)
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False).flat
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
        below, first = not share or place + columns >= len(panels), place % columns == 0
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
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    style.titled_legend(figure, list(handles.values()), title, fontsize=8, columns=3)
    if notes:
        style.small_print(figure, notes)
    figure.savefig(path, dpi=110)


def draw_line(axes, line: Line, colour: str) -> "Line2D":
    """Draw the mean over seeds as a line, and their range as an area; return the line."""
    means = [sum(values) / len(values) for values in line.seeds]
    dashes = (0, (3, 2)) if line.control else "-"
    width = 1.1 if line.control else 1.8
    (drawn,) = axes.plot(line.x, means, color=colour, linestyle=dashes, linewidth=width, label=line.name)
    if max(map(len, line.seeds)) > 1:
        low, high = map(min, line.seeds), map(max, line.seeds)
        axes.fill_between(line.x, list(low), list(high), color=colour, alpha=0.18, linewidth=0)
    return drawn
