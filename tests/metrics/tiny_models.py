"""Small models for the tests of metrics: they run in milliseconds, on random weights or by rule."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn


CORPUS = np.random.default_rng(0).integers(3, 32, size=200)
LLAMA = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def build(name, varied=False, **config):
    """Return a tiny model with random weights. If they are large, its predictions vary with the text."""
    torch.manual_seed(0)
    config = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2} | config
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **config)).eval()
    for parameter in model.parameters():
        if varied and parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5)
    return model


def tiny_llama(**options):
    return build("llama", **LLAMA | {"max_position_embeddings": 512} | options)


def tiny_gpt2(n_positions=24):
    return build("gpt2", n_embd=8, n_layer=1, n_head=2, n_positions=n_positions)


class RemoteCode(nn.Module):
    """A model that does not support logits_to_keep. `returned` selects the positions of its logits."""

    def __init__(self, inner, returned=slice(None)):
        super().__init__()
        self.inner, self.config, self.returned = inner, inner.config, returned

    def forward(self, idx):
        return (self.inner(idx).logits[:, self.returned],)


def copied_ids(ids, k, window):
    """Predict the id that followed the last k ids at most `window` positions ago, or 0 if they did not occur."""
    guess, ended = [0] * len(ids), {}
    for end in range(k - 1, len(ids)):
        gram = tuple(ids[end - k + 1 : end + 1])
        before = ended.get(gram)
        if before is not None and end - before <= window:
            guess[end] = ids[before + 1]
        ended[gram] = end
    return guess


class Copier(nn.Module):
    """Predicts `copied_ids`."""

    def __init__(self, k, window=10**9, vocab_size=384):
        super().__init__()
        self.k, self.window = k, window
        self.config = SimpleNamespace(vocab_size=vocab_size, bos_token_id=1, eos_token_id=2)

    def forward(self, input_ids, logits_to_keep=0):
        guess = torch.tensor([copied_ids(row, self.k, self.window) for row in input_ids.tolist()])
        return (9.0 * F.one_hot(guess[:, -logits_to_keep:], self.config.vocab_size),)
