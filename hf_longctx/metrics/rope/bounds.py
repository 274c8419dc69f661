"""How far a rotary position embedding can tell a similar token from a random one (arXiv 2405.14591).

With frequencies theta_i = base^(-2i/d), i < d/2, the paper shows that at relative distance m a query prefers a
similar key over a random one by an amount proportional to

    B_m = sum_i cos(m theta_i)                                                     (eq. 16)

and asks that this never be negative. That bounds the context for given frequencies, and the base for a given context:

    L_theta = sup { L : B_m >= 0 for m = 0..L }                                    (eq. 17)
    base_L  = inf { base > 1 : B_m >= 0 for m = 0..L }                             (eq. 18)

m is a distance: a context of N tokens needs m <= N - 1.

The admissible bases of eq. 18 are not an interval. They begin with windows that can be 1e-5 wide and are interrupted
far above base_L, so that a search on any grid reports a larger value. `rope_base_bound` finds the infimum itself and,
beside it, what one would use: the width of the first window, the first base of two digits, and the base above which
nothing is interrupted any more. The bound is a screening number: stacked layers see further than one layer (sec. 4.3).

Everything is float64 and numpy. Taylor's theorem proves every step between two evaluations; the evaluations themselves
carry rounding errors (below 1e-8 in B_m at m = 1e6), which are not enclosed.
"""

import math
from dataclasses import asdict, dataclass
from decimal import Decimal, localcontext
from itertools import count
from numbers import Integral, Real

import numpy as np


EPS = np.finfo(np.float64).eps


# --- eq. 16, 17 and 19: given frequencies ---------------------------------------------------------------------------


def rope_inv_freq(base: float, head_dim: int) -> np.ndarray:
    """theta_i = base^(-2i/head_dim), the frequencies of plain RoPE in radians per token; (head_dim / 2,) float64.

    Raises:
        ValueError: base is not a finite number above 1, or head_dim is not an even positive integer.
    """
    if not (isinstance(base, Real) and math.isfinite(base) and base > 1):
        raise ValueError(f"base is {base!r}; RoPE needs a finite base above 1, so that its frequencies decrease.")
    return float(base) ** -_exponents(head_dim)


