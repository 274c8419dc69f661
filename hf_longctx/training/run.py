"""A run: it begins, resumes where it was stopped, and ends with a model in its folder."""

import inspect
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PrinterCallback
from transformers.utils.generic import is_flash_attention_requested

from .adapters import add_lora, load_adapter, model_fingerprint, save_fingerprint
from .boundaries import boundaries, takes_boundaries
from .config import FinetuneConfig, PretrainConfig, RunConfig, parse, write_yaml
from .data import collate
from .loss_in_pieces import LossInPieces, fits
from .models import base_dtype, check_recipe, extend_rope, load_base, new_model, read_config
from .prepare import Datasets, prepare_datasets
from .run_folder import (
    RUN,
    MarkComplete,
    check_fingerprint,
    choose_checkpoint,
    claim,
    fingerprint,
    remove_other_checkpoints,
)
from .sequence_parallel import SequenceParallelTrainer, SequenceShard, check_arguments, check_model
from .trainer import FirstStep, LongContextTrainer, Progress, StopAtNaN, StopAtSignal


def train(args: RunConfig) -> int:
    """Pretrain or fine-tune a model, or resume the run in `args.output_dir`.

    Args:
        args: a `PretrainConfig` or a `FinetuneConfig`.

    Returns:
        0 when the model is complete, else the number of the signal that stopped the run.

    Raises:
        ValueError: the folder holds other files, a run with other settings, or one that another process trains; or the
            data are too short.
        FloatingPointError: a loss or a gradient is not finite.
        OSError: the disk is full, or a file cannot be read.
    """
    folder = Path(str(args.output_dir))
    check_processes(args)
    tokenizer = load_tokenizer(args)
    with args.main_process_first(local=False):
        in_use = claim(folder)  # closing the file would give the folder free
        if (folder / "model").exists():
            say(f"{folder} is finished: the model is in {folder / 'model'}.")
            return 0
        checkpoint = choose_checkpoint(folder, args.resume_from_checkpoint)
        datasets = prepare_datasets(args, tokenizer, reads_across_documents(args))
    model, base = make_model(args, tokenizer)
    config = model.config
    stop = StopAtSignal()
    trainer = make_trainer(args, model, datasets, stop)
    sharded_by = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed" if trainer.is_deepspeed_enabled else ""
    found = fingerprint(args, tokenizer, datasets.digest, config, base, sharded_by)
    if checkpoint is not None:
        check_fingerprint(folder, found)
    PartialState().wait_for_everyone()  # until all processes have read what the first one changes now
    if args.should_save:
        (folder / "config.yaml").write_text(write_yaml(args))
        (folder / RUN).write_text(json.dumps(found, indent=1) + "\n")
        remove_other_checkpoints(folder, checkpoint)
    PartialState().wait_for_everyone()
    say(describe(args, model, trainer, checkpoint))

    set_seed(args.seed, device_specific=True)  # each process has a dropout of its own
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        stop.restore()
    if trainer.state.global_step < trainer.state.max_steps:
        say(f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; the same command resumes.")
        return stop.signal
    save_model(args, trainer, tokenizer, base)
    trainer.accelerator.wait_for_everyone()  # a second stage may read the model in all processes
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    say(f"wrote {folder / 'model'}; the last loss is {losses[-1]:.4f}")
    if in_use is not None:
        in_use.close()
    return 0


def say(text: str) -> None:
    """Print on stderr, in the first process only."""
    if PartialState().is_main_process:
        print(text, file=sys.stderr)


def check_processes(args: RunConfig) -> None:
    """Raise ValueError if processes or devices would not do what the settings say."""
    check_arguments(args)
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs. Start `torchrun --nproc-per-node {args.n_gpu} -m hf_longctx "
            f"{args.command} ...` to use all, or set CUDA_VISIBLE_DEVICES=0."
        )
    if args.world_size % args.sequence_parallel:
        raise ValueError(
            f"`sequence_parallel` must divide the number of processes, {args.world_size}, got {args.sequence_parallel}: "
            f"torchrun --nproc-per-node {args.sequence_parallel} -m hf_longctx ..."
        )


