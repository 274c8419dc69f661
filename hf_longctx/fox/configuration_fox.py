"""Configuration of the Forgetting Transformer (FoX)."""

import difflib
import math
from typing import Any, NamedTuple

import transformers
from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging
from transformers.utils.versions import require_version


TESTED = (5, 15), (5, 24)  # oldest and newest minor version tested with this code
OLDEST, NEWEST = (".".join(map(str, version)) for version in TESTED)
IS_TESTED = tuple(map(int, transformers.__version__.split(".")[:2])) <= TESTED[1]
REPAIR = (
    f"this code of hf-longctx was tested with transformers {OLDEST} to {NEWEST}, not with {transformers.__version__}: "
    "`pip install -U hf-longctx` and load without trust_remote_code, or pin "
    f"'transformers<{TESTED[1][0]}.{TESTED[1][1] + 1}' (owners of a repository update its code: `hf download REPO "
    "--local-dir FOLDER`, then `hf-longctx push FOLDER REPO`)."
)

# This file of a saved folder is loaded first, so the warning about an untested version precedes any failure.
require_version(f"transformers>={OLDEST}", "FoX is tested from there on: pip install -U transformers")
if not IS_TESTED:
    # all copies of this file share this logger and message, so the warning appears once
    logging.get_logger("transformers.hf_longctx").warning_once(REPAIR[0].upper() + REPAIR[1:])

FORMAT_VERSION = 1
FORGET_GATES = ("full", "bias_only", "fixed", "none")
OUTPUT_GATES = ("sigmoid", "silu")
# Fields of other transformers models that must have these values in a FoX.
FIXED = {"is_causal": True, "add_cross_attention": False, "is_encoder_decoder": False}
# Names that the base class accepts in addition to its fields and properties.
BASE_NAMES = {"attn_implementation", "rope_theta", "auto_map", "quantization_config", *FIXED}
LAYER_TYPES = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")


class FoxSizes(NamedTuple):
    """Resolved sizes of a `FoxConfig`, with all defaults filled in.

    num_key_value_groups: number of query heads per key head.
    gates_per_key: number of forget gates per key head: 1, or one per query head.
    """

    head_dim: int
    num_key_value_heads: int
    num_key_value_groups: int
    intermediate_size: int
    gates_per_key: int


