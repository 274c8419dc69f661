"""The loss without logits is the loss, and takes a fraction of the memory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from budget import EPS
from tiny_fox import TINY, make_from, tokens

from hf_longctx.fox import FoxConfig
from hf_longctx.fox.modeling_fox import chunked_loss


pytestmark = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs PyTorch 2.13")


def loss_and_gradients(model, **kwargs):
    model.zero_grad()
    output = model(**kwargs)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", ["labels", "shift_labels", "num_items_in_batch"])
def test_loss_and_gradients_are_those_with_logits(tied, how):
    model = make_from(FoxConfig.pro(**TINY, tie_word_embeddings=tied)).train()
    ids = tokens()
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.3, -100)
    inputs = {"input_ids": ids, "labels": labels}
    if how == "shift_labels":
        inputs = {"input_ids": ids, "shift_labels": F.pad(labels[:, 1:], (0, 1), value=-100)}
    if how == "num_items_in_batch":
        inputs["num_items_in_batch"] = torch.tensor(100)
    plain, gradients = loss_and_gradients(model, **inputs)
    output, others = loss_and_gradients(model, **inputs, return_logits=False)
    assert output.logits is None
    torch.testing.assert_close(output.loss, plain.loss, atol=8 * EPS, rtol=8 * EPS)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=64 * EPS * gradient.abs().max(), rtol=0)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_weights_in_bfloat16_lose_nothing_of_the_loss(bias):
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 4096, 16).bfloat16(), torch.nn.Linear(16, 128, bias=bias).bfloat16()
    labels = torch.randint(128, (1, 4096))
    exact = copy.deepcopy(head).double()
    losses = []
    for x, layer in ((hidden.requires_grad_(), head), (hidden.detach().double().requires_grad_(), exact)):
        loss = chunked_loss(x, layer, labels)
        loss.backward()
        losses.append(loss)
    assert losses[0].dtype == losses[1].dtype == torch.float32 and head.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(losses[0], losses[1], rtol=8 * EPS, atol=0)
    for ours, reference in zip(head.parameters(), exact.parameters()):  # gradients are rounded once
        torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=2**-8, atol=64 * EPS)


def test_logits_are_there_without_labels_and_where_the_head_is_an_adapter():
    model = make_from(FoxConfig(**TINY))
    assert model(tokens(), return_logits=False).logits is not None
    model.lm_head = torch.nn.Sequential(model.lm_head)
    output = model(tokens(), labels=tokens(), return_logits=False)
    assert output.logits is not None and output.loss is not None
