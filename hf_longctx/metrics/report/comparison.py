"""Several forgetting curves in one picture. Like `plots`, it needs matplotlib and no display."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from ..curve.plot import INK, QUIET, Figure, Patch, PercentFormatter, StrMethodFormatter, written
from ..curve.result import ForgettingCurve
from ..result import Result


# colours that stay apart for colour-blind readers (after Okabe and Ito), and a marker for those that do not suffice
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8c6d00", "#333f4a", "#4a9cc9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STRONG = {"fine": "#57a55f", "coarse": "#7ea6d8", "amnesia": "#e59a94"}


def plot_comparison(
    curves: Mapping[str, ForgettingCurve],
    path,
    *,
    train_lengths: Mapping[str, int] | None = None,
    title: str = "Forgetting curves",
) -> None:
    """Draw the copy accuracy of several models over the length of the target, and how far each one remembers.

    Above, means over repeats in ribbons of one population standard deviation to each side, with the LM accuracy as a
    dotted line. Below, a bar for each model: green up to its fine length, blue up to its coarse length, red beyond, as
    far as it was measured. A tick on the bar is the length whose input is as long as the training context.

    Args:
        curves: by name, in the order of the bars.
        path: the file to write: PNG, SVG or PDF by its extension.
        train_lengths: context length of the training, in tokens, of those models where it is known.
        title: heading of the picture.

    Raises:
        ValueError: there is no curve, a curve has no point, or matplotlib does not know the extension.
    """
    empty = [name for name, curve in curves.items() if not curve.points]
    if empty or not curves:
        raise ValueError(f"no length was measured: {', '.join(empty) or 'there is no curve'}.")
    figure = Figure(figsize=(9.5, 5.2 + 0.36 * len(curves)), dpi=160, layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4.4, 0.5 + 0.36 * len(curves)])
    shortest = min(curve.points[0].length for curve in curves.values())
    longest = max(curve.points[-1].length for curve in curves.values())

    for (name, curve), colour, marker in zip(curves.items(), cycle(COLOURS), cycle(MARKERS)):
        lengths = [p.length for p in curve.points]
        moments = [(p.copy_mean, p.copy_std) for p in curve.points]
        low, high = [max(m - s, 0) for m, s in moments], [min(m + s, 1) for m, s in moments]
        above.fill_between(lengths, low, high, color=colour, alpha=0.13, linewidth=0)
        style = dict(color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=name)
        above.plot(lengths, [m for m, _ in moments], **style)
        above.plot(lengths, [p.lm_mean for p in curve.points], color=colour, linewidth=1, linestyle=":")
    above.set_ylim(-0.02, 1.04)
    above.yaxis.set_major_formatter(PercentFormatter(1))
    above.set_ylabel("tokens copied right\n(dotted: guessed right)", color=INK)
    above.grid(axis="y", color="#e4e7ea", linewidth=0.8)

    left = shortest / 1.15
    above.set_xscale("log", base=2)
    above.set_xlim(left, longest * (longest / left) ** 0.17)  # room for the words behind the bars
    above.set_xticks([n for n in (2**i for i in range(32)) if left <= n <= longest * 1.05])
    below.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    below.set_xlabel("length of the text to copy (tokens)", color=INK)
    for axes in (above, below):
        axes.tick_params(colors=INK, length=0)
        axes.minorticks_off()
        for spine in axes.spines.values():
            spine.set_visible(False)
    draw_bars(below, curves, train_lengths or {}, left)

    figure.legend(
        handles=above.get_lines()[::2],
        title=textwrap.fill(title, 75),
        title_fontproperties={"size": 13.5, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=3,
        frameon=False,
        fontsize=9,
        columnspacing=2.5,
    )
    areas = [Patch(color=STRONG["fine"], label="fine"), Patch(color=STRONG["coarse"], label="coarse")]
    areas.append(Patch(color=STRONG["amnesia"], label="amnesia"))
    figure.legend(handles=areas, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    repeats = sorted({p.repeats for curve in curves.values() for p in curve.points})
    kinds = sorted({str(curve.settings["data_type"]) for curve in curves.values() if "data_type" in curve.settings})
    notes = [f"mean and standard deviation of {' or '.join(map(str, repeats))} repeats"]
    notes += [f"{' and '.join(kinds)} data"] if kinds else []
    notes += ["black mark: training context"] if train_lengths else []
    figure.supxlabel(", ".join(notes), x=0.99, ha="right", fontsize=8, color=QUIET)
    figure.savefig(path)


def draw_bars(axes, curves, train_lengths, left):
    """A bar for each model, the first on top, with its two lengths in words."""
    for row, (name, curve) in enumerate(curves.items()):
        fine, coarse, end = curve.fine_length, curve.coarse_length, curve.points[-1].length
        borders = [left, max(left, fine), max(left, fine, coarse), end]
        for start, stop, colour in zip(borders, borders[1:], STRONG.values()):
            axes.barh(row, stop - start, left=start, height=0.62, color=colour)
        axes.text(end * 1.04, row, f"fine {written(fine, '')}, coarse {written(coarse, '')}", va="center", fontsize=8)
        reached = (train_lengths.get(name, 0) - 3) / 2
        if left < reached <= end:
            axes.plot([reached, reached], [row - 0.42, row + 0.42], color=INK, linewidth=1.6)
    axes.set_yticks(range(len(curves)), [textwrap.fill(name, 24) for name in curves])
    for label, colour in zip(axes.get_yticklabels(), cycle(COLOURS)):
        label.set_color(colour)
        label.set_fontsize(9)
    axes.set_ylim(len(curves) - 0.4, -0.6)


def named(results: list[tuple[Path, Result]]) -> dict[str, Result]:
    """Results by the name of their model, with the name of the file behind it where two share one."""
    names = [result.model_name if result.settings.get("model") else Path(path).stem for path, result in results]
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
