"""The model that a training starts from: a new one, a pretrained one, or a pretrained one that is changed."""

import functools
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import is_bitsandbytes_available, logging
from transformers.utils.generic import is_flash_attention_requested

from ..fox import FoxConfig, FoxForCausalLM
from ..fox.convert import read_llama_config
from ..fox.modeling_fox import FoxForgetGate, decay_time_bias
from ..hmt import HMTConfig, HMTWrapper
from ..metrics.rope.base import rope_base_bound
from ..metrics.rope.bounds import rope_context_bound
from ..metrics.run.engine import check_causal
from ..metrics.run.model import check_decoder, load_language_model, position_limit
from .borders import takes_borders
from .recipes import ResolvedFinetuning, ResolvedSettings, ResolvedTraining
from .trainer import GATE


base_bound = functools.cache(rope_base_bound)  # a run asks for the same one several times


def build_new_model(settings: ResolvedTraining, tokenizer) -> FoxForCausalLM | LlamaForCausalLM:
    """Return a FoX or a Llama with initial weights, for the tokenizer, in float32."""
    torch.manual_seed(settings.seed)
    disable_zero3_init()
    model = AutoModelForCausalLM.from_config(new_config(settings, tokenizer))
    set_attention(model, settings)
    return model


def new_config(settings: ResolvedTraining, tokenizer) -> FoxConfig | LlamaConfig:
    """Return the configuration of a new model for the tokenizer."""
    make_config = FoxConfig.pro if settings.pro else {"fox": FoxConfig, "llama": LlamaConfig}[settings.architecture]
    sizes = settings.model_sizes()
    if settings.architecture == "llama":
        head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
        base = settings.rope_base or choose_rope_base(settings.sequence_length, head_dim)
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    return make_config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )


def check_attention(settings: ResolvedSettings, tokenizer) -> None:
    """Raise ValueError if the model cannot have the attention of the settings, before data and weights are read."""
    if settings.attention is None:
        return
    config = planned_config(settings, tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(getattr(config, "backbone_config", config))
        set_attention(model, settings)
    is_packed = settings.packing and settings.recipe != "hmt" and model.config.model_type != "fox"
    if not (is_packed and is_flash_attention_requested(model.config) and settings.per_device_batch_size > 1):
        return
    if not takes_borders(model):
        raise ValueError(
            f"with --attention {settings.attention} this model sees the borders of packed documents in passes of one row "
            "only; give --per-device-batch-size 1, or --no-packing."
        )


def planned_config(settings: ResolvedSettings, tokenizer) -> Any:
    """Return the configuration of the model that a run will train; of a model with memory, that of its base."""
    if isinstance(settings, ResolvedTraining):
        return new_config(settings, tokenizer)
    assert isinstance(settings, ResolvedFinetuning)
    config = read_config(settings.model)
    if settings.recipe == "rope-extend":
        extend_rope(config, settings)
    if settings.decay_time is not None:
        config = read_llama_config(config.to_dict(), settings.decay_time)
    return config


def set_attention(model, settings: ResolvedSettings) -> None:
    """Give a model the attention of the settings; raise ValueError if it cannot have it."""
    name = settings.attention
    if name in (None, "auto"):
        name = "auto" if isinstance(model, FoxForCausalLM) else None
    if name is None:
        return
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError, OSError, NotImplementedError) as error:
        raise ValueError(f"--attention {name} cannot be had: {str(error).splitlines()[0]}") from error


def load_changed_model(settings: ResolvedFinetuning, tokenizer) -> Any:
    """Load the pretrained model and change it as the recipe says, in its `base_dtype`, with its attention.

    The attention is set last, because some kernels run on no CPU, where the model is checked.

    Raises:
        ValueError: the recipe cannot be used on this model, or its rows are longer than the model's context.
    """
    model = change_model(settings, tokenizer)
    set_attention(model, settings)
    return model


