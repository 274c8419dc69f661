"""Label smoothing in Trainer, which knows a causal language model by the name of its class alone."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_longctx import FoxConfig, FoxForCausalLM, HMTConfig, HMTWrapper


SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=61, intermediate_size=24)


def fox():
    return FoxForCausalLM(FoxConfig(**SIZES))


def hmt():
    return HMTWrapper.from_backbone(
        LlamaForCausalLM(LlamaConfig(**SIZES)), HMTConfig(segment_length=8, sensory_tokens=3)
    )


@pytest.mark.parametrize("make_model", [fox, hmt])
def test_smoothed_labels_are_those_of_the_next_token(make_model, tmp_path):
    torch.manual_seed(0)
    model, ids = make_model().eval(), torch.randint(61, (2, 24))
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_eval_batch_size": 2}
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, **settings)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    loss = Trainer(model, arguments, eval_dataset=rows).evaluate()["eval_loss"]
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
