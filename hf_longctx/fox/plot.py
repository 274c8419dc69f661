"""Forget-gate heat maps: the matrices F and A of a head, as in Figure 3 of the FoX paper (arXiv 2503.02130).

`F_ij = exp(c_i - c_j)` is the factor by which key j has faded at query i, and `A = softmax(scale * q.k + log F)` is
the attention weight. `head_maps` does not require matplotlib.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from .attention_fox import unfold_decay
from .state_fox import AttendingLayer, replace_shift_layers, with_class


CHUNK_ELEMENTS = 2**22  # number of entries of A in a chunk: 16 MB
HIDDEN = "#f1f3f5"  # color of keys to which a query does not attend
MIN_WEIGHT = 1e-3  # lower end of the color scale of A
COLUMNS = 6
DEFAULT_HEADS = 4  # default number of heads in the figure


@dataclass
class HeadMap:
    """The matrices F and A of one query head. Entries are NaN if the query does not attend to the key.

    Args:
        layer: index of the layer.
        head: index of the query head.
        decay_time: number of tokens in which the head forgets by a factor e, averaged over the sequence.
        forget: F, (n, n) float32 with n = ceil(tokens / block). Rows are queries, columns are keys. Each entry is
            the mean of a (block, block) part of the full matrix.
        attention: A, (n, n) float32. Each entry is the maximum of such a part, because A is sparse.
        tokens: length of the sequence.
        block: number of tokens in a row or column of the maps.
    """

    layer: int
    head: int
    decay_time: float
    forget: torch.Tensor
    attention: torch.Tensor
    tokens: int
    block: int


def reduce_blocks(x, visible, block, largest):
    """Return the mean or maximum of the visible entries in each block of x, (R, T). If none is visible, return NaN."""
    missing = [-size % block for size in reversed(x.shape)]
    x, visible = (
        torch.nn.functional.pad(y, (0, missing[0], 0, missing[1])).unflatten(1, (-1, block)).unflatten(0, (-1, block))
        for y in (x, visible)
    )
    count = visible.sum((1, 3))
    if largest:
        reduced = x.masked_fill(~visible, -torch.inf).amax((1, 3))
    else:
        reduced = x.masked_fill(~visible, 0.0).sum((1, 3)) / count
    return reduced.masked_fill(count == 0, torch.nan)


def head_map(module, query, key, head, block):
    """Compute the `HeadMap` of a query head from all folded queries and keys of a layer, (1, H, T, D')."""
    q, k = query[0, head].float(), key[0, head // module.num_key_value_groups].float()  # (T, D')
    c = unfold_decay(key, module.head_dim, module.gates_per_key, module.scaling)[0].double()  # (H or Hkv, T)
    c = c[head * len(c) // query.shape[1]]
    length = len(c)
    positions = torch.arange(length, device=c.device)
    forget, attention = [], []
    step = max(1, CHUNK_ELEMENTS // length // block) * block
    for rows in positions.split(step):
        ago = rows[:, None] - positions
        visible = (ago >= 0) & (ago < (module.sliding_window or length))
        logits = (module.scaling * (q[rows] @ k.mT)).masked_fill(~visible, -torch.inf)
        forget.append(reduce_blocks((c[rows, None] - c).clamp(max=0).exp().float(), visible, block, False))
        attention.append(reduce_blocks(logits.softmax(-1), visible, block, True))
    forgotten = (c[0] - c[-1]).item()
    decay_time = (length - 1) / forgotten if forgotten else float("inf")
    maps = (torch.cat(pieces).cpu() for pieces in (forget, attention))
    return HeadMap(module.layer_idx, head, decay_time, *maps, tokens=length, block=block)


@torch.no_grad()
def head_maps(
    model: PreTrainedModel,
    input_ids: torch.Tensor | list[int],
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    resolution: int = 384,
) -> list[HeadMap]:
    """Compute F and A of some heads for one sequence. Memory is linear in the length.

    Args:
        model: a FoX, with or without a head.
        input_ids: (T,) or (1, T), at least 2 tokens.
        layers: indices of layers. None: all layers.
        heads: indices of query heads in each layer. None: all query heads.
        resolution: maximum number of rows and columns of a map. A longer sequence is reduced block by block.

    Raises:
        ValueError: the model does not have a forget gate; a layer or head does not exist; or `input_ids` is not one
            sequence.
    """
    config = getattr(model, "config", None)
    if getattr(config, "forget_gate", "none") == "none":
        raise ValueError(f"`model` must be a FoX with a forget gate, got a {type(model).__name__} without one.")
    input_ids = torch.as_tensor(input_ids, dtype=torch.long, device=model.device)
    input_ids = input_ids[None] if input_ids.ndim == 1 else input_ids
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
        raise ValueError(
            f"input_ids must be one sequence of at least 2 tokens, (T,) or (1, T), got {tuple(input_ids.shape)}."
        )
    layers = _check_indices("layers", layers, model.config.num_hidden_layers)
    heads = _check_indices("heads", heads, model.config.num_attention_heads)
    block = -(-input_ids.shape[1] // resolution)
    maps = {}
    cache = DynamicCache(config=config)

    class MapLayer(AttendingLayer):
        def attend(self, attention_function, module, query, key, *args, **kwargs):
            if module.layer_idx in layers:
                maps.update({(module.layer_idx, head): head_map(module, query, key, head, block) for head in heads})
            return attention_function(module, query, key, *args, **kwargs)

    replace_shift_layers(cache)
    cache.layers = [with_class(x, type("MapLayer", (MapLayer, type(x)), {})) for x in cache.layers]
    base = getattr(model, model.base_model_prefix, model)  # the model without lm_head, because logits are not needed
    training = model.training
    base.eval()(input_ids, cache=cache, use_cache=True)
    model.train(training)
    return [maps[layer, head] for layer in layers for head in heads]


def _check_indices(name, indices, count):
    indices = list(range(count)) if indices is None else list(indices)
    if not indices or not set(indices) <= set(range(count)):
        raise ValueError(f"{name} must be a non-empty subset of 0 to {count - 1}, got {indices}.")
    return indices


def plot_forget_gates(
    model: PreTrainedModel,
    input_ids: torch.Tensor | list[int],
    path: str | os.PathLike,
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> list[HeadMap]:
    """Draw the forget gate matrix F of some heads. The attention map A is below it.

    Args:
        model, input_ids: as in `head_maps`.
        path: output file. Its extension selects the format: PNG, SVG or PDF.
        layers, heads: as in `head_maps`. If both are None, the figure shows four heads, evenly spaced from the fastest
            to the slowest decay.

    Returns:
        The maps of the given layers and heads. If `layers` and `heads` are None, the maps of all heads.

    Raises:
        ValueError: as in `head_maps`; or matplotlib does not support the extension.
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plotting requires matplotlib: pip install 'hf-longctx[plot]'") from error

    measured = head_maps(model, input_ids, layers, heads)  # a panel is about 400 pixels wide
    maps = spread(measured, DEFAULT_HEADS) if layers is None and heads is None else measured
    columns = min(len(maps), COLUMNS)
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(2.55 * columns + 1.5, 5.6 * rows + 0.9), dpi=160, layout="constrained")
    grid = figure.subplots(2 * rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    panels = (
        ("forget", "F: remaining weight of a key", "Blues", Normalize(0, 1)),
        ("attention", "A: attention weight", "OrRd", LogNorm(MIN_WEIGHT, 1, clip=True)),
    )
    for i, head_map in enumerate(maps):
        row, column = divmod(i, columns)
        for below, (kind, label, colors, norm) in enumerate(panels):
            axes = grid[2 * row + below, column]
            axes.set_visible(True)
            axes.set_facecolor(HIDDEN)
            extent = (0, head_map.tokens, head_map.tokens, 0)
            image = axes.imshow(
                getattr(head_map, kind), cmap=colors, norm=norm, interpolation="nearest", extent=extent
            )
            axes.locator_params(nbins=4, integer=True)
            axes.tick_params(labelsize=8, labelbottom=bool(below), labelleft=column == 0)
            if column == 0:
                axes.set_ylabel("query (token)", fontsize=9)
            if column == columns - 1 or i == len(maps) - 1:
                figure.colorbar(image, ax=list(grid[2 * row + below]), shrink=0.9, aspect=22, pad=0.015, label=label)
        time = head_map.decay_time
        memory = "forgets nothing" if time == float("inf") else f"decay time {time:,.{0 if time >= 10 else 1}f} tokens"
        grid[2 * row, column].set_title(f"layer {head_map.layer}, head {head_map.head}\n{memory}", fontsize=10)
        grid[2 * row + 1, column].set_xlabel("key (token)", fontsize=9)
    figure.suptitle("What each head remembers and attends to", fontsize=13.5, fontweight="bold")
    if (side := maps[0].block) > 1:
        note = f"{maps[0].tokens:,} tokens; a point is {side} x {side} entries: the mean of F, the largest of A"
        figure.supxlabel(note, x=0.99, ha="right", fontsize=8)
    figure.savefig(path)
    return measured


def spread(maps, count):
    """Select `count` of the maps, evenly spaced from the fastest to the slowest decay."""
    ordered = sorted(maps, key=lambda head_map: head_map.decay_time)
    last = min(count, len(ordered)) - 1
    return [ordered[round(i * (len(ordered) - 1) / max(last, 1))] for i in range(last + 1)]
