"""Configuration of the Forgetting Transformer (FoX)."""

import difflib
import math
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging
from transformers.utils.versions import require_version


TESTED = (5, 15), (5, 24)  # oldest and newest minor version tested with this code
OLDEST, NEWEST = (".".join(map(str, version)) for version in TESTED)
REPAIR = (
    f"this code of hf-longctx was tested with transformers {OLDEST} to {NEWEST}, not with {transformers.__version__}. "
    "Run `pip install -U hf-longctx` and load without trust_remote_code, or pin "
    f"'transformers<{TESTED[1][0]}.{TESTED[1][1] + 1}'. If you own the repository, update its code: run `hf download "
    "REPO --local-dir FOLDER`, then `hf-longctx push FOLDER REPO`."
)

# A saved folder loads this file first, so the warning about an untested version precedes any failure.
require_version(f"transformers>={OLDEST}", "FoX does not support older versions. Run: pip install -U transformers")
if tuple(map(int, transformers.__version__.split(".")[:2])) > TESTED[1]:
    # all copies of this file share this logger and message, so the warning appears once
    logging.get_logger("transformers.hf_longctx").warning_once(REPAIR[0].upper() + REPAIR[1:])

# Names that the base class accepts in addition to its fields and properties.
BASE_NAMES = {"attn_implementation", "rope_theta", "auto_map", "quantization_config", "is_causal"}


