"""The folder of a run, from which the same command goes on.

config.yaml      all settings
lock.json        what must stay when the run is resumed: settings, hashes of tokens, tokenizer, pretrained weights
data/            the packed tokens, which are the run's: the text may be moved
checkpoints/     complete ones only
metrics.jsonl    a line a step, see `ResumableTrainer`
model/           model and tokenizer, once all steps are done
old-N/           checkpoints of a run that --resume never has replaced, or the model of one that was made longer
"""

import errno
import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import get_last_checkpoint

from .progress import is_first_process, print_status
from .recipes import ResolvedSettings
from .settings import option


LOCK, METRICS = "lock.json", "metrics.jsonl"
IN_USE = ".in_use"  # locked by the process that trains in a folder
UNFINISHED = ".saving"
# Parts of a complete checkpoint: files, or folders where FSDP or DeepSpeed divides the model.
PARTS = {
    "weights": ("model*.safetensors", "adapter_model*", "pytorch_model*", "global_step*/*model_states.pt"),
    "optimizer": ("optimizer*", "global_step*/*optim_states.pt"),
    "schedule": ("scheduler.pt",),
    "random state": ("rng_state*",),
    "trainer state": ("trainer_state.json",),
}


def prepare_folder(folder: Path, resume: str) -> TextIO | None:
    """Make the folder of a run, and leave what it holds as it is.

    Returns:
        a file that keeps other processes out of the folder until it is closed, however this process ends; None in all
        processes of a training but the first.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"{folder} is a file or a broken link; --output is the folder of the run.")
    if (
        folder.is_dir()
        and {path.name for path in folder.iterdir()} - {IN_USE, "data"}
        and not (folder / LOCK).exists()
    ):
        raise ValueError(f"{folder} holds other files than those of a run; give --output a new folder.")
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
    for name in (".model", f"checkpoints/{UNFINISHED}"):  # of a run that was killed while it saved
        shutil.rmtree(folder / name, ignore_errors=True)
    return in_use


class RunLock:
    """What a run depends on: compared with the lock file as soon as it is known, written once all of it is.

    Args:
        folder: of the run.
        resume: as for `train`.

    Attributes:
        before: what the run in the folder depends on; empty if there is nothing to go on from.
    """

    def __init__(self, folder: Path, resume: str):
        self.folder, self.file = folder, folder / LOCK
        self.facts: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        checkpoints = folder / "checkpoints"
        if resume != "never" and (last_checkpoint(checkpoints) or (folder / "model").exists()):
            try:
                self.before = dict(json.loads(self.file.read_text()))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.file} is damaged ({error}); begin again with --resume never.") from error

    def lengthen(self, run: ResolvedSettings, step: int, keep_warmup: bool) -> bool:
        """Let the run in the folder have more steps, and return True, if no learning rate until now depends on them.

        Args:
            run: the new settings.
            step: the one to go on after.
            keep_warmup: the warmup is that of the old settings, not a share of the new steps.
        """
        steps = self.before.get("steps", run.steps)
        ends = {"constant": steps, "step": steps, "warmup_stable_decay": steps - steps // 10}
        if run.steps <= steps or step > ends.get(run.schedule, 0) or run.schedule != self.before["schedule"]:
            return False
        self.before["steps"] = run.steps
        if keep_warmup:
            run.warmup_steps = self.before["warmup_steps"]
        return True

    def check(self, **facts: Any) -> None:
        """Raise ValueError if the run in the folder depends on something else."""
        changed = [
            f"{option(name)}: {self.before[name]} -> {value}"
            for name, value in facts.items()
            if name in self.before and self.before[name] != value
        ]
        if changed:
            raise ValueError(
                f"{self.folder} holds a run with other settings ({'; '.join(changed)}). Go on with the old ones, take a "
                "new folder, or begin again with --resume never."
            )
        self.facts |= facts

    def write(self) -> None:
        """Write what was checked; to be called when nothing else can be refused.

        Where the run begins, the checkpoints of an older one and what belongs to them are moved to a folder old-N.
        """
        folder = self.folder
        if not self.before:
            of_a_run = [folder / name for name in ("checkpoints", "evaluation", LOCK, "config.yaml", METRICS)]
            if last_checkpoint(folder / "checkpoints"):
                set_aside(folder, *of_a_run)
            else:
                shutil.rmtree(folder / "evaluation", ignore_errors=True)
                (folder / METRICS).unlink(missing_ok=True)
        for source in sorted((folder / "data").glob("new_*.source")):
            name = source.stem.removeprefix("new_")
            (folder / "data" / f"{name}.flags.npy").unlink(missing_ok=True)
            for suffix in (".flags.npy", ".npy", ".source"):
                if source.with_suffix(suffix).exists():
                    source.with_suffix(suffix).rename(folder / "data" / f"{name}{suffix}")
        unfinished = self.file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.before | self.facts, indent=1) + "\n")
        unfinished.rename(self.file)


def set_aside(folder: Path, *paths: Path) -> None:
    """Move what exists of the paths to the first free folder old-N."""
    number = next(n for n in range(1, 10**6) if not (folder / f"old-{n}").exists())
    (folder / f"old-{number}").mkdir()
    for path in paths:
        if path.exists():
            path.rename(folder / f"old-{number}" / path.name)
    print_status(f"what {folder} held is in {folder / f'old-{number}'} now")


def find_checkpoint(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint to resume from, or None at the beginning."""
    if resume in ("auto", "never"):
        return last_checkpoint(folder) if resume == "auto" else None
    if Path(resume).resolve().parent != folder.resolve():
        raise ValueError(f"--resume is {resume}; it must be auto, never, or a checkpoint of this run, in {folder}.")
    return Path(resume)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint in a folder, or None."""
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return None if last is None else Path(last)


def remove_checkpoints_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step, which a run that is resumed from that step would mix with its own."""
    for checkpoint in folder.glob("checkpoint-*"):
        number = checkpoint.name.removeprefix("checkpoint-")
        if number.isdecimal() and int(number) > step:  # not a copy that a user has made
            shutil.rmtree(checkpoint)


