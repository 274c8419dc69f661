"""The RoPE bound against plain cosine sums and the golden data."""

import json

import numpy as np
import pytest

from hf_longctx.metrics.rope.bounds import rope_context_bound, rope_decay, rope_inv_freq


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


def test_decay_keeps_shape():
    assert isinstance(rope_decay(3, base=10.0, head_dim=4), float)
    assert rope_decay(np.zeros((2, 0, 3)), base=10.0, head_dim=4).shape == (2, 0, 3)
    np.testing.assert_array_equal(rope_decay([[0, 0]], base=10.0, head_dim=4), [[2.0, 2.0]])


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
