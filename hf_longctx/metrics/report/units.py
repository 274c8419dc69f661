"""Lengths of several models in one unit: tokens if all results count the same tokens, else bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..curve.intervals import LengthInterval


def bytes_per_token(result: Any) -> float:
    """Return the mean size of a token of the measured text in bytes; NaN if it is unknown."""
    return float(result.settings.get("bytes_per_token") or math.nan)


def sizes_in_bytes(results: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the bytes per token of each result. If the tokens are the same, or a size is unknown, return None."""
    first, *others = results.values()
    sizes = {name: bytes_per_token(result) for name, result in results.items()}
    if all(first.same_tokens(other) for other in others) or any(map(math.isnan, sizes.values())):
        return None
    return sizes


def interval_in_bytes(interval: LengthInterval, size: float) -> str:
    """Convert the confidence interval of a length from tokens to bytes, in words.

    >>> interval_in_bytes(LengthInterval(128, None), 3.71)
    'at least 475'
    """
    high = None if interval.high is None else round(interval.high * size)
    return interval._replace(low=round(interval.low * size), high=high).in_words()
