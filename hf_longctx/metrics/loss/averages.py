"""Averages of the losses by position: L(i) smoothed over neighbours, its error, and the perplexity P(l)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


WINDOW = 101  # tokens in the moving average of the paper's figures


def smoothing_window(context_length: int) -> int:
    """Return the tokens in the moving average: the paper's 101, but at most a tenth of the context.

    >>> [smoothing_window(tokens) for tokens in (8, 64, 400, 16384)]
    [1, 5, 39, 101]
    """
    return min(WINDOW, max(1, (context_length // 10 - 1) // 2 * 2 + 1))


def moving_average(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Average over a window centred on each value, cut off at both ends; float64, as long as `values`.

    Raises:
        ValueError: the window is not odd and positive.

    >>> moving_average([0.0, 3.0, 6.0, 0.0], 3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(
            f"window is {window}; it must be odd and positive, to have a centre. The paper takes {WINDOW}."
        )
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    centres = np.arange(len(values))
    begins, ends = np.maximum(centres - window // 2, 0), np.minimum(centres + window // 2 + 1, len(values))
    return (sums[ends] - sums[begins]) / (ends - begins)


def standard_error(losses: np.ndarray, window: int) -> np.ndarray | None:
    """Compute the standard error over sequences of the mean loss after `moving_average`.

    Args:
        losses: of M sequences, (M, T), in nats.

    Returns:
        (T,) float64; None for a single sequence.

    >>> standard_error(np.array([[1.0, 3.0], [2.0, 5.0]]), 1).tolist()
    [0.5, 1.0]
    """
    if len(losses) < 2:
        return None
    smoothed = np.stack([moving_average(loss, window) for loss in losses])
    return smoothed.std(axis=0, ddof=1) / len(losses) ** 0.5


def perplexity(loss: Sequence[float]) -> np.ndarray:
    """Compute P(l) for l = 1, 2, ...: exp of the mean of the first l losses (nats); float64, as long as `loss`.

    >>> perplexity(np.log([8.0, 2.0])).round(6).tolist()
    [8.0, 4.0]
    """
    return np.exp(np.cumsum(loss, dtype=np.float64) / np.arange(1, len(loss) + 1))
