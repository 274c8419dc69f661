"""Attention backends: transformers' implementations on folded keys, or our Triton kernels.

`attn_implementation="forgetting_triton"` selects the kernels of triton_fox.py. `find_triton_mask` runs once per
forward pass. For each query, it computes the first key that the query attends to. `forgetting_triton_attention` runs
the kernels in each layer. They receive the gates of new keys as an argument. They read the gates of cached keys from
the folded keys (attention_fox.py).
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_fox import (
    GATE_PARTS,
    GATE_QUERY,
    MASKED,
    autocast_dtype,
    autocast_inputs,
    first_columns,
    fold_keys,
    fold_queries,
    running_sum,
    tree_decay,
    unfold_decay,
)
from .kernels_fox import triton
from .key_ranges_fox import VisibleKeys, find_visible_keys
from .state_fox import AttendingCache, AttendingLayer, CachedLayer, Call
from .tiles_fox import DECODE_ROWS
from .torch_internals_fox import is_in_forward_mode, is_transforming
from .triton_fox import (
    attention_from_gates,
    is_decoding,
    needs_grad,
    triton_attention,
    triton_decode,
    why_not,
)


NAME = "forgetting_triton"
AUTO = "auto"
# Minimum number of tokens in a batch for which "auto" selects our kernels. On an H200 they are the fastest at 16,384
# tokens, in training and prefill. At 2048 tokens, launching our kernels takes longer than a whole SDPA call.
KERNEL_TOKENS = 16384
# Margin for bfloat16 under QK-norm. Normalizing, weighting and rotating each round queries and keys by 2^-8. The
# product of the weights is rounded once more.
ROUNDING = 1.03


def choose_implementation(config, x: torch.Tensor, cache=None) -> str:
    """Return the attention implementation that "auto" selects for one call.

    Our kernels are selected for training and for prefill of at least `KERNEL_TOKENS` tokens, if the GPU supports them.
    SDPA handles everything else: decoding, dropout, torch.func transforms and a static `PrunedCache`.

    Args:
        config: the `FoxConfig`.
        x: the embedded tokens, (B, T, hidden).
        cache: the cache of the call, or None.
    """
    if x.device.type != "cuda" or config.forget_gate == "none" or x.shape[1] <= DECODE_ROWS:
        return "sdpa"
    if x.shape[0] * x.shape[1] < KERNEL_TOKENS or (config.attention_dropout > 0 and torch.is_grad_enabled()):
        return "sdpa"
    if is_in_forward_mode() or is_transforming():
        return "sdpa"  # the kernels do not support all derivatives
    if isinstance(cache, AttendingCache) and cache.is_compileable:
        return "sdpa"
    cannot = why_not(config.head_dim, autocast_dtype(x.device) or x.dtype, x.device)
    return NAME if cannot is None else "sdpa"


def with_implementation(config, name: str) -> Any:
    """Copy a configuration and set its attention implementation to `name`.

    Attributes are copied one by one, because PyTorch 2.11 compiles neither `copy.copy` nor `__dict__.update`.
    """
    copy = object.__new__(type(config))
    for key, value in config.__dict__.items():
        object.__setattr__(copy, key, value)
    object.__setattr__(copy, "_attn_implementation_internal", name)
    return copy


def resolve_auto(config, x: torch.Tensor, cache=None) -> Any:
    """Return the configuration of a call: if its attention implementation is "auto", a copy with the selected one."""
    if config._attn_implementation != AUTO:
        return config
    return with_implementation(config, choose_implementation(config, x, cache))


def find_triton_mask(
    config, inputs_embeds, attention_mask, cache, position_in_sequence=None
) -> tuple[bool, VisibleKeys | None]:
    """Check whether our kernels support the padding of a call, and find the keys that each query attends to.

    For plain causal attention, the visible keys are None. Otherwise, they depend on the first layer's cached length.
    Later pipeline stages do not have the first layer, so they only support plain causal attention.

    Args:
        config, attention_mask, cache: as in `read_call`. The mask is (B, past + T).
        inputs_embeds: (B, T, hidden).
        position_in_sequence: as in `Call`.
    """
    length, device = inputs_embeds.shape[1], inputs_embeds.device
    cached, (keys, dropped) = (
        (0, (length, 0)) if cache is None else (cache.get_seq_length(), cache.get_mask_sizes(length, 0))
    )
    end = cached - dropped + length  # number of filled slots
    if isinstance(end, torch.Tensor) and length > DECODE_ROWS:
        if torch.compiler.is_compiling():
            return False, None  # only the decoding kernel reads the number on the device
        end = int(end)  # synchronizes once per call, so that every layer can skip the free slots
    if not isinstance(end, torch.Tensor):
        if attention_mask is None and position_in_sequence is None and config.sliding_window is None and end == keys:
            return True, None
        keys = end
        end = None
    real = None
    if attention_mask is not None:
        missing = max(dropped + keys - attention_mask.shape[1], 0)  # free slots of a static cache
        real = F.pad(attention_mask.bool(), (0, missing))[:, dropped : dropped + keys]
    start = None
    if position_in_sequence is not None:
        start = torch.arange(length, device=device) - position_in_sequence
    options = dict(sequence_start=start, window=config.sliding_window, end=end)
    visible = find_visible_keys(length, keys, device, token_mask=real, **options)
    return visible is not None, visible


def logit_bound_of_norms(attention, heads):
    """Return a bound on the logits of `heads` query heads under QK-norm: |scaling * q.k| <= bound_scale * largest.

    The bound is not cached, because FSDP2 gathers new weights into the same tensor without changing its version.

    Returns:
        (largest, bound_scale). `largest` is an fp32 tensor, (heads,) or (1,). It is computed from the norm weights.
        `bound_scale` is a number. The result is (None, 1.0) in three cases: the model has no QK-norm; the norm weights
        are offloaded, sharded or replaced by an adapter; or a `PrunedCache` processes only some of the heads.
    """
    config, head_dim, group = attention.config, attention.head_dim, attention.num_key_value_groups
    norms = attention.q_norm, attention.k_norm
    if any(type(norm).__name__ not in ("FoxRMSNorm", "FoxHeadRMSNorm") for norm in norms):
        return None, 1.0
    weights = (norm.weight.detach() for norm in norms)
    # under tensor parallelism, each process has the weights of its own heads
    q, k = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
    if config.qk_norm_shared:
        heads = group = 1
    if q.device.type == "meta" or (q.numel(), k.numel() * group) != (heads * head_dim, heads * head_dim):
        return None, 1.0
    q, k = q.view(-1, group, head_dim), k.view(-1, 1, head_dim)
    largest_of = lambda x: torch.linalg.vector_norm(x, ord=math.inf, dim=-1).float()  # noqa: E731
    # RoPE mixes dimensions, so the maxima of q and k may coincide. YaRN and LongRoPE scale q and k.
    largest = largest_of(q * k) if config.rope_parameters is None else largest_of(q) * largest_of(k)
    return largest.flatten(), ROUNDING * attention.scaling * attention.rotary_gain * head_dim


def forgetting_triton_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, log_f=None, **kwargs):
    """Run our kernels as an attention function for transformers: (B, H, T, D) -> (B, T, H, D).

    Attention weights are not returned.

    Args:
        module: the attention layer. Its attributes are as in `FoxAttention`.
        query, key, value: (B, H, T, D). Keys and values include the cached ones and may be folded.
        attention_mask: result of `find_triton_mask`.
        log_f: log gates of the new keys, (B, Hq or Hkv, Tq), 0 at padding. None: the layer has no gates.

    Raises:
        ImportError, NotImplementedError, ValueError: the device, dtype or head size is not supported; dropout is not
            0; or the mask is not from `find_triton_mask`.
    """
    if (reason := why_not(module.head_dim, query.dtype, query.device)) is not None:
        raise reason
    if dropout > 0:
        raise ValueError(f"attention_dropout must be 0 for {NAME}, got {dropout}. Set it to 0, or use 'sdpa'.")
    if attention_mask is not None and not isinstance(attention_mask, tuple):
        raise NotImplementedError(
            f"attention_mask must be (B, Tk) for {NAME}, got {tuple(attention_mask.shape)}. Use 'sdpa' for a custom mask."
        )
    visible = VisibleKeys(None, key.shape[2]) if attention_mask is None else attention_mask
    decoding, end = is_decoding(query, key, value), visible.end
    if isinstance(end, torch.Tensor) and not decoding:
        end = int(end)
    if not isinstance(end, torch.Tensor):
        if end != key.shape[2]:
            key, value = key[:, :, :end], value[:, :, :end]
        end = None

    heads, tolerance = query.shape[1], module.config.log_pruning_tolerance
    largest, bound_scale = logit_bound_of_norms(module, heads)
    q, k, v = (first_columns(x, module.head_dim) for x in (query, key, value))
    if query.shape[2] == key.shape[2]:  # nothing is cached
        q, k, v = autocast_inputs(q, k, v)
        log_f = q.new_zeros(q.shape[0], 1, q.shape[2], dtype=torch.float32) if log_f is None else log_f
        if log_f.shape[1] != heads:
            log_f = log_f.repeat_interleave(heads // log_f.shape[1], dim=1)
        bound = None if largest is None else bound_scale * largest
        options = dict(scale=scaling, log_pruning_tolerance=tolerance, logit_bound=bound)
        return triton_attention(q, k, v, log_f, visible, **options).transpose(1, 2), None

    # the parts of c that are folded into the keys, (B, Hkv, Hq // Hkv, Tk, parts), as a view
    gates, gate_scale = key.new_zeros(()).expand(*key.shape[:2], 1, key.shape[2], 1), -GATE_QUERY * scaling
    if module.f_proj is not None:
        gates = key[..., module.head_dim : module.head_dim + GATE_PARTS * module.gates_per_key]
        gates = gates.unflatten(-1, (-1, GATE_PARTS)).transpose(2, 3)
    gates = gates.expand(-1, -1, heads // key.shape[1], -1, -1)
    if decoding:
        bounds = visible.key_start, end, scaling, tolerance, largest, bound_scale
        return triton_decode(q, k, v, gates, gate_scale, *bounds).transpose(1, 2), None
    c = gates.float().sum(-1).flatten(1, 2).double() * gate_scale  # (B, Hq, Tk)
    k, v = k.contiguous(), v.contiguous()  # for 16-byte loads: views of folded keys are not aligned
    bound = None if largest is None else bound_scale * largest
    return attention_from_gates(q, k, v, c, visible.key_start, scaling, tolerance, bound).transpose(1, 2), None


if triton is not None:
    AttentionInterface.register(NAME, forgetting_triton_attention)


def sdpa_without_cudnn(module, query, key, value, *args, **kwargs):
    """Run SDPA without cuDNN. cuDNN would create a new plan for every sequence length."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


