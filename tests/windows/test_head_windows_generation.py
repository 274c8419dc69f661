"""A cache of `HeadWindows` in all that transformers does with a cache."""

import copy
import pickle

import pytest
import torch
import transformers
from tiny_windows import CACHE, difference, in_chunks, make, padding_mask, tokens, windowed
from transformers import DynamicCache


OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
ROUNDING = 1e-11
LEFT = padding_mask("left", length=40)
GENERATION = {
    "greedy": {},
    "greedy, left padding": {"attention_mask": LEFT},
    "beams": {"num_beams": 3},
    "beams, left padding": {"num_beams": 3, "attention_mask": LEFT},
    "several sequences": {"num_return_sequences": 2, "do_sample": True},
    "chunked prefill": {"prefill_chunk_size": 7},
    "contrast of prompts": {"guidance_scale": 1.5},
}


def generate(model, ids, **kwargs):
    torch.manual_seed(0)
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, **kwargs})


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", GENERATION)
def test_generation_with_a_cache_equals_generation_without(kind, family):
    model, windows = windowed(family)
    ids, options = tokens(length=40), GENERATION[kind]
    without = {k: v for k, v in options.items() if k != "prefill_chunk_size"}
    wanted = generate(model, ids, use_cache=False, **without)
    assert torch.equal(generate(model, ids, **options), wanted)
    assert kind == "chunked prefill" or torch.equal(
        generate(model, ids, **{CACHE: windows.cache(), **options}), wanted
    )
    assert not torch.equal(generate(make(family), ids, **without), wanted)


def nbytes(cache):
    layers = [
        [layer.keys, layer.values]
        if type(layer).__module__.startswith("transformers")
        else [x for store in layer.stores() for x in (store.keys, store.values)]
        for layer in cache.layers
    ]
    return sum(x.nbytes for layer in layers for x in layer)


def test_generate_creates_the_cache():
    model, windows = windowed()
    ids = tokens(1, 300)
    created = generate(model, ids, return_dict_in_generate=True)[CACHE]
    full = generate(make(), ids, return_dict_in_generate=True)[CACHE]
    assert isinstance(full, DynamicCache) and not isinstance(created, DynamicCache)
    assert created.get_seq_length() == full.get_seq_length() == 329
    share = windows.share(329)
    assert share * nbytes(full) <= nbytes(created) < (share + 0.1) * nbytes(full)


