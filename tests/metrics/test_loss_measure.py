"""The per-token loss of models: logits in parts, the definition, recorded values."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import LLAMA, RemoteCode, build

from hf_longctx.metrics import Run, position_loss


CORPUS = np.random.default_rng(0).integers(3, 32, size=400)


class RemoteCodeWithOptions(RemoteCode):
    def forward(self, idx, **ignored):
        return SimpleNamespace(logits=super().forward(idx)[0])


MODELS = {
    "llama": lambda: build("llama", **LLAMA),
    "capped logits": lambda: build("gemma2", **LLAMA, head_dim=4, num_key_value_heads=2, final_logit_softcapping=0.5),
    "mamba": lambda: build("mamba", hidden_size=8, num_hidden_layers=1, state_size=2),
    "remote code": lambda: RemoteCode(build("llama", **LLAMA)),
    "remote code with options": lambda: RemoteCodeWithOptions(build("llama", **LLAMA)),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def losses_of(model, bos, targets):
    """Return the loss as defined, from all logits together."""
    ids = torch.tensor([bos, *targets[:-1]])[None]
    with torch.inference_mode():
        output = model(ids)
    logits = output[0] if isinstance(output, tuple) else output.logits
    return F.cross_entropy(logits[0].double(), torch.tensor(targets), reduction="none").numpy()


def test_recorded_loss(golden, tokens):
    folder = golden / "forgetting_curve"
    recorded = json.loads((folder / "per_token_loss.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    result = position_loss(model, tokens, context_length=60, starts=recorded["sequence_starts"])
    assert np.allclose(result.loss, recorded["loss"][:60], atol=2e-4)
    assert np.allclose(result.perplexity, recorded["perplexity"][:60], rtol=2e-4)
    assert result.sequences == recorded["M"]


def test_loss_is_that_of_the_definition(model):
    result = position_loss(model, CORPUS, context_length=30, sequences=3, run=Run(tokens_per_pass=7))
    starts = [0, 185, 370]
    assert result.settings["starts"] == starts
    expected = np.mean([losses_of(model, 1, CORPUS[start : start + 30]) for start in starts], axis=0)
    assert np.allclose(result.loss, expected, atol=1e-5)
