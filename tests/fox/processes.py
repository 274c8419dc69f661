"""Run a function in two processes that talk over gloo, and give back what the first one returns."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


WORLD = 2
TIMEOUT = 240  # seconds


def worker(rank, function, folder, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for by accelerate, used by no one
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        result = function(*arguments)
        if rank == 0:
            torch.save(result, folder / "result.pt")
    finally:
        dist.destroy_process_group()


def in_processes(function, folder, *arguments):
    """`function(*arguments)`, importable by name, in each process; what it raises in one of them is raised here."""
    context = mp.spawn(worker, (function, folder, arguments), nprocs=WORLD, join=False)
    deadline = time.monotonic() + TIMEOUT
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                pytest.fail(f"{function.__name__} did not end in {TIMEOUT} s: do the processes wait for one another?")
    finally:
        for process in context.processes:
            process.kill()
    return torch.load(folder / "result.pt", weights_only=False)
