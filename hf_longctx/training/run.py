"""A training run: it begins, goes on where it was stopped, and ends with a model in its folder."""

import dataclasses
import inspect
import math
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainingArguments,
)
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.utils import is_bitsandbytes_available

from ..corpus import split_mixture
from ..metrics.run.distributed import wait
from .data import stack
from .model_init import (
    build_new_model,
    check_attention,
    disable_zero3_init,
    extend_rope,
    in_bfloat16,
    load_changed_model,
    quantization,
)
from .prepare import Datasets, digest_of, prepare_datasets
from .progress import Progress, describe, is_first_process, print_status
from .recipes import ResolvedFinetuning, ResolvedSettings, ResolvedTraining, RunSettings
from .run_folder import (
    METRICS,
    RunLock,
    check_checkpoint,
    explain_full_disk,
    find_checkpoint,
    prepare_folder,
    remove_checkpoints_after,
    set_aside,
    truncate_metrics,
)
from .sequence_parallel import SequenceShard, check_model
from .settings import locked, write_settings
from .streams import StreamTrainer
from .trainer import ResumableTrainer, StopAtSignal


MANY_ROWS = 1000  # the gradient of a gate is proportional to 1 / decay time, and 1e-7 of the others' at 1e5 rows
PATIENCE = 7 * 24 * 3600  # seconds in which the other processes wait for the first one, which packs and measures
SCHEDULERS = {"constant": "constant_with_warmup", "step": "constant"}  # names of ours, and of transformers


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
        ValueError: a setting is out of its range; the folder holds other files, a run with other settings, one that
            another process trains, or a damaged checkpoint; or the data are too short.
        FloatingPointError: the gradients are not finite.
        OSError: the disk is full, or a file cannot be read.
    """
    run = settings.resolve()
    folder = Path(run.output)
    arguments = training_arguments(run, folder, trial)
    tokenizer = load_tokenizer(run.tokenizer)
    check_attention(run, tokenizer)
    with arguments.main_process_first(local=False):
        in_use = prepare_folder(folder, resume)  # noqa: F841 - closing the file would give the folder free
        lock = RunLock(folder, resume)
        if settings.epochs is not None:
            rows: Any = prepare_datasets(run, tokenizer, lock).train
            steps = math.ceil(settings.epochs * len(rows) * run.sequence_length / run.batch_tokens)
            settings = dataclasses.replace(settings, steps=steps, epochs=None)
            run = settings.resolve()
            arguments = training_arguments(run, folder, trial)
        checkpoint = find_checkpoint(folder / "checkpoints", resume)
        step = 0 if checkpoint is None else check_checkpoint(checkpoint)
        is_longer = lock.lengthen(run, step, keep_warmup=settings.warmup_steps is None)
        lock.check(**locked(run), tokenizer=digest_of(tokenizer.get_vocab()))
        datasets = prepare_datasets(run, tokenizer, lock)
    wait()  # until all processes have looked at the folder, which the Trainer of the first one writes into
    measured = datasets.train if datasets.evaluation is None else datasets.evaluation
    if (folder / "model").exists() and not is_longer:
        evaluate_context(run, tokenizer, measured, "after")
        print_status(f"{folder} is finished: the model is in {folder / 'model'}.")
        return 0

    model, base = make_model(run, tokenizer, lock)
    stops = StopAtSignal(run.max_hours)
    trainer = make_trainer(run, model, tokenizer, arguments, datasets, stops)
    if checkpoint is not None:
        trainer.check_sharding(checkpoint)
    wait()  # until all processes have read what the first one changes now
    if is_first_process():
        if is_longer:
            set_aside(folder, folder / "model", folder / "adapter", folder / "evaluation" / "after")
        lock.write()
        (folder / "config.yaml").write_text(write_settings(run))
        truncate_metrics(folder, step)
        remove_checkpoints_after(folder / "checkpoints", step)
    print_status(describe(run, trainer, arguments, step))
    if step == 0 and not trial:
        evaluate_context(run, tokenizer, measured, "before")

    set_seed(run.seed, device_specific=True)  # each process has a dropout of its own
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        stops.restore()
    if trainer.state.global_step < run.steps:
        print_status(f"stopped after step {trainer.state.global_step} of {run.steps}; the same command goes on.")
        return stops.signal
    if not trial:
        if run.keep_best:
            trainer.load_best()
        save_model(trainer, tokenizer, run, base)
        trainer.accelerator.wait_for_everyone()  # a second stage may read the model in all processes
        evaluate_context(run, tokenizer, measured, "after")
        print_status(f"wrote the model to {folder / 'model'}")
    return 0


def dry_run(settings: RunSettings) -> None:
    """Train three steps in a folder that is thrown away, and print how fast they were and what memory they took."""
    run = settings.resolve()
    with tempfile.TemporaryDirectory() as folder:
        first = split_mixture(run.data)[0][0]
        streaming = not (run.carry_state or first.endswith(".npy"))
        changes: dict[str, Any] = dict(
            data=first,
            keep_best=False,
            eval_data=None,
            eval_steps=RunSettings.eval_steps,
            streaming=streaming,
        )
        short = dataclasses.replace(run, output=folder, steps=3, epochs=None, warmup_steps=0, **changes)
        train(short, trial=True)
    if torch.accelerator.is_available():
        peak = torch.accelerator.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print_status(f"peak memory {peak / 2**20:.0f} MiB; the run itself has {run.steps} steps. Nothing was written.")


def training_arguments(run: ResolvedSettings, folder: Path, trial: bool = False) -> TrainingArguments:
    """Translate the settings for Trainer; this joins the other processes."""
    accelerator = torch.accelerator.is_available()
    new_name = "activation_checkpointing"  # before transformers 5.23 or so: gradient_checkpointing
    checkpointing = new_name if hasattr(TrainingArguments, new_name) else "gradient_checkpointing"
    by_version: dict[str, Any] = {checkpointing: run.activation_checkpointing}
    layers = {"every_n_layers": run.checkpointed_layers, "offload": run.offload_activations}
    if layers != {"every_n_layers": 1, "offload": False}:
        by_version[f"{checkpointing}_kwargs"] = {"use_reentrant": False, **layers}
    if "8bit" in run.optimizer:
        if not is_bitsandbytes_available():
            raise ImportError(f"--optimizer {run.optimizer} needs bitsandbytes: pip install 'hf-longctx[quantized]'")
        by_version["optim"] = run.optimizer
    decay = {"num_decay_steps": run.steps // 10, "decay_type": "1-sqrt"}
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=run.steps,
        per_device_train_batch_size=run.per_device_batch_size,
        per_device_eval_batch_size=run.per_device_batch_size,
        learning_rate=run.learning_rate,
        lr_scheduler_type=SCHEDULERS.get(run.schedule, run.schedule),
        lr_scheduler_kwargs=decay if run.schedule == "warmup_stable_decay" else {},
        warmup_steps=run.warmup_steps,
        weight_decay=run.weight_decay,
        torch_compile=run.compile,
        adam_beta1=run.adam_beta1,
        adam_beta2=run.adam_beta2,
        max_grad_norm=run.max_grad_norm,
        bf16=in_bfloat16(run),
        use_cpu=not accelerator,
        seed=run.seed,
        data_seed=run.seed,
        save_strategy="no" if trial else "steps",
        save_steps=run.save_steps,
        save_total_limit=run.keep_checkpoints,
        eval_strategy="no" if run.eval_data is None else "steps",
        eval_steps=run.eval_steps,
        prediction_loss_only=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=check_reports(run.report_to),
        disable_tqdm=True,
        dataloader_pin_memory=accelerator,
        remove_unused_columns=False,  # rows hold what the model or its Trainer takes
        ddp_timeout=PATIENCE,
        ddp_find_unused_parameters=False,
        # processes that share rows each read them, instead of a part of what the first one reads
        accelerator_config={"dispatch_batches": False} if run.sequence_parallel > 1 else None,
        **by_version,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # else Trainer reads a batch for each GPU in one process
    arguments.gradient_accumulation_steps = run.accumulation(arguments.world_size)
    return arguments


def check_reports(names: str | None) -> list[str]:
    """Return what a training is reported to; raises ImportError for what is not installed."""
    reports = [] if names is None else [name.strip() for name in names.split(",")]
    for name in reports:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"--report-to names {name}; transformers has {', '.join(INTEGRATION_TO_CALLBACK)}.")
        if name not in get_available_reporting_integrations():
            raise ImportError(f"--report-to {name} needs another package: pip install {name}")
    return reports


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer, or raise ValueError."""
    try:
        return AutoTokenizer.from_pretrained(name)  # ty: ignore[invalid-explicit-return] - never None
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--tokenizer {name} cannot be loaded ({str(error).splitlines()[0]}). Name the folder of a tokenizer, or one "
            "of the Hub."
        ) from error


