"""The groups of parameters that the optimizer decays, and the learning rate of the gates."""

import pytest


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from hf_longctx import FoxConfig, FoxForCausalLM
from hf_longctx.training import FinetuneConfig, PretrainConfig
from hf_longctx.training.trainer import LongContextTrainer


SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)


def groups(kind, gate, tmp_path, **settings):
    """Return {name of a parameter: (learning rate, weight decay)} of a FoX (Pro)."""
    model = FoxForCausalLM(FoxConfig.pro(**SIZES, forget_gate=gate))
    args = kind(data="x", output_dir=str(tmp_path), learning_rate=1e-3, weight_decay=0.1, **settings)
    optimizer = LongContextTrainer(model=model, args=args).create_optimizer()
    found = {p: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: found[p] for name, p in model.named_parameters()}, dict(model.named_parameters())


@pytest.mark.parametrize("gate", ["full", "bias_only", "none"])
def test_weights_decay_and_norms_and_biases_do_not(gate, tmp_path):
    """This is the rule of the paper, appendix B.1. The embedding and the projections of gates and shifts decay."""
    found, parameters = groups(PretrainConfig, gate, tmp_path, tokenizer="x")
    assert {name: decay for name, (_, decay) in found.items()} == {
        name: 0.1 if p.ndim == 2 else 0.0 for name, p in parameters.items()
    }


@pytest.mark.parametrize("gate", ["full", "bias_only"])
def test_a_learning_rate_of_gates_does_not_change_what_decays(gate, tmp_path):
    found, parameters = groups(FinetuneConfig, gate, tmp_path, model="x", gate_lr_ratio=100.0)
    assert found == {
        name: (pytest.approx(0.1 if "f_proj" in name else 1e-3), 0.1 if p.ndim == 2 else 0.0)
        for name, p in parameters.items()
    }
