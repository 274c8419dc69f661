"""A KV cache that drops the tokens that the forget gates have faded, with a proven error bound.

**Theorem.** Let `w_ij` be the attention weight of query i on key j, `c_t` the cumulative sum of log f, and `U` a bound
of every `|scale * q_i.k_j|`. A query sees its own key, which does not fade, so its softmax denominator is at least
`exp(-U)` and

    w_ij <= exp(U + c_i - c_j) / exp(-U) = exp(2U + c_i - c_j).

Gates are at most 1, so `c` never increases, and the bound for query t holds for all later queries. Let S be a set of
keys with

    sum_{j in S} exp(c_t - c_j) <= tolerance * exp(-2U).                                                    (1)

Without S, every query i >= t loses attention weight of at most `tolerance`, and its output `o_i` changes by at most
`2 * tolerance * max_S,kept |v_j|`: with lost weight d, `o_i = (1 - d) * pruned_i + d * (a mean of the lost values)`.

(1) holds if each of L lost keys has `c_t - c_j <= -(2U + log L) + log tolerance`, the rule of adaptive computation
pruning (arXiv 2504.06949) for a known L. The sum does not depend on L, so it holds for any length of generation: the
cache updates it as it fades and charges all dropped keys to the same budget.

The left side of (1) grows with every key, and old keys have faded most, so the remaining keys of a head are a suffix.
Heads of similar length share tensors. Attention runs once per such group, with the model's own attention function, on
the last columns of its own mask. Attention to the remaining keys is exact.

It is even more accurate than with a full cache. The float32 `c` loses resolution as it decreases (0.008 at -1e5), but
softmax is invariant to a constant added to all keys of a head, so pruning resets the `c` of the last token to 0.

**The bound `U`.** `logit_bound="weights"` depends on the weights only and holds for every input. With QK-norm each
head's queries and keys have norm at most `sqrt(D)` before the norm's weights, and `U = scale * D * max_d |w_q w_k|_d`
is small. Without QK-norm, the input norm and the largest singular values of the projections give a bound so large
(several hundred) that hardly anything is dropped. `logit_bound="observed"` is 1.25 times the largest
`scale * |q| * |k|` that the cache has seen. A later query may exceed it, so the cache keeps measuring: `lost_weight`
is the bound that (1) proves for all queries so far, and a warning is logged if it exceeds the tolerance.
"""

import math
from typing import cast

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import logging

from .attention_fox import fold_keys, folded_width, unfold_decay
from .backend_fox import ROUNDING, logit_bound_of_norms
from .modeling_fox import FoxDecoderLayer
from .state_fox import DynamicShiftLayer


logger = logging.get_logger(__name__)

# Safety factor: logits up to 25 % above the observed ones respect the tolerance. It costs exp(U / 2) of the budget.
HEADROOM = 1.25


@torch.no_grad()
def logit_bound_of_weights(decoder_layer) -> torch.Tensor:
    """Return the input-independent bound U of each query head, (Hq,) fp32 (see above).

    Raises:
        ValueError: a projection without QK-norm is not a plain linear layer (LoRA, quantization), or the weights of
            QK-norm are not available.
    """
    attention = decoder_layer.self_attn
    config, head_dim = attention.config, attention.head_dim
    if config.qk_norm:
        largest, unit = logit_bound_of_norms(attention, config.num_attention_heads)
        if largest is None:
            raise ValueError(
                "the weights of q_norm and k_norm are offloaded, sharded or replaced by an adapter, so "
                'they do not bound the logits. Use logit_bound="observed".'
            )
        return (unit * largest).expand(config.num_attention_heads)
    norms = []
    for projection in (attention.q_proj, attention.k_proj):
        if type(projection) is not nn.Linear:
            raise ValueError(
                f"a {type(projection).__name__} projects queries or keys, but only the weights of a plain linear layer "
                'bound the logits. Merge the adapter, or use logit_bound="observed".'
            )
        weight = projection.weight.float() * decoder_layer.input_layernorm.weight.float()
        weight = weight.view(-1, head_dim, config.hidden_size)  # (H, D, hidden), of an input of norm sqrt(hidden)
        norm = torch.linalg.eigvalsh(weight @ weight.mT)[:, -1].clamp(min=0).sqrt() * config.hidden_size**0.5
        if projection.bias is not None:
            norm = norm + projection.bias.float().view(-1, head_dim).norm(dim=1)
        norms.append(norm)
    queries, keys = norms[0], norms[1].repeat_interleave(attention.num_key_value_groups)
    return ROUNDING * attention.scaling * attention.rotary_gain * queries * keys


