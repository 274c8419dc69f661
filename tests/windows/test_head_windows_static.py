"""The static cache: constant shapes, one graph, and the same logits."""

import copy

import pytest
import torch
from tiny_windows import CACHE, PADDING, WINDOWS, difference, in_chunks, padding_mask, tokens, windowed
from transformers import CompileConfig

from hf_longctx.windows import HeadWindows


ROUNDING = 1e-11


@pytest.mark.parametrize("slots", [70, 90])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_a_static_cache_equals_no_cache(family, padding, slots):
    model, windows = windowed(family)
    ids, mask = tokens(), padding_mask(padding)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
    for chunks in ([60, 1, 1, 8], [1, 40, 29]):
        cache = windows.cache(max_cache_len=slots)
        assert difference(in_chunks(model, ids, mask, cache, chunks), wanted, mask) < ROUNDING


def addresses(cache):
    return [x.data_ptr() for layer in cache.layers for store in layer.stores() for x in (store.keys, store.values)]


@pytest.mark.parametrize("padding", ["no mask", "left"])
def test_a_step_compiles_to_one_graph(padding):
    """In all steps, with and without padding, no tensor moves, and nothing is compiled again."""
    torch._dynamo.reset()
    model, windows = windowed(dtype=torch.float32)
    ids, mask = tokens(), padding_mask(padding)
    cache = windows.cache(max_cache_len=80)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        in_chunks(model, ids[:, :40], None if mask is None else mask[:, :40], cache, [39, 1])
        before, graphs = addresses(cache), []
        count = lambda graph, _: (graphs.append(graph), graph.forward)[1]  # noqa: E731
        step = torch.compile(model, backend=count, fullgraph=True, dynamic=False)
        full = torch.ones(2, 80, dtype=torch.long)
        if mask is not None:
            full[:, :70] = mask
        for t in range(40, 60):
            logits = step(ids[:, t : t + 1], attention_mask=None if mask is None else full, **{CACHE: cache}).logits
            torch.testing.assert_close(logits[:, 0], wanted[:, t], atol=1e-3, rtol=1e-3)
    assert addresses(cache) == before
    assert len(graphs) == 1


def test_generate_compiles_a_static_step_once():
    torch._dynamo.reset()
    model, _ = windowed("gemma3", dtype=torch.float32)
    graphs, ids, mask = [], tokens(length=40), padding_mask("left", length=40)
    config = CompileConfig(backend=lambda graph, _: (graphs.append(graph), graph.forward)[1], mode=None)
    config._compile_all_devices = True
    options = dict(attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0)
    out = model.generate(
        ids, cache_implementation="static", compile_config=config, return_dict_in_generate=True, **options
    )
    assert torch.equal(out.sequences, model.generate(ids, use_cache=False, **options))
    assert type(out[CACHE].layers[0]).__name__ == "StaticWindowLayer" and len(graphs) == 1


def test_a_static_cache_has_the_size_of_the_windows():
    model, windows = windowed(windows=[[-1, 16, 16, 300]] * 3)
    cache = windows.cache(max_cache_len=200)
    in_chunks(model, tokens(1), None, cache, [70])
    size = sum(x.keys.nbytes + x.values.nbytes for layer in cache.layers for x in layer.stores())
    entries = 200 + 2 * (16 + 3 + 1) + 200  # one more in a ring, for padding
    assert size == 3 * 2 * entries * 4 * 8


def test_rows_of_a_static_cache():
    model, windows = windowed()
    ids, mask = tokens(), padding_mask("left")
    cache = windows.cache(max_cache_len=80)
    in_chunks(model, ids[:, :50], mask[:, :50], cache, [50])
    cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        wanted = model(ids.flip(0), attention_mask=mask.flip(0), use_cache=False).logits[:, 50:]
    read = in_chunks(model, ids.flip(0)[:, 50:], mask.flip(0), cache, [1, 19])
    assert difference(read, wanted) < ROUNDING


