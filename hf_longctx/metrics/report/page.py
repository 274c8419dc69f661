"""One HTML page from results: pictures, tables of numbers, settings. It needs nothing beside itself: no script, no link.

Every text that comes from a result is escaped. Pictures are SVG within the page; they need matplotlib.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path

from ..curve.result import ForgettingCurve
from ..loss.result import PositionLoss
from ..result import Result
from ..retrieval.haystack import NeedleGrid
from ..retrieval.lines import LineRetrieval
from ..rope.verdict import RopeReport
from .comparison import named, plot_comparison


TITLES = {
    ForgettingCurve: "Forgetting curve",
    PositionLoss: "Per-token loss",
    NeedleGrid: "Needle in a haystack",
    LineRetrieval: "Line retrieval",
    RopeReport: "RoPE bound",
}
EXPLAINED = {
    ForgettingCurve: "The model copies a text that it has read (copy accuracy), and is compared with itself after an "
    "unrelated text (LM accuracy). The fine length is the longest text copied with an accuracy above 99 %, the coarse "
    "length the longest copied at least 1 % better than guessed. Lengths are in tokens.",
    PositionLoss: "The mean negative log-probability of the i-th token of a text, in nats, given those before it. Where "
    "it stays level, more context is of no use to the model. P(l) is the perplexity of the first l tokens.",
    NeedleGrid: "One sentence is hidden in a long text, at several depths, and asked for at the end. {score}.",
    LineRetrieval: "The model is asked for the number in one of many lines. {score}.",
    RopeReport: "Whether the RoPE base keeps B_m at or above 0 over the distances that the claimed context needs.",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --quiet: #5f6b76; --page: #fff; --card: #f5f7f8; --line: #d9dee3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --quiet: #a3adb6; --page: #15191d; --card: #1f252b; --line: #39424b; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; } p.quiet, footer { color: var(--quiet); }
.summary { background: var(--card); border-left: 4px solid #57a55f; padding: .6rem 1rem; }
.missing { border-color: #e59a94; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; margin: .5rem 0; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
table.text th, table.text td { text-align: left; overflow-wrap: anywhere; }
pre { background: var(--card); padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; }
summary { cursor: pointer; color: var(--quiet); }
"""


