"""Saved results of any metric, read again: for pictures, tables, reports and model cards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .curve.result import ForgettingCurve
from .loss.result import PositionLoss
from .retrieval.haystack import NeedleGrid
from .retrieval.lines import LineRetrieval
from .rope.verdict import RopeLayers, RopeReport


KINDS = {
    "forgetting_curve": ForgettingCurve,
    "position_loss": PositionLoss,
    "needle": NeedleGrid,
    "line_retrieval": LineRetrieval,
}
Result = ForgettingCurve | PositionLoss | NeedleGrid | LineRetrieval | RopeReport


def read_result(path) -> Result:
    """The result in a JSON file: of a `save`, of `RopeReport.to_json`, or of `evaluate.save` with our modules.

    Raises:
        ValueError: the file is no JSON, or none of these results; it is named.
        FileNotFoundError: there is no such file.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        document = json.loads(text)
        kind = kind_of(document)
        if kind is RopeReport:
            return _rope_report(document)
        return kind.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is no saved result of ours: {reason}") from error


def kind_of(document) -> type:
    """Which class a JSON object is a result of."""
    if isinstance(document, dict):
        if document.get("metric") in KINDS:
            return KINDS[document["metric"]]
        if {"claimed_context", "groups"} <= document.keys():
            return RopeReport
        if {"settings", "points"} <= document.keys():
            return ForgettingCurve
    raise ValueError(f"expected a result of {', '.join(KINDS)} or rope.")


def _rope_report(document):
    fields = {name: document[name] for name in ("model", "claimed_context", "claimed_by", "caveat")}
    groups = [{name: value for name, value in group.items() if name != "verdict"} for group in document["groups"]]
    return RopeReport(**fields, groups=tuple(RopeLayers(**group) for group in groups), notes=tuple(document["notes"]))


def model_name(result: Result, path=None) -> str:
    """The model's name on the Hub, the last part of its folder, or else the name of the file."""
    name = result.model if isinstance(result, RopeReport) else result.settings.get("model")
    if not name:
        return Path(path).stem if path else "a model"
    name = str(name).rstrip("/")
    return name if name.count("/") <= 1 and not name.startswith("/") else name.rpartition("/")[2]


def named(results: list[tuple[Path, Result]]) -> dict[str, Result]:
    """Results by the name of their model, with the name of the file behind it where two share one."""
    names = [model_name(result, path) for path, result in results]
    unique = {}
    for name, (path, result) in zip(names, results):
        own = name if names.count(name) == 1 else f"{name} ({path.stem})"
        while own in unique:
            own += "'"
        unique[own] = result
    return unique


def comparison_table(curves: Mapping[str, ForgettingCurve], train_lengths: Mapping[str, int] | None = None) -> str:
    """The fine and the coarse lengths of several models as a Markdown table, in tokens.

    >>> print(comparison_table({}))
    | model | data | fine length | coarse length | next tested | measured | training context |
    |---|---|---|---|---|---|---|
    <BLANKLINE>
    """
    rows = [
        "| model | data | fine length | coarse length | next tested | measured | training context |",
        "|---" * 7 + "|",
    ]
    for name, curve in curves.items():
        fine, coarse = curve.fine_length, curve.coarse_length
        after = ", ".join("-" if x.next_tested is None else str(x.next_tested) for x in (fine, coarse))
        reach = f"{curve.points[0].length} to {curve.points[-1].length}"
        cells = [name.replace("|", r"\|"), curve.settings.get("data_type", "-"), fine, coarse, after, reach]
        rows.append(f"| {' | '.join(map(str, cells))} | {(train_lengths or {}).get(name, '-')} |")
    return "\n".join(rows) + "\n"
