"""Properties of attention in both directions; test_operator.py compares it with the definition."""

import pytest
import torch
import torch.nn.functional as F
from budget import check_close, draw, error, floors, run, runs_triton

from hf_longctx.fox.bidirectional import bidirectional_attention
from hf_longctx.fox.key_ranges_fox import find_visible_keys
from hf_longctx.fox.triton_fox import triton_attention


pytestmark = runs_triton


def test_open_gates_are_plain_attention():
    q, k, v, log_f, _ = draw(1, 4, 2, 40, 40, 16)
    o = bidirectional_attention(q, k, v, torch.zeros_like(log_f))
    check_close(o, F.scaled_dot_product_attention(q, k, v, enable_gqa=True), v.abs().max())


def test_a_window_of_one_leaves_no_future():
    inputs = draw(1, 2, 1, 40, 40, 16)
    visible = find_visible_keys(40, 40, inputs[0].device, window=1)
    both, past = (
        run(attention, *inputs, visible=visible) for attention in (bidirectional_attention, triton_attention)
    )
    assert all(torch.equal(x, y) for x, y in zip(both, past))


def test_reversed_time_reverses_the_result():
    """Each gate stays between the same two tokens, and so belongs to the other one of them."""
    q, k, v, log_f, do = draw(1, 2, 1, 45, 45, 16)
    o, dq, dk, dv, dlog_f = run(bidirectional_attention, q, k, v, log_f, do)
    reversed_inputs = (*(x.flip(2) for x in (q, k, v)), log_f.flip(-1).roll(1, -1), do.flip(2))
    got = run(bidirectional_attention, *reversed_inputs)
    want = (*(x.flip(2) for x in (o, dq, dk, dv)), dlog_f.flip(-1).roll(1, -1))
    for g, w, floor in zip(got, want, floors(q, k, v, log_f, do).values()):
        assert error(g, w) <= 2 * floor


@pytest.mark.parametrize("T", [1, 2, 33])
def test_the_output_is_stored_by_token(T):
    o = bidirectional_attention(*draw(2, 2, 1, T, T, 16)[:4])
    assert o.transpose(1, 2).is_contiguous()
