"""Questions of one length that are answered together, compared with one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import CORPUS, LLAMA, build

from hf_longctx import FoxConfig, FoxForCausalLM
from hf_longctx.metrics import LocalReader
from hf_longctx.metrics.run import runner
from hf_longctx.metrics.run.engine import UnsupportedInput
from hf_longctx.metrics.task import Ask


def fox():
    torch.manual_seed(0)
    config = FoxConfig.pro(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = FoxForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


MODELS = {
    "llama": lambda: build("llama", varied=True, **LLAMA | {"max_position_embeddings": 512}),
    "window": lambda: build("mistral", varied=True, **LLAMA | {"sliding_window": 16, "num_key_value_heads": 1}),
    "fox": fox,
    "dynamic RoPE": lambda: build(
        "llama",
        varied=True,
        **LLAMA | {"max_position_embeddings": 20, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
}


class Numbers:
    def decode(self, ids):
        return " ".join(map(str, ids))


def questions(lengths=(40,) * 7 + (41,) * 3, thinks=False):
    """The answers and responses have different lengths. The model predicts three of the answers."""
    rng = np.random.default_rng(1)
    return [
        Ask(
            np.resize(CORPUS[7 * i :], n), rng.integers(3, 32, 1 + i % 3), (0, 12, 5)[i % 3 if i else 1], thinks=thinks
        )
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("tokens_per_pass", [None, 64, 6], ids=["one batch", "small passes", "several batches"])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_one_by_one(name, tokens_per_pass, monkeypatch):
    model, tokenizer = MODELS[name](), Numbers()
    model.generation_config.eos_token_id = [*range(2, 6)]  # responses then end at different steps
    reader, asked, calls = LocalReader(model), questions(), []
    with reader.reading(CORPUS[:40], tokens_per_pass):
        for i in (1, 4):  # greedy decoding gives these answers
            reply = reader.reply(asked[i].prompt, 3, tokenizer).split()
            asked[i] = asked[i]._replace(answer=np.array([*map(int, reply)] or [2]), reply=9)
        alone = [runner.answer(reader, request, tokenizer) for request in asked]
        monkeypatch.setattr(
            reader, "_generate", lambda *given: calls.append(len(given[0])) or type(reader)._generate(reader, *given)
        )
        together = runner.answers(reader, asked, tokenizer)
    for one, other in zip(alone, together, strict=True):
        assert (one.exact, one.reply) == (other.exact, other.reply)
        assert other.log_prob == pytest.approx(one.log_prob, rel=1e-4)
    replies = [one.reply for one in alone]
    assert {one.exact for one in alone} == {True, False} and None in replies
    assert len({len(reply.split()) for reply in replies if reply is not None}) > 2
    asking = sum(bool(request.reply) and not one.exact for request, one in zip(asked, alone))
    assert sum(calls) == asking
    if name != "dynamic RoPE" and tokens_per_pass is None:
        assert len(calls) == 2, "one for each length"


def test_a_thought_is_continued_though_it_begins_with_the_answer():
    reader, tokenizer = LocalReader(MODELS["llama"]()), Numbers()
    asked = questions((40,) * 3, thinks=True)
    with reader.reading(CORPUS[:40], None):
        asked = [a._replace(answer=np.array([int(reader.reply(a.prompt, 1, tokenizer) or 2)]), reply=6) for a in asked]
        together = runner.answers(reader, asked, tokenizer)
        alone = [runner.answer(reader, request, tokenizer) for request in asked]
    assert together == [one._replace(log_prob=pytest.approx(one.log_prob, rel=1e-4)) for one in alone]
    assert all(one.exact for one in alone) and max(len(one.reply.split()) for one in alone) > 1


def test_trials_of_one_length_are_measured_together():
    """Within a limit for the cache."""

    class Reader:
        batches_questions = True

        def questions_per_batch(self, tokens):
            return 1000 // tokens

    class Needle:
        asks, subject = True, type("Subject", (), {"reader": Reader()})

    trials = [runner.Trial(i, tokens, 2) for i, tokens in enumerate([100] * 7 + [200] * 3 + [2000] * 2)]
    groups = [[trial.key for trial in group] for group in runner.batches(Needle(), trials)]
    assert groups == [[0, 1, 2, 3, 4], [5, 6], [7, 8], [9], [10], [11]]


def test_a_trial_that_fails_does_not_take_others_with_it(monkeypatch):
    model = MODELS["llama"]()
    reader = LocalReader(model)
    ask, sizes = reader.ask, []

    def limited(prompts, *rest):
        sizes.append(len(prompts))
        if len(prompts) > 1 or prompts[0, 0] == 3:
            raise UnsupportedInput("no memory")
        return ask(prompts, *rest)

    monkeypatch.setattr(reader, "ask", limited)

    class Questions:
        subject = SimpleNamespace(reader=reader, tokenizer=Numbers())

        def requests(self, first):
            return [Ask(np.append(first, CORPUS[:9]), np.array([5]), 0)]

        def score(self, key, responses):
            return len(responses)

    with reader.reading(CORPUS[:40], None):
        scores = runner.measure(Questions(), [runner.Trial(first, 10) for first in (4, 3, 5)])
    assert scores == [1, {"missing": "no memory"}, 1] and sizes == [3, 1, 1, 1]
