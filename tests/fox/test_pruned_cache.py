"""Pruned decoding: the bound holds, whatever gates and queries do, and the cache behaves as any other."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import tiny_fox
import torch
from tiny_fox import TINY, in_chunks, logits
from transformers import CompileConfig, DynamicCache

from hf_longctx.fox import FoxConfig, FoxForCausalLM, PrunedCache, backend_fox
from hf_longctx.fox.attention_fox import fold_keys, fold_queries, unfold_decay
from hf_longctx.fox.backend_fox import eager_attention_forward
from hf_longctx.fox.pruning import Pruning, logit_bound_of_weights
from hf_longctx.fox.ragged_cache import RaggedLayer, group_heads


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 256}
VARIANTS = tiny_fox.VARIANTS | {
    "YaRN": lambda: FoxConfig(**TINY, rope_parameters=YARN),
    "YaRN and QK-norm": lambda: FoxConfig.pro(**TINY, rope_parameters=YARN),
}
GROUPED = "pro with grouped heads and rope"


def make(variant, backend="sdpa", seed=0):
    """Return a small model with fast and slow heads. Its other parameters are far from their initial values."""
    torch.manual_seed(seed)
    config = VARIANTS[variant]()
    config.decay_time_min, config.decay_time_max = 0.5, 100.0
    model = FoxForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "f_proj" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_attn_implementation(backend)
    return model


def pruned(model, tolerance=1e-6, prune_every=8, slots=None):
    bound = "weights" if model.config.qk_norm else "observed"
    return PrunedCache(model, tolerance, bound, prune_every, max_cache_len=slots)


def tokens(batch=2, length=160, seed=1):
    return tiny_fox.tokens(batch, length, seed)


def stored_bytes(cache):
    return sum(x.keys.nbytes + x.values.nbytes for layer in cache.layers for x in getattr(layer, "groups", [layer]))


@pytest.mark.parametrize("seed", range(5))
def test_grouping_keeps_what_heads_need_and_no_more_than_they_have(seed):
    g = torch.Generator().manual_seed(seed)
    available = torch.randint(1, 2000, (12,), generator=g)
    needed = (available * torch.rand(12, generator=g) ** 4).long().clamp(min=1)
    groups = group_heads(available.tolist(), needed.tolist(), short=16)
    assert sorted(head for _, heads in groups for head in heads) == list(range(12))
    for length, heads in groups:
        for head in heads:
            assert needed[head] <= length <= available[head]
            assert length <= max(2 * needed[head], 16)


GATES = {
    "open": lambda g, shape: torch.zeros(shape),
    "random": lambda g, shape: -torch.rand(shape, generator=g),
    "all at once": lambda g, shape: torch.zeros(shape).index_fill_(2, torch.tensor([60]), -30.0),
    "closed for a while": lambda g, shape: torch.zeros(shape).index_fill_(2, torch.arange(30, 35), -200.0),
    "heads and rows apart": lambda g, shape: -torch.rand(*shape[:2], 1, generator=g).add(0.3).expand(shape),
}

TOLERANCES = {"random": 1e-5, "adversarial": 1e-2}


def queries_and_keys(kind, g, rows, heads, kv_heads, length, head_dim):
    """Return queries and keys with norm sqrt(3 sqrt(D)), so |scale * q.k| <= 3."""
    if kind == "random":
        q, k = (torch.randn(rows, h, length, head_dim, generator=g) for h in (heads, kv_heads))
    else:  # old keys attract all queries as much as the bound allows, recent ones repel them
        q, k = (torch.zeros(rows, h, length, head_dim) for h in (heads, kv_heads))
        q[..., 0] = 1.0
        k[..., 0] = torch.where(torch.arange(length) < length // 2, 1.0, -1.0)
    return ((3 * head_dim**0.5) ** 0.5 * x / x.norm(dim=-1, keepdim=True) for x in (q, k))


SHARING = [(1, 1), (2, 2), (2, 1)]  # query heads, and gates, of a key head
CASES = [(kind, gates, SHARING[(i + j) % 3]) for i, kind in enumerate(TOLERANCES) for j, gates in enumerate(GATES)]


@pytest.mark.parametrize("kind, gates, sharing", [*CASES, ("adversarial", "random", (2, 2))], ids=str)
def test_no_query_loses_more_than_the_tolerance(kind, gates, sharing):
    (group, gates_per_key), tolerance = sharing, TOLERANCES[kind]
    g = torch.Generator().manual_seed(0)
    rows, kv_heads, length, head_dim = 2, 3, 90, 4
    heads, scale = kv_heads * group, 0.5
    q, k = queries_and_keys(kind, g, rows, heads, kv_heads, length, head_dim)
    v = torch.randn(rows, kv_heads, length, head_dim, generator=g)
    log_f = GATES[gates](g, (rows, kv_heads * gates_per_key, length))
    c = log_f.cumsum(-1)
    folded_q, folded_k = fold_queries(q, c, scale, gates_per_key), fold_keys(k, c, scale)
    folded_v = torch.nn.functional.pad(v, (0, folded_k.shape[-1] - head_dim))
    attention = SimpleNamespace(
        head_dim=head_dim,
        scaling=scale,
        num_key_value_groups=group,
        gates_per_key=gates_per_key,
        config=SimpleNamespace(num_key_value_heads=kv_heads),
        training=False,
    )
    layer = RaggedLayer(attention, Pruning(attention, torch.full((heads,), 3.0), tolerance), prune_every=5)
    causal = torch.zeros(1, 1, length, length).masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
    exact, weights = eager_attention_forward(attention, folded_q, folded_k, folded_v, causal, scale)
    exact, begin, most = exact.transpose(1, 2), 0, 0.0
    for step in [40, 20, 7] + [1] * (length - 67):
        end = begin + step
        layer.make_room(step, int(layer.length))
        c = log_f[..., begin:end].cumsum(-1)
        if begin:
            c = c + unfold_decay(layer.keys, head_dim, gates_per_key, scale)
        layer.update(fold_keys(k[:, :, begin:end], c, scale), folded_v[:, :, begin:end])
        out, kept = layer.attend(
            eager_attention_forward,
            attention,
            folded_q[:, :, begin:end],
            folded_k[:, :, begin:end],
            folded_v[:, :, begin:end],
            causal[..., begin:end, :end],
            scaling=scale,
        )
        lost = weights[:, :, begin:end, :end].masked_fill(kept > 0, 0.0).sum(-1)
        assert lost.max() <= tolerance * 1.001
        error = (out.transpose(1, 2) - exact[:, :, begin:end]).norm(dim=-1)
        assert error.max() <= 2 * tolerance * v.norm(dim=-1).max() + 1e-5
        most, begin = max(most, lost.max().item()), end
    assert any(layer.dropped()) == (gates != "open")
    if kind == "adversarial" and gates == "random":
        assert most > tolerance / 10, "no bound can be much tighter; is this one what the theorem says?"


@pytest.mark.parametrize("variant", ["YaRN", "only v shift, shared norm, biases", GROUPED, "YaRN and QK-norm"])
def test_no_input_exceeds_the_bound_of_the_weights(variant, monkeypatch):
    """Inputs that climb towards the largest logit come close to the bound, and never above it."""
    model = make(variant, "eager")
    layer, ratios = model.model.layers[0], []
    for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
        projection.weight.data.mul_(10)  # far above the epsilon of QK-norm
    bound = logit_bound_of_weights(layer)

    def measured(module, query, key, *args, **kwargs):
        q, k = query[..., : module.head_dim], key[..., : module.head_dim]
        products = q @ k.repeat_interleave(module.num_key_value_groups, 1).mT
        ratios.append(module.scaling * products.abs().amax((0, 2, 3)) / bound)
        return eager_attention_forward(module, query, key, *args, **kwargs)

    monkeypatch.setattr(backend_fox, "eager_attention_forward", measured)
    x = torch.randn(16, 3, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1)
    positions = torch.arange(3)[None]
    for _ in range(80):
        rope = model.model.rotary_emb(x, positions) if model.model.rotary_emb is not None else None
        layer(x, position_embeddings=rope)
        optimizer.zero_grad()
        (-ratios[-1].sum()).backward()
        optimizer.step()
    assert all((ratio <= 1).all() for ratio in ratios)
    assert ratios[-1].max() > 0.7, "the bound is far from anything an input can do"


CHUNKS, STEPS = [40, 1, 50, 1, 1, 60, 7], [110] + [1] * 30 + [20]
GATED = [variant for variant in VARIANTS if "window" not in variant and variant not in ("bias only", "no gate")]
CLOSE = [(variant, "sdpa", 1e-6, CHUNKS) for variant in GATED]
CLOSE += [(variant, "eager", 1e-3, STEPS) for variant in ("llama", GROUPED, "one gate per key head")]
CLOSE += [("pro", "sdpa", 0.0, [8] * 20)]


@pytest.mark.parametrize("variant, backend, tolerance, chunks", CLOSE)
def test_logits_stay_close_in_any_chunks(variant, backend, tolerance, chunks):
    model, ids = make(variant, backend), tokens()
    cache = pruned(model, tolerance)
    got = in_chunks(model, ids, cache, chunks)
    assert cache.dropped.any() == (tolerance > 0)
    assert cache.lost_weight <= tolerance * (1 if model.config.qk_norm else 2)
    exact = in_chunks(model, ids, DynamicCache(config=model.config), chunks)
    # the full cache rounds c, at -300 by 3e-5
    torch.testing.assert_close(got, exact, atol=10 * tolerance + 5e-5, rtol=1e-4)


def test_cropping_up_to_the_last_pruning():
    model, ids = make(GROUPED), tokens()
    cache = pruned(model, prune_every=100)
    cache.activate_past_recording()
    in_chunks(model, ids[:, :140], cache, 125)
    assert cache.dropped.any()
    cache.crop(-15)
    assert cache.get_seq_length() == 125
    got = in_chunks(model, ids[:, 125:], cache, 5)
    torch.testing.assert_close(got, logits(model, ids)[:, 125:], atol=5e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"crop must leave at least|crop cannot remove 100"):
        cache.crop(-100)


@pytest.mark.parametrize("slots", [None, 160])
@pytest.mark.parametrize("variant", ["llama", GROUPED])
def test_a_reset_cache_is_new(slots, variant):
    """The next batch may have another size and dtype."""
    model, ids = make(variant), tokens()
    cache = pruned(model, slots=slots)
    in_chunks(model.double(), tokens(3, seed=7), cache, 40)
    model.float()
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.dropped.any() and cache.lost_weight == 0
    torch.testing.assert_close(in_chunks(model, ids, cache, 40), logits(model, ids), atol=5e-5, rtol=1e-4)


HIDDEN = {
    "the prefix": lambda mask: mask[0, :30].zero_(),
    "the middle": lambda mask: mask[:, 50:55].zero_(),
    "a row": lambda mask: mask[1, :-1].zero_(),
    "other tokens in each call": lambda mask: mask.bernoulli_(0.7),
}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["llama", "pro", GROUPED])
def test_a_mask_hides_cached_tokens(variant, backend):
    """Tokens that are hidden in one call, and padding, may be visible later. None hides nothing."""
    model, ids = make(variant, backend), tokens()
    caches = DynamicCache(config=model.config), pruned(model, 1e-7), pruned(model, 1e-7, slots=256)
    torch.manual_seed(0)
    chunks, end = [60, 1, 1, 9, 1, 30, 1, 1, 8, 1], 0
    hidden = [None, *HIDDEN.values(), None, *HIDDEN.values()]
    for chunk, hide in zip(chunks, hidden, strict=True):
        new, end = ids[:, end : end + chunk], end + chunk
        mask = torch.ones(2, end, dtype=torch.long)
        if hide is not None:
            hide(mask)
        full, *got = (logits(model, new, attention_mask=None if hide is None else mask, cache=x) for x in caches)
        for logits_of_cache in got:
            torch.testing.assert_close(logits_of_cache, full, atol=5e-5, rtol=1e-4)
        for cache in caches:  # the masks of later calls do not follow the rows
            cache.batch_select_indices(torch.tensor([1, 0]))
        ids = ids.flip(0)


def test_a_compiled_step_obeys_a_mask():
    torch._dynamo.reset()
    model, ids = make(GROUPED), tokens()
    cache, full, mask = pruned(model, slots=256), DynamicCache(config=model.config), torch.ones(2, 160).long()
    step = torch.compile(model, fullgraph=True, backend="eager")
    mask[:, 20:25] = 0
    for used in (cache, full):
        logits(model, ids[:, :100], cache=used)
    for t in range(100, 108):
        seen = mask[:, : t + 1] if t % 2 else None
        got = logits(step, ids[:, t : t + 1], attention_mask=seen, cache=cache)
        want = logits(model, ids[:, t : t + 1], attention_mask=seen, cache=full)
        torch.testing.assert_close(got, want, atol=5e-5, rtol=1e-4)


def test_a_static_cache_needs_a_column_for_each_token():
    model = make("pro")
    cache = pruned(model, slots=64)
    logits(model, tokens(1, 9), cache=cache)
    embedded = model.model.embed_tokens(tokens(1, 1))
    with pytest.raises(ValueError, match="must have 10 columns, got 1"):
        model.create_masks_for_generate(model.config, embedded, torch.ones(1, 1), cache)


@pytest.mark.parametrize("slots", [None, 256])
def test_a_model_in_float64(slots):
    model, ids = make(GROUPED).double(), tokens()
    got = in_chunks(model, ids, pruned(model, 1e-9, slots=slots), CHUNKS)
    torch.testing.assert_close(got, logits(model, ids), atol=5e-5, rtol=1e-4)  # c is a float32


def trained(model):
    model(tokens(), labels=tokens()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def with_one_large_weight(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[-1, -1] = 100.0


CHANGES = {
    "a training step": trained,
    "one large weight": with_one_large_weight,
    "loaded weights": lambda model: model.load_state_dict(make("llama", seed=1).state_dict()),
    "assigned weights": lambda model: model.load_state_dict(make("llama", seed=1).state_dict(), assign=True),
    "a norm": lambda model: model.model.layers[0].input_layernorm.weight.data.mul_(3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("used", [False, True])
def test_a_bound_of_other_weights_is_refused(change, used):
    model, ids = make("llama"), tokens()
    cache = PrunedCache(model, prune_every=8)
    if used:
        in_chunks(model, ids[:, :40], cache, 20)
    change(model)
    with pytest.raises(ValueError, match="must be used with the weights that it was created for"):
        in_chunks(model, ids[:, 40:], cache, 20)  # weights changed by `.data` are noticed after a pruning
    logits(model, ids, cache=PrunedCache(model))


def test_a_cache_of_another_model_is_refused():
    """Untrained norms are equal, and so is their bound."""
    models = [FoxForCausalLM(FoxConfig.pro(**TINY)).eval() for _ in range(2)]
    with pytest.raises(ValueError, match="must be used with the weights that it was created for"):
        logits(models[1], tokens(), cache=PrunedCache(models[0]))
    with pytest.raises(ValueError, match="must be used with the weights that it was created for"):
        models[1].generate(tokens(), cache=PrunedCache(models[0], max_cache_len=512), max_new_tokens=2)


@pytest.mark.parametrize("variant", ["llama", GROUPED])
def test_copied_and_converted_weights_are_the_same_weights(variant):
    model, ids = make(variant), tokens()
    cache = pickle.loads(pickle.dumps(PrunedCache(model, prune_every=8)))
    for used in (model, copy.deepcopy(model), model.bfloat16()):
        cache.reset()
        in_chunks(used, ids[:, :60], cache, 20)
        in_chunks(used, ids[:, 60:], copy.deepcopy(cache), 20)


def test_an_adapter_is_merged_first():
    peft = pytest.importorskip("peft")
    model = make("llama")
    cache, config = PrunedCache(model), peft.LoraConfig(target_modules=["q_proj"])
    model = peft.get_peft_model(model, config)
    with pytest.raises(ValueError, match=r"must be torch.nn.Linear, got Linear of peft.*merge the adapter"):
        PrunedCache(model)
    with pytest.raises(ValueError, match=r"must be torch.nn.Linear, got Linear of peft.*merge the adapter"):
        logits(model, tokens(), cache=cache)


def test_memory_falls_to_what_is_remembered():
    model, ids = make("pro"), tokens(2, 400)
    full, cache = DynamicCache(config=model.config), pruned(model)
    in_chunks(model, ids, full, 20)
    in_chunks(model, ids, cache, 20)
    cache.prune()
    assert stored_bytes(cache) < 0.7 * stored_bytes(full)
    room = cache.layers[0].prune_every
    remembered = (400 + room - cache.dropped).sum() * 2 * 2 * cache.layers[0].keys[0, 0].nbytes
    assert stored_bytes(cache) == remembered
    assert cache.dropped.shape == (2, 4)
    fast, slow = cache.dropped[:, 0], cache.dropped[:, 3]
    assert (fast > 300).all() and not slow.any()


def test_a_compiled_static_step_has_a_graph_for_each_shape():
    torch._dynamo.reset()
    model, ids, graphs, shapes = make(GROUPED), tokens(2, 300), [], set()
    cache, want = pruned(model, prune_every=16, slots=320), logits(model, ids)
    logits(model, ids[:, :120], cache=cache)
    step = torch.compile(model, fullgraph=True, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1])
    for t in range(120, 300):
        if t % 16 == 8:
            cache.prune()
            shapes.add(tuple(group.keys.shape for layer in cache.layers for group in layer.groups))
            written = [group.keys.data_ptr() for layer in cache.layers for group in layer.groups]
        got = logits(step, ids[:, t : t + 1], cache=cache)
        torch.testing.assert_close(got, want[:, t : t + 1], atol=5e-5, rtol=1e-4)
        assert [group.keys.data_ptr() for layer in cache.layers for group in layer.groups] == written
    assert cache.dropped.any()
    assert len(graphs) <= len(shapes) < 4


def test_generate_compiles_a_static_step_once_and_prunes_between_steps():
    torch._dynamo.reset()
    model, prompt, graphs = make(GROUPED), tokens(3, 120), []
    compile_config = CompileConfig(backend=lambda graph, _: (graphs.append(graph), graph.forward)[1], mode=None)
    compile_config._compile_all_devices = True
    settings, cache = dict(max_new_tokens=40, do_sample=False, eos_token_id=None), pruned(model, slots=256)
    got = model.generate(prompt, **settings, cache=cache, compile_config=compile_config)
    assert torch.equal(got, model.generate(prompt, **settings))
    assert len(graphs) == 1 and cache.dropped.max() > 80


def test_a_static_cache_says_what_does_not_fit():
    model = make("pro")
    cache = pruned(model, slots=64)
    with pytest.raises(ValueError, match="max_cache_len must be at least 100, got 64"):
        logits(model, tokens(1, 100), cache=cache)
    with pytest.raises(ValueError, match="max_cache_len must be at least"):
        in_chunks(model, tokens(1, 1000), cache, 20)
    for slots, name, message in (
        (64, "flash_attention_2", "max_cache_len supports"),
        (None, "sdpa", "flex_attention"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            mask = {name: None if slots else "blocks", "token_mask": None}
            logits(model, tokens(1, 10), cache=pruned(model, slots=slots), attention_mask=mask)


def test_another_rule_reports_what_it_loses():
    """The bound on the lost weight does not depend on the rule."""
    model, ids = make(GROUPED, "eager"), tokens(1, 120)
    cache = PrunedCache(model, prune_every=8, rule=lambda c, lost, bound: c.shape[-1] - 20)
    with torch.no_grad():
        exact = model(ids, output_attentions=True).attentions[0]
        weights = [model(x, cache=cache, output_attentions=True).attentions[0] for x in ids.split(1, dim=1)]
    assert (cache.dropped >= 120 - 20 - 8).all()
    lost = max(exact[:, :, i, : i + 1].masked_fill(x[:, :, 0] > 0, 0.0).sum(-1).max() for i, x in enumerate(weights))
    assert 0.1 < lost <= cache.lost_weight + 1e-6  # float32 weights may add up to more than 1
    with pytest.raises(ValueError, match="must retain the last token, got 8 tokens to drop of 8"):
        in_chunks(model, ids, PrunedCache(model, prune_every=8, rule=lambda c, lost, bound: c.shape[-1]), 1)
    with pytest.raises(ValueError, match=r"must return a number of tokens, got a tensor of shape \(1, 2, 8\)"):
        in_chunks(model, ids, PrunedCache(model, prune_every=8, rule=lambda c, lost, bound: c > 0), 1)


def test_the_lost_weight_is_at_most_one():
    """With large weights, the bound of a rule that ignores them exceeds what a float can hold."""
    model = make("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1e6)
    cache = PrunedCache(model, prune_every=8, rule=lambda c, lost, bound: c.shape[-1] - 4)
    in_chunks(model, tokens(1, 40), cache, 8)
    assert cache.lost_weight == 1


def test_what_was_dropped_before_counts():
    """A second pruning immediately afterwards finds the budget spent."""
    cache = pruned(make(GROUPED))
    in_chunks(make(GROUPED), tokens(), cache, 80)
    cache.prune()
    dropped = cache.dropped
    assert dropped.any()
    cache.prune()
    assert torch.equal(cache.dropped, dropped)


def test_the_decay_stays_exact_where_that_of_a_full_cache_does_not():
    """Heads that forget within a token or two: after 6000 of them, c is -12000, resolved to 0.001."""
    torch.manual_seed(0)
    model = FoxForCausalLM(FoxConfig(**TINY, forget_gate="fixed", decay_time_min=0.5, decay_time_max=2)).eval()
    ids, error = tokens(1, 6000), []
    exact = logits(model, ids[:, -300:])[:, -20:]  # all that two layers can remember
    full, cache = DynamicCache(config=model.config), pruned(model, 1e-9, prune_every=100)
    for used in (full, cache):
        error.append((in_chunks(model, ids, used, 100)[:, -20:] - exact).norm() / exact.norm())
    assert error[0] > 1e-5
    assert error[1] < error[0] / 10
    assert stored_bytes(cache) < stored_bytes(full) / 10


def test_dropped_tokens_have_no_weight():
    model, ids = make("pro", "eager"), tokens(1, 80)
    cache = pruned(model)
    with torch.no_grad():
        exact = model(ids, output_attentions=True).attentions
        model(ids[:, :79], cache=cache)
        weights = model(ids[:, 79:], cache=cache, output_attentions=True).attentions
    for layer, (got, want) in enumerate(zip(weights, exact)):
        assert got.shape == (1, 4, 1, 80)
        torch.testing.assert_close(got, want[:, :, -1:], atol=2e-6, rtol=1e-4)
        for head, dropped in enumerate(cache.dropped[layer]):
            assert not got[0, head, 0, :dropped].any()
            assert got[0, head, 0, dropped:].all()


def test_queries_beyond_the_observed_bound_are_reported(caplog):
    """Keys dropped under small queries are missed by large ones: the bound on the loss then exceeds the tolerance."""
    model, ids = make("llama"), tokens(1, 120)
    cache = pruned(model, tolerance=1e-4)
    in_chunks(model, ids[:, :100], cache, 25)
    assert 0 < cache.lost_weight <= 1e-4
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(30)
    in_chunks(model, ids[:, 100:], cache, 1)
    assert cache.lost_weight > 1e-4
