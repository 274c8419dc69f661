"""The picture of how many of several facts are named."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

from .. import style


def plot_several(
    result: Any, path: str | PathLike, *, train_length: int | None = None, title: str | None = None
) -> None:
    """Draw the share of several facts that are named, by length, with its 95 % interval, and each reply as a dot.

    Args:
        result: a `SeveralRetrieval`. The rest is as for `Result.plot`.
    """
    if not result.points:
        raise ValueError("the result does not have a point to draw: nothing was measured.")
    style.check_train_length(train_length)
    figure = style.figure(style.WIDTH, 4.6)
    axes = figure.add_subplot()
    lengths, rates = [p.length for p in result.points], np.array([p.match_rate for p in result.points])
    low, high = np.transpose([p.interval or (p.match_rate, p.match_rate) for p in result.points])
    bars: dict[str, Any] = dict(
        yerr=[np.maximum(rates - low, 0), np.maximum(high - rates, 0)], capsize=3, elinewidth=1
    )
    mean: dict[str, Any] = dict(color=style.COPY, marker="o", linewidth=1.6, label="mean over the prompts")
    axes.errorbar(lengths, rates, **bars, **mean)
    dots = np.array([(p.length, answer.share) for p in result.points for answer in p.answers]).T
    axes.plot(*dots, ".", color=style.QUIET, alpha=0.5, zorder=1, label="a prompt")
    if train_length is not None and train_length <= lengths[-1]:
        style.mark_training(axes, train_length).set_label("training context")
    style.percent_axis(axes)
    style.grid(axes)
    axes.xaxis.set_major_formatter(style.TOKENS)
    style.strip_frame(axes, "length of prompt and reply (tokens)", f"of {result.points[0].facts} facts, named")
    style.titled_legend(figure, axes.get_legend_handles_labels()[0], title or style.heading(result))
    repeats = sorted({len(p.answers) for p in result.points})
    style.small_print(figure, f"{' or '.join(map(str, repeats))} prompts of each length, bars: 95 % intervals")
    style.save(figure, path)
