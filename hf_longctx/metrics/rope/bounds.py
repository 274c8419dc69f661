"""The distance up to which a rotary position embedding prefers similar tokens to random ones (arXiv 2405.14591).

With frequencies theta_i = base^(-2i/d), i < d/2, a query at relative distance m prefers a similar key to a random one
by an amount proportional to

    B_m = sum_i cos(m theta_i)                                                     (eq. 16)

which the paper requires to be non-negative. That bounds the context for given frequencies,

    L_theta = sup { L : B_m >= 0 for m = 0..L }                                    (eq. 17)

and the base for a given context, see base.py. m is a distance: a context of N tokens needs m <= N - 1. The bound is a
screening number: stacked layers see further than one layer (sec. 4.3). All arithmetic is numpy float64.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


EPS = float(np.finfo(np.float64).eps)


def rope_inv_freq(base: float, head_dim: int) -> np.ndarray:
    """Return theta_i = base^(-2i/head_dim), the frequencies of plain RoPE in radians per token.

    Returns:
        (head_dim / 2,) float64.

    Raises:
        ValueError: base is not a finite number above 1, or head_dim is not an even positive integer.
    """
    if isinstance(base, str) or not 1 < base < math.inf:  # False for NaN
        raise ValueError(f"base must be a finite number above 1, so that frequencies decrease, got {base!r}.")
    return float(base) ** -exponents(head_dim)


def exponents(head_dim: int) -> np.ndarray:
    """Return x_i = 2i / head_dim, (head_dim / 2,)."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be an even positive integer, because RoPE rotates pairs, got {head_dim!r}.")
    return np.arange(0, head_dim, 2) / head_dim


def rope_decay(
    m: Any,
    *,
    base: float | None = None,
    head_dim: int | None = None,
    inv_freq: Sequence[float] | np.ndarray | None = None,
) -> Any:
    """Compute B_m = sum_i cos(m theta_i) of eq. 16: how much a query prefers a similar key to a random one.

    Args:
        m: relative distances in tokens: a number, an array of any shape, or a `range`. A range of n distances costs
            2 sqrt(n) sines per frequency and one matrix product instead of n cosines; see `_decay_range`.
        base: rope_theta of plain RoPE.
        head_dim: dimensions of a head, all of which rotate.
        inv_freq: frequencies in radians per token, (n,), instead of base and head_dim. Zeros stand for dimensions that
            do not rotate.

    Returns:
        float64, of the shape of m; a float if m is a number. The error is about 2e-16 * m * sqrt(sum theta^2).

    Raises:
        ValueError: an argument is missing, given twice, or out of range.

    >>> rope_decay([0, 58, 59], base=100, head_dim=128).round(3).tolist()
    [64.0, 0.072, -0.51]
    """
    theta = _frequencies(base, head_dim, inv_freq)
    if isinstance(m, range):
        return _decay_range(theta, m.start, m.step, len(m))
    m = np.asarray(m, dtype=np.float64)
    chunks = np.array_split(m.ravel(), m.size // 65536 + 1)  # bounds the (m, n) table of angles
    decay = np.concatenate([np.cos(np.multiply.outer(chunk, theta)).sum(-1) for chunk in chunks])
    return decay.reshape(m.shape)[()]


def rope_context_bound(
    *,
    base: float | None = None,
    head_dim: int | None = None,
    inv_freq: Sequence[float] | np.ndarray | None = None,
    limit: int = 1 << 22,
) -> int | None:
    """Compute L_theta of eq. 17: the largest distance up to which no B_m is negative.

    Args:
        base: see `rope_decay`.
        head_dim: see `rope_decay`.
        inv_freq: see `rope_decay`.
        limit: last distance to evaluate, in tokens.

    Returns:
        L_theta, so that B_m < 0 at m = L_theta + 1 and a context of L_theta + 1 tokens is covered; or None if
        B_m >= 0 for all m up to and including limit. Values within float64 rounding of 0 count as 0.

    Raises:
        ValueError: as `rope_decay`.

    >>> rope_context_bound(base=10_000, head_dim=128)
    1706
    """
    theta = _frequencies(base, head_dim, inv_freq)
    first, size = 0, 1024  # doubling blocks stop early
    while first <= limit:
        size = min(size, limit + 1 - first)
        decay = _decay_range(theta, first, 1, size)
        at = np.flatnonzero(decay < 0)
        at = at[decay[at] < -rounding_error(first + at, theta)]
        if len(at):
            return first + int(at[0]) - 1
        first, size = first + size, first + size
    return None


def _frequencies(
    base: float | None, head_dim: int | None, inv_freq: Sequence[float] | np.ndarray | None
) -> np.ndarray:
    """Return the frequencies as float64, (n,)."""
    if inv_freq is None:
        if base is None or head_dim is None:
            raise ValueError("Give either base and head_dim (plain RoPE), or inv_freq.")
        return rope_inv_freq(base, head_dim)
    theta = np.asarray(inv_freq, dtype=np.float64)
    if base is not None or head_dim is not None:
        raise ValueError("Give either base and head_dim (plain RoPE), or inv_freq, not both.")
    if theta.ndim != 1 or not len(theta) or not (np.isfinite(theta) & (theta >= 0)).all():
        raise ValueError(
            f"inv_freq must be a vector of finite frequencies >= 0 in radians per token, got an array of shape "
            f"{theta.shape}."
        )
    return theta


# Sums of cosines at many distances ----------------------------------------------------------------------------------


def _decay_range(theta: np.ndarray, first: int, step: int, size: int) -> np.ndarray:
    """Return B at first, first + step, ..., (size,).

    m = a + b with a on a coarse and b on a fine grid of about sqrt(size) each: cos(m t) = cos(a t) cos(b t) -
    sin(a t) sin(b t), summed over t, is one (A, 2n) @ (2n, B) product.
    """
    width = 1 << (size.bit_length() // 2)
    coarse = rotations(theta, first, step * width, -(-size // width))
    fine = rotations(theta, 0, step, width)
    return real_product(coarse, fine).ravel()[:size]


def rotations(theta: np.ndarray, first: int, step: int, size: int) -> NDArray[np.complex128]:
    """Return exp(i (first + k step) theta) for k < size, (n, size) complex; each doubling needs n sines."""
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
    """Return exp(i angle), faster than numpy's `exp` of an imaginary array."""
    z = np.empty(angle.shape, dtype=np.complex128)
    z.real, z.imag = np.cos(angle), np.sin(angle)
    return z


def real_product(coarse: NDArray[np.complex128], fine: NDArray[np.complex128]) -> np.ndarray:
    """Return Re(coarse^T fine), (A, B): cosines of summed angles, summed over frequencies."""
    return np.concatenate([coarse.real, -coarse.imag]).T @ np.concatenate([fine.real, fine.imag])


def imag_product(coarse: NDArray[np.complex128], fine: NDArray[np.complex128]) -> np.ndarray:
    """Return Im(coarse^T fine), (A, B): sines of summed angles, summed over frequencies."""
    return np.concatenate([coarse.imag, coarse.real]).T @ np.concatenate([fine.real, fine.imag])


def rounding_error(m: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Return a bound on the float64 error of B_m: each angle m theta_i and each cosine has one or two roundings."""
    return 4 * EPS * (m * theta.sum() + len(theta))
