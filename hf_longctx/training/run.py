"""A training run in its folder: it begins, goes on where it was stopped, and ends with a model.

config.yaml      all settings
lock.json        what must not change when the run goes on: settings, hashes of tokens, tokenizer, pretrained weights
data/            the packed tokens
checkpoints/     complete ones only
metrics.jsonl    a line a step, see `ResumableTrainer`
model/           model and tokenizer, once all steps are done
"""

import dataclasses
import fcntl
import hashlib
import inspect
import json
import math
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from ..metrics.run.distributed import wait
from .copy_data import CopyDataset
from .data import (
    StreamedTokenDataset,
    TokenDataset,
    collate_without_positions,
    digest,
    pack,
    source_fingerprint,
    stack,
)
from .model_init import build_new_model, disable_zero3_init, extend_rope, load_changed_model
from .recipes import RunSettings, TrainSettings
from .sequence_parallel import SequenceShard, check_model
from .settings import locked, option, write_settings
from .streams import DocumentStreams, StreamTrainer
from .trainer import (
    UNFINISHED,
    ResumableTrainer,
    StopAtSignal,
    check_checkpoint,
    explain_full_disk,
    last_checkpoint,
    remove_checkpoints_after,
    truncate_metrics,
)


SECONDS_BETWEEN_LINES = 10
MANY_ROWS = 1000  # the gradient of a gate is proportional to 1 / decay time, and 1e-7 of the others' at 1e5 rows
PATIENCE = 7 * 24 * 3600  # seconds in which the other processes wait for the first one, which packs and measures
IN_USE = ".in_use"  # locked by the process that trains in a folder


def train(settings: RunSettings, resume: str = "auto", trial: bool = False) -> int:
    """Pretrain or fine-tune a model, or go on with a run that was stopped.

    Args:
        settings: `TrainSettings` or `FinetuneSettings`, resolved or not.
        resume: "auto" goes on from the last checkpoint in the run's folder; "never" begins again; or the path of a
            checkpoint.
        trial: train only; nothing is saved or evaluated.

    Returns:
        0 when the model is complete, else the number of the signal that stopped the run.

    Raises:
        ValueError: a setting is out of its range; the folder holds something else, a run with other settings, one that
            another process trains, or a damaged checkpoint; or the data are too short.
        FloatingPointError: the gradients are not finite.
        OSError: the disk is full, or a file cannot be read.
    """
    settings = settings.resolve()
    folder = Path(settings.output)
    arguments = training_arguments(settings, folder, trial)
    tokenizer = load_tokenizer(settings.tokenizer)
    with arguments.main_process_first(local=False):
        in_use = prepare_folder(folder, resume)  # noqa: F841 - closing the file would give the folder free
        check_lock(folder, {**locked(settings), "tokenizer": digest_of(tokenizer.get_vocab())})
        rows = prepare_rows(settings.data, folder / "data" / "tokens.npy", settings, tokenizer)
        check_lock(folder, {"data": digest(rows.path) if isinstance(rows, TokenDataset) else settings.data})
        check_enough(rows, settings)
    if is_first_process():
        (folder / "config.yaml").write_text(write_settings(settings))
    if settings.repeated_rows:
        rows = CopyDataset(rows, settings.repeated_rows, tokenizer, settings.seed)
    evaluation_rows = None
    if settings.eval_data is not None:
        with arguments.main_process_first(local=False):
            packed = dataclasses.replace(settings, streaming=False)  # a stream has no end
            path = folder / "data" / "eval_tokens.npy"
            evaluation_rows = prepare_rows(settings.eval_data, path, packed, tokenizer, "held_out")
    measured = rows if evaluation_rows is None else evaluation_rows
    if (folder / "model").exists():
        evaluate(settings, tokenizer, measured, "after")
        say(f"{folder} is finished: the model is in {folder / 'model'}.")
        return 0
    checkpoint = find_checkpoint(folder / "checkpoints", resume)
    step = 0 if checkpoint is None else check_checkpoint(checkpoint)

    carries_state = getattr(settings, "carry_state", False)
    if carries_state:
        streams = settings.batch_tokens // settings.sequence_length
        rows = DocumentStreams(rows.tokens, rows.length, tokenizer.eos_token_id, streams)
        say(f"{len(rows)} chunks of documents in {streams} streams; {1 - rows.text_share():.0%} of them is padding")
        if evaluation_rows is not None:
            evaluation_rows = DocumentStreams(evaluation_rows.tokens, rows.length, tokenizer.eos_token_id, streams)
    model, base = start(settings, tokenizer)
    shard = None
    if settings.sequence_parallel > 1:
        check_model(model, settings.sequence_parallel)
        shard = SequenceShard(settings.sequence_parallel)
    stops = StopAtSignal()
    trainer = (StreamTrainer if carries_state else ResumableTrainer)(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=evaluation_rows,
        data_collator=choose_collator(model) if shard is None else shard.collate,
        metrics=folder / "metrics.jsonl",
        shard=shard,
        stops=stops,
        batch_tokens=settings.batch_tokens,
        gate_learning_rate=getattr(settings, "gate_learning_rate", None),
        decays_in_steps=settings.schedule == "step",
        callbacks=[Progress(settings.batch_tokens)],
    )
    trainer.remove_callback(PrinterCallback)
    if checkpoint is not None:
        trainer.check_sharding(checkpoint)
    if trainer.is_world_process_zero():
        truncate_metrics(trainer.metrics, step)
        remove_checkpoints_after(folder / "checkpoints", step)
    say(describe(settings, trainer, step))
    if step == 0 and not trial:
        evaluate(settings, tokenizer, measured, "before")
    set_seed(settings.seed, device_specific=True)  # each process has a dropout of its own
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        stops.restore()
    if trainer.state.global_step < settings.steps:
        say(f"stopped after step {trainer.state.global_step} of {settings.steps}; the same command goes on.")
        return stops.signal
    if trial:
        return 0
    save_model(trainer, tokenizer, settings, base)
    trainer.accelerator.wait_for_everyone()  # a second stage may read the model in all processes
    evaluate(settings, tokenizer, measured, "after")
    say(f"wrote the model to {folder / 'model'}")
    return 0


