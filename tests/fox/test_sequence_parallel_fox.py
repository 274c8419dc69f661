"""Two processes that share rows learn what one process learns from whole rows."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import WORLD
from tiny_fox import VARIANTS, checkpointed, make, skip_without_triton, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_longctx.training.chunked_loss import chunk_loss
from hf_longctx.training.sequence_parallel import SequenceShard, check_model


BATCH, LENGTH = 2, 24
GROUPED = "pro with grouped heads and rope"
CASES = {
    **{variant: dict(variant=variant) for variant in VARIANTS if variant not in ("pro", "window")},
    "one document a row": dict(variant=GROUPED, packed=False),
    "activation checkpointing": dict(variant=GROUPED, checkpointing=True),
    "chunked loss": dict(variant="pro", chunked=True),
    "eager": dict(variant=GROUPED, backend="eager"),
}
TRITON = {"Triton": dict(variant=GROUPED, backend="forgetting_triton")}


def make_batch(packed=True):
    """Return rows with different numbers of labels. Documents begin before, at and after the boundary of the parts."""
    ids = tokens(BATCH, LENGTH)
    labels, positions = ids.clone(), torch.arange(LENGTH).repeat(BATCH, 1)
    labels[:, 0] = labels[0, :5] = -100
    if packed:
        for row, start in ((0, 7), (0, LENGTH // 2), (1, LENGTH // 2 - 1), (1, LENGTH // 2 + 1)):
            positions[row, start:] = torch.arange(LENGTH - start)
            labels[row, start] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def learn(shard, variant, backend="sdpa", packed=True, checkpointing=False, chunked=False):
    """Sum of the losses of all labels and its gradients, of the processes together if they share rows."""
    model, batch = make(variant, backend).train(), make_batch(packed)
    if shard is not None:
        if checkpointing:
            checkpointed(model)
        rows = [{name: x[row] for name, x in batch.items()} for row in range(BATCH)]
        batch = shard.collate(rows)
    if chunked:
        assert chunk_loss(model, logits_at_once=500)
    loss = model(**batch, num_items_in_batch=1).loss
    loss.backward()
    sums = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}
    if shard is not None:
        for x in sums.values():
            dist.all_reduce(x)
    return sums


def share_rows(cases):
    shard = SequenceShard(WORLD)
    return {name: learn(shard, **case) for name, case in cases.items()}


@pytest.mark.parametrize("cases", [CASES, pytest.param(TRITON, marks=skip_without_triton)], ids=["torch", "triton"])
def test_loss_and_gradients_are_those_of_one_process(cases, two_processes):
    learnt = two_processes(share_rows, cases)
    for name, case in cases.items():
        expected = learn(None, **case)
        assert learnt[name].keys() == expected.keys()
        errors = {n: ((learnt[name][n] - x).abs().max() / x.abs().max()).item() for n, x in expected.items()}
        assert max(errors.values()) < 1e-5, f"{name}: {errors}"  # relative to the largest entry


def call_in_context_parallel():
    """Return the error of FoX in PyTorch's context parallelism, which splits rows."""
    ids, model = tokens(BATCH, LENGTH), make("llama")
    mesh = init_device_mesh("cpu", (WORLD,))
    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
        try:
            model(ids)
        except ValueError as error:
            return str(error)


def test_context_parallel_of_torch_is_refused(two_processes):
    assert "has replaced the attention" in two_processes(call_in_context_parallel)


def test_sequence_parallel_of_deepspeed_is_refused(monkeypatch):
    def attention(*args, **kwargs): ...

    attention.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention)
    with pytest.raises(ValueError, match=r"deepspeed.* has replaced the attention.*--sequence-parallel N"):
        make("llama")(tokens())


def test_models_whose_rows_cannot_be_shared():
    check_model(make(GROUPED), 2)
    with pytest.raises(ValueError, match=r"number of key heads \(2\), got 4"):
        check_model(make(GROUPED), 4)
    with pytest.raises(ValueError, match=r"got model type llama.*fox-from-llama"):
        check_model(SimpleNamespace(config=LlamaConfig()), 2)
