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

A base is admissible for L if B_m >= 0 for m = 0..L. The admissible bases do not form an interval. The smallest
admissible bases lie in windows with relative widths down to 1e-5. A grid search misses such windows, and therefore
reports a larger minimum. Bases far above base_L can still fail. `rope_base_bound` finds the exact infimum and three
numbers for practical use: the width of the first window, the smallest admissible base with two significant digits, and
`settled_base`. All bases from `settled_base` to the end of the search are admissible. By Taylor's theorem, we do not
miss any violation between two evaluations. This proof does not cover the rounding errors of the evaluations (below
1e-8 in B_m at m = 1e6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from itertools import count
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import as_int


EPS = float(np.finfo(np.float64).eps)
WIDTH = 256  # number of consecutive distances in one row of a matrix product
BATCH = 32  # number of rows that are re-evaluated together
MAX_CONTEXT = 10**8  # longest context in tokens; longer contexts take minutes
TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021")


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
    return real_product(coarse, fine).ravel()[:size]


def rotations(theta: np.ndarray, first: int, step: int, size: int) -> NDArray[np.complex128]:
    """Compute exp(i (first + k step) theta) for k < size by repeated doubling. Return a complex array (n, size)."""
    z = np.empty((len(theta), size), dtype=np.complex128)
    z[:, :1] = complex_exponential(first * theta[:, None])
    done = 1
    while done < size:
        more = min(done, size - done)
        rotation = complex_exponential(step * done * theta[:, None])
        np.multiply(z[:, :more], rotation, out=z[:, done : done + more])
        done += more
    return z


def complex_exponential(angle: np.ndarray) -> NDArray[np.complex128]:
    """Return exp(i angle). This is faster than numpy's `exp` of an imaginary array."""
    z = np.empty(angle.shape, dtype=np.complex128)
    z.real, z.imag = np.cos(angle), np.sin(angle)
    return z


def real_product(coarse: NDArray[np.complex128], fine: NDArray[np.complex128]) -> np.ndarray:
    """Return Re(coarse^T fine): the sum of cos(coarse angle + fine angle) over frequencies."""
    return np.concatenate([coarse.real, -coarse.imag]).T @ np.concatenate([fine.real, fine.imag])


def rounding_error(m: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Return an upper bound on the rounding error of B_m in float64."""
    return 4 * EPS * (m * theta.sum() + len(theta))


def _first_negatives(theta: np.ndarray, limit: int, constant: int = 0) -> np.ndarray:
    """Return an array (k,) of distances m with B_m + constant < 0.

    We divide the distances m <= limit into ranges, and search one range after another. The search ends at the first
    range with a negative value. We return all distances with negative values in this range. Values within float64
    rounding of 0 count as 0.
    """
    first, size = 0, 1024  # the size of the ranges doubles, so the search can stop early
    while first <= limit:
        size = min(size, limit + 1 - first)
        decay = _decay_range(theta, first, 1, size) + constant
        at = np.flatnonzero(decay < 0)
        at = at[decay[at] < -rounding_error(first + at, theta)]
        if len(at):
            return first + at
        first, size = first + size, first + size
    return np.array([], dtype=np.int64)


# The smallest base for a context ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeBaseBound:
    """The result of `rope_base_bound`. A base above 1 is admissible if B_m >= 0 for all m <= context_length.

    Attributes:
        context_length: L, the largest distance in tokens.
        head_dim: number of dimensions that rotate. Each pair has one frequency.
        non_rotary_dims: number of dimensions that do not rotate. They add non_rotary_dims / 2 to every B_m.
        base: base_L of eq. 18, the infimum of the admissible bases.
        critical_distance: at this distance m, B_m is 0 for `base`, and negative for slightly smaller bases. None if
            `base` is 1.
        window_end: end of the first interval of admissible bases, [base, window_end]. None if the interval extends
            beyond search_limit.
        two_digit_base: the smallest admissible base with two significant digits.
        settled_base: all bases from settled_base to search_limit are admissible. None if search_limit itself is not
            admissible.
        search_limit: the largest base searched.
    """

    context_length: int
    head_dim: int
    non_rotary_dims: int
    base: float
    critical_distance: int | None
    window_end: float | None
    two_digit_base: float
    settled_base: float | None
    search_limit: float

    @property
    def window_width(self) -> float | None:
        """Relative width of the first window, (window_end - base) / base."""
        return None if self.window_end is None else (self.window_end - self.base) / self.base


def rope_base_bound(
    context_length: int, head_dim: int, *, non_rotary_dims: int = 0, search_ratio: float = 16.0
) -> RopeBaseBound:
    """Find the exact minimum base for a context length (eq. 18), and bases for use in practice.

    Args:
        context_length: L, the largest distance in tokens. B_m must be >= 0 for m = 0..L. A context of N tokens
            requires L = N - 1.
        head_dim: number of dimensions that rotate, even and at least 4.
        non_rotary_dims: number of dimensions that do not rotate (partial rotary embeddings), even.
        search_ratio: the search for window_end and settled_base ends at search_ratio * base. This search takes most
            of the time; `rope_base_table` omits it.

    Returns:
        RopeBaseBound. Its `base` is correct to one unit in the last place of a float64.

    Raises:
        ValueError: an argument is out of range. With head_dim=2, B_m = cos(m) does not depend on the base.

    >>> bound = rope_base_bound(1000, 128)
    >>> round(bound.base, 6), bound.two_digit_base, round(bound.settled_base, 6)
    (4206.019223, 4300.0, 6018.280857)
    """
    family = _DecayFamily(head_dim, non_rotary_dims)
    if not (math.isfinite(search_ratio) and search_ratio > 1):
        raise ValueError(f"search_ratio must be a finite number above 1, got {search_ratio!r}.")
    length = as_int("context_length", context_length, 1)
    if length > MAX_CONTEXT:
        raise ValueError(
            f"context_length must be at most {MAX_CONTEXT:,}, got {length:,}. Longer contexts take minutes."
        )
    # Let u = ln base. Find the infimum, then the first violation above it, then the last violation before `end`.
    ((_, start, critical),) = _infima(family, [length])
    base = family.base_at_root(start, critical)
    end = start + math.log(search_ratio)
    window = _next_root(family, start, end, length)
    settled = (start, critical) if window is None else _next_root(family, end, start, length)
    assert settled is not None  # a downward search stops at the infimum at the latest
    return RopeBaseBound(
        context_length=length,
        head_dim=head_dim,
        non_rotary_dims=non_rotary_dims,
        base=base,
        critical_distance=critical,
        window_end=None if window is None else family.base_at_root(*window),
        two_digit_base=_scan(family, [length], 2, base)[length],
        settled_base=None if settled[0] == end else family.base_at_root(*settled),
        search_limit=math.exp(end),
    )


def rope_base_table(context_lengths: Iterable[int], head_dim: int, *, non_rotary_dims: int = 0) -> dict[int, float]:
    """Map each length to its base_L (eq. 18).

    All lengths together take as long as the largest length alone. See `rope_base_bound` for the arguments and
    exceptions.
    """
    family = _DecayFamily(head_dim, non_rotary_dims)
    return {length: family.base_at_root(u, m) for length, u, m in _infima(family, _lengths(context_lengths))}


def rope_base_scan(
    context_lengths: Iterable[int], head_dim: int, *, digits: int = 2, non_rotary_dims: int = 0
) -> dict[int, float]:
    """Map each length to its first admissible base with a given number of significant digits.

    The bases are suitable for a config, but larger bases may still fail. See `rope_base_bound` for the arguments and
    exceptions.
    """
    family = _DecayFamily(head_dim, non_rotary_dims)
    return _scan(family, _lengths(context_lengths), as_int("digits", digits, 1), 1.0)


class _DecayFamily:
    """B_m as a function of u = ln base: B = sum_i cos(m theta_i) + constant, theta_i = exp(-u x_i), x_i = 2i/d.

    The slope is dB/du = m sum x theta sin(m theta). K bounds the curvature, and decreases with u: |d2B/du2| <= K = m^2
    sum (x theta)^2 + m sum x^2 theta.
    """

    def __init__(self, head_dim: int, non_rotary_dims: int):
        self.x = exponents(head_dim)
        if head_dim < 4:
            raise ValueError(
                "head_dim must be at least 4, got 2. With head_dim=2, the single frequency is 1 for every base."
            )
        if non_rotary_dims < 0 or non_rotary_dims % 2:
            raise ValueError(f"non_rotary_dims must be an even integer >= 0, got {non_rotary_dims!r}.")
        self.head_dim, self.constant = head_dim, non_rotary_dims // 2

    def at(self, m: np.ndarray, u: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return B_m, its slope dB/du and the curvature bound K at u. Like m, each has shape (k,)."""
        theta = np.exp(-u * self.x)
        angle = np.multiply.outer(m, theta)
        value = np.cos(angle).sum(-1) + self.constant
        return value, m * (np.sin(angle) @ (self.x * theta)), self.curvature(m, theta)

    def at_rows(self, starts: np.ndarray, u: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Evaluate WIDTH consecutive distances m, beginning at each of the k starts.

        Returns:
            B_m, dB/du, K and m. Each has shape (k, WIDTH).
        """
        theta = np.exp(-u * self.x)
        coarse, fine = complex_exponential(np.multiply.outer(theta, starts)), rotations(theta, 0, 1, WIDTH)
        m = starts[:, None] + np.arange(WIDTH)
        slope = m * real_product(-1j * coarse, fine * (self.x * theta)[:, None])  # -1j selects the imaginary part
        return real_product(coarse, fine) + self.constant, slope, self.curvature(m, theta), m

    def curvature(self, m: np.ndarray, theta: np.ndarray) -> np.ndarray:
        """Return the curvature bound K for each distance in m."""
        x_theta = self.x * theta
        return m * (m * (x_theta @ x_theta) + self.x @ x_theta) + np.finfo(np.float64).tiny  # positive even at m = 0

    def base_at_root(self, u: float, m: int | None) -> float:
        """Return the base near exp(u) at which B_m = 0.

        We use Newton's method with 40-digit angles. float64 angles would lose two digits of the base.
        """
        if m is None:
            return math.exp(u)
        with localcontext() as context:
            context.prec = 40
            base = Decimal(math.exp(u))
            for _ in range(3):
                theta = [base ** (Decimal(-2 * i) / self.head_dim) for i in range(len(self.x))]
                angle = np.array([float(m * t % TWO_PI) for t in theta])
                slope = m * (np.sin(angle) @ (self.x * np.array(theta, dtype=np.float64)))
                base -= base * Decimal((np.cos(angle).sum() + self.constant) / slope)
            return float(base)


def _infima(family: _DecayFamily, lengths: Sequence[int]) -> Iterator[tuple[int, float, int | None]]:
    """Find base_L of eq. 18 for each length, in ascending order.

    We increase u = ln base from 0. If B_m < 0 for some m <= L, no base up to the next root of B_m is admissible. We
    move u to that root. If B_m >= 0 for all m <= L, exp(u) is base_L.

    Yields:
        (L, u, m): base_L is exp(u), and B_m rises through 0 at u. If u is 0, m is None.
    """
    u, critical = 0.0, None
    for length in lengths:
        while len(negative := _first_negatives(np.exp(-u * family.x), length, family.constant)):
            u, critical = _step_past_violation(family, negative, u)
        yield length, u, critical


def _step_past_violation(family: _DecayFamily, m: np.ndarray, u: float) -> tuple[float, int]:
    """Choose one of the distances m. Return the next root of B_m above u, and the chosen distance.

    We choose the distance for which we can prove B_m < 0 on the longest interval above u.

    Args:
        m: distances (k,) with B_m < 0 at u.
    """
    m = m[:: len(m) // 64 + 1]  # a sample is enough
    furthest = np.argmax(_sign_keeping_step(*family.at(m, u)))
    m = m[furthest : furthest + 1]
    while True:
        value, slope, curvature = family.at(m, u)
        step = _sign_keeping_step(value, slope, curvature)[0]
        if value[0] >= 0 or step <= EPS * u:
            return u, int(m[0])
        u += step  # B_m < 0 for every base up to here


def _next_root(family: _DecayFamily, u: float, end: float, length: int) -> tuple[float, int] | None:
    """Find the first point between `u` and `end` where B_m becomes negative for some m <= length.

    We group the distances m in rows. Each row has an interval that starts at `u`. On this interval, B_m >= 0 is proven
    for all m of the row. `proven` contains the lengths of the intervals. To extend the shortest intervals, we
    repeatedly evaluate their rows.

    Returns:
        the point and the distance m. None if there is no such point.
    """
    towards, starts = math.copysign(1, end - u), np.arange(0, length + 1, WIDTH)
    proven = np.zeros(len(starts))
    stride = 0.05  # maximum step in u; K grows by a factor of at most exp(2 stride) over a step
    while True:
        rows = np.argpartition(proven, min(BATCH, len(starts)) - 1)[:BATCH]
        v = u + towards * proven[rows].min()
        if proven[rows].min() >= abs(end - u):
            return None
        value, slope, curvature, m = family.at_rows(starts[rows], v)
        step = _sign_keeping_step(np.maximum(value, 0), towards * slope, curvature * math.exp(2 * stride))
        step[value < -rounding_error(m, np.exp(-v * family.x))] = 0
        step[m > length] = np.inf  # the last row may extend beyond the length
        nearest = np.unravel_index(step.argmin(), step.shape)
        if step[nearest] <= 4 * EPS * v:
            return v, int(m[nearest])
        proven[rows] = np.maximum(proven[rows], proven[rows].min() + np.minimum(step.min(1), stride))


def _sign_keeping_step(value: np.ndarray, slope: np.ndarray, curvature: np.ndarray) -> np.ndarray:
    """Return the largest z such that f provably keeps its sign on [0, z].

    Here f(0) = value, f'(0) = slope and |f''| <= curvature. Let `away` be -slope if value < 0, otherwise slope. By
    Taylor's theorem, f keeps its sign as long as |value| + away z - curvature z^2 / 2 > 0.
    """
    away = np.where(value < 0, -slope, slope)
    return (away + np.sqrt(away**2 + 2 * curvature * np.abs(value))) / curvature


def _scan(family: _DecayFamily, lengths: Sequence[int], digits: int, start: float) -> dict[int, float]:
    """Map each length L to its first admissible base that is at least `start` and has `digits` significant digits."""
    table, left = {}, list(lengths)
    at_rest = np.zeros(family.constant)
    bases = _bases_of(digits, start)
    while left:
        base = next(bases)
        theta = np.append(rope_inv_freq(base, family.head_dim), at_rest)
        reach = rope_context_bound(inv_freq=theta, limit=left[-1])
        while left and (reach is None or left[0] <= reach):
            table[left.pop(0)] = base
    return table


def _bases_of(digits: int, start: float) -> Iterator[float]:
    """Yield all numbers > 1 and >= start with `digits` significant digits, in ascending order."""
    for exponent in count(math.floor(math.log10(start))):
        for mantissa in range(10 ** (digits - 1), 10**digits):
            base = float(f"{mantissa}e{exponent - digits + 1}")
            if base > 1 and base >= start:
                yield base


def _lengths(context_lengths: Iterable[int]) -> list[int]:
    return sorted({as_int("context_lengths", length, 1) for length in context_lengths})
