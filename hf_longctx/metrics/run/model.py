"""Inspect and load models: config, weights hash, vocabulary size, maximum number of positions."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn


# Config entries that `weights_hash` skips, because they do not change what a model computes. The dtype and the
# attention implementation are separate settings of a result.
VOLATILE = {"_name_or_path", "backbone_name_or_path", "transformers_version", "architectures", "auto_map"}
VOLATILE |= {"dtype", "torch_dtype", "_attn_implementation", "attn_implementation", "use_cache"}

POSITION = re.compile(r"(^|_)(wpe|pos|position|positions|positional)(_|$)")
NOT_OF_TEXT = re.compile(r"(^|[._])(rel|relative|rotary|vision|visual|image|audio|patch)([._]|$)")


def text_config(model: nn.Module) -> Any:
    """Return the config of a language model. For a multimodal model, return the config of its language model."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def first_parameter(model: nn.Module) -> torch.Tensor:
    """Return the model's first parameter, for its dtype and device. Without parameters, return an empty tensor."""
    return next(model.parameters(), torch.empty(0))


def input_device(model: nn.Module) -> torch.device:
    """Return the device for the model's input ids."""
    device = first_parameter(model).device
    # parameters on "meta" are offloaded, and accelerate moves the input to the execution device
    return torch.device("cpu") if device.type == "meta" else device


def size_and_hardware(model: Any, device: str | None) -> dict[str, Any]:
    """Return the number of parameters and the hardware name as settings. Return {} for a remote model."""
    if not isinstance(model, nn.Module) or device is None:
        return {}
    kind = device.partition(":")[0]
    hardware = torch.cuda.get_device_name(device) if kind == "cuda" else cpu_name() if kind == "cpu" else kind
    return {"parameters": sum(p.numel() for p in model.parameters()), "hardware": hardware}


def cpu_name() -> str:
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    return platform.processor() or platform.machine() or "CPU"


def weights_hash(model: nn.Module) -> str:
    """Return a SHA-256 of the config and all parameters.

    Each parameter contributes its name, shape, dtype and about 64 values. A different RoPE base, window or scale in
    the config changes the hash. We skip the values of parameters on the meta device, and of quantized parameters that
    do not support indexing.
    """
    config: Any = model.config
    config = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    config = json.loads(
        json.dumps(config, default=str),
        object_hook=lambda entries: {name: value for name, value in entries.items() if name not in VOLATILE},
    )
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta" and parameter.numel():
            with suppress(NotImplementedError):
                values: Any = parameter.detach().flatten()
                values = values[:: max(1, len(values) // 64)]
                values = values.full_tensor() if hasattr(values, "full_tensor") else values  # gathers sharded values
                digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of input embeddings, i.e. the number of ids that the model accepts."""
    with suppress(AttributeError, NotImplementedError):
        embeddings: Any = model.get_input_embeddings
        return embeddings().num_embeddings
    return text_config(model).vocab_size


def position_limit(model: nn.Module) -> int | None:
    """Return the number of absolute position embeddings. Return None if the model does not have any.

    We search the model for a table of learned or fixed position embeddings. In GPT-2 and OPT,
    `max_position_embeddings` is the size of this table. With RoPE or ALiBi, it is only a claim. If a model
    `reads_in_segments`, the table limits a single segment, not the whole input.
    """
    if getattr(model, "reads_in_segments", False):
        return None

    limits = []
    for name, table in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()):
        if not POSITION.search(name.rpartition(".")[2]) or NOT_OF_TEXT.search(name):
            continue
        if isinstance(table, nn.Embedding):
            # OPT and BART skip the first `offset` embeddings. RoBERTa starts after the padding embedding.
            start = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
            limits.append(table.num_embeddings - start)
        elif isinstance(table, torch.Tensor) and table.is_floating_point() and table.ndim > 1:
            limits.append(table.shape[-2])  # (..., positions, width), as in GPT-J and CTRL
    return min(limits, default=None)


def load_language_model(name: str, **options: Any) -> nn.Module:
    """Load a model with `AutoModelForCausalLM`.

    All files of a model on the Hub are loaded from the same commit. We store it as `config._commit_hash`.
    """
    from transformers import AutoModelForCausalLM

    commit = None if Path(name).is_dir() else commit_of(name, options)
    options |= {} if commit is None else {"revision": commit}
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    if commit is not None:
        model.config._commit_hash = commit
    return model


def commit_of(name: str, options: dict[str, Any]) -> str | None:
    """Return the Hub commit that `from_pretrained(name, **options)` would load. Return None for an adapter."""
    from transformers.utils.hub import cached_file, extract_commit_hash

    of_the_hub = ("cache_dir", "token", "revision", "local_files_only", "subfolder")
    where = {key: options[key] for key in of_the_hub if key in options}
    return extract_commit_hash(
        cached_file(name, "config.json", **where, _raise_exceptions_for_missing_entries=False), None
    )


def check_decoder(config: Any) -> None:
    """Raise ValueError if the config belongs to an encoder-decoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{getattr(config, 'model_type', 'the model')} is an encoder-decoder. Load a causal language model "
            "instead."
        )
