"""ALiBi as constant forget gates, so that a `PrunedCache` measures and prunes BLOOM and MPT.

ALiBi (Press et al. 2022, arXiv 2108.12409) adds `-m_h (i - j)` to the logit of query i and key j, with a slope `m_h`
of each head. That is forgetting attention (arXiv 2503.02130, eq. 11) whose gates are constant, `log f = -m_h`. Other
parts of BLOOM and MPT are not those of a FoX: norms and projections with biases, GELU, a norm of the embeddings. So
both stay the classes of transformers, and only their attention is computed from folded keys, which a `PrunedCache` can
read.
"""

from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.mpt.modeling_mpt import MptAttention

from .backend_fox import attend
from .call_fox import Call
from .compat_fox import accept_both_names
from .configuration_fox import FoxConfig
from .state_fox import CachedLayer


class AlibiAttention:
    """What attention with folded gates needs of a layer; its own part of BLOOM's and MPT's below.

    config: a `FoxConfig` of the same heads.
    """

    config: FoxConfig
    head_dim: int
    layer_idx: int
    scaling: float
    gates_per_key = num_key_value_groups = 1
    sliding_window = None

    def attend(self, q, k, v, log_f, mask, cache):
        """Return the attention of new tokens, (B, T, H * D), and its weights.

        Args:
            q, k, v: (B, H, T, D).
            log_f: (B, H, T).
            mask: (B, 1, T, keys), added to the logits, or bool, True for keys that a query sees.
            cache: a cache of transformers, or None.
        """
        past = None
        if cache is not None:
            past = CachedLayer(self, cache, q.device)
            if past.layer is not None and (hasattr(past.layer, "max_cache_len") or hasattr(past.layer, "nbits")):
                raise NotImplementedError(
                    f"the keys of a {type(past.layer).__name__} cannot carry the gates of ALiBi. Use a DynamicCache or a "
                    "PrunedCache."
                )
        o, weights = attend(self, q, k, v, log_f, Call(mask=mask, implementation="eager"), past)
        return o[..., : self.head_dim].flatten(2), weights


class GatedBloomAttention(AlibiAttention, BloomAttention):
    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = self._reshape(self.query_key_value(hidden_states))  # (B, H, T, D)
        bias = alibi.unflatten(0, (-1, self.num_heads)).squeeze(2).float()  # (B, H, keys): -c, 0 at padding
        log_f = -bias.diff(dim=-1, prepend=bias[..., :1])[..., -q.shape[2] :]
        o, weights = self.attend(q, k, v, log_f, attention_mask, layer_past)
        return dropout_add(self.dense(o), residual, self.hidden_dropout, self.training), weights


class GatedMptAttention(AlibiAttention, MptAttention):
    @accept_both_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        slope = position_bias[:, 0, 1:2] - position_bias[:, 0, :1]  # (H, 1)
        log_f = -slope.float().expand(*q.shape[:3])
        visible = None if attention_mask is None else ~attention_mask
        o, weights = self.attend(q, k, v, log_f, visible, cache)
        return self.out_proj(o), weights


def gate_alibi(model: torch.nn.Module) -> torch.nn.Module:
    """Compute a BLOOM's or MPT's ALiBi by constant forget gates, in place; results differ by rounding.

        model = gate_alibi(AutoModelForCausalLM.from_pretrained("bigscience/bloom-560m"))
        cache = PrunedCache(model, logit_bound="observed")
        model.generate(**inputs, cache=cache)
        cache.dropped

    Weights and their names stay as they are, so the model is saved as before. A cache that was filled before does not
    fit.

    Args:
        model: a model of transformers' classes for BLOOM or MPT, with or without a head.

    Returns:
        The model.

    Raises:
        ValueError: it is another model, or code from a repository.
    """
    gated: dict[type, type] = {BloomAttention: GatedBloomAttention, MptAttention: GatedMptAttention}
    layers: list[Any] = [module for module in model.modules() if type(module) in gated]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention of transformers' BLOOM or MPT, whose ALiBi could become forget "
            "gates. Load such a model without trust_remote_code."
        )
    for layer in layers:
        mpt = isinstance(layer, MptAttention)
        heads = layer.n_heads if mpt else layer.num_heads
        layer.config = FoxConfig(
            hidden_size=layer.hidden_size,
            num_attention_heads=heads,
            num_hidden_layers=len(layers),
            forget_gate="fixed",
            decay_time_min=2 ** (8 / heads),  # of a power of two
            decay_time_max=2**8,
            attention_dropout=layer.attn_dropout_p if mpt else layer.attention_dropout.p,
        )
        layer.scaling = layer.softmax_scale if mpt else layer.inv_norm_factor
        layer.__class__ = gated[type(layer)]
    return model


__all__ = ["gate_alibi"]
