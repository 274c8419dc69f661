"""Windows by FlashAttention, with an emulation of PyTorch's kernel, equal attention with dense masks in float64."""

import pytest
import torch
from tiny_windows import dense_logits, difference, in_chunks, make, tokens, windowed

from hf_longctx.windows import attention
from hf_longctx.windows.flash import flash, supports_flash


CALLS = []


def like_flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale, window_size_left, **options):
    """Compute what the kernel computes: the last query is aligned with the last key. (B, T, H, D)."""
    assert (cu_q, cu_k, max_q, max_k, dropout) == (None, None, q.shape[1], k.shape[1], 0.0) and is_causal
    assert set(options) <= {"window_size_right", "seqused_k", "alibi_slopes", "block_table", "num_splits"}
    CALLS.append((q.shape[1], k.shape[1]))
    age = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    hidden = (age < 0) | ((age > window_size_left) & (window_size_left >= 0))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    empty = q.new_empty(0)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1), empty, empty, empty


@pytest.fixture
def emulated(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(attention, "supports_flash", lambda *_: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", like_flash, "CPU")
        yield CALLS


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "granite"])
@torch.no_grad()
def test_windows_by_flash_attention_equal_a_dense_mask(emulated, family, sinks):
    model, windows = windowed(family, windows=[[-1, 16, 5, 16], [69, 67, 66, 1], [8, 8, 8, 8]], sinks=sinks)
    ids = tokens()
    wanted = dense_logits(make(family), windows, ids)
    assert difference(model(ids, use_cache=False).logits, wanted) < 1e-11
    assert difference(in_chunks(model, ids, None, windows.cache(), [35, 1, 1, 33]), wanted) < 1e-11
    assert emulated


@torch.no_grad()
def test_a_few_kernels_read_a_long_sequence(emulated):
    model, _ = windowed(windows=[[16] * 4] * 3)
    model(tokens(1, 1000), use_cache=False)
    assert emulated == [(19, 19), (981, 996)] * 3  # tokens and keys


def test_padding_and_gradients_do_not_use_flash_attention(monkeypatch):
    query = torch.ones(1, 8, 64, 16)
    assert not supports_flash(query, query, query)  # on a CPU
    monkeypatch.setattr(attention, "supports_flash", lambda *_: pytest.fail("padding"))
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :9] = 0
    windowed()[0](tokens(), attention_mask=mask, use_cache=False)


def test_the_arguments_of_the_kernel():
    """On the meta device, PyTorch checks the arguments and returns the shapes of the real kernel."""
    query, key = (torch.empty(2, h, 30, 16, device="meta", dtype=torch.bfloat16) for h in (8, 4))
    output, lse = flash(query, key, key, 7, 0.25)
    assert (output.shape, output.dtype, lse.shape, lse.dtype) == (
        (2, 30, 8, 16),
        query.dtype,
        (2, 8, 30),
        torch.float32,
    )
