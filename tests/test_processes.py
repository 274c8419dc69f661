"""What the pair of processes does when one of them crashes."""

import os
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 1)


def crash(folder, attempts):
    """End the second process by a signal in the first `attempts` attempts. The first process waits for it."""
    rank, marks = dist.get_rank(), len([*Path(folder).iterdir()])
    dist.barrier()
    if rank == 1 and marks < attempts:
        (Path(folder) / str(marks)).touch()
        os.abort()
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def test_a_crash_is_repeated_once(two_processes, tmp_path):
    assert two_processes(crash, tmp_path, 1) == 2 and len([*tmp_path.iterdir()]) == 1


def test_a_second_crash_is_a_failure(two_processes, tmp_path):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)process 0: .*a crash: crash: ended by signal \[6\]"):
        two_processes(crash, tmp_path, 2)
    assert len([*tmp_path.iterdir()]) == 2


def test_an_exception_is_not_repeated(two_processes, tmp_path):
    with pytest.raises(pytest.fail.Exception, match="FileNotFoundError"):
        two_processes(crash, tmp_path / "absent", 1)
