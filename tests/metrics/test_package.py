"""The public names of `hf_longctx.metrics`."""

import subprocess
import sys

import pytest


def test_import_is_cheap():
    """Naming the metrics loads none of their dependencies; each name brings what it needs."""
    script = (
        "import sys, hf_longctx; before = set(sys.modules); import hf_longctx.metrics as m;"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before};"
        "assert not new & {'torch', 'scipy', 'numpy', 'matplotlib', 'transformers'}, new;"
        "m.linear_lengths; assert 'hf_longctx.metrics.curve.measure' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_all_names_exist():
    import hf_longctx.metrics as metrics

    assert callable(metrics.forgetting_curve)
    assert {name for name in metrics.__all__ if not hasattr(metrics, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = metrics.nonsense
