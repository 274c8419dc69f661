"""The RoPE bound against plain cosine sums, dense grids and the golden data."""

import json
import math

import numpy as np
import pytest

from hf_longctx.metrics import (
    rope_base_bound,
    rope_base_scan,
    rope_base_table,
    rope_context_bound,
    rope_decay,
    rope_inv_freq,
)


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


def cosine_sum(m, base, head_dim):
    """Eq. 16 as it stands."""
    return math.fsum(math.cos(m * base ** (-2 * i / head_dim)) for i in range(head_dim // 2))


def lowest(base, head_dim, length, non_rotary_dims=0):
    return rope_decay(range(length + 1), base=base, head_dim=head_dim).min() + non_rotary_dims / 2


@pytest.mark.parametrize(
    "length, head_dim, non_rotary_dims",
    [(2, 128, 0), (150, 6, 0), (300, 64, 0), (700, 10, 2), (1000, 24, 8)],
)
def test_infimum_against_a_dense_grid(length, head_dim, non_rotary_dims):
    bound = rope_base_bound(length, head_dim, non_rotary_dims=non_rotary_dims, search_ratio=3)

    def lowest_at(base):
        return lowest(base, head_dim, length, non_rotary_dims)

    assert all(lowest_at(base) < 0 for base in np.geomspace(1 + 1e-9, bound.base * (1 - 1e-9), 400))
    assert cosine_sum(bound.critical_distance, bound.base, head_dim) + non_rotary_dims / 2 == pytest.approx(
        0, abs=1e-9
    )
    inside = bound.search_limit if bound.window_end is None else bound.window_end
    assert all(lowest_at(base) >= 0 for base in np.geomspace(bound.base * (1 + 1e-9), inside * (1 - 1e-9), 400))
    if bound.window_end is not None:
        assert lowest_at(bound.window_end * (1 + 1e-7)) < 0
        assert bound.window_width == pytest.approx(bound.window_end / bound.base - 1)
    if bound.settled_base is None:
        assert lowest_at(bound.search_limit) < 0
    else:
        above = np.geomspace(bound.settled_base * (1 + 1e-9), bound.search_limit, 400)
        assert all(lowest_at(base) >= 0 for base in above)
        assert lowest_at(bound.settled_base * (1 - 1e-7)) < 0
    assert bound.two_digit_base >= bound.base
    assert float(f"{bound.two_digit_base:.1e}") == bound.two_digit_base
    assert lowest_at(bound.two_digit_base) >= 0


def test_nothing_to_bound():
    """At distance 1 no base above 1 is too small."""
    bound = rope_base_bound(1, 64)
    assert (bound.base, bound.critical_distance, bound.window_end, bound.settled_base) == (1.0, None, None, 1.0)
    assert rope_base_bound(500, 24, non_rotary_dims=24).base == 1.0


def test_table_and_scan_agree_with_single_lengths():
    lengths = [2000, 500, 1000, 500]
    table, scan = rope_base_table(lengths, 64), rope_base_scan(lengths, 64)
    for length in lengths:
        bound = rope_base_bound(length, 64, search_ratio=1.5)
        assert table[length] == pytest.approx(bound.base, rel=1e-15)
        assert scan[length] == bound.two_digit_base


# more than 32 rows of distances, which is 8,192 tokens, are looked at in batches


@pytest.mark.parametrize("head_dim, lengths", [(64, 33_000), (256, 5_000)])
def test_golden_infima(data, head_dim, lengths):
    rows = {row["L"]: row for row in data["exact"][str(head_dim)] if row["L"] <= lengths}
    for length, base in rope_base_table(rows, head_dim).items():
        assert base == pytest.approx(float(rows[length]["base"]), rel=5e-16), (head_dim, length)


@pytest.mark.parametrize("head_dim, digits, lengths", [(64, 2, 66_000), (128, 3, 9_000)])
def test_golden_scans(data, head_dim, digits, lengths):
    table = data["scan_tables"][f"head_dim_{head_dim}_digits_{digits}"]
    golden = {int(length): base for length, base in table.items() if int(length) <= lengths}
    assert rope_base_scan(golden, head_dim, digits=digits) == golden


def test_golden_windows(data):
    """The golden width and last inadmissible base come from grids (0.2 % steps), which may step over a dip."""
    (row,) = (row for row in data["admissible_windows"]["rows"] if row["L"] == 8192)
    bound = rope_base_bound(8192, 128)
    assert bound.window_width <= 1.02 * row["first_window_rel_width"]
    assert lowest(bound.window_end * (1 + 1e-8), 128, 8192) < 0
    assert bound.settled_base >= row["last_infeasible_on_grid"] * (1 - 1e-3)
    assert lowest(bound.settled_base * (1 - 1e-8), 128, 8192) < 0
