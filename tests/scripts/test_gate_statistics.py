"""The meter of the gates gives the decay times that the gates have."""

import pytest
import torch

from hf_longctx.fox import FoxConfig, FoxForCausalLM
from scripts.evidence.gate_statistics import ForgetGateStatistics


SIZES = dict(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)


@torch.no_grad()
def test_fixed_gates_have_the_decay_times_of_the_configuration():
    model = FoxForCausalLM(FoxConfig(**SIZES, forget_gate="fixed", decay_time_min=4.0, decay_time_max=500.0))
    meter = ForgetGateStatistics(model)
    assert meter.quantiles() == {}
    model(torch.arange(10)[None])
    assert meter.decay_times()[[0, 1, -1]].tolist() == pytest.approx([4, 4, 500], rel=1e-4)
    assert meter.quantiles() == {}
    model(torch.arange(10)[None])
    quantiles = meter.quantiles(lambda means: 2 * means)
    assert (quantiles["decay_time_min"], quantiles["decay_time_max"]) == pytest.approx((2, 250), rel=1e-4)


@torch.no_grad()
def test_several_passes_are_one_mean():
    torch.manual_seed(0)
    model, ids = FoxForCausalLM(FoxConfig(**SIZES)), torch.randint(16, (4, 12))
    meter = ForgetGateStatistics(model)
    model(ids)
    whole = meter.decay_times()
    for part in ids.split(1):
        model(part)
    assert len(whole) == 8
    torch.testing.assert_close(meter.decay_times(), whole)
