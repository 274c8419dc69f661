"""Results of one metric and of several models, in one picture and in one table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from .. import style
from ..curve.plot import area_ends, in_tokens, ribbon
from ..curve.result import ForgettingCurve
from ..loss.plot import plot_losses
from ..loss.result import PositionLoss
from ..result import Result


def compare(results: Mapping[str, Result], path, *, title: str | None = None) -> str:
    """Draw the results of several models into one picture.

    Args:
        results: by the name of the model, in the order of the picture; all forgetting curves, or all per-token losses.
        path, title: as for `plot_comparison`.

    Returns:
        the numbers, as lines of text.

    Raises:
        ValueError: the results are of several metrics, or of one that has no such picture; or see `plot_comparison`.
    """
    classes = {type(result) for result in results.values()}
    if classes == {ForgettingCurve}:
        lengths = {name: curve.settings.get("train_length") for name, curve in results.items()}
        lengths = {name: length for name, length in lengths.items() if length is not None}
        plot_comparison(results, path, train_lengths=lengths, title=title)
        return comparison_table(results, lengths)
    if classes == {PositionLoss}:
        plot_losses([loss.with_settings(model=name) for name, loss in results.items()], path, title=title)
        return "".join(f"{name}: {loss.summary()}\n" for name, loss in results.items())
    names = ", ".join(sorted(cls.__name__ for cls in classes))
    raise ValueError(f"these results are {names}; give forgetting curves only, or per-token losses only.")


def comparable(results: list[Result]) -> dict[str, Result]:
    """The results that one picture can show together, by the names of their models: the curves that have points."""
    return named([(Path(), result) for result in results if isinstance(result, ForgettingCurve) and result.measured])


def named(results: list[tuple[Path, Result]]) -> dict[str, Result]:
    """Results by the name of their model, with the name of the file behind it where two models share a name.

    A model without a name is called after its file.
    """
    names = [result.model_name if result.settings.get("model") else path.stem or "a model" for path, result in results]
    unique = {}
    for name, (path, result) in zip(names, results):
        key = name if names.count(name) == 1 else f"{name} ({path.stem})"
        while key in unique:
            key += "'"
        unique[key] = result
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
        after = ", ".join("-" if length.next_tested is None else str(length.next_tested) for length in (fine, coarse))
        measured = f"{curve.points[0].length} to {curve.points[-1].length}"
        cells = [name.replace("|", r"\|"), curve.settings.get("data_type", "-"), fine, coarse, after, measured]
        rows.append(f"| {' | '.join(map(str, cells))} | {(train_lengths or {}).get(name, '-')} |")
    return "\n".join(rows) + "\n"


def plot_comparison(
    curves: Mapping[str, ForgettingCurve],
    path,
    *,
    train_lengths: Mapping[str, int] | None = None,
    title: str | None = None,
) -> None:
    """Draw the copy accuracy of several models over the length of the target, and how far each one remembers.

    Above, means over repeats in ribbons of one population standard deviation to each side, with the LM accuracy as a
    dotted line. Below, a bar for each model: green up to its fine length, blue up to its coarse length, red beyond, as
    far as it was measured. A tick on the bar is the length whose input is as long as the training context.

    Args:
        curves: by the name of the model, in the order of the bars.
        path, title: as for `Result.plot`.
        train_lengths: context length of the training, in tokens, of those models where it is known.

    Raises:
        ValueError: there is no curve, a curve has no point, or matplotlib does not know the extension.
    """
    empty = [name for name, curve in curves.items() if not curve.points]
    if empty or not curves:
        raise ValueError(f"no length was measured: {', '.join(empty) or 'there is no curve'}.")
    figure = style.figure(9.5, 5.2 + 0.36 * len(curves))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4.4, 0.5 + 0.36 * len(curves)])
    left = min(curve.points[0].length for curve in curves.values()) / 1.15
    longest = max(curve.points[-1].length for curve in curves.values())
    draw_curves(above, curves)
    above.set_xscale("log", base=2)
    above.set_xlim(left, longest * (longest / left) ** 0.17)  # room for the words behind the bars
    above.set_xticks([n for n in (2**i for i in range(32)) if left <= n <= longest * 1.05])
    below.xaxis.set_major_formatter(style.TOKENS)
    for axes in (above, below):
        axes.minorticks_off()
    style.bare(above, up="tokens copied right\n(dotted: guessed right)")
    style.bare(below, "length of the text to copy (tokens)")
    draw_bars(below, curves, train_lengths or {}, left)

    style.titled_legend(figure, above.get_lines()[::2], title or "Forgetting curves", fontsize=9)
    style.legend(figure, [style.Patch(color=colour, label=area) for area, colour in style.STRONG.items()])
    style.small_print(figure, *notes(curves), *(["black mark: training context"] if train_lengths else []))
    figure.savefig(path)


def draw_curves(axes, curves: Mapping[str, ForgettingCurve]) -> None:
    """Copy accuracy in its ribbon, LM accuracy dotted, two lines for each model."""
    for (name, curve), colour, marker in zip(curves.items(), cycle(style.MODELS), cycle(style.MARKERS)):
        lengths = [p.length for p in curve.points]
        copy = [(p.copy_mean, p.copy_std) for p in curve.points]
        axes.fill_between(lengths, *ribbon(copy), color=colour, alpha=0.13, linewidth=0)
        line = dict(color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=name)
        axes.plot(lengths, [mean for mean, _ in copy], **line)
        axes.plot(lengths, [p.lm_mean for p in curve.points], color=colour, linewidth=1, linestyle=":")
    style.rates(axes)
    style.grid(axes)


def bar_ends(curve: ForgettingCurve, left: float) -> list[float]:
    """Where the fine, the coarse and the amnesia part of a bar from `left` end, the last at the longest length."""
    end = curve.points[-1].length
    return [*area_ends(curve, left, end), end]


def mark_place(curve: ForgettingCurve, train_length: int | None, left: float) -> float | None:
    """The length whose input is as long as the training context; None where that is unknown or outside of the bar."""
    length = ((train_length or 0) - 3) / 2
    return length if left < length <= curve.points[-1].length else None


def draw_bars(axes, curves: Mapping[str, ForgettingCurve], train_lengths: Mapping[str, int], left: float) -> None:
    """A bar for each model, the first on top, and its two lengths in words."""
    for row, (name, curve) in enumerate(curves.items()):
        ends = bar_ends(curve, left)
        for start, end, colour in zip([left, *ends], ends, style.STRONG.values()):
            axes.barh(row, end - start, left=start, height=0.62, color=colour)
        words = f"fine {in_tokens(curve.fine_length)}, coarse {in_tokens(curve.coarse_length)}"
        axes.text(ends[-1] * 1.04, row, words, va="center", fontsize=8)
        mark = mark_place(curve, train_lengths.get(name), left)
        if mark is not None:
            axes.plot([mark, mark], [row - 0.42, row + 0.42], color=style.INK, linewidth=1.6)
    axes.set_yticks(range(len(curves)), [textwrap.fill(name, 24) for name in curves])
    for label, colour in zip(axes.get_yticklabels(), cycle(style.MODELS)):
        label.set_color(colour)
        label.set_fontsize(9)
    axes.set_ylim(len(curves) - 0.4, -0.6)


def notes(curves: Mapping[str, ForgettingCurve]) -> list[str]:
    """The small print: how many repeats, of which kind of data."""
    repeats = sorted({p.repeats for curve in curves.values() for p in curve.points})
    kinds = sorted({str(curve.settings["data_type"]) for curve in curves.values() if "data_type" in curve.settings})
    sizes = f"mean and standard deviation of {' or '.join(map(str, repeats))} repeats"
    return [sizes, f"{' and '.join(kinds)} data"] if kinds else [sizes]