def load_tokenizer(args: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the settings, by default that of the model."""
    name = args.tokenizer or args.model
    try:
        return AutoTokenizer.from_pretrained(name)  # ty: ignore[invalid-explicit-return] - never None
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--tokenizer {name} cannot be loaded ({str(error).splitlines()[0]}). Give the folder or Hub name of one."
        ) from error


def reads_across_documents(args: RunConfig) -> bool:
    """Return whether the model has a memory, which reads across the boundaries of documents."""
    if not isinstance(args, FinetuneConfig):
        return False
    config = read_config(str(args.model))
    check_recipe(args, config)  # before data are packed
    return args.recipe == "hmt" or config.model_type == "hmt"


def make_model(args: RunConfig, tokenizer) -> tuple[Any, dict[str, Any] | None]:
    """Return the model to train, and the fingerprint of the pretrained weights; None for a new model."""
    if isinstance(args, PretrainConfig):
        model, base = new_model(args, tokenizer), None
    else:
        assert isinstance(args, FinetuneConfig)
        if args.recipe == "rope-extend":
            say(extend_rope(read_config(str(args.model)), args))
        model = load_base(args, tokenizer)
        base = model_fingerprint(model)
    attention = args.attn_implementation
    if attention is None and model.config.model_type == "fox" and torch.cuda.is_available():
        attention = "auto"
    if attention is not None:
        model.set_attn_implementation(attention)
    if not isinstance(args, FinetuneConfig) or not args.use_peft:
        return model, base
    if args.adapter is None:
        return add_lora(model, args), base
    return load_adapter(model, args.adapter, trainable=True), base


def make_trainer(args: RunConfig, model: Any, datasets: Datasets, stop: StopAtSignal) -> LongContextTrainer:
    """Return the Trainer of a run, with a collator that makes a batch of what the model takes."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = inspect.signature(base.forward).parameters
    options: dict[str, Any] = {}
    if args.label_smoothing_factor == 0:  # which needs logits; the model's own loss does not
        if "return_logits" in parameters and base.get_output_embeddings().weight.requires_grad:  # needs a float32 head
            options["return_logits"] = False
        elif getattr(base, "reads_in_segments", False):
            options["logits_to_keep"] = 1
    without = () if "position_ids" in parameters else ("position_ids",)
    is_packed = args.packing and base.config.model_type not in ("fox", "hmt")
    gives_boundaries = is_packed and takes_boundaries(base)
    rows = max(args.per_device_train_batch_size, int(args.per_device_eval_batch_size or 1))
    if is_packed and is_flash_attention_requested(base.config) and not gives_boundaries and rows > 1:
        raise ValueError(
            f"With {args.attn_implementation}, {type(base).__name__} sees the boundaries of packed documents in passes of "
            "one sequence only. Give --per_device_train_batch_size 1, or --packing false."
        )
    collator: Any = partial(collate, without=without, options=options, add=boundaries if gives_boundaries else None)
    kind: Any = LongContextTrainer
    if args.sequence_parallel > 1:
        check_model(model, args.sequence_parallel)
        shard = SequenceShard(args.sequence_parallel)
        kind = partial(SequenceParallelTrainer, shard=shard)
        collator = partial(shard.collate, options=options)
    tokens = args.sequences_per_step * args.max_length
    trainer = kind(
        model=model,
        args=args,
        train_dataset=datasets.train,
        eval_dataset=datasets.evaluation,
        data_collator=collator,
        callbacks=[stop, StopAtNaN(), MarkComplete(), Progress(tokens)],
    )
    trainer.remove_callback(PrinterCallback)
    makes_logits = not options and args.label_smoothing_factor == 0
    if args.compile_layers:
        compile_layers(model)
        trainer.add_callback(FirstStep())
    if makes_logits and not trainer.is_deepspeed_enabled and fits(base):
        LossInPieces(base).__enter__()  # for the whole run; ZeRO-3 has the weights of the head only in its own call
    return trainer


def compile_layers(model: Any) -> None:
    """Compile the decoder layers in place: they share one graph, so the first step starts sooner than a whole model's.

    Layers are what transformers does not split between devices, `_no_split_modules`.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile()


def describe(args: RunConfig, model: Any, trainer: LongContextTrainer, checkpoint: Path | None) -> str:
    """Describe in two lines what is trained, and how."""
    trained, total = (model.num_parameters(only_trainable=flag) for flag in (True, False))
    begins = "from the beginning" if checkpoint is None else f"resuming {checkpoint.name}"
    name = f"{model.config.model_type} with {total:,} parameters, of which {trained:,} are trained"
    return (
        f"{name}; {model.config._attn_implementation} attention\n"
        f"{args.sequences_per_step} sequences of {args.max_length} tokens a step on {args.world_size} x "
        f"{args.device.type}{', bfloat16' if args.bf16 else ''}, {begins}"
    )


def save_model(args: RunConfig, trainer: LongContextTrainer, tokenizer, base: dict[str, Any] | None) -> None:
    """Save the model and its tokenizer in RUN/model, which appears when it is complete.

    An adapter is RUN/model itself, with its base where a recipe has changed that. With `merge`, it is RUN/adapter, and
    is read again and merged.
    """
    folder = Path(str(args.output_dir))
    unfinished = folder / ".model"
    if trainer.is_fsdp_enabled:  # whose checkpoints hold a part of the model for each process
        plugin: Any = trainer.accelerator.state.fsdp_plugin
        plugin.set_state_dict_type("FULL_STATE_DICT")
    model: Any = trainer.model
    broken = [name for name, p in model.named_parameters() if p.requires_grad and not p.isfinite().all()]
    if broken:
        raise FloatingPointError(
            f"After the last step {broken[0]} is not finite, and {len(broken) - 1} other tensors. Lower --learning_rate, "
            "and give another --output_dir."
        )
    trainer.save_model(str(unfinished))
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nobody should have to trust
    if isinstance(args, FinetuneConfig) and args.use_peft:
        assert base is not None
        save_fingerprint(base, unfinished)
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if args.merge:
            shutil.rmtree(folder / "adapter", ignore_errors=True)
            unfinished.rename(folder / "adapter")
            if not is_sharded:
                trainer.accelerator.unwrap_model(model).to("meta")  # two bases would not fit into memory
            save_merged(args, tokenizer, folder / "adapter", unfinished)
        elif args.recipe != "lora":
            adapted = None if is_sharded else trainer.accelerator.unwrap_model(model)
            save_with_base(args, tokenizer, adapted, unfinished, folder / "model")
    tokenizer.model_max_length = max(tokenizer.model_max_length, args.max_length)  # now it is the model's
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder / "model")


def save_merged(args: FinetuneConfig, tokenizer, adapter: Path, folder: Path) -> None:
    """Read an adapter and its base again, and save the model of both."""
    load_adapter(load_base(args, tokenizer), adapter).merge_and_unload().save_pretrained(folder)
    keep_dtype(args, folder)


def save_with_base(args: FinetuneConfig, tokenizer, model: Any, folder: Path, name: Path) -> None:
    """Save the base that a recipe has changed in the folder of its adapter, so that `from_pretrained` loads both.

    Args:
        model: the adapter around its base, which is taken apart; None reads the base again.
        folder: where the adapter is.
        name: of the folder, later.
    """
    base: Any = load_base(args, tokenizer) if model is None else model.unload()
    whole = re.compile("|".join(base._keep_in_fp32_modules_strict or ["$^"]))
    for parameter_name, parameter in base.named_parameters():  # unload has left what was trained in full, in float32
        if parameter.is_floating_point() and not whole.search(parameter_name):
            parameter.data = parameter.to(base_dtype(args))  # that of a quantized model is not cast when it is loaded
    base.save_pretrained(folder)
    keep_dtype(args, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(name.resolve())  # transformers takes what is in the folder, PEFT this name
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def keep_dtype(args: FinetuneConfig, folder: Path) -> None:
    """Write the dtype of the base into a saved config, where transformers has that of the first parameter."""
    config = AutoConfig.from_pretrained(folder)
    config.dtype = base_dtype(args)
    config.save_pretrained(folder)


def merge(run: str | Path, base: str | None = None, output: str | Path | None = None) -> Path:
    """Merge the adapter of a run into its base, such as the whole model of which the run has quantized a copy.

    Args:
        run: folder of a finished `hf-longctx finetune`.
        base: folder or Hub name of the pretrained model. Default: the one that the run began with.
        output: folder of the merged model. Default: RUN/merged.

    Returns:
        the folder of the merged model.

    Raises:
        ValueError: the run has no adapter, or one of another base; or `output` exists.
    """
    run = Path(run)
    adapter = next((run / n for n in ("adapter", "model") if (run / n / "adapter_config.json").exists()), None)
    if adapter is None or not (run / "config.yaml").exists():
        raise ValueError(f"{run} holds no adapter; give the folder of a finished run of `finetune` with LoRA.")
    target = run / "merged" if output is None else Path(output)
    if target.exists():
        raise ValueError(f"{target} exists already; give a new folder.")
    whole = ["--load_in_4bit", "false", "--load_in_8bit", "false", *(["--model", base] if base else [])]
    args = parse(FinetuneConfig, ["--config", str(run / "config.yaml"), *whole])
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    unfinished = target.with_name(f".{target.name}")
    save_merged(args, tokenizer, adapter, unfinished)
    tokenizer.save_pretrained(unfinished)  # ty: ignore[missing-union-attribute] - never None
    unfinished.rename(target)
    return target


__all__ = ["merge", "train"]