class HeadGroup:
    """Key heads with the same number of tokens: keys and values (B, h, capacity, D'), filled up to `length`."""

    def __init__(self, heads, keys, values, length, queries_per_key):
        self.heads, self.keys, self.values, self.length = heads, keys, values, length
        queries = heads[:, None] * queries_per_key + torch.arange(queries_per_key, device=heads.device)
        self.query_heads = queries.flatten()

    @classmethod
    def empty(cls, heads, like, capacity, queries_per_key):
        """Allocate `capacity` tokens for a list of heads; `like`, (B, H, T, D'), determines the other sizes."""
        keys, values = (like.new_empty(like.shape[0], len(heads), capacity, like.shape[3]) for _ in range(2))
        return cls(torch.tensor(heads, device=like.device), keys, values, 0, queries_per_key)

    def append(self, keys, values, room):
        """Append the tokens of all H heads, (B, H, T, D'); if full, grow to hold them and `room` more."""
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            more = (0, 0, 0, end + room - self.keys.shape[2])
            self.keys, self.values = (nn.functional.pad(x, more) for x in (self.keys, self.values))
        self.keys[:, :, self.length : end] = keys[:, self.heads]
        self.values[:, :, self.length : end] = values[:, self.heads]
        self.length = end


def group_heads(available, needed, short):
    """Split heads into groups that share a length: [(length, heads), ...], longest first.

    A head may retain more than it needs, but at most twice as much, or `short` tokens, and no more than `available`.

    >>> group_heads(available=[1000, 1000, 40, 1000], needed=[900, 30, 40, 500], short=16)
    [(900, [0, 3]), (40, [1, 2])]
    """
    groups, rest = [], sorted(range(len(needed)), key=lambda head: -needed[head])
    while rest:
        length = needed[rest[0]]
        fits = [h for h in rest if available[h] >= length and (2 * needed[h] >= length or length <= short)]
        groups.append((length, sorted(fits)))
        rest = [h for h in rest if h not in fits]
    return groups