def has_memory(settings: RunSettings) -> bool:
    return getattr(settings, "recipe", None) == "hmt"


def choose_collator(model):
    """A model with memory, and few others, count positions themselves, and some of them refuse position_ids."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return stack if "position_ids" in inspect.signature(base.forward).parameters else collate_without_positions


def start(settings: RunSettings, tokenizer):
    """Return the model to train, and the fingerprint of its adapter's base (None if all parameters are trained)."""
    if isinstance(settings, TrainSettings):
        return build_new_model(settings, tokenizer), None
    if settings.recipe == "rope-extend":
        say(extend_rope(AutoConfig.from_pretrained(settings.model), settings))
    if settings.recipe == "fox-from-llama" and settings.decay_time > MANY_ROWS * settings.sequence_length:
        say(
            f"gates that forget after {settings.decay_time:g} tokens hardly learn from rows of {settings.sequence_length}"
        )
    model = load_changed_model(settings, tokenizer)
    from .adapters import add_lora, model_fingerprint

    base = model_fingerprint(model)
    check_lock(Path(settings.output), {"model": base["weights"]})
    return (model, None) if settings.full else (add_lora(model, settings), base)


def dry_run(settings: RunSettings) -> None:
    """Train a few steps in a folder that is thrown away, and say how fast they were and what memory they took."""
    settings = settings.resolve()
    with tempfile.TemporaryDirectory() as folder:
        trial = dict(output=folder, steps=3, warmup_steps=0, eval_data=None)
        trial["streaming"] = not (settings.repeated_rows or getattr(settings, "carry_state", False))
        train(dataclasses.replace(settings, **trial), trial=True)
    if torch.accelerator.is_available():
        peak = torch.accelerator.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    say(f"peak memory {peak / 2**20:.0f} MiB; the run itself has {settings.steps} steps. Nothing was written.")


def training_arguments(settings: RunSettings, folder: Path, trial: bool = False) -> TrainingArguments:
    """The settings in Trainer's words. Making them joins the other processes."""
    accelerator = torch.accelerator.is_available()
    checkpointing = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else None
    schedule = {}
    if settings.schedule == "warmup_stable_decay":
        schedule = {"num_decay_steps": settings.steps // 10, "decay_type": "1-sqrt"}
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.per_device_batch_size,
        per_device_eval_batch_size=settings.per_device_batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup", "step": "constant"}.get(
            settings.schedule, settings.schedule
        ),
        lr_scheduler_kwargs=schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.dtype == "bfloat16" or (settings.dtype == "auto" and accelerator),
        use_cpu=not accelerator,
        seed=settings.seed,
        data_seed=settings.seed,
        save_strategy="no" if trial else "steps",
        save_steps=settings.save_steps,
        save_total_limit=settings.keep_checkpoints,
        eval_strategy="no" if settings.eval_data is None else "steps",
        eval_steps=settings.eval_steps,
        prediction_loss_only=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=accelerator,
        remove_unused_columns=False,  # rows hold what the model or its Trainer takes
        ddp_timeout=PATIENCE,
        ddp_find_unused_parameters=False,
        # processes that share rows each read them, instead of a part of what the first one reads
        accelerator_config={"dispatch_batches": False} if settings.sequence_parallel > 1 else None,
        **{checkpointing or "gradient_checkpointing": settings.activation_checkpointing},
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # else Trainer reads per_device_batch_size on each GPU, in one process
    arguments.gradient_accumulation_steps = settings.accumulation(arguments.world_size)
    return arguments


