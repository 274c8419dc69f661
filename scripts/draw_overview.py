"""Draw the README's diagram of what a FoX forgets and what an HMT recalls.

python -m scripts.draw_overview [--output model_cards/overview.png]
"""

import argparse

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from hf_longctx.metrics import style


GATES = [0.97, 0.95, 0.9, 0.97, 0.15, 0.95, 0.97, 0.9, 0.95, 0.2, 0.97, 0.95]  # one per token
SEGMENTS, RECALLED = 4, {2: (0,), 3: (0, 2)}  # the memories that a segment recalls


def draw_fox(axes):
    """Draw the forget-gate decay between each query and key."""
    c = np.cumsum(np.log(GATES))
    decay = np.exp(c[:, None] - c)
    decay[np.triu_indices(len(GATES), 1)] = np.nan
    axes.imshow(decay, cmap="Blues", vmin=-0.15, vmax=1)
    axes.set(xticks=[], yticks=[], xlabel="keys, oldest first", ylabel="queries")
    axes.set_title("FoX: keys fade by a learned gate", loc="left", fontsize=10)
    axes.spines[:].set_visible(False)
    for token in (i for i, gate in enumerate(GATES) if gate < 0.5):
        axes.annotate("gate closes", (token - 1.2, token), (token + 0.2, token - 1.6), fontsize=8,
                      arrowprops={"arrowstyle": "->", "lw": 0.8})  # fmt: skip


def draw_hmt(axes):
    """Draw consecutive segments, and the memories that they write and recall."""
    axes.set(xlim=(-0.2, 2.2 * SEGMENTS), ylim=(-0.4, 3.4), xticks=[], yticks=[])
    axes.set_title("HMT: a segment recalls earlier segments", loc="left", fontsize=10)
    axes.spines[:].set_visible(False)
    for i in range(SEGMENTS):
        x = 2.2 * i
        axes.add_patch(Rectangle((x, 0), 1.8, 0.7, facecolor="#dbe7f5", edgecolor="black", lw=0.8))
        axes.text(x + 0.9, 0.35, f"segment {i + 1}", ha="center", va="center", fontsize=8)
        axes.add_patch(Rectangle((x + 0.65, 2.3), 0.5, 0.5, facecolor=style.COPY, edgecolor="black", lw=0.8))
        options = {"arrowstyle": "-|>", "mutation_scale": 8, "lw": 0.8}
        axes.add_patch(FancyArrowPatch((x + 0.9, 0.7), (x + 0.9, 2.3), color="black", **options))
        for memory in RECALLED.get(i, ()):
            begin, end = (2.2 * memory + 1.15, 2.45), (x + 0.25, 0.7)
            axes.add_patch(FancyArrowPatch(begin, end, color=style.COPY, connectionstyle="arc3,rad=-0.15", **options))
    axes.text(0, 3.05, "memory: one embedding of each segment", fontsize=8)
    axes.text(0, -0.3, "the backbone reads one segment at a time", fontsize=8)


def draw():
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.8))
    draw_fox(left)
    draw_hmt(right)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="model_cards/overview.png", metavar="FILE", help="output file")
    draw().savefig(parser.parse_args().output, dpi=150)


if __name__ == "__main__":
    main()
