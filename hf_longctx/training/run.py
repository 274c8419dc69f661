"""Start or resume a training run, and save the model in the run's folder."""

import copy
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import AutoConfig, AutoTokenizer, ProgressCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.generic import is_flash_attention_requested

from .adapters import BASE, add_lora, load_adapter, model_fingerprint
from .chunked_loss import chunk_loss
from .config import FinetuneConfig, RunConfig
from .data import collate, load_datasets
from .models import check_flash_attention, make_config, make_model
from .run_folder import MODEL, MarkComplete, check_fingerprint, claim, fingerprint, write_fingerprint
from .sequence_parallel import SequenceParallelTrainer, SequenceShard, check_model
from .trainer import LongContextTrainer, Progress, StopAtNaN, StopAtSignal


def train(args: RunConfig) -> int:
    """Pretrain or fine-tune a model, or resume the run in `args.output_dir`.

    Args:
        args: a `PretrainConfig` or a `FinetuneConfig`.

    Returns:
        0 if training finished. If a signal stopped the run, the signal's number.

    Raises:
        ValueError: the folder contains unrelated files, or a run with other settings; another process is training in
            the folder; or the data are too short.
        FloatingPointError: a loss or a gradient is not finite.
        OSError: the disk is full, or a file cannot be read.
    """
    folder = Path(args.output_dir)
    if args.n_gpu > 1:
        raise ValueError(
            f"One process has {args.n_gpu} GPUs. Start `torchrun --nproc-per-node {args.n_gpu} -m hf_longctx "
            f"{args.command} ...` to use all of them, or set CUDA_VISIBLE_DEVICES=0."
        )
    settings: Any = args  # both config classes have a `model`
    tokenizer: Any = AutoTokenizer.from_pretrained(args.tokenizer or settings.model)
    config = make_config(args, tokenizer)
    with args.main_process_first(local=False):
        in_use = claim(folder)  # closing this file would unlock the folder
        checkpoint, is_finished = get_last_checkpoint(folder), (folder / MODEL).exists()
        training, evaluation, data = load_datasets(args, tokenizer, is_one_document=config.model_type == "hmt")
    model = make_model(args, copy.deepcopy(config))
    base = model_fingerprint(model) if isinstance(args, FinetuneConfig) else None
    if isinstance(args, FinetuneConfig) and args.use_peft:
        model = add_lora(model, args)
    trainer = make_trainer(args, model, training, evaluation)
    sharded_by = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed" if trainer.is_deepspeed_enabled else ""
    found = fingerprint(args, tokenizer, data, model.config, base, sharded_by)
    if checkpoint is not None or is_finished:
        check_fingerprint(folder, found)
    if is_finished:
        PartialState().print(f"{folder} is finished: the model is in {folder / MODEL}.", file=sys.stderr)
        args.get_recipe().finish(args, trainer, tokenizer, folder / MODEL)
        return 0
    if checkpoint is not None:
        # a callback may have finished the run before `max_steps`
        args.max_steps = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json"))).max_steps
    if args.should_save:
        write_fingerprint(folder, found)
        given = {name: value for name, value in args.given.items() if not name.endswith("_token")}  # no secrets
        # the JSON round trip converts enum members to strings
        (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(given))))
    trained, total = (model.num_parameters(only_trainable=flag) for flag in (True, False))
    PartialState().print(
        f"{model.config.model_type} with {total:,} parameters, of which {trained:,} are trained; "
        f"{model.config._attn_implementation} attention\n"
        f"{args.sequences_per_step} sequences of {args.max_length} tokens a step on {args.world_size} x "
        f"{args.device.type}{', bfloat16' if args.bf16 else ''}{', compiled layers' if args.compile_layers else ''}, "
        f"{'from the beginning' if checkpoint is None else f'resuming {Path(checkpoint).name}'}",
        file=sys.stderr,
    )
    set_seed(args.seed, device_specific=True)  # different dropout in each process
    stop = StopAtSignal()
    trainer.add_callback(stop)
    with stop.handle_signals():
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.state.global_step < trainer.state.max_steps:
        PartialState().print(
            f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; the same command resumes.",
            file=sys.stderr,
        )
        return stop.signal
    save_model(args, config, trainer, tokenizer, base)
    trainer.accelerator.wait_for_everyone()  # a second training stage may load the model in all processes
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    PartialState().print(f"wrote {folder / MODEL}; the last loss is {losses[-1]:.4f}", file=sys.stderr)
    args.get_recipe().finish(args, trainer, tokenizer, folder / MODEL)
    if in_use is not None:
        in_use.close()
    return 0


