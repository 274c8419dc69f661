"""The Spaces: their forms measure, and their errors are shown. gradio is a stub here, which keeps what it gets."""

import importlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from demo_model import DEMO, VOCABULARY
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM


pytest.importorskip("evaluate", reason="needs: pip install 'hf-longctx[metrics]'")
pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics.evaluate_modules import NAMES, module_path


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

    names = ("Textbox", "Number", "JSON", "Image", "Dataframe", "Progress")
    parts = {name: lambda *args, name=name, **options: SimpleNamespace(name=name, **options) for name in names}
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(Interface=interface, Error=ShownError, **parts))
    monkeypatch.setattr("evaluate.load", module)
    return lambda name: runpy.run_path(f"{module_path(name)}/app.py")["demo"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).save_pretrained(path)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(path)
    return str(path)


TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "name, values, words, key",
    [
        ("forgetting_curve", (TEXT, 20, 2, 1), "2 lengths from 8 to 20", "fine_length"),
        ("position_loss", (TEXT, 64), "sequences", "final_perplexity"),
        ("rope_base_check", (0,), "holds at 64 tokens", "claimed_context"),
        ("rope_base_check", (32,), "holds at 32 tokens", "claimed_context"),
    ],
)
def test_a_form_measures_and_draws(app, model, name, values, words, key):
    demo = app(name)
    assert len(demo.inputs) == 1 + len(values)
    assert [part.name for part in demo.outputs] == ["Textbox", "Image", "Dataframe", "JSON"]
    assert demo.outputs[1].show_label is False  # it would cover the title of the picture
    assert demo.description and "pip install" in demo.article and "colorFrom" not in demo.article
    summary, picture, numbers, document = demo.function("a progress bar", model, *values)
    assert words in summary and Path(picture).read_bytes().startswith(b"\x89PNG") and key in document
    assert numbers["data"] and all(len(row) == len(numbers["headers"]) for row in numbers["data"])


@pytest.mark.parametrize("name", NAMES)
def test_a_form_has_limits_and_examples_within_them(app, name):
    demo = app(name)
    numbers = [part for part in demo.inputs if part.name == "Number"]
    assert numbers and all(0 <= part.minimum < part.maximum <= 1 << 20 for part in numbers)
    assert all(part.max_length <= 10**6 for part in demo.inputs[1:] if part.name == "Textbox")
    assert len(demo.examples) > 1 and not demo.cache_examples
    for row in demo.examples:
        assert len(row) == len(demo.inputs) and isinstance(row[0], str)
        limits = zip(numbers, row[-len(numbers) :])
        assert all(part.minimum <= value <= part.maximum for part, value in limits)


def test_a_mistake_is_shown(app, model, tmp_path):
    with pytest.raises(ShownError, match="needs n >= 2"):
        app("forgetting_curve").function(None, model, TEXT, 20, 1, 1)
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ShownError, match="GPT2Config has no rotary"):
        app("rope_base_check").function(None, str(tmp_path), 0)
