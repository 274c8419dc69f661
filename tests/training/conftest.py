"""Runs in processes of their own."""

import pytest


@pytest.fixture(scope="module")
def apart():
    """Train in processes of their own; see `make_apart`."""
    pytest.importorskip("peft")
    from faults import make_apart

    return make_apart()
