"""The common parts of all figures."""

import sys

import pytest
from examples import one_of_each

from hf_longctx.metrics import CurvePoint, ForgettingCurve, PositionLoss


*RESULTS, ROPE = one_of_each(model=None)
NAMES = ["a model of " * 60, "\u6a21" * 200, "some-organization/" + "long-name-" * 12, "$" * 90]


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
    """Its figure and its summary say so."""
    pytest.importorskip("matplotlib")
    from hf_longctx.metrics import style

    assert style.heading(result) == result.title and "interrupted" not in result.summary()
    assert style.heading(result.with_settings(model="/data/models/fox/")) == f"{result.title} of fox"
    result = result.with_settings(interrupted="Ctrl-C")
    assert style.heading(result).endswith(" (interrupted)") and result.summary().endswith("; interrupted: Ctrl-C")


# Legends, titles and small print stay on the page, whatever names they hold


def check_boxes(figure):
    """Draw the figure, and compare the boxes of its legends and of its own words with the page."""
    figure.draw_without_rendering()
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    words = [figure._suptitle, figure._supxlabel]
    for artist in (*legends, *words):
        if artist is not None:
            box = artist.get_window_extent()
            assert box.x0 >= -1 and box.x1 <= figure.bbox.width + 1, (artist, box, figure.bbox)
            assert box.y0 >= -1 and box.y1 <= figure.bbox.height + 1, (artist, box, figure.bbox)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:9])
def test_one_result(figures, name):
    """The model's name is the title. A training context is optional."""
    for result in one_of_each(model="someone/fox"):
        named = result if result.kind == "rope" else result.with_settings(model=name)
        for options in ({}, {"title": name.replace("$", "S"), "train_length": 64}):
            named.plot("x.png", **options)
    assert len(figures) == 10
    for figure in figures:
        check_boxes(figure)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 20])
def test_several_models(figures, count):
    from hf_longctx.metrics.report.comparison import compare

    names = [f"{i} {NAMES[i % len(NAMES)]}" for i in range(count)]
    points = [CurvePoint(n, [n // 2] * 6, [0] * 6) for n in (64, 128)]
    curves = {name: ForgettingCurve.of_points(points, {"tokenizer": name, "train_length": 90}) for name in names}
    compare(curves, "x.png", title=names[0])
    compare({name: PositionLoss.of_mean([3.0, 2.5], 4, {"model": name}) for name in names}, "x.png")
    for figure in figures:
        check_boxes(figure)
