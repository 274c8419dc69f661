"""The RoPE bound against plain cosine sums, against dense grids, and against the golden data."""

import json
import math

import numpy as np
import pytest

from hf_longctx.metrics.rope.bounds import (
    rope_base_bound,
    rope_base_scan,
    rope_base_table,
    rope_context_bound,
    rope_decay,
    rope_inv_freq,
    rope_variance_weights,
)


slow = pytest.mark.slow


@pytest.fixture(scope="module")
def data(golden):
    return json.loads((golden / "rope_bounds.json").read_text())


def cosine_sum(m, base, head_dim):
    """Eq. 16 as it stands."""
    return math.fsum(math.cos(m * base ** (-2 * i / head_dim)) for i in range(head_dim // 2))


def lowest(base, head_dim, length, non_rotary_dims=0):
    return rope_decay(range(length + 1), base=base, head_dim=head_dim).min() + non_rotary_dims / 2


# --- eq. 16 and 19 ---


def random_cases(n=30):
    rng = np.random.default_rng(0)
    return [
        (int(rng.integers(0, 1 << 20)), float(np.exp(rng.uniform(0.1, 19))), 2 * int(rng.integers(1, 129)))
        for _ in range(n)
    ]


@pytest.mark.parametrize("m, base, head_dim", random_cases())
def test_decay_is_the_cosine_sum(m, base, head_dim):
    tolerance = 4e-16 * (m + 1) * math.sqrt(head_dim) + 1e-13  # the angles' own rounding
    expected = cosine_sum(m, base, head_dim)
    assert rope_decay(m, base=base, head_dim=head_dim) == pytest.approx(expected, abs=tolerance)
    block = rope_decay(range(m, m + 37, 5), base=base, head_dim=head_dim)
    assert block.shape == (8,)
    assert block[0] == pytest.approx(expected, abs=tolerance)
    assert block[7] == pytest.approx(cosine_sum(m + 35, base, head_dim), abs=tolerance + 2e-14 * head_dim)


@pytest.mark.parametrize(
    "m", [range(0), range(1), range(7, 3000), range(5000, 100, -7), range(0, 70_001, 13)], ids=str
)
def test_range_equals_array(m):
    theta, weights = np.array([1.0, 0.3, 1e-3, 0.0]), np.array([0.5, 2.0, 0.0, 3.0])
    fast = rope_decay(m, inv_freq=theta, weights=weights)
    plain = rope_decay(np.array(m), inv_freq=theta, weights=weights)
    assert fast.shape == plain.shape == (len(m),)
    np.testing.assert_allclose(fast, plain, atol=1e-10)


def test_decay_keeps_shape():
    assert isinstance(rope_decay(3, base=10.0, head_dim=4), float)
    assert rope_decay(np.zeros((2, 0, 3)), base=10.0, head_dim=4).shape == (2, 0, 3)
    np.testing.assert_array_equal(rope_decay([[0, 0]], base=10.0, head_dim=4), [[2.0, 2.0]])


def test_variance_weights_follow_the_pairs():
    std = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(rope_variance_weights(std, interleaved=True), [1 + 4, 9 + 16])
    np.testing.assert_array_equal(rope_variance_weights(std, interleaved=False), [1 + 9, 4 + 16])
    keys = np.stack([std, 2 * std])
    np.testing.assert_array_equal(rope_variance_weights(std, keys, interleaved=False), [[10, 20], [20, 40]])


@pytest.mark.parametrize("interleaved", [True, False])
def test_weighted_decay_is_the_expected_score_gap(interleaved):
    """Eq. 15 from random queries: the score of a similar key minus that of a random one, at distance m."""
    rng = np.random.default_rng(1)
    d, n, m, base = 8, 200_000, 5, 50.0
    q_mean, k_mean, q_std, k_std = rng.normal(size=(2, d)).tolist() + rng.uniform(0.5, 2, (2, d)).tolist()
    q = rng.normal(q_mean, q_std, (n, d))
    similar = k_mean + np.divide(k_std, q_std) * (q - q_mean)
    order = np.arange(d) if interleaved else np.arange(d).reshape(2, -1).T.ravel()
    z_q, z_k = (x[:, order[0::2]] + 1j * x[:, order[1::2]] for x in (q, similar))
    z_k = z_k * np.exp(1j * m * rope_inv_freq(base, d))
    scores = (z_q * z_k.conj()).real.sum(1)
    shuffled = (z_q * np.roll(z_k, 1, axis=0).conj()).real.sum(1)
    weights = rope_variance_weights(q_std, k_std, interleaved=interleaved)
    expected = rope_decay(m, base=base, head_dim=d, weights=weights)
    assert (scores - shuffled).mean() == pytest.approx(expected, abs=5 * (scores - shuffled).std() / math.sqrt(n))


# --- eq. 17 ---


@pytest.mark.parametrize("base, head_dim", [(1.5, 4), (30.0, 10), (100.0, 64), (1e4, 128), (2e5, 24), (1e6, 80)])
def test_context_bound_is_the_first_negative(base, head_dim):
    bound = rope_context_bound(base=base, head_dim=head_dim)
    decay = rope_decay(np.arange(bound + 2), base=base, head_dim=head_dim)
    assert decay[-1] < 0 <= decay[:-1].min()
    assert rope_context_bound(base=base, head_dim=head_dim, limit=bound + 1) == bound
    if bound:
        assert rope_context_bound(base=base, head_dim=head_dim, limit=bound) is None
    weights = np.full(head_dim // 2, 7e-5)
    assert rope_context_bound(inv_freq=rope_inv_freq(base, head_dim), weights=weights) == bound


def test_half_the_dimensions_at_rest_are_never_negative():
    theta = rope_inv_freq(1e4, 32)
    assert rope_context_bound(inv_freq=np.append(theta, np.zeros(16)), limit=1 << 18) is None
    some_at_rest = np.append(theta, np.zeros(4))
    decay = rope_decay(range(10_000), inv_freq=some_at_rest)
    np.testing.assert_allclose(decay, rope_decay(range(10_000), base=1e4, head_dim=32) + 4, atol=1e-12)
    assert rope_context_bound(inv_freq=some_at_rest) == np.flatnonzero(decay < 0)[0] - 1


# --- eq. 18 ---


@pytest.mark.parametrize(
    "length, head_dim, non_rotary_dims",
    [(2, 128, 0), (40, 4, 0), (150, 6, 0), (300, 64, 0), (700, 10, 2), (1000, 24, 8), (1000, 256, 0)],
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


def test_results_are_plain():
    bound = rope_base_bound(100, 32)
    assert json.loads(json.dumps(bound.to_dict())) == bound.to_dict()
    assert bound.to_dict()["window_width"] == bound.window_width
    assert f"{bound.base:.10g}" in str(bound) and f"{bound.settled_base:.10g}" in str(bound)


def test_table_and_scan_agree_with_single_lengths():
    lengths = [2000, 500, 1000, 500]
    table, scan = rope_base_table(lengths, 64), rope_base_scan(lengths, 64)
    for length in lengths:
        bound = rope_base_bound(length, 64, search_ratio=1.5)
        assert table[length] == pytest.approx(bound.base, rel=1e-15)
        assert scan[length] == bound.two_digit_base


# --- golden data ---


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


def check_exact(data, head_dim, lengths):
    rows = {row["L"]: row for row in data["exact"][str(head_dim)] if row["L"] <= lengths}
    for length, base in rope_base_table(rows, head_dim).items():
        assert base == pytest.approx(float(rows[length]["base"]), rel=5e-16), (head_dim, length)


INFIMA = [(64, 33_000), (96, 17_000), (128, 17_000), (256, 9_000)]
LONG_INFIMA = [(64, 263_000), (96, 263_000), (128, 132_000), (256, 33_000)]


@pytest.mark.parametrize("head_dim, lengths", INFIMA + [pytest.param(*case, marks=slow) for case in LONG_INFIMA])
def test_golden_infima(data, head_dim, lengths):
    check_exact(data, head_dim, lengths)


def check_scan(data, head_dim, digits, lengths):
    golden = {
        int(length): base for length, base in data["scan_tables"][f"head_dim_{head_dim}_digits_{digits}"].items()
    }
    golden = {length: base for length, base in golden.items() if length <= lengths}
    assert rope_base_scan(golden, head_dim, digits=digits) == golden


SCANS = [(64, 2, 66_000), (96, 2, 66_000), (128, 2, 66_000), (256, 2, 66_000)]
LONG_SCANS = [(64, 2, 1 << 20), (96, 2, 1 << 20), (128, 2, 1 << 20), (128, 3, 66_000), (256, 2, 1 << 20)]


@pytest.mark.parametrize("head_dim, digits, lengths", SCANS + [pytest.param(*case, marks=slow) for case in LONG_SCANS])
def test_golden_scans(data, head_dim, digits, lengths):
    check_scan(data, head_dim, digits, lengths)


def check_window(row):
    """The golden widths and last inadmissible bases come from grids (0.2 % steps), which may step over a dip."""
    length = row["L"]
    bound = rope_base_bound(length, 128)
    assert bound.window_width <= 1.02 * row["first_window_rel_width"]
    if bound.window_width < 0.98 * row["first_window_rel_width"]:
        assert lowest(bound.window_end * (1 + 1e-8), 128, length) < 0
    if bound.settled_base is None:
        assert row["last_infeasible_on_grid"] == pytest.approx(bound.search_limit, rel=1e-3)
    else:
        assert bound.settled_base >= row["last_infeasible_on_grid"] * (1 - 1e-3)
        assert lowest(bound.settled_base * (1 - 1e-8), 128, length) < 0


@pytest.mark.parametrize("shortest, longest", [(0, 8_200), pytest.param(8_201, 66_000, marks=slow)])
def test_golden_windows(data, shortest, longest):
    rows = [row for row in data["admissible_windows"]["rows"] if shortest <= row["L"] <= longest]
    assert len(rows) >= 3
    for row in rows:
        check_window(row)


# --- bad input ---


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rope_inv_freq(1.0, 128), "base is 1.0"),
        (lambda: rope_inv_freq(float("nan"), 128), "base is nan"),
        (lambda: rope_inv_freq(float("inf"), 128), "base is inf"),
        (lambda: rope_inv_freq("1e4", 128), "base is '1e4'"),
        (lambda: rope_inv_freq(1e4, 127), "head_dim is 127"),
        (lambda: rope_inv_freq(1e4, 0), "head_dim is 0"),
        (lambda: rope_inv_freq(1e4, 64.0), "head_dim is 64.0"),
        (lambda: rope_decay(1), "either base and head_dim"),
        (lambda: rope_decay(1, base=10.0), "head_dim is None"),
        (lambda: rope_decay(1, base=10.0, head_dim=4, inv_freq=[1.0]), "either base and head_dim"),
        (lambda: rope_decay(1, inv_freq=[]), "non-empty"),
        (lambda: rope_decay(1, inv_freq=[[1.0]]), "non-empty"),
        (lambda: rope_decay(1, inv_freq=[1.0, float("nan")]), "inv_freq holds"),
        (lambda: rope_decay(1, inv_freq=[-1.0]), "inv_freq holds"),
        (lambda: rope_decay([1, float("inf")], base=10.0, head_dim=4), "m holds"),
        (lambda: rope_decay(1, base=10.0, head_dim=4, weights=[1.0]), "one weight per frequency"),
        (lambda: rope_decay(1, base=10.0, head_dim=4, weights=[1.0, -1.0]), "non-negative"),
        (lambda: rope_decay(1, base=10.0, head_dim=4, weights=[0.0, 0.0]), "not all 0"),
        (lambda: rope_context_bound(base=10.0, head_dim=4, limit=0), "limit is 0"),
        (lambda: rope_variance_weights([1.0, 2.0, 3.0], interleaved=True), "d even"),
        (lambda: rope_variance_weights([1.0, -2.0], interleaved=True), "q_std holds"),
        (lambda: rope_variance_weights([1.0, 2.0], [1.0, float("nan")], interleaved=True), "k_std holds"),
        (lambda: rope_base_bound(0, 128), "context_length is 0"),
        (lambda: rope_base_bound(-5, 128), "context_length is -5"),
        (lambda: rope_base_bound(10.5, 128), "context_length is 10.5"),
        (lambda: rope_base_bound(True, 128), "context_length is True"),
        (lambda: rope_base_bound(10, 2), "head_dim is 2"),
        (lambda: rope_base_bound(10, 7), "head_dim is 7"),
        (lambda: rope_base_bound(10, 8, non_rotary_dims=3), "non_rotary_dims is 3"),
        (lambda: rope_base_bound(10, 8, search_ratio=1.0), "search_ratio is 1.0"),
        (lambda: rope_base_table([], 128), "context_lengths is empty"),
        (lambda: rope_base_table([10, 0], 128), "context_lengths is 0"),
        (lambda: rope_base_scan([10], 128, digits=0), "digits is 0"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        call()
