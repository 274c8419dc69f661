"""Every way of reading a sequence gives the logits of the definition: attention with dense masks, in float64."""

import pytest
import torch
from tiny_windows import (
    FAMILIES,
    PADDING,
    dense_logits,
    difference,
    in_chunks,
    make,
    padding_mask,
    tokens,
    windowed,
)
from transformers import DynamicCache, StaticCache

from hf_longctx.windows import HeadWindows


ROUNDING = 1e-11  # logits are about 10, and windows change them by more than 0.1
CHUNKS = {
    "one call": [70],
    "chunks and steps": [31, 1, 1, 20, 7, *[1] * 10],
    "steps": [1] * 70,
    "a short prompt and a long chunk": [2, 60, 8],
}


@pytest.mark.parametrize("padding", ["no mask", "left", "left and middle"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_a_dense_mask(family, padding):
    model, windows = windowed(family)
    ids, mask = tokens(), padding_mask(padding)
    plain = make(family)(ids, attention_mask=mask).logits
    wanted = dense_logits(make(family), windows, ids, mask)
    assert difference(plain, wanted, mask) > 0.1
    with torch.no_grad():
        assert difference(model(ids, attention_mask=mask, use_cache=False).logits, wanted, mask) < ROUNDING
    read = in_chunks(model, ids, mask, windows.cache(), CHUNKS["chunks and steps"])
    assert difference(read, wanted, mask) < ROUNDING


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("padding", PADDING)
def test_cached_calls_equal_a_dense_mask(padding, chunks):
    model, windows = windowed()
    ids, mask = tokens(), padding_mask(padding)
    wanted = dense_logits(make(), windows, ids, mask)
    assert difference(in_chunks(model, ids, mask, windows.cache(), CHUNKS[chunks]), wanted, mask) < ROUNDING


@pytest.mark.parametrize("padding", ["no mask", "left", "middle"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches_of_transformers_give_the_same_logits(family, padding, kind):
    model, windows = windowed(family)
    ids, mask = tokens(), padding_mask(padding)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=80)
    read = in_chunks(model, ids, mask, cache, CHUNKS["chunks and steps"])
    assert difference(read, dense_logits(make(family), windows, ids, mask), mask) < ROUNDING


@pytest.mark.parametrize("padding", ["left", "right", "middle"])
def test_a_padded_row_equals_the_row_alone(padding):
    model, _ = windowed()
    ids, mask = tokens(), padding_mask(padding)
    real = mask[0].bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids[:1, real]).logits
        together = model(ids, attention_mask=mask, position_ids=positions).logits
    assert difference(together[:1, real], alone) < ROUNDING


SDPA = [family for family in FAMILIES if family != "gpt-oss"]  # without windows, gpt-oss does not run SDPA
DTYPES = [("llama", dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("family, dtype", [*DTYPES, *((family, torch.float32) for family in SDPA)], ids=str)
def test_open_windows_change_no_bit(family, dtype):
    model, opened = make(family, dtype), make(family, dtype)
    windows = HeadWindows([[-1] * 4] * 3)
    windows.apply(opened)
    for padding in ("no mask", "left"):
        ids, mask = tokens(), padding_mask(padding)
        plain = in_chunks(model, ids, mask, DynamicCache(config=model.config), CHUNKS["chunks and steps"])
        assert torch.equal(in_chunks(opened, ids, mask, windows.cache(), CHUNKS["chunks and steps"]), plain)
        with torch.no_grad():
            assert torch.equal(*(m(ids, attention_mask=mask, use_cache=False).logits for m in (model, opened)))
