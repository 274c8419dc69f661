"""The picture of a forgetting curve."""

from __future__ import annotations

from .. import style


SMALL_PRINT = {"data_type": "{} data", "dtype": "{}", "seed": "seed {}"}  # settings, and how they are written


def plot_curve(curve, path, *, train_length: int | None = None, title: str | None = None) -> None:
    """Draw copy and LM accuracy over the length of the target, and the areas of memory that they show.

    Lines are means over repeats, ribbons one population standard deviation to each side. The green area ends at the
    fine length, the blue one at the coarse length; red is what lies beyond. The upper axis counts what the model
    reads, 2n + 3 tokens at length n, and a line marks where they are as many as `train_length`. See `Result.plot`.
    """
    if not curve.points:
        raise ValueError("the curve has no point to draw: no length was measured.")
    figure = style.figure(9, 5.6)
    axes = figure.add_subplot()
    lengths = [p.length for p in curve.points]

    # a geometric grid has its middle length far below the middle of its range
    logarithmic = len(lengths) > 2 and lengths[len(lengths) // 2] < 0.25 * lengths[-1]
    left, right = (lengths[0] / 1.1, lengths[-1] * 1.1) if logarithmic else (0, lengths[-1] * 1.025)
    areas = shade_areas(axes, curve, left, right)
    draw_accuracy(axes, lengths, [(p.copy_mean, p.copy_std) for p in curve.points], style.COPY, "o", "copy accuracy")
    draw_accuracy(axes, lengths, [(p.lm_mean, p.lm_std) for p in curve.points], style.LM, "s", "LM accuracy")
    notes = [f"mean and standard deviation of {curve.repeats_range} repeats"]
    notes += [form.format(curve.settings[name]) for name, form in SMALL_PRINT.items() if name in curve.settings]
    if train_length is not None and not mark_input(axes, train_length, right):
        notes.append(f"training context of {train_length:,} tokens not reached")

    scale = {"value": "log", "base": 2} if logarithmic else {"value": "linear"}
    axes.set_xscale(**scale)
    axes.set_xlim(left, right)
    axes.xaxis.set_major_formatter(style.TOKENS)
    style.rates(axes)
    style.grid(axes, "white", 1.2)
    style.bare(axes, "length of the text to copy (tokens)", "tokens predicted right")

    reads = axes.twiny()  # not secondary_xaxis, which forgets its ticks when the scale is logarithmic
    reads.set_xscale(**scale)
    reads.set_xlim(left, right)
    ticks = [2**i for i in range(64)] if logarithmic else style.MaxNLocator(6).tick_values(0, 2 * right)
    ticks = [tick for tick in ticks if left <= (tick - 3) / 2 <= right]
    reads.set_xticks([(tick - 3) / 2 for tick in ticks], [f"{tick:,.0f}" for tick in ticks])
    reads.minorticks_off()
    style.bare(reads, "tokens the model reads", colour=style.QUIET, labelsize=8.5, length=3)
    reads.xaxis.label.set_size(9)

    style.titled_legend(figure, [*axes.get_lines()[:2], *areas], title or style.heading(curve), fontsize=10)
    style.small_print(figure, *notes)
    figure.savefig(path)


def mark_input(axes, train_length: int, right: float) -> bool:
    """Mark the length whose input is as long as the training context; False if it lies outside of the picture."""
    length = (train_length - 3) / 2
    if length > right:
        return False
    style.mark_training(axes, length)
    words = f"training context: {train_length:,} tokens"
    left_of_line = dict(xytext=(-3, 0), textcoords="offset points", rotation=90, ha="right", va="center")
    axes.annotate(words, (length, 0.65), **left_of_line, fontsize=8.5, color=style.INK)
    return True


def area_ends(curve, left: float, right: float) -> tuple[float, float]:
    """Where the fine and the coarse area end on an axis from `left` to `right`: there, if the length is open-ended."""
    fine, coarse = curve.fine_length, curve.coarse_length
    fine_end = right if fine.open_ended else max(left, fine)
    return fine_end, right if coarse.open_ended else max(fine_end, coarse)


def shade_areas(axes, curve, left: float, right: float) -> list[style.Patch]:
    """Green up to the fine length, blue up to the coarse length, red beyond; returns their keys for the legend."""
    borders = [left, *area_ends(curve, left, right), right]
    for start, end, colour in zip(borders, borders[1:], style.PALE.values()):
        axes.axvspan(start, end, color=colour, linewidth=0, zorder=0)
    return [
        style.Patch(color=style.PALE["fine"], label=f"fine length: {in_tokens(curve.fine_length)} tokens"),
        style.Patch(color=style.PALE["coarse"], label=f"coarse length: {in_tokens(curve.coarse_length)} tokens"),
        style.Patch(color=style.PALE["amnesia"], label="amnesia" if borders[2] < right else "amnesia: not reached"),
    ]


def in_tokens(length) -> str:
    """A `MemoryLength`, as in ">2,048"."""
    return f"{'>' * length.open_ended}{int(length):,}"


def ribbon(moments) -> tuple[list[float], list[float]]:
    """One standard deviation below and above each mean, within 0 and 1, where accuracies end.

    >>> ribbon([(0.5, 0.25), (0.9, 0.2)])
    ([0.25, 0.7], [0.75, 1])
    """
    return [max(mean - std, 0) for mean, std in moments], [min(mean + std, 1) for mean, std in moments]


def draw_accuracy(axes, lengths, moments, colour, marker, label) -> None:
    """A line of means in a ribbon of one standard deviation to each side."""
    axes.fill_between(lengths, *ribbon(moments), color=colour, alpha=0.2, linewidth=0, zorder=3)
    means = [mean for mean, _ in moments]
    axes.plot(lengths, means, color=colour, marker=marker, markersize=4.5, linewidth=2, label=label, zorder=4)