def make_trainer(args: RunConfig, model: Any, training: Any, evaluation: Any) -> LongContextTrainer:
    """Create the Trainer of a run, with the collator that the model needs."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    options: dict[str, Any] = {}
    kind: Any = args.get_recipe().trainer
    has_own_loss = kind.compute_loss is not LongContextTrainer.compute_loss
    if args.label_smoothing_factor == 0 and not has_own_loss and getattr(base, "reads_in_segments", False):
        options["logits_to_keep"] = 1  # label smoothing needs the logits
    flat = args.packing and base.config.model_type not in ("fox", "hmt") and is_flash_attention_requested(base.config)
    if flat:
        check_flash_attention(base)
        args.per_device_eval_batch_size = 1  # in evaluation, Trainer would count a flat batch as one sequence
    collator: Any = partial(collate, options=options, flat=flat)
    if args.sequence_parallel > 1:
        if kind is not LongContextTrainer:
            raise ValueError(
                f"`sequence_parallel` must be 1 for the recipe {args.recipe}, got {args.sequence_parallel}."
            )
        check_model(model, args.sequence_parallel)
        shard = SequenceShard(args.sequence_parallel)
        kind = partial(SequenceParallelTrainer, shard=shard)
        collator = partial(shard.collate, options=options)
    trainer = kind(
        model=model,
        args=args,
        train_dataset=training,
        eval_dataset=evaluation,
        data_collator=collator,
        callbacks=[StopAtNaN(), MarkComplete()],
    )
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(Progress)
    for name in ("cp_size", "sp_size"):
        if (size := getattr(getattr(trainer.accelerator, "parallelism_config", None), name, 1)) > 1:
            raise ValueError(
                f"{name} in accelerate's parallelism_config must be 1, got {size}. accelerate splits sequences, but "
                f"does not exchange gates, token shift and memory. For a FoX, use --sequence_parallel {size}."
            )
    if args.compile_layers:
        compile_layers(model)
    # ZeRO-3 gathers the head's weights only in the head's own forward
    if not (options or has_own_loss or args.label_smoothing_factor or trainer.is_deepspeed_enabled):
        chunk_loss(base)
    return trainer


def compile_layers(model: Any) -> None:
    """Compile each decoder layer in place. The layers share one graph, so this is faster than compiling the model.

    Decoder layers are the modules whose classes are listed in transformers' `_no_split_modules`.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile()


def save_model(args: RunConfig, config: Any, trainer: LongContextTrainer, tokenizer, base: dict | None) -> None:
    """Save the model and its tokenizer atomically in RUN/model.

    A merged adapter is also saved in RUN/adapter. An unmerged adapter is saved in RUN/model, together with the base if
    the recipe changes the base.
    """
    folder = Path(args.output_dir)
    unfinished = folder / ".model"
    if trainer.is_fsdp_enabled:  # otherwise FSDP saves one shard per process
        plugin: Any = trainer.accelerator.state.fsdp_plugin
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(unfinished))
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # loading this pickle could run any code
    if isinstance(args, FinetuneConfig) and args.use_peft:
        (unfinished / BASE).write_text(json.dumps(base, indent=1) + "\n")
        if args.merge:
            shutil.rmtree(folder / "adapter", ignore_errors=True)
            unfinished.rename(folder / "adapter")
            is_plain = not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
            if is_plain and not (args.load_in_4bit or args.load_in_8bit):
                # free the model, because two copies of the base may not fit into memory
                trainer.accelerator.unwrap_model(trainer.model).to("meta")
            save_base(args, config, unfinished, adapter=folder / "adapter")
        elif args.get_recipe().changes_base:
            save_base(args, config, unfinished)
            file = unfinished / "adapter_config.json"  # PEFT loads the base that this file names
            name = {"base_model_name_or_path": str((folder / MODEL).resolve())}
            file.write_text(json.dumps(json.loads(file.read_text()) | name, indent=2, sort_keys=True))
    # the model was trained on sequences of this length
    tokenizer.model_max_length = max(tokenizer.model_max_length, args.max_length)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder / MODEL)


def save_base(args: FinetuneConfig, config: Any, folder: Path, adapter: Path | None = None) -> None:
    """Reload the base, apply the recipe, merge the adapter if one is given, and save the model."""
    if adapter is not None:  # merge into the unquantized weights
        args.load_in_4bit = args.load_in_8bit = False
    model, dtype = make_model(args, copy.deepcopy(config)), config.dtype
    if adapter is not None:
        model = load_adapter(model, adapter).merge_and_unload()
    model.save_pretrained(folder)
    saved = AutoConfig.from_pretrained(folder)
    saved.dtype = dtype  # save_pretrained wrote the dtype of the first parameter
    saved.save_pretrained(folder)


__all__ = ["train"]
