"""An untested version of transformers is named once, by the package and by code next to weights."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import versions

from hf_longctx.fox import configuration_fox
from hf_longctx.hmt import compat_hmt


SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
COPIES = configuration_fox, compat_hmt  # each travels with the weights of its models
NAMES = [module.__name__.rpartition(".")[2] for module in COPIES]


def load_copy(module):
    """Import a file again, as transformers does from each saved folder."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_copy", module.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("version, count", [("5.15.0", 0), ("5.24.3", 0), ("5.25.0.dev0", 1), ("6.0.0rc1", 1)])
def test_an_untested_version_warns_once(version, count, monkeypatch):
    warnings = []
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers.hf_longctx"), "warning", warnings.append)
    transformers.utils.logging.warning_once.cache_clear()
    for module in COPIES * 2:
        load_copy(module)
    assert len(warnings) == count
    for warning in warnings:
        assert f"was tested with transformers 5.15 to 5.24, not with {version}" in warning
        assert "`pip install -U hf-longctx`" in warning and "'transformers<5.25'" in warning
        assert "`hf-longctx push FOLDER REPO`" in warning


@pytest.mark.parametrize("module", COPIES, ids=NAMES)
def test_an_older_version_is_an_error(module, monkeypatch):
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: "5.14.0")
    with pytest.raises(ImportError, match=r"(?s)transformers>=5.15.*does not support older versions"):
        load_copy(module)


@pytest.mark.parametrize("module", COPIES, ids=NAMES)
def test_the_tested_range_is_that_of_the_constraints(module):
    files = "constraints-oldest.txt", "constraints.txt"
    pins = [re.search(r"^transformers==(\d+)\.(\d+)\.", (SCRIPTS / file).read_text(), re.MULTILINE) for file in files]
    assert tuple(tuple(map(int, pin.groups())) for pin in pins) == module.TESTED
