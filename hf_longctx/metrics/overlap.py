"""Select non-overlapping spans of a corpus."""

from __future__ import annotations

from collections.abc import Sequence


def separate(stretches: Sequence[tuple[int, int]]) -> list[int]:
    """Select as many non-overlapping spans as possible, and return their indices.

    The indices are in the order in which the spans end.

    Args:
        stretches: spans [first, stop), in tokens.

    >>> separate([(0, 4), (6, 10), (3, 7), (7, 9)])
    [0, 3]
    """
    chosen, end = [], None
    for i in sorted(range(len(stretches)), key=lambda i: stretches[i][1]):
        if end is None or stretches[i][0] >= end:
            chosen.append(i)
            end = stretches[i][1]
    return chosen
