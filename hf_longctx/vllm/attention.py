"""Forgetting attention with vLLM's attention layer: the decay is stored in a few extra dimensions of the keys.

`../fox/attention_fox.py` explains how the decay is folded into the keys. Unlike that file, we compute the cumulative
sum with `FoxState`, and omit the column for gradients. The N tokens of all requests are concatenated along one
dimension. Tensors contain only the heads of one rank.
"""

from copy import copy

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope

from ..fox.attention_fox import decay_columns, query_columns
from ..fox.configuration_fox import FoxConfig
from ..fox.modeling_fox import FoxForgetGate, FoxHeadRMSNorm, FoxRMSNorm, FoxShiftWeight
from .checks import check_cache_dtype, gates_per_key, vllm_head_size
from .shards import sharded
from .state import FoxState


class FoxAttention(nn.Module):
    """vLLM's counterpart of `FoxAttention` in modeling_fox.py, with the same weights.

    vLLM's `LlamaDecoderLayer` creates this layer.

    Raises:
        ValueError: the checkpoint requires a quantized KV cache.
    """

    def __init__(
        self,
        config: FoxConfig,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        quant_config=None,
        cache_config=None,
        prefix: str = "",
        **kwargs,  # further arguments of a Llama attention layer, not used
    ):
        super().__init__()
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        local = copy(config)  # config with the number of heads on this rank
        local.num_attention_heads, local.num_key_value_heads = num_heads // ranks, max(1, num_kv_heads // ranks)
        if config.forget_gate == "fixed":
            local.forget_gate = "bias_only"  # vLLM loads fixed gates only if they are parameters
        self.config, self.head_dim = local, config.head_dim
        self.scaling = self.head_dim**-0.5
        self.q_size, self.kv_size = (n * self.head_dim for n in (local.num_attention_heads, local.num_key_value_heads))

        def linear(kind, *sizes, name, bias=False):
            return kind(*sizes, bias=bias, quant_config=quant_config, prefix=f"{prefix}.{name}")

        q_size, heads = num_heads * self.head_dim, (num_heads, num_kv_heads)
        qkv_bias = config.qkv_bias
        self.qkv_proj = linear(QKVParallelLinear, hidden_size, self.head_dim, *heads, name="qkv_proj", bias=qkv_bias)
        self.o_proj = linear(RowParallelLinear, q_size, hidden_size, name="o_proj")
        self.g_proj = linear(ColumnParallelLinear, hidden_size, q_size, name="g_proj") if config.output_gate else None
        self.g_act = ACT2FN[config.output_gate] if config.output_gate else None

        def sharded_heads(kind, *args):
            return sharded(kind(*args), rank, ranks)

        self.f_proj = sharded_heads(FoxForgetGate, local) if config.forget_gate != "none" else None
        self.k_shift_proj = sharded_heads(FoxShiftWeight, local) if config.k_shift else None
        self.v_shift_proj = sharded_heads(FoxShiftWeight, local) if config.v_shift else None
        if not config.qk_norm:
            self.q_norm = self.k_norm = nn.Identity()
        elif config.qk_norm_shared:
            self.q_norm, self.k_norm = (FoxRMSNorm(self.head_dim, config.qk_norm_eps) for _ in range(2))
        else:
            self.q_norm, self.k_norm = (
                sharded_heads(FoxHeadRMSNorm, n, config.qk_norm_eps) for n in (self.q_size, self.kv_size)
            )
        norm = config.output_norm
        self.o_norm = sharded_heads(FoxHeadRMSNorm, self.q_size, config.rms_norm_eps) if norm else nn.Identity()
        self.rotary_emb = None
        if config.rope_parameters:
            limit = config.max_position_embeddings
            self.rotary_emb = get_rope(self.head_dim, max_position=limit, rope_parameters=config.rope_parameters)

        self.gates_per_key, self.width = gates_per_key(local), vllm_head_size(config)
        added = self.width - self.head_dim
        columns = torch.zeros(1, 1, added)
        if self.gates_per_key:
            columns = query_columns(added, local.num_attention_heads, self.gates_per_key)
        self.query_columns: torch.Tensor
        self.register_buffer("query_columns", columns[:, 0], persistent=False)  # (Hq or 1, D' - D)
        gates = local.num_key_value_heads * self.gates_per_key
        shifted = 2 * self.kv_size if config.k_shift or config.v_shift else 0
        self.state = None
        if gates or shifted:
            dtype, name = torch.get_default_dtype(), f"{prefix}.state"
            self.state = FoxState(gates, shifted, dtype, config.sliding_window, name)
        self.attn = Attention(
            local.num_attention_heads,
            self.width,
            self.scaling,
            num_kv_heads=local.num_key_value_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=config.sliding_window,
            prefix=f"{prefix}.attn",
        )
        check_cache_dtype(self.attn.kv_cache_dtype)  # the checkpoint can set a cache dtype

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        x, n = hidden_states, len(hidden_states)  # (N, hidden)
        q, kv = self.qkv_proj(x)[0].split([self.q_size, 2 * self.kv_size], dim=-1)
        c, k, v = self.look_back(x, kv)  # (N, Hkv * G), (N, Hkv, D)
        q, k = self.q_norm(q.view(n, -1, self.head_dim)), self.k_norm(k)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q.flatten(1).contiguous(), k.flatten(1).contiguous())
            q, k = (y.view(n, -1, self.head_dim) for y in (q, k))
        q = torch.cat([q, self.query_columns.to(q.dtype).expand(*q.shape[:2], -1)], dim=-1)
        k, v = self.fold_keys(k, c), F.pad(v, (0, self.width - self.head_dim))
        o = self.attn(q.flatten(1), k.flatten(1), v.flatten(1))
        o = self.o_norm(o.view(n, -1, self.width)[..., : self.head_dim]).flatten(1)
        if self.g_proj is not None:
            o = o * self.g_act(self.g_proj(x)[0])  # ty: ignore[not-callable] (set if g_proj is)
        return self.o_proj(o)[0]

    def look_back(self, x, kv):
        """Return the cumulative sum of log f, and the shifted keys and values (eq. 14).

        Without a state, the sum is None.
        """
        c = None
        shifts = self.k_shift_proj is not None or self.v_shift_proj is not None
        log_f = x.new_zeros(len(x), 0, dtype=torch.float32)
        if self.f_proj is not None:
            log_f = self.f_proj(x[None])[0].T.contiguous()  # (N, Hkv * G)
        if self.state is not None:
            c, before = self.state(log_f, kv if shifts else kv[:, :0])
        k, v = (y.view(len(x), -1, self.head_dim) for y in kv.chunk(2, dim=-1))
        if shifts:
            k_before, v_before = (y.view_as(k) for y in before.chunk(2, dim=-1))
            if self.k_shift_proj is not None:
                k = torch.lerp(k, k_before, self.k_shift_proj(x)[..., None].to(k.dtype))
            if self.v_shift_proj is not None:
                v = torch.lerp(v, v_before, self.v_shift_proj(x)[..., None].to(v.dtype))
        return c, k, v

    def fold_keys(self, k, c):
        """Append the decay `c`, (N, Hkv * G), to the keys, (N, Hkv, D). Return (N, Hkv, D')."""
        if self.gates_per_key:
            parts = decay_columns(c.view(len(k), -1, self.gates_per_key), self.scaling)  # (N, Hkv, G * parts)
            k = torch.cat([k, parts.to(k.dtype)], dim=-1)
        return F.pad(k, (0, self.width - k.shape[-1]))
