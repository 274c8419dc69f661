"""Fixtures of runs: a small model for them, and processes of their own."""

import pytest


@pytest.fixture(scope="module")
def small_model():
    """Make preset tiny smaller: most of the time goes into checkpoints."""
    pytest.importorskip("peft")
    from faults import SMALL

    from hf_longctx.training.recipes import PRESETS

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", SMALL)
        yield


@pytest.fixture(scope="module")
def apart():
    """Train in processes of their own; see `make_apart`."""
    pytest.importorskip("peft")
    from faults import make_apart

    return make_apart()
