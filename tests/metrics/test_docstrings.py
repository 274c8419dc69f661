"""The examples in docstrings of the metrics and of the commands."""

import doctest
import importlib
from pathlib import Path

import pytest


PACKAGE = Path(__file__).resolve().parents[2] / "hf_longctx"
SOURCES = [path for part in ("metrics", "cli") for path in (PACKAGE / part).rglob("*.py") if ">>>" in path.read_text()]
NAMES = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in SOURCES]


@pytest.mark.parametrize("name", sorted(name for name in NAMES if ".modules." not in name))  # these load themselves
def test_examples(name):
    if name.endswith(("plot", "comparison")):
        pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed
