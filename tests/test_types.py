"""A type checker reads the package as an editor does (settings: pyproject.toml)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="needs it: pip install basedpyright")
def test_types_agree():
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout)
    errors = [
        f"{entry['file']}:{entry['range']['start']['line'] + 1}: {entry['message']}"
        for entry in report["generalDiagnostics"]
        if entry["severity"] == "error"
    ]
    assert report["summary"]["filesAnalyzed"] >= len(list((ROOT / "hf_longctx").rglob("*.py")))
    assert not errors, "\n".join(errors)
