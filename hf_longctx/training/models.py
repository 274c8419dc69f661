"""Creation of the model to train: a new model, or a pretrained model that a recipe adapts."""

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..fox.configuration_fox import FoxConfig
from ..fox.convert import read_llama_config
from ..fox.modeling_fox import FoxForCausalLM, FoxForgetGate, decay_time_bias
from ..hmt import HMTConfig, HMTWrapper
from ..metrics.rope.bound import rope_base_bound, rope_context_bound
from ..metrics.run.engine import check_causal
from ..metrics.run.model import check_decoder, load_language_model, position_limit
from .config import PRESETS, FinetuneConfig, PretrainConfig, RunConfig, nearest
from .trainer import GATE


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
    if args.recipe == "hmt":
        config = memory_config(args, config)
    elif args.recipe == "rope-extend":
        PartialState().print(extend_rope(config, args), file=sys.stderr)
    elif args.recipe == "fox-from-llama":
        quantization, values = getattr(config, "quantization_config", None), config.to_dict()
        # the default decay time depends on the claimed context, which `set` may change
        values |= {name: value for name, value in args.config_fields(FoxConfig).items() if name in values}
        config = read_llama_config(values | {"quantization_config": None}, args.decay_time)
        if quantization is not None:
            config.quantization_config = quantization
    if args.recipe != "hmt":
        for name, value in args.config_fields(type(config)).items():
            setattr(config, name, value)
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


def memory_config(args: FinetuneConfig, config: Any) -> HMTConfig:
    """Return the config of an HMT for its next training stage (arXiv 2405.06067, section 4).

    The first stage adds a memory without recall to a backbone. The second stage enables recall in the resulting HMT.
    """
    fields = args.config_fields(HMTConfig)
    if config.model_type != "hmt":
        new: dict[str, Any] = {"recall": False, "backbone_name_or_path": args.model}
        memory = HMTConfig(**new | fields)
        if not memory.recall:
            PartialState().print(
                f"First stage: each segment of {memory.segment_length} tokens receives the memory of the previous one, "
                "but does not recall earlier segments. For the second stage, repeat the recipe with --model "
                f"{Path(args.output_dir) / 'model'}.",
                file=sys.stderr,
            )
        return memory
    for name, value in fields.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"`{name}` must be {getattr(config, name)!r}, got {value!r}. The first stage of {args.model} used "
                f"{getattr(config, name)!r}. Remove {name} from --set."
            )
    config.recall = True
    return config


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
    elif args.recipe == "hmt":
        model = load_with_memory(args, config)
    else:
        model = load_whole(args, config, config.dtype)
        if args.recipe == "fox-from-llama":
            open_gates(model)
        elif args.recipe == "rope-extend" and model.generation_config.max_length is not None:
            # otherwise `generate` would stop at the old context; Llama 2 has such a limit
            model.generation_config.max_length = max(model.generation_config.max_length, args.max_length)
        check_length(model, args.max_length)
    # FoX and HMT are causal. A FoX separates documents, and an HMT must read across document boundaries.
    if not isinstance(model, FoxForCausalLM | HMTWrapper):
        check_sequences(model, args.packing)
    attention = args.attn_implementation
    if attention is None and config.model_type == "fox" and torch.cuda.is_available():
        attention = "auto"
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def base_dtype(args: FinetuneConfig, config: Any) -> torch.dtype:
    """Return the dtype in which to load the weights. Trained weights are cast to float32 afterwards."""
    if not args.use_peft or args.dtype == "float32":
        return torch.float32
    is_half = config.dtype in (torch.bfloat16, torch.float16)
    return torch.bfloat16 if args.dtype == "bfloat16" or (args.bf16 and is_half) else torch.float32


def quantization(args: FinetuneConfig) -> dict[str, Any]:
    """Return the quantization arguments for `from_pretrained`. Without quantization, return {}."""
    if not (args.load_in_4bit or args.load_in_8bit):
        return {}
    compute: Any = torch.bfloat16 if args.bf16 else torch.float32
    how: Any = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute)
    config = BitsAndBytesConfig(load_in_4bit=args.load_in_4bit, load_in_8bit=args.load_in_8bit, **how)
    return {"quantization_config": config}


