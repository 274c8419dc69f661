"""Continuous batching (`generate_batch` and `transformers serve`) with a paged cache.

Requests may share a page, so a page cannot store a state that depends on earlier tokens. It stores the unshifted key
and value of each token. The columns that folding adds contain log f and the shift weights. Everything else is computed
after the pages have been read.
"""

import copy
import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers.generation import GenerationMixin
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .attention_fox import MASKED, fold_keys, fold_queries, folded_width, running_sum, unfold_decay
from .backend_fox import AUTO, run_backend


def has_pages(cache) -> bool:
    """Return whether `cache` is the paged cache of continuous batching. It is not an instance of `Cache`."""
    # imported here because it takes as long as importing FoX
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    return isinstance(cache, PagedAttentionCache)


def paged_implementation(config) -> str:
    """Return the attention implementation that reads pages. "auto" selects SDPA, because our kernels do not read them.

    While requests are processed, transformers adds a prefix to the implementation in `config`.
    """
    name = config._attn_implementation.removeprefix("paged|")
    return "sdpa" if name == AUTO else name


def paged_hidden_states(model, hidden_states, attention_mask, position_ids, cache, **kwargs) -> torch.Tensor:
    """Compute the final hidden states of a `FoxModel` in continuous batching, (1, T, hidden), from embedded tokens.

    Args:
        model: the `FoxModel`.
        hidden_states: (1, T, hidden), the new tokens of all requests, concatenated.
        attention_mask: (1, 1, T, all), additive, for all requests.
        position_ids: (1, T).
        cache: the paged cache.
        kwargs: positions of tokens in the pages, in the format of transformers.
    """
    x, mask = hidden_states, attention_mask > MASKED  # boolean, because a decay can be below float16's minimum
    position_embeddings = None if model.rotary_emb is None else model.rotary_emb(x, position_ids)
    for layer in model.layers:
        x = x + paged_attention(layer.self_attn, layer.input_layernorm(x), position_embeddings, mask, cache, **kwargs)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.norm(x)


def paged_attention(attention, x, position_embeddings, mask, cache, **kwargs) -> torch.Tensor:
    """Compute the output of `FoxAttention`. x, (1, T, hidden), contains the new tokens of all requests.

    The new tokens are written to their pages. The tokens that attention needs are read from the pages.
    """
    q, k, v = attention.split_heads(attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))
    shifted = attention.k_shift_proj is not None or attention.v_shift_proj is not None
    log_f = x.new_zeros(1, k.shape[2], x.shape[1]).float() if attention.f_proj is None else attention.f_proj(x)
    q = attention.q_norm(q).transpose(1, 2)
    if shifted:  # RoPE is then absent, and keys are normalized after they are read
        weights = attention.shift_weights(x, k.shape[2]).to(k).unflatten(-1, (2, -1)).mT
        v = torch.cat([v, weights], dim=-1)  # (1, T, Hkv, D + 2)
    k = (k if shifted else attention.k_norm(k)).transpose(1, 2)
    if position_embeddings is not None:
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    k, v = fold_keys(k, log_f, attention.scaling), v.transpose(1, 2)
    width = k.shape[-1]
    k, v = cache.update(k, F.pad(v, (0, width - v.shape[-1])), attention.layer_idx, kwargs)  # (1, Hkv, all, D')

    boundaries = kwargs["cu_seq_lens_k"]  # boundaries of requests
    index = torch.arange(k.shape[2], device=k.device)
    positions = (index - boundaries[torch.bucketize(index, boundaries, right=True) - 1])[None]  # within the request
    c = running_sum(unfold_decay(k, attention.head_dim, attention.gates_per_key, attention.scaling), positions)
    k = k[..., : attention.head_dim]
    v, weights = v[..., : attention.head_dim + 2].tensor_split([attention.head_dim], dim=-1)
    if shifted:
        first = (positions == 0)[:, None, :, None]
        k_previous, v_previous = (F.pad(y, (0, 0, 1, -1)).masked_fill(first, 0.0) for y in (k, v))
        k = torch.lerp(k, k_previous, weights[..., :1])
        v = torch.lerp(v, v_previous, weights[..., 1:])
        k = attention.k_norm(k.transpose(1, 2)).transpose(1, 2)
    q = fold_queries(q, log_f, attention.scaling, attention.gates_per_key)
    k, v = fold_keys(k, c, attention.scaling), F.pad(v, (0, width - attention.head_dim))  # (1, Hkv, all, D')
    o, _ = run_backend(paged_implementation(attention.config), attention, q, k, v, mask, **kwargs)
    return attention.output(x, o)


class ContinuousBatching(GenerationMixin):
    """Mixin for continuous batching of a causal language model. It precedes `GenerationMixin`."""

    config: Any
    model: Any
    device: Any

    @torch.no_grad()
    def init_continuous_batching(self, generation_config=None, continuous_batching_config=None, **kwargs):
        """Create transformers' manager. Its pages also store log f and shift weights (see `paged_attention`).

        Raises:
            NotImplementedError: the attention implementation is FlashAttention; transformers is too old; or the model
                combines a token shift with RoPE or a sliding window.
        """
        # imported here because it takes as long as importing FoX
        from transformers.generation import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.cache import PagedAttentionCache

        config = self.config
        shifted = config.k_shift or config.v_shift
        if shifted and (config.rope_parameters or config.sliding_window):
            raise NotImplementedError(
                "continuous batching does not support a token shift together with RoPE or a sliding window: pages store "
                "unshifted keys. Use `generate`."
            )
        name = paged_implementation(config)
        if name not in ("eager", "sdpa"):
            raise NotImplementedError(
                f"continuous batching of FoX does not support {name!r}. The pages must be "
                "written by FoX, not by the kernels. Use model.set_attn_implementation('sdpa')."
            )
        update = PagedAttentionCache.update
        if "kwargs" not in inspect.signature(update).parameters:
            raise NotImplementedError(
                "continuous batching of FoX requires transformers>=5.23: pip install -U transformers"
            )
        batching = replace(continuous_batching_config or ContinuousBatchingConfig(), auto_switch_to_flash=False)
        attention = self.model.layers[0].self_attn
        page_config = copy.copy(config)
        page_config.head_dim = folded_width(attention.head_dim, attention.gates_per_key, self.device)
        page_config.k_shift = page_config.v_shift = False  # plain attention pages, without convolution state
        page_config._attn_implementation = name
        # The manager reads the sizes of pages from its model's config. This model shares our modules, and persists,
        # because transformers stores a persistent manager in it.
        paged = vars(self).setdefault("paged", copy.copy(self))
        vars(paged).update(vars(self), config=page_config)
        return GenerationMixin.init_continuous_batching(paged, generation_config, batching, **kwargs)

    def destroy_cached_continuous_batching_manager(self):
        GenerationMixin.destroy_cached_continuous_batching_manager(vars(self).pop("paged", self))
