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

The sum grows with every dropped key, and the oldest keys have faded most. Each head therefore drops its oldest keys
(ragged_cache.py). Attention to the remaining keys is exact.

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
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .attention_fox import GATE_PARTS, fold_keys, unfold_decay
from .backend_fox import ROUNDING, logit_bound_of_norms
from .modeling_fox import FoxDecoderLayer
from .ragged_cache import (
    RaggedCache,
    RaggedHybridLayer,
    RaggedLayer,
    StaticRaggedHybridLayer,
    StaticRaggedLayer,
)
from .torch_internals_fox import mark_static


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


def within_tolerance(c, lost, bound, log_tolerance) -> torch.Tensor:
    """Return how many of its oldest tokens a head may drop by condition (1) of the module docstring.

    This is the rule of a `PrunedCache`. Another rule is a function of c, lost and bound.

    Args:
        c: c of each token in each row, minus c of the last token, (B, G, n) fp64.
        lost: log of the left side of (1) if all tokens up to this one are dropped, (B, G, n) fp64.
        bound: the bound U of each gate, (G,) fp64.
    """
    return (lost + 2 * bound[:, None] <= log_tolerance).sum(-1).min()  # the last token is never within it


class Pruning:
    """What one layer of a `PrunedCache` drops, and the bound on the attention weight that its queries lose.

    Args:
        attention: the `FoxAttention`.
        weight_bound: the bound U from the weights, (Hq,). None: U follows from the observed queries and keys.
        tolerance, rule: as in `PrunedCache`.
    """

    def __init__(self, attention, weight_bound, tolerance, rule=None):
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.queries_per_key, self.gates_per_key = attention.num_key_value_groups, attention.gates_per_key
        self.log_tolerance = math.log(tolerance) if tolerance else -math.inf
        self.rule = rule or partial(within_tolerance, log_tolerance=self.log_tolerance)
        self.weight_bound, self.warns = weight_bound, weight_bound is None and rule is None
        self.clear()

    def clear(self) -> None:
        self.log_lost = None  # log of the left side of (1) at the last pruning, (B, Hkv, G, 1), fp64
        self.worst = -math.inf  # log of the bound on lost weight before the last pruning
        self.largest_query = self.largest_key = None

    def select_rows(self, rows: torch.Tensor) -> None:
        if self.log_lost is not None:
            self.log_lost = self.log_lost.index_select(0, rows)

    def observe(self, query, key):
        """Measure queries, (B, Hq, T, D'), and keys, unless the bound follows from the weights."""
        if self.weight_bound is not None:
            return
        norms = [x[..., : self.head_dim].detach().float().norm(dim=-1).amax((0, 2)) for x in (query, key)]  # (H,)
        if self.largest_query is None or self.largest_key is None:
            self.largest_query, self.largest_key = norms
            mark_static(*norms)
        self.largest_query.copy_(torch.maximum(self.largest_query, norms[0]))
        self.largest_key.copy_(torch.maximum(self.largest_key, norms[1]))

    def _decay(self, keys):
        """Read c from folded keys: (B, h, n, D') -> (B, h, G, n) fp64. c is measured from the last pruning."""
        c = unfold_decay(keys, self.head_dim, self.gates_per_key, self.scaling)
        return c.unflatten(1, (-1, self.gates_per_key)).double()

    def _fold(self, keys, c):
        """Return a copy of folded keys, (B, h, n, D'), with new values of c, (B, h, G, n)."""
        folded = fold_keys(keys[..., : self.head_dim], c.float().flatten(1, 2), self.scaling)
        marker = self.head_dim + GATE_PARTS * self.gates_per_key
        return torch.cat([folded[..., :marker], keys[..., marker:]], dim=-1)

    def logit_bound(self) -> torch.Tensor:
        """Return the bound U of each gate, (Hkv, G), from the weights or from the observed queries and keys."""
        bound = self.weight_bound
        if bound is None:
            assert self.largest_query is not None and self.largest_key is not None
            bound = self.scaling * self.largest_query * self.largest_key.repeat_interleave(self.queries_per_key)
        return bound.view(-1, self.gates_per_key, self.queries_per_key // self.gates_per_key).amax(2).double()

    def log_lost_weight(self) -> float:
        """Return the log of `PrunedCache.lost_weight` for this layer."""
        if self.log_lost is None:
            return self.worst
        return max(self.worst, (self.log_lost[..., 0] + 2 * self.logit_bound().to(self.log_lost)).max().item())

    def prune(self, layer: RaggedLayer, tokens: int) -> None:
        """Drop the tokens that the rule allows. Then shift c to 0 at the last token.

        Pruning uses the c of the last cached token, because no later query has a larger c.

        Args:
            layer: a layer with tokens.
            tokens: number of tokens that the next call will add.
        """
        length = int(layer.length)
        self.worst = self.log_lost_weight()
        now = self._decay(layer.keys)  # (B, Hkv, G, 1)
        bound = self.logit_bound().to(now) * (HEADROOM if self.weight_bound is None else 1)
        self.log_lost = now - math.inf if self.log_lost is None else self.log_lost + now

        stored = {}
        needed = [0] * len(bound)
        for group in layer.groups:
            c = self._decay(group.keys) - now[:, group.key_heads]  # (B, h, G, capacity)
            lost = torch.logaddexp(self.log_lost[:, group.key_heads], (-c).logcumsumexp(-1))
            for i, (head, dropped) in enumerate(zip(group.heads, group.dropped)):
                n = length - dropped
                parts = group.keys[:, i, :n], group.values[:, i, :n], c[:, i, :, :n], lost[:, i, :, :n]
                stored[head] = parts
                count = self.rule(*parts[2:], bound[head])
                if getattr(count, "ndim", 0):
                    raise ValueError(
                        f"a rule must return a number of tokens, got a tensor of shape {tuple(count.shape)}. A head "
                        "drops its oldest tokens."
                    )
                count = int(count)
                if count >= n:
                    raise ValueError(f"a rule must retain the last token, got {count} tokens to drop of {n}.")
                needed[head] = n - max(count, 0)

        def read(head, n):
            keys, values, c, _ = stored[head]
            return self._fold(keys[:, None, -n:], c[:, None, :, -n:])[:, 0], values[:, -n:]

        for head, dropped in enumerate(layer.regroup(needed, tokens, read)):
            if dropped:
                self.log_lost[:, head] = stored[head][3][..., dropped - 1 : dropped]
        layer.keys.copy_(self._fold(layer.keys, torch.zeros_like(now)))
        if self.warns and self.worst > self.log_tolerance:
            logger.warning_once(
                f"after a PrunedCache dropped tokens, the bound on the attention logits exceeded {HEADROOM} "
                "times its earlier value. The lost attention weight may therefore exceed the tolerance. Use a smaller "
                "tolerance. cache.lost_weight is a bound on the lost weight."
            )


class PrunedCache(RaggedCache):
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
        rule: a function like `within_tolerance` that decides instead how many tokens a head drops. `lost_weight` is
            then still a bound on the lost weight.

    Raises:
        ValueError: the model is not a FoX or does not have a forget gate; or an argument is out of range.
        NotImplementedError: the model has a sliding window.
    """

    def __init__(
        self,
        model,
        tolerance: float | None = None,
        logit_bound: str = "weights",
        prune_every: int = 256,
        max_cache_len: int | None = None,
        rule: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any] | None = None,
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
        kind: Any = RaggedHybridLayer if shift else RaggedLayer
        if max_cache_len is not None:
            kind = partial(StaticRaggedHybridLayer if shift else StaticRaggedLayer, max_cache_len=max_cache_len)
        bounds = [logit_bound_of_weights(layer) if logit_bound == "weights" else None for layer in decoder_layers]
        prunings = [Pruning(*pair, tolerance, rule) for pair in zip(attentions, bounds)]
        super().__init__(layers=[kind(*pair, prune_every) for pair in zip(attentions, prunings)])
        self.versions, self.checked_at = weight_versions(decoder_layers), -1
        self.weights = [[x.clone() for x in first_weights(layer)] for layer in decoder_layers]

    @torch.no_grad()
    def check_weights(self, decoder_layers) -> None:
        """Raise ValueError if the bound U does not follow from the weights of these layers.

        The identity and version of the weights are compared in every call, their values after each pruning.
        """
        pruned_at, versions = self.layers[0].pruned_at, weight_versions(decoder_layers)
        bounds = [layer.pruning.weight_bound for layer in self.layers]
        if bounds[0] is None or (versions, pruned_at) == (self.versions, self.checked_at):
            return
        for layer, recorded, known in zip(decoder_layers, self.weights, bounds):
            weights = first_weights(layer)
            same = len(weights) == len(recorded) and all(
                x.shape == y.shape and torch.equal(x, y.to(x)) for x, y in zip(weights, recorded)
            )
            if same and versions != self.versions:  # up to the rounding to bfloat16
                bound = logit_bound_of_weights(layer)
                same = bool((bound <= 1.01 * known.to(bound)).all())
            if not same:
                raise ValueError(
                    "this PrunedCache must be used with the weights that it was created for, got others. Its bound on "
                    "the logits follows from them. After training, loading or merging weights, create a new cache: "
                    "PrunedCache(model)."
                )
        self.versions, self.checked_at = versions, pruned_at

    @property
    def lost_weight(self) -> float:
        """A proven upper bound on the attention weight that any query has lost so far in any layer and head."""
        return math.exp(min(0.0, max(layer.pruning.log_lost_weight() for layer in self.layers)))


__all__ = ["PrunedCache"]
