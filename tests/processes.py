"""Two processes that run the same function at the same time, over gloo. They start once, because imports are slow."""

import gc
import os
import queue
import signal
import tempfile
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from commands import context


WORLD = 2
TIMEOUT = 240  # seconds for one job
GRACE = 10  # seconds for the other process, once one has failed


def work(rank, folder, jobs, results):
    """Run one job after another, each in a process group of its own: idle groups poll, and every mesh adds one."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # accelerate wants them and does not use them
    torch.set_num_threads(1)
    gc.freeze()  # garbage collections then skip the objects of the server
    for number, (function, arguments) in enumerate(iter(jobs.get, None)):
        try:
            rendezvous = f"file://{folder}/rendezvous {number}"
            dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
            torch.save(function(*arguments), f"{folder}/{rank}.pt")
            dist.destroy_process_group()
            gc.collect()  # a model that refers to its mesh keeps the threads of a group alive
            results.put((rank, None))
        except Exception:
            results.put((rank, traceback.format_exc()))


class TwoProcesses:
    """`two_processes(function, *arguments)`: what `function`, importable by name, returns in the first process.

    attempts: how often the function is called if a process aborts. gloo rarely aborts with "malloc(): unaligned tcache
    chunk detected". The function must do all of its work again.
    """

    def __init__(self):
        self.members = []

    def start(self):
        forks = context()
        self.folder = tempfile.TemporaryDirectory()
        self.results, self.jobs = forks.Queue(), [forks.Queue() for _ in range(WORLD)]
        self.members = [
            forks.Process(target=work, args=(rank, self.folder.name, jobs, self.results), daemon=True)
            for rank, jobs in enumerate(self.jobs)
        ]
        for member in self.members:
            member.start()

    def stop(self):
        for member in self.members:
            member.kill()
            member.join()
        self.members = []

    def __call__(self, function, *arguments, attempts=1):
        failures, aborted = self.run(function, *arguments)
        if aborted and attempts > 1:
            warnings.warn(f"A process aborted, and the function is called again. {failures}", stacklevel=2)
            return self(function, *arguments, attempts=attempts - 1)
        if failures:
            pytest.fail(failures, pytrace=False)
        return torch.load(f"{self.folder.name}/0.pt", weights_only=False)

    def run(self, function, *arguments):
        """Run a function in both processes. Return the failures as text, and whether a process aborted."""
        if not self.members:
            self.start()
        for jobs in self.jobs:
            jobs.put((function, arguments))
        failures, patience = {}, TIMEOUT
        for _ in self.members:
            try:
                rank, failure = self.results.get(timeout=patience)
            except queue.Empty:
                waiting = "the other one waited for it" if failures else f"no answer in {TIMEOUT} s"
                failures[None] = f"{function.__name__}: {waiting}."
                break
            if failure:
                failures[rank], patience = failure, GRACE
        signals = {rank: -member.exitcode for rank, member in enumerate(self.members) if (member.exitcode or 0) < 0}
        failures |= {rank: f"{function.__name__}: ended by {signal.Signals(x).name}." for rank, x in signals.items()}
        if failures:
            self.stop()  # a process group may be half open; the next job starts a new pair
        text = "\n".join(f"process {rank}: {failure}" for rank, failure in failures.items())
        return text, signal.SIGABRT in signals.values()
