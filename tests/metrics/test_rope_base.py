"""The smallest base for a context against dense grids and the golden data."""

import json
import math

import numpy as np
import pytest

from hf_longctx.metrics.rope.base import rope_base_bound, rope_base_scan, rope_base_table
from hf_longctx.metrics.rope.bounds import rope_decay


@pytest.fixture(scope="module")
def data(golden):
    return json.loads((golden / "rope_bounds.json").read_text())


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


# --- golden data ---


# 64 rows of distances are tried before all, and more than 32 are looked at in batches: 16,384 and 8,192 tokens


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
    """The golden widths and last inadmissible bases come from grids (0.2 % steps), which may step over a dip."""
    rows = [row for row in data["admissible_windows"]["rows"] if row["L"] in (1000, 4000, 8192)]
    assert len(rows) == 3
    for row in rows:
        bound = rope_base_bound(row["L"], 128)
        assert bound.window_width <= 1.02 * row["first_window_rel_width"]
        if bound.window_width < 0.98 * row["first_window_rel_width"]:
            assert lowest(bound.window_end * (1 + 1e-8), 128, row["L"]) < 0
        if bound.settled_base is None:
            assert row["last_infeasible_on_grid"] == pytest.approx(bound.search_limit, rel=1e-3)
        else:
            assert bound.settled_base >= row["last_infeasible_on_grid"] * (1 - 1e-3)
            assert lowest(bound.settled_base * (1 - 1e-8), 128, row["L"]) < 0
