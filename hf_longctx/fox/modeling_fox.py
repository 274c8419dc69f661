"""The Forgetting Transformer, FoX (Lin et al. 2025, arXiv 2503.02130).

FoX is a pre-norm decoder with softmax attention. A data-dependent forget gate, one scalar per head and token, fades
the keys. FoX does not need a positional encoding. FoX (LLaMA) is the plain block. FoX (Pro) adds QK-norm, an output
gate and norm, and a token shift on keys and values. The gate is folded into the keys (attention_fox.py). Every
attention backend, cache and generation method of transformers therefore works unchanged.
"""

import math
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_kernel_forward_from_hub
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import AutoModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_fox import CLOSED_GATE, first_columns, folded_width
from .backend_fox import AUTO, NAME, attend
from .compat_fox import CACHE, accept_both_names, adapt, slice_logits_to_keep
from .configuration_fox import FoxConfig
from .fused_fox import can_fuse, fused_heads, fused_norm
from .inputs_fox import NO_QUANTIZED_CACHE, create_attention_mask, read_call, read_token_mask
from .paged_fox import ContinuousBatching, has_pages, paged_hidden_states
from .state_fox import AttendingCache, CachedLayer, Call, replace_shift_layers, shift_tokens
from .torch_internals_fox import MODULE_HOOKS
from .triton_fox import why_not


class FoxHeadRMSNorm(nn.Module):
    """RMSNorm over each head, with one weight vector per head: (..., H, D) -> (..., H, D), weight (H * D)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_norm(x, self.weight, self.variance_epsilon)

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


@use_kernel_forward_from_hub("RMSNorm")
class FoxRMSNorm(FoxHeadRMSNorm):
    """RMSNorm over the last dimension, with one weight vector: (..., D) -> (..., D), weight (D)."""


def are_ours(*modules: nn.Module | None) -> bool:
    """Return whether all `modules` are unmodified instances of classes in this file.

    Only then can a kernel use their weights. Hub kernels and tensor parallelism replace the `forward` method, and
    adapters replace the whole module. Compiled calls return False.
    """
    return not torch.compiler.is_compiling() and all(
        type(module) in (FoxRMSNorm, FoxHeadRMSNorm, FoxForgetGate, FoxShiftWeight)
        and "forward" not in vars(module)
        and not any(map(vars(module).get, MODULE_HOOKS))
        for module in modules
    )


def decay_time_bias(num_heads: int, time_min: float, time_max: float) -> torch.Tensor:
    """Return gate biases (H,) for log-spaced decay times T_h in tokens: -1 / log sigmoid(b_h) = T_h (Appendix D)."""
    times = torch.linspace(math.log(time_min), math.log(time_max), num_heads, dtype=torch.float64).exp()
    return -torch.expm1(1 / times).log().float()


def narrow_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Project to few features. In compiled decoding, a fused fp32 sum is twice as fast as a matmul."""
    if torch.compiler.is_compiling() and x.shape[1] == 1 and x.is_cuda:
        return (x.float().unsqueeze(-2) * weight).sum(-1)
    return F.linear(x, weight.to(x.dtype))


class FoxForgetGate(nn.Module):
    """Log gates log f_t = log sigmoid(w.x_t + b): (B, T, hidden) -> (B, H or Hkv, T), fp32.

    It is not an `nn.Linear`, so that quantizers and adapters skip it: errors of a gate accumulate over the context.
    For the same reason, the bias is added in fp32. bfloat16 would round the decay time of an open gate by 6 %.
    """

    def __init__(self, config: FoxConfig):
        super().__init__()
        heads = config.num_key_value_heads if config.forget_gate_per_kv_head else config.num_attention_heads
        self.kind = config.forget_gate
        if self.kind == "full":
            self.weight = nn.Parameter(torch.empty(heads, config.hidden_size, dtype=torch.float32))
        bias = torch.empty(heads, dtype=torch.float32)
        if self.kind == "fixed":
            self.register_buffer("bias", bias)
        else:
            self.bias = nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.log_gates(narrow_linear(x, self.weight) if self.kind == "full" else x.new_zeros(*x.shape[:2], 1))

    def log_gates(self, product: torch.Tensor) -> torch.Tensor:
        """Return log gates from the product of weight and x, (B, T, H or Hkv)."""
        return F.logsigmoid(product.float() + self.bias.float()).clamp(min=CLOSED_GATE).transpose(1, 2)


