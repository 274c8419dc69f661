"""transformers' Trainer for runs that are stopped, killed and continued, and lose at most the step they are in.

What Trainer lacks: its checkpoints appear before they are complete, a signal ends it in the middle of a step, and a
loss that is not a number is trained on.
"""

import inspect
import json
import math
import os
import re
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, StepLR
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from ..metrics.run.distributed import wait
from .borders import borders, takes_borders
from .loss_in_pieces import LossInPieces, fits
from .progress import print_status
from .run_folder import UNFINISHED, explain_full_disk, flush
from .sequence_parallel import SequenceShard, check_arguments


GATE = re.compile(r"\bf_proj\b")


class ResumableTrainer(Trainer):
    """Trainer whose checkpoints are complete or absent, which ends cleanly at a signal, and stops at a NaN.

    It writes one line a step to `metrics`: {"step", "tokens", "loss", "grad_norm", "learning_rate"}, and {"step",
    "tokens", "eval_loss"} for evaluations. Lines of a FoX have "gate_learning_rate" where the gates have their own. A
    resumed run drops the lines after its checkpoint, so the file of a run that was killed equals that of one that was
    not.

    Args:
        metrics: the JSONL file.
        stops: the `StopAtSignal` of this training.
        batch_tokens: tokens of a step over all processes, padding included.
        gate_learning_rate: of forget gates, which are not decayed then. None: as the other parameters.
        shard: the `SequenceShard` of processes that share rows; None: each has rows of its own.
        keeps_best: an evaluation with a lower loss than those before saves a checkpoint, which is kept.
        decays_in_steps: the learning rate is multiplied by 0.7 every 100 steps.
        kwargs: as for `Trainer`.
    """

    def __init__(
        self,
        *args,
        metrics: Path,
        stops: "StopAtSignal",
        batch_tokens: int,
        gate_learning_rate: float | None = None,
        decays_in_steps: bool = False,
        keeps_best: bool = False,
        shard: SequenceShard | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.metrics, self.shard, self.keeps_best = metrics, shard, keeps_best
        self.saving_in: str | None = None  # the folder of a checkpoint that is not complete
        self.gate_learning_rate, self.decays_in_steps = gate_learning_rate, decays_in_steps
        model: Any = self.model
        self.batch_tokens = batch_tokens
        self.add_callback(stops)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        # a training needs no logits, only their loss; a FoX and a model with memory can leave out most of them
        self.loss_options: dict[str, Any] = {} if shard is None else {"shard": shard}
        self.gives_borders = takes_borders(base)
        skips = "skip_logits" in inspect.signature(base.forward).parameters  # by a copy of the head in float32
        if skips and base.get_output_embeddings().weight.requires_grad:
            self.loss_options["skip_logits"] = True
        elif getattr(base, "reads_in_segments", False):
            self.loss_options["logits_to_keep"] = 1
        # both of these need logits, and ZeRO-3 has the weights of the head only while the head is called
        needs_logits = self.label_smoother is not None or self.compute_loss_func is not None
        others = bool(self.loss_options.keys() - {"shard"}) or needs_logits or self.is_deepspeed_enabled
        self.loss_context = nullcontext() if others or not fits(base) else LossInPieces(base)

    def create_accelerator_and_postprocess(self):
        check_arguments(self.args)
        super().create_accelerator_and_postprocess()

    def create_optimizer(self, model=None):
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.gate_learning_rate is not None:
            trained: Any = self.model if model is None else model
            parameters = trained.named_parameters()
            gates = [p for name, p in parameters if GATE.search(name) and p.requires_grad]
            if not gates:
                raise ValueError(
                    "--gate-learning-rate is for forget gates, and none are trained here. Leave it out; for LoRA on a "
                    "FoX, train them by --train-in-full f_proj."
                )
            identities = {id(gate) for gate in gates}
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in identities]
            optimizer.add_param_group({"params": gates, "lr": self.gate_learning_rate, "weight_decay": 0.0})
        return optimizer

    def create_scheduler(self, num_training_steps, optimizer: Any = None):
        if self.lr_scheduler is None and self.decays_in_steps:
            optimizer = optimizer or self.optimizer
            self.lr_scheduler = StepLR(optimizer, step_size=100, gamma=0.7)  # ty: ignore[invalid-argument-type] - made
        elif self.lr_scheduler is None:
            schedule = super().create_scheduler(num_training_steps, optimizer)
            assert isinstance(schedule, LambdaLR)
            self.lr_scheduler = warm_up_above_zero(schedule, self.args.get_warmup_steps(num_training_steps))
        return self.lr_scheduler

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.gives_borders and "position_ids" in inputs:
            inputs = {**inputs, **borders(inputs["position_ids"])}
        with self.loss_context:
            return super().compute_loss(model, {**inputs, **self.loss_options}, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        with torch.random.fork_rng(devices=[]):  # a loader draws a number for its workers, and dropout would shift
            found = super().evaluate(*args, **kwargs)
        state = self.state
        if self.keeps_best and (state.best_metric is None or found["eval_loss"] < state.best_metric):
            state.best_metric, state.best_global_step = found["eval_loss"], state.global_step
            self.control.should_save = True
        return found

    def load_best(self) -> None:
        """Load the weights of the checkpoint with the lowest `eval_loss`; do nothing if none was evaluated.

        Raises:
            ValueError: that checkpoint is gone.
        """
        step = self.state.best_global_step
        if not step or step == self.state.global_step:
            return
        best = self.best_checkpoint()
        if not os.path.isdir(best):
            raise ValueError(
                f"{best} had the lowest eval_loss, {self.state.best_metric:.4f}, and is gone. Put it back, or take the "
                "last weights by --no-keep-best."
            )
        self.state.best_model_checkpoint = best
        self._load_best_model()
        print_status(f"the model is that of step {step}, whose eval_loss was the lowest: {self.state.best_metric:.4f}")

    def best_checkpoint(self) -> str:
        """Return the path of the checkpoint with the lowest `eval_loss`."""
        return os.path.join(str(self.args.output_dir), f"checkpoint-{self.state.best_global_step}")

    def check_sharding(self, checkpoint: Path) -> None:
        """Raise ValueError if the processes of the checkpoint divided the model in another way than these do."""
        kinds = {"FSDP": "pytorch_model_fsdp*", "DeepSpeed": "global_step*"}
        before = next((kind for kind, pattern in kinds.items() if any(checkpoint.glob(pattern))), "whole models")
        now = "FSDP" if self.is_fsdp_enabled else "DeepSpeed" if self.is_deepspeed_enabled else "whole models"
        if before != now:
            raise ValueError(
                f"{checkpoint} was saved by processes with {before}, and these have {now}. Go on with {before}, or begin "
                "again with --resume never."
            )

    def prediction_step(self, model, inputs, *args, **kwargs):
        """Evaluate a batch as Trainer does, with the mean over its rows of the sum of a row's losses as loss.

        The loss of Trainer is the sum over the labels of this process, divided by the mean number of labels of all
        processes.
        """
        if self.shard is not None:
            self.gather_function = self.gather_losses_of_groups
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        assert loss is not None
        scored: Any = self.accelerator.reduce((labels != -100).sum().float().to(loss.device), "mean")
        return (loss * scored / len(labels), *others)

    def gather_losses_of_groups(self, losses: torch.Tensor) -> torch.Tensor:
        """Gather the losses of all groups' rows, of which each process has a part.

        Args:
            losses: (B,).

        Returns:
            (groups * B,), or less in the last batch.
        """
        assert self.shard is not None
        gathered: Any = self.accelerator.gather(losses)
        state = self.accelerator.gradient_state
        rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return gathered.view(-1, self.shard.size, len(losses)).sum(1).flatten()[:rows]

    def evaluation_loop(self, *args, **kwargs):
        """Evaluate as Trainer does, with the mean over labels as loss instead of that over forward passes."""
        output = super().evaluation_loop(*args, **kwargs)
        rows: Any = self.eval_dataset
        scored = sum(int((rows[i]["labels"][1:] != -100).sum()) for i in range(len(rows)))
        assert output.metrics is not None
        output.metrics["eval_loss"] *= len(rows) / scored
        return output

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # resumed after the last step, where Trainer would take one more

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        return loader if self.shard is None else self.shard.share_rows(loader)

    def get_eval_dataloader(self, eval_dataset=None):
        loader = super().get_eval_dataloader(eval_dataset)
        return loader if self.shard is None else self.shard.share_rows(loader)

    def _get_output_dir(self, trial):
        return self.saving_in or super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial):
        checkpoints = super()._get_output_dir(trial)
        name = f"checkpoint-{self.state.global_step}"
        self.saving_in = os.path.join(checkpoints, UNFINISHED)
        try:
            if self.args.should_save:
                shutil.rmtree(self.saving_in, ignore_errors=True)
                os.makedirs(self.saving_in)
            wait()
            with explain_full_disk(self.model, Path(self.saving_in)):
                super()._save_checkpoint(model, trial)
        finally:
            unfinished, self.saving_in = self.saving_in, None
        wait()
        self.state.best_model_checkpoint = (
            None  # the unfinished one; and Trainer ends by keeping no other than the best
        )
        if self.args.should_save:
            complete = os.path.join(checkpoints, name)
            self.state.save_to_json(os.path.join(unfinished, name, TRAINER_STATE_NAME))
            flush(os.path.join(unfinished, name))
            shutil.rmtree(complete, ignore_errors=True)
            os.rename(os.path.join(unfinished, name), complete)
            shutil.rmtree(unfinished)
            best = self.best_checkpoint() if self.keeps_best and self.state.best_global_step else None
            rotate_checkpoints(checkpoints, self.args.save_total_limit, best)

    def _get_grad_norm(self, model, grad_norm=None):
        norm: Any = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the norm of the gradients of step {self.state.global_step + 1} is {float(norm)}. The weights are "
                f"those of step {self.state.global_step}; the last checkpoint is unharmed. Lower --learning-rate, or "
                "look at the data of this step."
            )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        self.state.log_history.pop()  # the metrics file holds it; a checkpoint need not
        line = {name: logs[name] for name in ("loss", "grad_norm", "learning_rate", "eval_loss") if name in logs}
        if "loss" in line and self.gate_learning_rate is not None:  # the schedule multiplies both
            line["gate_learning_rate"] = logs["learning_rate"] / self.args.learning_rate * self.gate_learning_rate
        if line and self.is_world_process_zero():
            step = self.state.global_step
            with open(self.metrics, "a") as file:
                file.write(json.dumps({"step": step, "tokens": step * self.batch_tokens, **line}) + "\n")