@strict
class FoxConfig(PreTrainedConfig):
    """Configuration of a Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130).

    The defaults are FoX (LLaMA): a LLaMA block with a forget gate instead of a positional encoding.
    `FoxConfig.pro(...)` enables all components of FoX (Pro). Each component of the paper's ablation has its own field.
    Other fields are as in `LlamaConfig`.

    Args:
        max_position_embeddings: training context length; not a limit without RoPE.
        intermediate_size: width of the MLP. Default 8/3 hidden_size, rounded up to a multiple of 256.
        num_key_value_heads: key and value heads, each shared by num_attention_heads / num_key_value_heads query heads.
            Default num_attention_heads.
        forget_gate_per_kv_head: share a forget gate among the query heads of a key head. Default: one per query head.
        head_dim: size of each head. Default hidden_size / num_attention_heads.
        forget_gate: "full" f = sigmoid(w.x + b), "bias_only" f = sigmoid(b) learned, "fixed" f = sigmoid(b) as
            initialised (ALiBi), "none" a plain Transformer. Sec. 3 and 4.5.
        decay_time_min: initial decay time in tokens of the fastest head. Decay times are log-spaced over the heads, so
            that head h forgets by a factor e in T_h tokens (Appendix D). Required for "fixed": 2 ** (8 / H) and 2 ** 8
            give the slopes of ALiBi for H heads, a power of two. Default: learned gates start half open, with a decay
            time of 1.4 tokens, as in the paper; they learn slowly from a small corpus.
        decay_time_max: initial decay time of the slowest head.
        rope_parameters: transformers' RoPE dictionary, e.g. {"rope_type": "default", "rope_theta": 500000.0}. Default
            None: no positional encoding, as in the paper.
        qkv_bias: a bias on the query, key and value projections, as in Qwen2.
        qk_norm: RMSNorm on queries and keys, per head. `qk_norm_shared` shares one weight vector over the heads, as
            the released checkpoints do. `qk_norm_eps` is its epsilon.
        output_gate: activation of an output gate, a projection of the input that multiplies the attention output:
            "sigmoid", "silu" or None.
        output_norm: RMSNorm per head on the attention output, before the output gate.
        k_shift: data-dependent token shift on keys (eq. 14).
        v_shift: data-dependent token shift on values.
        sliding_window: number of tokens that a token attends to, including itself. Default None: all.
        log_pruning_tolerance: log of the attention weight that `attn_implementation="forgetting_triton"` may skip per
            query, in faded keys (arXiv 2504.06949, which uses -10). At most 0. None disables pruning; other
            implementations never prune.
        format_version: layout of the saved folder.

    Raises:
        ValueError: a name is unknown, unless the configuration was saved; a value is out of range or contradicts
            another; or the folder was saved by a newer hf-longctx.
    """

    model_type = "fox"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    default_theta = 500_000.0
    # Tensor parallelism splits every layer by heads. `_tp_plan` drops the rules of absent modules.
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        # Shift weights and gate are not nn.Linear: "packed_colwise" runs them on a rank's heads and sums the
        # gradients of their input.
        "layers.*.self_attn.k_shift_proj": "packed_colwise",
        "layers.*.self_attn.k_shift_proj.weight": "colwise",
        "layers.*.self_attn.v_shift_proj": "packed_colwise",
        "layers.*.self_attn.v_shift_proj.weight": "colwise",
        "layers.*.self_attn.f_proj": "packed_colwise",
        "layers.*.self_attn.f_proj.weight": "colwise",
        "layers.*.self_attn.f_proj.bias": "colwise",
        "layers.*.self_attn.q_norm": "local_params",
        "layers.*.self_attn.q_norm.weight": "colwise",
        "layers.*.self_attn.k_norm": "local_params",
        "layers.*.self_attn.k_norm.weight": "colwise",
        "layers.*.self_attn.o_norm": "local_params",
        "layers.*.self_attn.o_norm.weight": "colwise",
        "layers.*.self_attn.g_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 16384
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    forget_gate: str = "full"
    forget_gate_per_kv_head: bool = False
    decay_time_min: float | int | None = None
    decay_time_max: float | int | None = None
    rope_parameters: dict | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_shared: bool = False
    qk_norm_eps: float = 1e-5
    output_gate: str | None = None
    output_norm: bool = False
    k_shift: bool = False
    v_shift: bool = False
    sliding_window: int | None = None
    log_pruning_tolerance: float | int | None = -10.0
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"this folder has FoX format version {self.format_version}, but the installed code reads up to "
                f"version {FORMAT_VERSION}. Upgrade: pip install -U hf-longctx (or use trust_remote_code=True)."
            )
        self._check_fields(kwargs)
        self.check_heads()
        self._check_gates()
        if self.intermediate_size is None:
            self.intermediate_size = -(-int(self.hidden_size * 8 / 3) // 256) * 256
        self.base_model_tp_plan = self._tp_plan()  # ty: ignore[invalid-attribute-access] transformers reads it so
        without_rope = self.rope_parameters is None and not {"rope_theta", "rope_scaling"} & kwargs.keys()
        super().__post_init__(**kwargs)
        if without_rope:
            self.rope_parameters = None  # the base class fills in a default

    @property
    def sizes(self) -> FoxSizes:
        """The resolved sizes of the layers."""
        head_dim, kv_heads, width = self.head_dim, self.num_key_value_heads, self.intermediate_size
        assert head_dim is not None and kv_heads is not None and width is not None  # since `__post_init__`
        group = self.num_attention_heads // kv_heads
        one_gate = self.forget_gate_per_kv_head or self.forget_gate == "none"
        return FoxSizes(head_dim, kv_heads, group, width, 1 if one_gate else group)

    @property
    def layer_types(self):
        """The layer types from which transformers creates a cache, derived from the other fields."""
        # The token shift is a one-token convolution, which transformers caches in a "hybrid" layer.
        if self.k_shift or self.v_shift:
            layer_type = "hybrid" if self.sliding_window is None else "hybrid_sliding"
        else:
            layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [layer_type] * self.num_hidden_layers

    @layer_types.setter
    def layer_types(self, value):
        if value is not None and value != self.layer_types:
            raise ValueError(
                f"layer_types must be {self.layer_types} with k_shift={self.k_shift}, v_shift={self.v_shift} and "
                f"sliding_window={self.sliding_window}, got {value}. Leave layer_types out."
            )

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # `kwargs` may change the depth or window that the saved layer types were derived from.
        layer_types = config_dict.get("layer_types") or []
        if len(set(layer_types)) == 1 and layer_types[0] in LAYER_TYPES:
            config_dict = {name: value for name, value in config_dict.items() if name != "layer_types"}
        return super().from_dict(config_dict, **kwargs)

    def _tp_plan(self):
        present = {
            "f_proj": self.forget_gate != "none",
            "f_proj.weight": self.forget_gate == "full",
            "f_proj.bias": self.forget_gate in ("full", "bias_only"),
            "k_shift_proj": self.k_shift,
            "v_shift_proj": self.v_shift,
            "q_norm": self.qk_norm,
            "k_norm": self.qk_norm,
            "o_norm": self.output_norm,
            "g_proj": self.output_gate is not None,
        }
        plan = {}
        for rule, style in (type(self).base_model_tp_plan or {}).items():
            name = rule.rpartition("self_attn.")[2]
            module = name.partition(".")[0]
            if self.qk_norm_shared and module in ("q_norm", "k_norm"):
                style = "replicated_with_grad_allreduce" if name == module else "replicate"
            if present.get(name, present.get(module, True)):
                plan[rule] = style
        return plan

    def validate_rope(self):
        """Raise ValueError for RoPE parameters that transformers accepts and FoX does not; called by `@strict`."""
        super().validate_rope()
        parameters = self.rope_parameters or {}
        if not (theta := parameters.get("rope_theta", 1.0)) > 0:
            raise ValueError(f"rope_theta must be a positive number such as 500000.0, got {theta}.")
        if (share := parameters.get("partial_rotary_factor", 1.0)) != 1:
            raise ValueError(
                f"partial_rotary_factor must be 1, got {share}: FoX rotates whole heads, like Llama in transformers, but "
                "vLLM would rotate only a part. Leave it out."
            )

    def _check_fields(self, kwargs):
        unknown = [x for x in kwargs if x not in BASE_NAMES and not x.startswith("_") and not hasattr(type(self), x)]
        if unknown and "model_type" not in kwargs:  # other programs add names to saved configurations
            closest = difflib.get_close_matches(unknown[0], type(self).__annotations__)
            hint = f"; did you mean {closest[0]!r}?" if closest else "."
            raise ValueError(f"{unknown[0]!r} is not a field of FoxConfig{hint} help(FoxConfig) lists all fields.")
        sizes = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        for name, value in FIXED.items():
            if (got := kwargs.get(name, getattr(self, name, value))) != value:
                raise ValueError(f"{name} must be {value}, got {got}. A FoX is a causal decoder.")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            ids = getattr(self, name)
            if any(i is not None and not 0 <= i < self.vocab_size for i in (ids if isinstance(ids, list) else [ids])):
                raise ValueError(
                    f"{name} must be None or from 0 to vocab_size - 1 = {self.vocab_size - 1}, got {ids}."
                )

    def check_heads(self) -> None:
        """Raise ValueError if heads and their sizes do not match; fill in defaults."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads={self.num_key_value_heads}, got "
                f"{self.num_attention_heads}. Query heads share key heads in equal groups."
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads={self.num_attention_heads}, got "
                    f"{self.hidden_size}. Change one of them, or set head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.sliding_window is not None and self.sliding_window < 2:
            raise ValueError(f"sliding_window must be None or at least 2 tokens, got {self.sliding_window}.")

    def _check_gates(self):
        if self.forget_gate not in FORGET_GATES:
            raise ValueError(f"forget_gate must be one of {FORGET_GATES}, got {self.forget_gate!r}.")
        if self.output_gate is not None and self.output_gate not in OUTPUT_GATES:
            raise ValueError(f"output_gate must be None or one of {OUTPUT_GATES}, got {self.output_gate!r}.")
        if self.log_pruning_tolerance is not None and not self.log_pruning_tolerance <= 0:
            raise ValueError(
                f"log_pruning_tolerance must be at most 0, the log of a weight, got {self.log_pruning_tolerance}. None "
                "disables pruning."
            )
        if self.forget_gate == "none" and self.forget_gate_per_kv_head:
            raise ValueError(
                'forget_gate_per_kv_head=True requires a forget gate, but forget_gate is "none". Remove one of them.'
            )
        if self.qk_norm_shared and not self.qk_norm:
            raise ValueError("qk_norm_shared=True requires qk_norm=True, got qk_norm=False. Set both.")
        shortest, longest = self.decay_time_min, self.decay_time_max
        if shortest is None and longest is None:
            if self.forget_gate == "fixed":
                raise ValueError(
                    'forget_gate="fixed" requires decay_time_min and decay_time_max, in tokens, e.g. 2 and 512.'
                )
            return
        both = f"decay_time_min={shortest} and decay_time_max={longest}"
        if self.forget_gate == "none":
            raise ValueError(f'{both} require a forget gate, but forget_gate is "none". Leave them out.')
        if shortest is None or longest is None or not 0 < shortest <= longest < math.inf:
            raise ValueError(f"{both} must satisfy 0 < min <= max < inf, in tokens.")

    @classmethod
    def pro(cls, **kwargs):
        """Return FoX (Pro): output gate and norm, QK-norm, token shifts (Figure 1); overridden by `kwargs`."""
        switches: dict[str, Any] = dict(
            qk_norm=True, output_gate="sigmoid", output_norm=True, k_shift=True, v_shift=True
        )
        return cls(**switches | kwargs)


__all__ = ["FoxConfig"]