class FoxShiftWeight(nn.Module):
    """Weights a_t = sigmoid(w.x_t) of the previous key or value: (B, T, hidden) -> (B, T, Hkv), fp32.

    Like the forget gate, it is not an `nn.Linear`: it is too narrow for the kernels of quantized layers.
    """

    def __init__(self, config: FoxConfig):
        super().__init__()
        self.weight = nn.Linear(config.hidden_size, config.num_key_value_heads, bias=False).weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return narrow_linear(x, self.weight).float().sigmoid()


class FoxAttention(nn.Module):
    """Softmax attention with a learned forget gate (sec. 3), and the options of the Pro block (Figure 1)."""

    def __init__(self, config: FoxConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_key_value_groups
        self.gates_per_key = config.gates_per_key
        self.sliding_window = config.sliding_window
        self.scaling = self.head_dim**-0.5
        self.rotary_gain = 1.0  # the factor by which YaRN and LongRoPE scale q.k
        if config.rope_parameters:
            self.rotary_gain = LlamaRotaryEmbedding(config).attention_scaling ** 2  # ty: ignore[invalid-argument-type]
        self.is_causal = True

        hidden_size = config.hidden_size
        q_size, kv_size = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, hidden_size, bias=False)
        self.f_proj = FoxForgetGate(config) if config.forget_gate != "none" else None
        self.k_shift_proj = FoxShiftWeight(config) if config.k_shift else None
        self.v_shift_proj = FoxShiftWeight(config) if config.v_shift else None
        if not config.qk_norm:
            self.q_norm = self.k_norm = nn.Identity()
        elif config.qk_norm_shared:
            self.q_norm, self.k_norm = (FoxRMSNorm(self.head_dim, config.qk_norm_eps) for _ in range(2))
        else:
            self.q_norm, self.k_norm = (FoxHeadRMSNorm(size, config.qk_norm_eps) for size in (q_size, kv_size))
        self.o_norm = FoxHeadRMSNorm(q_size, config.rms_norm_eps) if config.output_norm else nn.Identity()
        self.g_proj = nn.Linear(hidden_size, q_size, bias=False) if config.output_gate else None

    @accept_both_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        call: Call | None = None,
        cache: Cache | CachedLayer | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, call = hidden_states, call or Call(self.config._attn_implementation)
        past = CachedLayer(cache, self.layer_idx, x.device) if isinstance(cache, Cache) else cache
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # (B, T, H * D)
        log_f, share = self.narrow_projections(x, k)  # (B, H or Hkv, T) and (B, T, 2 Hkv), or None
        if share is None:
            q, k, v = self.split_heads(q, k, v)
            q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        else:
            q, k, v = self.shift_and_norm(q, k, v, share, call, past)  # (B, H, T, D)
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        o, weights = attend(self, q, k, v, log_f, call, past, **kwargs)  # (B, T, H, D) or wider
        return self.output(x, o), weights

    def split_heads(self, *tensors):
        """Reshape the output of projections, (B, T, H * D), to (B, T, H, D)."""
        return (y.unflatten(-1, (-1, self.head_dim)) for y in tensors)

    def narrow_projections(self, x, k):
        """Return the log gates and the shift weights, or None if the layer has none. Use one product if possible."""
        gate: Any = self.f_proj
        shifts: Any = (self.k_shift_proj, self.v_shift_proj)
        if are_ours(gate, *shifts) and gate.kind == "full":
            product = narrow_linear(x, torch.cat([proj.weight for proj in (gate, *shifts)])).float()
            heads = len(gate.bias)
            product, share = product.split_with_sizes((heads, product.shape[-1] - heads), dim=-1)
            return gate.log_gates(product), share.sigmoid()
        share = None if shifts == (None, None) else self.shift_weights(x, k.shape[2] // self.head_dim)
        return None if gate is None else gate(x), share

    def shift_and_norm(self, q, k, v, share, call: Call, past: CachedLayer | None):
        """Apply token shift and QK-norm, (B, T, H * D) -> (B, H, T, D).

        The shift of keys and values is a_t prev + (1 - a_t) cur (eq. 14).
        """
        norms: Any = (self.q_norm, self.k_norm)
        before = None if past is None else past.token_before(k, self.head_dim)
        fused = before is None and call.shard is None and (call.predecessor is None) == (call.successor is None)
        fused = fused and are_ours(*norms) and can_fuse(self.head_dim, q, k, v, *(norm.weight for norm in norms))
        if fused:
            options = self.head_dim, self.config.qk_norm_eps, share, call.predecessor, call.successor
            new = fused_heads(q, k, v, *(norm.weight for norm in norms), *options)
            if past is None:
                return new
        q, k, v = self.split_heads(q, k, v)
        kv = torch.cat([k, v], dim=2)  # (B, T, 2 Hkv, D), as in a cache
        if call.shard is not None:
            before = call.shard.token_before(kv)
        if not fused:
            shifted = shift_tokens(kv, share, before, call.predecessor)
            q, k, v = norms[0](q), norms[1](shifted[:, :, : k.shape[2]]), shifted[:, :, k.shape[2] :]
            new = tuple(y.transpose(1, 2) for y in (q, k, v))
        if past is not None:
            past.keep_tokens(kv, before, call)
        return new

    def shift_weights(self, x, kv_heads):
        """Return the shift weights of keys and values, (B, T, 2 Hkv) fp32. Without a shift, they are 0."""
        zeros = x.new_zeros(*x.shape[:2], kv_heads, dtype=torch.float32)
        return torch.cat([zeros if proj is None else proj(x) for proj in (self.k_shift_proj, self.v_shift_proj)], -1)

    def output(self, x, o):
        """Normalize, gate and project the output of attention, (B, T, H, D) or wider, to (B, T, hidden)."""
        norm: Any = self.o_norm
        o = first_columns(o, self.head_dim)
        if self.g_proj is None:
            return self.o_proj(norm(o).flatten(2))
        gate, activation = self.g_proj(x), self.config.output_gate
        if are_ours(norm):
            o = fused_norm(o, norm.weight, norm.variance_epsilon, gate, activation)
        else:
            o = norm(o).flatten(2) * ACT2FN[activation](gate)
        return self.o_proj(o)


class FoxMLP(nn.Module):
    def __init__(self, config: FoxConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class FoxDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: FoxConfig, layer_idx: int):
        super().__init__()
        self.self_attn = FoxAttention(config, layer_idx)
        self.mlp = FoxMLP(config)
        self.input_layernorm = FoxRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = FoxRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class FoxPreTrainedModel(PreTrainedModel):
    config: FoxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FoxDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _keep_in_fp32_modules_strict = ["f_proj"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    # With True, vLLM would assume that attention is a function of q, k and v. It would drop the gate.
    _supports_attention_backend = False
    _can_record_outputs = {"hidden_states": FoxDecoderLayer, "attentions": FoxAttention}

    @classmethod
    def _can_set_attn_implementation(cls):
        # transformers would search this file for the attention function, but `attend` selects it
        return True

    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        """Raise an error if Triton is requested but unavailable, or if vLLM's backend for transformers models is used.

        "auto" is returned unchanged. The implementation is then chosen in each forward pass.
        """
        if requested_attention == "vllm":
            raise ValueError(
                "attention implementation 'vllm' would ignore the forget gate. Install FoX for vLLM: "
                "pip install 'hf-longctx[vllm]', and omit --model-impl and --trust-remote-code."
            )
        if requested_attention == AUTO:
            return AUTO
        if requested_attention == NAME and (reason := why_not(self.config.head_dim)) is not None:
            raise reason
        return super().get_correct_attn_implementation(requested_attention, *args, **kwargs)

    @staticmethod
    @accept_both_names
    def create_masks_for_generate(config, inputs_embeds, attention_mask, cache, position_ids=None, **kwargs):
        """Return a dict with two entries: the attention mask, and the token mask.

        The attention mask is stored under the name of the attention implementation. The token mask has one value for
        each of the T tokens, True for real ones. A 4D mask is returned unchanged.
        """
        if attention_mask is not None and attention_mask.ndim == 4:
            return attention_mask
        name, mask = create_attention_mask(config, inputs_embeds, attention_mask, cache)
        return {name: mask, "token_mask": read_token_mask(attention_mask, inputs_embeds.shape[1])}

    def save_pretrained(self, *args, **kwargs):
        self.config.auto_map = dict(AUTO_MAP)
        return super().save_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, FoxShiftWeight):
            init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, FoxForgetGate):
            if module.kind == "full":
                init.normal_(module.weight, std=self.config.initializer_range)
            shortest, longest = self.config.decay_time_min, self.config.decay_time_max
            if shortest is None or longest is None:
                init.zeros_(module.bias)
            else:
                init.copy_(module.bias, decay_time_bias(len(module.bias), shortest, longest))