def make_model(run: ResolvedSettings, tokenizer, lock: RunLock) -> tuple[Any, dict[str, str] | None]:
    """Return the model to train, and the fingerprint of its adapter's base (None if all parameters are trained)."""
    if isinstance(run, ResolvedTraining):
        return build_new_model(run, tokenizer), None
    assert isinstance(run, ResolvedFinetuning)
    if run.recipe == "rope-extend":
        print_status(extend_rope(AutoConfig.from_pretrained(run.model), run))
    if run.recipe == "fox-from-llama" and run.decay_time and run.decay_time > MANY_ROWS * run.sequence_length:
        print_status(
            f"gates that forget after {run.decay_time:g} tokens hardly learn from rows of {run.sequence_length}"
        )
    model = load_changed_model(run, tokenizer)
    from .adapters import adapter_digest, add_lora, load_adapter, model_fingerprint

    base = model_fingerprint(model)
    lock.check(model=base["weights"])
    if run.adapter is not None:
        lock.check(adapter=adapter_digest(run.adapter))
        return load_adapter(model, run.adapter, trainable=True), base
    return (model, None) if run.full else (add_lora(model, run), base)


def make_trainer(
    run: ResolvedSettings, model, tokenizer, arguments: TrainingArguments, datasets: Datasets, stops: StopAtSignal
) -> ResumableTrainer:
    """Return the Trainer of a run, for a model whose rows one process or several have."""
    shard = None
    if run.sequence_parallel > 1:
        check_model(model, run.sequence_parallel)
        shard = SequenceShard(run.sequence_parallel)
    progress = Progress(run.batch_tokens, has_epochs=hasattr(datasets.train, "__len__"))
    trainer = (StreamTrainer if run.carry_state else ResumableTrainer)(
        model=model,
        args=arguments,
        train_dataset=datasets.train,
        eval_dataset=datasets.evaluation,
        data_collator=choose_collator(model, run) if shard is None else shard.collate,
        metrics=Path(run.output) / METRICS,
        shard=shard,
        stops=stops,
        batch_tokens=run.batch_tokens,
        gate_learning_rate=run.gate_learning_rate,
        decays_in_steps=run.schedule == "step",
        keeps_best=run.keep_best,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def choose_collator(model, run: ResolvedSettings) -> Callable:
    """Return a collator that makes a batch of what the model, or its Trainer, takes."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    without = () if "position_ids" in inspect.signature(base.forward).parameters else ("position_ids",)
    return partial(stack, without=without if run.packing else ("stream", "begins"))


def evaluate_context(run: ResolvedSettings, tokenizer, rows: Dataset, when: str) -> None:
    """Measure loss and retrieval at the new context of a `rope-extend` with `eval_context`, in RUN/evaluation.

    "before" is the pretrained model as it is, "after" the one in RUN/model. The processes share the work.
    """
    if not (isinstance(run, ResolvedFinetuning) and run.recipe == "rope-extend" and run.eval_context):
        return
    from .evaluation import measure

    wait()  # until the first process has saved the model
    folder = Path(run.output)
    results = folder / "evaluation" / when
    if (results / "lines.json").exists():  # the last one
        return
    disable_zero3_init()
    name, options = (run.model, quantization(run)) if when == "before" else (folder / "model", {})
    model: Any = AutoModelForCausalLM.from_pretrained(name, **options)
    if torch.accelerator.is_available() and not getattr(model, "is_quantized", False):
        model.to(torch.accelerator.current_accelerator())
    print_status(f"{when}: {measure(model, tokenizer, rows, run.sequence_length, results)}")


def save_model(trainer: ResumableTrainer, tokenizer, run: ResolvedSettings, base: dict[str, str] | None) -> None:
    """Save the model and its tokenizer in RUN/model, which appears when it is complete.

    An adapter is RUN/model itself, beside its base where a recipe has changed that; or with `merge` RUN/adapter, which
    is then read again and merged.
    """
    folder = Path(run.output)
    unfinished = folder / ".model"
    if trainer.is_fsdp_enabled:  # whose checkpoints hold a part of the model for each process
        plugin: Any = trainer.accelerator.state.fsdp_plugin
        plugin.set_state_dict_type("FULL_STATE_DICT")
    model: Any = trainer.model
    broken = [name for name, p in model.named_parameters() if p.requires_grad and not p.isfinite().all()]
    if broken:
        raise FloatingPointError(
            f"after the last step {broken[0]} is not finite, and {len(broken) - 1} other tensors. No model is written; "
            "lower --learning-rate, and begin again with --resume never."
        )
    with explain_full_disk(model, unfinished):
        trainer.save_model(str(unfinished))
    if not trainer.is_world_process_zero():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nobody should have to trust
    if base is not None:
        assert isinstance(run, ResolvedFinetuning)
        from .adapters import save_fingerprint
        from .merge import save_merged, save_with_base

        save_fingerprint(base, unfinished)
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if run.merge:
            shutil.rmtree(folder / "adapter", ignore_errors=True)
            unfinished.rename(folder / "adapter")
            if not is_sharded:
                trainer.accelerator.unwrap_model(model).to("meta")  # two bases would not fit into memory
            save_merged(run, tokenizer, folder / "adapter", unfinished)
        elif run.recipe != "lora":
            adapted = None if is_sharded else trainer.accelerator.unwrap_model(model)
            save_with_base(run, tokenizer, adapted, unfinished, folder / "model")
    tokenizer.model_max_length = max(tokenizer.model_max_length, run.sequence_length)  # now it is the model's
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder / "model")


__all__ = ["dry_run", "train", "training_arguments"]
