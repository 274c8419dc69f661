"""Per-token loss: how well a model predicts the i-th token of a text, given the i - 1 before it.

L(i) is the mean over M sequences of the negative log-probability of token i, in nats. While it falls with i, the model
makes use of what it read that far back; where it stays level, more context is of no use to it. The perplexity P(l) =
exp(mean of L(1) .. L(l)) says less: it can go on falling after L has become level.

Source: Lin et al. 2025, "Forgetting Transformer", section 4.2 and appendix C (arXiv 2503.02130). This file knows no
model: it needs numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..result import Headline, Result, Table
from .averages import WINDOW, moving_average, perplexity


def window_starts(corpus_tokens: int, context_length: int, sequences: int | None) -> list[int]:
    """Where `sequences` evenly spaced windows start; by default as many as fit side by side, but at most 32.

    Raises:
        ValueError: the corpus is shorter than one window, or `sequences` is below 1.

    >>> window_starts(100, 30, None)
    [0, 35, 70]
    """
    if context_length < 1 or (sequences is not None and sequences < 1):
        raise ValueError(f"context_length ({context_length}) and sequences ({sequences}) must be at least 1.")
    if corpus_tokens < context_length:
        raise ValueError(
            f"the corpus has {corpus_tokens} tokens, fewer than context_length={context_length}. Give more text, or "
            f"a context_length of at most {corpus_tokens}."
        )
    if sequences is None:
        sequences = min(corpus_tokens // context_length, 32)
    return np.linspace(0, corpus_tokens - context_length, sequences).astype(int).tolist()


@dataclass(frozen=True)
class PositionLoss(Result):
    """A measured per-token loss.

    Attributes:
        loss: L(1) .. L(T) in nats, one float per position, the mean over sequences.
        sequences: over how many.
    """

    kind = "position_loss"
    title = "Per-token loss"

    loss: tuple[float, ...]
    sequences: int
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "loss", tuple(map(float, self.loss)))
        if not self.loss or not np.isfinite(self.loss).all() or self.sequences < 1:
            raise ValueError("a per-token loss is one finite number for each of one or more positions and sequences.")

    @property
    def context_length(self) -> int:
        """T, the number of positions."""
        return len(self.loss)

    @property
    def perplexity(self) -> np.ndarray:
        """P(1) .. P(T), float64; see the function `perplexity`."""
        return perplexity(self.loss)

    def smoothed(self, window: int = WINDOW) -> np.ndarray:
        """L(i) with a centred moving average; see `moving_average`."""
        return moving_average(self.loss, window)

    def summary(self) -> str:
        smooth = self.smoothed()
        return (
            f"loss {smooth[len(smooth) // 2]:.3f} in the middle and {smooth[-1]:.3f} at the end of {len(smooth)} tokens "
            f"(nats, smoothed), perplexity {self.perplexity[-1]:.2f}; {self.sequences} sequences{self.interruption}"
        )

    def explanation(self) -> str:
        return (
            "The mean negative log-probability of the i-th token of a text, in nats, given those before it. Where it "
            "stays level, more context is of no use to the model. P(l) is the perplexity of the first l tokens."
        )

    def headlines(self) -> list[Headline]:
        name = f"perplexity of {self.context_length} tokens"
        return [Headline("perplexity", name, round(float(self.perplexity[-1]), 4))]

    def table(self) -> Table:
        """The smoothed loss and the perplexity at powers of two and at the end."""
        smooth, perplexity = self.smoothed(), self.perplexity
        rows = [(end, f"{smooth[end - 1]:.3f}", f"{perplexity[end - 1]:.2f}") for end in self._ends()]
        return Table(("tokens", "L(i), smoothed", "P(l)"), rows)

    def _ends(self):
        """The powers of two up to the context length, and that."""
        return sorted({2**i for i in range(self.context_length.bit_length())} | {self.context_length})

    def document(self) -> dict[str, Any]:
        perplexity = self.perplexity
        return {
            "settings": self.settings,
            "sequences": self.sequences,
            "perplexity": {str(end): float(perplexity[end - 1]) for end in self._ends()},
            "loss": self.loss,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> PositionLoss:
        return cls(document["loss"], document["sequences"], document["settings"])

    def plot(self, path, *, train_length: int | None = None, title: str | None = None) -> None:
        from .plot import plot_losses

        plot_losses([self], path, train_length=train_length, title=title)
