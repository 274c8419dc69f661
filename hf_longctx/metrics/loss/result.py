"""Per-token loss: how well a model predicts the i-th token of a text, given the i - 1 before it.

L(i) is the mean over M sequences of the negative log-probability of token i, in nats. While it falls with i, the model
makes use of what it read that far back; where it stays level, more context is of no use to it. The perplexity P(l) =
exp(mean of L(1) .. L(l)) says less: it can go on falling after L has become level.

Source: Lin et al. 2025, "Forgetting Transformer", section 4.2 and appendix C (arXiv 2503.02130). This file knows no
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ..checks import whole_number
from ..overlap import separate
from ..result import Headline, Overview, Result, Table, plural
from .averages import moving_average, perplexity, smoothing_window, standard_error


def window_starts(corpus_tokens: int, context_length: int, sequences: int | None) -> list[int]:
    """Return where `sequences` evenly spaced windows start; by default as many as fit side by side, but at most 32.

    Raises:
        ValueError: the corpus is shorter than one window.

    >>> window_starts(100, 30, None)
    [0, 35, 70]
    """
    if corpus_tokens < context_length:
        raise ValueError(
            f"the corpus has {corpus_tokens} tokens, fewer than context_length={context_length}. Give more text, or "
            f"a context_length of at most {corpus_tokens}."
        )
    if sequences is None:
        sequences = min(corpus_tokens // context_length, 32)
    return np.linspace(0, corpus_tokens - context_length, sequences).astype(int).tolist()


def numbers_by_position(values: Sequence[float], name: str) -> tuple[float, ...]:
    """Return the values as floats; raise ValueError if they are not one or more finite numbers."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0 or not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be one finite number for each of one or more positions, got {values!r:.200}.")
    return tuple(numbers.tolist())


