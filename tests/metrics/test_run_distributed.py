"""Tasks: how processes share them, what the journal and the settings say."""

import pytest
from tiny_models import CORPUS, tiny_llama

from hf_longctx.metrics import Run, position_loss
from hf_longctx.metrics.run.runner import share


@pytest.mark.parametrize("processes", [1, 2, 7])
def test_every_task_has_one_process_and_the_load_is_even(processes):
    tasks = [3, 1, 40, 7, 30, 12, 13, 25, 8]
    shares = [share({n: n for n in tasks}, rank, processes) for rank in range(processes)]
    assert sorted(task for share in shares for task in share) == sorted(tasks)
    assert all(share == [task for task in tasks if task in share] for share in shares)  # in order
    assert max(map(sum, shares)) <= sum(tasks) / processes + max(tasks)


def test_names_in_the_settings_do_not_change_the_journal(tmp_path):
    """A run resumes if the corpus has a different name, because its hash identifies it."""
    model, run = tiny_llama(), Run(journal=tmp_path / "journal")
    first = position_loss(model, CORPUS, context_length=9, run=run, corpus_name="a")
    again = position_loss(model, CORPUS, context_length=9, run=run, corpus_name="b", train_length=64)
    assert first.loss == again.loss
    assert (first.settings["corpus"], again.settings["corpus"], again.settings["train_length"]) == ("a", "b", 64)
