"""What the results of a model mean for whoever wants to use it, in three sentences, and what was measured on what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..result import Result, plural
from ..retrieval.answers import Retrieval
from ..tasks.curve import ForgettingCurve
from ..tasks.loss import PositionLoss
from .effective import RULES


def conclusion(results: Sequence[Result]) -> list[str]:
    """Return up to three sentences: how much text to use, what is copied exactly, what is found.

    Args:
        results: of one model.

    Returns:
        sentences that a reader can act on who does not know the metrics; fewer where something was not measured.
    """
    measured = [result for result in results if result.measured]
    curve = next((result for result in measured if isinstance(result, ForgettingCurve)), None)
    sentences = [] if curve is None else [use_up_to(curve), exact_copies(curve)]
    losses = [result for result in measured if isinstance(result, PositionLoss)]
    if curve is None and losses:
        end = losses[0].context_length
        sentences = [
            f"The loss after {end:,} tokens is {losses[0].smoothed_at(end)} nats; more context was not tried."
        ]
    return sentences + [found(result) for result in measured if isinstance(result, Retrieval)][: 3 - len(sentences)]


def use_up_to(curve: ForgettingCurve) -> str:
    """Say how far back text is remembered better than guessed, for sure."""
    interval = curve.interval("coarse")
    if interval.low:
        end = ", the longest tested" if interval.longest else ""
        beyond = "" if end or interval.high else "; how far beyond is not sure"
        return (
            f"Use up to {interval.low:,} tokens{end}: text that far back is copied better than it is guessed{beyond}."
        )
    if interval.high is not None:
        return (
            f"Do not count on what stands {interval.high:,} tokens back or more: it is copied no better than guessed."
        )
    return f"How many tokens can be used is not known: {interval.needed}."


def exact_copies(curve: ForgettingCurve) -> str:
    """Say how long a text may be that is copied exactly, for sure."""
    interval = curve.interval("fine")
    if interval.low:
        tested = ", the longest tested" if interval.longest else ""
        return f"Exact copies: of most texts up to {interval.low:,} tokens{tested} (above 99 % of their tokens)."
    if interval.high is not None:
        return f"No exact copies of most texts of {interval.high:,} tokens or more: 99 % of their tokens or fewer are right."
    none = "" if any(2 * p.copied > p.repeats for p in curve.points) else "; most were not, at any tested length"
    return f"How long a text it copies exactly is not known: {interval.needed}{none}."


def found(result: Retrieval) -> str:
    """Say up to which length most questions are answered."""
    what, scores = result.hidden, result.by_length()
    good = [score for score in scores if score.right >= RULES["ours"] * score.asked]
    score = good[-1] if good else scores[0]
    tokens, count = score.tokens, f"{score.right:.0f} of {plural(score.asked, 'question')}"
    if good:
        return f"Finds {what} of up to {tokens:,} tokens ({count})."
    return f"Does not find {what}, not even of {tokens:,} tokens ({count})."


def facts(results: Sequence[Result]) -> str:
    """Return size, dtype and hardware of the measurements in a line, as far as they are known.

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
