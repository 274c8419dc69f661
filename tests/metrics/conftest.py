"""evaluate keeps the modules that it loads in one folder of the user's, and in `sys.modules`."""

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
