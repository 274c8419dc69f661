"""Check the rotary embeddings of a model, read from its config, against the bound of arXiv 2405.14591.

print(rope_report("meta-llama/Llama-3.1-8B"))
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..checks import as_int
from .base import MAX_CONTEXT, rope_base_bound
from .bounds import rope_context_bound, rope_decay
from .config import (
    NoRopeError,
    Rope,
    attention_window,
    claimed_context,
    layer_groups,
    parameters_of,
    rope_of_layers,
    with_model_frequencies,
    with_rope_parameters,
)
from .reading import Source, read_source, readable
from .result import RopeLayers, RopeReport


SEARCHED = 1 << 22  # minimum distances to search for the first B_m < 0
LENGTH_DEPENDENT = ("dynamic", "longrope")
MINIMUM_BASE_UP_TO = 1 << 20  # tokens; eq. 18 takes minutes beyond


def rope_report(
    model_or_config: Any,
    *,
    context_length: int | None = None,
    minimum_base: bool = True,
    model_kwargs: dict[str, Any] | None = None,
) -> RopeReport:
    """Check whether a model's rotary embedding satisfies B_m >= 0 over its context, and find the bases that do.

    Reads `rope_parameters` of transformers 5, flat or per layer type, and the older rope_theta with rope_scaling; the
    rope types default, linear, dynamic, yarn, longrope, llama3 and proportional; partial rotary embeddings; sliding
    windows; layers without RoPE. In a model of several parts it reads the text decoder. The plain fields of a type
    that transformers does not know are read as a Llama would.

    Args:
        model_or_config: a `PreTrainedModel`, a `PreTrainedConfig`, the content of a config.json, or the name, folder
            or config.json of a model.
        context_length: context to check, in tokens. Default: the largest that the config or the tokenizer's config
            claims; see `config.claimed_context`. Dynamic and longrope frequencies depend on it.
        minimum_base: whether to compute eq. 18 too, which takes most of the time (half a minute for 128k tokens).
        model_kwargs: keywords of `from_pretrained` for a model given by its name, such as revision.

    Returns:
        RopeReport. Its notes name the assumptions, such as defaults of the config class.

    Raises:
        NoRopeError: the model does not use RoPE; a ValueError.
        ValueError: the config misses a setting or has an unknown one, or an argument is out of range.
        NotImplementedError: the rope type is unknown.
    """
    source = read_source(model_or_config, **(model_kwargs or {}))
    with readable(source.name):
        return _report(source, model_or_config, context_length, minimum_base)


def _report(source: Source, model: Any, context_length: int | None, minimum_base: bool) -> RopeReport:
    """Check each group of layers of a config."""
    config, notes = with_rope_parameters(source), source.notes
    claimed, claimed_by = claimed_context(source) if context_length is None else (context_length, "given")
    claimed = as_int(f"the context to check ({claimed_by})", claimed, 2)
    if claimed > MAX_CONTEXT:
        raise ValueError(
            f"the context to check ({claimed_by}) must be at most {MAX_CONTEXT} tokens, got {claimed}. Longer contexts take "
            "minutes."
        )
    groups = []
    for (kind, base), layers in layer_groups(config).items():
        reach = min(claimed, attention_window(config, kind, layers) or claimed) - 1
        if not base:
            groups.append(RopeLayers(kind, len(layers), reach))
            continue
        rope = rope_of_layers(source, kind, base, layers, claimed)
        alpha = parameters_of(config, kind).get("alpha")
        if rope.type in LENGTH_DEPENDENT and not alpha:
            notes.append(f"{rope.type} frequencies depend on the length; they are those at {claimed} tokens")
        elif hasattr(model, "config") and not getattr(config, "layer_rope_theta", None):
            rope = with_model_frequencies(rope, model, kind, notes)
        why_not = "proportional RoPE has exponents of its own" if rope.type == "proportional" else None
        if reach > MINIMUM_BASE_UP_TO:
            why_not = f"the search takes minutes beyond {MINIMUM_BASE_UP_TO} tokens"
        if minimum_base and why_not is not None:
            notes.append(f"the minimum base is not computed: {why_not}")
        groups.append(_bound(rope, kind, len(layers), reach, minimum_base and why_not is None))
    if not any(group.rope_type for group in groups):
        raise NoRopeError(config, "none of its layers is an attention layer with RoPE")
    return RopeReport(source.name, claimed, claimed_by, tuple(groups), tuple(dict.fromkeys(notes)))


def _bound(rope: Rope, kind: str, layers: int, reach: int, minimum_base: bool) -> RopeLayers:
    """Compute the bound of one group of layers up to distance `reach`."""
    rotating = rope.inv_freq[rope.inv_freq > 0]
    at_rest = rope.head_dim // 2 - len(rotating)
    theta = np.append(rotating, np.zeros(at_rest))
    searched = max(reach, SEARCHED)
    bound = rope_context_bound(inv_freq=theta, limit=searched)
    holds = bound is None or bound >= reach
    negative, last_negative, lowest = _negative_distances(theta, reach)
    minimum = {}
    if minimum_base and at_rest < len(rotating):
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
        rotary_only_bound=rope_context_bound(inv_freq=rotating, limit=searched),
        negative_distances=0 if holds else negative,
        last_negative=None if holds else last_negative,
        lowest_decay=round(lowest, 3),
        inv_freq=rotating.tolist(),
        **minimum,
    )


def _negative_distances(theta: np.ndarray, reach: int) -> tuple[int, int | None, float]:
    """Return how many B_m of m = 0..reach are below 0, the last such m, and the smallest B_m."""
    negative, last, lowest = 0, None, math.inf
    for first in range(0, reach + 1, SEARCHED):  # limits the memory
        decay = rope_decay(range(first, min(first + SEARCHED, reach + 1)), inv_freq=theta)
        below = np.flatnonzero(decay < 0)
        negative, lowest = negative + len(below), min(lowest, float(decay.min()))
        last = first + int(below[-1]) if len(below) else last
    return negative, last, lowest
