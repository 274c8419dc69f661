"""Mistakes of users of the metrics: each row raises one clear error."""

from functools import partial

import pytest
import transformers
from mistakes import refused
from tiny_models import CORPUS, tiny_llama
from torch import nn

from hf_longctx.metrics import (
    Run,
    forgetting_curve,
    log_lengths,
    module_path,
    needle_in_a_haystack,
    position_loss,
)


class NeverRun(nn.Module):
    """Arguments are checked before a model runs."""

    config = transformers.LlamaConfig(vocab_size=32, bos_token_id=1, eos_token_id=2, max_position_embeddings=512)

    def forward(self, input_ids):
        raise AssertionError("the model ran before the arguments were checked")


def curve(tokens=CORPUS, model=None, **options):
    model = NeverRun() if model is None else model
    return forgetting_curve(model, tokens, **{"lengths": [8], "repeats": 1, **options})


def loss(tokens=CORPUS, **options):
    return position_loss(NeverRun(), tokens, **{"context_length": 8, **options})


def needle(tokenizer="a name", **options):
    return needle_in_a_haystack(NeverRun(), tokenizer, CORPUS, **{"lengths": [400], "replies": False, **options})


WRONG_KIND = [
    refused("repeats: True", lambda: curve(repeats=True), "repeats must be a whole number, got True"),
    refused("train_length: negative", lambda: curve(train_length=-4), "train_length must be at least 1, got -4"),
    refused("depths: a word", lambda: needle(depths="abc"), "depths must be a list of numbers, got 'abc'"),
    refused("replies: a word", lambda: needle(replies="no"), "replies must be True or False, got 'no'"),
    refused("tokenizer: a name", lambda: needle(), "tokenizer must be the tokenizer"),
]

CURVE = [
    refused("lengths: fractions", lambda: curve(lengths=[8.5]), "lengths must be a whole number, got 8.5"),
    refused("lengths: none", lambda: curve(lengths=[]), "one or more numbers in strictly"),
    refused("lengths: falling", lambda: curve(lengths=[9, 8]), "strictly ascending order"),
    refused("grid: too short", lambda: log_lengths(8, 4), r"max_length above 8.*lengths=\[4, 6\], or --lengths"),
    refused("protocol: misspelt", lambda: curve(protocol="nestd"), "protocol must be one of .*'nestd'"),
    refused(
        "confidence: per cent",
        lambda: curve(confidence=95, protocol="adaptive"),
        "confidence must be from 0.01 to 0.9999, got 95",
    ),
    refused(
        "BOS: beyond the vocabulary",
        lambda: curve(bos_token_id=32),
        "bos_token_id must be one of the model's 32 ids, got 32",
    ),
    refused("tokens: none", lambda: curve([]), "tokens is empty"),
    refused("tokens: a text", lambda: curve("text"), "flat sequence of token ids, got text"),
    refused("tokens: None", lambda: curve(None), "tokens must be token ids, got None"),
    refused("tokens: a batch", lambda: curve(CORPUS.reshape(2, 100)), r"flat sequence .* of shape \(2, 100\)"),
    refused("tokens: of another tokenizer", lambda: curve([5] * 99 + [32]), r"tokens\[99\] is 32"),
    refused(
        "id_range: for a text", lambda: curve(id_range=(10, 20)), "data_type=order cannot be combined with id_range"
    ),
    refused(
        "id_range: beyond the vocabulary",
        lambda: curve(None, data_type="random", id_range=(10, 32)),
        r"id_range must lie within .*got \(10, 32\)",
    ),
]

LOSS = [
    refused(
        "loss: too long",
        lambda: loss(context_length=201),
        "context_length must be at most 200, got 201",
    ),
    refused("loss: beyond the text", lambda: loss(starts=[193]), "must lie between 0 and 192"),
    refused("loss: starts and sequences", lambda: loss(starts=[1], sequences=2), "cannot be combined with starts"),
]


def t5():
    return transformers.T5Model(
        transformers.T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


MODELS = [
    refused("model: a name", lambda: curve(model="gpt2"), "must be a causal language model or a `Reader`, got gpt2"),
    refused(
        "model: no head", lambda: curve(model=tiny_llama().model), "must return logits, got .*AutoModelForCausalLM"
    ),
    refused("model: encoder-decoder", lambda: curve(model=t5()), "is an encoder-decoder. Load a causal"),
    refused("run: no memory", lambda: Run(tokens_per_pass=0), "tokens_per_pass must be at least 1, got 0"),
]


def module(name, **options):
    def compute():
        evaluate = pytest.importorskip("evaluate", reason="needs evaluate: pip install 'hf-longctx[metrics]'")
        return evaluate.load(module_path(name)).compute(**options)

    return compute


CURVE_MODULE = partial(module, "forgetting_curve")
EVALUATE = [
    refused("evaluate: nothing", CURVE_MODULE(), "either a model, .* got neither"),
    refused("evaluate: both", CURVE_MODULE(model="gpt2", predictions=[[[1], [1]]], references=[[1]]), "got both"),
    refused(
        "evaluate: an unknown module",
        lambda: module_path("perplexity"),
        "evaluate module must be one of .*got 'perplexity'",
    ),
]


@pytest.mark.parametrize("mistake", WRONG_KIND + CURVE + LOSS + MODELS, ids=str)
def test_measuring(mistake):
    mistake.check()


@pytest.mark.usefixtures("evaluate_cache")
@pytest.mark.parametrize("mistake", EVALUATE, ids=str)
def test_evaluate_modules(mistake):
    mistake.check()