# Backends that accept values with a smaller head dimension than keys. SDPA's kernels and FlashAttention-2 do not.
# transformers (5.23) pads values for all versions of FlashAttention.
OWN_WIDTH = ("eager", "flex_attention")
# Backends that compute softmax(scaling * q.k + mask) v exactly, in addition to transformers' FlashAttention wrappers.
# Others may silently ignore an argument.
ATTENTION_BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# If head_dim is not a multiple of 32, FlashAttention-4 silently returns wrong query gradients
# (Dao-AILab/flash-attention, pull request 2896). In training, folded heads are therefore zero-padded for all versions
# of FlashAttention except these.
EXACT_FLASH = ("flash_attention_2", "flash_attention_3")


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Compute softmax(scaling * q.k + mask) v in plain PyTorch.

    Only this backend returns attention weights. The logits are always float32, because the decay in folded keys
    reaches thousands.
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    with torch.autocast(query.device.type, enabled=False):
        logits = query.float() @ key.float().mT * scaling  # (B, H, Tq, Tk)
    if attention_mask is not None:
        hidden = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < MASKED
        logits = (logits + attention_mask.float()).masked_fill(hidden, torch.finfo(torch.float32).min)
    weights = logits.softmax(-1).to(value.dtype)
    if attention_mask is not None:  # a query that attends to nothing returns 0, as with SDPA
        weights = weights.masked_fill(hidden, 0.0)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def fold_forget_gate(module, q, k, v, log_f, call: Call, past: CachedLayer | None):
    """Fold the decay into the keys. Return q, k and v, (B, H or Hkv, T, D').

    The decay continues from the last cached key. Values are padded to D', unless the backend supports narrower values
    and there is no cache.
    """
    # Cast before folding: under autocast, the backend would also round the decay.
    q, k, v = autocast_inputs(q, k, v)
    c = running_sum(log_f, call.position_in_sequence)
    if past is not None:
        c = c + past.decay(c, module)
    name = call.implementation
    if name != NAME:  # the kernels read the decay from the keys
        q = fold_queries(q, c, module.scaling, module.gates_per_key)
    k = fold_keys(k, c, module.scaling)
    if past is not None or name not in OWN_WIDTH:
        v = F.pad(v, (0, k.shape[-1] - module.head_dim))
    return q, k, v


