"""Two processes with half of the batch each make the step of one process: DDP and FSDP2 over gloo."""

import copy

import pytest
import torch
import torch.distributed as dist
from tiny_hmt import ROUNDING, tiny_llama

from hf_longctx.hmt import HMTConfig, HMTWrapper


def step(kind):
    """Compare the mean loss and the gradients of `kind` in both processes with those of the whole batch."""
    rank, ids = dist.get_rank(), torch.randint(3, 61, (4, 19), generator=torch.Generator().manual_seed(2))
    paper = {"recall_mode": "paper"}
    without_recall = {"recall": False}, paper | {"recall": False, "memory_tokens": 2}
    for settings in ({}, paper, *(without_recall if kind == "ddp" else ())):  # DDP wants to know what is not used
        for length in (19, 6) if settings.get("recall", True) else (19,):  # a text of one segment recalls nothing
            torch.manual_seed(0)
            config = HMTConfig(segment_length=8, sensory_tokens=3, memory_size=2, **settings)
            alone = HMTWrapper.from_backbone(tiny_llama(), config).train()
            model, batch = copy.deepcopy(alone), ids[:, :length]
            expected = alone(batch, labels=batch).loss
            expected.backward()
            if kind == "ddp":
                model = torch.nn.parallel.DistributedDataParallel(model)
            else:
                from torch.distributed.fsdp import fully_shard

                mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
                for module in (*model.backbone.model.layers, model):
                    fully_shard(module, mesh=mesh)
            for _ in range(2):  # DDP finds out about unused parameters in the second step
                model.zero_grad()
                half = batch[2 * rank : 2 * rank + 2]
                loss = model(half, labels=half).loss
                loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            eps = torch.finfo(torch.float32).eps  # the loss is a float32 mean of up to 72 positive terms
            torch.testing.assert_close(mean / 2, expected.detach(), atol=0, rtol=64 * eps)
            named = dict((model.module if kind == "ddp" else model).named_parameters())
            for name, parameter in alone.named_parameters():
                gradient = named[name].grad
                gradient = gradient.full_tensor() if kind == "fsdp2" else gradient
                whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(
                    gradient, whole, atol=ROUNDING, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )
            last = model(half, labels=half, logits_to_keep=1).loss
            last.backward()
            torch.testing.assert_close(last, loss, atol=0, rtol=64 * eps)
            with torch.no_grad():
                torch.testing.assert_close(model(half).logits, alone(half).logits, atol=ROUNDING, rtol=0)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not built in")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(two_processes, kind):
    two_processes(step, kind)
