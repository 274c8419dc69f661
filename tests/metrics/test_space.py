"""The Spaces: their forms measure, and their errors are shown. gradio is a stub here, which keeps what it gets."""

import importlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


pytest.importorskip("evaluate", reason="needs: pip install 'hf-longctx[metrics]'")
pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics.evaluate_modules import module_path


DEMO = Path(__file__).resolve().parents[2] / "model_cards" / "fox-demo"


def module(path):
    name = Path(path).stem
    imported = importlib.import_module(f"hf_longctx.metrics.modules.{name}.{name}")
    return getattr(imported, name.title().replace("_", ""))()


class ShownError(Exception):
    """gradio.Error."""


@pytest.fixture
def app(monkeypatch):
    """Runs the app.py of a module and returns its interface. The module is not copied into evaluate's cache."""

    def interface(function, **options):
        return SimpleNamespace(function=function, **options)

    parts = {name: lambda *args, name=name, **options: name for name in ("Textbox", "Number", "JSON", "Image")}
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(Interface=interface, Error=ShownError, **parts))
    monkeypatch.setattr("evaluate.load", module)
    return lambda name: runpy.run_path(f"{module_path(name)}/app.py")["demo"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = dict(vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).save_pretrained(path)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(path)
    return str(path)


TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.mark.parametrize(
    "name, values, key",
    [("forgetting_curve", (TEXT, 20, 2, 1), "fine_length"), ("position_loss", (TEXT, 0), "final_perplexity")],
)
def test_a_form_measures_and_draws(app, model, name, values, key):
    demo = app(name)
    assert len(demo.inputs) == 1 + len(values) and demo.outputs == ["Image", "JSON"]
    assert demo.description and "pip install" in demo.article and "colorFrom" not in demo.article
    picture, result = demo.function(model, *values)
    assert Path(picture).read_bytes().startswith(b"\x89PNG") and key in result


def test_the_form_of_the_base_check(app, model):
    demo = app("rope_base_check")
    assert demo.outputs == ["JSON"] and demo.function(model, 0)["claimed_context"] == 64
    assert demo.function(model, 32)["claimed_context"] == 32


@pytest.mark.parametrize("name, values", [("forgetting_curve", (TEXT, 20, 1, 1)), ("position_loss", (TEXT, 10**9))])
def test_a_mistake_is_shown(app, model, name, values):
    with pytest.raises(ShownError):
        app(name).function(model, *values)
