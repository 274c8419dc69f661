"""Runs of a small model in separate processes, and faults that end them."""

import gc
import json
import os
import signal
import socket
import time
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from transformers.trainer_utils import get_last_checkpoint

from hf_longctx.training import run as run_module
from hf_longctx.training.config import FinetuneConfig, PretrainConfig
from hf_longctx.training.run import train
from hf_longctx.training.trainer import LongContextTrainer


SIZES = ["num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2", "intermediate_size=64"]


def make(values):
    """Make the settings of a recipe, or of pretraining; this joins the other processes."""
    if "recipe" in values:
        return FinetuneConfig.from_recipe(values["recipe"], **values)
    return PretrainConfig(**{"model": "fox-pro-tiny", "set": SIZES} | values)


def log(folder):
    """Return the losses of a finished run, or of its last checkpoint."""
    file = folder / "trainer_state.json"
    if not file.exists():
        file = Path(get_last_checkpoint(folder), "trainer_state.json")
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    entries = json.loads(file.read_text())["log_history"]
    return [{n: e[n] for n in names if n in e} for e in entries if "loss" in e or "eval_loss" in e]


def losses(folder):
    return [entry["loss"] for entry in log(folder) if "loss" in entry]


def die_at(step, inside_save=False):
    """Make this process kill itself after a step, or while it saves the optimizer of one."""
    name = "_save_optimizer_and_scheduler" if inside_save else "log"
    method = getattr(LongContextTrainer, name)

    def dying(self, *args, **kwargs):
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args, **kwargs)

    setattr(LongContextTrainer, name, dying)


def terminate_at(step):
    """Make this process receive SIGTERM in the middle of a step, from a scheduler and from torchrun."""
    method = LongContextTrainer.training_step
    sent = []

    def terminated(self, *args, **kwargs):
        if self.state.global_step == step and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return method(self, *args, **kwargs)

    LongContextTrainer.training_step = terminated


def train_and_be_late(values):
    """Train, and let the second process be late for the next run, which the first one has long started."""
    train(make(values))
    if os.environ["RANK"] == "1":
        claim = run_module.claim
        run_module.claim = lambda *arguments: time.sleep(1) or claim(*arguments)


def shard():
    """Make Trainer divide the model by FSDP2, as scripts/accelerate/fsdp2.yaml does on accelerators."""
    initialise = Accelerator.__init__

    def initialise_and_shard(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        self.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT"
        )

    Accelerator.__init__ = initialise_and_shard


def train_in_process(values, fault, arguments, environment, sharded):
    gc.freeze()  # garbage collections then skip the imported objects
    os.environ |= environment
    torch.set_num_threads(1)
    if sharded:
        shard()
    if fault is not None:
        fault(*arguments)
    if number := train(make(values)):
        raise SystemExit(128 + number)


def make_environments(processes):
    """Return what torch.distributed needs in each process."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def make_apart():
    """Return a function that trains in processes of their own, and returns their exit code."""
    from commands import context

    forks = context()

    def run(values, fault=None, *arguments, processes=1, sharded=False):
        members = []
        for environment in make_environments(processes):
            what = (values, fault, arguments, environment, sharded)
            members.append(forks.Process(target=train_in_process, args=what))
        for member in members:
            member.start()
        for member in members:
            member.join(240)
        codes = {member.exitcode for member in members}
        assert len(codes) == 1, codes
        return codes.pop()

    return run


FAULTS = {
    "killed before the first checkpoint": (die_at, 1),
    "killed after a checkpoint": (die_at, 3),
    "killed inside a save": (die_at, 4, True),
    "stopped by SIGTERM": (terminate_at, 3),
}
