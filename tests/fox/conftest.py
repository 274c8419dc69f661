"""Fixtures of the FoX tests."""

import pytest
from processes import TwoProcesses


@pytest.fixture(scope="session")
def two_processes():
    """Runs a function in two processes at once, see tests/processes.py."""
    processes = TwoProcesses()
    yield processes
    processes.stop()
