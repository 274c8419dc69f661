"""The Forgetting Transformer, FoX (Lin et al. 2025, arXiv 2503.02130).

A pre-norm decoder whose softmax attention fades its keys by a data-dependent forget gate, one scalar per head and token;
it needs no positional encoding. FoX (LLaMA) is the plain block; FoX (Pro) adds QK-norm, an output gate and norm, and a
token shift on keys and values. The gate is folded into the keys (see attention_fox.py), so every attention backend, cache
and generation method of transformers works unchanged.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_kernel_forward_from_hub
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto import AutoModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.utils.versions import require_version

from .attention_fox import CLOSED_GATE, fold_keys, fold_queries, folded_width, running_sum, unfold_decay
from .backend_fox import NAME as FORGETTING_TRITON
from .backend_fox import why_not
from .checks_fox import check_cache, check_call, check_dtype
from .configuration_fox import FoxConfig
from .packing_fox import flash_borders, packed_places, padding_mask
from .paged_fox import ContinuousBatching, through_pages


require_version("transformers>=5.15.0", "FoX is tested from there on: pip install -U transformers")

logger = logging.get_logger(__name__)

# Backends that compute exactly softmax(scaling * q.k + mask) v. Others may drop what they do not know.
ATTENTION_BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", FORGETTING_TRITON)
# Below this an additive mask hides a key. It may be the minimum of float16, which the decay of a key can outweigh.
MASKED = -1e4


@use_kernel_forward_from_hub("RMSNorm")
class FoxRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # float32 inside whatever the dtype; a float() here would cost two more passes over memory
        return F.rms_norm(x, x.shape[-1:], eps=self.variance_epsilon).to(x.dtype) * self.weight

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class FoxHeadRMSNorm(nn.Module):
    """RMSNorm of each head by itself, with a weight of its own: (..., H, D) -> (..., H, D), weight (H * D)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x, x.shape[-1:], eps=self.variance_epsilon).to(x.dtype)
        return normed * self.weight.view(-1, x.shape[-1])

    extra_repr = FoxRMSNorm.extra_repr


def decay_time_bias(num_heads: int, time_min: float, time_max: float) -> torch.Tensor:
    """Gate biases (H,) for log-spaced decay times T_h in tokens: -1 / log sigmoid(b_h) = T_h (Appendix D)."""
    times = torch.linspace(math.log(time_min), math.log(time_max), num_heads, dtype=torch.float64).exp()
    return -torch.expm1(1 / times).log().float()


