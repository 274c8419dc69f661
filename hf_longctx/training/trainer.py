"""transformers' Trainer for runs that are stopped, killed and resumed from their last checkpoint."""

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
    """Trainer with the `gate_lr_ratio` and `lr_decay_every` of `FinetuneConfig`, which resumes after the last step.

    It does not call tied weights missing.
    """

    def create_optimizer(self, model=None):
        is_new, ratio = self.optimizer is None, getattr(self.args, "gate_lr_ratio", 1.0)
        optimizer = super().create_optimizer(model)
        if is_new and ratio != 1.0:
            trained: Any = self.model if model is None else model
            gates = [p for name, p in trained.named_parameters() if GATE.search(name) and p.requires_grad]
            if not gates:
                raise ValueError(
                    "--gate_lr_ratio needs forget gates that are trained. Leave it out; for LoRA on a FoX, train them by "
                    "--lora_modules_to_save f_proj."
                )
            identities = {id(gate) for gate in gates}
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in identities]
            rate = ratio * self.args.learning_rate
            optimizer.add_param_group({"params": gates, "lr": rate, "weight_decay": 0.0})
        return optimizer

    def create_scheduler(self, num_training_steps, optimizer: Any = None):
        every = getattr(self.args, "lr_decay_every", None)
        if self.lr_scheduler is None and every is not None:
            optimizer = optimizer or self.optimizer
            self.lr_scheduler = StepLR(optimizer, step_size=every, gamma=0.7)  # ty: ignore[invalid-argument-type] - made
        return super().create_scheduler(num_training_steps, optimizer)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", {})  # absent from the file, and equal to what is there
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # resumed after the last step, where Trainer would take one more


class StopAtNaN(TrainerCallback):
    """Ends a run at a loss or gradient that is not finite, before the step can be saved."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "grad_norm"):
            value = float((logs or {}).get(name, 0.0))
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"`{name}` is {value} at step {state.global_step}; earlier checkpoints are sound. Lower "
                    "--learning_rate, or look at the data of this step."
                )


class StopAtSignal(TrainerCallback):
    """Saves a checkpoint and ends a run after the step in which SIGTERM or Ctrl-C came; a second Ctrl-C ends it now.

    Another SIGTERM changes nothing: a scheduler may signal all processes, and torchrun passes the signal on to workers
    that have it already. Call `restore` after the training, however it ends.

    Attributes:
        signal: number of the signal that came, or 0; the highest if processes received several.
    """

    def __init__(self):
        self.signal, self.before = 0, {}  # handlers before the training, by number

    def on_train_begin(self, args, state, control, **kwargs):
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


class FirstStep(TrainerCallback):
    """Announces that the first step compiles, and prints how long it took."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin = time.monotonic() if state.is_world_process_zero else None
        if self.begin is not None:
            print("the first step compiles the decoder layers; --torch_compile false leaves that out", file=sys.stderr)

    def on_step_end(self, args, state, control, **kwargs):
        if self.begin is not None:
            print(f"the first step took {time.monotonic() - self.begin:.1f} s", file=sys.stderr)
        self.begin = None


class Progress(TrainerCallback):
    """Prints losses, speed and remaining time every few seconds, each evaluation, and the last step.

    Args:
        tokens: of an optimizer step.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens

    def on_train_begin(self, args, state, control, **kwargs):
        self.printed, self.last = -math.inf, (time.monotonic(), state.global_step)

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        now, step, text = time.monotonic(), state.global_step, f"step {state.global_step}/{state.max_steps}"
        if not state.is_world_process_zero:
            return
        if "eval_loss" in logs:
            print(f"{text}  eval_loss {logs['eval_loss']:.4f}", file=sys.stderr)
            self.last = (now, step)  # the speed is that of training
        is_due = step == state.max_steps or now > self.printed + SECONDS_BETWEEN_LINES
        if "loss" in logs and is_due:
            begin, first = self.last
            seconds = (now - begin) / max(1, step - first)
            self.printed, self.last = now, (now, step)
            print(
                f"{text}  loss {logs['loss']:.4f}  lr {logs['learning_rate']:.2e}  grad {logs['grad_norm']:.2f}  "
                f"{self.tokens / seconds:.0f} tokens/s  {(state.max_steps - step) * seconds / 60:.1f} min left",
                file=sys.stderr,
            )


__all__ = ["FirstStep", "LongContextTrainer", "Progress", "StopAtNaN", "StopAtSignal"]
