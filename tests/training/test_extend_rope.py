"""The base that `rope-extend` writes, against cosine sums at every distance."""

from types import SimpleNamespace

import numpy as np
import pytest
from transformers import GlmConfig, LlamaConfig

from hf_longctx.training.recipes.rope_extend import extend_rope


LENGTHS = np.unique(np.geomspace(64, 3000, 29).astype(int)).tolist()


def lowest_decay(config, rotary_dim):
    """Return the minimum of eq. 16 over all distances of the context, in float64."""
    theta = config.rope_parameters["rope_theta"] ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    distances = np.arange(config.max_position_embeddings)
    return min(np.cos(np.multiply.outer(part, theta)).sum(-1).min() for part in np.array_split(distances, 8))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 24, 32, 48, 64, 96, 128])
def test_the_written_base_satisfies_the_bound_at_every_distance(head_dim):
    for length in LENGTHS:
        config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=8)
        extend_rope(config, SimpleNamespace(max_length=length))
        assert config.max_position_embeddings == length
        assert lowest_decay(config, head_dim) >= 0, (head_dim, length, config.rope_parameters)


@pytest.mark.parametrize("length", [300, 2048, 32768])
def test_partial_rope_counts_the_dimensions_that_rotate(length):
    config = GlmConfig(hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=256)
    extend_rope(config, SimpleNamespace(max_length=length))
    assert lowest_decay(config, 16) >= 0


def test_a_base_that_rounding_moves_out_of_the_admissible_range():
    """All bases above the minimum that were searched violate the bound at some length."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=512)
    extend_rope(config, SimpleNamespace(max_length=32768))
    assert lowest_decay(config, 16) >= 0
