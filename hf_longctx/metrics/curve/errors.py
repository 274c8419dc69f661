"""Which tokens of a text a model copied wrong: rows of bits, of which a result keeps one for each repeat.

A row has a bit for each scored token of a target, the first of them in the highest bit, 1 where it was wrong, written
as hexadecimal digits. This file knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np


def pack(wrong: np.ndarray) -> list[str]:
    """Write (R, scored) bool as a text for each repeat.

    >>> pack(np.array([[False] * 6 + [True] * 3]))
    ['0380']
    """
    return [np.packbits(row).tobytes().hex() for row in wrong]


def unpack(rows: Sequence[str], scored: int) -> np.ndarray:
    """Return what `pack` wrote, (R, scored) bool.

    Raises:
        ValueError: a row is not of so many tokens.
    """
    digits = 2 * -(-scored // 8)
    for row in rows:
        if not (isinstance(row, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", row)):
            raise ValueError(
                f"a row of {scored} scored tokens must have {digits} hexadecimal digits, got {row!r:.40}."
            )
    bits = np.array([np.frombuffer(bytes.fromhex(row), np.uint8) for row in rows])
    return np.unpackbits(bits, axis=-1, count=scored).astype(bool)


def share_by_part(wrong: np.ndarray, parts: int) -> np.ndarray:
    """Return the share of wrong tokens in each of so many equal parts of the scored tokens, (parts,) float64.

    Args:
        wrong: (R, scored) bool. Of fewer tokens than parts, some parts have the same token.

    >>> share_by_part(np.array([[False, False, True, True]]), 2).tolist()
    [0.0, 1.0]
    >>> share_by_part(np.array([[True, False]]), 3).tolist()
    [1.0, 0.5, 0.0]
    """
    scored = wrong.shape[-1]
    edges = np.linspace(0, scored, parts + 1)
    spans = zip(np.floor(edges[:-1]).astype(int), np.ceil(edges[1:]).astype(int))
    return np.array([wrong[:, start:stop].mean() for start, stop in spans])
