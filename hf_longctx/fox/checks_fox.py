"""Mistakes in the arguments of a call that would otherwise go unnoticed.

PyTorch refuses other mistakes by itself. Shapes and names cost nothing to check. Values are checked only where they
lie on the CPU, since reading a value from a GPU would stall every step. While compiling, nothing is checked.
"""

import difflib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TransformersKwargs

from .attention_fox import GATE_PARTS, GATE_QUERY, folded_width
from .call_fox import is_exporting
from .compat_fox import check_unknown


NO_QUANTIZED_CACHE = (
    "FoX cannot use a quantized cache: the running sum of its gates is stored in the keys and would be rounded with "
    "them. Leave cache_implementation out, or use 'static' or 'offloaded'."
)
# What a call of the model may name. transformers passes on whatever else it is given.
NAMES = {"input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "labels", "use_cache"}
NAMES |= {"past_key_values", "logits_to_keep", *TransformersKwargs.__annotations__}
PART_OF_A_ROW = (
    "a part of a row which context or sequence parallelism has split, where the gates of one part would not fade the keys "
    "of the parts before, so FoX refuses it. Use `hf-longctx train --sequence-parallel N`, or another parallelism."
)


def check_call(config, inputs_embeds, attention_mask, position_ids, cache, shard, kwargs: dict) -> None:
    """Raise ValueError if tokens, mask, positions and cache do not fit together; arguments as in `read_call`."""
    if cache is not None and is_exporting() and any(hasattr(layer, "max_cache_len") for layer in cache.layers):
        raise NotImplementedError(
            "FoX cannot be exported with a static cache: exporters make its keys too narrow for the decay and leave the "
            "token shift out. Export with a DynamicCache, as export_for_generation of transformers.exporters does, or without a "
            "cache: use_cache=False."
        )
    if torch.compiler.is_compiling():
        return
    for name in kwargs.keys() - NAMES:
        if closest := difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8):
            raise ValueError(f"{name!r} is not an argument of this model; {closest[0]!r} is.")
        check_unknown(name, kwargs[name])
    if not (kwargs.get("is_causal", True) and getattr(config, "is_causal", True)):
        raise ValueError(
            "is_causal=False; the gates of a FoX forget the past, so its attention is causal. Leave it out."
        )
    for function in (F.scaled_dot_product_attention, ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)):
        package = getattr(function, "__module__", None) or ""
        if package.startswith(("torch.distributed", "deepspeed")):
            raise ValueError(f"{package} has replaced the attention: each process has {PART_OF_A_ROW}")
    if shard is not None and (attention_mask is not None or cache is not None):
        raise ValueError(
            "rows that several processes share take no attention_mask and no cache. Padding at the end of a row needs no "
            "mask, only labels of -100."
        )
    if inputs_embeds.ndim != 3:
        raise ValueError(
            f"the embedded input is {tuple(inputs_embeds.shape)}; it must be (B, T, {config.hidden_size}), from input_ids "
            "of (B, T). Give a single text as input_ids[None]."
        )
    batch, length = inputs_embeds.shape[:2]
    if position_ids is not None:
        check_positions(position_ids, batch, length, alone=attention_mask is None and cache is None)
    cached = 0 if cache is None else check_cache(config, cache, batch, inputs_embeds.device)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim != 4:
        check_mask(attention_mask, batch, length, cached)


def check_positions(position_ids, batch: int, length: int, alone: bool) -> None:
    """Raise ValueError if position ids are not (1 or B, T), or may be those of a part of a row.

    alone: there is neither a mask nor a cache. In one process, a row may start anywhere: RoPE sees differences of
        positions only.
    """
    if tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids is {tuple(position_ids.shape)}; for {batch} rows of {length} tokens it must be "
            f"{(batch, length)} or {(1, length)}. Leave it out to count from the cached tokens on."
        )
    if position_ids.is_floating_point():
        raise ValueError(f"position_ids is {position_ids.dtype}; positions are integers: position_ids.long().")
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if alone and processes > 1 and (position_ids[:, 0] > 0).any():
        raise ValueError(
            f"position_ids start at {position_ids[:, 0].max()} without a cache, in one of {processes} processes. That may "
            f"be {PART_OF_A_ROW} Where a row is a whole text, count from 0."
        )


