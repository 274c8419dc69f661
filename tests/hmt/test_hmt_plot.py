"""Plots of recalls."""

import pytest
import torch

from hf_longctx.hmt.plot import draw_recall_distance, plot_recall, plot_recall_distance, recall_shares


def test_shares_leave_out_what_recalled_nothing():
    assert recall_shares(torch.tensor([[0, 0], [1, 1], [1, 4]])) == [0.75, 0, 0, 0.25]
    assert recall_shares([2, 2]) == [0, 1]
    with pytest.raises(ValueError, match="no recall"):
        recall_shares(torch.zeros(3, 2, dtype=torch.long))


def test_bars_stand_at_their_distance():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    draw_recall_distance(axes, [1, 1, 3, 0], expected=[1, 2, 2, 2])
    expected, recalled = ([(round(bar.get_center()[0]), bar.get_height()) for bar in bars] for bars in axes.containers)
    assert expected == [(1, 0.25), (2, 0.75)]
    assert recalled == [(1, pytest.approx(2 / 3)), (2, 0), (3, pytest.approx(1 / 3))]


def test_of_a_model(make_wrapper, tokens, tmp_path):
    pytest.importorskip("matplotlib")
    out = make_wrapper()(tokens, output_recall=True)
    plot_recall_distance(out.recall_distance, tmp_path / "recall.png", title="tiny")
    assert (tmp_path / "recall.png").stat().st_size > 5_000
    plot_recall(out, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 5_000
    with pytest.raises(ValueError, match="holds no recall"):
        plot_recall(make_wrapper()(tokens[:, :9], output_recall=True), tmp_path / "map.png")
