"""The figure of recalls."""

import pytest

from hf_longctx.hmt.plot import plot_recall


def test_of_a_model(make_wrapper, tokens, tmp_path):
    pytest.importorskip("matplotlib")
    plot_recall(make_wrapper()(tokens, output_recall=True), tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 5_000
    with pytest.raises(ValueError, match="does not contain a recall"):
        plot_recall(make_wrapper()(tokens[:, :9], output_recall=True), tmp_path / "map.png")
