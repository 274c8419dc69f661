"""Copy, split and join transformers key/value caches along the batch dimension."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Return the keys, values and other batched tensors of a cache layer, keyed by name."""
    return {name: x for name, x in vars(layer).items() if isinstance(x, Tensor) and x.dim() > 1}


def states_of(layer: Any) -> dict[str, dict]:
    """Return the dicts of a cache layer's convolution states, keyed by name."""
    return {name: x for name, x in vars(layer).items() if isinstance(x, dict)}


def fork(kv_cache: Cache) -> Cache:
    """Copy a cache. Extending the copy does not change the original.

    The copy shares the tensors of attention layers, because extending their cache replaces these tensors. Convolution
    layers overwrite their states in place, so the states are cloned.
    """
    forked = copy.copy(kv_cache)
    forked.layers = [copy.copy(layer) for layer in kv_cache.layers]
    for layer in forked.layers:
        for name, states in states_of(layer).items():
            setattr(layer, name, {i: x.clone() if isinstance(x, Tensor) else x for i, x in states.items()})
    return forked


def split(kv_cache: Cache, parts: int) -> list[Cache]:
    """Split an attention cache into `parts` caches with the same number of rows.

    `torch.chunk` splits each tensor, so the backward pass concatenates the gradients of the parts. With slices, the
    backward pass would pad each gradient and add the results.
    """
    shares = [fork(kv_cache) for _ in range(parts)]
    for i, layer in enumerate(kv_cache.layers):
        for name, value in tensors_of(layer).items():
            for share, rows in zip(shares, value.chunk(parts)):
                setattr(share.layers[i], name, rows)
    return shares


def side_by_side(parts: list[tuple[list[int], Cache]]) -> tuple[Cache, Tensor | None]:
    """Join the caches of different rows into one cache of the batch. Shorter rows are padded on the left.

    `parts` are pairs (row indices, cache of these rows). Also return a bool mask (B, P), False on padding. The mask is
    None if no row is padded.
    """
    order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
    lengths = torch.tensor([cache.get_seq_length() for rows, cache in parts for _ in rows])[order]
    width, joined = int(lengths.max()), fork(parts[0][1])

    def join(values: list[Tensor]) -> Tensor:
        longest = max(x.shape[2] for x in values)
        # Padding repeats the first key, because FoX recognizes its cache by numbers in the first cached key.
        padded = [x[:, :, (torch.arange(longest) - longest + x.shape[2]).clamp(min=0)] for x in values]
        return torch.cat(padded)[order.to(values[0].device)]

    for i, layer in enumerate(joined.layers):
        layers: list[Any] = [cache.layers[i] for _, cache in parts]
        for name in tensors_of(layer):
            setattr(layer, name, join([getattr(x, name) for x in layers]))
        for name, states in states_of(layer).items():
            tensors = {
                n: join([getattr(x, name)[n] for x in layers]) for n, x in states.items() if isinstance(x, Tensor)
            }
            setattr(layer, name, states | tensors)
        if "cumulative_length" in vars(layer):
            setattr(layer, "cumulative_length", width)  # noqa: B010 - some layer types do not define it
    if lengths.min() == width:
        return joined, None
    device = next(x.device for layer in joined.layers for x in tensors_of(layer).values())
    return joined, (torch.arange(width) >= width - lengths[:, None]).to(device)