def check_checkpoint(folder: Path) -> int:
    """Return the step of a checkpoint.

    Raises:
        ValueError: files are missing, or cut short.
    """
    missing = [part for part, patterns in PARTS.items() if not any(any(folder.glob(p)) for p in patterns)]
    if missing:
        raise ValueError(
            f"{folder} is not a complete checkpoint: {', '.join(missing)} missing. Resume from another one of the run."
        )
    damaged = [path.name for path in folder.rglob("*") if _is_damaged(path)]
    if damaged:
        raise ValueError(
            f"{folder} is damaged: {', '.join(damaged)} cannot be read. Remove this folder, and the run goes on from "
            "the checkpoint before it."
        )
    step = json.loads((folder / "trainer_state.json").read_text())["global_step"]
    if folder.name != f"checkpoint-{step}":
        raise ValueError(f"{folder} was saved after step {step}; name it checkpoint-{step} again.")
    return step


def _is_damaged(file):
    try:
        if file.suffix == ".safetensors":
            safe_open(file, "pt")
        elif file.suffix == ".json":
            json.loads(file.read_text())
    except (SafetensorError, ValueError):
        return True
    return file.suffix in (".pt", ".pth") and not zipfile.is_zipfile(file)  # torch.save writes archives


def truncate_metrics(folder: Path, step: int) -> None:
    """Remove the lines after a step of a run, and one that was being written when the run was killed."""
    lost = step - sum('"loss"' in line for line in truncate(folder / METRICS, step))
    if lost and (folder / METRICS).exists():
        print_status(
            f"{folder / METRICS} lacks the lines of {lost} steps before step {step}, which were not written to the disk"
        )


def truncate(metrics: Path, step: int) -> list[str]:
    """Remove the lines of a file after a step, and return those that stay."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    try:
        kept = [line for line in lines if line.strip() and line.endswith("\n") and json.loads(line)["step"] <= step]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{metrics} has a line that this training did not write ({error}). Remove the line, or the file."
        ) from error
    unfinished = metrics.with_suffix(".unfinished")
    unfinished.write_text("".join(kept))
    unfinished.rename(metrics)
    return kept


@contextmanager
def explain_full_disk(model, unfinished: Path) -> Iterator[None]:
    """Explain how many bytes are missing when saving a model or a checkpoint fills the disk.

    The unfinished folder is then removed.

    Raises:
        OSError: ENOSPC.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # of plain files, torch, safetensors
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        needed, folder = 3 * trained, unfinished.parent  # weights, and two moments of AdamW
        if shutil.disk_usage(folder).free > needed and "No space left" not in str(error):
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        message = (
            f"the disk is too full to save in {folder}: a checkpoint takes about {needed / 1e6:.0f} MB, and "
            f"{free / 1e6:.0f} MB are free. Make room, and the same command goes on from the last checkpoint"
        )
        raise OSError(errno.ENOSPC, message) from error


def flush(folder: str | Path) -> None:
    """Write all files of a folder to the disk, so that a power cut cannot leave a renamed folder of empty files."""
    for path in [*Path(folder).rglob("*"), Path(folder)]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


__all__ = [
    "UNFINISHED",
    "RunLock",
    "check_checkpoint",
    "explain_full_disk",
    "find_checkpoint",
    "flush",
    "last_checkpoint",
    "prepare_folder",
    "remove_checkpoints_after",
    "set_aside",
    "truncate_metrics",
]