def test_reset_of_a_static_cache_allows_another_batch_size():
    model, windows = windowed()
    cache = windows.cache(max_cache_len=80)
    in_chunks(model, tokens(), padding_mask("left"), cache, [60, 10])
    before = addresses(cache)
    cache.reset()
    for ids in (tokens(2, seed=3), tokens(3, seed=4)):
        wanted = in_chunks(model, ids, None, windows.cache(), [20, 1, 49])
        assert difference(in_chunks(model, ids, None, cache, [20, 1, 49]), wanted) < ROUNDING
        assert (addresses(cache) == before) == (len(ids) == 2)
        cache.reset()


def test_a_static_cache_cannot_be_cropped():
    _, windows = windowed()
    with pytest.raises(NotImplementedError, match="cannot remove tokens"):
        windows.cache(max_cache_len=80).crop(-1)


@pytest.mark.parametrize("slots", [0, -1, 2.0, True, "80"])
def test_bad_max_cache_len(slots):
    with pytest.raises(ValueError, match="`max_cache_len` must be a number of tokens of at least 1"):
        HeadWindows([[4]]).cache(max_cache_len=slots)


@pytest.mark.parametrize("family, windows", [("llama", None), ("llama", [[8] * 4] * 3), ("gemma3", [[-1] * 4] * 3)])
@pytest.mark.parametrize("padding", ["no mask", "left"])
@torch.no_grad()
def test_a_full_static_cache_raises(family, windows, padding):
    model, windows = windowed(family, **({} if windows is None else {"windows": windows}))
    ids, mask = tokens(), padding_mask(padding)
    part = lambda end: None if mask is None else mask[:, :end]  # noqa: E731
    cache = windows.cache(max_cache_len=68)
    in_chunks(model, ids[:, :66], part(66), cache, [66])
    for begin, end in ((66, 70), (66, 69)):
        with pytest.raises(ValueError, match=f"`max_cache_len` must be at least {end} to store all tokens, got 68"):
            model(ids[:, begin:end], attention_mask=part(end), **{CACHE: cache})
    wanted = model(ids[:, :68], attention_mask=part(68), use_cache=False).logits[:, 66:]  # nothing has been stored
    assert difference(in_chunks(model, ids[:, 66:68], part(68), cache, [1, 1]), wanted) < ROUNDING
    with pytest.raises(ValueError, match="must be at least 70 to store all tokens, got 68"):
        model(ids, attention_mask=mask, **{CACHE: windows.cache(max_cache_len=68)})


@pytest.mark.parametrize("windows", [WINDOWS, [[-1] * 4, [8] * 4, [8] * 4]])
@pytest.mark.parametrize("later", ["no mask", "fewer padded tokens", "as many", "other padding", "new padding"])
@torch.no_grad()
def test_a_mask_that_contradicts_a_static_cache(later, windows):
    model, windows = windowed(windows=windows)
    ids, mask = tokens(), padding_mask("no mask" if later == "new padding" else "left")
    cache = windows.cache(max_cache_len=80)
    in_chunks(model, ids[:, :60], None if mask is None else mask[:, :60], cache, [58, 1, 1])
    changed = padding_mask({"no mask": "no mask", "new padding": "left"}.get(later, "left and middle"))
    if later == "fewer padded tokens":
        changed = mask.clone()
        changed[0, 5:] = 1
    if later == "as many":
        changed = mask.clone()
        changed[0, [0, mask[0].argmax()]] = changed[0, [mask[0].argmax(), 0]]
    for size in (1, 10):
        with pytest.raises(ValueError, match="must mark the same cached tokens as padding"):
            part = None if changed is None else changed[:, : 60 + size]
            model(ids[:, 60 : 60 + size], attention_mask=part, **{CACHE: copy.deepcopy(cache)})


def test_reset_after_rows_were_repeated():
    model, windows = windowed()
    cache = windows.cache(max_cache_len=80)
    in_chunks(model, tokens(), padding_mask("left"), cache, [60, 10])
    cache.batch_repeat_interleave(2)
    cache.reset()
    for rows in (2, 4):
        ids = tokens(rows, seed=3)
        with torch.no_grad():
            wanted = model(ids, use_cache=False).logits
        assert difference(in_chunks(model, ids, None, cache, [20, 1, 49]), wanted) < ROUNDING
        cache.reset()
