"""Judges the rotary embeddings of a model, read from its config, by the bound of arXiv 2405.14591.

print(rope_report(AutoConfig.from_pretrained("...")))
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..checks import whole_number
from .base import LONGEST, rope_base_bound
from .bounds import rope_context_bound, rope_decay
from .config import (
    BASE_IN_CODE,
    NoRopeError,
    Rope,
    assumptions,
    attention_window,
    claimed_context,
    config_file,
    layer_groups,
    rope_of_layers,
    with_model_frequencies,
    with_rope_parameters,
)
from .result import MINIMUM_BASE_UP_TO, RopeLayers, RopeReport


LOOKED_AT = 1 << 22  # distances in which the end of B_m >= 0 is sought, where a model needs fewer
LENGTH_DEPENDENT = ("dynamic", "longrope")


def rope_report(model_or_config: Any, *, context_length: int | None = None, minimum_base: bool = True) -> RopeReport:
    """Judge whether a model's rotary embedding satisfies B_m >= 0 over its context, and which base would.

    Reads `rope_parameters` of transformers 5, flat or per layer type, and the older rope_theta with rope_scaling; the
    rope types default, linear, dynamic, yarn, longrope, llama3 and proportional; partial rotary embeddings; sliding
    windows; layers without RoPE. In a model of several parts it reads the text decoder.

    Args:
        model_or_config: a `PreTrainedModel` or a `PreTrainedConfig`.
        context_length: the claim to check, in tokens; default the config's max_position_embeddings, or what its
            yarn, linear or dynamic scaling claims if that is more; see `config.claimed_context`. Dynamic and longrope
            frequencies depend on it.
        minimum_base: whether to compute eq. 18 too, which takes nearly all of the time (seconds for 128k tokens).

    Returns:
        RopeReport. Its notes name what is assumed, such as defaults of the config class.

    Raises:
        NoRopeError: the model has no RoPE; a ValueError.
        ValueError: its config lacks what would have to be guessed, or holds what no RoPE has (it is named); an
            argument is out of its range.
        NotImplementedError: the rope type is unknown.
    """
    model = model_or_config if hasattr(model_or_config, "config") else None
    original_config = model_or_config if model is None else model.config
    config = with_rope_parameters(original_config)
    notes: list[str] = []
    file = config_file(original_config)
    claimed, claimed_by = claimed_context(config, file, notes) if context_length is None else (context_length, "given")
    claimed = whole_number(f"the context to check ({claimed_by})", claimed, 2)
    if claimed > LONGEST:
        raise ValueError(f"the context to check ({claimed_by}) is {claimed} tokens; more than {LONGEST} take minutes.")
    if config.model_type in BASE_IN_CODE:
        notes.append("the base is fixed in this model's code; its config does not name it")
    groups = []
    for (kind, base), layers in layer_groups(config).items():
        reach = min(claimed, attention_window(config, kind, layers) or claimed) - 1
        if not base:
            groups.append(RopeLayers(kind, len(layers), reach))
            continue
        rope = rope_of_layers(config, kind, base, layers, claimed)
        notes += assumptions(config, file, kind, base)
        if rope.type in LENGTH_DEPENDENT:
            notes.append(f"{rope.type} frequencies depend on the length; taken at {claimed} tokens")
        elif model is not None and not getattr(config, "layer_rope_theta", None):
            rope = with_model_frequencies(rope, model, kind, notes)
        groups.append(_bound(rope, kind, len(layers), reach, minimum_base))
    if not any(group.rope_type for group in groups):
        raise NoRopeError(config, "none of its layers is an attention layer with RoPE")
    name = original_config.name_or_path or type(model_or_config).__name__
    return RopeReport(name, claimed, claimed_by, tuple(groups), tuple(dict.fromkeys(notes)))


def _bound(rope: Rope, kind: str, layers: int, reach: int, minimum_base: bool) -> RopeLayers:
    """Compute the bound of one group of layers up to distance `reach`."""
    rotating = rope.inv_freq[rope.inv_freq > 0]
    at_rest = rope.head_dim // 2 - len(rotating)
    theta = np.append(rotating, np.zeros(at_rest))
    looked_at = max(reach, LOOKED_AT)
    bound = rope_context_bound(inv_freq=theta, limit=looked_at)
    holds = bound is None or bound >= reach
    negative, last_negative, lowest = _negative_distances(theta, reach)
    minimum = {}
    if minimum_base and at_rest < len(rotating) and rope.type != "proportional" and reach <= MINIMUM_BASE_UP_TO:
        bases = rope_base_bound(reach, 2 * len(rotating), non_rotary_dims=2 * at_rest)
        names = ("two_digit_base", "settled_base", "search_limit")
        minimum = {"minimum_base": bases.base, **{name: getattr(bases, name) for name in names}}
    return RopeLayers(
        layer_type=kind,
        layers=layers or None,
        max_distance=reach,
        rope_type=rope.type,
        base=rope.base,
        head_dim=rope.head_dim,
        rotary_dim=2 * len(rotating),
        context_bound=bound,
        rotary_only_bound=rope_context_bound(inv_freq=rotating, limit=looked_at),
        negative_distances=0 if holds else negative,
        last_negative=None if holds else last_negative,
        lowest_decay=round(lowest, 3),
        inv_freq=rotating.tolist(),
        **minimum,
    )


def _negative_distances(theta: np.ndarray, reach: int) -> tuple[int, int | None, float]:
    """Return how many B_m of m = 0..reach are below 0, the last such m, and the smallest B_m."""
    negative, last, lowest = 0, None, math.inf
    for first in range(0, reach + 1, LOOKED_AT):  # bounds the memory
        decay = rope_decay(range(first, min(first + LOOKED_AT, reach + 1)), inv_freq=theta)
        below = np.flatnonzero(decay < 0)
        negative, lowest = negative + len(below), min(lowest, float(decay.min()))
        last = first + int(below[-1]) if len(below) else last
    return negative, last, lowest
