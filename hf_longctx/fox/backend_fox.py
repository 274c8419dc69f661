"""Who computes the attention: implementations of transformers, or Triton kernels that take the gates as they are.

`attn_implementation="forgetting_triton"` is the kernels of triton_fox.py.

A mask function computes once per forward pass which keys the queries see, in one integer per query; an attention
function runs the kernels for each layer. The gates of new keys are an argument. The gates of cached keys are folded
into the keys (attention_fox.py): the decoding kernel reads them there, at the cost of a few bytes per key.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_fox import (
    GATE_PARTS,
    GATE_QUERY,
    MASKED,
    autocast_dtype,
    autocast_inputs,
    decay_along_paths,
    fold_keys,
    fold_queries,
    running_sum,
    unfold_decay,
)
from .call_fox import Call
from .kernels_fox import triton
from .key_ranges_fox import VisibleKeys, find_query_end, find_visible_keys
from .state_fox import CachedLayer, drops_tokens
from .tiles_fox import DECODE_ROWS
from .triton_fox import (
    attention_from_sums,
    is_decoding,
    needs_grad,
    triton_attention,
    triton_decode,
    why_not,
)


NAME = "forgetting_triton"
AUTO = "auto"
# The rows times the length of a call from which "auto" takes our kernels. At 16,384 tokens they are the fastest on an
# H200, in training and prefill; at 2048, the host takes longer to launch them than SDPA takes for the whole call.
KERNEL_TOKENS = 16384
# In bfloat16, queries and keys exceed the norm that QK-norm gives them by the rounding of norm, weight and rotation,
# 2^-8 each, and the product of the weights is rounded once more.
ROUNDING = 1.03


def check_implementation(name, head_dim):
    """Raise what keeps our kernels from computing a FoX; transformers and `run_backend` refuse what they do not know.

    Raises:
        ImportError, NotImplementedError: Triton is missing, or heads are too large for the kernels.
    """
    if name == NAME and (reason := why_not(head_dim)) is not None:
        raise reason


def choose_implementation(config, x: torch.Tensor, attention_mask=None, cache=None) -> str:
    """Return the implementation that `attn_implementation="auto"` stands for in one call.

    These are our kernels for training and for prefill of `KERNEL_TOKENS` tokens, on a GPU that has them. Everything
    else is "sdpa": decoding, dropout, transforms of torch.func, and padding within a `PrunedCache`.

    Args:
        config: the `FoxConfig`.
        x: the embedded tokens, (B, T, hidden).
        attention_mask, cache: those of the call, or None.
    """
    if x.device.type != "cuda" or config.forget_gate == "none" or x.shape[1] <= DECODE_ROWS:
        return "sdpa"
    if x.shape[0] * x.shape[1] < KERNEL_TOKENS or (config.attention_dropout > 0 and torch.is_grad_enabled()):
        return "sdpa"
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return "sdpa"  # the kernels lack some derivatives
    if drops_tokens(cache) and attention_mask is not None and not attention_mask.all():
        return "sdpa"
    cannot = why_not(config.sizes.head_dim, autocast_dtype(x.device) or x.dtype, x.device)
    return NAME if cannot is None else "sdpa"


def with_implementation(config, name: str) -> Any:
    """Return a copy of a configuration with another attention implementation.

    Attribute by attribute, as `torch.compile` of PyTorch 2.11 traces neither `copy.copy` nor an update of `__dict__`.
    """
    copy = object.__new__(type(config))
    for key, value in config.__dict__.items():
        object.__setattr__(copy, key, value)
    object.__setattr__(copy, "_attn_implementation_internal", name)
    return copy


def forgetting_triton_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    config: Any = None,
    use_vmap=False,
    device=None,
    **kwargs,
):
    """Return who sees whom for our kernels; a mask function with the arguments of transformers.

    Returns:
        `VisibleKeys`; None if every query sees all keys up to its own. The later stages of a pipeline need the latter:
        their cache has no first layer, so the number of cached keys is not known here.

    Raises:
        NotImplementedError: a mask function of the caller's own, or attention in both directions.
    """
    if use_vmap or not getattr(config, "is_causal", True):
        raise NotImplementedError(
            f"{NAME} knows causal masks with padding, packed documents and a window, but no other mask function. "
            "Use another backend: model.set_attn_implementation('flex_attention')."
        )
    end = q_offset - kv_offset + q_length  # number of filled slots
    if isinstance(end, torch.Tensor) and q_length > DECODE_ROWS and not torch.compiler.is_compiling():
        end = int(end)  # waits for the device once, so that no layer computes with free slots
    if not isinstance(end, torch.Tensor):
        plain = attention_mask is None and mask_function is causal_mask_function and config.sliding_window is None
        if plain and end == kv_length:
            return None
        kv_length, end = end, None
    real = None
    if attention_mask is not None:
        missing = max(kv_offset + kv_length - attention_mask.shape[1], 0)  # free slots of a static cache
        real = F.pad(attention_mask.bool(), (0, missing))[:, kv_offset : kv_offset + kv_length]
    sequence_start = None
    if mask_function is not causal_mask_function:
        # Packed documents are known to mask_function only: one begins where a token does not see the one before it.
        place, row = torch.arange(q_length, device=device) + q_offset, torch.arange(batch_size, device=device)[:, None]
        continues = mask_function(row, torch.zeros_like(row), place, place - 1) & (place > 0)
        sequence_start = torch.where(continues, 0, place - kv_offset).expand(batch_size, -1).cummax(-1).values
    options = dict(sequence_start=sequence_start, window=config.sliding_window, end=end)
    return find_visible_keys(q_length, kv_length, device, token_mask=real, **options)


def logit_bound_of_norms(attention, heads):
    """Return a bound of the logits of `heads` query heads under QK-norm: |scaling * q.k| <= bound_scale * largest.

    The weights are read in every call and the bound is not stored: FSDP2 gathers new weights into the same tensor
    under the same version, so a stored bound could be out of date unnoticed.

    Returns:
        (largest, bound_scale): fp32, (heads,) or (1,), from the weights of the norms; and a number. (None, 1.0)
        without QK-norm, and where the norms do not hold the weights of exactly these heads: they are offloaded or
        sharded, an adapter has replaced them, or a `PrunedCache` computes some of the heads.
    """
    config, head_dim, group = attention.config, attention.head_dim, attention.num_key_value_groups
    norms = attention.q_norm, attention.k_norm
    if any(type(norm).__name__ not in ("FoxRMSNorm", "FoxHeadRMSNorm") for norm in norms):
        return None, 1.0
    weights = (norm.weight.detach() for norm in norms)
    # under tensor parallelism, each process holds the weights of its heads
    q, k = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
    if config.qk_norm_shared:
        heads = group = 1
    if q.device.type == "meta" or (q.numel(), k.numel() * group) != (heads * head_dim, heads * head_dim):
        return None, 1.0
    q, k = q.view(-1, group, head_dim), k.view(-1, 1, head_dim)
    largest_of = partial(torch.linalg.vector_norm, ord=math.inf, dim=-1, dtype=torch.float32)  # absolute values
    # RoPE moves weight between dimensions, so the two maxima may meet; YaRN and LongRoPE lengthen q and k
    largest = largest_of(q * k) if config.rope_parameters is None else largest_of(q) * largest_of(k)
    return largest.flatten(), ROUNDING * attention.scaling * attention.rotary_gain * head_dim


def gates_in(module, key, heads):
    """Return the parts of c that are folded into the keys, (B, Hkv, heads // Hkv, Tk, parts), as a view."""
    if module.f_proj is None:
        gates = key.new_zeros(()).expand(*key.shape[:2], 1, key.shape[2], 1)
    else:
        gates = key[..., module.head_dim : module.head_dim + GATE_PARTS * module.gates_per_key]
        gates = gates.unflatten(-1, (-1, GATE_PARTS)).transpose(2, 3)
    return gates.expand(-1, -1, heads // key.shape[1], -1, -1)


def refuse(module, query, mask, dropout, output_attentions):
    """Raise what keeps the kernels from computing a call; see `forgetting_triton_attention`."""
    if (reason := why_not(module.head_dim, query.dtype, query.device)) is not None:
        raise reason
    if dropout > 0:
        raise ValueError(
            f"{NAME} has no attention dropout, but attention_dropout={dropout}. Set it to 0, or use 'sdpa'."
        )
    if output_attentions:
        raise ValueError(f"{NAME} returns no attention weights: model.set_attn_implementation('eager') does.")
    if mask is not None and not isinstance(mask, tuple):
        raise NotImplementedError(
            f"{NAME} takes attention_mask as (B, Tk) with 1 for real tokens, but got a {type(mask).__name__} of shape "
            f"{tuple(mask.shape)}. Use 'sdpa' for a mask of your own."
        )


def forgetting_triton_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, log_f=None, **kwargs):
    """Run the kernels; an attention function: (B, H, T, D) in, (B, T, H, D) out, no attention weights.

    Args:
        module: the attention layer: `head_dim`, `gates_per_key`, `f_proj`, `q_norm`, `k_norm` and `config`.
        query, key, value: keys and values with those of the cache, of plain width or folded.
        attention_mask: result of `forgetting_triton_mask`.
        log_f: log gates of the new keys, (B, Hq or Hkv, Tq), 0 at padding; None for a layer without gates.

    Raises:
        ImportError, NotImplementedError, ValueError: the kernels cannot run on this device, dtype or head size;
            dropout or attention weights are requested; the mask is not from `forgetting_triton_mask`.
    """
    refuse(module, query, attention_mask, dropout, kwargs.get("output_attentions"))
    visible = VisibleKeys(None, key.shape[2]) if attention_mask is None else attention_mask
    decoding, end = is_decoding(query, key, value), visible.end
    if isinstance(end, torch.Tensor) and not decoding:
        end = int(end)
    if not isinstance(end, torch.Tensor):
        key, value, end = key[:, :, :end], value[:, :, :end], None

    heads, tolerance = query.shape[1], module.config.log_pruning_tolerance
    largest, bound_scale = logit_bound_of_norms(module, heads)
    q, k, v = (x[..., : module.head_dim] for x in (query, key, value))
    if query.shape[2] == key.shape[2]:  # nothing is cached
        q, k, v = autocast_inputs(q, k, v)
        log_f = q.new_zeros(q.shape[0], 1, q.shape[2], dtype=torch.float32) if log_f is None else log_f
        if log_f.shape[1] != heads:
            log_f = log_f.repeat_interleave(heads // log_f.shape[1], dim=1)
        bound = None if largest is None else bound_scale * largest
        options = dict(scale=scaling, log_pruning_tolerance=tolerance, logit_bound=bound)
        return triton_attention(q, k, v, log_f, visible, **options).transpose(1, 2), None

    q, k, v, key = visible.sort_queries(q), *(visible.sort_keys(x) for x in (k, v, key))
    gates, gate_scale = gates_in(module, key, heads), -GATE_QUERY * scaling
    if decoding:
        bounds = visible.key_start, end, scaling, tolerance, largest, bound_scale
        o = triton_decode(q, k, v, gates, gate_scale, *bounds)
    else:
        c = gates.float().sum(-1).flatten(1, 2).double() * gate_scale  # (B, Hq, Tk)
        if visible.token_mask is not None:
            c = c.masked_fill(~visible.token_mask[:, None], 0.0)  # pruning needs a c that falls, padding included
        k, v = k.contiguous(), v.contiguous()  # for loads of 16 bytes, of which folded keys allow 8 elements
        stop = None if visible.key_start is None else find_query_end(visible.key_start, k.shape[2])
        bound = None if largest is None else bound_scale * largest
        o, _ = attention_from_sums(q, k, v, c, visible.key_start, stop, scaling, tolerance, bound)
    return visible.unsort_queries(o).transpose(1, 2), None


if triton is not None:
    AttentionInterface.register(NAME, forgetting_triton_attention)
AttentionMaskInterface.register(NAME, forgetting_triton_mask)


# SDPA by a backend of choice: torch's own order has cuDNN first on some GPUs, since 2.11.
SDPA = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_fa2": SDPBackend.FLASH_ATTENTION}


def sdpa_by(first: SDPBackend, module, query, key, value, *args, **kwargs):
    """Run SDPA by one backend, or by others where it cannot compute a call, for example with a mask.

    Above 128, cuDNN has few pairs of widths, of which one is 192 beside values of 128. A decoding step would copy all
    keys for it.
    """
    wide = value.shape[-1] == 128 < query.shape[-1] <= 192 and query.shape[2] > DECODE_ROWS
    if wide and first is SDPBackend.CUDNN_ATTENTION:
        query, key = (F.pad(x, (0, 192 - x.shape[-1])) for x in (query, key))
    with sdpa_kernel([first, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


for name, first in SDPA.items():
    AttentionInterface.register(name, partial(sdpa_by, first))
    AttentionMaskInterface.register(name, sdpa_mask)

# Of values, which SDPA's other kernels and FlashAttention-2 want as wide as folded keys. transformers (5.23) fills
# them up for every FlashAttention, also where FlashAttention-3 and 4 could take them as they are.
OWN_WIDTH = ("eager", "sdpa_cudnn", "flex_attention")
# Backends that compute softmax(scaling * q.k + mask) v exactly, as does what transformers wraps as FlashAttention.
# Others may drop an argument that they do not know.
ATTENTION_BACKENDS = ("eager", "sdpa", *SDPA, "flash_attention_2", "flash_attention_3", "flex_attention")
# FlashAttention-4 gives wrong gradients of queries, and says nothing, where the width of heads is no multiple of 32
# (Dao-AILab/flash-attention, pull request 2896): with gradients, what may be that gets zeros on top of the fold.
EXACT_FLASH = ("flash_attention_2", "flash_attention_3")


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Compute softmax(scaling * q.k + mask) v in plain PyTorch; the only backend that returns the attention weights.

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


def fold_forget_gate(module, q, k, v, log_f, call: Call, past: CachedLayer | None):
    """Fold the decay into the keys, summing log f on from the last cached key: (B, H or Hkv, T, D') each.

    Values stay as wide as they are for a backend that takes them so; a cache has one width.
    """
    # The backend would round the folded keys to the autocast dtype, the decay with them: round first, then fold.
    q, k, v = autocast_inputs(q, k, v)
    c = running_sum(log_f, call.position_in_sequence)
    if past is not None:
        c = c + past.decay(c, module)
    name = call.implementation or module.config._attn_implementation
    if name != NAME:  # which reads the decay from the keys by itself
        q = fold_queries(q, c, module.scaling, module.gates_per_key)
    k = fold_keys(k, c, module.scaling)
    if past is not None or name not in OWN_WIDTH:
        v = F.pad(v, (0, k.shape[-1] - module.head_dim))
    return q, k, v


def attend(module, q, k, v, log_f, call: Call, past: CachedLayer | None, **kwargs):
    """Return the attention of the new tokens to all cached and new ones, by the implementation that the call names.

    Our kernels take new gates beside the keys. For other backends, and for a cache, gates are folded into the keys.
    Processes that share rows trade them for heads, so that each has whole rows of some heads (Ulysses, arXiv
    2309.14509).

    Args:
        module: the `FoxAttention`.
        q, k, v: of the new tokens, (B, H or Hkv, T, D).
        log_f: log gates of the new tokens, (B, H or Hkv, T); None for a layer without gates.
        call: the `Call`.
        past: the cached tokens, or None.

    Returns:
        (B, T, H, D) or wider, and attention weights or None.
    """
    if (shard := call.shard) is not None:
        q, k, v = (shard.to_heads(x) for x in autocast_inputs(q, k, v))
        log_f = None if log_f is None else shard.to_heads(log_f)
        o, _ = attend(module, q, k, v, log_f, call._replace(shard=None), past, **kwargs)
        return shard.to_parts(o), None
    name = call.implementation or module.config._attn_implementation
    if log_f is not None:
        if log_f.shape[1] != module.gates_per_key * k.shape[1]:
            raise ValueError(
                f"tensor parallelism splits key heads into parts of {k.shape[1]}, but leaves the {log_f.shape[1]} fixed "
                'gates whole. Give the model gates that can be split: forget_gate="bias_only".'
            )
        if call.token_mask is not None:  # padding does not fade
            log_f = log_f * call.token_mask[:, None].to(log_f.dtype)
        if call.visible is not None:
            return attend_along_paths(module, q, k, v, log_f, call.visible, call, past)
        if name != NAME or past is not None:
            q, k, v = fold_forget_gate(module, q, k, v, log_f, call, past)
    if past is not None:
        k, v = past.append(k, v)
    # FlashAttention finds packed sequences in the position ids
    kwargs |= dict(position_ids=call.position_ids, **call.flash)
    if name == NAME:
        kwargs["log_f"] = log_f
    return run_backend(name, module, q, k, v, call.mask, past, **kwargs)


def attend_along_paths(module, q, k, v, log_f, visible: torch.Tensor, call: Call, past: CachedLayer | None):
    """Return `attend` under a mask of four dimensions, in plain PyTorch for every implementation."""
    if past is not None:
        _, k, v = fold_forget_gate(module, q, k, v, log_f, call, past)
        k, v = past.append(k, v)
        c = unfold_decay(k, module.head_dim, module.gates_per_key, module.scaling)
        log_f = c.diff(dim=-1, prepend=c[..., :1])  # no key fades by the gate of the first
        k, v = (x[..., : module.head_dim] for x in (k, v))
    bias = decay_along_paths(log_f, visible)
    bias = bias.repeat_interleave(q.shape[1] // bias.shape[1], dim=1)
    dropout = module.config.attention_dropout if module.training else 0.0
    return eager_attention_forward(module, q, k, v, bias, module.scaling, dropout)


def run_backend(name, module, q, k, v, attention_mask, past: CachedLayer | None = None, **kwargs):
    """Compute softmax attention over all keys by the implementation `name`.

    Raises:
        ValueError: the implementation may not compute forgetting attention exactly.
    """
    if name == NAME:
        attention_function = forgetting_triton_attention
    elif name in ATTENTION_BACKENDS or ALL_ATTENTION_FUNCTIONS.get(name) is flash_attention_forward:
        attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
    else:
        raise ValueError(
            f"attention implementation {name!r} is not known to compute forgetting attention exactly; choose one of "
            f"{(*ATTENTION_BACKENDS, NAME)}: model.set_attn_implementation('sdpa')."
        )
    if attention_function is flash_attention_forward and name not in EXACT_FLASH and needs_grad(q, k, v):
        q, k, v = (F.pad(x, (0, -x.shape[-1] % 32)) for x in (q, k, v))
    elif name == "sdpa" and q.is_cuda and q.shape[2] <= DECODE_ROWS and not torch.compiler.is_compiling():
        attention_function = partial(sdpa_by, SDPBackend.FLASH_ATTENTION)  # cuDNN plans again for each length
    if name in OWN_WIDTH:
        v = v[..., : module.head_dim]
    if past is not None and hasattr(past.layer, "attend"):
        attention_function = partial(past.layer.attend, attention_function)
    dropout = module.config.attention_dropout if module.training else 0.0
    options = dict(scaling=module.scaling, dropout=dropout, sliding_window=module.sliding_window)
    return attention_function(module, q, k, v, attention_mask, **options, **kwargs)