class FoxModel(FoxPreTrainedModel):
    """The decoder without a head. It maps token ids or embeddings to final hidden states."""

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(FoxDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = FoxRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config) if config.rope_parameters else None  # ty: ignore[invalid-argument-type]
        self.gradient_checkpointing = False
        self.post_init()

    @accept_both_names
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        shard: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the final hidden states of all tokens.

        Args:
            input_ids: (B, T), int64. Pass either `input_ids` or `inputs_embeds`.
            inputs_embeds: (B, T, hidden).
            attention_mask: (B, past + T), 1 for a token and 0 for padding; or a 4D mask, (B, 1, T, past + T).
                Default None: every token is real.
            position_ids: (1 or B, T), for RoPE. A restart begins a new packed document. Default None: they continue
                from the cached tokens.
            cache: a `Cache`. This call appends its tokens.
            use_cache: create and return a cache. Ignored in training.
            shard: as in `Call`. With a shard, the tokens are a part of each row, but `position_ids` cover whole rows.
            kwargs: the boundaries of packed documents (`cu_seq_lens_q` or `seq_idx`), and arguments of transformers.

        Raises:
            ValueError: the arguments do not match.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds.")
        if input_ids is not None:
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        if not isinstance(cache, Cache | None) and has_pages(cache):  # continuous batching, prepared by transformers
            hidden_states = paged_hidden_states(self, inputs_embeds, attention_mask, position_ids, cache, **kwargs)
            return BaseModelOutputWithPast(last_hidden_state=hidden_states)
        if shard is not None or (self.training and torch.is_grad_enabled()):
            use_cache = False  # a checkpointed layer runs twice and would read its own tokens from the cache

        if isinstance(cache, AttendingCache) and not torch.compiler.is_compiling():
            cache.check_weights(self.layers)
        call = read_call(self.config, inputs_embeds, attention_mask, position_ids, cache, shard=shard, **kwargs)
        # A cache cannot separate packed documents. In compiled calls, packing is only an assumption.
        if use_cache and cache is None and (call.position_in_sequence is None or torch.compiler.is_compiling()):
            cache = DynamicCache(config=self.config)
        if cache is not None:
            replace_shift_layers(cache)
        hidden_states = inputs_embeds
        positions = call.position_ids
        if shard is not None and positions is not None:
            positions = shard.part(positions)
        position_embeddings = None if self.rotary_emb is None else self.rotary_emb(hidden_states, positions)
        for i, layer in enumerate(islice(self.layers, self.config.num_hidden_layers)):  # reduced by early exit
            past = None if cache is None else CachedLayer(cache, i, hidden_states.device)
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                call=call,
                use_cache=use_cache,
                **{CACHE: past},  # gradient checkpointing removes this argument by name
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{CACHE: cache})  # ty: ignore[invalid-argument-type]


