"""A KV cache that drops faded tokens, with a proven error bound.

**Theorem.** Let `w_ij` be the attention weight of query i on key j, `c_t` the cumulative sum of log f, and `U` a bound
on `|scale * q_i.k_j|` for all i and j. A query attends to its own key, and this key has not faded. The softmax
denominator is therefore at least `exp(-U)` and

    w_ij <= exp(U + c_i - c_j) / exp(-U) = exp(2U + c_i - c_j).

Gates are at most 1, so `c` never increases. The bound for query t is therefore valid for all later queries, too. Let S
be a set of keys with

    sum_{j in S} exp(c_t - c_j) <= tolerance * exp(-2U).                                                    (1)

If the keys in S are dropped, every query i >= t loses attention weight of at most `tolerance`. If it loses the weight
d, then `o_i = (1 - d) * pruned_i + d * (a weighted mean of the dropped values)`. Its output therefore changes by at
most `2 * tolerance * max |v_j|`. The maximum is over all keys.

(1) is satisfied if `c_t - c_j <= -(2U + log L) + log tolerance` for each of L dropped keys. This is the rule of
adaptive computation pruning (arXiv 2504.06949). It requires L in advance. The sum in (1) does not require L, so the
number of generated tokens is not limited. The cache stores the sum over all keys dropped so far. This sum fades like
the keys.

The sum grows with every dropped key, and the oldest keys have faded most. Each head therefore drops its oldest keys.
Heads that retain similar numbers of keys share tensors. Attention runs once for each such group. It uses the model's
attention function and the last columns of the attention mask. Attention to the remaining keys is exact.

Pruning also improves accuracy. Without it, the float32 `c` loses resolution as it decreases (0.008 at -1e5). Pruning
resets the `c` of the last token to 0. This does not change attention, because softmax is invariant to a constant added
to the logits of all keys of a head.

**The bound `U`.** With `logit_bound="weights"`, `U` depends on the weights only and is valid for every input. Under
QK-norm, the queries and keys of a head have norm at most `sqrt(D)` before they are multiplied by the norm weights.
`U = scale * D * max_d |w_q w_k|_d` is then small. Without QK-norm, the bound follows from the input norm and the
largest singular values of the projections. It is several hundred, so hardly any token is dropped. With
`logit_bound="observed"`, `U` is 1.25 times the largest `scale * |q| * |k|` of the queries and keys so far. A later
query may exceed `U`, so the cache keeps measuring. `lost_weight` is the bound from (1) for all queries so far. If it
exceeds the tolerance, a warning is logged.
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

# Safety factor of logit_bound="observed". The tolerance holds for logits up to 25 % above the largest observed one, M.
# In exchange, the left side of (1) must be smaller by a factor of exp(M / 2).
HEADROOM = 1.25
IDENTIFYING = 1024  # how many numbers of each weight a cache records, to recognize its model


def type_name(x) -> str:
    """Name the type and module of x: several libraries have a `Linear`, and saved code has classes of our names."""
    return f"{type(x).__name__} of {type(x).__module__}"


@torch.no_grad()
def logit_bound_of_weights(decoder_layer) -> torch.Tensor:
    """For each query head, return a bound U that is valid for every input, (Hq,) fp32.

    Raises:
        ValueError: the weights of QK-norm are not available; or, without QK-norm, a projection is not a plain linear
            layer (LoRA, quantization).
    """
    attention = decoder_layer.self_attn
    config, head_dim = attention.config, attention.head_dim
    if config.qk_norm:
        largest, unit = logit_bound_of_norms(attention, config.num_attention_heads)
        if largest is None:
            raise ValueError(
                'logit_bound="weights" requires the weights of q_norm and k_norm. They are offloaded, sharded or '
                'replaced by an adapter. Use logit_bound="observed".'
            )
        return (unit * largest).expand(config.num_attention_heads)
    norms = []
    for projection in (attention.q_proj, attention.k_proj):
        if type(projection) is not nn.Linear or projection.weight.is_meta:
            kind = "offloaded weights" if type(projection) is nn.Linear else type_name(projection)
            raise ValueError(
                f'with logit_bound="weights", the query and key projections must be torch.nn.Linear, got {kind}. Load '
                'the weights without offloading, merge the adapter, or use logit_bound="observed".'
            )
        weight = projection.weight.float() * decoder_layer.input_layernorm.weight.float()
        weight = weight.view(-1, head_dim, config.hidden_size)  # (H, D, hidden); the norm of the input is sqrt(hidden)
        norm = torch.linalg.eigvalsh(weight @ weight.mT)[:, -1].clamp(min=0).sqrt() * config.hidden_size**0.5
        if projection.bias is not None:
            norm = norm + projection.bias.float().view(-1, head_dim).norm(dim=1)
        norms.append(norm)
    queries, keys = norms[0], norms[1].repeat_interleave(attention.num_key_value_groups)
    return ROUNDING * attention.scaling * attention.rotary_gain * queries * keys


def bound_weights(decoder_layer) -> list[tuple[Any, Any]]:
    """List the weights and biases that determine the logits, and their modules."""
    attention = decoder_layer.self_attn
    modules = decoder_layer.input_layernorm, attention.q_proj, attention.k_proj, attention.q_norm, attention.k_norm
    pairs = [(module, getattr(module, name, None)) for module in modules for name in ("weight", "bias")]
    return [(module, x) for module, x in pairs if isinstance(x, torch.Tensor)]


def weight_versions(decoder_layers) -> list[tuple[int, int, int]]:
    """Return numbers that change if `bound_weights` are replaced or updated in place."""
    weights = [pair for layer in decoder_layers for pair in bound_weights(layer)]
    return [(id(module), id(x), 0 if x.is_inference() else x._version) for module, x in weights]


def first_weights(decoder_layer) -> list[torch.Tensor]:
    """Return views of the first numbers of each of the `bound_weights`. They identify the weights."""
    weights = [x.detach() for _, x in bound_weights(decoder_layer)]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in weights]  # under tensor parallelism
    return [x.flatten()[:IDENTIFYING] for x in local]


class HeadGroup:
    """A group of key heads whose keys and values are stored in two tensors, (B, h, capacity, D').

    heads: indices of the h key heads in the group.
    dropped: number of tokens that each of these heads has dropped.
    """

    def __init__(self, heads: list[int], dropped: list[int], like: torch.Tensor, capacity: int, queries_per_key: int):
        self.heads, self.dropped = heads, dropped
        self.keys, self.values = (like.new_zeros(like.shape[0], len(heads), capacity, like.shape[3]) for _ in range(2))
        self.key_heads = torch.tensor(heads, device=like.device)
        queries = self.key_heads[:, None] * queries_per_key + torch.arange(queries_per_key, device=like.device)
        self.query_heads = queries.flatten()
        self.first = torch.tensor(dropped, device=like.device)[:, None]  # position of the first slot, (h, 1)


def group_heads(available, needed, short):
    """Split heads into groups that retain the same number of tokens: [(tokens, heads), ...], largest first.

    A head retains at least `needed` tokens. It retains at most min(available, max(2 * needed, short)) tokens.

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
    """One layer of a `PrunedCache`.

    `groups` store all retained tokens. `keys` and `values` store the last token only. Its key contains the latest c.
    The layer is pruned before a call if `prune_every` tokens have been added since the last pruning. Pruning uses the
    c of the last cached token, because no later query has a larger c.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, attention, logit_bound, tolerance, prune_every):
        super().__init__()
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.queries_per_key, self.gates_per_key = attention.num_key_value_groups, attention.gates_per_key
        self.kv_heads = attention.config.num_key_value_heads
        self.marker = self.head_dim + GATE_PARTS * self.gates_per_key  # a column that is constant in all folded keys
        self.weight_bound = logit_bound  # (Hq,); None with logit_bound="observed"
        self.log_tolerance = math.log(tolerance) if tolerance else -math.inf
        self.prune_every = prune_every
        self._clear()

    def _clear(self):
        self.groups: list[HeadGroup] = []
        self.order = None  # index of each query head in the concatenated groups; None for a single group
        self.length: int | torch.Tensor = 0  # tokens seen
        self.dropped_at = 0  # `length` when tokens were last dropped: `crop` must leave at least as many
        self.pruned_at = 0  # `length` at the last pruning, even if it did not drop tokens
        self.log_lost = None  # log of the left side of (1) at the last pruning, (B, Hkv, G, 1), fp64
        self.worst = -math.inf  # log of the bound on lost weight before the last pruning
        self.largest_query = self.largest_key = None

    def update(self, key_states, value_states, *args, **kwargs):
        """Append new tokens, (B, Hkv, T, D'). Return only these, because `attend` reads all tokens from `groups`."""
        width = folded_width(self.head_dim, self.gates_per_key, key_states.device)
        if key_states.shape[1] != self.kv_heads or key_states.shape[3] != width:
            raise ValueError(
                f"this PrunedCache was made for another model. Keys must have {self.kv_heads} heads of width {width}, got "
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
        """Append new tokens, (B, h, T, D'), to a group. If necessary, increase its capacity."""
        end = self.length - group.dropped[0]
        begin = end - keys.shape[2]
        if end > group.keys.shape[2]:
            more = (0, 0, 0, self._capacity(end) - group.keys.shape[2])
            group.keys, group.values = (nn.functional.pad(x, more) for x in (group.keys, group.values))
        group.keys[:, :, begin:end] = keys
        group.values[:, :, begin:end] = values

    def attend(self, attention_function, module, query, key, value, attention_mask, **kwargs):
        """Return output and weights of the attention function for the tokens in the cache.

        Weights are None if the function does not return them, or if the cache is static. A dropped token has weight 0.
        """
        if attention_mask is not None and not isinstance(attention_mask, torch.Tensor | VisibleKeys):
            raise NotImplementedError(
                "a PrunedCache does not support masks of flex_attention. Use another backend: "
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
        """Return the keys and values of a group, and the columns of the mask for these keys."""
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
        """Read c from folded keys: (B, h, n, D') -> (B, h, G, n) fp64. c is measured from the last pruning."""
        c = unfold_decay(keys, self.head_dim, self.gates_per_key, self.scaling)
        return c.unflatten(1, (heads, self.gates_per_key)).double()

    def _fold(self, keys, c):
        """Return a copy of folded keys, (B, h, n, D'), with new values of c, (B, h, G, n)."""
        folded = fold_keys(keys[..., : self.head_dim], c.float().flatten(1, 2), self.scaling)
        return torch.cat([folded[..., : self.marker], keys[..., self.marker :]], dim=-1)

    def logit_bound(self):
        """Return the bound U of each gate, (Hkv, G), from the weights or from the observed queries and keys."""
        bound = self.weight_bound
        if bound is None:
            assert self.largest_query is not None and self.largest_key is not None
            bound = self.scaling * self.largest_query * self.largest_key.repeat_interleave(self.queries_per_key)
        return bound.view(self.kv_heads, self.gates_per_key, -1).amax(2).double()

    @property
    def exact_block(self) -> int:
        """The number of tokens that a call may add before the layer would prune between single tokens."""
        added = int(self.length) - self.pruned_at
        return self.prune_every - added if added < self.prune_every else self.prune_every

    def make_room(self, tokens: int, length: int) -> None:
        """Prune before a call with `tokens` tokens, if `prune_every` tokens have been added since the last pruning.

        length: the value of `self.length`. All layers share one read of it, because reading waits for the GPU.
        """
        if length - self.pruned_at >= self.prune_every:
            self.prune(tokens)

    @torch.no_grad()
    def prune(self, tokens: int = 0) -> None:
        """Drop all tokens that condition (1) of the module docstring allows. Then shift c to 0 at the last token.

        In each head, all rows of the batch drop the same number of tokens.

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
            # False for the last token, and therefore also for free slots
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
                f"after a PrunedCache dropped tokens, the bound on the attention logits exceeded {HEADROOM} "
                "times its earlier value. The lost attention weight may therefore exceed the tolerance. Use a smaller "
                "tolerance. cache.lost_weight is a bound on the lost weight."
            )

    def _plan(self, available, needed, tokens):
        """Return a pair for each new group: its capacity, and {head: number of retained tokens}."""
        groups = group_heads(available, needed, short=self.prune_every)
        return [(self._capacity(length), dict.fromkeys(heads, length)) for length, heads in groups]

    def log_lost_weight(self):
        """Return the log of `PrunedCache.lost_weight` for this layer."""
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
        removed = abs(int(tokens_to_remove))  # transformers 5.17 passes a tensor
        if removed and self.length - removed < self.dropped_at:
            raise ValueError(
                f"crop must leave at least {self.dropped_at} tokens, got {self.length - removed}. Tokens were "
                f"last dropped at length {self.dropped_at}. Crop fewer tokens, or use a DynamicCache."
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
        self.is_initialized = False  # the next batch may have another size
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
    """A `PrunedLayer` that also stores the state of the token shift."""


class StaticPrunedLayer(PrunedLayer):
    """A `PrunedLayer` with constant shapes and addresses of tensors, like a `StaticLayer` of transformers.

    The index of the next slot is a tensor on the device. In free slots and padding, the column `marker` of the keys is
    0. This masks them. The number of slots of a group is `max_cache_len`, or a half, a quarter, ... of it. Pruning
    changes the groups in two cases: a head no longer fits, or new groups save a quarter of the memory.
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
        self.visible: torch.Tensor | None = None  # last attention mask, (B, tokens) bool; only in the first layer

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
        """Return two index tensors: the heads, (h, 1), and the slots of the last `tokens` tokens, (h, T)."""
        slots = self.length - tokens - group.first + torch.arange(tokens, device=self.device)
        return torch.arange(len(group.heads), device=self.device)[:, None], slots

    def _append(self, group, keys, values):
        heads, slots = self._slots(group, keys.shape[2])
        group.keys[:, heads, slots] = keys
        group.values[:, heads, slots] = values

    def attend(self, attention_function, module, query, key, value, attention_mask, **kwargs):
        if attention_function not in (eager_attention_forward, sdpa_attention_forward, sdpa_without_cudnn):
            raise NotImplementedError(
                "a PrunedCache with max_cache_len supports the attention implementations 'sdpa' and 'eager' only. "
                "Call model.set_attn_implementation('sdpa')."
            )
        if attention_mask is not None:  # it covers the new tokens: a key that is masked for all queries is padding
            visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > MASKED
            real = visible.any(2)  # (B, 1, T)
            for group in self.groups:
                heads, slots = self._slots(group, key.shape[2])
                group.keys[:, heads, slots, self.marker] = GATE_QUERY * real.to(key.dtype)
        return super().attend(attention_function, module, query, key, value, attention_mask, **kwargs)

    def _read(self, group, tokens, mask):
        if self.is_first_call:
            return group.keys[:, :, :tokens], group.values[:, :, :tokens], mask
        slots = torch.arange(group.keys.shape[2], device=self.device)
        visible = (slots <= self._slots(group, tokens)[1][..., None])[None]  # (1, h, T, slots)
        if mask is not None:
            visible = visible & (group.keys[:, :, None, :, self.marker] != 0)
        return group.keys, group.values, visible.repeat_interleave(self.queries_per_key, dim=1)

    def mark(self, visible):
        """Mark the cached tokens that queries attend to. `visible` is (B, cached tokens) bool."""
        for group in self.groups:
            positions = group.first + torch.arange(group.keys.shape[2], device=self.device)  # (h, slots)
            is_filled = positions < visible.shape[1]
            marks = visible[:, positions.clamp(max=visible.shape[1] - 1)] & is_filled
            group.keys[..., self.marker] = GATE_QUERY * marks.to(group.keys.dtype)

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        if self.visible is not None:
            self.visible = self.visible.index_select(0, beam_idx.to(self.visible.device))

    def make_room(self, tokens, length):
        super().make_room(tokens, length)
        length += tokens
        if any(length - min(group.dropped) > group.keys.shape[2] for group in self.groups):
            self.prune(tokens)
        needed = length - min((n for group in self.groups for n in group.dropped), default=0)
        if needed > self.slots:
            raise ValueError(
                f"max_cache_len must be at least {needed}, got {self.slots}. A head retains {needed - tokens} tokens, and "
                f"{tokens} are new. Increase max_cache_len or the tolerance, or read a long prompt in chunks: "
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
    """A `StaticPrunedLayer` that also stores the state of the token shift. transformers updates it in place."""

    def reset(self):
        super().reset()
        self.is_conv_states_initialized[0] = False


def mark_static(*tensors):
    """Declare that these tensors will keep their addresses. CUDA graphs may then write to them."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


class PrunedCache(Cache):
    """A cache for a FoX. It drops tokens that the forget gates have faded below a tolerance::

        cache = PrunedCache(model, tolerance=1e-4)
        model.generate(**inputs, cache=cache)
        cache.dropped

    The error bound is proven at the top of this file. Beam search is supported. `crop` can only remove tokens that
    were added after the cache last dropped tokens. Chunked prefill, `generate(..., prefill_chunk_size=1024)`, prunes a
    long prompt while it is read. Otherwise, the prompt is pruned before the first generated token is added.

    With `max_cache_len`, the cache is static: its tensors have constant shapes. On a GPU, `generate` then compiles the
    decoding step, as with a `StaticCache`. A static cache requires SDPA or eager attention, cannot be cropped, and
    does not return attention weights. Your own compiled code does not prune. Call `prune()` after every `prune_every`
    steps.

    Args:
        model: the FoX that uses the cache, with or without a head.
        tolerance: largest attention weight that a query may lose in each layer and head. It must be at least 0 and
            below 1. With a tolerance of 0, nothing is dropped. Default: exp(config.log_pruning_tolerance). It is
            4.5e-5 in the default configuration.
        logit_bound: "weights" computes a bound from the weights. It is valid for every input. "observed" computes a
            bound from the queries and keys so far. Without QK-norm, "observed" drops more tokens.
        prune_every: number of tokens between two prunings. Pruning copies the remaining tokens. Every head stores up
            to `prune_every` tokens more than it needs.
        max_cache_len: number of tokens that a head of a static cache can store. Choose a multiple of 1024, because
            heads that forget quickly use a half, a quarter, ... of it. Default None: a dynamic cache.

    Raises:
        ValueError: the model is not a FoX or does not have a forget gate; or an argument is out of range.
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
                f"`model` must be a FoX of hf_longctx, got {type_name(model)}. Load a FoX after `import hf_longctx` and without "
                "trust_remote_code, or use a DynamicCache."
            )
        attentions = [layer.self_attn for layer in decoder_layers]
        config = attentions[0].config
        if config.forget_gate == "none":
            raise ValueError(
                'a PrunedCache requires forget gates, got forget_gate="none". Use DynamicCache(config=model.config).'
            )
        if config.sliding_window is not None:
            raise NotImplementedError(
                f"a PrunedCache does not support a sliding window, got sliding_window={config.sliding_window}. Use "
                "DynamicCache(config=model.config). It stores only the tokens in the window."
            )
        if tolerance is None:
            if config.log_pruning_tolerance is None:
                raise ValueError(
                    "the configuration of the model disables pruning (log_pruning_tolerance=None). Pass a tolerance, "
                    "or use DynamicCache(config=model.config)."
                )
            tolerance = math.exp(config.log_pruning_tolerance)
        if not (isinstance(tolerance, int | float) and 0 <= tolerance < 1):
            raise ValueError(
                f"tolerance must be at least 0 and below 1, got {tolerance!r}. It is an attention weight."
            )
        if logit_bound not in ("weights", "observed"):
            raise ValueError(f'logit_bound must be "weights" or "observed", got {logit_bound!r}.')
        if not (isinstance(prune_every, int) and prune_every >= 1):
            raise ValueError(f"prune_every must be an integer of at least 1, got {prune_every!r}. It counts tokens.")
        if not (max_cache_len is None or (isinstance(max_cache_len, int) and max_cache_len > prune_every)):
            raise ValueError(f"max_cache_len must be a number of tokens above {prune_every=}, got {max_cache_len!r}.")
        shift = config.k_shift or config.v_shift
        kind = PrunedHybridLayer if shift else PrunedLayer
        if max_cache_len is not None:
            kind = partial(StaticPrunedHybridLayer if shift else StaticPrunedLayer, max_cache_len=max_cache_len)
        bounds = [logit_bound_of_weights(layer) if logit_bound == "weights" else None for layer in decoder_layers]
        super().__init__(layers=[kind(*pair, tolerance, prune_every) for pair in zip(attentions, bounds)])
        self.versions, self.checked_at = weight_versions(decoder_layers), -1
        self.weights = [[x.clone() for x in first_weights(layer)] for layer in decoder_layers]

    @torch.no_grad()
    def check_weights(self, decoder_layers) -> None:
        """Raise ValueError if a bound from the weights is not a bound for these layers: other or changed weights.

        The identity and version of the weights are compared in every call, their values after each pruning.
        """
        pruned_at, versions = self.layers[0].pruned_at, weight_versions(decoder_layers)
        if self.layers[0].weight_bound is None or (versions, pruned_at) == (self.versions, self.checked_at):
            return
        for layer, recorded, cached in zip(decoder_layers, self.weights, self.layers):
            weights = first_weights(layer)
            same = len(weights) == len(recorded) and all(
                x.shape == y.shape and torch.equal(x, y.to(x)) for x, y in zip(weights, recorded)
            )
            if same and versions != self.versions:  # up to the rounding to bfloat16
                bound = logit_bound_of_weights(layer)
                same = bool((bound <= 1.01 * cached.weight_bound.to(bound)).all())
            if not same:
                raise ValueError(
                    "this PrunedCache must be used with the weights that it was created for, got others. Its bound on "
                    "the logits follows from them. After training, loading or merging weights, create a new cache: "
                    "PrunedCache(model)."
                )
        self.versions, self.checked_at = versions, pruned_at

    def make_room(self, tokens: int, attention_mask: torch.Tensor | None) -> None:
        """Prepare a call with `tokens` tokens and a mask (B, past + tokens). Compiled calls do not prune."""
        if not torch.compiler.is_compiling():
            length = int(self.layers[0].length)
            if attention_mask is not None and attention_mask.shape[1] != length + tokens:
                raise ValueError(
                    f"attention_mask must have {length + tokens} columns, got {attention_mask.shape[1]}. It has a column "
                    f"for each of the {length} cached and {tokens} new tokens: 1 for real tokens, 0 for padding."
                )
            for layer in self.layers:
                layer.make_room(tokens, length)
        layers: Any = self.layers
        if self.is_compileable and attention_mask is not None:
            mask, before = attention_mask.bool(), layers[0].visible
            if before is None:
                before = mask.new_ones(len(mask), 0)
            visible = mask[:, :-tokens]
            before = nn.functional.pad(before, (0, visible.shape[1] - before.shape[1]), value=True)
            if torch.compiler.is_compiling() or not torch.equal(visible, before):
                for layer in layers:
                    layer.mark(visible)
            layers[0].visible = mask

    def prune(self) -> None:
        """Drop all tokens that can be dropped now. Call it after a long prompt, or between compiled steps."""
        for layer in self.layers:
            layer.prune()

    @property
    def dropped(self) -> torch.Tensor:
        """Number of tokens that each key head of each layer has dropped, (layers, Hkv).

        `get_seq_length()` includes these tokens.
        """
        return torch.stack([layer.dropped() for layer in self.layers])

    @property
    def lost_weight(self) -> float:
        """A proven upper bound on the attention weight that any query has lost so far in any layer and head."""
        return math.exp(max(layer.log_lost_weight() for layer in self.layers))


__all__ = ["PrunedCache"]
