"""Loading of a pretrained model: config, dtype, quantization, and checks that its weights are complete."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, BitsAndBytesConfig

from ..metrics.run.model import check_decoder, load_language_model, position_limit, text_config


def read_config(name: str) -> Any:
    """Read a model's config from a folder or the Hub. Raise ValueError for an adapter or an encoder-decoder."""
    if (Path(name) / "adapter_config.json").exists():
        raise ValueError(
            f"{name} contains an adapter. Merge it into its base model first, with PEFT's merge_and_unload()."
        )
    config = AutoConfig.from_pretrained(name)
    check_decoder(config)
    return config


def base_dtype(args: Any, config: Any) -> torch.dtype:
    """Return the dtype in which to load the weights. Trained weights are cast to float32 afterwards."""
    is_frozen = args.use_peft or args.get_recipe().frozen
    if not is_frozen or args.dtype == "float32":
        return torch.float32
    is_half = config.dtype in (torch.bfloat16, torch.float16)
    return torch.bfloat16 if args.dtype == "bfloat16" or (args.bf16 and is_half) else torch.float32


def quantization(args: Any) -> dict[str, Any]:
    """Return the quantization arguments for `from_pretrained`. Without quantization, return {}."""
    if not (args.load_in_4bit or args.load_in_8bit):
        return {}
    compute: Any = torch.bfloat16 if args.bf16 else torch.float32
    how: Any = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute)
    config = BitsAndBytesConfig(load_in_4bit=args.load_in_4bit, load_in_8bit=args.load_in_8bit, **how)
    return {"quantization_config": config}


def load_base(args: Any, config: Any) -> Any:
    """Load the model in `--model` with a config, in the config's dtype.

    Raises:
        ValueError: weights are missing, or have other shapes than the config requires.
    """
    loaded: Any = load_language_model(
        str(args.model),
        config=config,
        dtype=config.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **quantization(args),
    )
    model, info = loaded
    lacking = sorted(info["missing_keys"]) + [f"{key} (of another shape)" for key, *_ in info["mismatched_keys"]]
    if lacking:
        raise ValueError(
            f"{args.model} does not contain weights that its config.json requires, so they would be random: "
            f"{', '.join(lacking[:3])}{' ...' if lacking[3:] else ''}. Use the config.json and the weights of one model."
        )
    return model


def check_length(model, length: int) -> None:
    """Raise ValueError if the sequences exceed the model's maximum positions."""
    table = position_limit(model)
    if table is not None and length > table:
        raise ValueError(f"--max_length must be at most {table}, got {length}. This model has {table} positions.")
    if getattr(model, "reads_in_segments", False):  # a segment is shorter than a sequence
        return
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit and getattr(config, "rope_parameters", None):
        raise ValueError(
            f"--max_length must be at most {limit}, got {length}. To extend the model's context first, use --recipe "
            "rope-extend."
        )


__all__ = ["base_dtype", "check_length", "load_base", "quantization", "read_config"]
