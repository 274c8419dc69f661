"""What all pictures share."""

import sys

import pytest
from commands import run
from examples import one_of_each


*RESULTS, ROPE = one_of_each(model=None)


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    for module in [name for name in sys.modules if name.startswith("hf_longctx.metrics")]:
        if module.endswith((".plot", ".style")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("hf_longctx.metrics.style", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for result in (*RESULTS, ROPE):
        with pytest.raises(ImportError, match=r"pip install 'hf-longctx\[plot\]'"):
            result.plot(tmp_path / "picture.png")


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.kind)
def test_an_interrupted_run_is_called_so(result):
    """In its picture and in its summary."""
    pytest.importorskip("matplotlib")
    from hf_longctx.metrics import style

    assert style.heading(result) == result.title and "interrupted" not in result.summary()
    assert style.heading(result.with_settings(model="/data/models/fox/")) == f"{result.title} of fox"
    result = result.with_settings(interrupted="Ctrl-C")
    assert style.heading(result).endswith(" (interrupted)") and result.summary().endswith("; interrupted: Ctrl-C")


def test_pictures_leave_the_display_alone(tmp_path):
    pytest.importorskip("matplotlib")
    script = (
        "import sys; from hf_longctx.metrics import CurvePoint, ForgettingCurve;"
        f"ForgettingCurve.of_points([CurvePoint(8, [4], [1])]).plot({str(tmp_path / 'x.png')!r});"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    assert run(["python", "-c", script]).returncode == 0
