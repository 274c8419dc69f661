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
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from .attention_fox import GATE_PARTS, GATE_QUERY, MASKED, fold_keys, folded_width, unfold_decay
from .backend_fox import ROUNDING, eager_attention_forward, logit_bound_of_norms, sdpa_without_cudnn
from .key_ranges_fox import VisibleKeys
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
    """Key heads that share tensors: keys and values, (B, h, capacity, D').

    heads: indices of the key heads.
    dropped: number of dropped tokens of each head.
    """

    def __init__(self, heads: list[int], dropped: list[int], like: torch.Tensor, capacity: int, queries_per_key: int):
        self.heads, self.dropped = heads, dropped
        self.keys, self.values = (like.new_zeros(like.shape[0], len(heads), capacity, like.shape[3]) for _ in range(2))
        self.key_heads = torch.tensor(heads, device=like.device)
        queries = self.key_heads[:, None] * queries_per_key + torch.arange(queries_per_key, device=like.device)
        self.query_heads = queries.flatten()
        self.first = torch.tensor(dropped, device=like.device)[:, None]  # index of the token in the first slot, (h, 1)


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

    The layer is pruned before a call if `prune_every` tokens have been added since the last pruning. The c of the last
    cached token then bounds c of every later query.
    """

    keys: Any
    values: Any

    def __init__(self, attention, logit_bound, tolerance, prune_every):
        super().__init__()
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.queries_per_key, self.gates_per_key = attention.num_key_value_groups, attention.gates_per_key
        self.kv_heads = attention.config.num_key_value_heads
        self.marker = self.head_dim + GATE_PARTS * self.gates_per_key  # a constant column of every folded key
        self.weight_bound = logit_bound  # (Hq,), or None: observe queries and keys
        self.log_tolerance = math.log(tolerance) if tolerance else -math.inf
        self.prune_every = prune_every
        self._clear()

    def _clear(self):
        self.groups: list[HeadGroup] = []
        self.order = None  # index of each query head of the model within all groups; None for a single group
        self.length: int | torch.Tensor = 0  # tokens seen
        self.dropped_at = 0  # `length` when tokens were dropped last; `crop` cannot go back further
        self.pruned_at = 0  # `length` at the last pruning, whether or not it dropped tokens
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
            self.keys, self.values = (torch.zeros_like(x[:, :, -1:]) for x in (key_states, value_states))
        tokens = key_states.shape[2]
        if not self.groups:
            heads, capacity = list(range(self.kv_heads)), self._capacity(tokens)
            self._set_groups([HeadGroup(heads, [0] * self.kv_heads, self.keys, capacity, self.queries_per_key)])
        self.length += tokens
        for group in self.groups:
            self._append(group, key_states[:, group.key_heads], value_states[:, group.key_heads])
        self.keys.copy_(key_states[:, :, -1:])
        self.values.copy_(value_states[:, :, -1:])
        return key_states, value_states

    def _capacity(self, length):
        return length + self.prune_every

    def _set_groups(self, groups: list[HeadGroup]) -> None:
        self.groups = groups
        self.order = torch.cat([group.query_heads for group in groups]).argsort() if len(groups) > 1 else None

    def _append(self, group, keys, values):
        """Append tokens of the group's heads, (B, h, T, D'); if full, grow."""
        end = self.length - group.dropped[0]
        begin = end - keys.shape[2]
        if end > group.keys.shape[2]:
            more = (0, 0, 0, self._capacity(end) - group.keys.shape[2])
            group.keys, group.values = (nn.functional.pad(x, more) for x in (group.keys, group.values))
        group.keys[:, :, begin:end] = keys
        group.values[:, :, begin:end] = values

    def attend(self, attention_function, module, query, key, value, attention_mask, **kwargs):
        """Run the attention function on all tokens in the cache; the output is exact up to the tolerance.

        Dropped tokens have weight 0 if the function returns weights.
        """
        if attention_mask is not None and not isinstance(attention_mask, torch.Tensor | VisibleKeys):
            raise NotImplementedError(
                "a PrunedCache does not support the masks of flex_attention. Use another backend: "
                "model.set_attn_implementation('sdpa')."
            )
        if self.weight_bound is None:
            self._observe(query, key)
        outputs, weights = [], []
        for group in self.groups:
            queries = query if self.order is None else query[:, group.query_heads]
            keys, values, mask = self._read(group, query.shape[2], attention_mask)
            output, weight = attention_function(module, queries, keys, values, mask, **kwargs)
            outputs.append(output)
            if weight is not None and not self.is_compileable:
                weights.append(nn.functional.pad(weight, (self.length - weight.shape[-1], 0)))
        if self.order is None:
            return outputs[0], weights[0] if weights else None
        return torch.cat(outputs, 2)[:, :, self.order], torch.cat(weights, 1)[:, self.order] if weights else None

    def _read(self, group, tokens, mask):
        """Return keys and values of a group, and the part of the mask for them."""
        length = self.length - group.dropped[0]
        if mask is not None:
            mask = mask.last(length) if isinstance(mask, VisibleKeys) else mask[..., self.length - length :]
        return group.keys[:, :, :length], group.values[:, :, :length], mask

    def _observe(self, query, key):
        norms = [x[..., : self.head_dim].detach().float().norm(dim=-1).amax((0, 2)) for x in (query, key)]  # (H,)
        if self.largest_query is None or self.largest_key is None:
            self.largest_query, self.largest_key = norms
            mark_static(*norms)
        self.largest_query.copy_(torch.maximum(self.largest_query, norms[0]))
        self.largest_key.copy_(torch.maximum(self.largest_key, norms[1]))

    def _decay(self, keys, heads):
        """Return c of folded keys (B, h, n, D'), since the last pruning: (B, h, G, n) fp64."""
        c = unfold_decay(keys, self.head_dim, self.gates_per_key, self.scaling)
        return c.unflatten(1, (heads, self.gates_per_key)).double()

    def _fold(self, keys, c):
        """Refold keys, (B, h, n, D'), with another c, (B, h, G, n)."""
        folded = fold_keys(keys[..., : self.head_dim], c.float().flatten(1, 2), self.scaling)
        return torch.cat([folded[..., : self.marker], keys[..., self.marker :]], dim=-1)

    def logit_bound(self):
        """Return U of each gate, (Hkv, G), from the weights or from the observed queries and keys."""
        bound = self.weight_bound
        if bound is None:
            assert self.largest_query is not None and self.largest_key is not None
            bound = self.scaling * self.largest_query * self.largest_key.repeat_interleave(self.queries_per_key)
        return bound.view(self.kv_heads, self.gates_per_key, -1).amax(2).double()

    def make_room(self, tokens: int) -> None:
        """Prune before a call of `tokens` tokens, if it is due."""
        if int(self.length) - self.pruned_at >= self.prune_every:
            self.prune(tokens)

    @torch.no_grad()
    def prune(self, tokens: int = 0) -> None:
        """Drop the tokens that (1) allows, the same number in all rows, and reset c to 0.

        tokens: number of tokens that the next call will add.
        """
        length = self.pruned_at = int(self.length)
        if length == 0:
            return
        self.worst = self.log_lost_weight()
        bound = self.logit_bound().to(self.device) * (HEADROOM if self.weight_bound is None else 1)
        now = self._decay(self.keys, self.kv_heads)  # (B, Hkv, G, 1)
        self.log_lost = now - math.inf if self.log_lost is None else self.log_lost + now

        kept_by, available, needed = {}, [0] * self.kv_heads, [0] * self.kv_heads
        for group in self.groups:
            c = self._decay(group.keys, len(group.heads)) - now[:, group.key_heads]  # (B, h, G, capacity)
            lost = torch.logaddexp(self.log_lost[:, group.key_heads], (-c).logcumsumexp(-1))
            # never the last token, and therefore no free slot
            droppable = lost + 2 * bound[group.key_heads][..., None] <= self.log_tolerance
            counts = droppable.sum(-1).amin((0, 2)).tolist()
            for i, (head, dropped, count) in enumerate(zip(group.heads, group.dropped, counts)):
                kept_by[head] = (group.keys[:, i : i + 1], group.values[:, i], c[:, i : i + 1], lost[:, i])
                available[head], needed[head] = length - dropped, length - dropped - count

        groups = []
        for capacity, lengths in self._plan(available, needed, tokens):
            dropped = [length - kept for kept in lengths.values()]
            group = HeadGroup(list(lengths), dropped, self.keys, capacity, self.queries_per_key)
            for i, (head, kept) in enumerate(lengths.items()):
                keys, values, c, lost = kept_by[head]
                suffix = slice(available[head] - kept, available[head])
                group.keys[:, i : i + 1, :kept] = self._fold(keys[:, :, suffix], c[..., suffix])
                group.values[:, i, :kept] = values[:, suffix]
                if suffix.start:
                    self.log_lost[:, head] = lost[..., suffix.start - 1 : suffix.start]
                    self.dropped_at = length
            groups.append(group)
        self.keys.copy_(self._fold(self.keys, torch.zeros_like(now)))
        self._set_groups(groups)
        if self.weight_bound is None and self.worst > self.log_tolerance:
            logger.warning_once(
                f"queries or keys exceeded {HEADROOM} times the largest ones seen when a PrunedCache dropped tokens: the "
                "lost attention weight may exceed the tolerance. See cache.lost_weight for its bound, or use a smaller "
                "tolerance."
            )

    def _plan(self, available, needed, tokens):
        """Return the capacity of each new group, and how many tokens each of its heads retains."""
        groups = group_heads(available, needed, short=self.prune_every)
        return [(self._capacity(length), dict.fromkeys(heads, length)) for length, heads in groups]

    def log_lost_weight(self):
        """Return the log of a bound on the attention weight that any query has lost so far."""
        if self.log_lost is None:
            return self.worst
        return max(self.worst, (self.log_lost[..., 0] + 2 * self.logit_bound().to(self.device)).max().item())

    def dropped(self):
        """Return the number of dropped tokens of each key head, (Hkv,)."""
        dropped = {head: n for group in self.groups for head, n in zip(group.heads, group.dropped)}
        return torch.tensor([dropped.get(head, 0) for head in range(self.kv_heads)])

    def get_seq_length(self):
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        removed = abs(int(tokens_to_remove))  # 5.17 gives a tensor
        if removed and self.length - removed < self.dropped_at:
            raise ValueError(
                f"crop must leave at least {self.dropped_at} tokens, after which the cache was pruned, because earlier "
                f"queries may need the dropped tokens; {removed} of {self.length} cannot be taken back. Crop less, or use "
                "a DynamicCache."
            )
        super().crop(tokens_to_remove)
        if not removed or not self.is_initialized:
            return
        self.length -= removed
        self.pruned_at = min(self.pruned_at, self.length)
        last = [slice(self.length - group.dropped[0] - 1, self.length - group.dropped[0]) for group in self.groups]
        ends = [(group.keys[:, :, slot], group.values[:, :, slot]) for group, slot in zip(self.groups, last)]
        order = torch.cat([group.key_heads for group in self.groups]).argsort()
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


class StaticPrunedLayer(PrunedLayer):
    """A `PrunedLayer` whose tensors have constant shapes and addresses, like a `StaticLayer` of transformers.

    A step writes at an index that only the device knows. Free slots and padding have 0 in the column `marker` of their
    keys, which hides them. A group of heads has `max_cache_len` slots, or a half, a quarter, ... of it. Heads stay in
    their group as long as they fit, unless other groups save a quarter of the memory, so shapes seldom change.
    """

    is_compileable = True
    is_croppable = False
    length: torch.Tensor

    def __init__(self, *args, max_cache_len):
        self.slots = max_cache_len
        super().__init__(*args)

    def _clear(self):
        super()._clear()
        self.length = torch.tensor(0)

    def update(self, key_states, value_states, *args, **kwargs):
        self.is_first_call = not self.groups
        self.length = self.length.to(key_states.device)
        return super().update(key_states, value_states)

    def _capacity(self, length):
        return self.slots

    def _set_groups(self, groups):
        if [(group.heads, group.keys.shape) for group in groups] != [(x.heads, x.keys.shape) for x in self.groups]:
            super()._set_groups(groups)
            mark_static(self.keys, self.values, self.length, *(x for y in groups for x in (y.keys, y.values)))
            return
        for old, new in zip(self.groups, groups):
            old.dropped = new.dropped
            for name in ("keys", "values", "first"):
                getattr(old, name).copy_(getattr(new, name))

    def _slots(self, group, tokens):
        """Return indices of the heads, (h, 1), and of the slots of the last tokens, (h, T)."""
        slots = self.length - tokens - group.first + torch.arange(tokens, device=self.device)
        return torch.arange(len(group.heads), device=self.device)[:, None], slots

    def _append(self, group, keys, values):
        heads, slots = self._slots(group, keys.shape[2])
        group.keys[:, heads, slots] = keys
        group.values[:, heads, slots] = values

    def attend(self, attention_function, module, query, key, value, attention_mask, **kwargs):
        if attention_function not in (eager_attention_forward, sdpa_attention_forward, sdpa_without_cudnn):
            raise NotImplementedError(
                "a PrunedCache with max_cache_len supports the attention implementations 'sdpa' and 'eager' only: "
                "model.set_attn_implementation('sdpa')."
            )
        if attention_mask is not None:  # of the new tokens alone; a key that no query sees is padding
            visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > MASKED
            real = visible.any(2)  # (B, 1, T)
            for group in self.groups:
                heads, slots = self._slots(group, key.shape[2])
                group.keys[:, heads, slots, self.marker] = GATE_QUERY * real.to(key.dtype)
        return super().attend(attention_function, module, query, key, value, attention_mask, **kwargs)

    def _read(self, group, tokens, mask):
        if self.is_first_call:
            return group.keys[:, :, :tokens], group.values[:, :, :tokens], mask
        visible = group.keys[:, :, None, :, self.marker] != 0  # (B, h, 1, slots)
        if tokens > 1:
            slots = torch.arange(group.keys.shape[2], device=self.device)
            visible = visible & (slots <= self._slots(group, tokens)[1][..., None])
        return group.keys, group.values, visible.repeat_interleave(self.queries_per_key, dim=1)

    def make_room(self, tokens):
        super().make_room(tokens)
        length = int(self.length) + tokens
        if any(length - min(group.dropped) > group.keys.shape[2] for group in self.groups):
            self.prune(tokens)
        needed = length - min((n for group in self.groups for n in group.dropped), default=0)
        if needed > self.slots:
            raise ValueError(
                f"max_cache_len must be at least {needed}, for the {needed - tokens} tokens that a head retains and "
                f"{tokens} new ones, got {self.slots}. Increase it or the tolerance, or read a long prompt in chunks: "
                "generate(..., prefill_chunk_size=...)."
            )

    def crop(self, tokens_to_remove):
        raise NotImplementedError("a PrunedCache with max_cache_len cannot remove tokens. Leave max_cache_len out.")

    def _plan(self, available, needed, tokens):
        room, plan = max(tokens, self.prune_every), {}
        for head, length in enumerate(needed):
            slots = self.slots
            while length < int(self.length) and slots % 2 == 0 and slots // 2 >= length + length // 4 + room:
                slots //= 2
            plan.setdefault(slots, {})[head] = length
        same = [(group.keys.shape[2], {head: needed[head] for head in group.heads}) for group in self.groups]
        fits = all(slots == self.slots or slots >= max(lengths.values()) + room for slots, lengths in same)
        after, before = (sum(slots * len(lengths) for slots, lengths in x) for x in (plan.items(), same))
        return same if fits and after > 0.75 * before else list(plan.items())


class StaticPrunedHybridLayer(StaticPrunedLayer, LinearAttentionAndFullAttentionLayer):
    """A static pruned layer with the state of a token shift, which transformers updates in place."""


def mark_static(*tensors):
    """Promise that these tensors keep their addresses, so that CUDA graphs may write to them."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


class PrunedCache(Cache):
    """A dynamic cache that drops the tokens that a FoX has faded. See the theorem at the top of this file::

        cache = PrunedCache(model, tolerance=1e-4)
        model.generate(**inputs, cache=cache)
        cache.dropped

    Beam search is supported, and the cache can be cropped back to the last pruning. A long prompt is pruned during
    prefill if it is chunked, `generate(..., prefill_chunk_size=1024)`; otherwise the first generated token prunes it.

    With `max_cache_len`, the cache is static: its tensors have constant shapes, so `generate` compiles the decoding
    step on a GPU, as with a `StaticCache`. It requires SDPA or eager attention, cannot be cropped, and does not return
    attention weights. A step that you compile yourself does not prune: call `prune()` after every `prune_every` steps.

    Args:
        model: the FoX that uses the cache, with or without a head.
        tolerance: attention weight that a query may lose per layer and head, at least 0 and below 1. 0 drops nothing.
            Default: e^log_pruning_tolerance of the model's configuration, 4.5e-5 by default.
        logit_bound: "weights" for a bound that holds for every input, or "observed", recommended for models without
            QK-norm.
        prune_every: number of tokens between two prunings. Pruning copies the remaining tokens, and every head stores
            up to `prune_every` tokens more than it needs.
        max_cache_len: number of tokens that a head of a static cache can store, preferably a multiple of 1024, because
            heads that forget store a half, a quarter, ... of it. Default None: the cache grows.

    Raises:
        ValueError: the model is not a FoX or has no forget gate, or an argument is out of its range.
        NotImplementedError: the model has a sliding window.
    """

    layers: list[PrunedLayer]

    def __init__(
        self,
        model,
        tolerance: float | None = None,
        logit_bound: str = "weights",
        prune_every: int = 256,
        max_cache_len: int | None = None,
    ):
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
        if not (max_cache_len is None or (isinstance(max_cache_len, int) and max_cache_len > prune_every)):
            raise ValueError(f"max_cache_len must be a number of tokens above {prune_every=}, got {max_cache_len!r}.")
        shift = config.k_shift or config.v_shift
        kind = PrunedHybridLayer if shift else PrunedLayer
        if max_cache_len is not None:
            kind = partial(StaticPrunedHybridLayer if shift else StaticPrunedLayer, max_cache_len=max_cache_len)
        bounds = [logit_bound_of_weights(layer) if logit_bound == "weights" else None for layer in decoder_layers]
        super().__init__(layers=[kind(*pair, tolerance, prune_every) for pair in zip(attentions, bounds)])

    def make_room(self, tokens: int) -> None:
        """Prune the layers that are due, before a call of `tokens` tokens that is not being compiled."""
        if not torch.compiler.is_compiling():
            for layer in self.layers:
                layer.make_room(tokens)

    def prune(self) -> None:
        """Drop all tokens that can be dropped now, e.g. after a long prompt or between compiled steps."""
        for layer in self.layers:
            layer.prune()

    @property
    def dropped(self) -> torch.Tensor:
        """Number of dropped tokens of each head of each layer, (layers, Hkv), of `get_seq_length()`."""
        return torch.stack([layer.dropped() for layer in self.layers])

    @property
    def lost_weight(self) -> float:
        """A proven bound on the attention weight that any query has lost so far in any layer and head."""
        return math.exp(max(layer.log_lost_weight() for layer in self.layers))


__all__ = ["PrunedCache"]
