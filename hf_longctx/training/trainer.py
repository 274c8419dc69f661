"""A subclass of transformers' Trainer, and callbacks that stop a run."""

import math
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR
from transformers import ProgressCallback, Trainer, TrainerCallback


GATE = re.compile(r"\bf_proj\b")


class LongContextTrainer(Trainer):
    """A Trainer with the settings `gate_lr_ratio` and `lr_decay_every`.

    It can also resume from a checkpoint of the last step. Training then ends immediately.
    """

    def create_optimizer(self, model=None):
        is_new, ratio = self.optimizer is None, getattr(self.args, "gate_lr_ratio", 1.0)
        optimizer = super().create_optimizer(model)
        if is_new and ratio != 1.0:
            trained: Any = self.model if model is None else model
            gates = dict.fromkeys(p for name, p in trained.named_parameters() if GATE.search(name) and p.requires_grad)
            if not gates:
                raise ValueError(
                    "--gate_lr_ratio needs trainable forget gates. For LoRA on a FoX, train the gates with "
                    "--lora_modules_to_save f_proj. Otherwise, omit --gate_lr_ratio."
                )
            rate = ratio * self.args.learning_rate
            for group in list(optimizer.param_groups):  # the weights of gates decay, and the biases do not
                moved = [p for p in group["params"] if p in gates]
                group["params"] = [p for p in group["params"] if p not in gates]
                if moved:
                    optimizer.add_param_group({"params": moved, "lr": rate, "weight_decay": group["weight_decay"]})
        return optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        every = getattr(self.args, "lr_decay_every", None)
        if self.lr_scheduler is None and every is not None:
            stepped: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = StepLR(stepped, step_size=every, gamma=0.7)
        return super().create_scheduler(num_training_steps, optimizer)

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # Trainer would take another step when it resumes after the last step


class StopAtNaN(TrainerCallback):
    """Abort training if the loss or the gradient is not finite. The step is then not saved."""

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
    workers. If another callback stops the training, the run counts as finished. StopAtSignal then saves the run's
    last checkpoint. Add StopAtSignal after all other callbacks.

    Attributes:
        signal: number of the received signal, or 0. If processes received different signals, it is the highest number.
    """

    signal = 0

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Replace the signal handlers inside a `with` block."""

        def receive(number: int, frame: Any) -> None:
            self.signal = number
            signal.signal(signal.SIGINT, before[signal.SIGINT])

        before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_end(self, args, state, control, **kwargs):
        if dist.is_initialized():
            highest = torch.tensor(self.signal, device=args.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            self.signal = int(highest)
        if self.signal:
            control.should_save = control.should_training_stop = True
        elif control.should_training_stop and state.global_step < state.max_steps:
            control.should_save = True
            state.max_steps = state.global_step

    on_evaluate = on_epoch_end = on_step_end


class Progress(ProgressCallback):
    """Show losses in Trainer's progress bar, instead of printing a line to stdout for each step."""

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(logs)
        elif self.training_bar is not None:
            self.training_bar.write(str(logs), file=sys.stderr)


__all__ = ["GATE", "LongContextTrainer", "Progress", "StopAtNaN", "StopAtSignal"]
