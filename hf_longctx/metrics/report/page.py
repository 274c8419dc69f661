"""Render the results of a model as an HTML page with conclusions, an overview, figures, tables and settings.

The page is self-contained: figures are inline SVG. All strings from results are escaped. Rendering needs matplotlib.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from .. import style  # noqa: F401 - raises without matplotlib, before anything is measured
from ..result import Result, plural, rounded
from ..retrieval.answers import Retrieval
from ..tasks.curve import ForgettingCurve
from ..tasks.loss import PositionLoss
from .effective import RULES


def write_report(
    results: Sequence[Result],
    path: str | PathLike,
    *,
    title: str | None = None,
    missing: Mapping[str, str] | None = None,
) -> None:
    """Write an HTML page with the results of one model.

    Args:
        results: results of any metrics, in the order they appear on the page.
        path: path of the HTML file.
        title: heading (default: the name of the model).
        missing: reasons why metrics were not measured or not completed, keyed by the title of the metric.

    Raises:
        ImportError: matplotlib is missing.
    """
    from ... import __version__

    cache = next((result.settings["cache"] for result in results if result.settings.get("cache")), None)
    name = results[0].model_name
    html = template().render(
        title=title or f"How far {name} remembers" + (f" with the cache {cache}" if cache else ""),
        conclusion=conclusion(results),
        facts=facts(results),
        rows=overview,
        sections=[(result, svg(result), settings(result)) for result in results],
        missing=missing or {},
        partial={result.title for result in results},
        version=__version__,
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    Path(path).write_text(html, encoding="utf-8")


def conclusion(results: Sequence[Result]) -> list[str]:
    """Return up to three sentences: how far the model copies (roughly and exactly), and what it retrieves.

    If it could not be shown that a server is neutral, these sentences are followed by the `doubts`.
    """
    measured = [result for result in results if result.measured]
    curve = next((result for result in measured if isinstance(result, ForgettingCurve)), None)
    loss = next((result for result in measured if isinstance(result, PositionLoss)), None)
    sentences = []
    if curve is not None:
        sentences = [curve.copies_in_words(), curve.exact_in_words()]
    elif loss is not None:
        end = loss.context_length
        sentences = [f"The loss after {end:,} tokens is {loss.smoothed_at(end)} nats; more context was not tried."]
    sentences += [found(result) for result in measured if isinstance(result, Retrieval)][: 3 - len(sentences)]
    return [*sentences, *dict.fromkeys(doubt for result in measured for doubt in getattr(result, "doubts", ()))]


def found(result: Retrieval) -> str:
    """Describe the largest length at which the model answers at least 85 % of the questions."""
    what, scores = result.hidden, result.by_length()
    good = [score for score in scores if score.right >= RULES["ours"] * score.asked]
    score = good[-1] if good else scores[0]
    tokens, count = score.tokens, f"{score.right:.0f} of {plural(score.asked, 'question')}"
    if good:
        return f"Finds {what} of up to {tokens:,} tokens ({count})."
    return f"Does not find {what}, not even of {tokens:,} tokens ({count})."


def facts(results: Sequence[Result]) -> str:
    """Return the known facts in one line: number of parameters, dtype and hardware.

    >>> facts([ForgettingCurve.of_points([], {"parameters": 5_300_000, "dtype": "float32", "hardware": "AMD EPYC"})])
    '5,300,000 parameters, float32, AMD EPYC'
    """
    known: dict[str, Any] = {}
    for result in results:
        known |= {name: value for name, value in result.settings.items() if value is not None}
    parts = [f"{known['parameters']:,} parameters"] if "parameters" in known else []
    return ", ".join(parts + [str(known[name]) for name in ("dtype", "hardware", "endpoint") if name in known])


def overview(result: Result) -> list[tuple[str, str, str, str]]:
    """Return name, value, interval and sample size of each number in a result. Missing values are empty strings."""
    rows = [(n.name, rounded(n.value), n.interval(), n.sample) for n in result.numbers()]
    return rows or [("", "nothing measured", "", "")]


def template() -> Any:
    """Return the page's jinja2 template. It escapes all values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader(__name__.rpartition(".")[0], package_path="")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("page.html.j2")


def settings(result: Result) -> list[tuple[str, str]]:
    """Return the names and values of a result's settings as strings."""
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in result.settings.items()]


def svg(result: Result) -> str | None:
    """Return the figure of a result as base64-encoded SVG. If nothing was measured, return None."""
    if not result.measured:
        return None
    return base64.b64encode(result.picture("svg", train_length=result.settings.get("train_length"))).decode()
