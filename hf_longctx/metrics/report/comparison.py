"""Compare several models on one metric, in a figure and a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .. import style
from ..curve.lengths import METHODS
from ..curve.plot import areas, logarithmic, ribbon
from ..result import Result
from ..task import TaskResult
from ..tasks.curve import ForgettingCurve
from ..tasks.loss import PositionLoss, draw_losses
from .effective import effective_length, effective_rows
from .paired import conclusion, further, paired_differences


if TYPE_CHECKING:
    from matplotlib.axes import Axes

R = TypeVar("R", bound=Result)


def compare(results: Mapping[str, Any], path: str | PathLike, *, title: str | None = None) -> str:
    """Draw the results of several models in one figure, or write their table to a file.

    Args:
        results: results of one metric by model name, in the order of the figure: `curve`, `loss`, or any metric that
            counts right answers by length.
        path: path of a PNG, SVG or PDF, or of a Markdown file (.md) for the title and the returned text.
        title: see `plot_comparison`.

    Returns:
        sentences on which model remembers more, followed by the numbers as a Markdown table, a warning for each
        setting that differs, the tests of `paired_text`, and effective lengths under three rules.

    Raises:
        ValueError: the results are from different metrics, or from one that cannot be compared; see also
            `plot_comparison`.
    """
    kinds = {type(result) for result in results.values()}
    if len(kinds) != 1 or not issubclass(next(iter(kinds)), TaskResult):
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
        raise ValueError(f"these results are {names}; give results of one metric: curve, loss, needle, lines.")
    check_measured(results)
    first, different = next(iter(results.values())), differences(results)
    conclusions, tests = paired_text(results)
    text = "\n\n".join([*conclusions, table(results)])
    text += "".join(f"\nDifferent: {difference}.\n" for difference in different) + tests
    if not isinstance(first, PositionLoss):
        text += f"\n{markdown(*effective_rows(results))}"
    if Path(path).suffix == ".md":
        Path(path).write_text(f"# {title or first.title}\n\n{text}", encoding="utf-8")
    elif isinstance(first, ForgettingCurve):
        plot_comparison(results, path, train_lengths=train_lengths_of(results), title=title)
    elif isinstance(first, PositionLoss):
        figure = style.figure(*first.inches)
        losses = [loss.with_settings(model=name) for name, loss in results.items()]
        draw_losses(figure, losses, title or first.title, differences=different)
        style.save(figure, path)
    else:
        shares = {name: shares_by_length(result) for name, result in results.items()}
        plot_shares(shares, path, title=title or first.title, unit=first.size_unit, different=different)
    return text


def table(results: Mapping[str, Any]) -> str:
    """Return the metrics of several models as a Markdown table."""
    first = next(iter(results.values()))
    if isinstance(first, ForgettingCurve):
        return comparison_table(results, train_lengths_of(results))
    if isinstance(first, PositionLoss):
        return loss_table(results)
    shares = {name: shares_by_length(result) for name, result in results.items()}
    lengths = sorted(set().union(*shares.values()))
    rows = [(name, *(f"{row[n]:.1%}" if n in row else "-" for n in lengths)) for name, row in shares.items()]
    return markdown(("model", *(f"{n} {first.size_unit}" for n in lengths)), rows)


def train_lengths_of(curves: Mapping[str, TaskResult]) -> dict[str, int]:
    """Return the training context, in tokens, of each model whose result records it."""
    known = {name: curve.settings.get("train_length") for name, curve in curves.items()}
    return {name: length for name, length in known.items() if length is not None}


def paired_text(results: Mapping[str, TaskResult]) -> tuple[list[str], str]:
    """Return sentences on how each model differs from the first, and Markdown tables of the tests."""
    (name, first), *others = results.items()
    said, text = [], ""
    for other, second in others:
        try:
            differences = paired_differences(first, second)
        except ValueError as error:
            said.append(" ".join(further(name, other, first, second)) or reaches({name: first, other: second}))
            text += f"\nNot tested length by length, {other} against {name}: {error}\n"
            continue
        said.append(conclusion(name, other, first, second, differences))
        columns = (
            first.size_unit,
            name,
            other,
            "difference",
            "95 % interval",
            "p",
            "p of all lengths (Holm)",
            "pairs",
        )
        rows = [
            (
                *("mean" if d.length is None else d.length, f"{d.first:.1%}", f"{d.second:.1%}"),
                f"{d.second - d.first:+.1%}",
                "-" if d.low == -np.inf else f"{d.low:+.1%} to {d.high:+.1%}",
                *(f"{d.p:.2g}", f"{d.holm:.2g}", d.pairs),
            )
            for d in differences
        ]
        text += f"\n{markdown(columns, rows)}"
    return [sentence for sentence in said if sentence], text


def reaches(results: Mapping[str, TaskResult]) -> str:
    """Describe how far each of several curves reaches; an empty string for other results."""
    ends = []
    for name, curve in results.items():
        if isinstance(curve, ForgettingCurve):
            interval, size = curve.interval("coarse"), curve.settings.get("bytes_per_token") or 0
            tokens = f"{interval.in_words()} tokens" if interval.significant else "not known"
            longest = f", {interval.low * size:,.0f} bytes" if size * interval.low else ""
            ends.append(f"{name} {tokens}{longest}{' (the longest tested)' * interval.longest}")
    return f"Which copies further is not significant: {'; '.join(ends)}." if ends else ""


def check_measured(results: Mapping[str, TaskResult]) -> None:
    """Raise ValueError if `results` is empty, or a result does not contain measurements."""
    empty = [name for name, result in results.items() if not result.measured]
    if empty or not results:
        raise ValueError(f"results must hold measurements, got nothing from {', '.join(empty) or 'an empty list'}.")


def named(results: Sequence[tuple[Path, R]]) -> dict[str, R]:
    """Return results by the last part of the model's name, with the file name appended if two models share it.

    A model without a name gets the name of its file.
    """
    names = [
        result.model_name.rpartition("/")[2] if result.settings.get("model") else path.stem or "a model"
        for path, result in results
    ]
    unique = {}
    for name, (path, result) in zip(names, results):
        key = name if names.count(name) == 1 else f"{name} ({path.stem or result.model_name})"
        while key in unique:
            key += "'"
        unique[key] = result
    return unique


def conditions(result: TaskResult) -> dict[str, str]:
    """Return the settings of a result that must match when models are compared."""
    settings = {name: str(value) for name, value in result.settings.items() if value is not None}
    names = {"data_type": "data", "corpus": "texts", "tokenizer": "tokenizers", "protocol": "protocols"}
    same = {words: settings[name] for name, words in names.items() if name in settings}
    if "corpus" not in settings and "corpus_sha256" in settings:
        same["texts"] = settings["corpus_sha256"][:8]
    return same | result.extent()


def differences(results: Mapping[str, TaskResult]) -> list[str]:
    """Describe the settings in which the measurements of these results differ.

    >>> def curve(data):
    ...     return PositionLoss.of_mean([1.0], 4, {"data_type": data, "tokenizer": "models/" + data})
    >>> differences({"fox": curve("order"), "llama": curve("random")})
    ['data (order, random)', 'tokenizers, whose tokens differ in size (order, random)']
    """
    values: dict[str, dict[str, None]] = {}  # values of each setting; a dictionary serves as an ordered set
    for result in results.values():
        for words, value in conditions(result).items():
            values.setdefault(words, {})[Path(value).name] = None
    if len({result.settings.get("corpus_sha256", index) for index, result in enumerate(results.values())}) == 1:
        values.pop("tokenizers", None)  # same token hash, so two names of one tokenizer
    comment = {"tokenizers": ", whose tokens differ in size"}
    return [f"{w}{comment.get(w, '')} ({', '.join(several)})" for w, several in values.items() if len(several) > 1]


def markdown(columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table, with bars in cells escaped."""
    lines = [[str(cell).replace("|", r"\|") for cell in row] for row in (columns, *rows)]
    header, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([header, "|---" * len(lines[0]) + "|", *body]) + "\n"


