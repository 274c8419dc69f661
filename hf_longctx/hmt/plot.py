"""Plot the recalls of an HMT with matplotlib, without a display."""

from pathlib import Path

import torch

from .modeling_hmt import HMTOutput


def plot_recall(output: HMTOutput, path: str | Path, *, row: int = 0, title: str | None = None) -> None:
    """Plot which earlier tokens each segment of a call recalled, and with what weight.

    Args:
        output: output of a call with `output_recall=True`.
        path: output file; its extension sets the format (PNG, SVG or PDF).
        row: row of the batch.
        title: title of the figure (default: none).

    Raises:
        ValueError: the output does not contain a recall.
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'hf-longctx[plot]'") from error
    recalled, length = output.recalled(row, top=None), output.segment_length
    if not any(recalled) or length is None:
        raise ValueError("The output does not contain a recall. Read more than one segment with output_recall=True.")
    width = max(span.stop for spans in recalled for span, _ in spans) // length
    weights = torch.full((len(recalled), width), torch.nan)
    for n, spans in enumerate(recalled):
        for span, weight in spans:
            weights[n, span.start // length] = weight
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights, vmin=0, vmax=1, aspect="auto", extent=(0, width * length, len(recalled), 0))
    axes.set(xlabel="token of the sequence", ylabel="segment of the call", title=title or "")
    figure.colorbar(image, label="recall weight")
    figure.savefig(path)


__all__ = ["plot_recall"]
