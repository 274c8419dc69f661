"""Pictures of the evidence: lines are named where they end, and names stand apart."""

import itertools

import pytest


@pytest.fixture
def panels(monkeypatch, pytestconfig):
    monkeypatch.syspath_prepend(pytestconfig.rootpath)
    from scripts.evidence import panels

    return panels


@pytest.mark.parametrize("heights", [[0.5] * 6, [0.0, 0.01, 0.9, 0.91], [1.0, 0.2], [0.3, 0.5, 0.31, 0.52]])
def test_spread_heights_keep_their_order_and_a_gap(panels, heights):
    moved = panels.spread(heights, 0.1)
    in_order = sorted(range(len(heights)), key=lambda i: heights[i])
    assert all(moved[b] - moved[a] >= 0.1 - 1e-9 for a, b in itertools.pairwise(in_order))
    assert sum(moved) == pytest.approx(sum(heights))  # no name is moved further than it has to be


def test_every_line_of_a_row_of_panels_is_named_once(panels, monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    names, annotate = [], Axes.annotate
    monkeypatch.setattr(
        Axes, "annotate", lambda self, text, *a, **k: names.append(text) or annotate(self, text, *a, **k)
    )
    lines = [
        panels.Line("a", [1, 2], [[0.1, 0.3], [0.2, 0.2]]),
        panels.Line("b", [1, 2], [[0.5], [0.6]], control=True),
    ]
    shown = {f"panel {i}": lines for i in range(4)}
    panels.draw_panels(tmp_path / "x.png", "Title", shown, across="x", up="y", columns=3, percent=True)
    assert names == ["a", "b"] * 2 and (tmp_path / "x.png").stat().st_size > 0
