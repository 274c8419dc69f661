"""scripts/hub_roundtrip.py: the program that runs without the package; a release runs the whole script."""

import importlib.util
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import safetensors.torch
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - before `find_spec` is replaced


def test_every_pushed_metric_is_scored(load_script, monkeypatch):
    script, scored = load_script("hub_roundtrip"), []

    def load(name):
        return SimpleNamespace(compute=lambda **given: scored.append(name) or defaultdict(str))

    logging = SimpleNamespace(disable_progress_bar=lambda: None)
    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=load, utils=SimpleNamespace(logging=logging)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(safetensors.torch, "load_file", lambda file: {"ids": None})
    monkeypatch.setattr(sys, "argv", ["-c", script.PROMPT, script.FACT, "", *script.METRICS])
    with pytest.raises(SystemExit) as ended:
        exec(script.LOAD, {})
    assert ended.value.code is False and scored == [f"alice/{name}" for name in script.METRICS]
