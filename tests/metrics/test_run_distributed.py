"""Tasks: how processes share them, what an exception keeps, what the journal and the settings say."""

import numpy as np
import pytest
from tiny_models import CORPUS, tiny_llama

from hf_longctx.metrics import PositionLoss, Run, position_loss
from hf_longctx.metrics.run.distributed import Worker, exchange, labels, run_distributed
from hf_longctx.metrics.run.reader import LocalReader


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_every_task_has_one_process_and_the_load_is_even(processes):
    tasks = [3, 1, 40, 7, 30, 12, 13, 25, 8]
    shares = [Worker(None, None, rank, processes).tasks({n: n for n in tasks}) for rank in range(processes)]
    assert sorted(task for share in shares for task in share) == sorted(tasks)
    assert all(share == [task for task in tasks if task in share] for share in shares)  # in order
    assert max(map(sum, shares)) <= sum(tasks) / processes + max(tasks)


def test_labels_are_those_that_are_known():
    assert labels(None, None) == {}
    assert labels("a book", 64) == {"corpus": "a book", "train_length": 64}


def test_names_in_the_settings_do_not_change_the_journal(tmp_path):
    """A run goes on under another name of the text: its hash tells what the text is."""
    model, run = tiny_llama(), Run(journal=tmp_path / "journal")
    first = position_loss(model, CORPUS, context_length=9, run=run, corpus_name="a")
    again = position_loss(model, CORPUS, context_length=9, run=run, corpus_name="b", train_length=64)
    assert first.loss == again.loss
    assert (first.settings["corpus"], again.settings["corpus"], again.settings["train_length"]) == ("a", "b", 64)


@pytest.mark.parametrize("done, summary", [(0, "nothing had been measured"), (2, "2 sequences")])
def test_an_exception_carries_what_was_measured(done, summary):
    def measure(part):
        if part == done:
            raise OSError("disk")
        return 1.5

    with pytest.raises(OSError, match="disk") as caught:
        run_distributed(
            LocalReader(tiny_llama()),
            "parts",
            lambda worker: worker.measure(dict.fromkeys(range(5), 1), measure),
            lambda entries: PositionLoss([*entries.values()], len(entries)) if entries else None,
            depends_on={},
            trial=np.arange(3),
            run=None,
        )
    result = caught.value.result
    assert (result and (result.loss, result.settings["interrupted"])) == (((1.5,) * done, "disk") if done else None)
    assert not done or result.summary().endswith("2 sequences; interrupted: disk")
    assert any(summary in note for note in caught.value.__notes__)


def test_a_failure_elsewhere_is_named(monkeypatch):
    import torch

    def gather(everyone, mine):
        everyone[:] = [mine, ({"b": 2}, "OSError('disk')")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    entries, failure = exchange({"a": 1}, None, 2)
    assert entries == {"a": 1, "b": 2}
    assert str(failure) == "process 1 failed: OSError('disk')"
