"""Read what each layer attends to from the config.json of a model type that transformers does not support.

Models on the Hub describe their layers by fields with many names. A field of each form:

    layer_types: ["sliding_attention", "full_attention", ...]     the type of each layer
    hybrid_layer_pattern: [0, 1, 1, ...]                          1 for a layer with a window
    sliding_window: [null, 4096, 4096, 4096]                      a repeated pattern of windows
    sliding_window_layers: [1, 3, 5, ...]                         the layers with a window
    global_attn_idx: [0, 15, 31]                                  the layers without a window
    sliding_window_pattern: 6, or "LLLLLG"                        every sixth layer has no window
    max_window_layers: 28                                         the layers from 28 on have a window

If config.json sets a window, but not its layers, we assume full attention and add a note.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

from ..checks import as_int


WINDOWED = re.compile(r"(?<!reference_)sliding|local|swa|window|chunked")  # in the name of a layer type
WINDOWS = (
    *("sliding_window", "sliding_window_size", "interleaved_sliding_window", "_sliding_window", "sliding_window_list"),
    *("attention_window", "attention_window_size", "swa_window_size", "local_window_size", "local_attention_window"),
    *("local_attention", "window_size"),
)
USES_WINDOW = ("use_sliding_window", "use_sliding_window_attention", "use_swa")
LOCAL_BASES = (
    *("swa_rope_theta", "rope_local_base_freq", "local_rope_theta", "rope_theta_local", "rope_local_theta"),
    *("swa_rotary_base", "local_rope_base"),
)
NO_WINDOW = (None, 0, -1, [])
COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def listed_types(name: str, value: Any, count: int) -> list[str]:
    if not (isinstance(value, list) and len(value) >= count and all(isinstance(kind, str) for kind in value)):
        raise ValueError(f"{name} must be a list with the type of each of {count} layers, got {value!r}.")
    return value[:count]  # further entries describe layers for multi-token prediction


def window_flags(name: str, value: Any, count: int) -> list[str]:
    """Read 1 or L (local) as a window, 0 or G (global) as full attention. A shorter list is a repeated pattern."""
    flags = value
    if isinstance(value, str):
        flags = [{"L": 1, "G": 0}.get(letter, letter) for letter in value.upper()]
    elif isinstance(value, list) and all(isinstance(kind, str) for kind in value):
        flags = [int(bool(WINDOWED.search(kind))) for kind in value]
    if not isinstance(flags, list) or not flags or any(flag not in (0, 1) for flag in flags):
        raise ValueError(
            f"{name} must contain 1 for each layer with a window and 0 for each other layer, got {value!r}."
        )
    return with_window([bool(flag) for flag in islice(cycle(flags), count)])


def pattern(name: str, value: Any, count: int) -> list[str]:
    """Read a pattern of flags, or its period: the last layer of each period has full attention."""
    if isinstance(value, str | list):
        return window_flags(name, value, count)
    period = as_int(name, value, 1)
    return with_window([(i + 1) % period > 0 for i in range(count)])


def first_of_n_is_global(name: str, value: Any, count: int) -> list[str]:
    period = as_int(name, value, 1)
    return with_window([i % period > 0 for i in range(count)])


def windowed_layers(name: str, value: Any, count: int) -> list[str]:
    at = layer_indices(name, value)
    return with_window([i in at for i in range(count)])


def global_layers(name: str, value: Any, count: int) -> list[str]:
    at = layer_indices(name, value)
    return with_window([i not in at for i in range(count)])


def last_layers(name: str, value: Any, count: int) -> list[str]:
    first = as_int(name, value, 0)
    return with_window([i >= first for i in range(count)])


def compressed(name: str, value: Any, count: int) -> list[str]:
    """Read DeepSeek-V4's ratios. Compressed keys come from the whole context. A layer of ratio 0 only has a window."""
    if not isinstance(value, list) or len(value) < count:
        raise ValueError(f"{name} must be a list with the ratio of each of {count} layers, got {value!r}.")
    return [COMPRESSED.get(ratio, "compressed_attention") for ratio in value[:count]]


def with_window(flags: list[bool]) -> list[str]:
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def layer_indices(name: str, value: Any) -> set[int]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of layer indices, got {value!r}.")
    return {as_int(f"each index in {name}", i, 0) for i in value}


