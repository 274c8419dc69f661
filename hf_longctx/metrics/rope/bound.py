"""Compute the longest context that RoPE frequencies support, and the smallest base for a context (arXiv 2405.14591).

With frequencies theta_i = base^(-2i/d), i < d/2, a query prefers a similar key over a random key. At relative distance
m, this preference is proportional to

    B_m = sum_i cos(m theta_i)                                                     (eq. 16)

The paper requires B_m to be non-negative. For given frequencies, this gives an upper bound on the context. For a given
context, it gives a lower bound on the base:

    L_theta = sup { L : B_m >= 0 for m = 0..L }                                    (eq. 17)
    base_L = inf { base > 1 : B_m >= 0 for m = 0..L }                              (eq. 18)

m is a distance: in a context of N tokens, m <= N - 1. The bound is only a first estimate. It considers a single layer,
but stacked layers have a larger receptive field (sec. 4.3). All arithmetic is numpy float64.

A base is admissible for L if B_m >= 0 for m = 0..L. The admissible bases do not form an interval. The smallest ones
lie in windows with relative widths down to 1e-5, and bases far above base_L can still fail. Users round a base to a
few digits. `rope_base_bound` therefore searches the bases with three significant digits, and checks each at every
distance. It finds the smallest admissible base, and the base above which all searched bases are admissible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import as_int


EPS = float(np.finfo(np.float64).eps)
MAX_CONTEXT = 10**8  # longest context in tokens; longer contexts take minutes
SEARCH_RATIO = 16  # the search for settled_base begins at this multiple of the minimum base


def rope_inv_freq(base: float, head_dim: int) -> np.ndarray:
    """Return the frequencies of plain RoPE in radians per token: theta_i = base^(-2i/head_dim).

    Returns:
        (head_dim / 2,) float64.

    Raises:
        ValueError: base is not a finite number above 1, or head_dim is not an even positive integer.
    """
    if not isinstance(base, Real) or not 1 < base < math.inf:  # this comparison is False for NaN
        raise ValueError(f"base must be a finite number above 1, got {base!r}. The frequencies must decrease.")
    return float(base) ** -exponents(head_dim)


def exponents(head_dim: int) -> np.ndarray:
    """Return the exponents of the frequencies, x_i = 2i / head_dim, as an array (head_dim / 2,)."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be an even positive integer, got {head_dim!r}. RoPE rotates pairs.")
    return np.arange(0, head_dim, 2) / head_dim


