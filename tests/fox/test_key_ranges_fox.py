"""The keys that a query attends to, and the keys that pruning skips."""

import itertools
import math

import pytest
import torch
from budget import (
    DEVICE,
    check_budget,
    check_close,
    check_golden,
    draw,
    error,
    floors,
    load_cases,
    on_triton,
    padding,
    run,
    run_exact,
    run_plain,
)

from hf_longctx import forgetting_attention
from hf_longctx.fox import key_ranges_fox, tiles_fox
from hf_longctx.fox.key_ranges_fox import VisibleKeys, find_visible_keys
from hf_longctx.fox.operator import sequence_starts
from hf_longctx.fox.triton_fox import launch_prune, triton_attention
from scripts.bench.gpu.pruned_blocks import count_pruned_blocks


def test_the_first_key_of_each_sequence():
    assert sequence_starts(torch.tensor([0, 2, 2, 5]), 5).tolist() == [[0, 0, 2, 2, 2]]


def seen(visible, Tq, Tk):
    """(B, Tq, Tk) bool, as the kernels read `VisibleKeys`, in the order of time."""
    end = int(visible.end)
    i, j = torch.arange(end - Tq, end)[:, None], torch.arange(Tk)
    first = torch.zeros(1, 1, Tq) if visible.key_start is None else visible.key_start
    return (first.mT <= j) & (j <= i)  # (B, Tq, Tk)


SCATTERED = torch.tensor([[0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1], [1] * 9 + [0] * 3, [0, 0, 1] + [1] * 9])


@pytest.mark.parametrize("borders", [None, [0, 1, 6, 12]], ids=["one sequence", "packed"])
@pytest.mark.parametrize(
    "mask", [None, padding(12, (3, 12), (0, 8), (0, 0)).cpu(), SCATTERED], ids=["", "sides", "between"]
)
@pytest.mark.parametrize("free", [0, 3], ids=["full", "free slots"])
def test_visible_keys_are_those_of_the_definition(borders, mask, free):
    for Tq, window in itertools.product([12, 7, 1], [None, 1, 4]):
        check_visible_keys(Tq, window, borders, mask, free)


def check_visible_keys(Tq, window, borders, mask, free):
    t, i = torch.arange(12), torch.arange(12 - Tq, 12)[:, None]
    expected = (t <= i) & (i - t < (window or 12))
    options = {"window": window}
    if free:
        options["end"] = torch.tensor(12)
    if borders is not None:
        start = sequence_starts(torch.tensor(borders), 12)
        expected = expected & (start == start.mT)[12 - Tq :]
        options["sequence_start"] = start[:, 12 - Tq :]
    expected, real_queries = expected[None], torch.ones(1, Tq, dtype=torch.bool)
    if mask is not None:
        real = mask.bool()
        expected, real_queries = expected & real[:, None], real[:, 12 - Tq :]
        options["token_mask"] = torch.nn.functional.pad(real, (0, free))
    visible = find_visible_keys(Tq, 12 + free, "cpu", **options)
    assert (visible is None) == (mask is SCATTERED)
    if visible is None:
        return
    got = seen(visible, Tq, 12 + free)
    assert not got[..., 12:].any()
    got, expected = torch.broadcast_tensors(got[..., :12], expected)
    compared = real_queries.expand(len(got), -1)  # the keys of a padding query are not specified
    assert torch.equal(got[compared], expected[compared])
    if visible.key_start is not None:
        assert (visible.key_start.diff(dim=-1) >= 0).all()


# --- pruning ---------------------------------------------------------------------------------------------------------


def running_sum(tensors):
    """Return c in float64, without the gates before seq_start."""
    log_f = tensors["inputs/log_fgate"].double()
    if "inputs/seq_start" in tensors:
        t = torch.arange(log_f.shape[-1])
        log_f = log_f.masked_fill(t < tensors["inputs/seq_start"][:, None, None], 0.0)
    return log_f.cumsum(-1)


