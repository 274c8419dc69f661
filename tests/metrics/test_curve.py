"""The core of the forgetting curve: inputs, counts, lengths, files. No model runs here."""

import doctest
import json
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from hf_longctx.metrics.curve import result as core
from hf_longctx.metrics.curve.result import CurvePoint, ForgettingCurve, MemoryLength


GRIDS = {"linear": core.linear_lengths, "log": core.log_lengths}


@pytest.fixture(scope="module")
def reference(golden):
    """All recorded curves, by name; those with points only."""
    folder = golden / "forgetting_curve"
    runs = json.loads((folder / "results.json").read_text())
    runs += json.loads((folder / "edge_cases.json").read_text())["runs"]
    return {run["name"]: run for run in runs if run.get("rows")}


@pytest.fixture(scope="module")
def corpus(golden):
    return np.load(golden / "forgetting_curve" / "tokens.npy").astype(np.int64)


def curve_of(run):
    names = ("length", "copy_correct", "lm_correct", "begin_locs")
    return ForgettingCurve(
        [CurvePoint(*(row.get(name) for name in names)) for row in run["rows"]], {"seed": run["seed"]}
    )


def test_examples_in_docstrings():
    result = doctest.testmod(core)
    assert result.attempted >= 4
    assert result.failed == 0


# -- the protocol


def test_grids_match_reference(reference):
    for run in reference.values():
        lengths = [row["length"] for row in run["rows"]]
        grid = GRIDS[run["granularity_type"]](run["test_max_length"], run["granularity"])
        assert grid[: len(lengths)] == lengths, run["name"]


@pytest.mark.parametrize("max_length, n", [(8, 4), (700, 1), (700, 0)])
def test_grid_too_small(max_length, n):
    with pytest.raises(ValueError, match="starts at 8 tokens"):
        core.linear_lengths(max_length, n)


def test_begins_match_reference(reference, corpus):
    checked = 0
    for run in reference.values():
        if run["data_type"] != "order":
            continue
        tokens = corpus[: run["n_corpus_tokens"]]
        lengths = [row["length"] for row in run["rows"]]
        for row, samples in zip(run["rows"], core.order_samples(tokens, lengths, run["repeats"], run["seed"])):
            assert [sample.begin for sample in samples] == row["begin_locs"]
            n = row["length"]
            for sample in samples:
                assert np.array_equal(sample.target, tokens[sample.begin : sample.begin + n])
                assert np.array_equal(sample.irrelevant, tokens[-n:])
            checked += 1
    assert checked > 100


def test_random_ids_match_reference(reference):
    runs = [run for run in reference.values() if run["data_type"] == "random"]
    assert len(runs) == 2
    for run in runs:
        first = next(core.random_samples(run["id_range"], [8], run["repeats"], run["seed"]))[0]
        assert first.target.tolist() == run["first_copy_ids"]
        assert first.irrelevant.tolist() == run["first_irrelevant_ids"]
        assert first.begin is None


def test_random_ids_avoid_special_ids():
    (samples,) = core.random_samples((3, 6), [200], 1, seed=0, skip=frozenset({4, 9}))
    assert set(samples[0].target) == set(samples[0].irrelevant) == {3, 5, 6}
    with pytest.raises(ValueError, match="no choice"):
        core.random_samples((4, 5), [8], 1, seed=0, skip=frozenset({4, 5}))


def test_samples_of_a_shorter_grid_are_the_same(corpus):
    long = list(core.order_samples(corpus, [5, 6, 7], 3, seed=1))
    short = list(core.order_samples(corpus, [5, 6], 3, seed=1))
    assert [[s.begin for s in samples] for samples in long[:2]] == [[s.begin for s in samples] for samples in short]


@pytest.mark.parametrize("n, scored", [(1, [200]), (2, [201]), (3, [201, 202]), (8, [204, 205, 206, 207])])
def test_scored_positions(n, scored):
    """The logits one before each token of the target's second half, rounded up."""
    prefix, target = np.arange(100, 100 + n), np.arange(200, 200 + n)
    ids = core.model_input(prefix, target, bos=1, eos=2)
    assert ids.tolist() == [1, *prefix, 1, *target, 2]
    assert ids.dtype == np.int64
    assert core.input_tokens(n) == len(ids)
    assert core.scored_tokens(n) == len(scored)
    assert [ids[position + 1] for position in core.scored_logits(n)] == scored


