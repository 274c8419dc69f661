"""Pictures of the metrics. They need matplotlib, and no display: figures are drawn without pyplot."""

from __future__ import annotations

import textwrap


try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
except ImportError as error:
    raise ImportError("Pictures need matplotlib: pip install 'hf-longctx[plot]'") from error

from .result import ForgettingCurve


COPY, LM, INK, QUIET = "#b8500a", "#1f5fa6", "#1f2933", "#5f6b76"
FINE, COARSE, AMNESIA = "#cdeacf", "#d9e6f7", "#f9dedb"  # green, blue and red as in figure 1 of the paper
DETAILS = {"data_type": "{} data", "dtype": "{}", "seed": "seed {}"}  # settings that the small print mentions


def plot_curve(curve: ForgettingCurve, path, *, train_length: int | None = None, title: str | None = None) -> None:
    """Draw copy and LM accuracy over the length of the target, and the areas of memory they show.

    Lines are means over repeats, ribbons one population standard deviation to each side. The green area ends at the
    fine length, the blue one at the coarse length; red is what lies beyond. The upper axis counts what the model
    reads, 2n + 3 tokens at length n.

    Args:
        path: the file to write: PNG, SVG or PDF by its extension.
        train_length: context length of the model's training, in tokens: a line where the input reaches it.
        title: by default, the name of the model.

    Raises:
        ValueError: the curve has no point, or matplotlib does not know the extension.
    """
    if not curve.points:
        raise ValueError("the curve has no point to draw: no length was measured.")
    figure = Figure(figsize=(9, 5.6), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    lengths = [p.length for p in curve.points]

    # a geometric grid has its middle length far below the middle of its range
    logarithmic = len(lengths) > 2 and lengths[len(lengths) // 2] < 0.25 * lengths[-1]
    left, right = (lengths[0] / 1.1, lengths[-1] * 1.1) if logarithmic else (0, lengths[-1] * 1.025)
    areas = shade_areas(axes, curve, left, right)
    draw_accuracy(axes, lengths, [(p.copy_mean, p.copy_std) for p in curve.points], COPY, "o", "copy accuracy")
    draw_accuracy(axes, lengths, [(p.lm_mean, p.lm_std) for p in curve.points], LM, "s", "LM accuracy")
    notes = [f"mean and standard deviation of {curve.repeats_range} repeats"]
    notes += [form.format(curve.settings[key]) for key, form in DETAILS.items() if key in curve.settings]
    if train_length is not None:
        notes += mark_training(axes, train_length, right)

    scale = {"value": "log", "base": 2} if logarithmic else {"value": "linear"}
    axes.set_xscale(**scale)
    axes.set_xlim(left, right)
    axes.set_ylim(-0.02, 1.04)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("length of the text to copy (tokens)", color=INK)
    axes.set_ylabel("tokens predicted right", color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="y", color="white", linewidth=1.2)

    reads = axes.twiny()  # not secondary_xaxis, which forgets its ticks when the scale is logarithmic
    reads.set_xscale(**scale)
    reads.set_xlim(left, right)
    ticks = [2**i for i in range(64)] if logarithmic else MaxNLocator(6).tick_values(0, 2 * right)
    ticks = [tick for tick in ticks if left <= (tick - 3) / 2 <= right]
    reads.set_xticks([(tick - 3) / 2 for tick in ticks], [f"{tick:,.0f}" for tick in ticks])
    reads.minorticks_off()
    reads.set_xlabel("tokens the model reads", color=QUIET, fontsize=9)
    reads.tick_params(colors=QUIET, labelsize=8.5, length=3)
    for spine in (*axes.spines.values(), *reads.spines.values()):
        spine.set_visible(False)

    figure.legend(
        handles=[*axes.get_lines()[:2], *areas],  # above the axes, where no curve can run into it
        title=textwrap.fill(title or heading(curve.settings.get("model")), 75),
        title_fontproperties={"size": 13.5, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=3,
        frameon=False,
        fontsize=10,
        columnspacing=2.5,
    )
    figure.supxlabel(", ".join(notes), x=0.99, ha="right", fontsize=8, color=QUIET)
    figure.savefig(path)


def heading(model):
    """The title for a model on the Hub (one slash), in a local folder (its last part) or without a name."""
    if not model:
        return "Forgetting curve"
    return f"Forgetting curve of {model if model.count('/') <= 1 else model.rstrip('/').rpartition('/')[2]}"


def mark_training(axes, train_length, right):
    """A line at the length whose input is as long as the training context; says so if that is not in the picture."""
    reached = (train_length - 3) / 2
    if reached > right:
        return [f"training context of {train_length:,} tokens not reached"]
    axes.axvline(reached, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=2)
    axes.annotate(
        f"training context: {train_length:,} tokens",
        (reached, 0.65),
        xytext=(-3, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="center",
        fontsize=8.5,
        color=INK,
    )
    return []


def shade_areas(axes, curve, left, right):
    """Green up to the fine length, blue up to the coarse length, red beyond; returns their keys for the legend."""
    fine, coarse = curve.fine_length, curve.coarse_length
    fine_end = right if fine.open_ended else max(left, fine)
    coarse_end = right if coarse.open_ended else max(fine_end, coarse)
    for start, end, colour in ((left, fine_end, FINE), (fine_end, coarse_end, COARSE), (coarse_end, right, AMNESIA)):
        axes.axvspan(start, end, color=colour, linewidth=0, zorder=0)
    return [
        Patch(color=FINE, label=f"fine length: {written(fine)}"),
        Patch(color=COARSE, label=f"coarse length: {written(coarse)}"),
        Patch(color=AMNESIA, label="amnesia" if coarse_end < right else "amnesia: not reached"),
    ]


def written(length, unit=" tokens"):
    return f"{'>' * length.open_ended}{int(length):,}{unit}"


def draw_accuracy(axes, lengths, moments, colour, marker, label):
    """A line of means in a ribbon of one standard deviation, which ends where accuracies do."""
    low = [max(mean - std, 0) for mean, std in moments]
    high = [min(mean + std, 1) for mean, std in moments]
    axes.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0, zorder=3)
    means = [mean for mean, _ in moments]
    axes.plot(lengths, means, color=colour, marker=marker, markersize=4.5, linewidth=2, label=label, zorder=4)