def load_tokenizer(name: str):
    """Raises ValueError if there is no tokenizer of that name."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--tokenizer {name} cannot be loaded ({str(error).splitlines()[0]}). Name the folder of a tokenizer, or one "
            "of the Hub."
        ) from error


def prepare_folder(folder: Path, resume: str):
    """Make the run's folder, or empty it for a new beginning.

    Returns:
        a file that keeps other processes out of the folder until it is closed, however this process ends; None in all
        processes of a training but the first.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --output is the folder of the run.")
    if folder.is_dir() and {path.name for path in folder.iterdir()} - {IN_USE} and not (folder / "lock.json").exists():
        raise ValueError(f"{folder} holds something else than a run; give --output a new folder.")
    if resume == "never" and (folder / "model").exists():
        raise ValueError(f"{folder} holds a finished model, which --resume never would lose; give a new folder.")
    if not is_first_process():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    in_use = open(folder / IN_USE, "w")  # noqa: SIM115 - for as long as the training
    try:
        fcntl.lockf(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another process trains in {folder}; wait for it, or give --output a new folder.") from error
    checkpoints = folder / "checkpoints"
    if resume == "never" or not (last_checkpoint(checkpoints) or (folder / "model").exists()):
        for path in (checkpoints, folder / "evaluation"):
            shutil.rmtree(path, ignore_errors=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        (folder / "lock.json").write_text("{}\n")  # there is nothing to go on from, so all settings may be others
    for name in (".model", f"checkpoints/{UNFINISHED}"):  # of a run that was killed while it saved
        shutil.rmtree(folder / name, ignore_errors=True)
    return in_use


def find_checkpoint(folder: Path, resume: str) -> Path | None:
    """The checkpoint of the run to go on from."""
    if resume in ("auto", "never"):
        return last_checkpoint(folder)
    if Path(resume).resolve().parent != folder.resolve():
        raise ValueError(f"--resume is {resume}; it must be auto, never, or a checkpoint of this run, in {folder}.")
    return Path(resume)


def prepare_rows(source: str, path: Path, settings: RunSettings, tokenizer, part: str = "train"):
    """The rows to train on: of a file of tokens, of a text that is packed first, or of a stream.

    `part` is what is read of a source that has several: "train" or "held_out".
    """
    border = None if has_memory(settings) else tokenizer.eos_token_id  # a memory reads on
    construction = settings.made_of_documents()
    if source.endswith(".npy"):
        if construction is not None:
            raise ValueError(f"--construction is made of texts, and {source} holds tokens; give the texts.")
        return TokenDataset(source, settings.sequence_length, border, len(tokenizer))
    if settings.streaming:
        return StreamedTokenDataset(source, tokenizer, settings.sequence_length, border, construction)
    state = f"{digest_of(tokenizer.get_vocab())}\n{source_fingerprint(source)}"
    packed_from = path.with_suffix(".source")
    if not path.exists() or not packed_from.exists() or packed_from.read_text() != state:
        packed_from.unlink(missing_ok=True)
        pack(source, tokenizer, path, construction, part)
        packed_from.write_text(state)
    return TokenDataset(path, settings.sequence_length, border, len(tokenizer))


def check_enough(rows, settings: RunSettings) -> None:
    """Raise ValueError if the data are less than one step, of which Trainer would make a smaller one in silence."""
    tokens = len(rows) * settings.sequence_length if isinstance(rows, TokenDataset) else math.inf
    if tokens < settings.batch_tokens:
        raise ValueError(
            f"{settings.data} holds {len(rows)} rows of {settings.sequence_length} tokens, less than the "
            f"{settings.batch_tokens} tokens of a step. Give more text, or lower --batch-tokens."
        )


def check_lock(folder: Path, facts: dict[str, Any]) -> None:
    """Compare what the run depends on with what the folder's run depends on, as far as that is known, and note it.

    Raises:
        ValueError: they differ.
    """
    file = folder / "lock.json"
    try:
        before = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); begin again with --resume never.") from error
    changed = [
        f"{option(name)}: {before[name]} -> {value}"
        for name, value in facts.items()
        if name in before and before[name] != value
    ]
    if changed:
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}). Go on with the old ones, take a new "
            "folder, or begin again with --resume never."
        )
    if is_first_process():
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(before | facts, indent=1) + "\n")
        unfinished.rename(file)


