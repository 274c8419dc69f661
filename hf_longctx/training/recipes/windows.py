"""Learning of a window per key head, for a smaller key/value cache."""

from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoTokenizer

from ...corpus import load_tokens
from ...metrics import LocalReader, forgetting_curve, line_retrieval, position_loss
from ...metrics.run.model import text_config
from ...windows import HeadWindows
from ...windows.learning import WindowLearner, WindowOptimizer
from ...windows.sequences import WindowSequences
from ..loading import check_length, load_base
from ..trainer import LongContextTrainer
from .recipe import Recipe, register_recipe


REQUIRED = {
    "use_peft": False,
    "packing": True,
    "attn_implementation": None,
    "label_smoothing_factor": 0,
    "neftune_noise_alpha": None,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "load_best_model_at_end": False,  # open windows would have the lowest loss
    "activation_checkpointing": False,
    "gradient_checkpointing": False,  # the name before transformers 5.24
}
# Options of gradient steps. Windows are not learned by these.
UNUSED = "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"
COST = "cost.txt"
# What the learned windows retain is measured on held-out text
COPIED, COPIES = 1000, 4  # tokens of a passage to copy, and number of passages
LINES, RECORDS = 10, 10  # lines of a record, and number of records
EVALUATED = 64  # sequences of the evaluation data


class WindowTrainer(LongContextTrainer):
    """Train a `WindowLearner` on sequences that repeat passages and records."""

    def __init__(self, model: Any, args: Any, train_dataset: Any, callbacks: list[Any], **kwargs: Any):
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        sequences = WindowSequences(train_dataset, tokenizer, args.max_steps * args.sequences_per_step, args.data_seed)
        optimizer = WindowOptimizer, {"learner": model, "steps": args.max_steps, "lr": args.learning_rate}
        super().__init__(
            model=model,
            args=args,
            train_dataset=sequences,
            optimizer_cls_and_kwargs=optimizer,
            callbacks=callbacks,
            **kwargs,
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(inputs["input_ids"], inputs["labels"])
        return (output["loss"], output) if return_outputs else output["loss"]

    def log(self, logs, *args, **kwargs):
        """Log the share of the cache after the step with each loss."""
        if "loss" in logs:
            learner = self.accelerator.unwrap_model(self.model)
            logs |= {"share": float(f"{learner.share(learner.chosen()):.4g}")}
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """Save the state of the learner in a checkpoint, and `head_windows.json` at the end of the run."""
        if _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        learner = self.accelerator.unwrap_model(self.model)
        learner.choose(learner.best(learner.keep))  # a callback may have stopped the run before the share fell
        if self.is_world_process_zero():
            learner.windows().save_pretrained(output_dir or self.args.output_dir)


@register_recipe("windows")
class Windows(Recipe):
    """Learn which key heads may forget: a window for each key head of a frozen model, for a smaller cache.

    RUN/model contains `head_windows.json`, and what the windows cost in `cost.txt`. All values are ours.
    """

    defaults = """
data: stdlib
max_length: 2048
use_peft: false
learning_rate: 0.3
lr_scheduler_type: linear
max_grad_norm: 0
max_steps: 24
save_steps: 4
"""
    options = ("keep", "keep_context")
    frozen = True
    trainer = WindowTrainer

    def load(self, args, config):
        """Load the frozen model, and add learnable windows."""
        unused = {field.name: field.default for field in fields(args) if field.name in UNUSED}
        for name, value in (REQUIRED | unused).items():
            if getattr(args, name, value) != value:
                raise ValueError(
                    f"`{name}` must be {value} for the recipe windows, got {getattr(args, name)}. Remove it."
                )
        if args.max_steps < 1:
            raise ValueError(
                f"`max_steps` must be positive for the recipe windows, got {args.max_steps}. Give --max_steps 24."
            )
        if not 0 <= args.learning_rate <= 1:
            raise ValueError(
                f"`learning_rate` must be from 0 to 1 for the recipe windows, got {args.learning_rate}. It is the weight of "
                "a step in an average. Give --learning_rate 0.3."
            )
        model = load_base(args, config)
        check_length(model, args.max_length)
        context = args.keep_context
        if context is None:
            context = getattr(text_config(model), "max_position_embeddings", None) or args.max_length
        return WindowLearner(model.eval(), args.max_length, args.keep, context)

    def finish(self, args, trainer, tokenizer, folder):
        """Print what the windows cost on held-out text. A finished run that is repeated prints the same line."""
        file = folder / COST
        if not file.exists():
            text = self.measure(args, trainer, tokenizer, HeadWindows.from_pretrained(folder))
            if trainer.is_world_process_zero():
                partial = file.with_suffix(".partial")
                partial.write_text(text)
                partial.replace(file)
        trainer.accelerator.wait_for_everyone()
        PartialState().print(file.read_text())

    def measure(self, args, trainer, tokenizer, windows):
        """Measure what the windows cost, and return a sentence. The processes share the measurements."""
        learner = trainer.accelerator.unwrap_model(trainer.model)
        model, context = learner.release(), learner.context
        if trainer.eval_dataset is None:
            tokens = load_tokens(tokenizer, "stdlib").tokens
        else:
            tokens = torch.cat([row["input_ids"] for row in islice(trainer.eval_dataset, EVALUATED)]).numpy()
            tokens = tokens[~np.isin(tokens, tokenizer.all_special_ids)]
        copied = min(COPIED, args.max_length // 2 - 2, len(tokens) // COPIES)
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}  # configs may lack them
        found = []
        for cache in ("full", windows):
            reader = LocalReader(model, cache=cache)
            curve = forgetting_curve(reader, tokens, lengths=[copied], repeats=COPIES, **ids)
            length = min(args.max_length, len(tokens) - 1)
            loss = position_loss(reader, tokens, context_length=length, sequences=1, **ids)
            records = line_retrieval(reader, tokenizer, lines=[LINES], repeats=RECORDS, replies=False, **ids)
            found.append((curve.points[0].copy_mean, loss.perplexity[-1], np.mean([*records.rates().values()])))
        full, kept = found
        return (
            f"cache {windows.share(context, model):.0%} at {context:,} tokens; copies {copied:,} tokens at "
            f"{kept[0]:.0%} (model: {full[0]:.0%}), perplexity {kept[1] / full[1] - 1:+.1%}, lines {kept[2]:.0%} ({full[2]:.0%})"
        )