@dataclass(frozen=True)
class PositionLoss(Result):
    """A measured per-token loss.

    Attributes:
        loss: L(1) .. L(T) in nats, one float per position, the mean over sequences.
        sequences: over how many.
        error: standard error over sequences of `smoothed()`, one float per position; None if not known.
        texts: how many of the sequences do not overlap; the error is that of their mean. Default (0): all.
    """

    kind = "position_loss"
    title = "Per-token loss"

    loss: Sequence[float]
    sequences: int
    settings: dict[str, Any] = field(default_factory=dict)
    error: Sequence[float] | None = None
    texts: int = 0

    def __post_init__(self):
        object.__setattr__(self, "loss", numbers_by_position(self.loss, "loss"))
        object.__setattr__(self, "sequences", whole_number("sequences", self.sequences, 1))
        object.__setattr__(self, "texts", whole_number("texts", self.texts or self.sequences, 1))
        if self.error is None:
            return
        whole_number("sequences of a loss with an error", self.texts, 2)
        object.__setattr__(self, "error", numbers_by_position(self.error, "error"))
        if len(self.error) != len(self.loss) or min(self.error) < 0:
            raise ValueError(f"error must be {len(self.loss)} numbers, one for each position, and none below 0.")

    @classmethod
    def of_sequences(cls, losses: Any, settings: dict[str, Any], starts: Sequence[int] | None = None) -> PositionLoss:
        """Return the mean over sequences, and its error by those that do not overlap.

        Args:
            losses: of M sequences of T tokens, (M, T), in nats.
            starts: where the sequences start in one text; None if they do not overlap.

        Raises:
            ValueError: the sequences are missing, or not of one length.
        """
        lengths = sorted({np.size(row) for row in losses})
        if len(lengths) != 1 or np.ndim(losses[0]) != 1:
            raise ValueError(f"losses must be one or more sequences of one length, got lengths {lengths}.")
        losses = np.asarray(losses, dtype=np.float64)
        texts = [*range(len(losses))] if starts is None else separate([(i, i + lengths[0]) for i in starts])
        error = standard_error(losses[texts], smoothing_window(*lengths))
        errors = None if error is None else error.tolist()
        return cls(losses.mean(axis=0).tolist(), len(losses), settings, errors, len(texts))

    @property
    def context_length(self) -> int:
        """T, the number of positions."""
        return len(self.loss)

    @property
    def perplexity(self) -> np.ndarray:
        """P(1) .. P(T), float64; see the function `perplexity`."""
        return perplexity(self.loss)

    @property
    def window(self) -> int:
        """Tokens in the moving average of `smoothed`."""
        return smoothing_window(self.context_length)

    def smoothed(self) -> np.ndarray:
        """Return L(i) with a centred moving average; see `moving_average` and `smoothing_window`."""
        return moving_average(self.loss, self.window)

    def smoothed_at(self, position: int) -> str:
        """Return the smoothed loss at a position, counted from 1, with its standard error if that is known."""
        error = "" if self.error is None else f" ± {self.error[position - 1]:.3f}"
        return f"{self.smoothed()[position - 1]:.3f}{error}"

    def summary(self) -> str:
        end = self.context_length
        how = f"nats, mean of {self.window} tokens" + ("" if self.error is None else " ± standard error")
        return (
            f"loss {self.smoothed_at(end // 2 + 1)} in the middle and {self.smoothed_at(end)} at the end of {end} tokens "
            f"({how}), perplexity {self.perplexity[-1]:.2f}; {plural(self.sequences, 'sequence')}"
            f"{self.shortage}{self.interruption}"
        )

    @property
    def shortage(self) -> str:
        """Return the part of the summary that says that the text is too short for its sequences not to overlap."""
        if self.texts == self.sequences:
            return ""
        return f"; the text is too short: its {self.sequences} sequences overlap, and count as {plural(self.texts, 'text')}"

    def explanation(self) -> str:
        return (
            "The mean negative log-probability of the i-th token of a text, in nats, given those before it. Where it "
            "stays level, more context is of no use to the model; what lies within its standard error over sequences is "
            "level. P(l) is the perplexity of the first l tokens."
        )

    def headlines(self) -> list[Headline]:
        name = f"perplexity of {self.context_length} tokens"
        return [Headline("perplexity", name, round(float(self.perplexity[-1]), 4))]

    def table(self) -> Table:
        """Return the smoothed loss and the perplexity at powers of two and at the end."""
        perplexity = self.perplexity
        rows = [(end, self.smoothed_at(end), f"{perplexity[end - 1]:.2f}") for end in self._ends()]
        return Table(("tokens", "L(i), smoothed", "P(l)"), rows)

    def _ends(self) -> list[int]:
        """Return the powers of two up to the context length, and that."""
        return sorted({2**i for i in range(self.context_length.bit_length())} | {self.context_length})

    def overview(self) -> list[Overview]:
        end, loss, sample = self.context_length, self.smoothed()[-1], plural(self.sequences, "sequence")
        interval = ""
        if self.error is not None:  # Student's t: of two sequences, 95 % take 13 standard errors, and not 1.96
            width = stdtrit(self.texts - 1, 0.975) * self.error[-1]
            interval = f"{loss - width:.3f} to {loss + width:.3f}"
        return [
            Overview(f"loss at {end} tokens, nats", f"{loss:.3f}", interval, sample),
            Overview(f"perplexity of {end} tokens", f"{self.perplexity[-1]:.2f}", sample=sample),
        ]

    def document(self) -> dict[str, Any]:
        perplexity = self.perplexity
        return {
            "settings": self.settings,
            "sequences": self.sequences,
            "texts": self.texts,
            "perplexity": {str(end): float(perplexity[end - 1]) for end in self._ends()},
            "loss": self.loss,
            "smoothed_error": self.error,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> PositionLoss:
        loss, sequences, settings = (document[name] for name in ("loss", "sequences", "settings"))
        return cls(loss, sequences, settings, document["smoothed_error"], document.get("texts", 0))

    def plot(self, path: str | PathLike, *, train_length: int | None = None, title: str | None = None) -> None:
        from .plot import plot_losses

        plot_losses([self], path, train_length=train_length, title=title)