def rope_decay(
    m: Any,
    *,
    base: float | None = None,
    head_dim: int | None = None,
    inv_freq: Sequence[float] | np.ndarray | None = None,
) -> Any:
    """Compute B_m = sum_i cos(m theta_i) of eq. 16: the preference of a query for a similar key over a random key.

    Args:
        m: relative distances in tokens: a number, an array of any shape, or a `range`. A range is faster: n cosines
            per frequency are replaced by 2 sqrt(n) sines and one matrix product; see `_decay_range`.
        base: rope_theta of plain RoPE.
        head_dim: number of dimensions of a head; all of them rotate.
        inv_freq: frequencies (n,) in radians per token, instead of base and head_dim. A pair of dimensions that does
            not rotate has frequency 0.

    Returns:
        float64 with the shape of m. If m is a number, the result is a float. The error is about 2e-16 * m *
        sqrt(sum theta^2).

    Raises:
        ValueError: an argument is missing, given twice, or out of range.

    >>> rope_decay([0, 58, 59], base=100, head_dim=128).round(3).tolist()
    [64.0, 0.072, -0.51]
    """
    theta = _frequencies(base, head_dim, inv_freq)
    if isinstance(m, range):
        return _decay_range(theta, m.start, m.step, len(m))
    m = np.asarray(m, dtype=np.float64)
    chunks = np.array_split(m.ravel(), m.size // 65536 + 1)  # limits the size of the table of angles
    decay = np.concatenate([np.cos(np.multiply.outer(chunk, theta)).sum(-1) for chunk in chunks])
    return decay.reshape(m.shape)[()]


def rope_context_bound(
    *,
    base: float | None = None,
    head_dim: int | None = None,
    inv_freq: Sequence[float] | np.ndarray | None = None,
    limit: int = 1 << 22,
) -> int | None:
    """Compute L_theta of eq. 17: the largest distance L such that B_m >= 0 for m = 0..L.

    Args:
        base: see `rope_decay`.
        head_dim: see `rope_decay`.
        inv_freq: see `rope_decay`.
        limit: last distance to evaluate, in tokens.

    Returns:
        L_theta. None if B_m >= 0 for all m up to and including `limit`. B_m is first negative at distance L_theta + 1.
        The longest context that satisfies the bound has L_theta + 1 tokens (distances 0..L_theta). Values within
        float64 rounding of 0 count as 0.

    Raises:
        ValueError: see `rope_decay`.

    >>> rope_context_bound(base=10_000, head_dim=128)
    1706
    """
    negative = _first_negatives(_frequencies(base, head_dim, inv_freq), limit)
    return int(negative[0]) - 1 if len(negative) else None


def _frequencies(
    base: float | None, head_dim: int | None, inv_freq: Sequence[float] | np.ndarray | None
) -> np.ndarray:
    """Check the arguments. Return the frequencies as float64, (n,)."""
    if inv_freq is None and base is not None and head_dim is not None:
        return rope_inv_freq(base, head_dim)
    if inv_freq is None or base is not None or head_dim is not None:
        raise ValueError("Give either base and head_dim (plain RoPE), or inv_freq.")
    theta = np.asarray(inv_freq, dtype=np.float64)
    if theta.ndim != 1 or not len(theta) or not (np.isfinite(theta) & (theta >= 0)).all():
        raise ValueError(
            f"inv_freq must be a vector of finite frequencies >= 0 in radians per token, got an array of shape "
            f"{theta.shape}."
        )
    return theta


# Sums of cosines at many distances ----------------------------------------------------------------------------------


def _decay_range(theta: np.ndarray, first: int, step: int, size: int) -> np.ndarray:
    """Return an array (size,) of B_m at the distances m = first + k step for k < size.

    We write m = a + b. The values of `a` form a coarse grid, and the values of `b` form a fine grid. Each grid
    has about sqrt(size) points. For a frequency t, cos(m t) = cos(a t) cos(b t) - sin(a t) sin(b t). The sum over
    frequencies is then one matrix product.
    """
    width = 1 << (size.bit_length() // 2)
    coarse = rotations(theta, first, step * width, -(-size // width))
    fine = rotations(theta, 0, step, width)
    table = np.concatenate([coarse.real, -coarse.imag]).T @ np.concatenate([fine.real, fine.imag])
    return table.ravel()[:size]


def rotations(theta: np.ndarray, first: int, step: int, size: int) -> NDArray[np.complex128]:
    """Compute exp(i (first + k step) theta) for k < size by repeated doubling. Return a complex array (n, size)."""
    z = np.empty((len(theta), size), dtype=np.complex128)
    z[:, :1] = np.exp(1j * first * theta)[:, None]
    done = 1
    while done < size:
        more = min(done, size - done)
        z[:, done : done + more] = z[:, :more] * np.exp(1j * step * done * theta)[:, None]
        done += more
    return z


def rounding_error(m: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Return an upper bound on the rounding error of B_m in float64."""
    return 4 * EPS * (m * theta.sum() + len(theta))


def _first_negatives(theta: np.ndarray, limit: int) -> np.ndarray:
    """Return an array (k,) of distances m with B_m < 0.

    We divide the distances m <= limit into ranges, and search one range after another. The search ends at the first
    range with a negative value. We return all distances with negative values in this range. Values within float64
    rounding of 0 count as 0.
    """
    first, size = 0, 1024  # the size of the ranges doubles, so the search can stop early
    while first <= limit:
        size = min(size, limit + 1 - first)
        decay = _decay_range(theta, first, 1, size)
        at = np.flatnonzero(decay < 0)
        at = at[decay[at] < -rounding_error(first + at, theta)]
        if len(at):
            return first + at
        first, size = first + size, first + size
    return np.array([], dtype=np.int64)


# The smallest base for a context ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeBaseBound:
    """The result of `rope_base_bound`. A base is admissible if B_m >= 0 for all distances m <= context_length.

    Attributes:
        context_length: L, the largest distance in tokens.
        head_dim: number of dimensions that rotate. Each pair has one frequency.
        non_rotary_dims: number of dimensions that do not rotate. They add non_rotary_dims / 2 to every B_m.
        base: the smallest admissible base with three significant digits. If every base is admissible, it is 1.01.
        settled_base: all bases with three significant digits from settled_base to 16 times `base` are admissible. None
            if the last of them is not admissible.
    """

    context_length: int
    head_dim: int
    non_rotary_dims: int
    base: float
    settled_base: float | None


def rope_base_bound(context_length: int, head_dim: int, *, non_rotary_dims: int = 0) -> RopeBaseBound:
    """Find the minimum base for a context length (eq. 18) among the bases with three significant digits.

    We check every base in ascending order, at every distance.

    Args:
        context_length: L, the largest distance in tokens. B_m must be >= 0 for m = 0..L. A context of N tokens
            requires L = N - 1.
        head_dim: number of dimensions that rotate, even and at least 4.
        non_rotary_dims: number of dimensions that do not rotate (partial rotary embeddings), even.

    Raises:
        ValueError: an argument is out of range. With head_dim=2, B_m = cos(m) does not depend on the base.

    >>> bound = rope_base_bound(1000, 128)
    >>> bound.base, bound.settled_base
    (4210.0, 6020.0)
    """
    exponents(head_dim)  # raises ValueError for an invalid head_dim
    if head_dim < 4:
        raise ValueError(
            "head_dim must be at least 4, got 2. With head_dim=2, the single frequency is 1 for every base."
        )
    if non_rotary_dims < 0 or non_rotary_dims % 2:
        raise ValueError(f"non_rotary_dims must be an even integer >= 0, got {non_rotary_dims!r}.")
    length = as_int("context_length", context_length, 1)
    if length > MAX_CONTEXT:
        raise ValueError(
            f"context_length must be at most {MAX_CONTEXT:,}, got {length:,}. Longer contexts take minutes."
        )
    at_rest = np.zeros(non_rotary_dims // 2)

    def admissible(bases: Iterable[float]) -> Iterator[tuple[float, bool]]:
        """Yield each base, and whether it is admissible."""
        negative = np.array([])
        for base in bases:
            theta = np.append(rope_inv_freq(base, head_dim), at_rest)
            # distances that violate the bound for one base often violate it for the next
            if not (rope_decay(negative, inv_freq=theta) < -rounding_error(negative, theta)).any():
                negative = _first_negatives(theta, length)
                negative = negative[:: len(negative) // 64 + 1]
            yield base, len(negative) == 0

    base = next(base for base, holds in admissible(three_digit_bases(1)) if holds)
    above = list(takewhile(lambda other: other <= SEARCH_RATIO * base, three_digit_bases(base)))
    settled = [other for other, _ in takewhile(lambda found: found[1], admissible(reversed(above)))]
    return RopeBaseBound(length, head_dim, non_rotary_dims, base, settled[-1] if settled else None)


def three_digit_bases(start: float) -> Iterator[float]:
    """Yield all numbers > 1 and >= start with three significant digits, in ascending order."""
    for exponent in count(math.floor(math.log10(start))):
        for digits in range(100, 1000):
            base = float(f"{digits}e{exponent - 2}")
            if base > 1 and base >= start:
                yield base
