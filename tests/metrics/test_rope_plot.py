"""Pictures of the RoPE bound."""

import numpy as np
import pytest
from transformers import LlamaConfig


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics import read_result
from hf_longctx.metrics.rope.bound import rope_decay
from hf_longctx.metrics.rope.plot import decay_range
from hf_longctx.metrics.rope.report import rope_report


def report(base=300.0, context=512, **parameters):
    rope = {"rope_type": "default", "rope_theta": base, **parameters}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=context, rope_parameters=rope)
    return rope_report(config, minimum_base=False)


def test_bound_and_claim_are_marked(words, tmp_path):
    """Also in the figure of a saved report."""
    report().save(tmp_path / "rope.json")
    violated = read_result(tmp_path / "rope.json")
    figure = words(violated.plot, train_length=256, title="My bound")
    bound = f"{violated.groups[0].context_bound + 1:,}"
    expected = (bound, "needed up to 511", "training: 256", "violated: B_m", "claimed context: 512 tokens", "My bound")
    assert all(text in figure for text in expected) and "dimensions that do not rotate" not in figure
    figure = words(report(partial_rotary_factor=0.5).plot)
    assert "inconclusive: half of the head" in figure and "0 without the 8 dimensions that do not rotate" in figure


@pytest.mark.parametrize("base, scale", [(50.0, "log"), (1e9, "linear")])
def test_a_bound_far_below_the_claim_is_seen(figures, base, scale):
    """On a linear axis it would lie in the first pixels."""
    report(base=base, context=5000).plot("unused")
    assert figures[0].axes[0].get_xscale() == scale


def test_every_distance_is_in_the_picture():
    """A single negative distance between two drawn points is seen."""
    group = report(base=1e4, context=4096).groups[0]
    decay = rope_decay(range(4000), base=1e4, head_dim=16)
    at, lowest, highest = decay_range(group, np.array([0, 7, 100, 4000]))
    assert at.tolist() == [0, 7, 100]
    np.testing.assert_allclose(lowest, [decay[:7].min(), decay[7:100].min(), decay[100:].min()], atol=1e-9)
    np.testing.assert_allclose(highest, [decay[:7].max(), decay[7:100].max(), decay[100:].max()], atol=1e-9)