def change_model(settings: ResolvedFinetuning, tokenizer) -> Any:
    """Do what `load_changed_model` does, with the attention that the model has by default."""
    torch.manual_seed(settings.seed)  # a new memory is the same whenever this is called
    disable_zero3_init()
    config = read_config(settings.model)
    vocab_size = getattr(config, "backbone_config", config).get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model {vocab_size}; name the model's own.")
    is_quantized = getattr(config, "quantization_config", None)
    if is_quantized and (settings.merge or settings.full or settings.quantization):
        what = settings.quantization or ("--full" if settings.full else "--merge (of most recipes the default)")
        raise ValueError(
            f"{settings.model} is quantized, and {what} needs a whole model. Take the model before quantization, or give "
            "--no-merge, and merge the adapter into that model later: `hf_longctx.training.merge(RUN, MODEL)`."
        )
    if settings.recipe == "hmt":
        return with_memory(config, settings)
    if settings.recipe == "rope-extend":
        extend_rope(config, settings)
    decay_time = settings.decay_time  # of the gates of fox-from-llama
    if decay_time is not None:
        values = config.to_dict()
        quantization = values.pop("quantization_config", None)
        config = read_llama_config(values, decay_time)
        if quantization is not None:
            config.quantization_config = quantization
    model = load_whole(settings, config, new_gates=decay_time is not None)
    if decay_time is not None:
        open_gates(model, decay_time)
    check_length(model, settings.sequence_length)
    check_sees_the_past_only(model)
    if settings.packing and config.model_type != "hmt":
        check_borders(model)
    return model


def base_dtype(settings: ResolvedSettings) -> torch.dtype:
    """Return the dtype of the weights that a training begins with; trained ones are float32 in any case."""
    if not isinstance(settings, ResolvedFinetuning) or settings.full:
        return torch.float32
    if settings.base_dtype == "auto" and settings.dtype != "float32":
        half = read_config(settings.model).dtype in (torch.bfloat16, torch.float16)
        return torch.bfloat16 if half else torch.float32
    return torch.bfloat16 if settings.base_dtype == "bfloat16" else torch.float32


def in_bfloat16(settings: ResolvedSettings) -> bool:
    """Return whether forward passes run in bfloat16."""
    if settings.dtype != "auto":
        return settings.dtype == "bfloat16"
    return torch.accelerator.is_available() or base_dtype(settings) == torch.bfloat16


def quantization(settings: ResolvedFinetuning) -> dict[str, Any]:
    """Return the argument with which `from_pretrained` quantizes the base, if the settings say so.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    if settings.quantization is None:
        return {}
    if not is_bitsandbytes_available():
        raise ImportError(f"{settings.quantization} needs bitsandbytes: pip install 'hf-longctx[quantized]'")
    if settings.load_in_8bit:
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if in_bfloat16(settings) else torch.float32,
        )
    }


def load_whole(settings: ResolvedFinetuning, config, new_gates: bool = False) -> Any:
    """Load the pretrained model, all of whose weights are in its files, but for `new_gates`.

    Raises:
        ValueError: weights are damaged, missing, or not of the shapes that the configuration says.
    """
    name = settings.model
    try:
        loaded: Any = load_language_model(
            name,
            config=config,
            dtype=base_dtype(settings),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **quantization(settings),
        )
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} cannot be read ({error}); its files are damaged.") from error
    model, info = loaded
    absent = [key for key in info["missing_keys"] if not (new_gates and GATE.search(key))]
    lacking = sorted(absent) + [f"{key} (of another shape)" for key, *_ in info["mismatched_keys"]]
    if lacking:
        raise ValueError(
            f"{name} lacks weights that its config.json describes, which would begin at random: {', '.join(lacking[:3])}"
            f"{' ...' if lacking[3:] else ''}. Take the config.json and the weights of one model."
        )
    return model


@torch.no_grad()
def open_gates(model: FoxForCausalLM, decay_time: float) -> None:
    """Give the gates the weights that `from_llama` gives them, in float32 whatever the dtype of the model."""
    for module in model.modules():
        if isinstance(module, FoxForgetGate):
            module.float()
            module.weight.zero_()
            module.bias.copy_(decay_time_bias(len(module.bias), decay_time, decay_time))


@torch.no_grad()
def check_borders(model) -> None:
    """Raise ValueError if a document has other logits packed behind another than alone.

    The tolerance is that of `check_causal`. No cache is made, as a training makes none: with one, no borders are seen.
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
            f"logits that are up to {(packed - alone).abs().max():.1g} off. Give --no-packing."
        )


def disable_zero3_init() -> None:
    """Let models be built whole, to be counted, converted or measured before ZeRO-3 of DeepSpeed divides them.

    The next Trainer notes DeepSpeed again, and divides the model.
    """
    unset_hf_deepspeed_config()


def read_config(name: str) -> Any:
    """Read the configuration of a model in a folder or on the Hub.

    Raises:
        ValueError: the folder holds an adapter, an encoder-decoder, or a damaged configuration.
    """
    if (Path(name) / "adapter_config.json").exists():
        raise ValueError(
            f"{name} holds an adapter beside its base; name a whole model with it: `hf_longctx.training.merge(RUN)`."
        )
    try:
        config = AutoConfig.from_pretrained(name)
    except StrictDataclassError as error:
        raise ValueError(f"{name}/config.json is damaged: {error}") from error
    except OSError as error:
        raise OSError(f"{name} is no model that can be read: {str(error).splitlines()[0]}") from error
    check_decoder(config)
    return config