def attend(module, q, k, v, log_f, call: Call, past: CachedLayer | None, **kwargs):
    """Compute the attention of the new tokens to all cached and new tokens, with the call's implementation.

    Our kernels take the new gates as an argument. Other backends read them from folded keys. With every backend, a
    cache stores folded keys. Under sequence parallelism, an all-to-all exchanges tokens for heads (Ulysses, arXiv
    2309.14509). Each process then has whole rows, but only some of the heads.

    Args:
        module: the `FoxAttention`.
        q, k, v: queries, keys and values of the new tokens, (B, H or Hkv, T, D).
        log_f: log gates of the new tokens, (B, H or Hkv, T). None: the layer has no gates.
        call: the `Call`.
        past: the cached tokens, or None.

    Returns:
        (output, weights). The output is (B, T, H, D) or wider. The attention weights may be None.
    """
    if (shard := call.shard) is not None:
        q, k, v = (shard.to_heads(x) for x in autocast_inputs(q, k, v))
        log_f = None if log_f is None else shard.to_heads(log_f)
        o, _ = attend(module, q, k, v, log_f, call._replace(shard=None), past, **kwargs)
        return shard.to_parts(o), None
    name = call.implementation
    if log_f is not None:
        if log_f.shape[1] != module.gates_per_key * k.shape[1]:
            raise ValueError(
                f"tensor parallelism gives each rank {k.shape[1]} key heads, but cannot shard the {log_f.shape[1]} fixed "
                'gates. Use gates that can be sharded: forget_gate="bias_only".'
            )
        if call.token_mask is not None:  # padding does not fade other keys
            log_f = log_f * call.token_mask[:, None].to(log_f.dtype)
        if call.visible is not None:
            return attend_tree(module, q, k, v, log_f, call.visible, call, past)
        if name != NAME or past is not None:
            q, k, v = fold_forget_gate(module, q, k, v, log_f, call, past)
    if past is not None:
        k, v = past.append(k, v)
    # FlashAttention infers packed sequences from the position ids
    kwargs |= dict(position_ids=call.position_ids, **call.flash)
    if name == NAME:
        kwargs["log_f"] = log_f
    return run_backend(name, module, q, k, v, call.mask, past, **kwargs)


