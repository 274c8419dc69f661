"""Muon trains the matrices of hidden layers, and AdamW all else, as torch has them."""

import signal
from dataclasses import replace

import pytest
import torch
from demo_model import DEMO, VOCABULARY
from torch.optim import AdamW


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")
if not hasattr(torch.optim, "Muon"):
    pytest.skip("torch has Muon since 2.9", allow_module_level=True)

from hf_longctx import FoxConfig, FoxForCausalLM
from hf_longctx.training.muon import MuonAndAdamW, hidden_matrices
from hf_longctx.training.recipes import FinetuneSettings
from hf_longctx.training.run import train


SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adamw(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def test_a_step_is_that_of_muon_and_that_of_adamw_also_after_loading():
    torch.manual_seed(0)
    models = [FoxForCausalLM(FoxConfig(vocab_size=16, **SIZES)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(16, (2, 8))
    matrices = hidden_matrices(models[1])
    names = {name.split(".")[-2] for name, p in models[1].named_parameters() if any(p is m for m in matrices)}
    assert names == PROJECTIONS
    both = MuonAndAdamW(adamw(models[0]), hidden_matrices(models[0]))
    plain = adamw(models[1])
    for group in plain.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for model, optimizers in zip(models, ([both], [plain, muon])):
            model(ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 / (step + 1)  # as a schedule sets it
                optimizer.step()
                optimizer.zero_grad()
        state, both = both.state_dict(), MuonAndAdamW(adamw(models[0]), hidden_matrices(models[0]))
        both.load_state_dict(state)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters()):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("changes", [{}, {"full": True, "gate_learning_rate": 1.0}], ids=str)
def test_a_run_with_muon_goes_on_to_the_same_bytes(changes, tmp_path):
    FoxForCausalLM(FoxConfig(vocab_size=VOCABULARY, **SIZES)).save_pretrained(tmp_path / "fox")
    (tmp_path / "text.txt").write_text("The fox forgets what it no longer needs. " * 40)
    paths = dict(model=str(tmp_path / "fox"), data=str(tmp_path / "text.txt"), tokenizer=str(DEMO))
    sizes = dict(sequence_length=32, batch_tokens=64, steps=3, optimizer="muon")
    run = FinetuneSettings(output=str(tmp_path / "run"), **paths, **sizes, **changes)
    assert train(replace(run, output=str(tmp_path / "whole"))) == 0
    assert train(replace(run, max_hours=1e-6)) == signal.SIGALRM
    assert train(run) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    state = torch.load(tmp_path / "run" / "checkpoints" / "checkpoint-3" / "optimizer.pt")["state"]
    assert {"momentum_buffer"} in [set(moments) for moments in state.values()]
