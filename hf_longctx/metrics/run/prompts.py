"""Models that report, for each token of a prompt, what they expected in its place: served ones, and offline engines.

The prediction after a position is reported with the token that follows, so a prompt has one token more than is scored.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np


NO_PREDICTION = -1  # in place of an id: NaN


class Scores(NamedTuple):
    """Predictions in place of each token of a prompt; the first one has none.

    Attributes:
        best: the likeliest id, (T,) int64, see `PromptReader.predict`; -1 for the first one.
        log_probs: log-probability of the prompt's token, (T,) float64, in nats; NaN for the first one.
        highest: log-probability of the likeliest token, (T,) float64, in nats; NaN for the first one.
    """

    best: np.ndarray
    log_probs: np.ndarray
    highest: np.ndarray


def no_scores(n: int) -> Scores:
    return Scores(np.full(n, NO_PREDICTION, dtype=np.int64), np.full(n, np.nan), np.full(n, np.nan))


def scores_of_entries(entries: list[dict[int, float]], ids: list[int]) -> Scores:
    """Make scores from log-probabilities by id, for each prompt token its own and the likeliest; the first is ignored.

    Raises:
        ValueError: an entry has no log-probability of its token.
    """
    scores = no_scores(len(ids))
    for i, (entry, token) in enumerate(zip(entries, ids)):
        if i == 0:
            continue
        if token not in entry:
            raise ValueError(
                f"the tokens of the reply are not those of the prompt: at position {i} of {list(entry)}, not of {token}. "
                "Does the endpoint rewrite prompts?"
            )
        scores.log_probs[i] = entry[token]
        if not any(map(math.isnan, entry.values())):
            scores.highest[i] = highest = max(entry.values())
            scores.best[i] = min(other for other, value in entry.items() if value == highest)  # as argmax does
    return scores


class PromptReader:
    """The part of the `reader.Reader` protocol that such readers share."""

    can_reply = True
    device: str | None = None
    is_distributed = False

    def score_prompts(self, prompts: np.ndarray) -> list[Scores]:
        """Return the scores of prompts of one length, (R, T) int64."""
        raise NotImplementedError

    def cost(self, tokens: int) -> float:
        return tokens

    def reading(self, trial: np.ndarray, tokens_per_pass: int | None) -> nullcontext:
        """Prepare nothing: memory and passes are not this process's business."""
        return nullcontext()

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        """Return predictions at positions up to T - 2, as log-probabilities are those of the prompt's tokens."""
        rows, inverse = np.unique(inputs, axis=0, return_inverse=True)
        best = np.stack([scores.best for scores in self.score_prompts(rows)])
        return best[inverse.reshape(-1)][:, positions.start + 1 : positions.stop + 1]

    def score(self, ids: np.ndarray, targets: np.ndarray, positions: range) -> tuple[np.ndarray, np.ndarray]:
        (scores,) = self.score_prompts(np.append(ids, targets[-1])[None])
        return scores.log_probs[positions.start + 1 :], scores.best[positions.start + 1 :]
