"""Render a model's results as one HTML page: an overview, figures, tables and settings.

The page is self-contained, with inline SVG figures, and every string from a result is escaped. Rendering requires
matplotlib and jinja2.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from .. import style  # noqa: F401 - raises without matplotlib, before anything is measured
from ..result import Result, rounded
from .conclusion import conclusion, facts


if TYPE_CHECKING:
    from jinja2 import Template


def write_report(
    results: Sequence[Result],
    path: str | PathLike,
    *,
    title: str | None = None,
    missing: Mapping[str, str] | None = None,
) -> None:
    """Write an HTML page with the results of one model.

    Args:
        results: results of any metrics, in page order.
        path: path of the HTML file.
        title: heading (default: the name of the model).
        missing: reason why a metric was not measured or not completed, by title.

    Raises:
        ImportError: matplotlib or jinja2 is missing.
    """
    from ... import __version__

    html = template().render(
        title=title or f"How far {results[0].model_name} remembers",
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


def overview(result: Result) -> list[tuple[str, str, str, str]]:
    """Return name, value, interval and sample of each number in a result; unknown entries are empty."""
    rows = [(n.name, rounded(n.value), n.interval(), n.sample) for n in result.numbers()]
    return rows or [("", "nothing measured", "", "")]


def template() -> Template:
    """Return the page's jinja2 template, with autoescaping."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("The report needs jinja2: pip install 'hf-longctx[plot]'") from error
    loader = PackageLoader(__name__.rpartition(".")[0], package_path="")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("page.html.j2")


def settings(result: Result) -> list[tuple[str, str]]:
    """Return the settings of a result as strings."""
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in result.settings.items()]


def svg(result: Result) -> str | None:
    """Return the figure of a result as SVG in base64; None if nothing was measured."""
    if not result.measured:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figure.svg"
        result.plot(file, train_length=result.settings.get("train_length"))
        return base64.b64encode(file.read_bytes()).decode()