def first_kept_key(c, threshold, Tq, query_block, key_block):
    """Return the first key that each block of queries must read, by the rule. Thresholds are (B, H)."""
    Tk = c.shape[-1]
    rows = torch.arange(Tk - Tq, Tk, query_block, device=c.device)
    ends = torch.arange(key_block, Tk + key_block, key_block, device=c.device).clamp(max=Tk) - 1
    dropped = torch.searchsorted(-c[..., ends], threshold.double()[..., None] - c[..., rows])
    return torch.minimum(dropped * key_block, rows)


def pruning_threshold(bound, Tk, tolerance):
    return tolerance - 2 * bound - math.log(Tk)


def first_key_of_blocks(c, threshold, Tq, query_block, key_block):
    """Return the first key that `prune_kernel` finds for each block of queries. Thresholds are (B, H)."""
    bound = (-math.log(c.shape[-1]) - threshold) / 2
    gates, blocks = c[:, :, None, :, None].to(DEVICE), (query_block, key_block)
    kept = launch_prune(gates, None, None, bound.float().to(DEVICE), Tq, *blocks, 1.0, 1.0, 0.0)
    return kept[..., ::query_block].long().cpu()


def check_first_keys(case, t, threshold, blocks, expected):
    start = first_key_of_blocks(running_sum(t), threshold, t["inputs/q"].shape[2], *blocks)
    assert torch.equal(start, t[expected] // blocks[1] * blocks[1]), (case["name"], expected)


@on_triton
def test_golden_pruning(golden):
    for case, t in load_cases(golden / "fox", "op_acp"):
        for r in case["runs"]:
            threshold = r["threshold"]
            threshold = t[threshold] if isinstance(threshold, str) else torch.full(t["inputs/q"].shape[:2], threshold)
            blocks = r["query_block"], r["key_block"]
            check_first_keys(case, t, threshold, blocks, f"expected/run{r['index']}/start_index")
    for case, t in load_cases(golden / "fox", "op"):
        if "expected/start_index" not in t:
            continue
        q, k = t["inputs/q"], t["inputs/k"]
        threshold = t.get(case["call"]["adaptive_threshold"])
        if case["call"]["adaptive_threshold"] == "auto":
            bound = key_ranges_fox.bound_from_norms(q, k, q.shape[-1] ** -0.5, None)
            threshold = pruning_threshold(bound, k.shape[2], -10.0)
            assert check_golden(case, t, "expected/threshold", threshold)
        blocks = case["forward_block_sizes"] if "forward_block_sizes" in case else case["call"]["forward_block_sizes"]
        blocks = tuple(blocks.values() if isinstance(blocks, dict) else blocks)
        check_first_keys(case, t, threshold, blocks, "expected/start_index")


def check_pruned(pruned, dense, share, inputs):
    """Each row loses at most `share` of its weight and spreads it over the rest."""
    check_close(pruned[0], dense[0], inputs[2].abs().max(), 2 * share)
    for p, d, floor in list(zip(pruned, dense, floors(*inputs).values()))[1:]:
        assert error(p, d) <= 20 * share * d.norm() + 2 * floor


def decaying(T, log_f=-0.3):
    """Small logits and a constant gate, which bring what is forgotten just below its bound: it leaves a trace."""
    q, k, v, gates, do = draw(2, 1, 1, T, T, 16)
    return 0.1 * q, k, v, torch.full_like(gates, log_f), do


@on_triton
def test_pruning_stays_within_its_tolerance():
    inputs = decaying(97)
    options = {"attention_mask": padding(97, (0, 97), (13, 97)), "backend": "triton"}
    dense = run(forgetting_attention, *inputs, **options)
    with count_pruned_blocks() as blocks:
        pruned = run(forgetting_attention, *inputs, log_pruning_tolerance=0.0, **options)
    assert 0 < blocks.pruned < blocks.total
    assert not torch.equal(dense[0], pruned[0])
    check_pruned(pruned, dense, 1.0, inputs)


@on_triton
def test_pruned_gradients_belong_to_the_pruned_function():
    """Forward and backward drop the same keys, at a threshold so high that dropping them matters."""
    q, k, v, log_f, do = inputs = draw(1, 1, 1, 90, 90, 16)
    start = first_kept_key(log_f.double().cumsum(-1), torch.full((1, 1), -3.0, device=DEVICE), 90, 32, 16)[0, 0]
    assert start[-1] > 0
    fast = run(
        triton_attention, *inputs, visible=VisibleKeys(start.int().repeat_interleave(32)[:90].view(1, 1, 90), 90)
    )
    plain, exact = [], []
    for result, f in ((plain, run_plain), (exact, run_exact)):  # each block of queries with the keys left to it
        result += [torch.zeros_like(x, dtype=torch.double) for x in fast]
        for n, first in enumerate(start.tolist()):
            rows, keys = slice(32 * n, min(32 * n + 32, 90)), slice(first, min(32 * n + 32, 90))
            part = f(q[:, :, rows], k[:, :, keys], v[:, :, keys], log_f[..., keys], do[:, :, rows])
            for whole, x, span in zip(result, part, (rows, rows, keys, keys, keys)):
                whole[:, :, span] += x
    check_budget(fast, plain, exact, inputs)


@on_triton
@pytest.mark.parametrize("Tq, query_block, key_block", [(97, 32, 16), (65, 16, 32), (5, 1, 8)])
def test_the_kernel_prunes_what_the_rule_says(Tq, query_block, key_block):
    """Together with padding; the first key of a row rises along the rows."""
    log_f, bound = draw(2, 3, 3, 1, 97, 16, openness=0.0)[3], torch.tensor([0.5, 3.0, torch.nan], device=DEVICE)
    c = log_f.double().cumsum(-1)
    first = find_visible_keys(Tq, 97, c.device, token_mask=padding(97, (0, 97), (13, 97)).bool()).key_start
    gates = c[:, :, None, :, None]
    kept = launch_prune(gates, first, None, bound, Tq, query_block, key_block, 1.0, 1.0, -3.0)
    threshold = pruning_threshold(bound, 97, -3.0).nan_to_num(nan=-torch.inf).expand(2, 3)
    start = first_kept_key(c, threshold, Tq, query_block, key_block).repeat_interleave(query_block, -1)[..., :Tq]
    assert torch.equal(kept, torch.maximum(start // key_block * key_block, first).int()) and (kept.diff() >= 0).all()
    assert (kept[:, :2, -1] > 13).all()


@on_triton
def test_decoding_leaves_out_exactly_what_the_rule_says():
    """NaN in skipped keys changes nothing, and NaN in the first key that is not skipped reaches every output."""
    tolerance, bound = -3.0, torch.tensor([0.5, 6.0, 15.0], device=DEVICE)
    block = tiles_fox.tiles_for(torch.device(DEVICE), 16, torch.float32).decode.BN
    T = 6 * block + 8
    q, k, v, log_f, _ = draw(2, 3, 3, 1, T, 16)
    threshold = pruning_threshold(bound, T, tolerance).expand(2, -1)
    start = first_kept_key(log_f.double().cumsum(-1), threshold, 1, 1, block)  # (2, 3, 1)
    assert (start > 0).all() and start.unique().numel() > 1

    def decode(poisoned):
        k_poisoned, v_poisoned = (x.masked_fill(poisoned[..., None], torch.nan) for x in (k, v))
        options = dict(log_pruning_tolerance=tolerance, logit_bound=bound)
        return triton_attention(q, k_poisoned, v_poisoned, log_f, **options)

    t = torch.arange(T, device=DEVICE)
    assert torch.equal(decode(t < start), decode(t < 0))
    assert decode(t == start).isnan().all()
