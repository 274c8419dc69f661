"""LoRA adapters with PEFT, and checks for mistakes that PEFT does not report."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model

from .config import FinetuneConfig, nearest


BASE = "base.json"  # file with the fingerprint of the base model, in an adapter's folder


def add_lora(model, args: FinetuneConfig) -> PeftModel:
    """Add a new LoRA adapter to a model.

    The adapter is float32. Modules that are trained in full, without LoRA, are float32 too.

    Raises:
        ValueError: the settings name a module that the model does not have, or merging would corrupt tied embeddings.
    """
    config = getattr(model.config, "backbone_config", model.config)  # the model inside an HMT has its own config
    targets, in_full = args.lora_target_modules or ["all-linear"], args.lora_modules_to_save
    names = {name for name, _ in _leaves(model)}
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {name for name, module in _leaves(model) if any(module is other for other in modules)}
    if in_full is None:
        in_full = args.get_recipe().modules_to_save(model)
    for option, given in (("--lora_target_modules", targets), ("--lora_modules_to_save", in_full)):
        for name in given:
            if name not in names | {"all-linear"}:
                raise ValueError(f"{option} must name modules of this model, got {name}. {nearest(name, names)}")
    if config.tie_word_embeddings and embeddings & set(targets):
        raise ValueError(
            "This model ties its input and output embeddings. Merging an adapter of "
            f"{' or '.join(sorted(embeddings))} would therefore change both. Train the embeddings without an adapter: "
            "--lora_modules_to_save."
        )
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        modules_to_save=in_full or None,
        ensure_weight_tying=bool(config.tie_word_embeddings and embeddings & set(in_full)),
    )
    _widen(model, in_full)
    if args.get_recipe().changes_base:
        model.name_or_path = None  # the base is not the checkpoint of this name, so the adapter must not name it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT 0.21 reads a property that transformers 5.23 renamed
        return get_peft_model(model, lora)


def model_fingerprint(model, names: list[str] | None = None) -> dict[str, Any]:
    """Return a dict that identifies a base model: its architecture, and a hash of sampled weights.

    Weights are rounded to bfloat16, so that the dtype of the base does not matter.

    Args:
        names: names of the parameters to hash. Default: all unquantized parameters.
    """
    config = model.config
    digest = hashlib.sha256()
    parameters = dict(model.named_parameters())
    if names is None:
        names = sorted(name for name, parameter in parameters.items() if parameter.is_floating_point())
    for name in names:
        if name in parameters:
            parameter = parameters[name].detach().flatten()
            sample = parameter[:: max(1, len(parameter) // 4096)].bfloat16().float().cpu()
            digest.update(name.encode() + sample.numpy().tobytes())
    shape = {n: getattr(config, n, None) for n in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    shape["rope_theta"] = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    return {**{name: str(value) for name, value in shape.items()}, "names": names, "weights": digest.hexdigest()}


def load_adapter(model, folder: str | Path) -> PeftModel:
    """Load an adapter saved by `finetune` onto its base model.

    Raises:
        ValueError: the folder does not contain an adapter, or the adapter was trained on another base.
    """
    folder = Path(folder)
    if (folder / BASE).exists():
        saved = json.loads((folder / BASE).read_text())
        base = model_fingerprint(model, saved["names"])
        differing = [f"{name} {saved[name]}, not {base[name]}" for name in saved if saved[name] != base[name]]
        if differing:
            raise ValueError(
                f"The adapter in {folder} was trained on another model ({'; '.join(differing)}). Load the base "
                "model that its adapter_config.json names."
            )
    adapter: Any = PeftConfig.from_pretrained(str(folder))
    _widen(model, adapter.modules_to_save or ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as in `add_lora`
        return PeftModel.from_pretrained(model, folder)


def _widen(model, names):
    """Cast the named modules to float32. PEFT casts LoRA weights only."""
    for name, module in _leaves(model):
        if name in names:
            module.float()


def _leaves(model):
    return [(name.rsplit(".", 1)[-1], module) for name, module in model.named_modules() if name]


__all__ = ["BASE", "add_lora", "load_adapter", "model_fingerprint"]
