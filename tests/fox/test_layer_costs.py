"""Launches and saved bytes of a layer in training, as a GPU would have them, next to those of a Llama's layer."""

import pytest
import torch
from budget import runs_triton
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaModel

from hf_longctx.fox import FoxConfig, FoxModel, fused_fox, triton_fox


pytestmark = runs_triton
B, T, HIDDEN = 2, 80, 128
SIZES = dict(vocab_size=16, hidden_size=HIDDEN, num_attention_heads=2, num_hidden_layers=1)


class Launches(TorchDispatchMode):
    """Count the operations for which a GPU launches a kernel: all but views and empty tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        if not is_view and not function.__name__.startswith(("empty", "new_empty", "detach")):
            self.count += 1
        return function(*args, **(kwargs or {}))


def costs(layer, **inputs):
    """Launches of a step under autocast, and bytes saved for the backward pass per byte of bfloat16 hidden states."""
    saved = {}
    # an optimizer holds the weights, and autocast their copies
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    copies = {2 * p.numel() for p in layer.parameters()}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() not in copies:
            saved[storage.data_ptr()] = storage  # held here, so that no address is used twice
        return x

    x = torch.randn(B, T, HIDDEN, requires_grad=True)
    with Launches() as launches, saved_tensors_hooks(pack, lambda x: x):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, **inputs)
        y.sum().backward()
    return launches.count, sum(storage.nbytes() for storage in saved.values()) / (2 * x.numel())


@pytest.fixture(scope="module")
def llama():
    model = LlamaModel(LlamaConfig(**SIZES, intermediate_size=336, attn_implementation="sdpa"))
    positions = torch.arange(T)[None]
    embeddings = model.rotary_emb(torch.ones(1), positions)
    return costs(model.layers[0], position_embeddings=embeddings, position_ids=positions)


@pytest.mark.parametrize(
    "config, launches, saved",
    [
        (FoxConfig(**SIZES, intermediate_size=336), 109, 0.8),
        (FoxConfig.pro(**SIZES, intermediate_size=304, qk_norm_shared=True), 144, 0.9),
        (FoxConfig.pro(**SIZES, intermediate_size=304, output_gate="silu"), 144, 0.9),
    ],
    ids=["FoX (LLaMA)", "FoX (Pro)", "FoX (Pro) with a norm per head"],
)
def test_layer_costs_no_more_than_that_of_a_llama(config, launches, saved, llama, monkeypatch):
    launched = []
    for module in (fused_fox, triton_fox):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: launched.append(kernel))
        monkeypatch.setattr(module, "is_traced", lambda *tensors: False)
    monkeypatch.setattr(fused_fox, "has_kernels", lambda device: True)
    model = FoxModel(config)
    model.set_attn_implementation("forgetting_triton")
    operations, bytes_saved = costs(model.layers[0])
    assert operations + len(launched) <= min(launches, llama[0])
    assert bytes_saved <= saved * llama[1]
