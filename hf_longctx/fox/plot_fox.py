"""Pictures of what a FoX forgets, like the paper's Figure 3. They need matplotlib, and no display."""

from __future__ import annotations

from .maps_fox import head_maps


try:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter
except ImportError as error:
    raise ImportError("Pictures need matplotlib: pip install 'hf-longctx[plot]'") from error


INK, QUIET, UNSEEN = "#1f2933", "#5f6b76", "#f1f3f5"
FAINTEST = 1e-3  # attention below is drawn like this
COLUMNS = 6
TYPICAL = 4


def plot_forget_gates(model, input_ids, path, *, layers=None, heads=None, resolution=384, title=None) -> None:
    """Draw the forget gate matrix F and the attention map A of some heads, F above A.

    Args:
        model, input_ids, layers, heads, resolution: as for `head_maps`; a panel is some 400 pixels wide. Without `layers` and `heads`, four heads are
            chosen that span from the one that forgets fastest to the slowest, over all layers.
        path: the file to write: PNG, SVG or PDF by its extension.
        title: above all.

    Raises:
        ValueError: as `head_maps`, or matplotlib does not know the extension.
    """
    maps = head_maps(model, input_ids, layers, heads, resolution)
    if layers is None and heads is None:
        maps = spread(maps, TYPICAL)
    columns = min(len(maps), COLUMNS)
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(2.55 * columns + 1.5, 5.6 * rows + 0.9), dpi=160, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    grid = figure.subplots(2 * rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    colours = {
        "forget": (colormaps["Blues"], Normalize(0, 1)),
        "attention": (colormaps["OrRd"], LogNorm(FAINTEST, 1, clip=True)),
    }
    for i, head_map in enumerate(maps):
        row, column = divmod(i, columns)
        for kind, axes in (("forget", grid[2 * row, column]), ("attention", grid[2 * row + 1, column])):
            image = draw(axes, head_map, kind, *colours[kind])
            if column == columns - 1 or i == len(maps) - 1:
                bar = figure.colorbar(
                    image, ax=list(grid[2 * row + (kind == "attention")]), shrink=0.9, aspect=22, pad=0.015
                )
                bar.outline.set_visible(False)
                bar.ax.tick_params(colors=INK, labelsize=8, length=0)
                if kind == "attention":
                    bar.minorticks_off()
                    bar.set_ticks([FAINTEST, 0.01, 0.1, 1], labels=[f"≤ {FAINTEST:g}", "0.01", "0.1", "1"])
                bar.set_label(LABELS[kind, head_map.block > 1], color=INK, fontsize=9)
            axes.set_ylabel("query (token)" if column == 0 else None, color=QUIET, fontsize=9)
            axes.tick_params(labelleft=column == 0)
        grid[2 * row, column].set_title(heading(head_map), color=INK, fontsize=10, pad=7)
        grid[2 * row, column].tick_params(labelbottom=False)
        grid[2 * row + 1, column].set_xlabel("key (token)", color=QUIET, fontsize=9)
    figure.suptitle(title or "What each head keeps, and where it looks", color=INK, fontsize=13.5, fontweight="bold")
    if maps[0].block > 1:
        side = maps[0].block
        note = f"{maps[0].tokens:,} tokens; a point stands for {side} x {side}: the mean of F, the largest of A"
        figure.supxlabel(note, x=0.99, ha="right", fontsize=8, color=QUIET)
    figure.savefig(path)


LABELS = {
    ("forget", False): "F: what is left of a key",
    ("forget", True): "F: what is left of a key (mean)",
    ("attention", False): "A: attention weight",
    ("attention", True): "A: attention weight (largest)",
}


def spread(maps, count):
    """`count` of the maps, evenly spaced from the one that forgets fastest to the slowest."""
    ordered = sorted(maps, key=lambda head_map: head_map.decay_time)
    last = min(count, len(ordered)) - 1
    return [ordered[round(i * (len(ordered) - 1) / max(last, 1))] for i in range(last + 1)]


def heading(head_map):
    time = head_map.decay_time
    if time == float("inf"):
        kept = "forgets nothing"
    else:
        kept = f"decay time {time:,.0f} tokens" if time >= 10 else f"decay time {time:.1f} tokens"
    return f"layer {head_map.layer}, head {head_map.head}\n{kept}"


def draw(axes, head_map, kind, colours, norm):
    axes.set_visible(True)
    axes.set_facecolor(UNSEEN)
    side = head_map.tokens
    image = axes.imshow(
        getattr(head_map, kind).numpy(),
        cmap=colours,
        norm=norm,
        interpolation="nearest",
        extent=(0, side, side, 0),
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(colors=QUIET, labelsize=8, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image
