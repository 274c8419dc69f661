"""The soak of vLLM notices wrong tokens and wrong log-probabilities; its servers run by hand only."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.soak_vllm import ALLOWED, compare


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5)).eval()


@torch.no_grad()
def reply(model, prompt, rank=1, off=0.0):
    """Four tokens, of which the last is the likeliest but `rank` - 1, and its log-probability is `off`."""
    ids, log_probs = [], []
    for wanted in (1, 1, 1, rank):
        scores = model(torch.tensor([prompt + ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.topk(wanted).indices[-1]))
        log_probs.append(scores[ids[-1]].item())
    log_probs[-1] += off
    return ids, log_probs


@pytest.mark.parametrize("rank, greedy, wrong", [(1, True, 0), (2, True, 1), (2, False, 0)])
def test_a_token_that_is_not_the_likeliest(model, rank, greedy, wrong):
    found = compare(model, [([3, 4], *reply(model, [3, 4], rank), greedy), ([5], *reply(model, [5]), True)])
    assert (found["tokens"], found["wrong"]) == (8, wrong) and found["largest_difference"] < ALLOWED / 10


def test_a_log_probability_that_is_off(model):
    assert compare(model, [([3, 4], *reply(model, [3, 4], off=0.1), True)])["largest_difference"] == pytest.approx(0.1)
