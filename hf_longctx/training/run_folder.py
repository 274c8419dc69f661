"""A run's output folder. The same command resumes from this folder.

config.yaml         settings that differ from the defaults
run.json            everything that affects the losses, see `fingerprint`
data/               packed tokens
checkpoint-N/       Trainer's checkpoint; the file `complete` is written last
trainer_state.json  losses of all steps, written at the end
model/              model and tokenizer, written at the end
adapter/            the adapter, if it was merged into the model
"""

import dataclasses
import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, TextIO

from accelerate import PartialState
from transformers import TrainerCallback

from .config import RunConfig
from .digests import digest_of, digest_of_tokenizer


RUN, UNFINISHED_RUN, MODEL, IN_USE = "run.json", ".run.json", "model", ".in_use"
COMPLETE = "complete"  # empty file that marks a checkpoint as complete
# Settings that affect the saved model, but not the losses. They may change until the model is saved.
UNTIL_SAVED = {"merge", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"}
# Settings that do not affect the losses, or that another entry of the fingerprint covers
MAY_CHANGE = {
    "output_dir", "run_name", "data", "model", "tokenizer", "text_column", "set", "recipe",
    "resume_from_checkpoint", "sequence_parallel", "gradient_accumulation_steps", "attn_implementation", "use_cpu",
    "accelerator_config", "report_to", "disable_tqdm", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "push_to_hub",
    "skip_memory_metrics", "torch_empty_cache_steps", "debug", "local_rank",
}  # fmt: skip
MAY_CHANGE_FROM = (
    "save_", "logging_", "log_", "eval_", "do_", "hub_", "project", "trackio", "ddp_", "per_device_", "include_",
    "activation_checkpointing", "gradient_checkpointing",
)  # fmt: skip


def claim(folder: Path) -> TextIO | None:
    """Create and lock a run's folder, and remove incomplete files of a killed run.

    Returns:
        in the main process, an open file. It stays locked until it is closed or the process ends. In other processes,
        None.

    Raises:
        ValueError: the folder contains unrelated files, or another process is training in it.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"--output_dir must be a folder, got {folder}. This path is a file or a broken link.")
    before_training = {IN_USE, UNFINISHED_RUN, "data"}
    if folder.is_dir() and {path.name for path in folder.iterdir()} - before_training and not (folder / RUN).exists():
        raise ValueError(f"{folder} contains files that do not belong to a run; give a new --output_dir.")
    if not PartialState().is_main_process:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    in_use = open(folder / IN_USE, "w")  # noqa: SIM115 - stays open during the run
    try:
        fcntl.lockf(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"Another process is training in {folder}. Wait until it ends, or give a new --output_dir."
        ) from error
    shutil.rmtree(folder / ".model", ignore_errors=True)
    for path in folder.glob("checkpoint-*"):
        if path.name.removeprefix("checkpoint-").isdigit() and not (path / COMPLETE).exists():
            shutil.rmtree(path)  # the run was killed while it saved
    return in_use


def fingerprint(args: RunConfig, tokenizer, data: str, config: Any, base: Any, sharded_by: str) -> dict[str, Any]:
    """Return a dict of the settings and hashes that determine a run's losses and its model.

    Args:
        data: hash of the training data.
        config: the model's config.
        base: `model_fingerprint` of the pretrained weights; None for a new model.
        sharded_by: "FSDP", "DeepSpeed" or "".
    """
    names = {entry.name for entry in dataclasses.fields(args) if entry.init} - MAY_CHANGE
    settings = {name: getattr(args, name) for name in names if not name.startswith(MAY_CHANGE_FROM)}
    described = json.dumps(config.to_diff_dict(), default=str, sort_keys=True)
    described = re.sub(r'"(transformers_version|dtype|\w*name_or_path)": "[^"]*"', "", described)
    facts = {
        "sequences_per_step": args.sequences_per_step,
        "data": data,
        "model": digest_of([described, base]),
        "tokenizer": digest_of_tokenizer(tokenizer),
        "sharded_by": sharded_by,
    }
    return json.loads(json.dumps(settings | facts, default=str, sort_keys=True))


def check_fingerprint(folder: Path, found: dict[str, Any]) -> None:
    """Raise ValueError if the folder contains a run with a different fingerprint.

    Until the run's model is saved, the settings in `UNTIL_SAVED` may differ.
    """
    try:
        before = dict(json.loads((folder / RUN).read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / RUN} is damaged ({error}); give another --output_dir.") from error
    is_finished = (folder / MODEL).exists()
    changed = [
        f"{name}: {before[name]} -> {found[name]}"
        for name in found
        if before.get(name, found[name]) != found[name] and (is_finished or name not in UNTIL_SAVED)
    ]
    if changed and is_finished:
        raise ValueError(
            f"{folder} contains a finished run with other settings ({'; '.join(changed)}). Give another --output_dir. "
            "To train the finished model further, also give it as the --model of hf-longctx finetune: "
            f"--model {folder / MODEL}."
        )
    if changed:
        raise ValueError(
            f"{folder} contains a run with other settings ({'; '.join(changed)}). Resume with the old settings, or give "
            "another --output_dir."
        )


def write_fingerprint(folder: Path, found: dict[str, Any]) -> None:
    """Write a run's fingerprint atomically."""
    (folder / UNFINISHED_RUN).write_text(json.dumps(found, indent=1) + "\n")
    (folder / UNFINISHED_RUN).rename(folder / RUN)


class MarkComplete(TrainerCallback):
    """Mark a checkpoint as complete after all processes have written their files."""

    def on_save(self, args, state, control, **kwargs):
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            Path(args.output_dir, f"checkpoint-{state.global_step}", COMPLETE).touch()


__all__ = ["MODEL", "MarkComplete", "check_fingerprint", "claim", "fingerprint", "write_fingerprint"]
