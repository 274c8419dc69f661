"""The model that a run starts from: a new one, or a pretrained one that a recipe changes."""

import functools
import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import is_bitsandbytes_available, logging

from ..fox.convert import read_llama_config
from ..fox.modeling_fox import FoxForgetGate, decay_time_bias
from ..hmt import HMTConfig, HMTWrapper
from ..metrics.rope.base import rope_base_bound
from ..metrics.rope.bounds import rope_context_bound
from ..metrics.run.engine import check_causal
from ..metrics.run.model import check_decoder, load_language_model, position_limit
from .config import PRESETS, FinetuneConfig, PretrainConfig, nearest


GATE = re.compile(r"\bf_proj\b")
base_bound = functools.cache(rope_base_bound)  # a run asks for the same one several times


def new_model(args: PretrainConfig, tokenizer) -> Any:
    """Return a model with initial weights, for the tokenizer, in float32."""
    torch.manual_seed(args.seed)
    disable_zero3_init()
    return AutoModelForCausalLM.from_config(new_config(args, tokenizer), dtype=torch.float32)


def new_config(args: PretrainConfig, tokenizer) -> Any:
    """Return the config of a new model: a preset's, a file's or a model's, changed by `set`.

    Vocabulary, special ids and the least context are those of the tokenizer and `max_length`.

    Raises:
        ValueError: `set` names a field that the class of the config does not have, or a value does not fit.
    """
    choices = f"one of {', '.join(PRESETS)}, a config.json, or a folder or Hub name with one"
    try:
        values, _ = PreTrainedConfig.get_config_dict(PRESETS.get(args.model, args.model))
    except OSError as error:
        raise ValueError(f"--model must be {choices}, got {args.model!r}. {nearest(args.model, PRESETS)}") from error
    if "model_type" not in values:
        raise ValueError(f"--model must be {choices}; that of {args.model} does not have a model_type.")
    kind: Any = type(AutoConfig.for_model(values["model_type"]))
    values = {name: value for name, value in values.items() if name not in ("transformers_version", "architectures")}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[name] = getattr(tokenizer, name)
    values["vocab_size"] = len(tokenizer)
    values["max_position_embeddings"] = max(values.get("max_position_embeddings", 0), args.max_length)
    return make_config(kind, values | checked_fields(kind, args))


def checked_fields(kind: type[PreTrainedConfig], args: Any) -> dict[str, Any]:
    """Return the fields of `set`; ValueError for one that a class of configs does not have."""
    names = inspect.signature(kind).parameters
    for name in args.config_fields():
        if name not in names:
            raise ValueError(f"--set names {name}, which {kind.__name__} does not have. {nearest(name, names)}")
    return args.config_fields()


def make_config(kind: type[PreTrainedConfig], values: dict[str, Any]) -> Any:
    """Return a config of these values; ValueError if one has the wrong type."""
    try:
        return kind(**values)
    except StrictDataclassError as error:
        raise ValueError(f"{kind.__name__}: {' '.join(str(error).split())}") from error


def load_base(args: FinetuneConfig, tokenizer) -> Any:
    """Load a pretrained model, changed as the recipe says.

    Raises:
        ValueError: the recipe cannot be used on this model, weights are missing, or sequences are longer than its
            context.
    """
    torch.manual_seed(args.seed)  # a new memory is the same whenever this is called
    disable_zero3_init()
    config = read_config(str(args.model))
    if len(tokenizer) > (size := getattr(config, "backbone_config", config).get_text_config().vocab_size):
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens, the model {size}; give the model's own.")
    if getattr(config, "quantization_config", None) and (args.merge or not args.use_peft or args.is_quantized):
        raise ValueError(
            f"{args.model} is quantized, so it takes an adapter that is not merged: --use_peft true --merge false "
            "--load_in_4bit false --load_in_8bit false. `hf_longctx.training.merge(RUN, MODEL)` merges it into the whole "
            "model later."
        )
    if args.recipe == "hmt":
        return with_memory(args, config)
    decay_time = None
    if args.recipe == "rope-extend":
        extend_rope(config, args)
    elif args.recipe == "fox-from-llama":
        decay_time, values = args.decay_time or float(args.max_length), config.to_dict()
        quantization = values.pop("quantization_config", None)
        config = read_llama_config(values, decay_time)
        if quantization is not None:
            config.quantization_config = quantization
    for name, value in checked_fields(type(config), args).items():
        setattr(config, name, value)
    model = load_whole(args, config, new_gates=decay_time is not None)
    if decay_time is not None:
        open_gates(model, decay_time)
    check_length(model, args.max_length)
    check_sees_the_past_only(model)
    if args.packing and config.model_type != "hmt":
        check_packing(model)
    return model