def check_mask(attention_mask, batch: int, length: int, cached: int | None) -> None:
    """Raise ValueError unless a mask is (B, past + T) of 1 and 0; how many are cached, None, may be unknown."""
    shape = (batch, length if cached is None else cached + length)
    if attention_mask.ndim != 2 or (cached is not None and attention_mask.shape != shape):
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}; it must be {shape}: a column for each of {cached} cached and "
            f"{length} new tokens, 1 for a token and 0 for padding."
        )
    if attention_mask.device.type == "cpu":
        others = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if len(others):
            raise ValueError(
                f"attention_mask holds {others[0].item()}; it must hold 1 for a token and 0 for padding. Convert a mask "
                "that is added to logits: (mask == 0).long()."
            )


def check_borders(position_ids: torch.Tensor, starts: torch.Tensor) -> None:
    """Raise ValueError if position ids (1 or B, T) start again where the borders, (B, T), have no document start."""
    restarts = F.pad(position_ids[:, 1:] <= position_ids[:, :-1], (1, 0)) & ~starts
    if restarts.any():
        row, t = restarts.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids start again at token {t} of row {row}, where cu_seq_lens_q or seq_idx has no border. Leave one of "
            "them out, or make them agree."
        )


def check_restarts(position_ids: torch.Tensor, starts: torch.Tensor) -> None:
    """Raise ValueError if position ids (B, T) fall, at one of `starts` (B, T), to where no document can start.

    Or if every token starts one: position ids that are all 0 are a mistake.
    """
    if starts.all(dim=1).any():
        raise ValueError(
            "position_ids do not rise in one of the rows, so every token would be a document of its own. Count the "
            "tokens of each document from 0, or leave position_ids out."
        )
    if (position_ids[:, 0] < 0).any():
        raise ValueError(
            f"position_ids start again and begin at {position_ids[:, 0].min()}; documents count from 0. Mark padding by "
            "an attention_mask with 0, not by position ids."
        )
    wrong = starts & (position_ids != position_ids[:, :1])
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids go from {position_ids[row, t - 1]} to {position_ids[row, t]} at token {t} of row {row}. "
            "Within a document they must rise, and the next document packed into the row must start with "
            f"{position_ids[row, 0]} again, as the first did."
        )


def check_cache(config, cache, batch: int, device: torch.device) -> int | None:
    """Return the number of tokens in a cache; None where only the GPU knows.

    Raises:
        ValueError: this model, with this batch, cannot have filled the cache. The first layer is looked at.
        NotImplementedError: the cache is a quantized one.
    """
    layers, kind = cache.layers, type(cache).__name__
    make_one = "Make one for this model: DynamicCache(config=model.config)."
    if len(layers) not in (0, config.num_hidden_layers):
        raise ValueError(
            f"this {kind} is for {len(layers)} layers and the model has {config.num_hidden_layers}. {make_one}"
        )
    layer: Any = layers[0] if layers else None
    gated, sizes, keys = config.forget_gate != "none", config.sizes, getattr(layer, "keys", None)
    if gated and hasattr(layer, "_quantize"):
        raise NotImplementedError(NO_QUANTIZED_CACHE)
    if keys is not None and keys.ndim == 4:
        width = folded_width(sizes.head_dim, sizes.gates_per_key, device) if gated else sizes.head_dim
        if (keys.shape[0], keys.shape[3]) != (batch, width):
            raise ValueError(
                f"this {kind} holds keys of (rows, width) = {(keys.shape[0], keys.shape[3])}; those of this model and input "
                f"are {(batch, width)}. It was filled by another model or for another batch. {make_one}"
            )
        readable = gated and keys.device.type == "cpu" and keys.shape[2] > 0 and not cache.offloading
        marker = sizes.head_dim + GATE_PARTS * sizes.gates_per_key  # of a key into which the decay was folded
        if readable and layer.get_seq_length() > 0 and keys[0, 0, 0, marker] != GATE_QUERY:
            raise ValueError(f"the keys in this {kind} carry no decay, so another model has filled it. {make_one}")
    if (config.k_shift or config.v_shift) and not hasattr(layer, "conv_states"):
        raise ValueError(f"this {kind} has no place for the token shift. {make_one}")
    cached = cache.get_seq_length()
    return cached if isinstance(cached, int) else int(cached) if cached.device.type == "cpu" else None