@pytest.mark.parametrize("limit, longest", [(0, 0), (4, 0), (5, 1), (1023, 510), (1024, 510), (1025, 511)])
def test_longest_length(limit, longest):
    assert core.longest_length(limit) == longest
    assert core.input_tokens(longest) <= limit or longest == 0
    assert core.input_tokens(longest + 1) > limit


@pytest.mark.parametrize("lengths", [[], [0, 8], [-1], [8, 8], [16, 8], [8.5], ["8"], 8, [None]])
def test_bad_lengths(lengths):
    with pytest.raises(ValueError, match="lengths must be"):
        core.check_lengths(lengths)


def test_lengths_of_any_integer_type():
    assert core.check_lengths(np.array([1, 8, 9], dtype=np.uint16)) == [1, 8, 9]


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "tokens is empty"),
        ("", "flat sequence"),
        ("some text", "flat sequence"),
        (None, "flat sequence"),
        ([[1, 2]], r"int64 of shape \(1, 2\)"),
        ([1.0, 2.0], "float64"),
        ([1, 2, 10], r"tokens\[2\] is 10, but the model's vocabulary has 10 ids"),
        ([1, -1], r"tokens\[1\] is -1"),
    ],
)
def test_bad_ids(ids, message):
    with pytest.raises(ValueError, match=message):
        core.check_ids(ids, "tokens", vocab_size=10)


def test_corpus_too_short():
    corpus = np.arange(29)
    with pytest.raises(ValueError, match=r"29 tokens; length 10 needs 30.*longest possible length is 9:"):
        core.order_samples(corpus, [5, 10], 1, 0)
    (samples,) = core.order_samples(corpus, [9], 50, 0)
    assert {sample.begin for sample in samples} == {0, 1, 2}
    with pytest.raises(ValueError, match=r"irrelevant_tokens has 5 ids.*longest possible length is 5:"):
        core.order_samples(np.arange(100), [6], 1, 0, irrelevant=np.arange(5))


# -- the numbers


def test_statistics_match_reference(reference):
    """Recorded from float32 accuracies, so good to float32."""
    for run in reference.values():
        for row, point in zip(run["rows"], curve_of(run).points):
            assert point.scored_tokens == row["scored_tokens"]
            for name in ("copy_mean", "copy_std", "lm_mean", "lm_std", "p_value"):
                assert getattr(point, name) == pytest.approx(row[name], rel=3e-6, abs=1e-12), (run["name"], name)


@pytest.mark.parametrize(
    "copy, lm, p",
    [
        ([4, 4, 4], [4, 4, 4], 1.0),  # no difference
        ([4, 4, 4], [1, 1, 1], 0.0),  # a constant one
        ([4], [1], 1.0),  # one repeat tells nothing
        ([3, 4], [1, 3], 0.20483276469913345),  # t = 3 at one degree of freedom: 1 - 2 atan(3) / pi
        ([1, 3], [3, 4], 0.20483276469913345),
    ],
)
def test_p_value(copy, lm, p):
    assert CurvePoint(8, copy, lm).p_value == pytest.approx(p, rel=1e-12, abs=0)


def test_memory_lengths_match_reference(reference):
    for run in reference.values():
        assert plain(curve_of(run).memory_lengths) == run["derived"], run["name"]


def test_exactly_99_percent_is_not_fine(reference):
    run = reference["random_linear12_r10_s2"]
    (row,) = (row for row in run["rows"] if row["length"] == 99)
    assert sum(row["copy_correct"]) == 495  # of 500
    assert row["copy_mean"] > 0.99  # in float32, so a float test would say 237 below
    assert curve_of(run).memory_lengths["fine_first_run"] == 53


def test_memory_lengths_of_made_up_curves(golden):
    cases = json.loads((golden / "forgetting_curve" / "edge_cases.json").read_text())["derived_length_cases"]
    for case in cases:
        total = 10_000
        copy, lm = ([int(Fraction(x) * total) for x in case[name]] for name in ("copy", "lm"))
        lengths = case["lengths"]
        found = core.memory_lengths(lengths, copy, lm, [total] * len(lengths), case["p_value"])
        assert plain(found) == case["expected"], case["name"]


def test_memory_lengths_of_published_llama3(golden):
    published = json.loads((golden / "forgetting_curve" / "published_llama3.json").read_text())
    lengths, copy, lm, p_values = zip(*published["rows"])
    scored = [10 * core.scored_tokens(n) for n in lengths]
    counts = ([round(mean * n) for mean, n in zip(means, scored)] for means in (copy, lm))
    found = core.memory_lengths(lengths, *counts, scored, p_values)
    assert plain(found) == published["derived"]
    assert found["fine_max"].next_tested == 4650


