"""Results as the evaluation metadata of a model card, which the Hub shows beside the model (`model-index`).

    print(card_snippet("fox-demo", [curve, loss]))

A value must be a number there, so that a length which is only known to be larger says so in the metric's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from huggingface_hub import EvalResult, ModelCardData

from ..curve.result import ForgettingCurve
from ..loss.result import PositionLoss
from ..result import Result
from ..retrieval.haystack import NeedleGrid
from ..retrieval.lines import LineRetrieval
from ..rope.verdict import RopeReport


def eval_results(results: Sequence[Result]) -> list[EvalResult]:
    """One entry per headline number: fine and coarse length, perplexity, rates of right answers.

    A `RopeReport` has none: it judges a configuration, not what a model does on a dataset.
    """
    return [entry for result in results for entry in _entries(result)]


def card_snippet(model: str, results: Sequence[Result], picture: str | None = None) -> str:
    """Markdown with its YAML header, to be merged into a model card.

    Args:
        model: name of the model.
        results: what was measured.
        picture: file name or address of a picture to show.

    Raises:
        ValueError: no result has a number for a card.
    """
    entries = eval_results(results)
    if not entries:
        raise ValueError("these results hold no number for a model card: nothing was measured on a dataset.")
    header = ModelCardData(model_name=model, eval_results=entries).to_yaml()
    lines = [f"- {entry.metric_name}: {_shown(entry.metric_value)} ({entry.dataset_name})" for entry in entries]
    for report in (result for result in results if isinstance(result, RopeReport)):
        lines.append(f"- RoPE bound: {'holds' if report.holds else 'violated'} at {report.claimed_context} tokens")
    shown = "" if picture is None else f"\n![How far {model} remembers]({picture})\n"
    return f"---\n{header}\n---\n\n## How far it remembers\n\n" + "\n".join(lines) + "\n" + shown


def _shown(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _entries(result):
    if isinstance(result, ForgettingCurve) and result.points:
        for name, length in (("fine", result.fine_length), ("coarse", result.coarse_length)):
            more = ", more than" if length.open_ended else ""
            yield _entry(result, "forgetting_curve", f"{name} memory length{more} (tokens)", int(length))
    elif isinstance(result, PositionLoss):
        name = f"perplexity of {result.context_length} tokens"
        yield _entry(result, "perplexity", name, round(float(result.perplexity[-1]), 4))
    elif isinstance(result, NeedleGrid) and result.cells:
        rate, how = _rate(result.cells)
        name = f"needle in a haystack, {how} up to {result.lengths[-1]} tokens"
        yield _entry(result, "accuracy", name, round(rate, 4))
    elif isinstance(result, LineRetrieval) and result.points:
        rate, how = _rate(result.points)
        name = f"line retrieval, {how} up to {result.points[-1].lines} lines"
        yield _entry(result, "accuracy", name, round(rate, 4))


def _rate(parts):
    """The mean of the first score there is, and what it says."""
    score = parts[0].scores[0]
    mean = sum(getattr(part, score) for part in parts) / len(parts)
    return mean, "found" if score == "match_rate" else "token for token"


def _entry(result, metric, name, value):
    data, kind = _dataset(result)
    arguments = {key: result.settings[key] for key in ("seed", "repeats") if key in result.settings}
    return EvalResult(
        task_type="text-generation",
        dataset_type=kind,
        dataset_name=data,
        metric_type=metric,
        metric_name=name,
        metric_value=value,
        metric_args=arguments or None,
    )


def _dataset(result):
    """Name and identifier of what it was measured on."""
    if isinstance(result, LineRetrieval):
        return "generated records", "line-retrieval"
    if result.settings.get("data_type") == "random":
        return "random tokens", "random-tokens"
    name = result.settings.get("corpus", "text")
    return str(name), re.sub(r"[^\w./-]+", "-", str(name).lower())
