"""The style of all figures. We draw without pyplot, so figures do not require a display.

All plotting modules import this file. If matplotlib is missing, it raises an ImportError with advice.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any


try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch  # noqa: F401
    from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: F401
except ImportError as error:
    raise ImportError("Figures need matplotlib: pip install 'hf-longctx[plot]'") from error


INK, QUIET, GRID, WARNING = "#1f2933", "#5f6b76", "#e4e7ea", "#a3301f"
COPY, LM, PROBABILITY = "#b8500a", "#1f5fa6", "#2c7a4b"
# Background colours of a forgetting curve, as in figure 1 of Liu et al. 2024. White means not significant.
AREAS = {"fine": "#cdeacf", "coarse": "#d9e6f7", "amnesia": "#f9dedb"}
AREA_LABELS = {"fine": "copied word for word", "coarse": "copied", "amnesia": "no memory"}
# A colour-blind-safe palette (Okabe and Ito). Markers are for figures that need more than colours
MODELS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8c6d00", "#333f4a", "#4a9cc9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# For each rate of correct answers: the legend label, and the colour, marker and dashes of the line
RATES = {
    "match_rate": ("answers found in the responses", COPY, "o", "-"),
    # dashed: a line below remains visible
    "exact_rate": ("answers given token for token", LM, "s", (0, (3, 2))),
    "probability": ("probability of an answer's token", PROBABILITY, "^", "-"),
}
TOKENS = "{x:,.0f}"  # format of tick labels in tokens, with commas between thousands
# Legend layouts: number of columns, maximum characters per line of a label, maximum characters per line of the title
FITS = ((2, 44, 52), (1, 88, 52), (1, 64, 44), (1, 40, 28), (1, 20, 16))
WIDTH = 6.6  # in inches; 10-point text is 8 pixels high on a phone with a width of 390 pixels


def figure(width: float, height: float) -> Figure:
    """Create an empty white figure with a size in inches."""
    return Figure(figsize=(width, height), dpi=220, layout="constrained", facecolor="white")


def save(figure: Figure, path) -> None:
    figure.savefig(Path(path))


def strip_frame(axes, across: str = "", up: str = "", colour: str = INK, **ticks) -> None:
    """Label the axes, and remove the frame and the tick marks.

    Args:
        across, up: labels of the x and the y axis (default: no label).
        ticks: options of matplotlib's `tick_params`.
    """
    if across:
        axes.set_xlabel(across, color=colour)
    if up:
        axes.set_ylabel(up, color=colour)
    axes.tick_params(**{"colors": colour, "length": 0, **ticks})
    for spine in axes.spines.values():
        spine.set_visible(False)


def grid(axes) -> None:
    """Draw horizontal grid lines."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def percent_axis(axes) -> None:
    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def mark_training(axes, x: float, width: float = 1.2):
    """Draw a dashed vertical line at the end of the training context."""
    return axes.axvline(x, color=INK, linewidth=width, linestyle=(0, (5, 3)), zorder=2)


def literal(text: str) -> str:
    """Escape the dollar signs in a string. matplotlib would parse them as math.

    >>> print(literal("a$x_{$b"))
    a\\$x_{\\$b
    """
    return text.replace("$", r"\$")


def name_differences(axes, differences) -> None:
    """Above the axes, list the settings that differ between results; see `report.comparison.differences`."""
    if differences:
        axes.set_title(
            textwrap.fill(literal("different: " + "; ".join(differences)), 84), loc="left", fontsize=9, color=WARNING
        )


def heading(result) -> str:
    """Return the heading of a result: the metric, the model (if known), and "(interrupted)" for a partial result."""
    model = f" of {literal(result.model_name)}" if result.settings.get("model") else ""
    cache = f", {literal(result.settings['cache'])}" if result.settings.get("cache") else ""
    return f"{result.title}{model}{cache}{' (interrupted)' if result.interruption else ''}"


def draw_title(figure: Figure, text: str) -> None:
    for width in (52, 26):  # wide characters, such as Chinese, need shorter lines
        lines = textwrap.fill(text, width, max_lines=4, placeholder=" ...")
        title = figure.suptitle(lines, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
        if title.get_window_extent().width <= 0.98 * figure.bbox.width:
            return


def titled_legend(figure: Figure, handles, text: str, fontsize: float = 10, columns: int = 2) -> None:
    """Draw a legend with a title. The legend is above the axes, so it does not cover a curve."""
    font = {"size": 13, "weight": "bold"}
    place: dict[str, Any] = dict(loc="outside upper left", columnspacing=1.6, fontsize=fontsize)
    legend = fitted_legend(figure, figure, handles, text, columns, title_fontproperties=font, **place)
    width, height = figure.get_size_inches()
    surplus = legend.get_window_extent().height / figure.dpi - 1.8
    if surplus > 0:  # the legend of many models needs a taller figure
        figure.set_size_inches(width, height + surplus)


def fitted_legend(figure: Figure, owner: Any, handles, title: str, columns: int = 2, **options: Any) -> Any:
    """Draw a legend in the first layout of `FITS` that is not wider than the figure.

    Args:
        owner: figure or axes that the legend belongs to.
        options: options of matplotlib's `legend`.
    """
    labels = [str(handle.get_label()) for handle in handles]
    for most, width, title_width in FITS:
        words = [textwrap.fill(label, width, max_lines=3, placeholder=" ...") for label in labels]
        heading = textwrap.fill(title, title_width, max_lines=4, placeholder=" ...")
        text: dict[str, Any] = dict(handles=handles, labels=words, title=heading, ncols=min(most, columns))
        legend = owner.legend(**text, alignment="left", frameon=False, **options)
        if legend.get_window_extent().width <= 0.94 * figure.bbox.width or (most, width, title_width) == FITS[-1]:
            return legend
        legend.remove()


def small_print(figure: Figure, *notes: str, said: str = "") -> None:
    """Write the conclusion and the footnotes at the bottom right."""
    lines = [textwrap.fill(literal(text), 84, max_lines=4) for text in (said, ", ".join(notes)) if text]
    words = "\n".join(lines)
    figure.supxlabel(words, x=0.99, ha="right", multialignment="right", fontsize=9, color=QUIET)