def comparison_table(curves: Mapping[str, ForgettingCurve], train_lengths: Mapping[str, int] | None = None) -> str:
    """Return the memory lengths of several models in tokens, as a Markdown table.

    Raises:
        ValueError: `curves` is empty, or a curve does not have points.
    """
    check_measured(curves)
    rows = []
    for name, curve in curves.items():
        row = {"model": name, "data": curve.settings.get("data_type", "-")}
        row |= {f"{method}, 95 % CI": curve.interval(method).in_words() for method in METHODS}
        row["paper's fine, coarse"] = f"{curve.fine_length}, {curve.coarse_length}"
        effective = effective_length(curve)
        row["effective (85 % copied)"] = f"{effective.tokens}; {effective.interval}"
        row["measured"] = f"{curve.points[0].length} to {curve.points[-1].length}"
        row["training context"] = (train_lengths or {}).get(name, "-")
        row["bytes per token"] = curve.settings.get("bytes_per_token", "-")
        rows.append(row)
    if all(row["bytes per token"] == "-" for row in rows):  # random data
        rows = [{column: row[column] for column in row if column != "bytes per token"} for row in rows]
    return markdown(list(rows[0]), [row.values() for row in rows])


def loss_table(losses: Mapping[str, PositionLoss]) -> str:
    """Return the per-token losses of several models as a Markdown table, in nats, smoothed, with standard errors."""
    columns = ("model", "loss in the middle", "loss at the end", "perplexity", "tokens", "sequences")
    rows = [
        (
            *(name, loss.smoothed_at(loss.context_length // 2 + 1), loss.smoothed_at(loss.context_length)),
            *(f"{loss.perplexity[-1]:.2f}", loss.context_length, loss.sequences),
        )
        for name, loss in losses.items()
    ]
    return markdown(columns, rows)


def shares_by_length(result: TaskResult) -> dict[int, float]:
    """Return the mean share of right answers by length."""
    return {counts.length: float(counts.shares.mean()) for counts in result.by_length()}


def compare_counts(
    models: Mapping[str, list[tuple[int, int, int]]], path: str | PathLike, *, title: str | None = None
) -> str:
    """Draw right answers by length, from any benchmark, and return effective lengths under three rules.

    Args:
        models: rows of (length in tokens, right answers, answers) by model name; see `read_counts`.
        path: see `compare`.
        title: see `compare`.

    Returns:
        a Markdown table.

    Raises:
        ValueError: counts are impossible, or matplotlib does not support the extension.
    """
    text = markdown(*effective_rows(models))
    if Path(path).suffix == ".md":
        Path(path).write_text(f"# {title or 'Effective length'}\n\n{text}", encoding="utf-8")
    else:
        shares = {name: {n: right / answers for n, right, answers in sorted(rows)} for name, rows in models.items()}
        plot_shares(shares, path, title=title or "Right answers by length")
    return text


def plot_shares(
    models: Mapping[str, Mapping[int, float]],
    path: str | PathLike,
    *,
    title: str,
    unit: str = "tokens",
    different: Sequence[str] = (),
) -> None:
    """Draw the shares of each model as a line; the figure lists `different`, see `differences`."""
    figure = style.figure(style.WIDTH, 4.6)
    axes = figure.add_subplot()
    for (name, shares), colour, marker in zip(models.items(), cycle(style.MODELS), cycle(style.MARKERS)):
        line: dict[str, Any] = dict(color=colour, marker=marker, label=style.literal(name))
        axes.plot([*shares], [*shares.values()], **line)
    style.percent_axis(axes)
    style.grid(axes)
    if all(logarithmic([*shares]) for shares in models.values()):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({n for shares in models.values() for n in shares}))
    axes.xaxis.set_major_formatter(style.TOKENS)
    style.strip_frame(axes, f"length of the prompt ({unit})", "questions answered")
    axes.minorticks_off()
    style.name_differences(axes, different)
    style.titled_legend(figure, axes.get_legend_handles_labels()[0], title)
    style.save(figure, path)


def plot_comparison(
    curves: Mapping[str, ForgettingCurve],
    path: str | PathLike,
    *,
    train_lengths: Mapping[str, int] | None = None,
    title: str | None = None,
) -> None:
    """Draw the copy accuracy of several models over the length of the target, and how far each one remembers.

    The upper panel shows means over repeats with ribbons of one population standard deviation, and a grey band of the
    LM accuracies of all models. The lower panel shows a bar for each model up to its longest length, coloured as in
    its own figure. A tick on a bar marks the length whose two readings fill the training context. The figure lists
    settings that differ.

    Args:
        curves: curves by model name, in the order of the bars.
        path: see `Result.plot`.
        train_lengths: training context of each model in tokens, where known.
        title: see `Result.plot`.

    Raises:
        ValueError: `curves` is empty, a curve does not have points, or matplotlib does not support the extension.
    """
    check_measured(curves)
    figure = style.figure(style.WIDTH, 5.2 + 0.5 * len(curves))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4.2, 0.4 + 0.5 * len(curves)])
    log = all(logarithmic([p.length for p in curve.points]) for curve in curves.values())
    shortest = min(curve.points[0].length for curve in curves.values())
    longest = max(curve.points[-1].length for curve in curves.values())
    left, right = (shortest / 1.15, longest * 1.05) if log else (0, longest * 1.02)
    draw_curves(above, curves)
    if log:
        above.set_xscale("log", base=2)
        above.set_xticks([n for n in (2**i for i in range(32)) if left <= n <= right])
    above.set_xlim(left, right)
    below.xaxis.set_major_formatter(style.TOKENS)
    for axes in (above, below):
        axes.minorticks_off()
    style.strip_frame(above, up="tokens copied right")
    style.strip_frame(below, "length of the passage to copy (tokens)")
    drawn = draw_bars(below, curves, train_lengths or {}, left, log)
    style.name_differences(above, differences(curves))
    keys = [
        style.Patch(**style.area(style.STRONG, area), label=words)
        for area, words in style.AREAS.items()
        if area in drawn
    ]
    below.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9, ncols=4)
    style.titled_legend(figure, above.get_legend_handles_labels()[0], title or "Forgetting curves")
    mark = ["black mark: where both readings fill the training context"] if train_lengths else []
    style.small_print(figure, *notes(curves), *mark)
    style.save(figure, path)


