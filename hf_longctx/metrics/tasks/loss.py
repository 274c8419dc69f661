"""Per-token loss: how well a model predicts the i-th token of a sequence, given the i - 1 tokens before it.

L(i) is the mean negative log-probability of token i over M sequences, in nats. Where L falls with i, the model
benefits from more context. Where L is flat, the model does not. The perplexity P(l) = exp(mean of L(1) .. L(l)) is
less informative, because it can still fall where L is flat.

Source: Lin et al. 2025, "Forgetting Transformer", section 4.2 and appendix C (arXiv 2503.02130).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Self

import numpy as np
import scipy

from ..checks import as_int
from ..function import function
from ..overlap import separate
from ..result import Number, Table, plural
from ..task import Score, Task, TaskResult, Trial, option


MAX_SEQUENCES = 32  # upper limit of the default number of sequences
WINDOW = 101  # window of the moving average in the paper's figures, in tokens


# Averages ------------------------------------------------------------------------------------------------------------


def smoothing_window(context_length: int) -> int:
    """Return the window of the moving average in tokens: 101 as in the paper, but at most a tenth of the context.

    >>> [smoothing_window(tokens) for tokens in (8, 64, 400, 16384)]
    [1, 5, 39, 101]
    """
    return min(WINDOW, max(1, (context_length // 10 - 1) // 2 * 2 + 1))


def moving_average(values: Sequence[float], window: int) -> np.ndarray:
    """Return the centred moving average of values, as float64 of the same length.

    At both ends, we average over the part of the window that contains values.

    Args:
        values: numbers.
        window: size of the window, an odd number.

    >>> moving_average([0.0, 3.0, 6.0, 0.0], 3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    centres = np.arange(len(values))
    begins, ends = np.maximum(centres - window // 2, 0), np.minimum(centres + window // 2 + 1, len(values))
    return (sums[ends] - sums[begins]) / (ends - begins)


def mean_loss(losses: Sequence[Sequence[float]], starts: Sequence[int]) -> dict[str, Any]:
    """Return the mean loss over sequences and its standard error, as arguments of `PositionLoss.of_mean`.

    The standard error only uses sequences that do not overlap. If only one sequence remains, it is None.

    Args:
        losses: losses (M, T) of M sequences of T tokens, in nats.
        starts: start of each sequence in the corpus.
    """
    array = np.array(losses)
    error = None
    texts = separate([(i, i + array.shape[1]) for i in starts])
    if len(texts) > 1:
        window = smoothing_window(array.shape[1])
        smoothed = [moving_average(array[i], window) for i in texts]
        error = (np.std(smoothed, axis=0, ddof=1) / len(texts) ** 0.5).tolist()
    return {"loss": array.mean(0).tolist(), "error": error, "sequences": len(array), "texts": len(texts)}


def window_starts(corpus_tokens: int, context_length: int, sequences: int | None) -> list[int]:
    """Return the starts of evenly spaced sequences in a corpus.

    Args:
        corpus_tokens: number of tokens in the corpus.
        context_length: number of tokens in a sequence.
        sequences: number of sequences. If None, use as many as possible without overlap, up to 32.

    Raises:
        ValueError: the corpus is shorter than one sequence.

    >>> window_starts(100, 30, None)
    [0, 35, 70]
    """
    if corpus_tokens < context_length:
        raise ValueError(
            f"context_length must be at most {corpus_tokens}, got {context_length}. The corpus has {corpus_tokens} "
            "tokens. Pass a longer corpus or a smaller context_length."
        )
    if sequences is None:
        sequences = min(corpus_tokens // context_length, MAX_SEQUENCES)
    return sorted(set(np.linspace(0, corpus_tokens - context_length, sequences).astype(int).tolist()))


# The result ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PositionLoss(TaskResult):
    """The result of a per-token loss. Its only score, "mean", stores the arguments of `of_mean`."""

    kind, title, inches = "position_loss", "Per-token loss", (6.6, 7)

    def unlike(self, other, *more):
        return "per-token losses keep the mean over sequences only"

    def extent(self):
        return {"sequences": str(self.sequences), "context lengths": str(self.context_length)}

    @classmethod
    def of_mean(
        cls,
        loss: Sequence[float],
        sequences: int,
        settings: dict[str, Any] | None = None,
        error: Sequence[float] | None = None,
        texts: int = 0,
    ) -> Self:
        """Create a result from the mean loss over sequences.

        Args:
            loss: L(1) .. L(T) in nats, one float per position.
            sequences: number of sequences.
            settings: settings of the measurement.
            error: standard error of `smoothed()` over sequences, one float per position; None if unknown.
            texts: number of sequences without overlap. Only these determine the error. 0 (default) means all.
        """
        mean = {"loss": np.asarray(loss, dtype=np.float64).tolist(), "error": None if error is None else [*error]}
        return cls({"mean": {**mean, "sequences": sequences, "texts": texts or sequences}}, settings or {})

    def __post_init__(self):
        if not self.scores:
            return
        for name in ("sequences", "texts"):
            as_int(name, self.scores["mean"][name], 1)
        loss = self.loss
        if not loss or not np.isfinite(loss).all():
            raise ValueError(f"loss must be one finite number per position, got {loss!r:.200}.")
        if self.error is not None and (len(self.error) != len(loss) or not np.min(self.error) >= 0):
            raise ValueError(f"`error` must contain {len(loss)} non-negative numbers, one for each position.")

    @property
    def loss(self) -> list[float]:
        """L(1) .. L(T) in nats: the mean loss over sequences at each position."""
        return self.scores["mean"]["loss"]

    @property
    def error(self) -> list[float] | None:
        """Standard error of `smoothed()` over sequences; None if unknown."""
        return self.scores["mean"]["error"]

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.scores["mean"]["sequences"]

    @property
    def texts(self) -> int:
        """Number of sequences that do not overlap."""
        return self.scores["mean"]["texts"]

    @property
    def context_length(self) -> int:
        """T, the number of positions."""
        return len(self.loss)

    @property
    def perplexity(self) -> np.ndarray:
        """P(1) .. P(T), float64: the perplexity of the first 1 .. T tokens."""
        return np.exp(np.cumsum(self.loss) / np.arange(1, self.context_length + 1))

    @property
    def window(self) -> int:
        """Window of the moving average in `smoothed`, in tokens."""
        return smoothing_window(self.context_length)

    def smoothed(self) -> np.ndarray:
        """Return the centred moving average of L(1) .. L(T), float64."""
        return moving_average(self.loss, self.window)

    def smoothed_at(self, position: int) -> str:
        """Format the smoothed loss at a position, with its standard error if known. Positions count from 1."""
        error = "" if self.error is None else f" ± {self.error[position - 1]:.3f}"
        return f"{self.smoothed()[position - 1]:.3f}{error}"

    def explanation(self) -> str:
        return (
            "The loss L(i) is the mean negative log-probability of the i-th token of a sequence, in nats, given the tokens "
            "before it. Where the loss is flat within its standard error over sequences, the model does not benefit from "
            "more context. P(l) is the perplexity of the first l tokens."
        )

    def in_words(self) -> str:
        end = self.context_length
        how = f"nats, mean of {self.window} tokens" + ("" if self.error is None else " ± standard error")
        return (
            f"loss {self.smoothed_at(end // 2 + 1)} in the middle and {self.smoothed_at(end)} at the end of {end} tokens "
            f"({how}), perplexity {self.perplexity[-1]:.2f}; {plural(self.sequences, 'sequence')}{self.shortage}"
        )

    @property
    def shortage(self) -> str:
        """Suffix of the summary. It is an empty string unless sequences overlap in the corpus."""
        if self.texts == self.sequences:
            return ""
        return f"; the corpus is too short: its {self.sequences} sequences overlap, and count as {plural(self.texts, 'sequence')}"

    def numbers(self):
        if not self.scores:
            return []
        end = self.context_length
        loss = float(self.smoothed()[-1])
        sample = plural(self.sequences, "sequence")
        low = high = None
        if self.error is not None:  # with Student's t, the half-width for 2 sequences is 13 standard errors
            width = float(scipy.special.stdtrit(self.texts - 1, 0.975) * self.error[-1])
            low, high = loss - width, loss + width
        last = round(float(self.perplexity[-1]), 4)
        return [
            Number("perplexity", f"perplexity of {end} tokens", last, sample=sample, more_is_better=False),
            Number("", f"loss at {end} tokens, nats", loss, low, high, sample, more_is_better=False),
        ]

    def table(self) -> Table:
        """Return the smoothed loss and the perplexity at positions 1, 2, 4 ... and at the last position."""
        ends = sorted({2**i for i in range(self.context_length.bit_length())} | {self.context_length})
        perplexity = self.perplexity
        rows = [(end, self.smoothed_at(end), f"{perplexity[end - 1]:.2f}") for end in ends]
        return Table(("tokens", "L(i), smoothed", "P(l)"), rows)

    def draw(self, figure, title, train_length):
        draw_losses(figure, [self], title, train_length)


# The task ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss(Task):
    """Measure how the loss falls with the length of the context: per-token loss and perplexity (Lin et al. 2025).

    Where the loss is flat, the model does not benefit from more context. To predict a sequence of T tokens, the model
    reads `[bos]` and the first T - 1 tokens.
    """

    name, result = "loss", PositionLoss
    examples = """
  loss gpt2 --text book.txt
  loss model_cards/fox-demo --context-length 256 --sequences 2 --text stdlib"""

    context_length: int | None = option(None, "number of tokens per sequence (default: the claimed context)", least=1)
    sequences: int | None = option(
        None, "number of sequences (default: as many as possible without overlap, up to 32)", least=1, selects=True
    )
    starts: list[int] | None = option(None, "start of each sequence in the corpus, in tokens", least=0, selects=True)

    def prepare(self):
        cache = self.subject.reader.cache
        if cache is not None and cache.press is not None:
            raise ValueError(
                f"cache={cache.name} compresses a context once, but a loss does not have a context. Measure curve, needle or "
                "lines, or use a cache that compresses itself, such as quantized:4 or window:1024."
            )
        text = len(self.subject.text)
        length = self.context_length
        starts = self.starts
        length = min(self.subject.context, text) if length is None else length
        if starts is None:
            starts = window_starts(text, length, self.sequences)
        elif self.sequences is not None:
            raise ValueError("sequences cannot be combined with starts. Drop one of them.")
        elif starts[-1] + length > text:
            raise ValueError(
                f"starts must lie between 0 and {text - length}, got {starts}. A sequence of {length} tokens must end "
                f"within the corpus of {text} tokens."
            )
        self.fill(context_length=length, starts=starts)

    def trials(self, scores):
        assert self.context_length is not None and self.starts is not None  # set by `prepare`
        return [Trial(start, self.context_length) for start in self.starts]

    def requests(self, start):
        return [Score(np.append(self.subject.bos, self.subject.text[start : start + self.context_length]), 1)]

    def score(self, start, responses):
        return (-responses[0]).tolist()

    def summarize(self, scores, missing):
        return ({"mean": mean_loss([*scores.values()], [*scores])} if scores else {}), missing


position_loss = function(Loss)


# The figure ----------------------------------------------------------------------------------------------------------


def draw_losses(
    figure: Any,
    results: Sequence[PositionLoss],
    title: str,
    train_length: int | None = None,
    differences: Sequence[str] = (),
) -> None:
    """Draw the smoothed loss L(i) with a ribbon of its standard error, and the perplexity P(l) in a lower panel.

    Args:
        figure: an empty matplotlib figure.
        results: results to compare.
        title: title of the figure.
        train_length: training context in tokens, marked by a vertical line.
        differences: settings that differ between the results. The figure lists them.
    """
    from .. import style

    figure.set_layout_engine("constrained", h_pad=0.12)  # inches between the panels
    above, below = figure.subplots(2, 1, sharex=True)
    longest = max(result.context_length for result in results)
    for result, colour in zip(results, cycle(style.MODELS)):
        positions, smoothed = np.arange(1, result.context_length + 1), result.smoothed()
        if result.error is not None:
            edges = smoothed - result.error, smoothed + result.error
            above.fill_between(positions, *edges, color=colour, alpha=0.2, linewidth=0)
        label = f"{style.literal(result.model_name)}, {plural(result.sequences, 'sequence')}"
        above.plot(positions, smoothed, color=colour, linewidth=1.6, label=label)
        begin = result.window // 2  # the first perplexities would be off the scale
        below.plot(positions[begin:], result.perplexity[begin:], color=colour, linewidth=1.6)
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
    style.titled_legend(figure, above.get_lines(), title)
    windows = " or ".join(map(str, sorted({result.window for result in results})))
    notes = [f"loss: moving average of {windows} tokens"]
    notes += ["ribbon: standard error over sequences"] if any(result.error is not None for result in results) else []
    style.small_print(figure, *notes)
