"""Two processes with half of the batch each make the step of one process: DDP and FSDP2 over gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


WORKER = """
import copy, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[4])
from tiny_hmt import tiny_llama
from hf_longctx.hmt import HMTConfig, HMTWrapper

kind, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
ids = torch.randint(3, 61, (4, 43), generator=torch.Generator().manual_seed(2))
for settings in ({}, {"recall": False}, {"recall": False, "memory_tokens": 2}, {"recall_mode": "paper"}):
    for length in (43, 6):  # a text of one segment recalls nothing
        torch.manual_seed(0)
        config = HMTConfig(segment_length=8, sensory_tokens=3, memory_size=3, **settings)
        alone = HMTWrapper.from_backbone(tiny_llama(), config).train()
        model, batch = copy.deepcopy(alone), ids[:, :length]
        expected = alone(batch, labels=batch).loss
        expected.backward()
        if kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for module in (*model.backbone.model.layers, model):
                fully_shard(module, mesh=mesh)
        for step in range(2):  # DDP finds out about unused parameters in the second step
            model.zero_grad()
            mine = batch[2 * rank : 2 * rank + 2]
            loss = model(mine, labels=mine).loss
            loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 2, expected.detach(), atol=1e-6, rtol=0)
        named = dict((model.module if kind == "ddp" else model).named_parameters())
        for name, parameter in alone.named_parameters():
            gradient = named[name].grad
            gradient = gradient.full_tensor() if kind == "fsdp2" else gradient
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=1e-6, msg=lambda text: f"{name}: {text}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not built in")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(tmp_path, kind):
    """Also without recall, with several memory tokens, and on texts of one segment, where some parameters rest."""
    command = [sys.executable, "-c", WORKER, kind]
    end = [str(tmp_path / "store"), str(Path(__file__).parent)]
    workers = [
        subprocess.Popen([*command, str(rank), *end], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        reports = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(reports)
