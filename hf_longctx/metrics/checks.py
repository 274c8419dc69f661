"""Argument checks for counts, lengths and token ids."""

from __future__ import annotations

import math
import operator
from pathlib import Path, PureWindowsPath

import numpy as np


def as_int(name: str, value, least: float = -math.inf) -> int:
    """Convert an integer of any type to an int.

    Raises:
        ValueError: the value is a bool, not an integer, or below `least`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}.") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}.")
    return number


def public_name(name: str) -> str:
    """Return the last component of a local path. Any other name is returned unchanged.

    >>> public_name("/home/ann/my-model"), public_name("../books/emma.txt"), public_name("gpt2")
    ('my-model', 'emma.txt', 'gpt2')
    """
    windows = PureWindowsPath(name)
    if windows.drive:
        return windows.name
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if path.exists() or path.is_absolute() or name.startswith(("~", "./", "../")):
        return path.resolve().name or name
    return name


def check_token_ids(ids, name: str, vocab_size: float) -> np.ndarray:
    """Convert token ids to an int64 array of shape (N,).

    Args:
        ids: token ids as a flat sequence, an array, or a tensor on any device.
        name: name of the argument, for error messages.
        vocab_size: size of the vocabulary; `math.inf` if unknown.

    Raises:
        ValueError: the ids are empty, not one-dimensional or not integers, or an id is outside 0 .. vocab_size - 1.
    """
    ids = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
    if ids.size == 0:
        raise ValueError(f"{name} is empty. Pass token ids.")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a flat sequence of token ids, got {ids if ids.ndim == 0 else f'{ids.dtype} of shape {ids.shape}'}. "
            'Encode a string with tokenizer(text, add_special_tokens=False)["input_ids"].'
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        raise ValueError(
            f"{name}[{outside[0]}] is {ids[outside[0]]}, but the model's vocabulary has {vocab_size} ids "
            f"(0 .. {vocab_size - 1}). Pass ids that were encoded with the model's own tokenizer."
        )
    return ids.astype(np.int64)
