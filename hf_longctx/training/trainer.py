"""A subclass of transformers' Trainer, and callbacks that stop a run and print its progress."""

import math
import re
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR
from transformers import Trainer, TrainerCallback


GATE = re.compile(r"\bf_proj\b")
SECONDS_BETWEEN_LINES = 10


class LongContextTrainer(Trainer):
    """A Trainer with the settings `gate_lr_ratio` and `lr_decay_every`. It can resume a run after its last step."""

    def create_optimizer(self, model=None):
        is_new, ratio = self.optimizer is None, getattr(self.args, "gate_lr_ratio", 1.0)
        optimizer, every = super().create_optimizer(model), getattr(self.args, "lr_decay_every", None)
        if is_new and ratio != 1.0:
            trained: Any = self.model if model is None else model
            gates = dict.fromkeys(p for name, p in trained.named_parameters() if GATE.search(name) and p.requires_grad)
            if not gates:
                raise ValueError(
                    "--gate_lr_ratio needs trainable forget gates. Omit it. For LoRA on a FoX, train the gates "
                    "with --lora_modules_to_save f_proj."
                )
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p not in gates]
            rate = ratio * self.args.learning_rate
            optimizer.add_param_group({"params": list(gates), "lr": rate, "weight_decay": 0.0})
        if is_new and every is not None:
            self.lr_scheduler = StepLR(optimizer, step_size=every, gamma=0.7)  # replaces Trainer's scheduler
        return optimizer

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # Trainer would take another step when it resumes after the last step


class StopAtNaN(TrainerCallback):
    """Abort training when the loss or the gradient is not finite, before the step can be saved."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "grad_norm"):
            value = float((logs or {}).get(name, 0.0))
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"`{name}` is {value} at step {state.global_step}; earlier checkpoints are intact. Lower "
                    "--learning_rate, or inspect the data of this step."
                )


class StopAtSignal(TrainerCallback):
    """Save a checkpoint and stop after the step in which SIGTERM or Ctrl-C arrives. A second Ctrl-C stops immediately.

    Further SIGTERMs are ignored: a scheduler may signal all processes, and torchrun also forwards the signal to its
    workers. Always call `restore` after training, even if training fails.

    Attributes:
        signal: number of the received signal, or 0. If processes received different signals, it is the highest number.
    """

    def __init__(self):
        self.signal = 0
        # original handlers
        self.before = {number: signal.signal(number, self.receive) for number in (signal.SIGTERM, signal.SIGINT)}

    def receive(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_step_end(self, args, state, control, **kwargs):
        if dist.is_initialized():
            highest = torch.tensor(self.signal, device=args.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            self.signal = int(highest)
        if self.signal:
            control.should_save = control.should_training_stop = True


class Progress(TrainerCallback):
    """Print loss, speed and remaining time every few seconds, after each evaluation and at the last step."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.printed, self.last = -math.inf, (time.monotonic(), state.global_step)

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        now, step, text = time.monotonic(), state.global_step, f"step {state.global_step}/{state.max_steps}"
        if not state.is_world_process_zero:
            return
        if "eval_loss" in logs:
            print(f"{text}  eval_loss {logs['eval_loss']:.4f}", file=sys.stderr)
            self.last = (now, step)  # the speed excludes evaluations
        is_due = step == state.max_steps or now > self.printed + SECONDS_BETWEEN_LINES
        if "loss" in logs and is_due:
            begin, first = self.last
            seconds = (now - begin) / max(1, step - first)
            self.printed, self.last = now, (now, step)
            print(
                f"{text}  loss {logs['loss']:.4f}  lr {logs['learning_rate']:.2e}  grad {logs['grad_norm']:.2f}  "
                f"{args.sequences_per_step * args.max_length / seconds:.0f} tokens/s  "
                f"{(state.max_steps - step) * seconds / 60:.1f} min left",
                file=sys.stderr,
            )


__all__ = ["LongContextTrainer", "Progress", "StopAtNaN", "StopAtSignal"]
