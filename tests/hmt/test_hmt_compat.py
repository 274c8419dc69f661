"""An unknown version of transformers is named, once, with the repair."""

import importlib.util
import sys

import pytest
from transformers.utils import logging, versions

from hf_longctx.fox import versions_fox
from hf_longctx.hmt import versions_hmt


def load_copy(module):
    """Import a file again, as transformers does from each saved folder."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_copy", module.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("version, count", [("5.15.0", 0), ("5.24.3", 0), ("5.25.0.dev0", 1), ("6.0.0rc1", 1)])
def test_an_untested_version_warns_once(version, count, monkeypatch):
    """Also where a FoX is the backbone of an HMT, and both files warn."""
    warnings = []
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    monkeypatch.setattr(logging.get_logger("transformers.hf_longctx"), "warning", warnings.append)
    logging.warning_once.cache_clear()
    for module in (versions_hmt, versions_fox, versions_hmt):
        load_copy(module)
    assert len(warnings) == count
    for warning in warnings:
        assert f"was tested with transformers 5.15 to 5.24, not with {version}" in warning
        assert "`pip install -U hf-longctx`" in warning and "'transformers<5.25'" in warning


def test_an_older_version_is_an_error(monkeypatch):
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: "5.14.0")
    with pytest.raises(ImportError, match=r"(?s)transformers>=5.15.*HMT is tested from there on"):
        load_copy(versions_hmt)