def plain(readings):
    return {name: {"length": int(x), "open_ended": x.open_ended} for name, x in readings.items()}


@pytest.mark.parametrize(
    "copy, next_tested",
    [([0, 0, 0, 0], 8), ([4, 0, 0, 0], 16), ([4, 0, 16, 0], 40), ([4, 8, 16, 20], None)],
    ids=["none", "first", "after-a-dip", "open"],
)
def test_next_tested(copy, next_tested):
    fine = core.memory_lengths([8, 16, 32, 40], copy, [0] * 4, [4, 8, 16, 20], [0.0] * 4)["fine_max"]
    assert fine.next_tested == next_tested
    assert fine.open_ended == (next_tested is None)


def test_memory_length_is_an_int():
    length = MemoryLength(1400, open_ended=True)
    assert length == 1400
    assert length + 1 == 1401
    assert (str(length), f"{length}", f"{length:6d}", json.dumps(length)) == (">1400", ">1400", "  1400", "1400")
    again = pickle.loads(pickle.dumps(length))
    assert (again, again.open_ended, again.next_tested) == (1400, True, None)
    assert str(MemoryLength(767, next_tested=893)) == "767"


@pytest.mark.parametrize(
    "copy, lm, message",
    [
        ([5], [0], "copy_correct at length 8 must hold integers from 0 to 4"),
        ([4], [-1], "lm_correct at length 8"),
        ([0.5], [0], "copy_correct"),
        ([], [], "copy_correct"),
        ([4, 4], [0], "2 copy counts and 1 LM counts"),
    ],
)
def test_bad_counts(copy, lm, message):
    with pytest.raises(ValueError, match=message):
        CurvePoint(8, copy, lm)


# -- the result


def small_curve():
    return ForgettingCurve(
        [
            CurvePoint(18, [9, 9], [0, 1], [3, 1]),
            CurvePoint(20, [4, 5], [1, 0], [2, 9]),
            CurvePoint(40, [1, 0], [0, 1]),
        ],
        {"model": "some/folder/tiny", "seed": 7, "data_type": "order", "dtype": "float32"},
    )


def test_lengths_and_summary():
    curve = small_curve()
    assert (curve.fine_length, curve.coarse_length) == (18, 20)
    assert curve.summary() == (
        "fine length 18 tokens (next tested: 20), coarse length 20 tokens (next tested: 40); "
        "3 lengths from 18 to 40, 2 repeats; 95 % sure: fine >=0, coarse >=0"
    )
    assert (
        ForgettingCurve(curve.points[:2])
        .summary()
        .startswith("fine length 18 tokens (next tested: 20), coarse length >20 tokens;")
    )


def test_empty_curve():
    curve = ForgettingCurve([])
    assert (curve.fine_length, curve.coarse_length, curve.fine_length.open_ended) == (0, 0, False)
    assert curve.summary() == "no length measured"
    assert ForgettingCurve.from_json(curve.to_json()) == curve


def test_json_round_trip(tmp_path):
    curve = small_curve()
    curve.save(tmp_path / "curve.json")
    text = (tmp_path / "curve.json").read_text()
    again = ForgettingCurve.from_json(text)
    assert again == curve
    assert again.to_json() == curve.to_json()
    document = json.loads(text)
    assert document["settings"]["seed"] == 7
    assert document["memory_lengths"]["coarse_max"] == {"length": 20, "open_ended": False, "next_tested": 40}
    assert document["points"][0]["copy_correct"] == [9, 9]
    assert document["points"][1]["copy_mean"] == 0.45


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": 2}, "has format 2, and this version of hf-longctx reads up to 1"),
        ({"points": None}, "not a forgetting"),
    ],
)
def test_unreadable_json(change, message):
    document = json.loads(small_curve().to_json()) | change
    with pytest.raises(ValueError, match=message):
        ForgettingCurve.from_json(json.dumps({key: value for key, value in document.items() if value is not None}))


# -- the package


def test_import_is_cheap():
    """Naming the metrics loads none of their dependencies; each name brings what it needs."""
    script = (
        "import sys, hf_longctx; before = set(sys.modules); import hf_longctx.metrics as m;"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before};"
        "assert not new & {'torch', 'scipy', 'numpy', 'matplotlib', 'transformers'}, new;"
        "m.linear_lengths; assert 'hf_longctx.metrics.curve.measure' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_all_names_exist():
    import hf_longctx.metrics as metrics

    assert callable(metrics.forgetting_curve)
    assert {name for name in metrics.__all__ if not hasattr(metrics, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = metrics.nonsense
