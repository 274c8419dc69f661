"""Passes that end segments, captured as CUDA graphs on a GPU."""

import pytest
import torch
from test_hmt_cuda_graphs import SETTINGS, is_masked
from tiny_hmt import ROUNDING


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_captured_logits_are_those_of_eager_passes(make_wrapper, tokens, settings):
    model = make_wrapper(cuda_graphs=True, **settings).to("cuda")
    ids = tokens.to("cuda")
    with torch.no_grad():
        captured = [model(ids).logits for _ in range(2)][-1]
        assert any(model.lm.graphs.graphs.values()) == is_masked(settings)
        torch.testing.assert_close(captured, model(ids, cuda_graphs=False).logits, atol=ROUNDING, rtol=0)
