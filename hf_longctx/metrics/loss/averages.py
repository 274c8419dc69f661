"""Two averages of the losses by position: L(i) smoothed over neighbours, and the perplexity P(l) of l tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


WINDOW = 101  # tokens in the moving average of the paper's figures


def moving_average(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Mean over a window centred on each value, cut off at both ends; float64, as long as `values`.

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


def perplexity(loss: Sequence[float]) -> np.ndarray:
    """P(l) for l = 1, 2, ...: exp of the mean of the first l losses (nats); float64, as long as `loss`.

    >>> perplexity(np.log([8.0, 2.0])).round(6).tolist()
    [8.0, 4.0]
    """
    loss = np.asarray(loss, dtype=np.float64)
    return np.exp(np.cumsum(loss) / np.arange(1, len(loss) + 1))
