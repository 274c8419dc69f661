"""The counts of a curve: the protocols, two processes, journals, and too little memory."""

import json
from contextlib import contextmanager

import pytest
import torch
from test_curve_measure import forgetting_curve
from tiny_models import CORPUS, tiny_llama

from hf_longctx.metrics import ForgettingCurve
from hf_longctx.metrics.curve import protocol as core
from hf_longctx.metrics.run.engine import CACHES


PROTOCOLS = ["reference", "adaptive"]


@pytest.fixture(scope="module")
def counting():
    """Return a tiny Llama with few ids, so that some of its predictions are correct."""
    return tiny_llama(vocab_size=8)


def test_adaptive_curve_is_a_part_of_the_reference_curve(counting):
    options = {"lengths": core.linear_lengths(60, 24), "repeats": 6, "seed": 3}
    curve = forgetting_curve(counting, CORPUS % 8, protocol="adaptive", confidence=0.9, **options)
    whole = {p.length: p for p in forgetting_curve(counting, CORPUS % 8, **options).points}
    assert [p.length for p in curve.points if p.length in (8, 60)] == [8, 60]
    assert all(p == whole[p.length].first(p.repeats) for p in curve.points)
    assert sum(p.repeats * p.length for p in curve.points) < 0.6 * sum(6 * n for n in whole)
    assert json.loads(curve.to_json())["settings"]["confidence"] == 0.9


# -- processes


SHARED = {"lengths": [8, 20, 30, 50], "repeats": 4}


@contextmanager
def tokens_read(model):
    """Record the number of tokens in each forward pass."""
    read = []

    def count(_, args, options):
        read.append((args[0] if args else options["input_ids"]).numel())

    hook = model.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield read
    finally:
        hook.remove()


def share_the_work(folder):
    """Measure in two processes. Return what each process read, and how both end if one fails."""
    rank, model = torch.distributed.get_rank(), tiny_llama(vocab_size=8)
    for protocol in PROTOCOLS:
        with tokens_read(model) as read:
            curve = forgetting_curve(model, CORPUS % 8, protocol=protocol, journal=folder / protocol, **SHARED)
        (folder / f"{protocol}.{rank}.json").write_text(curve.to_json())
        (folder / f"{protocol}.{rank}.read").write_text(str(sum(read)))
    if rank == 1:
        model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    failure = repr(ZeroDivisionError("division by zero"))
    for protocol in PROTOCOLS:
        with pytest.raises(Exception) as caught:
            forgetting_curve(model, CORPUS % 8, protocol=protocol, **SHARED)
        expected = failure if rank else repr(RuntimeError(f"process 1 failed: {failure}"))
        assert repr(caught.value) == expected


def test_two_processes_share_the_work(counting, tmp_path, two_processes):
    """Each reads about half, has a journal of its own, and returns the JSON of one process; both end if one fails."""
    two_processes(share_the_work, tmp_path)
    for protocol in PROTOCOLS:
        with tokens_read(counting) as read:
            alone = forgetting_curve(counting, CORPUS % 8, protocol=protocol, **SHARED)
        for rank in range(2):
            assert (tmp_path / f"{protocol}.{rank}.json").read_text() == alone.to_json()
            assert int((tmp_path / f"{protocol}.{rank}.read").read_text()) < 0.8 * sum(read)
        assert (tmp_path / protocol).exists() and (tmp_path / f"{protocol}.1").exists()


# -- journals


