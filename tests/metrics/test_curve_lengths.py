"""Memory lengths read off counts."""

import json
import pickle
from fractions import Fraction
from typing import NamedTuple

import pytest

from hf_longctx.metrics.curve.lengths import CurvePoint, MemoryLength, memory_lengths
from hf_longctx.metrics.curve.protocol import scored_tokens


class Point(NamedTuple):
    """The counts of a length, which need not be those of whole tokens."""

    length: int
    copy: int
    lm: int
    scored_tokens: int
    p_value: float

    repeats = 1
    copy_correct = property(lambda self: [self.copy])
    lm_correct = property(lambda self: [self.lm])
    passes = CurvePoint.passes


def plain(readings):
    return {name: {"length": int(x), "open_ended": x.open_ended} for name, x in readings.items()}


def test_memory_lengths_of_made_up_curves(golden):
    cases = json.loads((golden / "forgetting_curve" / "edge_cases.json").read_text())["derived_length_cases"]
    for case in cases:
        total = 10_000
        copy, lm = ([int(Fraction(x) * total) for x in case[name]] for name in ("copy", "lm"))
        lengths = case["lengths"]
        points = [*map(Point, lengths, copy, lm, [total] * len(lengths), case["p_value"])]
        assert plain(memory_lengths(points)) == case["expected"], case["name"]


def test_memory_lengths_of_published_llama3(golden):
    published = json.loads((golden / "forgetting_curve" / "published_llama3.json").read_text())
    lengths, copy, lm, p_values = zip(*published["rows"])
    scored = [10 * scored_tokens(n) for n in lengths]
    counts = ([round(mean * n) for mean, n in zip(means, scored)] for means in (copy, lm))
    readings = memory_lengths([*map(Point, lengths, *counts, scored, p_values)])
    assert plain(readings) == published["derived"]
    assert readings["fine_max"].next_tested == 4650


@pytest.mark.parametrize(
    "copy, next_tested",
    [([0, 0, 0, 0], 8), ([4, 0, 0, 0], 16), ([4, 0, 16, 0], 40), ([4, 8, 16, 20], None)],
    ids=["none", "first", "after-a-dip", "open"],
)
def test_next_tested(copy, next_tested):
    fine = memory_lengths([*map(Point, [8, 16, 32, 40], copy, [0] * 4, [4, 8, 16, 20], [0.0] * 4)])["fine_max"]
    assert fine.next_tested == next_tested
    assert fine.open_ended == (next_tested is None)


def test_memory_length_is_an_int():
    length = MemoryLength(1400, open_ended=True)
    assert (str(length), f"{length}", f"{length:6d}", json.dumps(length)) == (">1400", ">1400", "  1400", "1400")
    again = pickle.loads(pickle.dumps(length))
    assert (again, again.open_ended, again.next_tested) == (1400, True, None)
