"""One HTML page from results: an overview, pictures, tables of numbers, settings. The page needs no other file.

Every text that comes from a result is escaped. Pictures are SVG within the page. It needs matplotlib and jinja2.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

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
    """Write the page of one or more results.

    Args:
        results: of one model or of several, of any metric, in the order of the page. Forgetting curves of several
            models are drawn into one picture first.
        path: of the HTML file.
        title: heading; by default the names of the models.
        missing: why a metric was not measured, or not to its end, by its title.

    Raises:
        ImportError: matplotlib or jinja2 is missing.
    """
    from ... import __version__
    from .comparison import comparable, plot_comparison

    models = list(dict.fromkeys(result.model_name for result in results)) or ["a model"]
    if title is None:
        title = f"How far {' and '.join(models)} remember{'s' if len(models) == 1 else ''}"
    curves = comparable(results)
    html = template().render(
        title=title,
        several_models=len(models) > 1,
        comparison=svg(lambda path: plot_comparison(curves, path)) if len(curves) > 1 else None,
        conclusions=conclusions(results),
        rows=overview,
        sections=[section(result) for result in results],
        missing=missing or {},
        partial={result.title for result in results},
        version=__version__,
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    Path(path).write_text(html, encoding="utf-8")


def overview(result: Result) -> list[tuple[str, str, str, str]]:
    """Return name, value, interval and sample of each number of a result; empty where there is nothing to say."""
    rows = [(n.name, rounded(n.value), n.interval(), n.sample) for n in result.numbers()]
    return rows or [("", "nothing measured", "", "")]


def conclusions(results: Sequence[Result]) -> list[tuple[str, str, list[str]]]:
    """Return name, size and hardware, and sentences of conclusion for each model that has some."""
    models: dict[str, list[Result]] = {}
    for result in results:
        models.setdefault(result.model_name, []).append(result)
    return [(name, facts(several), conclusion(several)) for name, several in models.items()]


def template() -> Template:
    """Return the page's jinja2 template; what is filled in is escaped."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("The report needs jinja2: pip install 'hf-longctx[plot]'") from error
    loader = PackageLoader(__name__.rpartition(".")[0], package_path="")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("page.html.j2")


def section(result: Result) -> tuple[str, Result, list[str], list[tuple[str, str]]]:
    """Return heading, result, pictures, and settings as texts."""
    pictures = []
    if result.measured:
        pictures = [svg(lambda path: result.plot(path, train_length=result.settings.get("train_length")))]
    settings = [
        (name, value if isinstance(value, str) else json.dumps(value)) for name, value in result.settings.items()
    ]
    return f"{result.title}: {result.model_name}", result, pictures, settings


def svg(draw: Callable[[Path], None]) -> str:
    """Return the picture that `draw(path)` draws, as SVG in base64."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.svg"
        draw(file)
        return base64.b64encode(file.read_bytes()).decode()