def attend_tree(module, q, k, v, log_f, visible: torch.Tensor, call: Call, past: CachedLayer | None):
    """Compute `attend` under a 4D attention mask, always in plain PyTorch."""
    if past is not None:
        _, k, v = fold_forget_gate(module, q, k, v, log_f, call, past)
        k, v = past.append(k, v)
        c = unfold_decay(k, module.head_dim, module.gates_per_key, module.scaling)
        log_f = c.diff(dim=-1, prepend=c[..., :1])  # the first key's gate does not fade any key
        k, v = (x[..., : module.head_dim] for x in (k, v))
    bias = tree_decay(log_f, visible)
    bias = bias.repeat_interleave(q.shape[1] // bias.shape[1], dim=1)
    dropout = module.config.attention_dropout if module.training else 0.0
    return eager_attention_forward(module, q, k, v, bias, module.scaling, dropout)


def run_backend(name, module, q, k, v, attention_mask, past: CachedLayer | None = None, **kwargs):
    """Compute softmax attention over all keys with the implementation `name`.

    Raises:
        ValueError: the implementation is not known to compute forgetting attention exactly.
    """
    if name == NAME:
        attention_function = forgetting_triton_attention
    elif name in ATTENTION_BACKENDS or ALL_ATTENTION_FUNCTIONS.get(name) is flash_attention_forward:
        attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
    else:
        raise ValueError(
            f"attention implementation {name!r} is not known to compute forgetting attention exactly. Choose one of "
            f"{(*ATTENTION_BACKENDS, NAME)}: model.set_attn_implementation('sdpa')."
        )
    if attention_function is flash_attention_forward and name not in EXACT_FLASH and needs_grad(q, k, v):
        q, k, v = (F.pad(x, (0, -x.shape[-1] % 32)) for x in (q, k, v))
    elif name == "sdpa" and q.is_cuda and q.shape[2] <= DECODE_ROWS and not torch.compiler.is_compiling():
        attention_function = sdpa_without_cudnn
    if name in OWN_WIDTH:
        v = v[..., : module.head_dim]
    if past is not None and isinstance(past.layer, AttendingLayer):
        attention_function = partial(past.layer.attend, attention_function)
    dropout = module.config.attention_dropout if module.training else 0.0
    options = dict(scaling=module.scaling, dropout=dropout, sliding_window=module.sliding_window)
    return attention_function(module, q, k, v, attention_mask, **options, **kwargs)
