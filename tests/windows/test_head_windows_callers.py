"""Head windows in training, under PEFT, with packed documents, and calls that are not supported."""

import pytest
import torch
from tiny_windows import (
    CACHE,
    WINDOWS,
    dense_logits,
    difference,
    in_chunks,
    make,
    padding_mask,
    tokens,
    windowed,
)
from transformers import AttentionInterface, DynamicCache

from hf_longctx.windows import HeadWindows


ROUNDING = 1e-11


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_packed_documents_equal_documents_alone(family):
    """Each document has its own sinks. transformers recognizes documents without a mask and without a cache."""
    model, windows = windowed(family)
    lengths = [30, 25, 15]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    ids = tokens()
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
    assert difference(packed, alone) < ROUNDING
    wanted = dense_logits(make(family), windows, ids, documents=documents, position_ids=positions)
    assert difference(packed, wanted) < ROUNDING


def gradients(model, ids, mask, **kwargs):
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids, **kwargs).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("padding", ["no mask", "left"])
def test_gradients_equal_those_of_dense_masks(padding):
    model, windows = windowed()
    ids, mask = tokens(), padding_mask(padding)
    wanted = make()
    torch.set_grad_enabled(True)
    logits = dense_logits.__wrapped__(wanted, windows, ids, mask)
    wanted.loss_function(logits, ids, vocab_size=300).backward()
    for mode in ("no cache", "a cache that is not used", "a new cache", "checkpointing"):
        options = {"use_cache": False} if mode in ("no cache", "checkpointing") else {}
        if mode == "a new cache":
            options = {CACHE: windows.cache()}
        if mode == "checkpointing":
            model.train()
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        for got, parameter in zip(gradients(model, ids, mask, **options), wanted.parameters()):
            torch.testing.assert_close(got, parameter.grad, atol=1e-10, rtol=1e-8)


def test_gradients_to_earlier_calls_are_not_dropped_silently():
    model, windows = windowed()
    ids, cache = tokens(), windows.cache()
    model(ids[:, :30], **{CACHE: cache})
    with pytest.raises(NotImplementedError, match="does not propagate gradients to earlier calls"):
        model(ids[:, 30:], **{CACHE: cache})


def test_dropout_is_applied():
    model, _ = windowed()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert difference(model(ids).logits, model(ids).logits) > 0.1


@pytest.mark.parametrize("order", ["windows of the adapted model", "an adapter on windows"])
def test_adapters(order):
    peft = pytest.importorskip("peft", reason="needs it: pip install peft")
    ids, options = tokens(), dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model, windows = make(), HeadWindows(WINDOWS, 3)
    if order == "an adapter on windows":
        windows.apply(model)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config).eval()
    if order == "windows of the adapted model":
        windows.apply(adapted)
    with torch.no_grad():
        logits = adapted(ids).logits
        assert difference(logits, windowed()[0](ids).logits) > 0.1
        out = adapted.generate(input_ids=ids, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, adapted.generate(input_ids=ids, use_cache=False, **options))
        assert type(out[CACHE].layers[0]).__name__ == "WindowLayer"
        merged = adapted.merge_and_unload()
        assert difference(merged(ids).logits, logits) < ROUNDING
        windows.remove(merged)
        assert difference(merged(ids).logits, logits) > 0.1


@pytest.mark.parametrize("padding", ["no mask", "left"])
def test_a_call_without_a_cache_compiles_to_one_graph(padding):
    torch._dynamo.reset()
    model, _ = windowed(dtype=torch.float32)
    ids, mask = tokens(), padding_mask(padding)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, wanted = (m(ids, attention_mask=mask, use_cache=False).logits for m in (compiled, model))
    assert difference(got, wanted, mask) < 1e-3


