"""The neural cache: its gain, its dtype and its parts. `test_hmt_single_pass.py` has its definition."""

from functools import partial

import pytest
import torch
from tiny_hmt import ROUNDING, VOCAB

from hf_longctx.hmt import HMTConfig, neural_cache_hmt
from hf_longctx.hmt.neural_cache_hmt import NeuralCacheRetriever


@torch.no_grad()
def test_first_parts_are_read_together_where_no_logits_are_asked_for(make_wrapper, tokens):
    model, rows = make_wrapper(neural_cache_weight=0.2, summary_batch=7), []
    whole = model(tokens, use_cache=True)
    model.backbone.model.register_forward_hook(lambda module, args, out: rows.append(len(out[0])))
    last = model(tokens, use_cache=True, logits_to_keep=1)
    assert rows[:2] == [2, 6]  # the first segment, and the first parts of three
    torch.testing.assert_close(last.logits, whole.logits[:, -1:], atol=ROUNDING, rtol=0)
    for name, value in whole.state.tensors().items():
        torch.testing.assert_close(last.state.tensors()[name], value, atol=ROUNDING, rtol=0)


def random_cache(dtype):
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(2, 3, 4, 16), dim=-1).to(dtype)
    valid = torch.tensor([[False, True, True], [True, True, True]])
    state = {"keys": keys, "ids": torch.randint(VOCAB, (2, 3, 5)), "ends": valid.long()}
    config = HMTConfig(segment_length=5, sensory_tokens=0, neural_cache_weight=0.3)
    cache = partial(NeuralCacheRetriever(config, None, None).mix, state)
    return cache, torch.randn(2, 7, VOCAB), torch.randn(2, 7, 16)


def test_columns_are_mixed_in_pieces(monkeypatch):
    cache, logits, hidden = random_cache(torch.float32)
    whole = cache(logits, hidden)
    assert not torch.equal(whole, logits)
    monkeypatch.setattr(neural_cache_hmt, "SCORES_AT_ONCE", 2 * 12 * 3)
    # pieces of a product may be summed in another order
    torch.testing.assert_close(cache(logits, hidden), whole, rtol=0, atol=64 * torch.finfo(whole.dtype).eps)


def test_logits_keep_their_dtype_and_their_scale():
    """In bfloat16, cosines are rounded to 2^-9. The exponents are 30 times the cosines, and so are their errors."""
    cache, logits, hidden = random_cache(torch.bfloat16)
    mixed = cache(logits.bfloat16(), hidden.bfloat16())
    assert mixed.dtype == torch.bfloat16
    exact = random_cache(torch.float64)[0](logits.double(), hidden.double())
    torch.testing.assert_close(mixed.double(), exact, rtol=2**-8, atol=2 * 30 * 2**-9)
    torch.testing.assert_close(exact.logsumexp(2), logits.double().logsumexp(2), rtol=1e-12, atol=0)


def test_a_token_without_probability_has_finite_gradients():
    cache, logits, hidden = random_cache(torch.float32)
    logits[..., 0] = -1e4
    logits.requires_grad_()
    hidden.requires_grad_()
    mixed = cache(logits, hidden)
    mixed.sum().backward()
    assert mixed.isfinite().all() and logits.grad.isfinite().all() and hidden.grad.isfinite().all()
    assert hidden.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_are_of_the_dtype_of_the_model_after_loading_too(make_wrapper, tokens, tmp_path, dtype):
    model = make_wrapper(neural_cache_weight=0.2).to(dtype)
    with torch.no_grad():
        state = model(tokens, use_cache=True).state
        state.save(tmp_path / "state", model)
        loaded = type(state).load(tmp_path / "state", model)
    keys, own = (x.memory["neural_cache"]["keys"] for x in (loaded, state))
    assert keys.dtype == dtype and torch.equal(keys, own)