class FoxForCausalLM(FoxPreTrainedModel, ContinuousBatching, GenerationMixin):
    """FoX with a language-modelling head. Labels are token ids. The model shifts them, and ignores -100."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # ty: ignore[invalid-assignment] as in LlamaForCausalLM
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    generate = adapt(GenerationMixin.generate)

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.model = FoxModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _get_static_cache_init_shape(self):
        """Return the number of key heads and the folded head dimension of the static cache that `generate` creates."""
        shape = super()._get_static_cache_init_shape()  # ty: ignore[invalid-argument-type] of a protocol
        if shape is None or self.config.forget_gate == "none":
            return shape
        return shape[0], folded_width(self.config.head_dim, self.config.gates_per_key, self.device)

    def load_custom_generate(self, pretrained_model_name_or_path=None, trust_remote_code=None, **kwargs):
        """Refuse to load `generate` from a repository: always raise OSError. Only this model's code is trusted."""
        raise OSError(
            f"FoX does not run custom_generate/generate.py of {pretrained_model_name_or_path}. Read it, and pass its "
            "`generate` function: model.generate(..., custom_generate=generate)."
        )

    def _prepare_cache_for_generation(self, generation_config, *args, **kwargs):
        if generation_config.cache_implementation == "quantized" and self.config.forget_gate != "none":
            raise NotImplementedError(NO_QUANTIZED_CACHE)
        prepare: Any = super()._prepare_cache_for_generation  # a method of a protocol
        return prepare(generation_config, *args, **kwargs)

    @accept_both_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return next-token logits. If labels are given, return the loss, too. Other arguments: see `FoxModel`.

        Args:
            labels: (B, T), int64 token ids. This method shifts them, and ignores -100.
            logits_to_keep: an int n returns the logits of the last n positions (0: all). A tensor lists the positions,
                (P,) int64. With transformers 5.23, it may also be positions (B, P) int64, or a mask (B, T) bool. With
                a mask, the returned logits are flattened.
            kwargs: `shift_labels` and `num_items_in_batch` for the loss, and arguments of `FoxModel`.

        Returns:
            `CausalLMOutputWithPast`. Logits are (B, T, vocabulary) in the model's dtype. The loss is an fp32 scalar.

        Raises:
            ValueError: the arguments do not match.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        assert outputs.last_hidden_state is not None
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: outputs.cache},
        )


