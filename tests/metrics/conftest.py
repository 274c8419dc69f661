"""Fixtures: recorded results, servers, figures and their words, and evaluate with its own caches."""

import html
import json
import re
import sys

import numpy as np
import pytest


@pytest.fixture(scope="session")
def recorded(golden):
    """Return all recorded forgetting curves, keyed by name."""
    files = [golden / "forgetting_curve" / "results.json", golden / "forgetting_curve" / "edge_cases.json"]
    runs, edge_cases = (json.loads(file.read_text()) for file in files)
    return {run["name"]: run for run in runs + edge_cases["runs"]}


@pytest.fixture(scope="session")
def reference(recorded):
    """Those with points."""
    return {name: run for name, run in recorded.items() if run.get("rows")}


@pytest.fixture(scope="session")
def tokens(golden):
    """Return the corpus of the recorded curves and losses."""
    return np.load(golden / "forgetting_curve" / "tokens.npy")


@pytest.fixture(scope="module")
def model():
    """Return a model for a server. Some of its predictions are correct."""
    from tiny_models import tiny_llama

    return tiny_llama(vocab_size=12, initializer_range=0.5)


@pytest.fixture
def no_key_or_proxy(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def forget_modules():
    for name in [name for name in sys.modules if name.split(".")[0] == "evaluate_modules"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def evaluate_cache(tmp_path_factory):
    """evaluate's caches in a new folder, none of its modules imported from another, and no network."""
    evaluate = pytest.importorskip("evaluate", reason="needs evaluate: pip install 'hf-longctx[metrics]'")
    folder = tmp_path_factory.mktemp("evaluate")
    forget_modules()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", folder / "modules")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", folder / "metrics")
        patch.setattr(sys, "path", [str(folder / "modules"), *sys.path])  # before the user's
        yield folder
    forget_modules()


@pytest.fixture
def figures(monkeypatch):
    """A list of the figures that the test saves. No file is written."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    return figures


@pytest.fixture
def words(tmp_path):
    """Return a function that returns the words in the figure of `draw(path, ...)`."""
    matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

    def words(draw, *arguments, **options):
        file = tmp_path / "picture.svg"
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            draw(*arguments, file, **options)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", file.read_text())).split())

    return words
