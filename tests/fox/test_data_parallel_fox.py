"""Two processes with half a batch each learn what one process with the whole batch learns."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from processes import WORLD
from tiny_fox import logits, make, skip_without_triton, tokens

from hf_longctx.fox import FoxForCausalLM


VARIANT = "pro with grouped heads and rope"
RATE = 0.5


def documents():
    """Four rows, each with another number of labels: a mean of the rows' means would not be the mean."""
    rows = tokens(4, 12)
    labels = rows.clone()
    for i, row in enumerate(labels):
        row[: 1 + i] = -100
    return [{"input_ids": ids, "labels": label} for ids, label in zip(rows, labels)]


def sharded_by_accelerate(folder, backend):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
    )
    accelerator = Accelerator(cpu=True)
    # accelerate shards on accelerators only, though it can do so on any device
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = FoxForCausalLM.from_pretrained(folder / "model", attn_implementation=backend)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    AcceleratorState._reset_state(reset_partial_state=True)
    return model


def sharded_step(model):
    """Loss and gradients of a batch of which each process has half the rows and a part of every weight, and the logits
    that a step of SGD leads to.
    """
    rows = documents()
    count = sum((row["labels"][1:] != -100).sum() for row in rows)
    half = {name: torch.stack([row[name] for row in rows[dist.get_rank() :: WORLD]]) for name in rows[0]}
    loss = model.train()(**half, num_items_in_batch=count).loss
    (loss * WORLD).backward()  # FSDP takes the mean over the processes
    total = loss.detach().clone()
    dist.all_reduce(total)
    parameters = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    largest = max(p.to_local().numel() / p.numel() for p in parameters.values())
    gradients = {name: p.grad.full_tensor() for name, p in parameters.items()}
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return total, gradients, largest, logits(model.eval(), tokens(1, 12))


def learn(folder, backend):
    return sharded_step(sharded_by_accelerate(folder, backend))


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("forgetting_triton", marks=skip_without_triton)])
def test_shards(backend, two_processes, tmp_path):
    make(VARIANT).save_pretrained(tmp_path / "model")
    loss, gradients, largest, after = two_processes(learn, tmp_path, backend)
    model, rows = make(VARIANT), documents()
    expected = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert largest < 0.6
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()}, atol=1e-6, rtol=1e-4)
    before = logits(model, tokens(1, 12))
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    torch.testing.assert_close(after, logits(model, tokens(1, 12)), atol=1e-5, rtol=1e-4)
    assert (after - before).abs().max() > 0.01
