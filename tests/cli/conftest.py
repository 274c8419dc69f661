"""A model folder for the commands to work on."""

import pytest

from hf_longctx import cli


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model that `train-demo` made in two steps."""
    pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'hf-longctx[training]'")
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")
    path = tmp_path_factory.mktemp("model")
    assert cli.main(["train-demo", str(path), "--steps", "2", "--context", "64"]) == 0
    return path


@pytest.fixture(autouse=True)
def no_hub(tmp_path_factory, monkeypatch):
    """No network, and a cache of tokens that is not the user's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
