"""Pictures of the needle in a haystack and of line retrieval."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from .. import style


# score: what it counts, the colour and the marker of its line
SCORES = {
    "match_rate": ("answers found in the replies", style.COPY, "o"),
    "exact_rate": ("answers given token for token", style.LM, "s"),
    "probability": ("probability of an answer's token", style.PROBABILITY, "^"),
}


def plot_needle(
    result, path, *, score: str | None = None, train_length: int | None = None, title: str | None = None
) -> None:
    """Draw a heat map of one score, length by depth, red (0) to green (1); what was not measured is left white.

    Args:
        result: a `NeedleGrid`. The rest is as for `Result.plot`.
        score: "match_rate", "exact_rate" or "probability"; by default, the first one that was measured.

    Raises:
        ValueError: also if there is no such score, or the score needs replies and there are none.
    """
    if not result.cells:
        raise ValueError("there is no cell to draw: nothing was measured.")
    score = score or result.scores[0]
    rates, lengths, depths = result.grid(score), result.lengths, result.depths
    if score not in result.scores:
        raise ValueError(f"the model gave no replies, so there is no {score}; draw {' or '.join(result.scores)}.")
    figure = style.figure(max(6, 2.2 + 0.62 * len(lengths)), max(3.2, 1.8 + 0.34 * len(depths)))
    axes = figure.add_subplot()
    image = axes.imshow(rates, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for row, column in zip(*np.nonzero(~np.isnan(rates))):
        colour = "white" if abs(rates[row, column] - 0.5) > 0.35 else style.INK  # the ends of the scale are dark
        axes.text(column, row, f"{100 * rates[row, column]:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    style.bare(axes, "length of prompt and answer (tokens)", "depth of the needle", labelsize=8.5)
    if train_length is not None and train_length < lengths[-1]:
        style.mark_training(axes, bisect_right(lengths, train_length) - 0.5, width=1.6)
    bar = figure.colorbar(image, ax=axes, format=style.PercentFormatter(1))
    bar.set_label(SCORES[score][0], color=style.INK, fontsize=9)
    bar.outline.set_visible(False)
    mode = result.settings.get("mode")
    metric = f"{result.title}, {mode} mode" if mode else result.title
    style.draw_title(figure, title or style.heading(result, metric))
    notes = [f"{len(result.cells[0].answers)} haystacks each"]
    if train_length is not None:
        notes.append(f"training context: {train_length:,} tokens")
    style.small_print(figure, *notes)
    figure.savefig(path)


def plot_lines(result, path, *, title: str | None = None) -> None:
    """Draw every score over the number of lines; the upper axis has the tokens that the model reads.

    Args:
        result: a `LineRetrieval`. The rest is as for `Result.plot`.
    """
    if not result.points:
        raise ValueError("there is no point to draw: nothing was measured.")
    figure = style.figure(8, 4.8)
    axes = figure.add_subplot()
    lines = [point.lines for point in result.points]
    for score in result.points[0].scores:
        label, colour, marker = SCORES[score]
        rates = [getattr(point, score) for point in result.points]
        axes.plot(lines, rates, color=colour, marker=marker, markersize=5, linewidth=2, label=label)
    style.rates(axes)
    style.grid(axes)
    style.bare(axes, "lines in the record", "questions answered", labelsize=8.5)
    axes.set_xticks(lines)
    reads = axes.twiny()
    reads.set_xlim(axes.get_xlim())
    reads.set_xticks(lines, [f"{point.mean_tokens:,.0f}" for point in result.points])
    style.bare(reads, "tokens the model reads", labelsize=8.5)
    style.draw_title(figure, title or style.heading(result))
    style.legend(figure, axes.get_lines())
    figure.savefig(path)
