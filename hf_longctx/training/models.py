"""Creation of the model to train: a new model, or a pretrained model that a recipe adapts."""

import inspect
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..fox.modeling_fox import FoxForCausalLM
from ..hmt import HMTWrapper
from ..metrics.run.engine import check_causal
from ..windows.learning import WindowLearner
from .config import PRESETS, FinetuneConfig, PretrainConfig, RunConfig, nearest
from .loading import base_dtype, read_config


def make_config(args: RunConfig, tokenizer) -> Any:
    """Return the config of the model to train, without loading weights. The recipe and `set` override its fields.

    Raises:
        ValueError: the settings do not match the model.
    """
    if isinstance(args, PretrainConfig):
        return new_config(args, tokenizer)
    assert isinstance(args, FinetuneConfig)
    config = read_config(str(args.model))
    size = getattr(config, "backbone_config", config).get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model has only {size}. Use the model's own tokenizer."
        )
    if args.merge and getattr(config, "quantization_config", None):
        raise ValueError("The adapter of a quantized checkpoint cannot be merged. Give --merge false.")
    dtype = base_dtype(args, config)
    config = args.get_recipe().config(args, config)
    config.dtype = dtype
    return config


def new_config(args: PretrainConfig, tokenizer) -> Any:
    """Read the config of a new model from a preset, a file or another model. `set` overrides fields of the config.

    The vocabulary size and the special token ids come from the tokenizer. The context is at least `max_length`.
    """
    choices = f"a preset ({', '.join(PRESETS)}), a config.json, or a folder or Hub name of a model"
    try:
        values, _ = PreTrainedConfig.get_config_dict(PRESETS.get(args.model, args.model))
        kind: Any = type(AutoConfig.for_model(values.pop("model_type")))
    except (OSError, KeyError) as error:
        raise ValueError(f"--model must be {choices}, got {args.model!r}. {nearest(args.model, PRESETS)}") from error
    values = {name: value for name, value in values.items() if name not in ("transformers_version", "architectures")}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[name] = getattr(tokenizer, name)
    values["vocab_size"] = len(tokenizer)
    values["max_position_embeddings"] = max(getattr(kind(**values), "max_position_embeddings", 0), args.max_length)
    return kind(**values | args.config_fields(kind))


def make_model(args: RunConfig, config: Any) -> Any:
    """Create a model in float32 from the config of `make_config`, or load a pretrained model with this config.

    Raises:
        ValueError: weights are missing, or the model cannot be trained on these sequences.
    """
    torch.manual_seed(args.seed)  # new parameters get the same values in every call
    # Load the whole model, to convert and check it before ZeRO-3 partitions it. Trainer registers DeepSpeed again.
    unset_hf_deepspeed_config()
    if not isinstance(args, FinetuneConfig):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    else:
        model = args.get_recipe().load(args, config)
    # FoX and HMT are causal, and windows require causal attention. A FoX separates documents. An HMT must read across
    # document boundaries, and sequences from which windows are learned are one document.
    if not isinstance(model, FoxForCausalLM | HMTWrapper | WindowLearner):
        check_sequences(model, args.packing)
    attention = args.attn_implementation
    if attention is None and config.model_type == "fox" and torch.cuda.is_available():
        attention = "auto"
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


@torch.no_grad()
def check_sequences(model, packing: bool) -> None:
    """Raise ValueError if tokens attend to later tokens. With packing, also check that documents stay separate.

    Bidirectional models such as BERT would copy the labels from their input. With packing, a document must have the
    same logits as without packing, within the tolerance of `check_causal`. As in training, the cache is disabled: with
    a cache, transformers ignores document boundaries.
    """
    ids = torch.arange(1, 16, device=model.device)[None]
    check_causal(model, ids.cpu().numpy(), model(ids).logits, lambda x: model(torch.from_numpy(x).to(ids)).logits)
    if not packing:
        return
    position_ids = torch.cat([torch.arange(6), torch.arange(9)])[None].to(model.device)
    # Trainer drops arguments that `forward` does not accept
    accepts_positions = "position_ids" in inspect.signature(model.forward).parameters
    positions = {"position_ids": position_ids} if accepts_positions else {}
    packed = model(ids, use_cache=False, **positions).logits[0, 6:].float()
    alone = model(ids[:, 6:], use_cache=False).logits[0].float()
    if (packed - alone).norm() > max(8 * torch.finfo(model.dtype).eps, 1e-4) * (alone - alone.mean()).norm():
        raise ValueError(
            f"{type(model).__name__} reads across document boundaries: packing changes a document's logits by up to "
            f"{(packed - alone).abs().max():.1g}. Give --packing false."
        )


@torch.no_grad()
def check_flash_attention(model: Any) -> None:
    """Raise ValueError if a model does not pass position ids to FlashAttention.

    FlashAttention separates documents by their position ids. For the check, the model reads two tokens, and a stub
    replaces the kernel. Any device can run this check.
    """
    name = model.config._attn_implementation
    seen = []
    attention = ALL_ATTENTION_FUNCTIONS[name]

    def look(module, query, key, value, *args, position_ids=None, **kwargs):
        seen.append(position_ids is not None)
        return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    # Trainer drops arguments that `forward` does not accept
    accepts_positions = "position_ids" in inspect.signature(model.forward).parameters
    ALL_ATTENTION_FUNCTIONS[name] = look
    try:
        model(input_ids=ids, use_cache=False, **({"position_ids": ids} if accepts_positions else {}))
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = attention
    if not (seen and all(seen)):
        raise ValueError(
            f"{type(model).__name__} does not pass position_ids to {name}. Packed documents would therefore attend "
            "to each other. Give --packing false."
        )


__all__ = ["check_flash_attention", "make_config", "make_model"]
