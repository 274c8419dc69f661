"""Pictures of the needle in a haystack and of line retrieval."""

from __future__ import annotations

from bisect import bisect_right
from os import PathLike
from typing import Any

import numpy as np

from .. import style


# score: what it counts; colour, marker and dashes of its line
SCORES = {
    "match_rate": ("answers found in the replies", style.COPY, "o", "-"),
    "exact_rate": ("answers given token for token", style.LM, "s", (0, (3, 2))),  # shows a line below it
    "probability": ("probability of an answer's token", style.PROBABILITY, "^", "-"),
}


def plot_needle(
    result: Any,
    path: str | PathLike,
    *,
    score: str | None = None,
    train_length: int | None = None,
    title: str | None = None,
) -> None:
    """Draw a heat map of one score, length by depth, red (0) to blue (1); what was not measured is left white.

    A cell shows per cent, or where it has fewer than five answers, how many of them are right; where no cell has five,
    the colours are pale, as so few answers say little about a cell.

    Args:
        result: a `NeedleGrid`. The rest is as for `Result.plot`.
        score: "match_rate", "exact_rate" or "probability"; by default, the first one that was measured.

    Raises:
        ValueError: the score is unknown, or needs replies, which were not measured; or see `Result.plot`.
    """
    if not result.cells:
        raise ValueError("the result does not have a cell to draw: nothing was measured.")
    style.check_train_length(train_length)
    shown: str = score or result.scores[0]
    rates, lengths, depths = result.grid(shown), result.lengths, result.depths
    if shown not in result.scores:
        raise ValueError(f"the model did not reply, so {shown} was not measured; draw {' or '.join(result.scores)}.")
    figure = style.figure(max(style.WIDTH, 1.8 + 0.55 * len(lengths)), max(3.4, 2 + 0.34 * len(depths)))
    axes = figure.add_subplot()
    pale = max(len(cell.answers) for cell in result.cells) < 5
    colours: dict[str, Any] = dict(cmap="RdYlBu", alpha=0.4 if pale else 1)  # told apart by colour-blind readers
    image = axes.imshow(rates, **colours, vmin=0, vmax=1, aspect="auto")
    for cell in result.cells:
        rate, answers = getattr(cell, shown), len(cell.answers)
        words = f"{100 * rate:.0f}" if answers >= 5 or shown == "probability" else f"{round(rate * answers)}/{answers}"
        colour = "white" if abs(rate - 0.5) > 0.35 and not pale else style.INK  # the ends of the scale are dark
        at = lengths.index(cell.length), depths.index(cell.depth)
        axes.text(*at, words, ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    style.strip_frame(axes, "length of prompt and answer (tokens)", "depth of the needle", labelsize=9)
    if train_length is not None and train_length < lengths[-1]:
        style.mark_training(axes, bisect_right(lengths, train_length) - 0.5, width=1.6)
    bar = figure.colorbar(image, ax=axes, format=style.PercentFormatter(1))
    bar.set_label(SCORES[shown][0], color=style.INK, fontsize=10)
    bar.outline.set_visible(False)
    mode = result.settings.get("mode")
    metric = f"{result.title}, {mode} mode" if mode else result.title
    style.draw_title(figure, title or style.heading(result, metric))
    haystacks = sorted({len(cell.answers) for cell in result.cells})
    notes = [f"{' or '.join(map(str, haystacks))} haystack{'s' if haystacks != [1] else ''} in each cell"]
    if train_length is not None:
        notes.append(f"training context: {train_length:,} tokens")
    style.small_print(figure, *notes)
    style.save(figure, path)


def plot_lines(result: Any, path: str | PathLike, *, title: str | None = None) -> None:
    """Draw every score by the number of lines, with its 95 % interval; the upper axis has the tokens the model reads.

    Args:
        result: a `LineRetrieval`. The rest is as for `Result.plot`.
    """
    if not result.points:
        raise ValueError("the result does not have a point to draw: nothing was measured.")
    figure = style.figure(style.WIDTH, 5)
    axes = figure.add_subplot()
    scores, places = result.scores, np.arange(len(result.points))  # evenly spaced: lines double, as a rule
    for score, shift in zip(scores, np.linspace(-0.1, 0.1, len(scores))):  # beside each other where they are equal
        label, colour, marker, dashes = SCORES[score]
        rates = np.array([getattr(point, score) for point in result.points])
        low, high = np.transpose([point.interval(score) for point in result.points])
        bars: dict[str, Any] = dict(
            yerr=[np.maximum(rates - low, 0), np.maximum(high - rates, 0)], capsize=3, elinewidth=1
        )
        line: dict[str, Any] = dict(color=colour, marker=marker, linestyle=dashes, linewidth=1.6, label=label)
        axes.errorbar(places + shift, rates, **bars, **line)
    style.percent_axis(axes)
    style.grid(axes)
    style.strip_frame(axes, "lines in the record", "questions answered")
    axes.set_xlim(-0.4, len(places) - 0.6)
    axes.set_xticks(places, [f"{point.lines:,}" for point in result.points])
    reads = axes.twiny()
    reads.set_xlim(axes.get_xlim())
    reads.set_xticks(places, [f"{point.mean_tokens:,.0f}" for point in result.points])
    style.strip_frame(reads, "tokens the model reads", colour=style.QUIET)
    style.titled_legend(figure, axes.get_legend_handles_labels()[0], title or style.heading(result), columns=1)
    repeats = sorted({len(point.answers) for point in result.points})
    style.small_print(
        figure, f"{' or '.join(map(str, repeats))} records of each number of lines, bars: 95 % intervals"
    )
    style.save(figure, path)