def test_a_mask_of_four_dimensions():
    ids, mask = tokens(), torch.ones(2, 1, 70, 70, dtype=torch.bool).tril()
    model, half_open = windowed()[0], windowed(windows=[[-1] * 4, [8] * 4, [8] * 4])[0]
    for x in (mask, torch.where(mask, 0.0, -torch.inf).double(), mask.int()):
        for m in (model, half_open):
            with pytest.raises(
                NotImplementedError, match="`attention_mask` must have two dimensions, got a mask of 4"
            ):
                m(ids, attention_mask=x)
    with pytest.raises(RuntimeError, match="attn_mask dtype"):  # raised by PyTorch
        model(ids, attention_mask=mask.to(torch.uint8))
    opened, _ = windowed(windows=[[-1] * 4] * 3)
    with torch.no_grad():
        assert torch.equal(opened(ids, attention_mask=mask).logits, make()(ids, attention_mask=mask).logits)


def test_attention_weights_are_not_supported():
    model, _ = windowed()
    for call in (model, model.generate):
        with pytest.raises(NotImplementedError, match="do not return attention weights"):
            call(tokens(), output_attentions=True)


@torch.no_grad()
def test_attention_that_another_package_wraps(monkeypatch):
    """kvpress wraps all attention functions, compares shapes of queries and keys, and passes dropout by position."""
    functions = AttentionInterface._global_mapping

    def wrapped(module, query, key, value, mask, dropout, *, attention=functions["head_windows"], **kwargs):
        assert query.shape[2] == key.shape[2]
        return attention(module, query, key, value, mask, dropout, **kwargs)

    model, windows = windowed()
    ids = tokens()
    expected = model(ids, use_cache=False).logits
    monkeypatch.setitem(functions, "head_windows", wrapped)
    assert difference(model(ids, use_cache=False).logits, expected) < ROUNDING
    assert difference(in_chunks(model, ids, None, windows.cache(), [60, *[1] * 10]), expected) < ROUNDING


def test_attention_that_is_not_causal():
    model, _ = windowed()
    model.config.is_causal = False
    with pytest.raises(NotImplementedError, match="require causal attention"):
        model(tokens())


@pytest.mark.parametrize("later", ["other padding", "padding of new tokens only", "fewer padded tokens", "as many"])
@torch.no_grad()
def test_a_mask_that_contradicts_the_cache(later):
    model, windows = windowed()
    ids, mask, cache = tokens(), padding_mask("left"), windows.cache()
    in_chunks(model, ids[:, :60], mask[:, :60], cache, [59, 1])
    changed = mask.clone()
    if later == "other padding":
        changed[0, 20:30] = 0
    elif later == "fewer padded tokens":
        changed[0, 5:] = 1
    elif later == "as many":
        changed[0, [0, mask[0].argmax()]] = changed[0, [mask[0].argmax(), 0]]
    else:
        changed[:, :60] = 1
    with pytest.raises(ValueError, match="must mark the same cached tokens as padding"):
        model(ids[:, 60:], attention_mask=changed, **{CACHE: cache})


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_half_precision_rounds_as_the_model_without_windows(dtype, rounding):
    """The cached call differs from the call without a cache by no more than it does without windows."""
    ids, errors = tokens(), []
    for model, cache in ((make(dtype=dtype), None), windowed(dtype=dtype)):
        cache = DynamicCache(config=model.config) if cache is None else cache.cache()
        with torch.no_grad():
            full = model(ids, use_cache=False).logits.float()
        read = in_chunks(model, ids, None, cache, [60, *[1] * 10]).float()
        errors.append(((read - full).norm() / full.norm()).item())
    assert errors[1] < 2 * errors[0] + rounding


def test_a_cache_is_not_used_after_a_failed_call():
    model, windows = windowed()
    ids, cache = tokens(), windows.cache()
    in_chunks(model, ids[:, :50], None, cache, [50])
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        in_chunks(model, ids[:, 50:60], None, cache, [10])
    hook.remove()
    with pytest.raises(ValueError, match="must have stored all"):
        in_chunks(model, ids[:, 60:], None, cache, [10])
