"""Reports of a training on stderr: what it trains, a line every few seconds, and how it ended."""

import math
import os
import re
import sys
import time
from collections import deque
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from .recipes import ResolvedSettings


SECONDS_BETWEEN_LINES = 10
CLEAR = "\r\x1b[K"  # goes to the beginning of a terminal's line, which `Passing` leaves open, and clears it
MASK_TO_TELL = 2**28  # bytes


def is_first_process() -> bool:
    """Return True in one of the processes of a training."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def print_status(text: str) -> None:
    """Print on stderr, in one process only where several run."""
    if is_first_process():
        print(f"{CLEAR}{text}" if sys.stderr.isatty() else text, file=sys.stderr)


def describe(settings: ResolvedSettings, trainer: Trainer, arguments: TrainingArguments, step: int) -> str:
    """Describe what is trained, how, and after which step, in a few lines."""
    model: Any = trainer.model
    config = model.config
    lines = [f"{config.model_type}, {config._attn_implementation} attention; trained parameters:"]
    lines.append(describe_trainable(model))
    lines.append(
        f"{settings.steps} steps of {settings.batch_tokens} tokens: {settings.per_device_batch_size} rows of "
        f"{settings.sequence_length} tokens x {arguments.gradient_accumulation_steps} passes x "
        f"{settings.describe_processes(arguments.world_size)} on {arguments.device.type}"
        f"{', bfloat16' if arguments.bf16 else ''}"
    )
    rows: Any = trainer.train_dataset
    if hasattr(rows, "__len__"):  # a stream has no end
        read = settings.steps * settings.batch_tokens / settings.sequence_length
        lines.append(f"the data are {len(rows)} rows, which are read {read / len(rows):.2f} times")
    mask = settings.per_device_batch_size * settings.sequence_length**2  # of bytes: one for each pair of tokens
    if settings.packing and config._attn_implementation == "sdpa" and mask > MASK_TO_TELL:
        lines.append(
            f"sdpa hides packed documents from each other by a mask of {mask / 1e9:.1f} GB; "
            "--attention flash_attention_2 takes their borders"
        )
    count = torch.accelerator.device_count()
    if count > 1 and arguments.world_size == 1:
        lines.append(
            f"one of {count} accelerators is used; torchrun --nproc-per-node {count} -m hf_longctx ... uses all"
        )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
        lines.append("accelerate has no FSDP on a CPU; every process holds the whole model")
    return "\n".join([*lines, f"going on after step {step}" if step else "beginning"])


def describe_trainable(model) -> str:
    """Return a table of the trained parameters by the name of their module, and their share of all."""
    groups: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = " (LoRA)" if ".lora_" in name else ""
            module = re.sub(r"\.(weight|bias|default|modules_to_save|lora_\w+)(?=\.|$)", "", name).rsplit(".", 1)[-1]
            groups[module + kind] = groups.get(module + kind, 0) + parameter.numel()
    trained, total = sum(groups.values()), sum(parameter.numel() for parameter in model.parameters())
    lines = [f"  {name:28} {count:>13,}" for name, count in sorted(groups.items())]
    return "\n".join([*lines, f"  {'in all':28} {trained:>13,}, {trained / total:.2%} of {total:,}"])


class Passing:
    """Prints how far something is every few seconds: on a terminal over the text before, elsewhere in a line."""

    def __init__(self):
        self.printed = time.monotonic()

    def tell(self, text: str) -> None:
        on_terminal, now = sys.stderr.isatty(), time.monotonic()
        if now >= self.printed + (1 if on_terminal else SECONDS_BETWEEN_LINES) and is_first_process():
            self.printed = now
            print(
                f"{CLEAR}{text}" if on_terminal else text, end="" if on_terminal else "\n", file=sys.stderr, flush=True
            )


class Progress(TrainerCallback):
    """Prints a line every few seconds: step, epoch, loss, learning rate, speed, and time that is left.

    The speed is that of the last minute. Evaluations have lines of their own, and their time is no part of the speed.

    Args:
        batch_tokens: tokens of a step.
        has_epochs: the data have an end, unlike a stream.
    """

    def __init__(self, batch_tokens: int, has_epochs: bool):
        self.batch_tokens, self.has_epochs = batch_tokens, has_epochs

    def on_train_begin(self, args, state, control, **kwargs):
        self.printed, self.passes, self.passing = -math.inf, 0, Passing()
        self.steps = deque([(time.monotonic(), state.global_step)])  # when a step ended, for a minute

    def leave_out(self, seconds: float) -> None:
        """Take no account of the last seconds, in which nothing was trained."""
        self.steps = deque((at + seconds, step) for at, step in self.steps)

    def on_prediction_step(self, args, state, control, eval_dataloader: Any = None, **kwargs):
        self.passes += 1
        self.passing.tell(f"step {state.global_step}  evaluating: {self.passes} of {len(eval_dataloader)} passes")

    def on_log(self, args, state, control, logs=None, **kwargs):
        now, step = time.monotonic(), state.global_step
        text = f"step {step}/{state.max_steps}"
        if not logs:
            return
        if "eval_loss" in logs:
            self.passes = 0
            self.leave_out(now - self.steps[-1][0])
            print_status(f"{text}  eval_loss {logs['eval_loss']:.4f}")
        if "loss" not in logs:
            return
        self.steps.append((now, step))
        while len(self.steps) > 2 and self.steps[1][0] <= now - 60:
            self.steps.popleft()
        if step < state.max_steps and now < self.printed + SECONDS_BETWEEN_LINES:
            return
        self.printed = now
        begin, first = self.steps[0]
        seconds = (now - begin) / (step - first)
        epoch = f"epoch {state.epoch:.2f}  " if self.has_epochs else ""
        print_status(
            f"{text}  {epoch}loss {logs['loss']:.4f}  lr {logs['learning_rate']:.2e}  "
            f"grad {logs['grad_norm']:.2f}  {self.batch_tokens / seconds:.0f} tokens/s  "
            f"{(state.max_steps - step) * seconds / 60:.1f} min left"
        )


__all__ = ["Passing", "Progress", "describe", "is_first_process", "print_status"]
