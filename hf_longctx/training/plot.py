"""A picture of trainings: loss, loss of other texts, and the decay times of the gates, over the steps."""

import json
from collections.abc import Sequence
from itertools import cycle
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..metrics import style


QUANTILES = ("decay_time_q25", "decay_time_median", "decay_time_q75")


def plot_runs(runs: Sequence[str | Path], path: str | PathLike) -> None:
    """Draw the losses of runs, smoothed over a fiftieth of their steps, and below them the gates where there are some.

    Args:
        runs: folders of `train` and `finetune`, finished or not.
        path: PNG, SVG or PDF.

    Raises:
        ValueError: a folder has no metrics.jsonl, or no step in it.
    """
    lines = {str(run): read_metrics(Path(run)) for run in runs}
    has_gates = any(QUANTILES[1] in line for of_run in lines.values() for line in of_run)
    figure = style.figure(style.WIDTH, 7 if has_gates else 4)
    axes = np.atleast_1d(figure.subplots(1 + has_gates, 1, sharex=True))
    for (name, of_run), colour in zip(lines.items(), cycle(style.MODELS)):
        steps, losses = columns(of_run, "loss")
        axes[0].plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes[0].plot(steps, smoothed(losses), color=colour, linewidth=1.6, label=name)
        axes[0].plot(*columns(of_run, "eval_loss"), color=colour, linestyle="none", marker="o", markersize=4)
        low, middle, high = (columns(of_run, quantile) for quantile in QUANTILES)
        if len(middle[0]):
            axes[1].fill_between(low[0], low[1], high[1], color=colour, alpha=0.2, linewidth=0)
            axes[1].plot(*middle, color=colour, linewidth=1.6)
    style.strip_frame(axes[0], "" if has_gates else "step", "loss, nats; dots: of other texts")
    if has_gates:
        axes[1].set_yscale("log")
        style.strip_frame(axes[1], "step", "decay time, tokens: half of the heads")
    for each in axes:
        style.grid(each)
    axes[0].legend(frameon=False)
    figure.savefig(path)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    file = run / "metrics.jsonl"
    if not file.exists():
        raise ValueError(f"{run} has no metrics.jsonl; give the folder of a run of train or finetune.")
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    if not any("loss" in line for line in lines):
        raise ValueError(f"{file} has no step yet.")
    return lines


def columns(lines: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that have a value of this name, and the values."""
    pairs = [(line["step"], line[name]) for line in lines if name in line]
    steps, values = zip(*pairs) if pairs else ((), ())
    return np.array(steps), np.array(values)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and those before it, up to a fiftieth of all.

    >>> smoothed(np.arange(4.0)).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    window = max(1, len(values) // 50)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    return (sums[ends] - sums[begins]) / (ends - begins)


__all__ = ["plot_runs"]
