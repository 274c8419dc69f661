"""Everything that computes forgetting attention, or attention without a gate, beside our kernels: to compare speeds.

Competitors are functions of q, k, v, (B, H, T, D), and log_f, (B, H, T). One that is not installed raises ImportError
as it is made.
"""

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_longctx.fox import triton_fox as fox
from hf_longctx.fox.attention_fox import fold_keys, fold_queries
from hf_longctx.fox.operator import folded_attention


LOGIT_BOUND = 8.0  # |scale * q.k| where logits are bounded, as QK-norm would promise it
TOLERANCE = -10.0  # arXiv 2504.06949


ours = fox.triton_attention
# As in a model with QK-norm. The random logits exceed the bound a little and seldom, which costs nothing here.
ours_bounded = functools.partial(ours, logit_bound=LOGIT_BOUND)
ours_pruned = functools.partial(ours_bounded, log_pruning_tolerance=TOLERANCE)


def plain_sdpa(backend):
    def attention(q, k, v, log_f):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def flash_attention(module):
    """FlashAttention-2, 3 or 4, by the module that has it; some return the log-sum-exp beside the output."""
    function = importlib.import_module(module).flash_attn_func

    def attention(q, k, v, log_f, scale=None):
        o = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, softmax_scale=scale)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return attention


def folded(q, k, v, log_f):
    """The path of every attention implementation of transformers: stock attention computes the decay."""
    return folded_attention(q, k, v, log_f, q.shape[-1] ** -0.5)  # without the checks, which wait for the device


def folded_cudnn(q, k, v, log_f):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return folded(q, k, v, log_f)


def folded_flash(module, multiple):
    """FlashAttention on folded keys, whose width is filled up to a multiple of what its gradients are right at."""
    run = flash_attention(module)

    def attention(q, k, v, log_f):
        c, scale, D = log_f.cumsum(-1), q.shape[-1] ** -0.5, q.shape[-1]
        inputs = fold_queries(q, c, scale, 1), fold_keys(k, c, scale)
        width = -(-inputs[1].shape[-1] // multiple) * multiple
        own = multiple == 8 and 96 < D <= 128 < width <= 192  # FlashAttention-3 has a kernel of 192 with values of 128
        q, k = (F.pad(x, (0, width - x.shape[-1])) for x in inputs[:2])
        return run(q, k, v if own else F.pad(v, (0, width - D)), log_f, scale)[..., :D]

    return attention


FLEX_BLOCK = 128


@functools.cache
def flex_functions():
    from torch.nn.attention import flex_attention

    # one for each size; beyond it, flex_attention would run uncompiled
    torch._dynamo.config.recompile_limit = 64  # ty: ignore[invalid-assignment]
    run = flex_attention.flex_attention
    return torch.compile(run, dynamic=False) if torch.cuda.is_available() else run, flex_attention.BlockMask


def flex(first_blocks=None):
    """FlexAttention with the decay as score_mod; the gradient of log f adds up by atomic additions.

    first_blocks: the first key block of each block of queries, (B, H, n); default the first of all. Only the blocks on
    the diagonal are masked. The mask is made once for each length, and so in no timed call.
    """

    @functools.cache
    def block_mask(T, device):
        n = -(-T // FLEX_BLOCK)
        i = torch.arange(n, device=device, dtype=torch.int32)
        first = torch.zeros(1, 1, n, device=device, dtype=torch.int32) if first_blocks is None else first_blocks
        on_diagonal = i[:, None].expand(*first.shape[:2], n, n).contiguous()
        full = (first[..., None] + i) % n
        sizes: dict[str, Any] = dict(BLOCK_SIZE=FLEX_BLOCK, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(T, T))
        return flex_functions()[1].from_kv_blocks(torch.ones_like(first), on_diagonal, i - first, full, **sizes)

    def attention(q, k, v, log_f):
        c, mask = log_f.cumsum(-1), block_mask(log_f.shape[2], q.device)
        c_j = c.clone()  # a tensor with a gradient may be indexed once
        decayed = lambda s, b, h, i, j: s + c[b, h, i] - c_j[b, h, j]  # noqa: E731
        return flex_functions()[0](q, k, v, score_mod=decayed, block_mask=mask)

    return attention


def fla():
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    def attention(q, k, v, log_f):
        return parallel_forgetting_attn(*(x.transpose(1, 2) for x in (q, k, v, log_f))).transpose(1, 2)

    return attention


def official(threshold=None):
    """threshold: of the decay, as in arXiv 2504.06949; versions without pruning do not know it."""
    from forgetting_transformer import forgetting_attention

    options = {} if threshold is None else {"adaptive_threshold": threshold}
    return lambda q, k, v, log_f: forgetting_attention(q, k, v, log_f, head_first=True, **options)


COMPETITORS = {  # name: (makes the function, whether its results are those of ours)
    "ours": (lambda: ours, True),
    "ours, bounded logits": (lambda: ours_bounded, True),
    "SDPA flash (no gate)": (lambda: plain_sdpa(SDPBackend.FLASH_ATTENTION), False),
    "SDPA cuDNN (no gate)": (lambda: plain_sdpa(SDPBackend.CUDNN_ATTENTION), False),
    "FlashAttention-2 (no gate)": (lambda: flash_attention("flash_attn"), False),
    "FlashAttention-3 (no gate)": (lambda: flash_attention("flash_attn_interface"), False),
    "FlashAttention-4 (no gate)": (lambda: flash_attention("flash_attn.cute"), False),
    "folded gate, SDPA": (lambda: folded, True),
    "folded, cuDNN": (lambda: folded_cudnn, True),
    "folded, FA3": (lambda: folded_flash("flash_attn_interface", 8), True),
    "folded, FA4": (lambda: folded_flash("flash_attn.cute", 32), True),
    "FLA": (fla, True),
    "official": (official, True),
    "FlexAttention": (flex, True),  # last: inductor compiles it for each size
}


@functools.cache
def competitor(name):
    """Return the function of that name."""
    return COMPETITORS[name][0]()
