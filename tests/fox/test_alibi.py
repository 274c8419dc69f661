"""BLOOM and MPT with their ALiBi as constant gates are the models of transformers, and a `PrunedCache` prunes them."""

import copy

import pytest
import torch
from tiny_fox import make
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, MptConfig, MptForCausalLM, StaticCache

from hf_longctx.fox import PrunedCache, gate_alibi
from hf_longctx.fox.compat_fox import CACHE


BLOOM = dict(vocab_size=61, hidden_size=48, n_layer=2, hidden_dropout=0.0, attention_dropout=0.0, pad_token_id=0)
MPT = dict(vocab_size=61, d_model=48, n_layers=2, max_seq_len=300)
MODELS = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(**BLOOM, n_head=4)),
    "bloom, six heads": lambda: BloomForCausalLM(BloomConfig(**BLOOM, n_head=6)),
    "mpt": lambda: MptForCausalLM(MptConfig(**MPT, n_heads=4)),
    "mpt, six heads, clipped": lambda: MptForCausalLM(
        MptConfig(**MPT, n_heads=6, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.2})
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


def make_both(name):
    """The model of transformers, and the same with gates; all parameters are far from their initial value."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, gate_alibi(copy.deepcopy(model))


def draw(batch=2, length=40):
    ids = torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return ids, mask


def check(got, want):
    torch.testing.assert_close(got, want, atol=2e-5 * want.abs().max().item(), rtol=0)


@every_model
def test_logits_weights_and_gradients_are_those_of_transformers(name):
    ids, mask = draw()
    results = []
    for model in make_both(name):
        out = model(ids, attention_mask=mask, output_attentions=True, use_cache=False)
        real = mask.bool()
        loss = torch.nn.functional.cross_entropy(out.logits[real], ids[real])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        weights = [(x * real[:, None, :, None]).detach() for x in out.attentions]
        results.append([out.logits[real].detach(), *weights, *gradients])
    for want, got in zip(*results, strict=True):
        check(got, want)


@every_model
def test_cached_calls_are_those_of_transformers(name):
    ids, mask = draw()
    model, gated = make_both(name)
    with torch.no_grad():
        want, cache = model(ids, attention_mask=mask).logits, DynamicCache()
        for begin, end in ((0, 20), (20, 21), (21, 40)):
            got = gated(ids[:, begin:end], attention_mask=mask[:, :end], **{CACHE: cache}).logits
            seen = mask[:, begin:end].bool()
            check(got[seen], want[:, begin:end][seen])
    options = dict(attention_mask=mask, max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0)
    assert torch.equal(*(m.generate(ids, **options) for m in (model, gated)))


@every_model
@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_a_pruned_cache_drops_what_alibi_has_faded(name, tolerance):
    ids, mask = draw(length=260)
    model, gated = make_both(name)
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        cache = PrunedCache(gated, tolerance, "observed", prune_every=16)
        got = [
            gated(ids[:, i : i + 20], attention_mask=mask[:, : i + 20], **{CACHE: cache}).logits
            for i in range(0, 260, 20)
        ]
    if tolerance == 0:
        assert not cache.dropped.any()
        check(torch.cat(got, dim=1)[mask.bool()], want[mask.bool()])
    else:
        assert cache.dropped[:, 0].min() > 60 and cache.dropped.min(dim=1).values.max() < cache.dropped.max()
        assert cache.lost_weight <= tolerance
        torch.testing.assert_close(torch.cat(got, dim=1)[mask.bool()], want[mask.bool()], atol=0.02, rtol=0)
    gated.generate(ids[:, :1], **{CACHE: PrunedCache(gated, 1e-3, "observed")}, max_new_tokens=3, pad_token_id=0)


def test_mpt_reads_beyond_its_longest_text_and_is_saved_as_before(tmp_path):
    long, gated = make_both("mpt")
    gated.config.max_seq_len = 10
    ids, _ = draw()
    with torch.no_grad():
        check(gated(ids).logits, long(ids).logits)
    gated.save_pretrained(tmp_path)
    again = MptForCausalLM.from_pretrained(tmp_path)
    assert all(map(torch.equal, again.state_dict().values(), long.state_dict().values()))


def test_what_cannot_be_is_refused():
    fox, (_, bloom) = make("llama"), make_both("bloom")
    with pytest.raises(ValueError, match="FoxForCausalLM has no attention of transformers' BLOOM or MPT"):
        gate_alibi(fox)
    with pytest.raises(ValueError, match='logit_bound="observed"'):
        PrunedCache(bloom)
    with pytest.raises(NotImplementedError, match="DynamicCache or a PrunedCache"):
        bloom(draw()[0], **{CACHE: StaticCache(bloom.config, max_cache_len=64)})
