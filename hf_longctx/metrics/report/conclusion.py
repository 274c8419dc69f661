"""Summarize for users what a model's results mean, in three sentences, and describe the model and the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..result import Result, plural
from ..retrieval.answers import Retrieval
from ..tasks.curve import ForgettingCurve
from ..tasks.loss import PositionLoss
from .effective import RULES


def conclusion(results: Sequence[Result]) -> list[str]:
    """Return up to three sentences on one model: how far it copies roughly and word for word, and what it finds."""
    measured = [result for result in results if result.measured]
    curve = next((result for result in measured if isinstance(result, ForgettingCurve)), None)
    losses = [result for result in measured if isinstance(result, PositionLoss)]
    sentences = []
    if curve is not None:
        sentences = [f"{curve.copies_in_words()}.", f"Copies {curve.exact_in_words()}."]
    elif losses:
        end = losses[0].context_length
        sentences = [
            f"The loss after {end:,} tokens is {losses[0].smoothed_at(end)} nats; more context was not tried."
        ]
    return sentences + [found(result) for result in measured if isinstance(result, Retrieval)][: 3 - len(sentences)]


def found(result: Retrieval) -> str:
    """Describe the length up to which the model answers most questions."""
    what, scores = result.hidden, result.by_length()
    good = [score for score in scores if score.right >= RULES["ours"] * score.asked]
    score = good[-1] if good else scores[0]
    tokens, count = score.tokens, f"{score.right:.0f} of {plural(score.asked, 'question')}"
    if good:
        return f"Finds {what} of up to {tokens:,} tokens ({count})."
    return f"Does not find {what}, not even of {tokens:,} tokens ({count})."


def facts(results: Sequence[Result]) -> str:
    """Return model size, dtype and hardware on one line, as far as they are known.

    >>> facts([ForgettingCurve.of_points([], {"parameters": 5_300_000, "dtype": "float32", "hardware": "AMD EPYC"})])
    '5.3 million parameters, float32, AMD EPYC'
    """
    known: dict[str, Any] = {}
    for result in results:
        known |= {name: value for name, value in result.settings.items() if value is not None}
    parts = [str(known[name]) for name in ("dtype", "hardware", "endpoint") if name in known]
    if "parameters" in known:
        size = known["parameters"]
        unit, words = (1e9, "billion ") if size >= 1e9 else (1e6, "million ") if size >= 1e6 else (1, "")
        parts.insert(0, f"{size / unit:,.3g} {words}parameters" if words else f"{size:,} parameters")
    return ", ".join(parts)
