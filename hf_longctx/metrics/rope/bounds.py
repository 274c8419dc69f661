"""How far a rotary position embedding can tell a similar token from a random one (arXiv 2405.14591).

With frequencies theta_i = base^(-2i/d), i < d/2, the paper shows that at relative distance m a query prefers a
similar key over a random one by an amount proportional to

    B_m = sum_i cos(m theta_i)                                                     (eq. 16)

and asks that this never be negative. That bounds the context for given frequencies,

    L_theta = sup { L : B_m >= 0 for m = 0..L }                                    (eq. 17)

and the base for a given context, see base.py. m is a distance: a context of N tokens needs m <= N - 1. The bound is a
screening number: stacked layers see further than one layer (sec. 4.3). Everything is float64 and numpy.
"""

import math
from numbers import Integral, Real

import numpy as np


EPS = np.finfo(np.float64).eps


def rope_inv_freq(base: float, head_dim: int) -> np.ndarray:
    """theta_i = base^(-2i/head_dim), the frequencies of plain RoPE in radians per token; (head_dim / 2,) float64.

    Raises:
        ValueError: base is not a finite number above 1, or head_dim is not an even positive integer.
    """
    if not (isinstance(base, Real) and math.isfinite(base) and base > 1):
        raise ValueError(f"base is {base!r}; RoPE needs a finite base above 1, so that its frequencies decrease.")
    return float(base) ** -exponents(head_dim)


def rope_decay(m, *, base=None, head_dim=None, inv_freq=None):
    """B_m = sum_i cos(m theta_i), eq. 16: how much a similar key beats a random one.

    Args:
        m: relative distances in tokens: a number, an array of any shape, or a `range`. A range of n distances costs
            2 sqrt(n) sines per frequency and one matrix product instead of n cosines, see `_decay_range`.
        base, head_dim: plain RoPE, or instead
        inv_freq: the frequencies themselves, (n,), radians per token. Zeros are dimensions that do not rotate.

    Returns:
        float64, of the shape of m; a float if m is a number. The error is about 2e-16 * m * sqrt(sum theta^2).

    Raises:
        ValueError: a value above is missing, given twice or out of its range, or m is not finite.

    >>> rope_decay([0, 58, 59], base=100, head_dim=128).round(3).tolist()
    [64.0, 0.072, -0.51]
    """
    theta = _frequencies(base, head_dim, inv_freq)
    if isinstance(m, range):
        return _decay_range(theta, m.start, m.step, len(m))
    m = np.asarray(m, dtype=np.float64)
    if not np.isfinite(m).all():
        raise ValueError("m holds NaN or infinity; it must hold distances in tokens.")
    chunks = np.array_split(m.ravel(), m.size // 65536 + 1)  # bounds the (m, n) table of angles
    decay = np.concatenate([np.cos(np.multiply.outer(chunk, theta)).sum(-1) for chunk in chunks])
    return decay.reshape(m.shape)[()]


def rope_context_bound(*, base=None, head_dim=None, inv_freq=None, limit: int = 1 << 22) -> int | None:
    """L_theta of eq. 17: the largest distance up to which B_m never is negative.

    Args:
        base, head_dim, inv_freq: as for `rope_decay`.
        limit: the last distance looked at, in tokens.

    Returns:
        L_theta as an int, so that B_m < 0 at m = L_theta + 1 and a context of L_theta + 1 tokens is covered; or None
        if B_m >= 0 for all m up to and including limit. Values within float64 rounding of 0 count as 0.

    Raises:
        ValueError: as `rope_decay`, or limit is not a positive integer.

    >>> rope_context_bound(base=10_000, head_dim=128)
    1706
    """
    theta = _frequencies(base, head_dim, inv_freq)
    limit = positive_int("limit", limit)
    first, size = 0, 1024  # blocks that double: stop early, waste little
    while first <= limit:
        size = min(size, limit + 1 - first)
        decay = _decay_range(theta, first, 1, size)
        at = np.flatnonzero(decay < 0)
        at = at[decay[at] < -rounding_error(first + at, theta)]
        if len(at):
            return first + int(at[0]) - 1
        first, size = first + size, first + size
    return None


def _decay_range(theta, first, step, size):
    """B at first, first + step, ...: write m = a + b with a on a coarse and b on a fine grid of about sqrt(size) each.

    cos(m t) = cos(a t) cos(b t) - sin(a t) sin(b t), summed over t, is one (A, 2n) @ (2n, B) product.
    """
    width = 1 << (size.bit_length() // 2)
    coarse = rotations(theta, first, step * width, -(-size // width))
    fine = rotations(theta, 0, step, width)
    return real_product(coarse, fine).ravel()[:size]


def rotations(theta, first, step, size):
    """exp(i (first + k step) theta) for k < size, (n, size) complex: each doubling takes one sine per frequency."""
    z = np.empty((len(theta), size), dtype=np.complex128)
    z[:, :1] = cis(first * theta[:, None])
    done = 1
    while done < size:
        more = min(done, size - done)
        np.multiply(z[:, :more], cis(step * done * theta[:, None]), out=z[:, done : done + more])
        done += more
    return z


def cis(angle):
    z = np.empty(angle.shape, dtype=np.complex128)
    z.real, z.imag = np.cos(angle), np.sin(angle)
    return z


def real_product(coarse, fine):
    """Re(coarse^T fine), (A, B): cosines of summed angles."""
    return np.concatenate([coarse.real, -coarse.imag]).T @ np.concatenate([fine.real, fine.imag])


def rounding_error(m, theta):
    """What float64 may add to B_m: every angle m theta_i is off by a rounding or two, every cosine too."""
    return 4 * EPS * (m * theta.sum() + len(theta))


# --- arguments ------------------------------------------------------------------------------------------------------


def exponents(head_dim):
    """x_i = 2i / head_dim."""
    if not is_int(head_dim) or head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim!r}; it must be an even positive integer: RoPE rotates pairs.")
    return np.arange(0, head_dim, 2) / head_dim


def _frequencies(base, head_dim, inv_freq):
    """The frequencies as float64, (n,), from either way to give them."""
    if (inv_freq is None) == (base is None and head_dim is None):
        raise ValueError("Give either base and head_dim (plain RoPE) or inv_freq, and not both.")
    theta = rope_inv_freq(base, head_dim) if inv_freq is None else np.asarray(inv_freq, dtype=np.float64)
    if theta.ndim != 1 or not len(theta):
        raise ValueError(f"inv_freq has shape {theta.shape}; it must be a non-empty vector of frequencies.")
    if not (np.isfinite(theta) & (theta >= 0)).all():
        raise ValueError(
            "inv_freq holds a negative, NaN or infinite value; frequencies are >= 0, in radians per token."
        )
    return theta


def positive_int(name, value):
    if not is_int(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer.")
    return int(value)


def is_int(value):
    return isinstance(value, Integral) and not isinstance(value, bool)