def draw_curves(axes: Axes, curves: Mapping[str, ForgettingCurve]) -> None:
    """Draw each model's copy accuracy as a line with a ribbon, over one band with the LM accuracies of all models."""
    draw_guesses(axes, curves)
    for (name, curve), colour, marker in zip(curves.items(), cycle(style.MODELS), cycle(style.MARKERS)):
        lengths = [p.length for p in curve.points]
        copy = [(p.copy_mean, p.copy_std) for p in curve.points]
        axes.fill_between(lengths, *ribbon(copy), color=colour, alpha=0.13, linewidth=0)
        line: dict[str, Any] = dict(
            color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=style.literal(name)
        )
        axes.plot(lengths, [mean for mean, _ in copy], **line)
    style.percent_axis(axes)
    style.grid(axes)


def draw_guesses(axes: Axes, curves: Mapping[str, ForgettingCurve]) -> None:
    """Draw the band from the lowest to the highest LM accuracy."""
    ranges = [([p.length for p in curve.points], [p.lm_mean for p in curve.points]) for curve in curves.values()]
    lengths = np.unique([np.geomspace(points[0], points[-1], 500) for points, _ in ranges])
    guesses = [np.interp(lengths, *points, left=np.nan, right=np.nan) for points in ranges]
    band: dict[str, Any] = dict(facecolor=style.QUIET, alpha=0.3, edgecolor=style.QUIET, linewidth=1, zorder=1)
    axes.fill_between(
        lengths, np.nanmin(guesses, axis=0), np.nanmax(guesses, axis=0), **band, label="LM accuracy of all"
    )


