"""Pictures as figures and as words; evaluate, which keeps the modules that it loads in a folder of the user's."""

import html
import re
import sys

import pytest


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
    """What would have been saved as a picture."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    return figures


@pytest.fixture
def words(tmp_path):
    """The words of what `draw(path, ...)` draws."""
    matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

    def words(draw, *arguments, **options):
        file = tmp_path / "picture.svg"
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            draw(*arguments, file, **options)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", file.read_text())).split())

    return words
