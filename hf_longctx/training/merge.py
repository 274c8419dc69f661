"""What becomes of an adapter: merged into its base, at the end of a run or later, or saved beside it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from .adapters import load_adapter
from .model_init import base_dtype, load_changed_model
from .recipes import FinetuneSettings, ResolvedFinetuning
from .settings import read_settings


def merge(run: str | Path, base: str | None = None, output: str | Path | None = None) -> Path:
    """Merge the adapter of a run into its base, such as the whole model of which the run has quantized a copy.

    Args:
        run: folder of a run of `finetune`, which is finished.
        base: folder or Hub name of the pretrained model. Default: the one that the run began with.
        output: folder of the merged model. Default: RUN/merged.

    Returns:
        the folder of the merged model.

    Raises:
        ValueError: the run has no adapter, or one of another base; the base is quantized; `output` exists.
    """
    run = Path(run)
    adapter = next((run / n for n in ("adapter", "model") if (run / n / "adapter_config.json").exists()), None)
    if adapter is None or not (run / "config.yaml").exists():
        raise ValueError(
            f"{run} holds no adapter; give the folder of a run of `finetune` that is finished, with LoRA."
        )
    target = run / "merged" if output is None else Path(output)
    if target.exists():
        raise ValueError(f"{target} exists already; give a new folder.")
    settings = read_settings(FinetuneSettings, run / "config.yaml", {})
    whole = dict(model=base or settings.model, load_in_4bit=False, load_in_8bit=False, merge=True)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    unfinished = target.with_name(f".{target.name}")
    save_merged(dataclasses.replace(settings, **whole).resolve(), tokenizer, adapter, unfinished)
    tokenizer.save_pretrained(unfinished)  # ty: ignore[missing-union-attribute] - never None
    unfinished.rename(target)
    return target


def save_merged(run: ResolvedFinetuning, tokenizer, adapter: Path, folder: Path) -> None:
    """Read an adapter and its base again, and save the model of both."""
    model = load_adapter(load_changed_model(run, tokenizer), adapter).merge_and_unload()
    model.save_pretrained(folder)
    keep_dtype(run, folder)


def save_with_base(run: ResolvedFinetuning, tokenizer, model: Any, folder: Path, name: Path) -> None:
    """Save beside an adapter the base that a recipe has changed, so that `from_pretrained` of the folder loads both.

    Args:
        model: the adapter around its base, which is taken apart; None reads the base again.
        folder: where the adapter is.
        name: of the folder, later.
    """
    base: Any = load_changed_model(run, tokenizer) if model is None else model.unload()
    whole = re.compile("|".join(base._keep_in_fp32_modules_strict or ["$^"]))
    for parameter_name, parameter in base.named_parameters():  # unload has left what was trained in full, in float32
        if parameter.is_floating_point() and not whole.search(parameter_name):
            parameter.data = parameter.to(base_dtype(run))  # that of a quantized model is not cast when it is loaded
    base.save_pretrained(folder)
    keep_dtype(run, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(name.resolve())  # transformers takes what is beside it, PEFT this name
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def keep_dtype(run: ResolvedFinetuning, folder: Path) -> None:
    """Write the dtype of the base into a saved configuration, where transformers has that of the first parameter."""
    config = AutoConfig.from_pretrained(folder)
    config.dtype = base_dtype(run)
    config.save_pretrained(folder)


__all__ = ["merge", "save_merged", "save_with_base"]
