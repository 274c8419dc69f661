"""The model that a run starts from: a new one, or a pretrained one that a recipe changes."""

import functools
import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_bitsandbytes_available, logging

from ..fox.convert import read_llama_config
from ..fox.modeling_fox import FoxForgetGate, decay_time_bias
from ..hmt import HMTConfig, HMTWrapper
from ..metrics.rope.base import rope_base_bound
from ..metrics.rope.bounds import rope_context_bound
from ..metrics.run.engine import check_causal
from ..metrics.run.model import check_decoder, load_language_model, position_limit
from .config import PRESETS, FinetuneConfig, PretrainConfig, RunConfig, nearest
from .run_folder import say


GATE = re.compile(r"\bf_proj\b")
base_bound = functools.cache(rope_base_bound)  # a run asks for the same one several times


def make_config(args: RunConfig, tokenizer) -> Any:
    """Return the config of the model to train, changed as the recipe and `set` say. Nothing large is loaded.

    Raises:
        ValueError: the settings do not fit the model.
    """
    if isinstance(args, PretrainConfig):
        return new_config(args, tokenizer)
    assert isinstance(args, FinetuneConfig)
    config = read_config(str(args.model))
    check_base(args, config, tokenizer)
    dtype = base_dtype(args, config)
    if args.recipe == "hmt":
        config = memory_config(args, config)
    elif args.recipe == "rope-extend":
        say(extend_rope(config, args))
    elif args.recipe == "fox-from-llama":
        quantization, values = getattr(config, "quantization_config", None), config.to_dict()
        config = read_llama_config(values | {"quantization_config": None}, args.decay_time or float(args.max_length))
        if quantization is not None:
            config.quantization_config = quantization
    if args.recipe != "hmt":
        for name, value in set_fields(args, type(config)).items():
            setattr(config, name, value)
    config.dtype = dtype
    return config


def new_config(args: PretrainConfig, tokenizer) -> Any:
    """Return the config of a new model: a preset's, a file's or a model's, changed by `set`.

    Vocabulary, special ids and the least context are those of the tokenizer and `max_length`.
    """
    choices = f"one of {', '.join(PRESETS)}, a config.json, or a folder or Hub name with one"
    try:
        values, _ = PreTrainedConfig.get_config_dict(PRESETS.get(args.model, args.model))
        kind: Any = type(AutoConfig.for_model(values.pop("model_type")))
    except (OSError, KeyError) as error:
        raise ValueError(f"--model must be {choices}, got {args.model!r}. {nearest(args.model, PRESETS)}") from error
    values = {name: value for name, value in values.items() if name not in ("transformers_version", "architectures")}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[name] = getattr(tokenizer, name)
    values["vocab_size"] = len(tokenizer)
    values["max_position_embeddings"] = max(values.get("max_position_embeddings", 0), args.max_length)
    return kind(**values | set_fields(args, kind))


def memory_config(args: FinetuneConfig, config: Any) -> HMTConfig:
    """Return the config of a model with memory at the stage that comes next (arXiv 2405.06067, section 4).

    A model without a memory gets one that recalls nothing; one that a stage has trained recalls from now on.
    """
    fields = set_fields(args, HMTConfig)
    if config.model_type != "hmt":
        new: dict[str, Any] = {"recall": False, "backbone_name_or_path": args.model}
        return HMTConfig(**new | fields)
    for name, value in fields.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{args.model} was trained with {name}={getattr(config, name)!r}; both stages need the same, got {value!r}. "
                f"Leave {name} out of --set."
            )
    config.recall = True
    return config


