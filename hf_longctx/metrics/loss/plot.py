"""Pictures of the per-token loss, of one model or of several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from .. import style
from .averages import WINDOW


def plot_losses(results: Sequence, path, *, train_length: int | None = None, title: str | None = None) -> None:
    """Draw L(i), smoothed over 101 tokens, and beside it P(l), from l = 51 where the context is long enough.

    Args:
        results: one or more `PositionLoss`. The rest is as for `Result.plot`.
    """
    if not results:
        raise ValueError("there is no per-token loss to draw.")
    figure = style.figure(10, 4.4)
    left, right = figure.subplots(1, 2)
    longest, begins = max(result.context_length for result in results), set()
    for result, colour in zip(results, cycle(style.MODELS)):
        positions = np.arange(1, result.context_length + 1)
        label = f"{result.model_name} ({result.sequences} sequences)"
        left.plot(positions, result.smoothed(), color=colour, linewidth=1.6, label=label)
        begin = WINDOW // 2 if result.context_length > WINDOW else 0  # few tokens have perplexities far off the scale
        begins.add(begin + 1)
        right.plot(positions[begin:], result.perplexity[begin:], color=colour, linewidth=1.6)
    for axes, across, up in ((left, "position i", "loss L(i), nats"), (right, "context length l", "perplexity P(l)")):
        style.bare(axes, f"{across} (tokens)", up, labelsize=8.5)
        style.grid(axes)
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_formatter(style.TOKENS)
        if train_length is not None and train_length <= longest:
            style.mark_training(axes, train_length).set_label(f"training context: {train_length:,} tokens")
    heading = style.heading(results[0]) if len(results) == 1 else results[0].title
    style.draw_title(figure, title or heading)
    style.legend(figure, left.get_lines(), columns=2)
    begins = " or ".join(map(str, sorted(begins)))
    style.small_print(figure, f"loss: moving average of {WINDOW} tokens; perplexity: from l = {begins}")
    figure.savefig(path)