def base_dtype(args: FinetuneConfig) -> torch.dtype:
    """Return the dtype of the weights that a run begins with; those that are trained become float32 in any case."""
    if not args.use_peft or args.dtype == "float32":
        return torch.float32
    is_half = read_config(str(args.model)).dtype in (torch.bfloat16, torch.float16)
    return torch.bfloat16 if args.dtype == "bfloat16" or (args.bf16 and is_half) else torch.float32


def quantization(args: FinetuneConfig) -> dict[str, Any]:
    """Return the argument with which `from_pretrained` quantizes the base, if the settings say so."""
    if not args.is_quantized:
        return {}
    if not is_bitsandbytes_available():
        raise ImportError("quantization needs bitsandbytes: pip install 'hf-longctx[quantized]'")
    if args.load_in_8bit:
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    compute: Any = torch.bfloat16 if args.bf16 else torch.float32
    how: Any = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute)
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **how)}


def load_whole(args: FinetuneConfig, config, new_gates: bool = False) -> Any:
    """Load a pretrained model, all of whose weights are in its files, except `new_gates`.

    Raises:
        ValueError: weights are damaged, missing, or have other shapes than the config says.
    """
    try:
        loaded: Any = load_language_model(
            str(args.model),
            config=config,
            dtype=base_dtype(args),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **quantization(args),
        )
    except SafetensorError as error:
        raise ValueError(f"The weights of {args.model} cannot be read ({error}); its files are damaged.") from error
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


def with_memory(args: FinetuneConfig, config: Any) -> Any:
    """Load a model with memory at the stage that comes next (arXiv 2405.06067, section 4).

    A model without one gets a memory that recalls nothing; one that a stage has trained recalls from now on.
    """
    fields = check_recipe(args, config)
    if config.model_type != "hmt":
        new = make_config(HMTConfig, {"recall": False, "backbone_name_or_path": args.model, **fields})
        return HMTWrapper.from_backbone(load_whole(args, config), new)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a first stage has no weights for the recall, which transformers calls missing
    try:
        model = HMTWrapper.from_pretrained(str(args.model), recall=True, dtype=base_dtype(args), **quantization(args))
        model.memory.float()
        return model
    finally:
        logging.set_verbosity(verbosity)


def check_recipe(args: FinetuneConfig, config: Any) -> dict[str, Any]:
    """Return the fields of a memory; ValueError for one that differs from the memory that a model has."""
    fields = checked_fields(HMTConfig, args) if args.recipe == "hmt" else {}
    for name, value in fields.items() if config.model_type == "hmt" else ():
        if getattr(config, name) != value:
            raise ValueError(
                f"{args.model} was trained with {name}={getattr(config, name)!r}; both stages need the same, got {value!r}. "
                f"Leave {name} out of --set."
            )
    return fields


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
    """Read the config of a model in a folder or on the Hub.

    Raises:
        ValueError: the folder holds an adapter, an encoder-decoder, or a damaged config.
    """
    if (Path(name) / "adapter_config.json").exists():
        raise ValueError(
            f"{name} holds an adapter. Give its base by --model and the adapter by --adapter, or merge it first: "
            "`hf_longctx.training.merge(RUN)`."
        )
    try:
        config = AutoConfig.from_pretrained(name)
    except StrictDataclassError as error:
        raise ValueError(f"{name}/config.json is damaged: {error}") from error
    check_decoder(config)
    return config


def disable_zero3_init() -> None:
    """Let models be built whole, to be converted or checked before ZeRO-3 of DeepSpeed divides them.

    The next Trainer notes DeepSpeed again, and divides the model.
    """
    unset_hf_deepspeed_config()


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


__all__ = ["base_dtype", "check_recipe", "disable_zero3_init", "extend_rope", "load_base", "new_config", "new_model"]