def check_sees_the_past_only(model) -> None:
    """Raise ValueError for BERT and its relatives, which would learn to copy their labels from their input."""
    ids = np.arange(1, 16)[None]

    @torch.no_grad()
    def read(ids):
        return model(torch.from_numpy(ids).to(model.device)).logits

    check_causal(model, ids, read(ids), read)


def with_memory(config, settings: ResolvedFinetuning) -> Any:
    """Load a model with memory at the stage that comes next (arXiv 2405.06067, section 4).

    A model without one gets a memory that recalls nothing; one that a stage has trained recalls, and goes on so.
    """
    dtype = base_dtype(settings)
    sizes = {name: getattr(settings, name) for name in ("segment_length", "sensory_tokens", "recall_mode")}
    if config.model_type != "hmt":
        new = HMTConfig(**sizes, recall=False, backbone_name_or_path=settings.model)
        return HMTWrapper.from_backbone(load_whole(settings, config), new)
    trained = {name: getattr(config, name) for name in sizes}
    if trained != sizes:
        raise ValueError(
            f"{settings.model} was trained with {trained}, this run has {sizes}. Both stages need the same."
        )
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a first stage has no weights for the recall, which transformers calls missing
    try:
        model = HMTWrapper.from_pretrained(settings.model, recall=True, dtype=dtype, **quantization(settings))
        model.memory.float()
        return model
    finally:
        logging.set_verbosity(verbosity)


def extend_rope(config, settings: ResolvedFinetuning) -> str:
    """Give a configuration the context of the settings, or its own if that is longer, and a RoPE base for it.

    The bound of the base is eq. 18 of arXiv 2405.14591.

    Returns:
        a line that says what was changed, and what the old base could reach.

    Raises:
        ValueError: the model has no plain RoPE of one base, its base supports the context already, or the new base is
            below the bound.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"--recipe rope-extend needs a model with one RoPE base and no scaling; {settings.model} has {rope}."
        )
    head_dim = int(
        (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        * rope.get("partial_rotary_factor", 1.0)
    )
    length, claimed, old = settings.sequence_length, config.max_position_embeddings, rope["rope_theta"]
    context = max(length, claimed)
    reach = rope_context_bound(base=old, head_dim=head_dim)
    if length <= claimed and (reach is None or reach >= claimed - 1):  # a distance, one less than a context
        raise ValueError(
            f"--sequence-length {length} does not extend the context of {claimed} tokens, and base {old:g} suffices for "
            "these: there is nothing to extend. Take longer rows, or train on these by --recipe lora."
        )
    bound = base_bound(context - 1, head_dim)
    if settings.rope_base is None:
        base = choose_rope_base(context, head_dim)
    elif settings.rope_base < bound.base and not settings.allow_below_bound:
        raise ValueError(
            f"--rope-base {settings.rope_base:g} is below the bound of {bound.base:.0f} for {context} tokens and heads "
            f"of {head_dim}. Take a larger one, or --allow-below-bound."
        )
    else:
        base = settings.rope_base
    rope["rope_theta"], config.max_position_embeddings = float(base), context
    return f"RoPE base {old:g}, which reaches {reach} tokens, becomes {base:g}; {context} tokens need {bound.base:.0f}"


def choose_rope_base(context: int, head_dim: int) -> float:
    """Return the first RoPE base above which no length up to the context violates the bound, in two digits."""
    bound = base_bound(context - 1, head_dim)
    return round_up(bound.settled_base or bound.base, 2)


def round_up(value: float, digits: int) -> float:
    """Round up to a number of significant digits.

    >>> round_up(1915857.1, 2)
    2000000.0
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return math.ceil(value / unit) * unit


def check_length(model, length: int) -> None:
    """Raise ValueError if a model with positions is trained beyond them."""
    table = position_limit(model)
    if table is not None and length > table:
        raise ValueError(f"--sequence-length {length} is more than the {table} positions of this model.")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit and getattr(model.config, "rope_parameters", None):
        raise ValueError(
            f"--sequence-length {length} is more than the {limit} tokens of this model; extend its context first, by "
            "--recipe rope-extend."
        )


__all__ = [
    "base_dtype",
    "build_new_model",
    "check_attention",
    "disable_zero3_init",
    "extend_rope",
    "in_bfloat16",
    "load_changed_model",
    "quantization",
]
