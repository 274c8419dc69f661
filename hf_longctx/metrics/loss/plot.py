"""Pictures of the per-token loss, of one model or of several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from os import PathLike
from typing import Any

import numpy as np

from .. import style
from ..result import plural


LEAST_SPAN = 0.5  # nats from the bottom to the top of a picture: less would make noise look like a trend


def plot_losses(
    results: Sequence[Any],
    path: str | PathLike,
    *,
    train_length: int | None = None,
    title: str | None = None,
    differences: Sequence[str] = (),
) -> None:
    """Draw the smoothed L(i) in a ribbon of its standard error, and below it P(l), from half a window of tokens on.

    Args:
        results: one or more `PositionLoss`. The rest is as for `Result.plot`.
        differences: settings in which the measurements differ, named in the picture.
    """
    style.check_train_length(train_length)
    figure = style.figure(style.WIDTH, 7)
    figure.set_layout_engine("constrained", h_pad=0.12)  # inches, so that the two axes are told apart
    above, below = figure.subplots(2, 1, sharex=True)
    longest = max(result.context_length for result in results)
    for result, colour in zip(results, cycle(style.MODELS)):
        positions, smoothed = np.arange(1, result.context_length + 1), result.smoothed()
        if result.error is not None:
            edges = smoothed - result.error, smoothed + result.error
            above.fill_between(positions, *edges, color=colour, alpha=0.2, linewidth=0)
        above.plot(positions, smoothed, color=colour, linewidth=1.6, label=label(result))
        begin = result.window // 2  # few tokens have perplexities far off the scale
        below.plot(positions[begin:], result.perplexity[begin:], color=colour, linewidth=1.6)
    above.set_ylim(*least_span(*above.get_ylim()))
    below.set_ylim(*np.exp(least_span(*np.log(np.maximum(below.get_ylim(), 1)))))
    style.strip_frame(above, up="loss L(i), nats")
    style.strip_frame(below, "position i, or context length l (tokens)", "perplexity P(l)")
    for axes in (above, below):
        style.grid(axes)
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_formatter(style.TOKENS)
        if train_length is not None and train_length <= longest:
            words = f"training context: {train_length:,} tokens"
            style.mark_training(axes, train_length).set_label(words if axes is above else None)
    style.name_differences(above, differences)
    heading = style.heading(results[0]) if len(results) == 1 else results[0].title
    style.titled_legend(figure, above.get_lines(), title or heading)
    windows = " or ".join(map(str, sorted({result.window for result in results})))
    notes = [f"loss: moving average of {windows} tokens"]
    notes += ["ribbon: standard error over sequences"] if any(result.error is not None for result in results) else []
    style.small_print(figure, *notes)
    style.save(figure, path)


def label(result: Any) -> str:
    """Return model and number of sequences."""
    return f"{style.literal(result.model_name)}, {plural(result.sequences, 'sequence')}"


def least_span(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis, moved apart if they are nearer than half a nat.

    >>> least_span(6.25, 6.75), least_span(6.5, 6.5)
    ((6.25, 6.75), (6.25, 6.75))
    """
    more = max(LEAST_SPAN - (high - low), 0) / 2
    return low - more, high + more