def load_with_memory(args: FinetuneConfig, config: Any) -> HMTWrapper:
    """Load an HMT with recall, or load a backbone and add a memory."""
    saved = read_config(str(args.model))
    if saved.model_type != "hmt":
        return HMTWrapper.from_backbone(load_whole(args, saved, config.dtype), config)
    model = HMTWrapper.from_pretrained(args.model, recall=True, dtype=config.dtype, **quantization(args))
    model.memory.float()
    return model


def load_whole(args: FinetuneConfig, config: Any, dtype: torch.dtype) -> Any:
    """Load a pretrained model. Only the gates of a new FoX may be missing from the checkpoint.

    Raises:
        ValueError: weights are missing, or have other shapes than the config requires.
    """
    with gates_may_be_missing() if args.recipe == "fox-from-llama" else nullcontext():
        loaded: Any = load_language_model(
            str(args.model),
            config=config,
            dtype=dtype,
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


@contextmanager
def gates_may_be_missing() -> Iterator[None]:
    """Make transformers load a FoX without gates. It then does not report them as missing weights."""
    FoxForCausalLM._keys_to_ignore_on_load_missing = [GATE.pattern]
    try:
        yield
    finally:
        del FoxForCausalLM._keys_to_ignore_on_load_missing


@torch.no_grad()
def open_gates(model: Any) -> None:
    """Initialize the forget gates as `from_llama` does. The gates are float32, whatever the model's dtype."""
    times = model.config.decay_time_min, model.config.decay_time_max
    for module in model.modules():
        if isinstance(module, FoxForgetGate):
            module.float()
            module.weight.zero_()
            module.bias.copy_(decay_time_bias(len(module.bias), *times))


def extend_rope(config, args: FinetuneConfig) -> str:
    """Extend a config's context to `max_length`, and choose a RoPE base above the bound for this context.

    A longer context in the config is retained. The bound on the base is eq. 18 of arXiv 2405.14591.

    Returns:
        a one-line description of the change.

    Raises:
        ValueError: the model does not have exactly one unscaled RoPE base, or this base already suffices.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope or rope.get("rope_type", "default") != "default":
        raise ValueError(f"--recipe rope-extend requires a model with one unscaled RoPE base, got {rope}.")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    claimed, old = config.max_position_embeddings, rope["rope_theta"]
    context = max(args.max_length, claimed)
    reach = rope_context_bound(base=old, head_dim=head_dim)
    # `reach` is a distance between tokens, so the matching context is one token longer.
    if args.max_length <= claimed and (reach is None or reach >= claimed - 1):
        raise ValueError(
            f"--max_length {args.max_length} does not extend the context of {claimed} tokens. The RoPE base {old:g} "
            "already suffices for this context. Give a larger --max_length, or --recipe lora."
        )
    bound = rope_base_bound(context - 1, head_dim)
    base = bound.settled_base or bound.base
    unit = 10.0 ** (math.floor(math.log10(base)) - 1)  # two digits
    rope["rope_theta"], config.max_position_embeddings = math.ceil(base / unit) * unit, context
    return (
        f"RoPE base: {old:g} (reaches {reach} tokens) -> {rope['rope_theta']:g}; {context} tokens need at least "
        f"{bound.base:.0f}"
    )


def read_config(name: str) -> Any:
    """Read a model's config from a folder or the Hub. Raise ValueError for an adapter or an encoder-decoder."""
    if (Path(name) / "adapter_config.json").exists():
        raise ValueError(
            f"{name} contains an adapter. Merge it into its base model first, with PEFT's merge_and_unload()."
        )
    config = AutoConfig.from_pretrained(name)
    check_decoder(config)
    return config


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


def check_length(model, length: int) -> None:
    """Raise ValueError if the sequences exceed the model's maximum positions."""
    table = position_limit(model)
    if table is not None and length > table:
        raise ValueError(f"--max_length must be at most {table}, got {length}. This model has {table} positions.")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit and getattr(model.config, "rope_parameters", None):
        raise ValueError(
            f"--max_length must be at most {limit}, got {length}. To extend the model's context first, use --recipe "
            "rope-extend."
        )


@torch.no_grad()
def check_flash_attention(model: Any) -> None:
    """Raise ValueError if a model does not pass position ids to FlashAttention.

    FlashAttention separates documents by their position ids. For the check, the model reads two tokens, and a stub
    replaces the kernel. Any device can run this check.
    """
    name, seen = model.config._attn_implementation, []
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


__all__ = ["check_flash_attention", "extend_rope", "make_config", "make_model"]