def mark_place(curve: ForgettingCurve, train_length: int | None, left: float) -> float | None:
    """Return the length whose input fills the training context; None if unknown or outside the plotted bar."""
    length = ((train_length or 0) - 3) / 2
    return length if left < length <= curve.points[-1].length else None


def draw_bars(
    axes: Axes, curves: Mapping[str, ForgettingCurve], train_lengths: Mapping[str, int], left: float, log: bool
) -> set[str]:
    """Draw a bar for each model, the first on top, with its two lengths in words; return the areas drawn."""
    drawn = set()
    for row, (name, curve) in enumerate(curves.items()):
        for start, end, area in areas(curve, left, curve.points[-1].length, log):
            axes.barh(row, end - start, left=start, height=0.42, **style.area(style.STRONG, area))
            drawn.add(area)
        words = ", ".join(f"{method}: {curve.interval(method).in_words()}" for method in METHODS)
        place: dict[str, Any] = dict(xycoords=("axes fraction", "data"), va="center", fontsize=8.5, color=style.INK)
        axes.annotate(words, (0.005, row + 0.4), **place)
        mark = mark_place(curve, train_lengths.get(name), left)
        if mark is not None:
            axes.plot([mark, mark], [row - 0.29, row + 0.29], color=style.INK, linewidth=1.6)
    axes.set_yticks(
        range(len(curves)), [textwrap.fill(style.literal(name), 16, max_lines=2, placeholder="...") for name in curves]
    )
    for label, colour in zip(axes.get_yticklabels(), cycle(style.MODELS)):
        label.set_color(colour)
        label.set_fontsize(9)
    axes.set_ylim(len(curves) - 0.3, -0.4)
    return drawn


def notes(curves: Mapping[str, ForgettingCurve]) -> list[str]:
    """Return the footnotes of a figure: the number of repeats and the kind of data."""
    repeats = sorted({p.repeats for curve in curves.values() for p in curve.points})
    kinds = sorted({str(curve.settings["data_type"]) for curve in curves.values() if "data_type" in curve.settings})
    sizes = f"mean and standard deviation of {' or '.join(map(str, repeats))} repeats, lengths with 95 % CI"
    return [sizes, f"{' and '.join(kinds)} data"] if kinds else [sizes]
