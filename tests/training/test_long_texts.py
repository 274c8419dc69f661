"""Interleaved and dilated texts."""

import pytest

from hf_longctx.training.long_texts import dilate, interleave


def test_interleaved():
    first, second = list(range(100, 110)), list(range(200, 204))
    assert interleave(first, second, 3) == [100, 101, 102, 200, 201, 202, 103, 104, 105, 203, *range(106, 110)]
    assert interleave(second, first, 256) == second + first
    assert interleave([], first, 4) == interleave(first, [], 4) == first


@pytest.mark.parametrize("length", [1, 3, 7])
def test_interleaving_loses_nothing(length):
    first, second = list(range(23)), list(range(100, 117))
    mixed = interleave(first, second, length)
    assert [t for t in mixed if t < 100] == first
    assert [t for t in mixed if t >= 100] == second


def test_dilated():
    assert dilate(list(range(1, 8)), 3, 0) == [1, 2, 3, 0, 0, 0, 4, 5, 6, 0, 0, 0, 7]
    assert dilate([], 3, 0) == []
    assert dilate([5, 6], 2, 9) == [5, 6, 9, 9]


@pytest.mark.parametrize("make", [lambda: interleave([1], [2], 0), lambda: dilate([1], -1, 0)])
def test_a_turn_has_tokens(make):
    with pytest.raises(ValueError, match="at least one token"):
        make()
