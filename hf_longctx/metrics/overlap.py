"""Stretches of a text that overlap."""

from __future__ import annotations

from collections.abc import Sequence


def separate(stretches: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of the largest set of stretches without an overlap, in the order of their ends.

    Args:
        stretches: first token, and the one after the last, of each.

    >>> separate([(0, 4), (6, 10), (3, 7), (7, 9)])
    [0, 3]
    """
    chosen, end = [], None
    for i in sorted(range(len(stretches)), key=lambda i: stretches[i][1]):
        if end is None or stretches[i][0] >= end:
            chosen.append(i)
            end = stretches[i][1]
    return chosen