def digest_of(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def evaluate(settings: RunSettings, tokenizer, rows, when: str) -> None:
    """Where a recipe changes the context: perplexity and retrieval at the new one, in RUN/evaluation.

    "before" is the pretrained model as it is, "after" the one in RUN/model. The processes share the work.
    """
    if getattr(settings, "recipe", None) != "rope-extend":
        return
    from .evaluation import measure

    wait()  # until the first process has saved the model
    folder = Path(settings.output)
    results = folder / "evaluation" / when
    if (results / "lines.json").exists():  # the last one
        return
    disable_zero3_init()
    model = AutoModelForCausalLM.from_pretrained(settings.model if when == "before" else folder / "model")
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    say(f"{when}: {measure(model, tokenizer, rows, settings.sequence_length, results)}")


def save_model(trainer, tokenizer, settings: RunSettings, base: dict[str, str] | None) -> None:
    """Save the model and its tokenizer in RUN/model, which appears when it is complete.

    An adapter is RUN/model itself, or with `merge` RUN/adapter; it is then read again and merged into its base.
    """
    folder = Path(settings.output)
    unfinished = folder / ".model"
    if trainer.is_fsdp_enabled:  # whose checkpoints hold a part of the model for each process
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with explain_full_disk(trainer.model, unfinished):
        trainer.save_model(str(unfinished))
    if not trainer.is_world_process_zero():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nobody should have to trust
    if base is not None:
        from .adapters import load_adapter, save_fingerprint

        save_fingerprint(base, unfinished)
        if settings.merge:
            shutil.rmtree(folder / "adapter", ignore_errors=True)
            unfinished.rename(folder / "adapter")
            merged = load_adapter(load_changed_model(settings, tokenizer), folder / "adapter").merge_and_unload()
            merged.save_pretrained(unfinished)
    tokenizer.model_max_length = max(tokenizer.model_max_length, settings.sequence_length)  # now it is the model's
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder / "model")


def describe(settings: RunSettings, trainer, step: int) -> str:
    """What is trained, and how, in a few lines."""
    model, arguments = trainer.model, trainer.args
    lines = [f"{model.config.model_type}, {model.config._attn_implementation} attention; trained parameters:"]
    lines.append(describe_trainable(model))
    lines.append(
        f"{settings.steps} steps of {settings.batch_tokens} tokens: {settings.per_device_batch_size} rows of "
        f"{settings.sequence_length} tokens x {arguments.gradient_accumulation_steps} passes x "
        f"{settings.divide(arguments.world_size)} on {arguments.device.type}{', bfloat16' if arguments.bf16 else ''}"
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
    """A table of what is trained: parameters by the name of their module, and their share."""
    groups: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = " (LoRA)" if ".lora_" in name else ""
            module = re.sub(r"\.(weight|bias|default|modules_to_save|lora_\w+)(?=\.|$)", "", name).rsplit(".", 1)[-1]
            groups[module + kind] = groups.get(module + kind, 0) + parameter.numel()
    trained, total = sum(groups.values()), sum(parameter.numel() for parameter in model.parameters())
    lines = [f"  {name:28} {count:>13,}" for name, count in sorted(groups.items())]
    return "\n".join([*lines, f"  {'in all':28} {trained:>13,}, {trained / total:.2%} of {total:,}"])


def say(text: str) -> None:
    """Print on stderr, in one process only where several run."""
    if is_first_process():
        print(text, file=sys.stderr)


def is_first_process() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


class Progress(TrainerCallback):
    """A line every few seconds: step, loss, learning rate, speed, and the time that is left."""

    def __init__(self, batch_tokens: int):
        self.batch_tokens = batch_tokens

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin, self.first, self.printed = time.monotonic(), state.global_step, 0.0

    def on_log(self, args, state, control, logs=None, **kwargs):
        now = time.monotonic()
        last = state.global_step == state.max_steps
        if (
            not state.is_world_process_zero
            or "loss" not in logs
            or not (last or now - self.printed > SECONDS_BETWEEN_LINES)
        ):
            return
        self.printed = now
        seconds = (now - self.begin) / (state.global_step - self.first)
        print(
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  lr {logs['learning_rate']:.2e}  "
            f"grad {logs['grad_norm']:.2f}  {self.batch_tokens / seconds:.0f} tokens/s  "
            f"{(state.max_steps - state.global_step) * seconds / 60:.1f} min left",
            file=sys.stderr,
        )


__all__ = ["dry_run", "train"]