@pytest.mark.parametrize("padding", ["no mask", "left and middle"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_are_reordered_selected_and_repeated(family, padding):
    model, windows = windowed(family)
    ids, mask = tokens(), padding_mask(padding)
    for name, argument, rows in (
        ("reorder_cache", torch.tensor([1, 0]), [1, 0]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("batch_select_indices", torch.tensor([True, False]), [0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
    ):
        cache = windows.cache()
        in_chunks(model, ids[:, :50], None if mask is None else mask[:, :50], cache, [49, 1])
        getattr(cache, name)(argument)
        with torch.no_grad():
            part = None if mask is None else mask[rows]
            wanted = model(ids[rows], attention_mask=part, use_cache=False).logits[:, 50:]
            read = model(ids[rows, 50:], attention_mask=part, **{CACHE: cache}).logits
        assert difference(read, wanted, None if part is None else part[:, 50:]) < ROUNDING


@pytest.mark.parametrize("padding", ["no mask", "left and middle"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("removed", [1, 5, 12])
def test_crop_after_recording_the_past(removed, family, padding):
    """Chunks and steps are added, and removed in part; then the cache continues as if they had never been added."""
    model, windows = windowed(family)
    ids, mask = tokens(), padding_mask(padding)
    part = lambda end: None if mask is None else mask[:, :end]  # noqa: E731
    cache = windows.cache()
    in_chunks(model, ids[:, :30], part(30), cache, [29, 1])
    cache.activate_past_recording()
    other = tokens(seed=2)
    with torch.no_grad():
        full = model(ids, attention_mask=mask, use_cache=False).logits
        for begin, end in ((30, 38), (38, 39), (39, 42)):
            mixed = torch.cat([ids[:, : 42 - removed], other[:, 42 - removed : 42]], 1)
            model(mixed[:, begin:end], attention_mask=part(end), **{CACHE: cache})
        cache.crop(-removed)
        assert cache.get_seq_length() == 42 - removed
        for begin, end in ((42 - removed, 50), (50, 51), (51, 70)):
            read = model(ids[:, begin:end], attention_mask=part(end), **{CACHE: cache}).logits
            assert difference(read, full[:, begin:end], None if mask is None else mask[:, begin:end]) < ROUNDING


@pytest.mark.parametrize("padding", ["no mask", "left"])
def test_crop_as_far_as_keys_remain(padding):
    """One token at any time; any number, while nothing has been dropped."""
    model, windows = windowed(windows=[[-1, 16, 30, 30]] * 3)
    ids, mask = tokens(), padding_mask(padding)
    part = lambda end: None if mask is None else mask[:, :end]  # noqa: E731
    with torch.no_grad():
        full = model(ids, attention_mask=mask, use_cache=False).logits
        for length, removed in ((18, 10), (18, 18), (60, 1)):
            for then in ((1, 1), (5,)):
                cache = windows.cache()
                model(ids[:, :length], attention_mask=part(length), **{CACHE: cache})
                cache.crop(-removed)
                begin = length - removed
                for size in then:
                    end = begin + size
                    read = model(ids[:, begin:end], attention_mask=part(end), **{CACHE: cache}).logits
                    assert (
                        difference(read, full[:, begin:end], None if mask is None else mask[:, begin:end]) < ROUNDING
                    )
                    begin = end
        with pytest.raises(ValueError, match="activate_past_recording"):
            cache.crop(-20)
        assert cache.get_seq_length() == 64


@pytest.mark.parametrize("padding", ["no mask", "left"])
def test_reset_allows_another_batch_size(padding):
    model, windows = windowed()
    ids, mask = tokens(), padding_mask(padding)
    cache = windows.cache()
    in_chunks(model, ids, mask, cache, [60, 10])
    cache.reset()
    assert cache.get_seq_length() == 0
    wanted = in_chunks(model, tokens(3, seed=4), None, windows.cache(), [20, 1, 49])
    assert torch.equal(in_chunks(model, tokens(3, seed=4), None, cache, [20, 1, 49]), wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("padding", ["no mask", "left"])
def test_a_copied_cache_shares_no_memory(padding, copied):
    model, windows = windowed()
    ids, mask = tokens(), padding_mask(padding)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits[:, 50:]
        cache = windows.cache()
        in_chunks(model, ids[:, :50], None if mask is None else mask[:, :50], cache, [49, 1])
        copy_ = copied(cache)
        for x in (cache, copy_):  # the second one must not see what the first one has appended
            read = model(ids[:, 50:], attention_mask=mask, **{CACHE: x}).logits
            assert difference(read, wanted, None if mask is None else mask[:, 50:]) < ROUNDING


def test_a_cache_filled_in_inference_mode_can_be_used_outside():
    model, windows = windowed()
    ids, cache = tokens(), windows.cache()
    with torch.inference_mode():
        model(ids[:, :50], **{CACHE: cache})
    with torch.no_grad():
        read = in_chunks(model, ids[:, 50:], None, cache, [1, 19])
        assert difference(read, model(ids, use_cache=False).logits[:, 50:]) < ROUNDING


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["prompt lookup", "assistant without windows", "assistant with windows"])
def test_assisted_decoding_equals_greedy_decoding(kind, family):
    if family == "gemma3" and kind == "assistant without windows" and OLD:
        pytest.skip("transformers before 5.23 cannot crop the sliding layers of the assistant's own cache")
    model, windows = windowed(family)
    ids = tokens(1, 20).repeat(1, 3)
    assistant = make(family)
    assistant.load_state_dict({name: x + 0.02 * torch.randn_like(x) for name, x in model.state_dict().items()})
    if kind == "assistant with windows":
        windows.apply(assistant)
    options = {"prompt_lookup_num_tokens": 6} if kind == "prompt lookup" else {"assistant_model": assistant}
    wanted = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids, **options), wanted)
    assert torch.equal(generate(model, ids, **{CACHE: windows.cache(), **options}), wanted)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_assistant_of_the_first_layers(family):
    """Its layers beyond the exit have no keys to crop."""
    model, _ = windowed(family)
    ids = tokens(1, 20).repeat(1, 3)
    assert torch.equal(generate(model, ids, assistant_early_exit=2), generate(model, ids, use_cache=False))


def test_a_cache_continues_a_conversation():
    model, windows = windowed()
    ids, cache = tokens(2, 90), windows.cache()
    first = generate(model, ids[:, :30], **{CACHE: cache})
    prompt = torch.cat([first, ids[:, 60:]], 1)
    assert torch.equal(generate(model, prompt, **{CACHE: cache}), generate(model, prompt, use_cache=False))


@pytest.mark.parametrize("window", [1, 16, 100])
@torch.no_grad()
def test_rows_without_padding_stay_after_padded_rows_are_removed(window):
    """The remaining rows have no mask or a mask of ones, but the cache still has free entries from the padding."""
    model, windows = windowed(windows=[[window] * 4, [-1] * 4, [-1, window, 16, 1]])
    ids, mask = tokens(), padding_mask("middle")
    wanted = model(ids[1:], use_cache=False).logits
    for part in (None, mask[1:]):
        cache = windows.cache()
        model(ids[:, :50], attention_mask=mask[:, :50], **{CACHE: cache})
        cache.batch_select_indices(torch.tensor([1]))
        assert difference(in_chunks(model, ids[1:, 50:60], None, cache, [1, 1, 7, 1]), wanted[:, 50:60]) < ROUNDING
        part = None if part is None else part[:, :61]
        read = model(ids[1:, 60:61], attention_mask=part, **{CACHE: cache}).logits
        assert difference(read, wanted[:, 60:61]) < ROUNDING


@pytest.mark.parametrize("padding", ["no mask", "left"])
@torch.no_grad()
def test_crop_removes_one_token_only_once(padding):
    """A full ring has only one token more than the next query needs, however often `crop` is called."""
    model, windows = windowed(windows=[[-1, 16, 30, 30]] * 3)
    ids, mask = tokens(), padding_mask(padding)
    part = lambda end: None if mask is None else mask[:, :end]  # noqa: E731
    full = model(ids, attention_mask=mask, use_cache=False).logits
    for length in (20, 21, 22, 33, 34, 60):
        cache, begin = windows.cache(), length
        model(ids[:, :length], attention_mask=part(length), **{CACHE: cache})
        for _ in range(3):
            try:
                cache.crop(-1)
            except ValueError as error:
                assert length > 19, error
                break
            begin -= 1
        assert length == 20 or begin == length - 1 or padding == "left"
        read = model(ids[:, begin:63], attention_mask=part(63), **{CACHE: cache}).logits
        assert difference(read, full[:, begin:63], None if mask is None else mask[:, begin:63]) < ROUNDING


@torch.no_grad()
def test_an_empty_cache_cannot_be_cropped():
    with pytest.raises(ValueError, match="`tokens_to_remove` must be at least 0, got -1"):
        windowed()[1].cache().crop(-1)


def test_a_crop_that_raises_removes_nothing():
    model, windows = windowed(windows=[[-1] * 4, [60] * 4, [8] * 4])
    ids, cache = tokens(), windows.cache()
    full = model(ids, use_cache=False).logits
    model(ids[:, :40], **{CACHE: cache})
    with pytest.raises(ValueError, match="crop cannot remove 5 tokens"):
        cache.crop(-5)
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * 3
    assert difference(in_chunks(model, ids[:, 40:], None, cache, [1, 29]), full[:, 40:]) < ROUNDING


@pytest.mark.parametrize("family, windows", [("llama", [[-1] * 4, [8] * 4, [8] * 4]), ("gemma3", [[30] * 4] * 3)])
@torch.no_grad()
def test_a_mask_that_contradicts_the_cache_if_the_first_layer_has_no_windows(family, windows):
    model, windows = windowed(family, windows=windows)
    ids, mask = tokens(), padding_mask("left")
    for copied in (lambda cache: cache, copy.deepcopy):
        cache = windows.cache()
        in_chunks(model, ids[:, :60], mask[:, :60], cache, [59, 1])
        with pytest.raises(ValueError, match="must mark the same cached tokens as padding"):
            model(ids[:, 60:], attention_mask=torch.ones_like(mask), **{CACHE: copied(cache)})
