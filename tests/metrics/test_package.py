"""The public names of `hf_longctx.metrics`."""

import subprocess
import sys
import zipfile
from pathlib import Path

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


def test_what_is_no_module_is_part_of_the_wheel(tmp_path):
    """The template of a report, and the Spaces of the evaluate modules."""
    root = Path(__file__).resolve().parents[2]
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling").WheelBuilder(str(root))
    (file,) = wheel.build(directory=str(tmp_path), versions=["standard"])
    folder = root / "hf_longctx" / "metrics"
    files = [*folder.rglob("*.j2"), *folder.glob("modules/*/*.py"), *folder.glob("modules/*/README.md")]
    assert len(files) == 1 + 3 * 3
    assert {str(path.relative_to(root)) for path in files} <= set(zipfile.ZipFile(file).namelist())