def write_report(
    results: Sequence[Result], path, *, title: str | None = None, missing: Mapping[str, str] | None = None
) -> None:
    """Write the page.

    Args:
        results: of one model or of several, of any metric, in the order of the page. Forgetting curves of several
            models are drawn into one picture first.
        path: of the HTML file.
        title: heading; by default the names of the models.
        missing: why a metric was not measured, by its title.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is nothing to report.
    """
    if not results and not missing:
        raise ValueError("there is no result to report.")
    if title is None:
        models = list(dict.fromkeys(result.model_name for result in results)) or ["a model"]
        title = f"How far {' and '.join(models)} remember{'s' if len(models) == 1 else ''}"
    parts = [f"<h1>{escape(title)}</h1>"]
    curves = [(Path(), result) for result in results if isinstance(result, ForgettingCurve) and result.points]
    if len(curves) > 1:
        parts.append(
            section(
                "Forgetting curves",
                "",
                picture("Forgetting curves", lambda path: plot_comparison(named(curves), path)),
            )
        )
    parts += map(result_section, results)
    for metric, reason in (missing or {}).items():
        parts.append(section(metric, f'<p class="summary missing">Not measured: {escape(reason)}</p>'))
    from ... import __version__

    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts.append(f"<footer><p>Made by hf-longctx {escape(__version__)} on {now}.</p></footer>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n'
    Path(path).write_text(page + "\n".join(parts) + "\n</body></html>\n", encoding="utf-8")


def section(title, *parts):
    return "\n".join(("<section>", f"<h2>{escape(title)}</h2>", *filter(None, parts), "</section>"))


def result_section(result):
    """What was measured, in one line, as a picture, in numbers, and how."""
    kind, model = type(result), result.model_name
    heading, explained = f"{TITLES[kind]}: {model}", f'<p class="quiet">{escape(explanation(result))}</p>'
    if kind is RopeReport:
        verdict = "holds" if result.holds else "violated"
        summary = f"{verdict} at {result.claimed_context} tokens ({result.claimed_by})"
        return section(heading, explained, in_short(summary), f"<pre>{escape(str(result))}</pre>")
    drawn = picture(heading, lambda path: result.plot(path, **training(result))) if measured(result) else ""
    columns, rows = NUMBERS[kind](result)
    numbers = folded("Numbers", table(columns, rows))
    settings = folded("Settings", table(("setting", "value"), settings_rows(result.settings), text=True))
    return section(heading, explained, in_short(result.summary()), drawn, numbers, settings)


def explanation(result):
    """What the metric is, and which share the first of its scores is."""
    parts = measured(result) if isinstance(result, (NeedleGrid, LineRetrieval)) else ()
    found = parts and parts[0].scores[0] == "match_rate"
    score = (
        "answers found in the model's replies"
        if found
        else "answers that are the model's first choice, token for token"
    )
    return EXPLAINED[type(result)].replace("{score}", f"The score is the share of {score}")


def measured(result):
    """The parts of a result: points, cells or losses."""
    return next(getattr(result, name) for name in ("points", "cells", "loss") if hasattr(result, name))


def training(result):
    """The argument for the training context, where it is known and the picture has a place for it."""
    length = result.settings.get("train_length")
    return {} if length is None or isinstance(result, LineRetrieval) else {"train_length": length}


def in_short(summary):
    return f'<p class="summary">{escape(summary)}</p>'


def picture(subject, draw):
    """An image within the page of what `draw(path)` draws."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.svg"
        draw(file)
        data = base64.b64encode(file.read_bytes()).decode()
    # an image of its own: several SVG elements in one page would share their ids
    return f'<img alt="{escape(subject)}" src="data:image/svg+xml;base64,{data}">'


def folded(title, content):
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def table(columns, rows, text=False):
    """Rows of numbers, or of texts that keep to the left."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row)}</tr>\n" for row in rows)
    kind = ' class="text"' if text else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def settings_rows(settings):
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items()]


def curve_numbers(curve):
    columns = ("length", "scored tokens", "repeats", "copy", "± std", "LM", "± std", "p")
    return columns, [
        (
            *(p.length, p.scored_tokens, p.repeats),
            *(f"{value:.1%}" for value in (p.copy_mean, p.copy_std, p.lm_mean, p.lm_std)),
            f"{p.p_value:.2g}",
        )
        for p in curve.points
    ]


def loss_numbers(result):
    """The smoothed loss and the perplexity at powers of two and at the end."""
    ends = sorted({2**i for i in range(result.context_length.bit_length())} | {result.context_length})
    smooth, perplexity = result.smoothed(), result.perplexity
    rows = [(end, f"{smooth[end - 1]:.3f}", f"{perplexity[end - 1]:.2f}") for end in ends]
    return ("tokens", "L(i), smoothed", "P(l)"), rows


def needle_numbers(result):
    rows = [
        (cell.length, f"{cell.depth:.0%}", *(f"{rate:.1%}" for rate in cell.rates().values()), len(cell.answers))
        for cell in result.cells
    ]
    return ("length", "depth", *score_columns(result.cells), "haystacks"), rows


def lines_numbers(result):
    rows = [
        (
            point.lines,
            f"{point.mean_tokens:.0f}",
            *(f"{rate:.1%}" for rate in point.rates().values()),
            len(point.answers),
        )
        for point in result.points
    ]
    return ("lines", "tokens", *score_columns(result.points), "records"), rows


def score_columns(parts):
    names = {"match_rate": "found", "exact_rate": "token for token", "probability": "probability"}
    return [names[score] for score in parts[0].scores] if parts else ()


NUMBERS = {
    ForgettingCurve: curve_numbers,
    PositionLoss: loss_numbers,
    NeedleGrid: needle_numbers,
    LineRetrieval: lines_numbers,
}
