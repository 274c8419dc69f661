"""What the pair of processes does when one of them fails."""

import os
import signal
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 3)


def fail(folder, number):
    """End the second process by a signal, or raise an error, if no file marks an earlier attempt."""
    attempts = len([*Path(folder).iterdir()])
    dist.barrier()
    if dist.get_rank() == 1:
        (Path(folder) / str(attempts)).touch()
        if attempts == 0:
            os.kill(os.getpid(), number) if number else [].pop()
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def test_an_aborted_function_is_called_again_with_a_warning(two_processes, tmp_path):
    with pytest.warns(UserWarning, match="(?s)A process aborted.*ended by SIGABRT"):
        assert two_processes(fail, tmp_path, signal.SIGABRT, attempts=2) == 2


@pytest.mark.parametrize(
    ("number", "attempts", "message"),
    [(signal.SIGABRT, 1, "ended by SIGABRT"), (signal.SIGKILL, 2, "ended by SIGKILL"), (None, 2, "IndexError")],
)
def test_any_other_failure_is_a_failure(two_processes, tmp_path, number, attempts, message):
    with pytest.raises(pytest.fail.Exception, match=f"process 1: .*{message}" if number else message):
        two_processes(fail, tmp_path, number, attempts=attempts)
    assert [x.name for x in tmp_path.iterdir()] == ["0"]