class FoxForgetGate(nn.Module):
    """log f_t = log sigmoid(w.x_t + b) for each gate: (B, T, hidden) -> (B, H or Hkv, T), fp32.

    Not an `nn.Linear`: quantizers and adapters that replace every linear layer must leave a gate alone, whose errors add
    up over the whole context.
    """

    def __init__(self, config: FoxConfig):
        super().__init__()
        heads = config.num_key_value_heads if config.forget_gate_per_kv_head else config.num_attention_heads
        self.kind = config.forget_gate
        if self.kind == "full":
            self.weight = nn.Parameter(torch.empty(heads, config.hidden_size))
        if self.kind == "fixed":
            self.register_buffer("bias", torch.empty(heads))
        else:
            self.bias = nn.Parameter(torch.empty(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, self.weight, self.bias) if self.kind == "full" else self.bias.expand(*x.shape[:2], -1)
        return F.logsigmoid(logits.float()).clamp(min=CLOSED_GATE).transpose(1, 2)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """softmax(scaling * q.k + mask) v in plain PyTorch; the only backend that returns the attention weights.

    The logits are float32 whatever the model's dtype: a folded key adds the decay to them, which reaches thousands.
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    with torch.autocast(query.device.type, enabled=False):
        logits = query.float() @ key.float().mT * scaling  # (B, H, Tq, Tk)
    if attention_mask is not None:
        hidden = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < MASKED
        logits = (logits + attention_mask.float()).masked_fill(hidden, torch.finfo(torch.float32).min)
    weights = logits.softmax(-1).to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class FoxAttention(nn.Module):
    """Softmax attention whose keys fade by a learned gate (sec. 3); with the options of the Pro block (Figure 1)."""

    def __init__(self, config: FoxConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        one_gate = config.forget_gate_per_kv_head or config.forget_gate == "none"
        self.gates_per_key = 1 if one_gate else self.num_key_value_groups
        self.sliding_window = config.sliding_window
        self.scaling = self.head_dim**-0.5
        self.rotary_gain = 1.0  # by how much RoPE lengthens q.k, which YaRN and LongRoPE do
        self.is_causal = True

        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.f_proj = FoxForgetGate(config) if config.forget_gate != "none" else None
        self.k_shift_proj = (
            nn.Linear(config.hidden_size, config.num_key_value_heads, bias=False) if config.k_shift else None
        )
        self.v_shift_proj = (
            nn.Linear(config.hidden_size, config.num_key_value_heads, bias=False) if config.v_shift else None
        )
        if config.qk_norm:
            if config.qk_norm_shared:
                self.q_norm, self.k_norm = (FoxRMSNorm(self.head_dim, config.qk_norm_eps) for _ in range(2))
            else:
                self.q_norm, self.k_norm = (FoxHeadRMSNorm(size, config.qk_norm_eps) for size in (q_size, kv_size))
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.o_norm = FoxHeadRMSNorm(q_size, config.rms_norm_eps) if config.output_norm else nn.Identity()
        self.g_proj = nn.Linear(config.hidden_size, q_size, bias=False) if config.output_gate else None
        self.g_act = ACT2FN[config.output_gate] if config.output_gate else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        places: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        cache=None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = hidden_states
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if k.shape[-1] % self.head_dim:
            raise ValueError(
                f"tensor parallelism has split a head: {self.config.num_key_value_heads} key heads cannot be shared out "
                "evenly. Choose a tp_size that divides num_key_value_heads."
            )
        q, k, v = (y.view(heads) for y in (q, k, v))  # (B, T, H, D)
        takes_gates = self.config._attn_implementation == FORGETTING_TRITON
        if cache is not None:  # the pages of continuous batching
            q, k, v = through_pages(self, x, q, k, v, position_embeddings, cache, kwargs)
            attention_mask = attention_mask > MASKED  # in float16, a decay can outweigh it
        else:
            if getattr(past_key_values, "offloading", False) and self.layer_idx < len(past_key_values.layers):
                # `update` waits for the layer to come back from the CPU, but its last token is read before that.
                torch.cuda.current_stream(x.device).wait_stream(past_key_values.prefetch_stream)
                past_key_values.layers[self.layer_idx].prefetch()
            if past_key_values is not None and not torch.compiler.is_compiling():
                check_cache(self, past_key_values, k)
            k, v = self.token_shift(x, k, v, padding_mask, places, past_key_values)
            q, k = self.q_norm(q), self.k_norm(k)
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, H, T, D)
            if position_embeddings is not None:
                q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            log_f = self.log_forget_gate(x, k.shape[1], padding_mask)  # (B, H, T), or (B, Hkv, T)
            if log_f is not None and not (takes_gates and past_key_values is None):
                q, k, v = self.fold_forget_gate(log_f, q, k, v, places, past_key_values)  # (B, H, T, D')
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            if takes_gates:
                kwargs["log_f"] = log_f

        backend = self.config._attn_implementation
        if cache is not None:
            backend = backend.removeprefix("paged|")
        if backend not in ATTENTION_BACKENDS:
            raise ValueError(
                f"attention implementation {self.config._attn_implementation!r} is not known to compute forgetting "
                f"attention exactly; choose one of {ATTENTION_BACKENDS}: model.set_attn_implementation('sdpa')."
            )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        if hasattr(past_key_values, "wrap_attention"):  # a PrunedCache, whose heads differ in length
            attend = past_key_values.wrap_attention(attend)
        dropout = self.config.attention_dropout if self.training else 0.0
        o, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            scaling=self.scaling,
            dropout=dropout,
            sliding_window=self.sliding_window,
            position_ids=position_ids,  # from which FlashAttention tells packed documents
            **kwargs,
        )

        o = self.o_norm(o[..., : self.head_dim]).flatten(2)  # (B, T, H * D)
        if self.g_proj is not None:
            o = o * self.g_act(self.g_proj(x))
        return self.o_proj(o), weights

    def token_shift(self, x, k, v, padding_mask, places, past_key_values):
        """Mix each key and value with its predecessor's: a_t prev + (1 - a_t) cur, a_t = sigmoid(w.x_t) (eq. 14).

        The predecessor is the last real token, in the cache or in this call; a document's first token has 0.
        """
        if self.k_shift_proj is None and self.v_shift_proj is None:
            return k, v
        before = self.token_before(past_key_values, k)
        seen = [torch.cat([y_before, y], dim=1) for y_before, y in zip(before, (k, v))]  # (B, 1 + T, Hkv, D) each
        if padding_mask is not None:  # a padded position repeats the last real one
            last_real = torch.arange(1, x.shape[1] + 1, device=x.device) * padding_mask.bool()
            last_real = F.pad(last_real.cummax(1).values, (1, 0))[..., None, None]  # (B, 1 + T, 1, 1)
            seen = [y.gather(1, last_real.expand_as(y)) for y in seen]
        if past_key_values is not None:  # kept as the state of a convolution that reaches back one token
            states = torch.cat([y[:, 1:] for y in seen], dim=2).flatten(2).mT  # (B, 2 Hkv D, T)
            past_key_values.update_conv_state(states, self.layer_idx, conv_kernel_size=1)
        k_previous, v_previous = (y[:, :-1] for y in seen)
        if places is not None:
            first = (places == 0)[..., None, None]
            k_previous, v_previous = (y.masked_fill(first, 0.0) for y in (k_previous, v_previous))
        if self.k_shift_proj is not None:
            k = torch.lerp(k, k_previous, self.k_shift_proj(x).float().sigmoid()[..., None].to(k.dtype))
        if self.v_shift_proj is not None:
            v = torch.lerp(v, v_previous, self.v_shift_proj(x).float().sigmoid()[..., None].to(v.dtype))
        return k, v

    def token_before(self, past_key_values, k):
        """Key and value of the last token of the cache before mixing, (B, 1, Hkv, D) each; 0 if it is empty."""
        nothing = torch.zeros_like(k[:, :1])
        if past_key_values is None:
            return nothing, nothing
        layers = past_key_values.layers
        if self.layer_idx >= len(layers) or not hasattr(layers[self.layer_idx], "conv_states"):
            raise ValueError(
                f"this {type(past_key_values).__name__} has no place for the token shift; make it for this model: "
                "DynamicCache(config=model.config)."
            )
        if not past_key_values.has_previous_state(self.layer_idx):
            return nothing, nothing
        state = layers[self.layer_idx].conv_states[0]  # (B, 2 Hkv D, 1 or more if the cache records the past)
        if state.shape[-1] == 0:  # the cache was cropped to nothing
            return nothing, nothing
        return state[..., -1:].mT.to(k).unflatten(2, (-1, self.head_dim)).chunk(2, dim=2)

    def log_forget_gate(self, x, kv_heads, padding_mask):
        """log f of the new tokens, (B, H or Hkv, T) fp32, 0 at padding, which does not decay; None without a gate."""
        if self.f_proj is None:
            return None
        log_f = self.f_proj(x)
        if log_f.shape[1] != self.gates_per_key * kv_heads:
            raise ValueError(
                f"tensor parallelism splits {log_f.shape[1]} fixed gates not at all, and the key heads into parts of "
                f'{kv_heads}. Give the model gates that can be split: forget_gate="bias_only".'
            )
        return log_f if padding_mask is None else log_f * padding_mask[:, None].to(log_f.dtype)

    def fold_forget_gate(self, log_f, q, k, v, places, past_key_values):
        """Move the decay into the keys, continuing the running sum of log f where the cache left it."""
        if torch.is_autocast_enabled(q.device.type):
            # The backend would round the folded keys to the autocast dtype, the decay with them: round first, then fold.
            q, k, v = (y.to(torch.get_autocast_dtype(q.device.type)) for y in (q, k, v))
        c = running_sum(log_f, places)
        if past_key_values is not None:
            c = c + self.decay_so_far(past_key_values, c)
        if self.config._attn_implementation != FORGETTING_TRITON:  # which reads the decay beside the keys
            q = fold_queries(q, c, self.scaling, self.gates_per_key)
        k = fold_keys(k, c, self.scaling)
        return q, k, F.pad(v, (0, k.shape[-1] - self.head_dim))

    def decay_so_far(self, past_key_values, c):
        """c of the last cached token, (B, H, 1), read back from its key; 0 if the cache is empty."""
        layer = past_key_values.layers[self.layer_idx] if self.layer_idx < len(past_key_values.layers) else None
        if hasattr(layer, "_quantize"):
            raise NotImplementedError(
                "FoX cannot use a quantized cache: the running sum of its gates is stored in the keys and would be rounded "
                "with them. Leave cache_implementation out, or use 'static' or 'offloaded'."
            )
        if layer is None or not layer.is_initialized or layer.keys.numel() == 0:
            return torch.zeros_like(c[..., :1])
        if not hasattr(layer, "max_cache_len"):  # a growing cache ends with its last token
            last = layer.keys[:, :, -1:]
        elif isinstance(length := layer.get_seq_length(), torch.Tensor):  # a free slot is 0, and so is its decay
            last = layer.keys.index_select(2, (length - 1).clamp(min=0).view(1))
        elif length == 0:
            return torch.zeros_like(c[..., :1])
        else:  # a static window
            length = min(length, layer.max_cache_len)
            last = layer.keys[:, :, length - 1 : length]
        return unfold_decay(last.to(c.device), self.head_dim, self.gates_per_key, self.scaling)


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

    def forward(self, hidden_states: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> torch.Tensor:
        if self.self_attn.layer_idx == 0 and not torch.compiler.is_compiling():
            check_dtype(hidden_states, self.self_attn.q_proj)
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


# The saved code is that of every head, so each can be made of a folder whatever it was saved from.
AUTO_MAP = {
    "AutoModel": "modeling_fox.FoxModel",
    "AutoModelForCausalLM": "modeling_fox.FoxForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_fox.FoxForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_fox.FoxForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_fox.FoxForTokenClassification",
}


class FoxPreTrainedModel(PreTrainedModel):
    config: FoxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FoxDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    # Serving engines take this as leave to replace the attention by a function of q, k and v of their own.
    _supports_attention_backend = False
    _can_record_outputs = {"hidden_states": FoxDecoderLayer, "attentions": FoxAttention}

    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        """Asked for by name, the kernels must be there: no other implementation stands in for them unnoticed."""
        if requested_attention == FORGETTING_TRITON and (reason := why_not(self.config.head_dim)) is not None:
            raise reason
        return super().get_correct_attn_implementation(requested_attention, *args, **kwargs)

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values, position_ids=None, **kwargs):
        """What every layer needs of a (B, past + T) mask: who sees whom, and which of the T tokens are padding."""
        shared = dict(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask)
        create_mask = create_sliding_window_causal_mask if config.sliding_window else create_causal_mask
        return {
            "attention": create_mask(**shared, past_key_values=past_key_values, position_ids=position_ids),
            "padding": padding_mask(attention_mask, inputs_embeds.shape[1]),
        }

    def save_pretrained(self, *args, **kwargs):
        self.config.auto_map = dict(AUTO_MAP)
        return super().save_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, FoxForgetGate):
            if module.kind == "full":
                init.normal_(module.weight, std=self.config.initializer_range)
            if self.config.decay_time_min is None:
                init.zeros_(module.bias)
            else:
                times = (self.config.decay_time_min, self.config.decay_time_max)
                init.copy_(module.bias, decay_time_bias(len(module.bias), *times))


class FoxModel(FoxPreTrainedModel):
    """The decoder without a head: token ids or embeddings in, final hidden states out."""

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(FoxDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = FoxRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config) if config.rope_parameters else None
        for layer in self.layers if self.rotary_emb is not None else ():
            layer.self_attn.rotary_gain = self.rotary_emb.attention_scaling**2
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        if self.training and torch.is_grad_enabled():
            use_cache = False  # a checkpointed layer runs twice, and would find its own tokens in the cache
        places = None
        compiling = torch.compiler.is_compiling()
        paged = "cache" in kwargs  # continuous batching: transformers has prepared the mask
        if not (paged or compiling):
            check_call(self, inputs_embeds, attention_mask, position_ids, past_key_values)
        if not (paged or isinstance(attention_mask, dict) or (compiling and past_key_values is not None)):
            borders = {name: kwargs.get(name) for name in ("cu_seq_lens_q", "seq_idx")}
            places = packed_places(inputs_embeds, attention_mask, position_ids, **borders)
        if places is not None:
            if past_key_values is not None:
                raise ValueError(
                    "these rows hold packed documents (their position ids start again, or cu_seq_lens_q or seq_idx says so), "
                    "which a cache cannot tell apart. Leave past_key_values out, or run each document as a row of its own."
                )
            if use_cache and not compiling:
                logger.warning_once("Packed documents cannot be continued from a cache: none is returned for them.")
                use_cache = False
            if attention_mask is not None and attention_mask.ndim == 2:
                attention_mask = None  # nothing but ones
            if position_ids is None:
                position_ids = places
            if self.config._attn_implementation.startswith("flash_attention") and "cu_seq_lens_q" not in kwargs:
                kwargs |= flash_borders(places)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)

        masks = attention_mask
        if not isinstance(masks, dict):  # `generate` with a static cache has made them already
            masks = self.create_masks_for_generate(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values if places is None else None,
                position_ids=places,
            )

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids) if self.rotary_emb is not None else None
        for layer in self.layers[: self.config.num_hidden_layers]:  # which an early exit sets lower
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=masks["attention"],
                padding_mask=masks["padding"],
                position_ids=position_ids,
                places=places,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class FoxForCausalLM(FoxPreTrainedModel, ContinuousBatching, GenerationMixin):
    """FoX with a language-modelling head. Labels are token ids, shifted inside, -100 ignored."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.model = FoxModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _get_static_cache_init_shape(self):
        """Key heads and width of a static cache that `generate` makes before the first token: room for the decay too."""
        shape = super()._get_static_cache_init_shape()
        if shape is None or self.config.forget_gate == "none":
            return shape
        return shape[0], folded_width(self.config.head_dim, self.model.layers[0].self_attn.gates_per_key, self.device)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class FoxHead(FoxPreTrainedModel):
    """What transformers' generic heads stand on: they ask `AutoModel` for a decoder, which knows no remote code."""

    def __init__(self, config):
        AutoModel.register(type(config), FoxModel, exist_ok=True)
        super().__init__(config)


class FoxForSequenceClassification(GenericForSequenceClassification, FoxHead):
    """FoX with a linear head on the last real token of each row."""


class FoxForTokenClassification(GenericForTokenClassification, FoxHead):
    """FoX with a linear head on every token."""


class FoxForQuestionAnswering(GenericForQuestionAnswering, FoxHead):
    """FoX with heads for the start and the end of an answer."""


__all__ = [
    "FoxForCausalLM",
    "FoxForQuestionAnswering",
    "FoxForSequenceClassification",
    "FoxForTokenClassification",
    "FoxModel",
    "FoxPreTrainedModel",
]
