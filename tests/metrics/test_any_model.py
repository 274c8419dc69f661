"""Curve and loss of models that test_run_engine.py does not have, against the logits of one plain forward pass."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import build
from torch import nn

import hf_longctx  # noqa: F401 - registers FoX
from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.metrics import Run, forgetting_curve, position_loss
from hf_longctx.metrics.curve.protocol import model_inputs, order_samples, scored_logits


# PEFT 0.21 asks transformers for this under its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
VOCAB = 24  # some predictions are right even with random weights
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
SMALL |= {"vocab_size": VOCAB, "varied": True}
CORPUS = np.random.default_rng(0).integers(3, VOCAB, size=300)


def with_memory(model):
    torch.manual_seed(1)
    return HMTWrapper.from_backbone(model, HMTConfig(segment_length=8, sensory_tokens=3, memory_size=4)).eval()


LORA = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def adapted(name, adapter="LoraConfig", task_type="CAUSAL_LM", width=16, **options):
    peft = pytest.importorskip("peft")
    model = build(name, **SMALL | {"hidden_size": width})
    return peft.get_peft_model(model, getattr(peft, adapter)(task_type=task_type, **options)).eval()


class Int8Linear(nn.Module):
    """A linear layer as quantized models have: weights in int8, unpacked when used."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def quantized(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


MODELS = {
    "hmt": lambda: with_memory(build("llama", **SMALL, max_position_embeddings=64)),
    "LoRA without task": lambda: adapted("llama", task_type=None, **LORA),
    "LoRA": lambda: adapted("llama", **LORA),
    "LoRA, logits as wide as hidden states": lambda: adapted("llama", width=VOCAB, **LORA),
    "prompt tuning": lambda: adapted("llama", "PromptTuningConfig", num_virtual_tokens=3),
    "prompt tuning of fox": lambda: adapted("fox", "PromptTuningConfig", num_virtual_tokens=3),
    "prefix tuning": lambda: adapted("llama", "PrefixTuningConfig", num_virtual_tokens=3),
    "quantized": lambda: quantized(build("llama", **SMALL)),
    "bfloat16": lambda: build("llama", **SMALL).to(torch.bfloat16),
}


MARKS = {"prefix tuning": pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")}  # PEFT's


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in MODELS], scope="module")
def model(request):
    return MODELS[request.param]()


def all_logits(model, ids):
    """(T, V)"""
    with torch.inference_mode():
        return model(torch.tensor(ids)[None]).logits[0, -len(ids) :].float()  # after virtual tokens


@pytest.mark.filterwarnings("ignore:length .* needs")
def test_curve(model):
    lengths, repeats = [1, 6, 25], 3
    curve = forgetting_curve(model, CORPUS, lengths=lengths, repeats=repeats, seed=2)
    counted, expected, close = [], [], 0
    for point, samples in zip(curve.points, order_samples(CORPUS, lengths, repeats, 2).values()):
        scored = scored_logits(point.length)
        for kind, counts in (("copy", point.copy_correct), ("LM", point.lm_correct)):
            for ids, count in zip(model_inputs(kind, samples, 1, 2), counts):
                logits = all_logits(model, ids)[scored.start : scored.stop]
                best = logits.topk(2).values
                if model.dtype is torch.bfloat16:  # whose rounding differs with the shape of a pass
                    close += int((best[:, 0] - best[:, 1] < 0.1).sum())
                expected.append(int((logits.argmax(-1).numpy() == ids[scored.start + 1 : scored.stop + 1]).sum()))
                counted.append(count)
    assert sum(abs(a - b) for a, b in zip(counted, expected)) <= close
    assert 0 < sum(expected) < repeats * 2 * (1 + 3 + 13)


@pytest.mark.filterwarnings("ignore:context_length needs")
def test_loss(model):
    result = position_loss(model, CORPUS, context_length=40, starts=[7, 200], run=Run(tokens_per_pass=16))
    losses = []
    for start in (7, 200):
        targets = CORPUS[start : start + 40]
        losses.append(F.cross_entropy(all_logits(model, [1, *targets[:-1]]), torch.tensor(targets), reduction="none"))
    expected = torch.stack(losses).mean(0).numpy()
    assert np.allclose(result.loss, expected, atol=0.1 if model.dtype is torch.bfloat16 else 1e-4)
    assert abs(result.loss[0] - math.log(VOCAB)) < 10
