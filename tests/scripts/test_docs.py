"""The API reference builds without a warning, and has the public names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
NAMES = ("fox.FoxConfig", "hmt.HMTWrapper", "metrics.forgetting_curve", "training.train", "corpus.load_text")


@pytest.mark.slow
def test_the_reference_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="the API reference needs sphinx: pip install 'hf-longctx[docs]'")
    command, environment = [sys.executable, ROOT / "scripts" / "docs.py", tmp_path], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        module = name.rpartition(".")[0]
        assert f'id="hf_longctx.{name}"' in (tmp_path / f"hf_longctx.{module}.html").read_text()
