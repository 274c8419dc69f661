"""Attention functions of other libraries that `check` times next to our implementations.

Each is a function of q, k, v, (B, H, T, D), and log f, (B, H, T). Creating one raises ImportError if its library is
not installed.
"""

import functools
import importlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def plain_sdpa(backend):
    def attention(q, k, v, log_f):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def flash_attention(module):
    """Return FlashAttention-2, 3 or 4 from its module; some versions return the log-sum-exp as well."""
    function = importlib.import_module(module).flash_attn_func

    def attention(q, k, v, log_f):
        o = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return attention


def fla():
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    def attention(q, k, v, log_f):
        return parallel_forgetting_attn(*(x.transpose(1, 2) for x in (q, k, v, log_f))).transpose(1, 2)

    return attention


def official():
    from forgetting_transformer import forgetting_attention

    return lambda q, k, v, log_f: forgetting_attention(q, k, v, log_f, head_first=True)


def flex():
    """Return FlexAttention with the decay as its score_mod."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # ty: ignore[invalid-assignment]
    run = torch.compile(flex_attention, dynamic=False) if torch.cuda.is_available() else flex_attention

    @functools.cache
    def block_mask(T, device):
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=device)

    def attention(q, k, v, log_f):
        c = log_f.cumsum(-1)
        c_j = c.clone()  # a tensor with a gradient may be indexed once
        decayed = lambda s, b, h, i, j: s + c[b, h, i] - c_j[b, h, j]  # noqa: E731
        return run(q, k, v, score_mod=decayed, block_mask=block_mask(log_f.shape[2], q.device))

    return attention


PEERS = {
    "SDPA flash, no gate": lambda: plain_sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN, no gate": lambda: plain_sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2, no gate": lambda: flash_attention("flash_attn"),
    "FlashAttention-3, no gate": lambda: flash_attention("flash_attn_interface"),
    "FlashAttention-4, no gate": lambda: flash_attention("flash_attn.cute"),
    "FLA": fla,
    "official": official,
    "FlexAttention": flex,  # the last one, because Inductor compiles it for each size
}