class StopAtSignal(TrainerCallback):
    """Ends the training at SIGTERM, Ctrl-C or the end of its time after the step it is in; at another Ctrl-C at once.

    A checkpoint is saved first.

    Another SIGTERM changes nothing: a scheduler may signal all processes, and torchrun passes the signal on to workers
    that have it already. Call `restore` after the training, however it ends.

    Args:
        hours: after which SIGALRM comes; None: never.

    Attributes:
        signal: number of the signal that came, or 0; the highest if processes received several.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)

    def __init__(self, hours: float | None = None):
        self.signal, self.before = 0, {}  # handlers before the training, by number
        self.hours = hours

    def on_train_begin(self, args, state, control, **kwargs):
        self.before = {number: signal.signal(number, self.receive) for number in self.SIGNALS}
        if self.hours is not None:
            signal.setitimer(signal.ITIMER_REAL, 3600 * self.hours)

    def receive(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])

    def restore(self) -> None:
        if self.hours is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_step_end(self, args, state, control, **kwargs):
        if dist.is_initialized():
            highest = torch.tensor(self.signal, device=args.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            self.signal = int(highest)
        if self.signal:
            control.should_save = control.should_training_stop = True


def warm_up_above_zero(schedule: LambdaLR, warmup: int) -> LambdaLR:
    """Return the schedule with a warmup from 1 / (warmup + 1); that of transformers wastes a step at 0."""

    def above_zero(factor):
        return lambda step: factor(step) if step >= warmup else (step + 1) / (warmup + 1)

    return LambdaLR(schedule.optimizer, [above_zero(factor) for factor in schedule.lr_lambdas])


__all__ = ["ResumableTrainer", "StopAtSignal", "warm_up_above_zero"]
