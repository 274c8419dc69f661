"""Runs in separate processes."""

import pytest


@pytest.fixture(scope="module")
def apart():
    """Train in separate processes; see `make_apart`."""
    pytest.importorskip("peft")
    from faults import make_apart

    return make_apart()