def rope_decay(m, *, base=None, head_dim=None, inv_freq=None, weights=None):
    """B_m = sum_i w_i cos(m theta_i): eq. 16, or with weights eq. 19. How much a similar key beats a random one.

    Args:
        m: relative distances in tokens: a number, an array of any shape, or a `range`. A range of n distances costs
            2 sqrt(n) sines per frequency and one matrix product instead of n cosines, see `_decay_range`.
        base, head_dim: plain RoPE, or instead
        inv_freq: the frequencies themselves, (n,), radians per token. Zeros are dimensions that do not rotate.
        weights: (n,) non-negative, default 1 each; see `rope_variance_weights`.

    Returns:
        float64, of the shape of m; a float if m is a number. The error is about 2e-16 * m * sqrt(sum theta^2).

    Raises:
        ValueError: a value above is missing, given twice or out of its range, or m is not finite.

    >>> rope_decay([0, 58, 59], base=100, head_dim=128).round(3).tolist()
    [64.0, 0.072, -0.51]
    """
    theta, w = _frequencies(base, head_dim, inv_freq, weights)
    if isinstance(m, range):
        return _decay_range(theta, w, m.start, m.step, len(m))
    m = np.asarray(m, dtype=np.float64)
    if not np.isfinite(m).all():
        raise ValueError("m holds NaN or infinity; it must hold distances in tokens.")
    chunks = np.array_split(m.ravel(), m.size // 65536 + 1)  # bounds the (m, n) table of angles
    decay = np.concatenate([np.cos(np.multiply.outer(chunk, theta)) @ w for chunk in chunks])
    return decay.reshape(m.shape)[()]


def rope_context_bound(*, base=None, head_dim=None, inv_freq=None, weights=None, limit: int = 1 << 22) -> int | None:
    """L_theta of eq. 17: the largest distance up to which B_m never is negative.

    Args:
        base, head_dim, inv_freq, weights: as for `rope_decay`.
        limit: the last distance looked at, in tokens.

    Returns:
        L_theta as an int, so that B_m < 0 at m = L_theta + 1 and a context of L_theta + 1 tokens is covered; or None
        if B_m >= 0 for all m up to and including limit. Values within float64 rounding of 0 count as 0.

    Raises:
        ValueError: as `rope_decay`, or limit is not a positive integer.

    >>> rope_context_bound(base=10_000, head_dim=128)
    1706
    """
    theta, w = _frequencies(base, head_dim, inv_freq, weights)
    limit = _positive_int("limit", limit)
    first, size = 0, 1024  # blocks that double: stop early, waste little
    while first <= limit:
        size = min(size, limit + 1 - first)
        decay = _decay_range(theta, w, first, 1, size)
        at = np.flatnonzero(decay < 0)
        at = at[decay[at] < -_rounding(first + at, theta, w)]
        if len(at):
            return first + int(at[0]) - 1
        first, size = first + size, first + size
    return None


def rope_variance_weights(q_std, k_std=None, *, interleaved: bool) -> np.ndarray:
    """The weights of eq. 19: one per rotated pair, from the standard deviations of query and key components.

    The paper lets queries and keys have one distribution and finds w_i = sigma_{2i}^2 + sigma_{2i+1}^2. For keys of
    their own mean and spread, read "similar" as "as many standard deviations from the mean as the query, in every
    component"; the same steps then give w_i = sum over the pair of sigma_q sigma_k, and the means cancel as before.

    Args:
        q_std: (..., d) standard deviations before rotation, over tokens.
        k_std: the same for keys, broadcast against q_std; None for the paper's case k_std = q_std.
        interleaved: True if components (2i, 2i+1) rotate together, as the paper writes it; False if (i, i + d/2) do,
            as in Llama and most of transformers.

    Returns:
        (..., d/2) float64.

    Raises:
        ValueError: a standard deviation is negative or not finite, or d is odd.
    """
    q_std = np.asarray(q_std, dtype=np.float64)
    k_std = q_std if k_std is None else np.asarray(k_std, dtype=np.float64)
    for name, std in (("q_std", q_std), ("k_std", k_std)):
        if std.ndim == 0 or std.shape[-1] == 0 or std.shape[-1] % 2:
            raise ValueError(
                f"{name} has shape {std.shape}; its last axis must hold d components, d even: they pair up."
            )
        if not (np.isfinite(std) & (std >= 0)).all():
            raise ValueError(f"{name} holds a negative, NaN or infinite value; standard deviations are needed.")
    product = q_std * k_std
    pairs = (*product.shape[:-1], -1, 2) if interleaved else (*product.shape[:-1], 2, -1)
    return product.reshape(pairs).sum(-1 if interleaved else -2)


def _decay_range(theta, weights, first, step, size):
    """B at first, first + step, ...: write m = a + b with a on a coarse and b on a fine grid of about sqrt(size) each.

    cos(m t) = cos(a t) cos(b t) - sin(a t) sin(b t), summed over t, is one (A, 2n) @ (2n, B) product.
    """
    width = 1 << (size.bit_length() // 2)
    coarse = _rotations(theta, first, step * width, -(-size // width))
    fine = _rotations(theta, 0, step, width) * weights[:, None]
    return _real_product(coarse, fine).ravel()[:size]


def _rotations(theta, first, step, size):
    """exp(i (first + k step) theta) for k < size, (n, size) complex: each doubling takes one sine per frequency."""
    z = np.empty((len(theta), size), dtype=np.complex128)
    z[:, :1] = _cis(first * theta[:, None])
    done = 1
    while done < size:
        more = min(done, size - done)
        np.multiply(z[:, :more], _cis(step * done * theta[:, None]), out=z[:, done : done + more])
        done += more
    return z


def _cis(angle):
    z = np.empty(angle.shape, dtype=np.complex128)
    z.real, z.imag = np.cos(angle), np.sin(angle)
    return z


def _real_product(coarse, fine):
    """Re(coarse^T fine), (A, B): cosines of summed angles."""
    return np.concatenate([coarse.real, -coarse.imag]).T @ np.concatenate([fine.real, fine.imag])


def _imag_product(coarse, fine):
    """Im(coarse^T fine), (A, B): sines of summed angles."""
    return np.concatenate([coarse.imag, coarse.real]).T @ np.concatenate([fine.real, fine.imag])


def _rounding(m, theta, weights):
    """What float64 may add to B_m: every angle m theta_i is off by a rounding or two, every cosine too."""
    return 4 * EPS * (m * (weights @ theta) + weights.sum())


# --- eq. 18: given a context length ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeBaseBound:
    """Which bases satisfy B_m >= 0 for all m <= context_length. Bases are numbers above 1; widths are relative.

    Attributes:
        context_length: L, in tokens of distance.
        head_dim: dimensions that rotate; there are head_dim / 2 frequencies.
        non_rotary_dims: dimensions beside them that do not rotate; they add non_rotary_dims / 2 to every B_m.
        base: base_L of eq. 18, the infimum of the admissible bases.
        critical_distance: the m with B_m = 0 at base and B_m < 0 just below; None if base is 1.
        window_end: where the first window [base, window_end] ends; None if it is open up to search_limit.
        two_digit_base: the smallest admissible base of two significant digits.
        settled_base: every base from here to search_limit is admissible; None if search_limit itself is not.
        search_limit: the largest base looked at.
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
        """(window_end - base) / base."""
        return None if self.window_end is None else (self.window_end - self.base) / self.base

    def to_dict(self) -> dict:
        """All attributes and window_width as plain JSON types."""
        return {**asdict(self), "window_width": self.window_width}

    def __str__(self):
        still = f" and {self.non_rotary_dims} dimensions that do not rotate" if self.non_rotary_dims else ""
        window = "is open" if self.window_end is None else f"is {self.window_width:.2g} of it wide"
        settled = "none" if self.settled_base is None else f"{self.settled_base:.10g}"
        return "\n".join(
            (
                f"RoPE bases with B_m >= 0 for m = 0..{self.context_length}, head dimension {self.head_dim}{still}",
                f"  infimum (eq. 18)     {self.base:.10g}, first window {window}",
                f"  first of two digits  {self.two_digit_base:.10g}",
                f"  all admissible from  {settled}, up to {self.search_limit:.10g}",
            )
        )


def rope_base_bound(
    context_length: int, head_dim: int, *, non_rotary_dims: int = 0, search_ratio: float = 16.0
) -> RopeBaseBound:
    """The smallest base for a context length (eq. 18), exactly, and what it is worth in practice.

    Args:
        context_length: L in tokens: B_m >= 0 is asked for m = 0..L. A context of N tokens needs L = N - 1 only.
        head_dim: dimensions that rotate, even, at least 4.
        non_rotary_dims: dimensions of the head that do not rotate (partial rotary embeddings), even.
        search_ratio: above 1; window_end and settled_base are sought in [base, search_ratio * base]. The search for
            settled_base takes most of the time; `rope_base_table` does without.

    Returns:
        RopeBaseBound. `base` is right to a unit in the last place of a float64.

    Raises:
        ValueError: an argument is out of its range; head_dim 2 is, because no base helps where B_m = cos(m).

    >>> print(rope_base_bound(1000, 128))
    RoPE bases with B_m >= 0 for m = 0..1000, head dimension 128
      infimum (eq. 18)     4206.019223, first window is 0.03 of it wide
      first of two digits  4300
      all admissible from  6018.280857, up to 67296.30757
    """
    family = _DecayFamily(head_dim, non_rotary_dims)
    if not (math.isfinite(search_ratio) and search_ratio > 1):
        raise ValueError(f"search_ratio is {search_ratio!r}; it multiplies the smallest base and must be above 1.")
    length = _positive_int("context_length", context_length)
    ((_, start, critical),) = _infima(family, [length])
    base = family.base_at_root(start, critical)
    end = start + math.log(search_ratio)
    window = _next_root(family, start, end, length)
    settled = (start, critical) if window is None else _next_root(family, end, start, length)
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


def rope_base_table(context_lengths, head_dim: int, *, non_rotary_dims: int = 0) -> dict[int, float]:
    """base_L of eq. 18 for several lengths in one sweep, which costs no more than the largest of them alone.

    Arguments and errors are those of `rope_base_bound`; the result maps each length to its infimum.
    """
    family = _DecayFamily(head_dim, non_rotary_dims)
    return {length: family.base_at_root(u, m) for length, u, m in _infima(family, _lengths(context_lengths))}


def rope_base_scan(context_lengths, head_dim: int, *, digits: int = 2, non_rotary_dims: int = 0) -> dict[int, float]:
    """The first admissible base among those of so many significant digits, for several lengths.

    This is what one would write into a config. It says nothing about bases above or between.
    Arguments and errors are those of `rope_base_bound`; the result maps each length to a base.
    """
    family = _DecayFamily(head_dim, non_rotary_dims)
    return _scan(family, _lengths(context_lengths), _positive_int("digits", digits), 1.0)


# How `_infima` and `_next_root` share distances out: WIDTH consecutive ones are one row of a matrix product.
WIDTH = 256
POOL = 64  # rows tried before all are evaluated; more rows cost more per try, fewer are exhausted sooner
BATCH = 32  # rows re-examined together

TAU = Decimal("6.28318530717958647692528676655900576839433879875021")


class _DecayFamily:
    """B_m as a function of u = ln base: sum_i cos(m theta_i) + constant, theta_i = exp(-u x_i), x_i = 2i/d.

    dB/du = m sum x theta sin(m theta), and |d2B/du2| <= K = m^2 sum (x theta)^2 + m sum x^2 theta, which falls with u.
    """

    def __init__(self, head_dim, non_rotary_dims):
        self.x = _exponents(head_dim)
        if head_dim < 4:
            raise ValueError("head_dim is 2; its one frequency is 1 whatever the base is. A bound needs at least 4.")
        if not _is_int(non_rotary_dims) or non_rotary_dims < 0 or non_rotary_dims % 2:
            raise ValueError(f"non_rotary_dims is {non_rotary_dims!r}; it must be an even integer, 0 or more.")
        self.head_dim, self.constant = head_dim, non_rotary_dims // 2

    def at(self, m, u):
        """B, dB/du and K at u, each (k,), for distances m, (k,)."""
        theta = np.exp(-u * self.x)
        angle = np.multiply.outer(m, theta)
        value = np.cos(angle).sum(-1) + self.constant
        return value, m * (np.sin(angle) @ (self.x * theta)), self.curvature(m, theta)

    def at_rows(self, starts, u):
        """B, dB/du, K and m, each (k, WIDTH), for the distances m = start + 0..WIDTH-1."""
        theta = np.exp(-u * self.x)
        coarse, fine = _cis(np.multiply.outer(theta, starts)), _rotations(theta, 0, 1, WIDTH)
        m = starts[:, None] + np.arange(WIDTH)
        slope = m * _imag_product(coarse, fine * (self.x * theta)[:, None])
        return _real_product(coarse, fine) + self.constant, slope, self.curvature(m, theta), m

    def curvature(self, m, theta):
        x_theta = self.x * theta
        return m * (m * (x_theta @ x_theta) + self.x @ x_theta) + np.finfo(np.float64).tiny  # above 0 at m = 0 too

    def rounding(self, m, u):
        theta = np.exp(-u * self.x)
        return _rounding(m, theta, np.ones_like(theta))

    def negative_among(self, starts, u, length):
        """Distances m <= length in the given rows with B_m < 0 at u; a sample of them if there are many."""
        theta = np.exp(-u * self.x)
        value = _real_product(_cis(np.multiply.outer(theta, starts)), _rotations(theta, 0, 1, WIDTH))
        return self._negative(value + self.constant, starts, u, length)

    def first_negative(self, u, length):
        """The same among all m <= length, in ranges that double until there are some; and the lowest rows met."""
        theta = np.exp(-u * self.x)
        fine = _rotations(theta, 0, 1, WIDTH)
        lowest, row, rows = [], 0, 8
        while True:
            rows = min(rows, length // WIDTH + 1 - row)
            value = _real_product(_rotations(theta, row * WIDTH, WIDTH, rows), fine) + self.constant
            lowest.append(value.min(1))
            negative = self._negative(value, np.arange(row, row + rows) * WIDTH, u, length)
            row, rows = row + rows, row + rows
            if len(negative) or row * WIDTH > length:
                return negative, np.argsort(np.concatenate(lowest))[:POOL] * WIDTH

    def _negative(self, value, starts, u, length):
        """Those of the rows' distances m <= length whose B_m, evaluated once more by cosines, is below rounding."""
        row, column = np.nonzero(value < 0)
        m = starts[row] + column
        m = m[m <= length]
        for sample in (m[:: len(m) // 64 + 1], m):
            negative = sample[self.at(sample, u)[0] < -self.rounding(sample, u)]
            if len(negative):
                break
        return negative

    def base_at_root(self, u, m):
        """The base near exp(u) at which B_m = 0, by Newton with 40-digit angles: those of float64 cost two digits."""
        if m is None:
            return math.exp(u)
        with localcontext() as context:
            context.prec = 40
            base = Decimal(math.exp(u))
            for _ in range(3):
                theta = [base ** (Decimal(-2 * i) / self.head_dim) for i in range(len(self.x))]
                angle = np.array([float(m * t % TAU) for t in theta])
                slope = m * (np.sin(angle) @ (self.x * np.array(theta, dtype=np.float64)))
                base -= base * Decimal((np.cos(angle).sum() + self.constant) / slope)
            return float(base)


def _infima(family, lengths):
    """Yields (L, u, m) for ascending L: exp(u) is base_L, where B_m rises through 0; m is None if u is 0.

    Sweep u upwards from 0. Where some B_m < 0 with m <= L, no base is admissible as long as Taylor's bound keeps it
    negative: follow that m to its root. Where there is none, the infimum is found. Any violator proves a step, so the
    rows that were lowest at the last full evaluation are tried first, and all are evaluated only when those fail.
    """
    u, critical, lowest = 0.0, None, np.zeros(1, dtype=int)
    for length in lengths:
        while True:
            negative = family.negative_among(lowest, u, length)
            if not len(negative):
                negative, lowest = family.first_negative(u, length)
            if not len(negative):
                break
            u, critical = _cross(family, negative, u)
        yield length, u, critical


def _cross(family, m, u):
    """Of the distances m, negative at u, take the one that stays so the furthest; (u', m) at its root to the right."""
    furthest = np.argmax(_reach(*family.at(m, u)))
    m = m[furthest : furthest + 1]
    while True:
        value, slope, curvature = family.at(m, u)
        step = _reach(value, slope, curvature)[0]
        if value[0] >= 0 or step <= EPS * u:
            return u, int(m[0])
        u += step


def _next_root(family, u, end, length):
    """The first place from u towards end where some B_m, m <= length, meets 0 and falls: (u', m), or None.

    Every row of distances remembers how far it is proven non-negative; those with the least proof are re-examined.
    """
    towards, starts = math.copysign(1, end - u), np.arange(0, length + 1, WIDTH)
    proven = np.zeros(len(starts))
    stride = 0.05  # of ln base; to the left K grows by at most exp(2 stride) over it
    while True:
        rows = np.argpartition(proven, min(BATCH, len(starts)) - 1)[:BATCH]
        v = u + towards * proven[rows].min()
        if proven[rows].min() >= abs(end - u):
            return None
        value, slope, curvature, m = family.at_rows(starts[rows], v)
        reach = _reach(np.maximum(value, 0), towards * slope, curvature * math.exp(2 * stride))
        reach[value < -family.rounding(m, v)] = 0
        reach[m > length] = np.inf
        nearest = np.unravel_index(reach.argmin(), reach.shape)
        if reach[nearest] <= 4 * EPS * v:
            return v, int(m[nearest])
        proven[rows] = np.maximum(proven[rows], proven[rows].min() + np.minimum(reach.min(1), stride))


def _reach(value, slope, curvature):
    """The largest z such that f keeps its sign on [0, z] if f(0) = value, f'(0) = slope and |f''| <= curvature."""
    away = np.where(value < 0, -slope, slope)
    return (away + np.sqrt(away**2 + 2 * curvature * np.abs(value))) / curvature


def _scan(family, lengths, digits, start):
    """{L: first base >= start with so many digits and B_m >= 0 for m = 0..L}, for ascending lengths."""
    table, left = {}, list(lengths)
    still = np.zeros(family.constant)
    for base in _ladder(digits, start):
        theta = np.append(rope_inv_freq(base, family.head_dim), still)
        reach = rope_context_bound(inv_freq=theta, limit=left[-1])
        while left and (reach is None or left[0] <= reach):
            table[left.pop(0)] = base
        if not left:
            return table


def _ladder(digits, start):
    """All numbers of so many significant digits above 1 and not below start, ascending."""
    for exponent in count(math.floor(math.log10(start))):
        for mantissa in range(10 ** (digits - 1), 10**digits):
            base = float(f"{mantissa}e{exponent - digits + 1}")
            if base > 1 and base >= start:
                yield base


# --- arguments ------------------------------------------------------------------------------------------------------


def _exponents(head_dim):
    """x_i = 2i / head_dim."""
    if not _is_int(head_dim) or head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim!r}; it must be an even positive integer: RoPE rotates pairs.")
    return np.arange(0, head_dim, 2) / head_dim


def _frequencies(base, head_dim, inv_freq, weights):
    """The frequencies and their weights as float64, (n,) each, from either way to give them."""
    if (inv_freq is None) == (base is None and head_dim is None):
        raise ValueError("Give either base and head_dim (plain RoPE) or inv_freq, and not both.")
    theta = rope_inv_freq(base, head_dim) if inv_freq is None else np.asarray(inv_freq, dtype=np.float64)
    if theta.ndim != 1 or not len(theta):
        raise ValueError(f"inv_freq has shape {theta.shape}; it must be a non-empty vector of frequencies.")
    if not (np.isfinite(theta) & (theta >= 0)).all():
        raise ValueError(
            "inv_freq holds a negative, NaN or infinite value; frequencies are >= 0, in radians per token."
        )
    weights = np.ones_like(theta) if weights is None else np.asarray(weights, dtype=np.float64)
    if weights.shape != theta.shape:
        raise ValueError(f"weights has shape {weights.shape}; one weight per frequency is needed: {theta.shape}.")
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ValueError("weights must be finite and non-negative, and not all 0: they are variances.")
    return theta, weights


def _lengths(context_lengths):
    lengths = sorted({_positive_int("context_lengths", length) for length in context_lengths})
    if not lengths:
        raise ValueError("context_lengths is empty; give at least one length in tokens.")
    return lengths


def _positive_int(name, value):
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer.")
    return int(value)


def _is_int(value):
    return isinstance(value, Integral) and not isinstance(value, bool)