class FoxHead(FoxPreTrainedModel):
    """Base class of the task heads. It registers FoxModel with AutoModel, because AutoModel builds their decoder."""

    def __init__(self, config):
        # Registered here, not at import, because `FoxConfig` may differ from `type(config)`. transformers copies every
        # file of remote code, with its imports, to a separate folder. configuration_fox.py is therefore loaded twice.
        AutoModel.register(type(config), FoxModel, exist_ok=True)
        super().__init__(config)


class FoxForSequenceClassification(GenericForSequenceClassification, FoxHead):
    """FoX with a linear head on the last real token of each row."""

    forward = adapt(GenericForSequenceClassification.forward)


class FoxForTokenClassification(GenericForTokenClassification, FoxHead):
    """FoX with a linear head on every token."""

    forward = adapt(GenericForTokenClassification.forward)


class FoxForQuestionAnswering(GenericForQuestionAnswering, FoxHead):
    """FoX with heads for the start and the end of an answer."""

    forward = adapt(GenericForQuestionAnswering.forward)


__all__ = [
    "FoxForCausalLM",
    "FoxForQuestionAnswering",
    "FoxForSequenceClassification",
    "FoxForTokenClassification",
    "FoxModel",
    "FoxPreTrainedModel",
]

# A saved folder contains the code of all heads, so the classes of all heads can load it.
AUTO_MAP = {
    f"AutoModel{name.removeprefix('Fox').removeprefix('Model')}": f"modeling_fox.{name}"
    for name in __all__
    if name != "FoxPreTrainedModel"
}
