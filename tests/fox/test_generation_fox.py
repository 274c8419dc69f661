"""Ways to generate that need more than a cache: compiled, with a draft model, with caches offloaded or saved."""

import pytest
import torch
import transformers
from tiny_fox import VARIANTS, both_blocks, check_logits, logits, make, make_from, tokens
from transformers import CompileConfig, StaticCache

from hf_longctx.fox import PrunedCache


SETTINGS = dict(max_new_tokens=9, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
PADDED = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])


def assert_same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-3)


GENERATION = {
    "greedy": dict(),
    "beams": dict(num_beams=3),
    "static cache": dict(cache_implementation="static", disable_compile=True),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "early exit": dict(assistant_early_exit=1),
    "chunked prefill": dict(prefill_chunk_size=5),
    "chunked prefill into a static cache": dict(
        prefill_chunk_size=5, cache_implementation="static", disable_compile=True
    ),
}
# every way to generate with the variant that has everything, and each variant with caches of another kind
GENERATED = [("pro with a window", name, False) for name in GENERATION]
GENERATED += [("llama", name, False) for name in ("static cache", "prompt lookup")]
GENERATED += [("window", name, False) for name in ("beams", "static cache")]
GENERATED += [("pro with grouped heads and rope", name, False) for name in ("greedy", "early exit", "chunked prefill")]
GENERATED += [
    ("pro with grouped heads and rope", name, True)
    for name in GENERATION
    if "static" not in name and "exit" not in name
]


@pytest.mark.parametrize("variant, options, pruned", GENERATED)
def test_generation_with_a_cache_equals_generation_without(variant, options, pruned):
    model, options = make(variant), GENERATION[options]
    alone = options.keys() & {"prompt_lookup_num_tokens", "assistant_early_exit"}
    prompt, settings = tokens(1 if alone else 3, 60 if pruned else 9), SETTINGS | dict(max_new_tokens=12)
    want = model.generate(prompt, **settings, num_beams=options.get("num_beams", 1), use_cache=False)
    calls = [{}]
    if pruned:  # a static PrunedCache cannot be cropped
        sizes = [None] if alone else [None, 72]
        calls = [dict(cache=PrunedCache(model, 1e-6, prune_every=8, max_cache_len=n)) for n in sizes]
    for call in calls:
        assert_same(model.generate(prompt, **settings, **options, **call), want)
        assert not pruned or call["cache"].dropped.any()


@pytest.fixture
def compiler():
    """Return a backend of `torch.compile` that records its graphs."""
    torch._dynamo.reset()

    def backend(graph, inputs):
        backend.graphs.append(graph)
        return graph.forward

    backend.graphs = []
    return backend


@pytest.mark.parametrize(
    "variant, implementation", [("pro with grouped heads and rope", "auto"), ("pro with a window", "sdpa")]
)
def test_a_static_cache_is_compiled_once_and_whole(variant, implementation, compiler):
    """One graph for all tokens and both calls; with a sliding window a second one, once the window is full."""
    model, ids = make(variant, implementation), tokens(2, 9)
    options = CompileConfig(backend=compiler, fullgraph=True, mode=None)
    options._compile_all_devices = True  # `generate` leaves models on a CPU as they are
    for mask in (torch.ones_like(PADDED), PADDED):
        want = model.generate(ids, attention_mask=mask, use_cache=False, **SETTINGS)
        got = model.generate(
            ids, attention_mask=mask, cache_implementation="static", compile_config=options, **SETTINGS
        )
        assert_same(got, want)
        assert len(compiler.graphs) == (2 if "window" in variant else 1)


@pytest.mark.parametrize("implementation", ["sdpa", "auto"])
@both_blocks
def test_layers_that_are_compiled_one_by_one_share_a_graph(variant, implementation, compiler):
    """A model with many layers would otherwise exceed Dynamo's limit of recompilations at a graph break."""
    config = VARIANTS[variant]()
    config.num_hidden_layers = 3
    model, ids = make_from(config), tokens(2, 12)
    model.set_attn_implementation(implementation)
    cache, want = StaticCache(config=config, max_cache_len=16), logits(model, ids)
    logits(model, ids[:, :9], cache=cache)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=compiler, fullgraph=True)
    for t in range(9, 12):
        check_logits(logits(model, ids[:, t : t + 1], cache=cache), want[:, t : t + 1])
    assert len(compiler.graphs) == 1


DRAFTS = [("pro with a window", 0.0), ("pro with a window", 0.02), ("pro with grouped heads and rope", 0.5)]


@pytest.mark.parametrize("variant, distance", DRAFTS)
def test_a_draft_model_changes_nothing(variant, distance):
    """Drafts that are all, mostly or hardly ever accepted; rejected tokens leave the cache again."""
    if distance and OLD:
        pytest.skip(
            "before 5.23, transformers takes one token back from the cache of a draft, however many it rejected"
        )
    model, draft, ids = make(variant), make(variant), tokens(1, 9)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(distance * torch.randn_like(parameter))
    want = model.generate(ids, use_cache=False, **SETTINGS)
    assert_same(model.generate(ids, assistant_model=draft, **SETTINGS), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="caches are offloaded from a GPU")
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("variant", ["llama", "pro with a window"])
def test_an_offloaded_cache(variant, implementation):
    model, ids = make(variant).cuda(), tokens(2, 9).cuda()
    want = model.generate(ids, use_cache=False, **SETTINGS)
    assert_same(model.generate(ids, cache_implementation=implementation, disable_compile=True, **SETTINGS), want)
