"""The per-token loss of models: logits in parts, the definition, recorded values, failures."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import LLAMA, RemoteCode, build

from hf_longctx.metrics import Run, position_loss
from hf_longctx.metrics.run.engine import Engine
from hf_longctx.metrics.run.logits import CACHES


CORPUS = np.random.default_rng(0).integers(3, 32, size=400)


MODELS = {
    "llama": lambda: build("llama", **LLAMA),
    "capped logits": lambda: build("gemma2", **LLAMA, head_dim=4, num_key_value_heads=2, final_logit_softcapping=0.5),
    "mamba": lambda: build("mamba", hidden_size=8, num_hidden_layers=1, state_size=2),
    "remote code": lambda: RemoteCode(build("llama", **LLAMA)),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def losses_of(model, bos, targets):
    """As defined, from all logits at once."""
    ids = torch.tensor([bos, *targets[:-1]])[None]
    with torch.inference_mode():
        output = model(ids)
    logits = output[0] if isinstance(output, tuple) else output.logits
    return F.cross_entropy(logits[0].double(), torch.tensor(targets), reduction="none").numpy()


def test_logits_in_parts_are_those_of_one_pass(model):
    ids = CORPUS[:40]
    with torch.inference_mode():
        output = model(torch.tensor(ids)[None])
        whole = (output[0] if isinstance(output, tuple) else output.logits)[0]
    for tokens, rows, positions in ((7, 3, range(31, 38)), (100, 5, range(0, 40)), (13, 1000, range(39, 40))):
        with torch.inference_mode():
            engine = Engine(model, ids, tokens)
            engine.logits_per_pass = rows * 32
            parts = list(engine.logits(ids, positions))
        assert max(map(len, parts)) <= rows
        assert torch.allclose(torch.cat(parts), whole[positions.start : positions.stop], atol=1e-5), positions


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


@pytest.mark.parametrize("length", [1, 2])
def test_short_contexts(length):
    model = MODELS["llama"]()
    result = position_loss(model, CORPUS[:length], context_length=length)
    assert np.allclose(result.loss, losses_of(model, 1, CORPUS[:length]), atol=1e-5)


def test_settings_of_the_loss():
    model = MODELS["llama"]()
    settings = position_loss(model, torch.tensor(CORPUS), context_length=8, sequences=1, bos_token_id=5).settings
    expected = {"model": "LlamaForCausalLM", "dtype": "float32", "bos_token_id": 5, "context_length": 8}
    assert {name: settings[name] for name in expected} == expected
    assert (settings["starts"], settings["corpus_tokens"], len(settings["corpus_sha256"])) == ([0], 400, 64)


def spoil(model, position, value):
    """One logit of the whole model becomes NaN or -inf wherever this position is read."""
    seen = []

    def count(_, args, options):
        cache = next((options[name] for name in CACHES if name in options), None)
        seen.append(cache.get_seq_length() if cache else 0)

    def change(_, args, output):
        index = position - seen[-1]
        if 0 <= index < output.shape[1]:
            output = output.clone()
            output[0, index] = value
        return output

    model.model.register_forward_pre_hook(count, with_kwargs=True)
    model.model.norm.register_forward_hook(change)
    return model


def test_nan_is_named_with_its_position():
    model = spoil(MODELS["llama"](), 17, torch.nan)
    with pytest.raises(
        ValueError, match="loss, trial 0: the log-probability of token 18 is nan: the logits at position 17"
    ):
        position_loss(model, CORPUS, context_length=30, sequences=2, run=Run(tokens_per_pass=7))


def test_a_table_of_positions_is_a_limit():
    model = build("gpt2", n_embd=8, n_layer=1, n_head=2, n_positions=24)
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="nothing could be measured: beyond the model's 24 positions"):
        position_loss(model, CORPUS, context_length=25)
    with pytest.raises(ZeroDivisionError):  # it fits, and is read
        position_loss(model, CORPUS, context_length=24)


def test_smaller_passes_when_memory_runs_out():
    model, passes = MODELS["llama"](), []
    expected = position_loss(model, CORPUS, context_length=90, sequences=1)

    def refuse(_, args):
        passes.append(args[0].shape[1])
        if passes[-1] > 40:
            raise torch.OutOfMemoryError("no memory")

    model.model.embed_tokens.register_forward_pre_hook(refuse)
    result = position_loss(model, CORPUS, context_length=90, sequences=1, run=Run(tokens_per_pass=80))
    assert np.allclose(result.loss, expected.loss, atol=1e-5)
    assert passes[-6:] == [80, 20, 20, 20, 20, 10]
