"""A type checker reads the package as an editor does (settings: pyproject.toml)."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(importlib.util.find_spec("ty") is None, reason="needs it: pip install ty")
def test_types_agree():
    command = [sys.executable, "-m", "ty", "check", "-v", "--python", sys.prefix, "--output-format", "concise"]
    # with several threads, ty has once reported errors that it did not report in twenty other runs
    env = os.environ | {"TY_MAX_PARALLELISM": "1"}
    report = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert report.returncode == 0, report.stdout
    assert int(re.search(r"Indexed (\d+) file", report.stderr)[1]) >= len(list((ROOT / "hf_longctx").rglob("*.py")))
