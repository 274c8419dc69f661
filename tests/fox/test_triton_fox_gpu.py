"""What only a GPU can show: the tile table's own block sizes, long sequences, 64-bit offsets, inductor.

The small cases of test_triton_fox.py run on the GPU too, wherever there is one.
"""

import pytest
import torch


pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from budget import check_budget, run
from test_bidirectional_fox import reference as reference_both_ways
from test_triton_fox import check_output, draw, largest_logit, padding, reference, rel, run_exact, visible

from hf_longctx.fox import bidirectional_forgetting_attention
from hf_longctx.fox.bounds_fox import count_pruned_blocks
from hf_longctx.fox.triton_fox import forgetting_attention_triton


BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("D", [16, 32, 64, 72, 80, 128, 192, 256])
def test_every_row_of_the_tile_table(D, dtype):
    inputs = draw(2, 4, 2, 300, 517, D, dtype=dtype)
    mask = padding(517, (0, 517), (230, 500))
    see = visible(300, 517, attention_mask=mask)
    fast = run(forgetting_attention_triton, *inputs, attention_mask=mask.cuda())
    check_budget(fast, run(reference, *inputs, see=see), run_exact(*inputs, see=see), inputs)
    inputs = draw(1, 2, 1, 517, 517, D, dtype=dtype)
    for known in ({}, {"logit_bound": largest_logit(*inputs[:2])}):  # with a running maximum, and without
        fast = run(forgetting_attention_triton, *inputs, **known)
        check_budget(fast, run(reference, *inputs), run_exact(*inputs), inputs)


@pytest.mark.parametrize("D", [64, 128])
def test_both_directions(D):
    inputs = draw(2, 4, 2, 517, 517, D, dtype=BF16)
    mask = {"attention_mask": padding(517, (0, 517), (30, 500)).cuda()}
    exact = run(reference_both_ways, *(x.double() for x in inputs), **mask)
    fast = run(bidirectional_forgetting_attention, *inputs, **mask)
    check_budget(fast, run(reference_both_ways, *inputs, **mask), exact, inputs)


@pytest.mark.parametrize("Tq", [1, 7, 16])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_decoding_long_contexts(D, Tq):
    q, k, v, log_f, _ = draw(2, 8, 2, Tq, 20_011, D, dtype=BF16, openness=8.0)
    exact = reference(*(x.double() for x in (q, k, v, log_f)))
    o = forgetting_attention_triton(q, k, v, log_f)
    check_output(o, reference(q, k, v, log_f), exact, v)


def test_131072_tokens_with_strong_gates():
    """c below -1e5, gradients included; the reference needs only the keys that the last rows still remember."""
    T, rows, near = 131072, 100, 600
    q, k, v, log_f, do = draw(1, 2, 1, T, T, 64, dtype=BF16)
    log_f = -2 * torch.rand_like(log_f)
    assert log_f.sum(-1).max() < -1e5
    do[:, :, :-rows] = 0
    fast = run(forgetting_attention_triton, q, k, v, log_f, do)
    cut = (q[:, :, -near:], k[:, :, -near:], v[:, :, -near:], log_f[..., -near:], do[:, :, -near:])
    exact, plain = run_exact(*cut), run(reference, *cut)
    fast, plain, exact = ([x[:, :, -rows:] for x in results] for results in (fast, plain, exact))
    check_budget(fast, plain, exact, cut)


def test_offsets_beyond_32_bits():
    """2.1e9 elements in q alone, stored as (B, T, H, D)."""
    B, H, T, D = 1, 132, 131072, 128
    q, k, v = (torch.randn(B, T, H, D, device="cuda", dtype=BF16).transpose(1, 2) for _ in range(3))
    log_f = torch.full((B, H, T), -0.1, device="cuda")
    with torch.no_grad():
        o = forgetting_attention_triton(q, k, v, log_f, window=512)
    near = slice(T - 700, None)
    cut = [x[:, -2:, near].double() for x in (q, k, v, log_f)]
    exact = reference(*cut, see=visible(700, 700, window=512))[:, :, -100:]
    assert rel(o[:, -2:, -100:], exact) < 5e-3


def test_pruning_at_16k():
    q, k, v, log_f, do = draw(1, 4, 4, 16384, 16384, 64, dtype=BF16, openness=1.0)
    known = {"logit_bound": q.float().norm(dim=-1).amax(-1) * k.float().norm(dim=-1).amax(-1) * 64**-0.5}
    dense = run(forgetting_attention_triton, q, k, v, log_f, do, **known)
    with count_pruned_blocks() as blocks:
        pruned = run(forgetting_attention_triton, q, k, v, log_f, do, log_pruning_tolerance=-10.0, **known)
    assert blocks.pruned > 0.7 * blocks.total
    for name, d, p in zip(("o", "dq", "dk", "dv", "dlog_f"), dense, pruned):
        assert rel(p, d.double()) < 1e-3, name


@pytest.mark.parametrize("Tq", [333, 3])
def test_inductor(Tq):
    inputs = draw(2, 4, 2, Tq, 333, 64, dtype=BF16)
    attention = torch.compile(lambda *x: forgetting_attention_triton(*x, log_pruning_tolerance=-10.0), fullgraph=True)
    if Tq == 3:
        with torch.no_grad():
            got, want = ([f(*inputs[:4])] for f in (attention, forgetting_attention_triton))
    else:
        got, want = run(attention, *inputs), run(forgetting_attention_triton, *inputs)
    for g, w in zip(got, want):
        assert rel(g, w.double()) < 1e-3