@contextmanager
def stopped_after(model, passes):
    """Ctrl-C in the forward pass after this many."""
    left = [KeyboardInterrupt] + [None] * passes

    def stop(*_):
        if left.pop():
            raise KeyboardInterrupt

    hook = model.model.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_killed_run_resumes(counting, tmp_path, protocol):
    """A run killed at any point resumes: the file and the curve are the same, and nothing is measured twice."""
    options = {"lengths": [2, 9, 12], "repeats": 3, "protocol": protocol, "tokens_per_pass": 8}
    corpus = CORPUS % 8
    whole = forgetting_curve(counting, corpus, journal=tmp_path / "whole", **options)
    assert whole == forgetting_curve(counting, corpus, **options)
    with tokens_read(counting) as read:
        forgetting_curve(counting, corpus, journal=tmp_path / "whole", **options)
        assert not read
        forgetting_curve(counting, corpus, journal=tmp_path / "other", **options)
        total = len(read)
    for kill_at in (0, total // 2, total - 1):
        path = tmp_path / f"killed{kill_at}"
        with stopped_after(counting, kill_at), pytest.raises(KeyboardInterrupt) as caught:
            forgetting_curve(counting, corpus, journal=path, **options)
        lines = path.read_bytes().splitlines()
        assert (tmp_path / "whole").read_bytes().splitlines()[: len(lines)] == lines
        assert len(caught.value.result.points) <= 3
        assert forgetting_curve(counting, corpus, journal=path, **options) == whole
        assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_journal_of_another_run(tmp_path):
    options = {"lengths": [8, 9], "repeats": 2, "journal": tmp_path / "journal"}
    model = tiny_llama()
    forgetting_curve(model, CORPUS, **options)
    changes = {"seed": ("seed", 1), "lengths": ("lengths", [8]), "protocol": ("protocol", "adaptive")}
    changes["irrelevant_sha256"] = ("irrelevant_text", CORPUS[:50])
    for name, (option, value) in changes.items():
        with pytest.raises(ValueError, match=f"another run: .*{name} is"):
            forgetting_curve(model, CORPUS, **options | {option: value})
    with pytest.raises(ValueError, match="another run: corpus_sha256 is"):
        forgetting_curve(model, CORPUS[::-1].copy(), **options)
    model.lm_head.weight.data += 1
    with pytest.raises(ValueError, match="another run: weights_sha256 is"):
        forgetting_curve(model, CORPUS, **options)


# -- running out of memory


def fail_on(model, too_much):
    """Memory is short for passes that `too_much` says, of (tokens in the pass, tokens in the cache)."""

    def check(_, args, options):
        ids = args[0] if args else options["input_ids"]
        cache = next((options[name] for name in CACHES if name in options), None)
        if too_much(ids.numel(), 0 if cache is None else cache.get_seq_length()):
            raise torch.OutOfMemoryError("no memory")

    return model.model.register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_lengths_that_memory_is_short_for_are_named(counting, tmp_path, protocol):
    options = {"repeats": 3, "protocol": protocol, "tokens_per_pass": 40, "seed": 2}
    path = tmp_path / "journal"
    hook = fail_on(counting, lambda tokens, before: tokens + before > 50)
    try:
        curve = forgetting_curve(counting, CORPUS % 8, lengths=[9, 15, 30, 60], journal=path, **options)
    finally:
        hook.remove()
    assert [p.length for p in curve.points] == [9, 15]
    assert set(curve.missing) == {30, 60}
    assert "2 lengths from 30 to 60 not measured: out of memory" in curve.summary()
    assert ForgettingCurve.from_json(curve.to_json()) == curve
    before = path.read_bytes()
    assert forgetting_curve(counting, CORPUS % 8, lengths=[9, 15, 30, 60], journal=path, **options) == curve
    assert path.read_bytes() == before
    if protocol == "reference":
        assert curve.points == forgetting_curve(counting, CORPUS % 8, lengths=[9, 15], **options).points


def test_an_interrupted_adaptive_curve_names_what_it_did_not_reach(counting):
    """A finished one leaves lengths out, because nothing depends on them."""
    options = dict(lengths=list(range(8, 20)), repeats=3, protocol="adaptive")
    finished = forgetting_curve(counting, CORPUS % 8, **options)
    assert len(finished.points) < 12 and not finished.missing
    with stopped_after(counting, 5), pytest.raises(KeyboardInterrupt) as caught:
        forgetting_curve(counting, CORPUS % 8, **options)
    curve = caught.value.result
    assert {p.length for p in curve.points} | curve.missing.keys() == set(options["lengths"])
    assert set(curve.missing.values()) == {"interrupted"}