def set_fields(args: RunConfig, kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the fields of `set`; ValueError for one that a class of configs does not have."""
    names, fields = inspect.signature(kind).parameters, args.config_fields()
    for name in fields:
        if name not in names:
            raise ValueError(f"--set names {name}, which {kind.__name__} does not have. {nearest(name, names)}")
    return fields


def check_base(args: FinetuneConfig, config: Any, tokenizer) -> None:
    """Raise ValueError for a tokenizer or settings that do not fit a pretrained model."""
    size = getattr(config, "backbone_config", config).get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens, the model {size}; give the model's own.")
    is_quantized = args.load_in_4bit or args.load_in_8bit or getattr(config, "quantization_config", None)
    if is_quantized and (args.merge or not args.use_peft):
        raise ValueError(
            "A quantized base takes an adapter that is not merged: --use_peft true --merge false. "
            "`hf_longctx.training.merge(RUN, MODEL)` merges it into the whole model later."
        )


def make_model(args: RunConfig, config: Any) -> Any:
    """Return a new model in float32, or a pretrained one, of a config that `make_config` made.

    Raises:
        ValueError: weights are missing, or the model cannot be trained on such sequences.
    """
    torch.manual_seed(args.seed)  # a new memory is the same whenever this is called
    # Whole, to be converted or checked before ZeRO-3 of DeepSpeed divides it: the next Trainer notes DeepSpeed again.
    unset_hf_deepspeed_config()
    if not isinstance(args, FinetuneConfig):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if args.recipe == "hmt":
        return load_with_memory(args, config)
    is_converted = args.recipe == "fox-from-llama"
    model = load_whole(args, config, config.dtype, new_gates=is_converted)
    if is_converted:
        open_gates(model, args.decay_time or float(args.max_length))
    check_length(model, args.max_length)
    check_sees_the_past_only(model)
    if args.packing and config.model_type != "hmt":
        check_packing(model)
    return model


def base_dtype(args: FinetuneConfig, config: Any) -> torch.dtype:
    """Return the dtype of the weights that a run begins with; those that are trained become float32 in any case."""
    if not args.use_peft or args.dtype == "float32":
        return torch.float32
    is_half = config.dtype in (torch.bfloat16, torch.float16)
    return torch.bfloat16 if args.dtype == "bfloat16" or (args.bf16 and is_half) else torch.float32


def quantization(args: FinetuneConfig) -> dict[str, Any]:
    """Return the argument with which `from_pretrained` quantizes the base, if the settings say so."""
    if not (args.load_in_4bit or args.load_in_8bit):
        return {}
    if not is_bitsandbytes_available():
        raise ImportError("quantization needs bitsandbytes: pip install 'hf-longctx[quantized]'")
    compute: Any = torch.bfloat16 if args.bf16 else torch.float32
    how: Any = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute)
    config = BitsAndBytesConfig(load_in_4bit=args.load_in_4bit, load_in_8bit=args.load_in_8bit, **how)
    return {"quantization_config": config}


def load_with_memory(args: FinetuneConfig, config: Any) -> HMTWrapper:
    """Load a model that gets a memory, or one that has it."""
    saved = read_config(str(args.model))
    if saved.model_type != "hmt":
        return HMTWrapper.from_backbone(load_whole(args, saved, config.dtype), config)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a first stage has no weights for the recall, which transformers calls missing
    try:
        model = HMTWrapper.from_pretrained(args.model, recall=True, dtype=config.dtype, **quantization(args))
        model.memory.float()
        return model
    finally:
        logging.set_verbosity(verbosity)


def load_whole(args: FinetuneConfig, config: Any, dtype: torch.dtype, new_gates: bool = False) -> Any:
    """Load a pretrained model, all of whose weights are in its files, except `new_gates`.

    Raises:
        ValueError: weights are missing, or have other shapes than the config says.
    """
    loaded: Any = load_language_model(
        str(args.model),
        config=config,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **quantization(args),
    )
    model, info = loaded
    absent = [key for key in info["missing_keys"] if not (new_gates and GATE.search(key))]
    lacking = sorted(absent) + [f"{key} (of another shape)" for key, *_ in info["mismatched_keys"]]
    if lacking:
        raise ValueError(
            f"{args.model} lacks weights that its config.json describes, which would begin at random: "
            f"{', '.join(lacking[:3])}{' ...' if lacking[3:] else ''}. Take the config.json and the weights of one model."
        )
    return model


@torch.no_grad()
def open_gates(model: Any, decay_time: float) -> None:
    """Give the gates the weights that `from_llama` gives them, in float32 whatever the dtype of the model."""
    for module in model.modules():
        if isinstance(module, FoxForgetGate):
            module.float()
            module.weight.zero_()
            module.bias.copy_(decay_time_bias(len(module.bias), decay_time, decay_time))


def extend_rope(config, args: FinetuneConfig) -> str:
    """Give a config the context of the settings, or its own if that is longer, and a RoPE base for it.

    The bound of the base is eq. 18 of arXiv 2405.14591.

    Returns:
        a line that says what was changed.

    Raises:
        ValueError: the model does not have one RoPE base without scaling, or its base supports the context already.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"--recipe rope-extend needs a model with one RoPE base and no scaling; {args.model} has {rope}."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    claimed, old = config.max_position_embeddings, rope["rope_theta"]
    context = max(args.max_length, claimed)
    reach = rope_context_bound(base=old, head_dim=head_dim)
    if args.max_length <= claimed and (reach is None or reach >= claimed - 1):  # a distance, one less than a context
        raise ValueError(
            f"--max_length {args.max_length} does not extend the context of {claimed} tokens, and base {old:g} suffices "
            "for these. Give longer sequences, or --recipe lora."
        )
    bound = base_bound(context - 1, head_dim)
    base = bound.settled_base or bound.base
    unit = 10.0 ** (math.floor(math.log10(base)) - 1)  # two digits
    rope["rope_theta"], config.max_position_embeddings = math.ceil(base / unit) * unit, context
    return (
        f"RoPE base {old:g}, which reaches {reach} tokens, becomes {rope['rope_theta']:g}; {context} tokens need "
        f"{bound.base:.0f}"
    )


def read_config(name: str) -> Any:
    """Read the config of a model in a folder or on the Hub; ValueError for an adapter or an encoder-decoder."""
    if (Path(name) / "adapter_config.json").exists():
        raise ValueError(f"{name} holds an adapter; merge it first: `hf_longctx.training.merge(RUN)`.")
    config = AutoConfig.from_pretrained(name)
    check_decoder(config)
    return config


def check_sees_the_past_only(model) -> None:
    """Raise ValueError for BERT and its relatives, which would learn to copy their labels from their input."""
    ids = np.arange(1, 16)[None]

    @torch.no_grad()
    def read(ids):
        return model(torch.from_numpy(ids).to(model.device)).logits

    check_causal(model, ids, read(ids), read)


@torch.no_grad()
def check_packing(model) -> None:
    """Raise ValueError if a document has other logits packed behind another than alone.

    The tolerance is that of `check_causal`. No cache is made, as in training: with one, no boundaries are seen.
    """
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    documents = torch.arange(1, 16, device=model.device).split([6, 9])
    position_ids = torch.cat([torch.arange(6), torch.arange(9)])[None].to(model.device)
    positions = {"position_ids": position_ids} if takes_positions else {}
    packed = model(torch.cat(documents)[None], use_cache=False, **positions).logits[0, 6:].float()
    alone = model(documents[1][None], use_cache=False).logits[0].float()
    if (packed - alone).norm() > max(8 * torch.finfo(model.dtype).eps, 1e-4) * (alone - alone.mean()).norm():
        raise ValueError(
            f"{type(model).__name__} reads on behind the end of a document: packed behind another one, a document has "
            f"logits that are up to {(packed - alone).abs().max():.1g} off. Give --packing false."
        )


def check_length(model, length: int) -> None:
    """Raise ValueError if a model with positions is trained beyond them."""
    table = position_limit(model)
    if table is not None and length > table:
        raise ValueError(f"--max_length {length} is more than the {table} positions of this model.")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit and getattr(model.config, "rope_parameters", None):
        raise ValueError(
            f"--max_length {length} is more than the {limit} tokens of this model; extend its context first, by "
            "--recipe rope-extend."
        )


@torch.no_grad()
def check_flash_attention(model: Any) -> None:
    """Raise ValueError if FlashAttention would not get the positions, by which it separates packed documents.

    The model reads two tokens, on any device, with a function in place of the kernel.
    """
    name, seen = model.config._attn_implementation, []
    attention = ALL_ATTENTION_FUNCTIONS[name]

    def look(module, query, key, value, *args, position_ids=None, **kwargs):
        seen.append(position_ids is not None)
        return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    ALL_ATTENTION_FUNCTIONS[name] = look
    try:
        model(input_ids=ids, position_ids=ids, use_cache=False)
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = attention
    if not (seen and all(seen)):
        raise ValueError(
            f"{type(model).__name__} does not give position_ids to {name}, so packed documents would see each other. "
            "Give --packing false."
        )


__all__ = ["check_flash_attention", "extend_rope", "make_config", "make_model", "new_config"]
