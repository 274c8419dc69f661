"""The RoPE bound against plain cosine sums, dense grids and the golden data."""

import json

import numpy as np
import pytest

from hf_longctx.metrics import rope_base_bound, rope_context_bound, rope_decay, rope_inv_freq


@pytest.fixture(scope="module")
def data(golden):
    return json.loads((golden / "rope_bounds.json").read_text())


# --- eq. 16 ---


@pytest.mark.parametrize(
    "m", [range(0), range(1), range(7, 3000), range(5000, 100, -7), range(0, 70_001, 13)], ids=str
)
def test_range_equals_array(m):
    theta = np.array([1.0, 0.3, 1e-3, 0.0])
    fast = rope_decay(m, inv_freq=theta)
    plain = rope_decay(np.array(m), inv_freq=theta)
    assert fast.shape == plain.shape == (len(m),)
    np.testing.assert_allclose(fast, plain, atol=1e-10)


# --- eq. 17 ---


@pytest.mark.parametrize("base, head_dim", [(1.5, 4), (30.0, 10), (1e4, 128), (2e5, 24)])
def test_context_bound_is_the_first_negative(base, head_dim):
    bound = rope_context_bound(base=base, head_dim=head_dim)
    decay = rope_decay(np.arange(bound + 2), base=base, head_dim=head_dim)
    assert decay[-1] < 0 <= decay[:-1].min()
    assert rope_context_bound(base=base, head_dim=head_dim, limit=bound + 1) == bound
    if bound:
        assert rope_context_bound(base=base, head_dim=head_dim, limit=bound) is None


def test_half_the_dimensions_at_rest_are_never_negative():
    theta = rope_inv_freq(1e4, 32)
    assert rope_context_bound(inv_freq=np.append(theta, np.zeros(16)), limit=1 << 18) is None
    some_at_rest = np.append(theta, np.zeros(4))
    decay = rope_decay(range(10_000), inv_freq=some_at_rest)
    np.testing.assert_allclose(decay, rope_decay(range(10_000), base=1e4, head_dim=32) + 4, atol=1e-12)
    assert rope_context_bound(inv_freq=some_at_rest) == np.flatnonzero(decay < 0)[0] - 1


def test_golden_decay(data):
    for row in data["B_values"]:
        value = rope_decay(row["m"], base=row["base"], head_dim=row["head_dim"])
        assert value == pytest.approx(float(row["B"]), abs=4e-16 * row["m"] + 1e-13), row


@pytest.mark.parametrize("method, counts", [(1, (0, 0)), (2, (97, 2554))])
def test_violations_of_table_4(method, counts):
    """The paper's two ways from 4k to 32k, with 1k = 1024."""
    theta = rope_inv_freq(5e6, 128)
    if method == 2:
        theta = np.where(np.arange(64) < 44, rope_inv_freq(1e4 * 8 ** (128 / 88), 128), rope_inv_freq(1e4, 128) / 8)
    negative = rope_decay(range(30 * 1024 + 1), inv_freq=theta) < 0
    assert (negative[: 15 * 1024 + 1].sum(), negative.sum()) == counts


def test_golden_context_bounds(data):
    for row in data["L_theta"]:
        assert rope_context_bound(base=row["base"], head_dim=row["head_dim"]) == row["L_theta"], row


# --- eq. 18 ---


def lowest(base, head_dim, length, non_rotary_dims=0):
    """Eq. 16 as it stands, at every distance."""
    theta = base ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(np.multiply.outer(np.arange(length + 1), theta)).sum(-1).min() + non_rotary_dims / 2


@pytest.mark.parametrize(
    "length, head_dim, non_rotary_dims",
    [(2, 128, 0), (150, 6, 0), (300, 64, 0), (700, 10, 2), (1000, 24, 8)],
)
def test_bases_against_every_cosine_sum(length, head_dim, non_rotary_dims):
    """Over all bases with three significant digits, up to 16 times the smallest one."""
    bound = rope_base_bound(length, head_dim, non_rotary_dims=non_rotary_dims)
    bases = [float(f"{digits}e{exponent}") for exponent in range(-2, 9) for digits in range(100, 1000)]
    holds = {
        base: lowest(base, head_dim, length, non_rotary_dims) >= 0 for base in bases if 1 < base <= 16 * bound.base
    }
    assert bound.base == next(base for base, good in holds.items() if good)
    violated = [base for base, good in holds.items() if not good]
    if bound.settled_base is None:
        assert violated[-1] == [*holds][-1]
    else:
        assert bound.settled_base == min(base for base in holds if not violated or base > violated[-1])


def test_nothing_to_bound():
    """At distance 1 no base is too small, and with half of the head at rest at no distance."""
    for bound in (rope_base_bound(1, 64), rope_base_bound(500, 24, non_rotary_dims=24)):
        assert (bound.base, bound.settled_base) == (1.01, 1.01)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_no_base_is_below_the_golden_infimum(data, head_dim):
    for row in data["exact"][str(head_dim)]:
        if row["L"] <= 4096:
            assert rope_base_bound(row["L"], head_dim).base >= float(row["base"]), row


@pytest.mark.slow
def test_golden_bases_and_table_2_of_the_paper(data):
    """The paper's bases come from a coarser search, and are rounded to two digits."""
    golden = data["scan_tables"]["head_dim_128_digits_3"]
    paper = {row[f"L_{k}"]: row["paper"] for row in data["paper_table2"]["rows"] for k in (1000, 1024)}
    for length in (1000, 1024, 2048, 4000, 8000, 8192, 16_000, 32_000):
        base = rope_base_bound(length, 128).base
        assert base == golden[str(length)] and base <= 1.01 * paper[length], length
