"""Second moments of queries and keys by frequency, and the reach by eq. 19, beside plain float64."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.metrics import rope_inv_freq


def test_the_reach_is_that_of_a_plain_loop(load):
    rng = np.random.default_rng(0)
    theta, weights, expected = rope_inv_freq(300, 16), rng.exponential(size=(10, 8)), []
    for row in weights.tolist():
        m = 0
        while m <= 65536 and sum(w * math.cos(m * t) for w, t in zip(row, theta.tolist())) >= 0:
            m += 1
        expected.append(m - 1)
    assert load("rope_moments").weighted_reaches(theta, weights) == expected and len({*expected}) > 3
    assert load("rope_moments").weighted_reaches([1e-9, 1e-8], np.ones((2, 2))) == [65536, 65536]


def test_variances_of_known_queries_and_keys(load):
    """Two layers, four heads of queries on two of keys, whose weights are set: moments by hand, token by token."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, head_dim=8)).eval()
    ids = torch.randint(50, (3, 20))
    queries, both = load("rope_moments").variances(model, ids)
    assert queries.shape == both.shape == (8, 4)
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)).flatten(0, 1).double()
        attention = model.model.layers[0].self_attn
        q, k = ((hidden @ getattr(attention, name).weight.double().T).numpy() for name in ("q_proj", "k_proj"))
    for head in range(4):
        for i in range(4):
            pairs = [(q[:, 8 * head + j], k[:, 8 * (head // 2) + j]) for j in (i, i + 4)]  # those that theta_i rotates
            moments = [[np.mean(x**2) - np.mean(x) ** 2 for x in pair] for pair in pairs]
            assert queries[head, i] == pytest.approx(sum(m[0] for m in moments), rel=1e-4)
            assert both[head, i] == pytest.approx(sum(math.sqrt(m[0] * m[1]) for m in moments), rel=1e-4)
