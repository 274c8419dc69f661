"""Pictures of the per-token loss, the needle and the lines. Like `plots`, they need matplotlib and no display."""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from ..curve.plot import COPY, INK, LM, QUIET, Figure, PercentFormatter, StrMethodFormatter
from ..loss.result import WINDOW, PositionLoss
from .answers import check_score
from .haystack import NeedleGrid
from .lines import LineRetrieval


COLOURS = (LM, COPY, "#2c7a4b", "#8a3ea8", "#9c7a00", "#4a5560")
SCORES = {
    "match_rate": ("answers found in the replies", COPY, "o"),
    "exact_rate": ("answers given token for token", LM, "s"),
    "probability": ("probability of an answer's token", "#2c7a4b", "^"),
}


def plot_losses(
    results: Sequence[PositionLoss], path, *, train_length: int | None = None, title: str | None = None
) -> None:
    """Draw L(i), smoothed over 101 tokens, and P(l) from l = 51 where that is not too short, of one or more models beside each other.

    Args:
        path: the file to write: PNG, SVG or PDF by its extension.
        train_length: context length of the training, in tokens: a line there, if the picture reaches it.
        title: by default, the name of the metric, and of the model if there is one only.

    Raises:
        ValueError: there is no result, or matplotlib does not know the extension.
    """
    if not results:
        raise ValueError("there is no per-token loss to draw.")
    figure = Figure(figsize=(10, 4.4), dpi=160, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    longest, begins = max(result.context_length for result in results), set()
    for result, colour in zip(results, cycle(COLOURS, len(results))):
        positions = np.arange(1, result.context_length + 1)
        label = f"{short_name(result.settings)} ({result.sequences} sequences)"
        left.plot(positions, result.smoothed(), color=colour, linewidth=1.6, label=label)
        begin = WINDOW // 2 if result.context_length > WINDOW else 0  # few tokens have perplexities far off the scale
        begins.add(begin + 1)
        right.plot(positions[begin:], result.perplexity[begin:], color=colour, linewidth=1.6)
    for axes, across, up in ((left, "position i", "loss L(i), nats"), (right, "context length l", "perplexity P(l)")):
        plain_axes(axes, f"{across} (tokens)", up)
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
        if train_length is not None and train_length <= longest:
            mark = axes.axvline(train_length, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=2)
            mark.set_label(f"training context: {train_length:,} tokens")
    set_title(figure, title or titled("Per-token loss", results))
    figure.legend(handles=left.get_lines(), loc="outside lower left", frameon=False, fontsize=9, ncols=2)
    figure.supxlabel(
        f"loss: moving average of {WINDOW} tokens; perplexity: from l = {' or '.join(map(str, sorted(begins)))}",
        x=0.99,
        ha="right",
        fontsize=8,
        color=QUIET,
    )
    figure.savefig(path)


def plot_needle(
    result: NeedleGrid,
    path,
    *,
    score: str | None = None,
    train_length: int | None = None,
    title: str | None = None,
) -> None:
    """Draw a heat map of one score, length by depth, red (0) to green (1); what was not measured is left white.

    Args:
        path: the file to write: PNG, SVG or PDF by its extension.
        score: "match_rate", "exact_rate" or "probability"; by default, the first one there is.
        train_length: context length of the training, in tokens: a line after the last length within it.
        title: by default, the name of the model.

    Raises:
        ValueError: nothing was measured, there is no such score, or none without replies, or matplotlib does not know the extension.
    """
    if not result.cells:
        raise ValueError("there is no cell to draw: nothing was measured.")
    score = result.scores[0] if score is None else check_score(score)
    if score not in result.scores:
        raise ValueError(f"the model gave no replies, so there is no {score}; draw {' or '.join(result.scores)}.")
    grid, lengths, depths = result.grid(score), result.lengths, result.depths
    size = (max(6, 2.2 + 0.62 * len(lengths)), max(3.2, 1.8 + 0.34 * len(depths)))
    figure = Figure(figsize=size, dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for row, column in zip(*np.nonzero(~np.isnan(grid))):
        colour = "white" if abs(grid[row, column] - 0.5) > 0.35 else INK  # the ends of the scale are dark
        axes.text(column, row, f"{100 * grid[row, column]:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    plain_axes(axes, "length of prompt and answer (tokens)", "depth of the needle")
    if train_length is not None and train_length < lengths[-1]:
        axes.axvline(bisect_right(lengths, train_length) - 0.5, color=INK, linewidth=1.6, linestyle=(0, (5, 3)))
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1))
    bar.set_label(SCORES[score][0], color=INK, fontsize=9)
    bar.outline.set_visible(False)
    mode = result.settings.get("mode")
    set_title(figure, title or titled("Needle in a haystack" + (f", {mode} mode" if mode else ""), [result]))
    notes = [f"{len(result.cells[0].answers)} haystacks each"]
    if train_length is not None:
        notes.append(f"training context: {train_length:,} tokens")
    figure.supxlabel(", ".join(notes), x=0.99, ha="right", fontsize=8, color=QUIET)
    figure.savefig(path)


def plot_lines(result: LineRetrieval, path, *, title: str | None = None) -> None:
    """Draw the rates there are over the number of lines; the upper axis has the tokens that the model reads.

    Args:
        path: the file to write: PNG, SVG or PDF by its extension.
        title: by default, the name of the model.

    Raises:
        ValueError: nothing was measured, or matplotlib does not know the extension.
    """
    if not result.points:
        raise ValueError("there is no point to draw: nothing was measured.")
    figure = Figure(figsize=(8, 4.8), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    lines = [point.lines for point in result.points]
    for score in result.points[0].scores:
        label, colour, marker = SCORES[score]
        rates = [getattr(point, score) for point in result.points]
        axes.plot(lines, rates, color=colour, marker=marker, markersize=5, linewidth=2, label=label)
    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
    plain_axes(axes, "lines in the record", "questions answered")
    axes.set_xticks(lines)
    reads = axes.twiny()
    reads.set_xlim(axes.get_xlim())
    reads.set_xticks(lines, [f"{point.mean_tokens:,.0f}" for point in result.points])
    plain_axes(reads, "tokens the model reads", "")
    set_title(figure, title or titled("Line retrieval", [result]))
    figure.legend(handles=axes.get_lines(), loc="outside lower left", frameon=False, fontsize=9, ncols=3)
    figure.savefig(path)


def plain_axes(axes, across, up):
    axes.set_xlabel(across, color=INK)
    if up:
        axes.set_ylabel(up, color=INK)
    axes.tick_params(colors=INK, length=0, labelsize=8.5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def set_title(figure, title):
    figure.suptitle(textwrap.fill(title, 75), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)


def titled(metric, results):
    """The metric, and the model where the picture is of one."""
    return f"{metric} of {short_name(results[0].settings)}" if len(results) == 1 else metric


def short_name(settings):
    """A model's name on the Hub (one slash), or the last part of a local folder."""
    model = str(settings.get("model") or "a model")
    return model if model.count("/") <= 1 else model.rstrip("/").rpartition("/")[2]


def cycle(colours, n):
    return [colours[i % len(colours)] for i in range(n)]
