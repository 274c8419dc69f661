"""An offline engine of vLLM measures as the model itself; its stand-in here runs a small Llama."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import CORPUS, tiny_llama

from hf_longctx.metrics import LocalReader, OfflineModel, forgetting_curve


class Engine:
    """`generate` of a `vllm.LLM`, which is given prompts as ids and parameters as a namespace."""

    def __init__(self, model):
        self.model, self.prompts = model, []
        self.model_config = SimpleNamespace(
            model="tiny", dtype=torch.float32, max_model_len=100, hf_config=model.config, get_vocab_size=lambda: 32
        )

    def generate(self, prompts, params, use_tqdm):
        self.prompts += prompts
        return [self.answer(prompt["prompt_token_ids"], params) for prompt in prompts]

    @torch.inference_mode()
    def answer(self, ids, params):
        written = self.model.generate(torch.tensor([ids]), max_new_tokens=params.max_tokens, eos_token_id=None)
        log_probs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries = [None]
        for token, row in zip(ids[1:], log_probs):
            entries.append({i: SimpleNamespace(logprob=row[i].item()) for i in (token, row.argmax().item())})
        reply = SimpleNamespace(token_ids=written[0, len(ids) :].tolist())
        return SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=entries, outputs=[reply])


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    return Engine(tiny_llama().eval())


def test_curve_is_that_of_the_model(engine):
    options = {"lengths": [4, 9, 20], "repeats": 3, "data_type": "random", "id_range": (3, 11)}
    reader = OfflineModel(engine)
    assert (reader.vocab_size, reader.position_limit) == (32, 99)  # one token is generated
    curve = forgetting_curve(reader, None, **options)
    assert curve.points == forgetting_curve(engine.model, None, **options).points
    assert sum(p.copy_mean + p.lm_mean for p in curve.points) > 0
    settings = {"model": "tiny", "dtype": "float32", "served_with": "vllm.LLM", "engine": "vllm"}
    assert {name: curve.settings[name] for name in settings} == settings


def test_scores_and_replies_are_those_of_the_model(engine):
    reader, local = OfflineModel(engine), LocalReader(engine.model)
    with local.reading(CORPUS[:30], None):
        expected = local.score(CORPUS[:30], CORPUS[21:31], range(20, 30))
        for values, others in zip(reader.score(CORPUS[:30], CORPUS[21:31], range(20, 30)), expected):
            np.testing.assert_allclose(values, others, rtol=1e-5)
        tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
        text = reader.reply(CORPUS[:5], 3, tokenizer)
        assert len(text.split()) == 3
