"""Lengths, samples and inputs of the forgetting curve, against the recorded ones."""

import numpy as np
import pytest

from hf_longctx.metrics.curve import protocol as core


GRIDS = {"linear": core.linear_lengths, "log": core.log_lengths}


def test_grids_match_reference(reference):
    for run in reference.values():
        lengths = [row["length"] for row in run["rows"]]
        grid = GRIDS[run["granularity_type"]](run["test_max_length"], run["granularity"])
        assert grid[: len(lengths)] == lengths, run["name"]


def test_default_lengths_need_an_end_and_leave_room_for_the_repeats():
    with pytest.raises(ValueError, match="lengths="):
        core.default_lengths(None, None)
    assert core.default_lengths(None, 2300, repeats=20)[-1] == 100
    assert core.default_lengths(64, 247, 4, core.log_lengths) == core.log_lengths(19, 4)
    with pytest.raises(ValueError, match="at least 117 tokens for 10 repeats, got 11"):
        core.default_lengths(64, 11)


def test_begins_match_reference(reference, tokens):
    checked = 0
    for run in reference.values():
        if run["data_type"] != "order":
            continue
        corpus = tokens[: run["n_corpus_tokens"]].astype(np.int64)
        lengths = [row["length"] for row in run["rows"]]
        for row, samples in zip(
            run["rows"], core.order_samples(corpus, lengths, run["repeats"], run["seed"]).values()
        ):
            assert [sample.begin for sample in samples] == row["begin_locs"]
            n = row["length"]
            for sample in samples:
                assert np.array_equal(sample.target, corpus[sample.begin : sample.begin + n])
                assert np.array_equal(sample.irrelevant, corpus[-n:])
            checked += 1
    assert checked > 100


def test_random_ids_match_reference(reference):
    runs = [run for run in reference.values() if run["data_type"] == "random"]
    assert len(runs) == 2
    for run in runs:
        first = core.random_samples(run["id_range"], [8], run["repeats"], run["seed"])[8][0]
        assert first.target.tolist() == run["first_copy_ids"]
        assert first.irrelevant.tolist() == run["first_irrelevant_ids"]
        assert first.begin is None


def test_random_ids_avoid_special_ids():
    samples = core.random_samples((3, 6), [200], 1, seed=0, skip=frozenset({4, 9}))[200]
    assert set(samples[0].target) == set(samples[0].irrelevant) == {3, 5, 6}
    with pytest.raises(ValueError, match="two ordinary tokens"):
        core.random_samples((4, 5), [8], 1, seed=0, skip=frozenset({4, 5}))


@pytest.mark.parametrize("n, scored", [(1, [200]), (2, [201]), (3, [201, 202]), (8, [204, 205, 206, 207])])
def test_scored_positions(n, scored):
    """The logits one before each token of the target's second half, rounded up."""
    prefix, target = np.arange(100, 100 + n), np.arange(200, 200 + n)
    samples = [core.Sample(target, prefix, None)] * 2
    copy, ids = core.model_inputs("copy", samples, bos=1, eos=2)[0], core.model_inputs("LM", samples, bos=1, eos=2)[1]
    assert copy.tolist() == [1, *target, 1, *target, 2] and ids.tolist() == [1, *prefix, 1, *target, 2]
    assert ids.dtype == np.int64
    assert core.input_tokens(n) == len(ids)
    assert core.scored_tokens(n) == len(scored)
    assert [ids[position + 1] for position in core.scored_logits(n)] == scored


def test_corpus_too_short():
    corpus = np.arange(29)
    with pytest.raises(ValueError, match=r"at least 30 tokens.*got 29. Drop the lengths above 9"):
        core.order_samples(corpus, [5, 10], 1, 0)
    samples = core.order_samples(corpus, [9], 50, 0)[9]
    assert {sample.begin for sample in samples} == {0, 1, 2}
    with pytest.raises(ValueError, match=r"irrelevant_text must have .*got 5. Drop the lengths above 5"):
        core.order_samples(np.arange(100), [6], 1, 0, irrelevant=np.arange(5))
