"""Plots of what HMT recalls. Drawing needs matplotlib, and no display."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .modeling_hmt import HMTOutput


def plot_recall_distance(
    distances: Tensor, path: str | Path, *, expected: Tensor | None = None, title: str | None = None
) -> None:
    """Draw how far back the recalls looked (paper, figures 11, 14 and 15).

    Args:
        distances: `HMTOutput.recall_distance`, long, of any shape, of one call or several joined; 1 is the previous
            segment, 0 (no recall) is left out.
        path: the file to write: PNG, SVG or PDF by its extension.
        expected: the distances of the right memories, like `distances`; drawn beside them.
        title: of the plot. Default: none.

    Raises:
        ValueError: there was no recall.
        ImportError: matplotlib is not installed.
    """
    figure = new_figure()
    draw_recall_distance(figure.add_subplot(), distances, expected=expected, title=title)
    figure.savefig(path)


def draw_recall_distance(
    axes: "Axes", distances: Tensor, *, expected: Tensor | None = None, title: str | None = None
) -> None:
    """Draw the plot of `plot_recall_distance` on the axes of an existing figure."""
    groups = {"recalled": distances} if expected is None else {"expected": expected, "recalled": distances}
    shares = {name: recall_shares(values) for name, values in groups.items()}
    width = 0.8 / len(shares)
    for i, (name, share) in enumerate(shares.items()):
        places = [1 + d + (i - (len(shares) - 1) / 2) * width for d in range(len(share))]
        axes.bar(places, share, width, label=name, color={"expected": "lightgrey", "recalled": "C4"}[name])
    axes.set(xlabel="distance in segments", ylabel="share of recalls", title=title or "")
    if expected is not None:
        axes.legend()


def plot_recall(output: "HMTOutput", path: str | Path, *, row: int = 0, title: str | None = None) -> None:
    """Draw which tokens of the text each segment of a call recalled, and how strongly.

    Args:
        output: of a call with `output_recall=True`.
        path: the file to write: PNG, SVG or PDF by its extension.
        row: of the batch.
        title: of the plot. Default: none.

    Raises:
        ValueError: there was no recall.
        ImportError: matplotlib is not installed.
    """
    recalled = output.recalled(row, top=None)
    if not any(recalled):
        raise ValueError("The output holds no recall; read more than one segment with output_recall=True.")
    length = output.segment_length
    assert length is not None
    width = max(span.stop for spans in recalled for span, _ in spans) // length
    weights = torch.full((len(recalled), width), torch.nan)
    for n, spans in enumerate(recalled):
        for span, weight in spans:
            weights[n, span.start // length] = weight
    figure = new_figure()
    axes = figure.add_subplot()
    image = axes.imshow(weights, vmin=0, vmax=1, aspect="auto", extent=(0, width * length, len(recalled), 0))
    axes.set(xlabel="token of the text", ylabel="segment of the call", title=title or "")
    figure.colorbar(image, label="weight of recall")
    figure.savefig(path)


def new_figure() -> "Figure":
    """Make an empty figure that needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'hf-longctx[plot]'") from error
    return Figure(figsize=(7, 4), dpi=120, layout="constrained")


def recall_shares(distances: Tensor) -> list[float]:
    """Return the share of recalls at distance 1, 2, ... up to the largest; ValueError if there was none."""
    distances = torch.as_tensor(distances).flatten()
    counts = torch.bincount(distances[distances > 0] - 1)
    if not len(counts):
        raise ValueError(
            "distances holds no recall, only zeros: a text of one segment, or a model without recall. Read a longer "
            "text with recall=True."
        )
    return (counts / counts.sum()).tolist()


__all__ = ["draw_recall_distance", "plot_recall", "plot_recall_distance", "recall_shares"]