@strict
class FoxConfig(PreTrainedConfig):
    """Configuration of a Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130).

    The defaults are FoX (LLaMA): a LLaMA block with a forget gate instead of a positional encoding.
    `FoxConfig.pro(...)` enables all components of FoX (Pro). Each component of the paper's ablation has its own field.
    Other fields are as in `LlamaConfig`.

    Args:
        max_position_embeddings: training context length. Without RoPE, it is not a limit.
        intermediate_size: width of the MLP. Default 8/3 hidden_size, rounded up to a multiple of 256.
        num_key_value_heads: number of key and value heads. Each is shared by num_attention_heads / num_key_value_heads
            query heads. Default num_attention_heads.
        forget_gate_per_kv_head: share a forget gate among the query heads of a key head. Default: one per query head.
        head_dim: size of each head. Default hidden_size / num_attention_heads.
        forget_gate: "full": f = sigmoid(w.x + b). "bias_only": f = sigmoid(b) with a learned b. "fixed": f =
            sigmoid(b) with the initial b (ALiBi). "none": no gate, a plain Transformer. See Sec. 3 and 4.5.
        decay_time_min: initial decay time in tokens of the fastest head. Decay times are log-spaced over the heads.
            The attention weights of head h fade by a factor e in T_h tokens (Appendix D). Required for "fixed". If the
            number of heads H is a power of two, decay_time_min = 2 ** (8 / H) and decay_time_max = 2 ** 8 give the
            slopes of ALiBi. Default: learned gates start half open, with a decay time of 1.4 tokens, as in the paper.
            These gates learn slowly on a small corpus.
        decay_time_max: initial decay time of the slowest head.
        rope_parameters: transformers' RoPE dictionary, e.g. {"rope_type": "default", "rope_theta": 500000.0}. Default
            None: no positional encoding, as in the paper.
        qkv_bias: a bias on the query, key and value projections, as in Qwen2.
        qk_norm: RMSNorm on queries and keys, per head. `qk_norm_shared` shares one weight vector across the heads, as
            the released checkpoints do. `qk_norm_eps` is its epsilon.
        output_gate: activation of the output gate: "sigmoid", "silu" or None. The gate is a projection of the input.
            It multiplies the attention output.
        output_norm: RMSNorm per head on the attention output, before the output gate.
        k_shift: data-dependent token shift on keys (eq. 14).
        v_shift: data-dependent token shift on values.
        sliding_window: number of tokens that a token attends to, including itself. Default None: all earlier tokens.
        log_pruning_tolerance: log of the largest attention weight that a query may lose. The log must be at most 0.
            `attn_implementation="forgetting_triton"` skips faded keys within this limit (arXiv 2504.06949 uses -10).
            None disables pruning. Other implementations never prune.

    Raises:
        ValueError: a value is out of range or contradicts another; or a name is not a field. Names in saved
            configurations are not checked.
    """

    model_type = "fox"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    default_theta = 500_000.0
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: Any = None  # `__post_init__` replaces None by an int
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: Any = None
    head_dim: Any = None
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

    def __post_init__(self, **kwargs):
        unknown = [x for x in kwargs if x not in BASE_NAMES and not x.startswith("_") and not hasattr(type(self), x)]
        if unknown and "model_type" not in kwargs:  # other programs add names to saved configurations
            closest = difflib.get_close_matches(unknown[0], type(self).__annotations__)
            hint = f"; did you mean {closest[0]!r}?" if closest else "."
            raise ValueError(f"{unknown[0]!r} is not a field of FoxConfig{hint} help(FoxConfig) lists all fields.")
        if self.intermediate_size is None:
            self.intermediate_size = -(-int(self.hidden_size * 8 / 3) // 256) * 256
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
            if rest:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads={self.num_attention_heads}, got "
                    f"{self.hidden_size}. Change one of them, or set head_dim."
                )
        self.base_model_tp_plan = self._tp_plan()  # ty: ignore[invalid-attribute-access] read by transformers
        without_rope = self.rope_parameters is None and not {"rope_theta", "rope_scaling"} & kwargs.keys()
        super().__post_init__(**kwargs)
        if without_rope:
            self.rope_parameters = None  # the base class fills in a default
        self.validate_architecture()  # `@strict` calls it too, but its own error is not a ValueError

    @property
    def num_key_value_groups(self) -> int:
        """Number of query heads per key head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def gates_per_key(self) -> int:
        """Number of forget gates per key head: 1, or one per query head."""
        return 1 if self.forget_gate_per_kv_head or self.forget_gate == "none" else self.num_key_value_groups

    @property
    def layer_types(self):
        """The layer types from which transformers creates a cache. They follow from the other fields."""
        # The token shift is a one-token convolution. transformers caches it in a "hybrid" layer.
        if self.k_shift or self.v_shift:
            layer_type = "hybrid" if self.sliding_window is None else "hybrid_sliding"
        else:
            layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [layer_type] * self.num_hidden_layers

    @layer_types.setter
    def layer_types(self, value):
        if value is not None and value != self.layer_types:
            raise ValueError(
                f"layer_types must be {self.layer_types}, got {value}. It follows from k_shift={self.k_shift}, "
                f"v_shift={self.v_shift} and sliding_window={self.sliding_window}. Leave layer_types out."
            )

    def _tp_plan(self):
        """Return the tensor-parallel plan for the modules that exist. It splits every layer by heads."""
        learned = {"full": ["weight", "bias"], "bias_only": ["bias"]}
        # Shift weights and gate are not nn.Linear. "packed_colwise" computes the heads of one rank, and sums the
        # gradients of the input.
        modules = [
            ("f_proj", self.forget_gate != "none", "packed_colwise", learned.get(self.forget_gate, [])),
            ("k_shift_proj", self.k_shift, "packed_colwise", ["weight"]),
            ("v_shift_proj", self.v_shift, "packed_colwise", ["weight"]),
            ("q_norm", self.qk_norm, "local_params", ["weight"]),
            ("k_norm", self.qk_norm, "local_params", ["weight"]),
            ("o_norm", self.output_norm, "local_params", ["weight"]),
            ("g_proj", self.output_gate is not None, "colwise", []),
        ]
        plan = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
        for name, exists, style, parameters in modules:
            if exists:
                plan |= {name: style, **{f"{name}.{parameter}": "colwise" for parameter in parameters}}
        if self.qk_norm_shared:
            for name in ("q_norm", "k_norm"):
                plan |= {name: "replicated_with_grad_allreduce", f"{name}.weight": "replicate"}
        plan = {f"layers.*.self_attn.{name}": style for name, style in plan.items()}
        mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
        return plan | {f"layers.*.mlp.{name}": style for name, style in mlp.items()}

    def validate_architecture(self):
        """Raise ValueError if a field is out of range or contradicts another. `@strict` also calls this method."""
        if not getattr(self, "is_causal", True):
            raise ValueError("is_causal must be True or unset, got False. Forget gates require causal attention.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads={self.num_key_value_heads}, got "
                f"{self.num_attention_heads}. Query heads share key heads in equal groups."
            )
        if self.sliding_window is not None and self.sliding_window < 2:
            raise ValueError(f"sliding_window must be None or at least 2 tokens, got {self.sliding_window}.")
        if (share := (self.rope_parameters or {}).get("partial_rotary_factor", 1.0)) != 1:
            raise ValueError(
                f"partial_rotary_factor must be 1, got {share}. FoX always rotates whole heads, but vLLM would "
                "rotate only a part of each head. Remove partial_rotary_factor from the config."
            )
        if self.forget_gate not in ("full", "bias_only", "fixed", "none"):
            raise ValueError(f"forget_gate must be 'full', 'bias_only', 'fixed' or 'none', got {self.forget_gate!r}.")
        if self.output_gate not in (None, "sigmoid", "silu"):
            raise ValueError(f"output_gate must be None, 'sigmoid' or 'silu', got {self.output_gate!r}.")
        if self.log_pruning_tolerance is not None and not self.log_pruning_tolerance <= 0:
            raise ValueError(
                f"log_pruning_tolerance must be at most 0, got {self.log_pruning_tolerance}. It is the log of a "
                "weight. None disables pruning."
            )
        if self.qk_norm_shared and not self.qk_norm:
            raise ValueError("qk_norm_shared=True requires qk_norm=True, got qk_norm=False. Set both.")
        shortest, longest = self.decay_time_min, self.decay_time_max
        if shortest is None and longest is None and self.forget_gate != "fixed":
            return
        if shortest is None or longest is None or not 0 < shortest <= longest < math.inf:
            raise ValueError(
                f"decay_time_min and decay_time_max must satisfy 0 < min <= max < inf, got {shortest} and "
                f'{longest}. Both are numbers of tokens. Set both, e.g. to 2 and 512, or leave both out. forget_gate="fixed" requires them.'
            )

    @classmethod
    def pro(cls, **kwargs):
        """Return a configuration of FoX (Pro): output gate and norm, QK-norm, token shifts. Override with `kwargs`."""
        switches: dict[str, Any] = dict(
            qk_norm=True, output_gate="sigmoid", output_norm=True, k_shift=True, v_shift=True
        )
        return cls(**switches | kwargs)


__all__ = ["FoxConfig"]