TYPES = ("layer_types", "layers_block_type", "attn_types", "attention_layer_types", "compress_ratios")
WINDOWED_LAYERS = (
    *("sliding_window_layers", "swa_layers", "local_layers", "sliding_attention_layers"),
    *("local_layer_ids", "local_attention_layers", "swa_layer_ids", "sliding_layers"),
)
GLOBAL_LAYERS = (
    *("global_attn_idx", "global_layers", "global_layer_ids", "global_attention_layers"),
    *("full_attention_layers", "full_attn_idxs", "full_attn_layers", "full_layers"),
)
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch", "global_attn_every_n")
# The functions that read the type of each layer. If a file has several of these fields, the first one counts.
READERS: dict[str, Callable[[str, Any, int], list[str]]] = {
    **dict.fromkeys(TYPES, listed_types),
    "compress_ratios": compressed,
    **dict.fromkeys(("hybrid_layer_pattern", "layer_pattern"), window_flags),
    **dict.fromkeys(PATTERNS, pattern),
    "global_attn_every_n_layers": first_of_n_is_global,
    **dict.fromkeys(WINDOWED_LAYERS, windowed_layers),
    **dict.fromkeys(GLOBAL_LAYERS, global_layers),
    "max_window_layers": last_layers,
}
ROPE_FLAGS = ("no_rope_layers", "use_rope_layers", "rope_layers")  # 1 for a layer with RoPE, also in no_rope_layers
NOPE_LAYERS = ("nope_layers", "nope_layer_ids", "no_rope_layers", "no_rope_layer_ids")
NOPE_INTERVALS = ("no_rope_layer_interval", "nope_layer_interval", "no_rope_interval", "nope_interval")
READ = {
    *(*READERS, *WINDOWS, *USES_WINDOW, *LOCAL_BASES),
    *(*ROPE_FLAGS, *NOPE_LAYERS, *NOPE_INTERVALS, "attention_chunk_size"),
}


def read_layers(file: dict[str, Any], count: int, notes: list[str]) -> dict[str, list]:
    """Read the type, the window and the use of RoPE of each layer.

    Args:
        file: fields of the text decoder.
        count: number of layers.
        notes: we add a note on each assumption.

    Returns:
        `layer_types`, `layer_windows` (None for full attention) and `rotating_layers`, each with `count` entries.
    """
    field = next((name for name in READERS if file.get(name) not in (None, False)), None)
    kinds = None if field is None else READERS[field](field, file[field], count)
    switches = {flag: file[flag] for flag in USES_WINDOW if file.get(flag) is not None}
    for flag, value in switches.items():
        if value not in (0, 1):
            raise ValueError(f"{flag} must be true or false, got {value!r}.")
    switched_off = not all(switches.values())
    name = None if switched_off else next((name for name in WINDOWS if file.get(name) not in NO_WINDOW), None)
    size: Any = None if name is None else file[name]
    if size is not None and not isinstance(size, list):
        size = as_int(str(name), size, 2)
    if kinds is None or (size is None and field not in TYPES):
        kinds = with_window([False] * count)
    windows = [size if WINDOWED.search(kind) else None for kind in kinds]
    if isinstance(size, list):
        sliding = [i for i, kind in enumerate(kinds) if WINDOWED.search(kind)]
        windows = [None] * count
        for i, window in zip(sliding if len(size) == len(sliding) else range(count), cycle(size)):
            windows[i] = None if window in NO_WINDOW else window
        kinds = kinds if field in TYPES else with_window([window is not None for window in windows])
    elif size is not None and field is None:
        notes.append(
            f"config.json sets {name} = {size!r}, but not the layers that use it; we assume full attention in all layers"
        )
    windows = [file.get("attention_chunk_size") if "chunked" in kind else size for kind, size in zip(kinds, windows)]
    if not switched_off:
        for kind in sorted({kind for kind, size in zip(kinds, windows) if size is None and WINDOWED.search(kind)}):
            notes.append(f"config.json does not set the window of {kind} layers; we assume full attention")
    return {
        "layer_types": kinds,
        "layer_windows": [
            None if size is None else as_int(name or "attention_chunk_size", size, 2) for size in windows
        ],
        "rotating_layers": read_rotating_layers(file, count),
    }


def read_rotating_layers(file: dict[str, Any], count: int) -> list[bool]:
    """Return whether each layer applies RoPE."""
    for name in (*ROPE_FLAGS, *NOPE_LAYERS):
        value = file.get(name)
        if not isinstance(value, list) or not value:
            continue
        are_flags = len(value) >= count and all(flag in (0, 1) for flag in value)
        if are_flags:
            return [bool(flag) == (name in ROPE_FLAGS) for flag in value[:count]]
        if name in NOPE_LAYERS:
            at = layer_indices(name, value)
            return [i not in at for i in range(count)]
        raise ValueError(f"{name} must contain 0 or 1 for each of {count} layers, got {value!r}.")
    name = next((name for name in NOPE_INTERVALS if file.get(name)), None)
    interval = count + 1 if name is None else as_int(name, file[name], 1)
    return [(i + 1) % interval > 0 for i in range(count)]