class PrunedLayer(DynamicLayer):
    """One layer of a `PrunedCache`. `groups` store all tokens; `keys` and `values` the last one, and its key stores c.

    The layer is pruned at the start of a call if `prune_every` tokens have been added since the last pruning. The c of
    the last cached token then bounds c of every later query.
    """

    def __init__(self, attention, logit_bound, tolerance, prune_every):
        super().__init__()
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.queries_per_key, self.gates_per_key = attention.num_key_value_groups, attention.gates_per_key
        self.kv_heads = attention.config.num_key_value_heads
        self.weight_bound = logit_bound  # (Hq,), or None: observe queries and keys
        self.log_tolerance = math.log(tolerance) if tolerance else -math.inf
        self.prune_every = prune_every
        self._clear()

    def _clear(self):
        self.groups: list[HeadGroup] = []
        self.order = None  # index of each query head of the model within all groups; None for a single group
        self.length = 0  # tokens seen
        self.pruned_at = 0  # `length` when tokens were dropped last; `crop` cannot go back further
        self.since_pruning = 0
        self.log_lost = None  # log of the left side of (1) at the last pruning, (B, Hkv, G, 1), fp64
        self.worst = -math.inf  # log of the largest weight that a query may have lost before the last pruning
        self.largest_query = self.largest_key = None

    def update(self, key_states, value_states, *args, **kwargs):
        """Append tokens, (B, Hkv, T, D'), and return only these; `attend` reads the others from `groups`."""
        width = folded_width(self.head_dim, self.gates_per_key, key_states.device)
        if key_states.shape[1] != self.kv_heads or key_states.shape[3] != width:
            raise ValueError(
                f"this PrunedCache was made for another model: it requires {self.kv_heads} heads of width {width}, got "
                f"{key_states.shape[1]} of width {key_states.shape[3]}. Create one for this model: PrunedCache(model)."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.since_pruning >= self.prune_every and not torch.compiler.is_compiling():
            before = self._decay(self.keys, self.kv_heads)  # c of the new keys continues from it
            self.prune()
            key_states = self._fold(key_states, self._decay(key_states, self.kv_heads) - before)
        if not self.groups:
            capacity = key_states.shape[2] + self.prune_every
            all_heads = list(range(self.kv_heads))
            self.groups = [HeadGroup.empty(all_heads, key_states, capacity, self.queries_per_key)]
        for group in self.groups:
            group.append(key_states, value_states, room=self.prune_every)
        self.length += key_states.shape[2]
        self.since_pruning += key_states.shape[2]
        self.keys, self.values = (x[:, :, -1:].clone() for x in (key_states, value_states))
        return key_states, value_states

    def attend(self, attention_function, module, query, key, value, attention_mask, **kwargs):
        """Run the attention function on all tokens in the cache; the output is exact up to the tolerance.

        Dropped tokens have weight 0 if the function returns weights.
        """
        self._check_mask(attention_mask)
        if self.weight_bound is None:
            self._observe(query, key)
        outputs, weights = [], []
        for group in self.groups:
            mask = attention_mask
            if isinstance(mask, torch.Tensor):
                mask = mask[..., self.length - group.length :]
                if mask.ndim == 4 and mask.shape[1] > 1:
                    mask = mask[:, group.query_heads]
            elif mask is not None:
                mask = mask.last(group.length)
            queries = query if self.order is None else query[:, group.query_heads]
            keys, values = group.keys[:, :, : group.length], group.values[:, :, : group.length]
            output, weight = attention_function(module, queries, keys, values, mask, **kwargs)
            outputs.append(output)
            if weight is not None:
                weights.append(nn.functional.pad(weight, (self.length - group.length, 0)))
        if self.order is None:
            return outputs[0], weights[0] if weights else None
        return torch.cat(outputs, 2)[:, :, self.order], torch.cat(weights, 1)[:, self.order] if weights else None

    def _check_mask(self, mask):
        if mask is None or hasattr(mask, "last"):  # a `VisibleKeys`, possibly of remote code
            return
        if not isinstance(mask, torch.Tensor):
            raise NotImplementedError(
                "a PrunedCache does not support the masks of flex_attention. Use another backend: "
                "model.set_attn_implementation('sdpa')."
            )
        if mask.shape[-1] != self.length:
            raise ValueError(
                f"the attention mask must cover all {self.length} tokens of cache and call, including dropped ones, got "
                f"{mask.shape[-1]} tokens."
            )

    def _observe(self, query, key):
        for name, x in (("largest_query", query), ("largest_key", key)):
            norm = x[..., : self.head_dim].detach().float().norm(dim=-1).amax((0, 2))  # (H,)
            before = getattr(self, name)
            setattr(self, name, norm if before is None else torch.maximum(before, norm))

    def _decay(self, keys, heads):
        """Return c of folded keys (B, h, n, D'), since the last pruning: (B, h, G, n) fp64."""
        c = unfold_decay(keys, self.head_dim, self.gates_per_key, self.scaling)
        return c.unflatten(1, (heads, self.gates_per_key)).double()

    def _fold(self, keys, c):
        """Refold keys, (B, h, n, D'), with another c, (B, h, G, n)."""
        return fold_keys(keys[..., : self.head_dim], c.float().flatten(1, 2), self.scaling)

    def logit_bound(self):
        """Return U of each gate, (Hkv, G), from the weights or from the observed queries and keys."""
        bound = self.weight_bound
        if bound is None:
            assert self.largest_query is not None and self.largest_key is not None
            bound = self.scaling * self.largest_query * self.largest_key.repeat_interleave(self.queries_per_key)
        return bound.view(self.kv_heads, self.gates_per_key, -1).amax(2).double()

    @torch.no_grad()
    def prune(self):
        """Drop the tokens that (1) allows, the same number in all rows, and reset c to 0."""
        self.since_pruning = 0
        if not self.groups or self.length == 0:
            return
        self.worst = self.log_lost_weight()
        bound = self.logit_bound().to(self.device) * (HEADROOM if self.weight_bound is None else 1)
        now = self._decay(self.keys, self.kv_heads)  # (B, Hkv, G, 1)
        self.log_lost = now - math.inf if self.log_lost is None else self.log_lost + now

        kept_by, available, needed = {}, [0] * self.kv_heads, [0] * self.kv_heads
        for group in self.groups:
            c = self._decay(group.keys[:, :, : group.length], len(group.heads)) - now[:, group.heads]  # (B, h, G, n)
            lost = torch.logaddexp(self.log_lost[:, group.heads], (-c).logcumsumexp(-1))
            droppable = lost + 2 * bound[group.heads][..., None] <= self.log_tolerance
            for i, (head, count) in enumerate(zip(group.heads.tolist(), droppable.sum(-1).amin((0, 2)).tolist())):
                kept_by[head] = (group.keys[:, i : i + 1], group.values[:, i], c[:, i : i + 1], lost[:, i])
                available[head], needed[head] = group.length, group.length - count

        groups = []
        for length, heads in group_heads(available, needed, short=self.prune_every):
            kept = HeadGroup.empty(heads, self.keys, length + self.prune_every, self.queries_per_key)
            kept.length = length
            for i, head in enumerate(heads):
                keys, values, c, lost = kept_by[head]
                suffix = slice(available[head] - length, available[head])
                kept.keys[:, i : i + 1, :length] = self._fold(keys[:, :, suffix], c[..., suffix])
                kept.values[:, i, :length] = values[:, suffix]
                if length < available[head]:
                    self.log_lost[:, head] = lost[..., suffix.start - 1 : suffix.start]
                    self.pruned_at = self.length
            groups.append(kept)
        self.keys = self._fold(self.keys, torch.zeros_like(now))
        self.groups = groups
        self.order = torch.cat([group.query_heads for group in groups]).argsort() if len(groups) > 1 else None
        if self.weight_bound is None and self.worst > self.log_tolerance:
            logger.warning_once(
                f"queries or keys exceeded {HEADROOM} times the largest ones seen when a PrunedCache dropped tokens: the "
                "lost attention weight may exceed the tolerance. See cache.lost_weight for its bound, or use a smaller "
                "tolerance."
            )

    def log_lost_weight(self):
        """Return the log of a bound on the attention weight that any query has lost so far."""
        if self.log_lost is None:
            return self.worst
        return max(self.worst, (self.log_lost[..., 0] + 2 * self.logit_bound().to(self.device)).max().item())

    def dropped(self):
        """Return the number of dropped tokens of each key head, (Hkv,)."""
        dropped = torch.zeros(self.kv_heads, dtype=torch.long)
        for group in self.groups:
            dropped[group.heads.cpu()] = self.length - group.length
        return dropped

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        removed = abs(int(tokens_to_remove))  # 5.17 gives a tensor
        if removed and self.length - removed < self.pruned_at:
            raise ValueError(
                f"crop must leave at least {self.pruned_at} tokens, after which the cache was pruned, because earlier "
                f"queries may need the dropped tokens; {removed} of {self.length} cannot be taken back. Crop less, or use "
                "a DynamicCache."
            )
        super().crop(tokens_to_remove)
        if not removed or not self.is_initialized:
            return
        self.length -= removed
        self.since_pruning = max(0, self.since_pruning - removed)
        for group in self.groups:
            group.length -= removed
        ends = [(x.keys[:, :, x.length - 1 : x.length], x.values[:, :, x.length - 1 : x.length]) for x in self.groups]
        order = torch.cat([group.heads for group in self.groups]).argsort()
        self.keys, self.values = (torch.cat(parts, 1)[:, order] for parts in zip(*ends))

    def reset(self) -> None:
        super().reset()
        self._clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(cast(torch.LongTensor, beam_idx))
        rows = beam_idx.to(self.device) if self.is_initialized else beam_idx
        for group in self.groups:
            group.keys, group.values = (x.index_select(0, rows) for x in (group.keys, group.values))
        if self.log_lost is not None:
            self.log_lost = self.log_lost.index_select(0, rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.groups:
            self.reorder_cache(torch.arange(self.groups[0].keys.shape[0]).repeat_interleave(repeats))


class PrunedHybridLayer(PrunedLayer, DynamicShiftLayer):
    """A pruned layer with the state of a token shift."""


class PrunedCache(Cache):
    """A dynamic cache that drops the tokens that a FoX has faded. See the theorem at the top of this file::

        cache = PrunedCache(model, tolerance=1e-4)
        model.generate(**inputs, cache=cache)
        cache.dropped

    Beam search is supported, and the cache can be cropped back to the last pruning. A long prompt is pruned during
    prefill if it is chunked, `generate(..., prefill_chunk_size=1024)`; otherwise the first generated token prunes it.
    Under `torch.compile`, a step is one graph and does not prune: call `prune()` between steps.

    Args:
        model: the FoX that uses the cache, with or without a head.
        tolerance: attention weight that a query may lose per layer and head, at least 0 and below 1. 0 drops nothing.
            Default: e^log_pruning_tolerance of the model's configuration, 4.5e-5 by default.
        logit_bound: "weights" for a bound that holds for every input, or "observed", recommended for models without
            QK-norm.
        prune_every: number of tokens between two prunings. Pruning copies the remaining tokens, and every head stores
            up to `prune_every` tokens more than it needs.

    Raises:
        ValueError: the model is not a FoX or has no forget gate, or an argument is out of its range.
        NotImplementedError: the model has a sliding window.
    """

    def __init__(self, model, tolerance: float | None = None, logit_bound: str = "weights", prune_every: int = 256):
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        decoder_layers = [module for module in modules if isinstance(module, FoxDecoderLayer)]
        if not decoder_layers:
            raise ValueError(
                f"{type(model).__name__} is not a FoX of hf_longctx, whose forget gates a PrunedCache needs. Use "
                "DynamicCache, or load a FoX after `import hf_longctx`."
            )
        attentions = [layer.self_attn for layer in decoder_layers]
        config = attentions[0].config
        if config.forget_gate == "none":
            raise ValueError(
                'forget_gate is "none": this model forgets nothing. Use DynamicCache(config=model.config).'
            )
        if config.sliding_window is not None:
            raise NotImplementedError(
                f"the sliding window of {config.sliding_window} tokens bounds the cache already. "
                "Use DynamicCache(config=model.config)."
            )
        if tolerance is None:
            if config.log_pruning_tolerance is None:
                raise ValueError(
                    "the configuration disables pruning, log_pruning_tolerance=None. Pass a tolerance, or use "
                    "DynamicCache(config=model.config)."
                )
            tolerance = math.exp(config.log_pruning_tolerance)
        if not (isinstance(tolerance, int | float) and 0 <= tolerance < 1):
            raise ValueError(f"tolerance must be an attention weight, at least 0 and below 1, got {tolerance!r}.")
        if logit_bound not in ("weights", "observed"):
            raise ValueError(f'logit_bound must be "weights" or "observed", got {logit_bound!r}.')
        if not (isinstance(prune_every, int) and prune_every >= 1):
            raise ValueError(f"prune_every must be a number of tokens, at least 1, got {prune_every!r}.")
        layer_class = PrunedHybridLayer if config.k_shift or config.v_shift else PrunedLayer
        bounds = [logit_bound_of_weights(layer) if logit_bound == "weights" else None for layer in decoder_layers]
        super().__init__(layers=[layer_class(*pair, tolerance, prune_every) for pair in zip(attentions, bounds)])

    @property
    def pruned_layers(self) -> list[PrunedLayer]:
        """The cache's layers, typed as `PrunedLayer`."""
        return cast(list[PrunedLayer], self.layers)

    def prune(self) -> None:
        """Drop all tokens that can be dropped now, e.g. after a long prompt or between compiled steps."""
        for layer in self.pruned_layers:
            layer.prune()

    @property
    def dropped(self) -> torch.Tensor:
        """Number of dropped tokens of each head of each layer, (layers, Hkv), of `get_seq_length()`."""
        return torch.stack([layer.dropped() for layer in self.pruned_layers])

    @property
    def lost_weight(self) -> float:
        """A proven bound on the attention weight that any query has lost so far in any layer and head."""
        return math.exp(max(layer.log_lost_weight() for layer in self.pruned_layers))


__all__ = ["PrunedCache"]
