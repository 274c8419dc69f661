"""Caches of contexts: exact blocks, positions, presses, names, and what is not supported."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tiny_models import CORPUS, build, tiny_llama
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

from hf_longctx.fox import PrunedCache
from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.metrics import LocalReader, Run, forgetting_curve, position_loss
from hf_longctx.metrics.run.caches import applied, cache_bytes, context_cache, counting_cache
from hf_longctx.metrics.run.engine import CACHES, Engine, UnsupportedInput, accepted_options
from hf_longctx.windows import HeadWindows


SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
MODEL = build("llama", varied=True, **SMALL)
NAME = (accepted_options(MODEL) & {*CACHES}).pop()  # name of forward's argument
MODELS = {
    "llama": MODEL,
    "gemma3": build(
        "gemma3_text", True, **SMALL, head_dim=4, num_key_value_heads=1, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "fox": build("fox", True, **SMALL | {"hidden_size": 16}, qk_norm=True),
}  # fmt: skip
for layer in MODELS["fox"].model.layers:  # it forgets within a few tokens
    torch.nn.init.constant_(layer.self_attn.f_proj.bias, -1.0)


def full(model):
    return DynamicCache(config=model.config)


class RoundedLayer(QuantizedLayer):
    def _quantize(self, tensor, axis):
        return tensor.mul(2).round()

    def _dequantize(self, q_tensor):
        return q_tensor / 2


def rounded(model, residual_length=6):
    return Cache(layers=[RoundedLayer(residual_length=residual_length) for _ in range(model.config.num_hidden_layers)])


class UncountedLayer(RoundedLayer):
    """It forgets one token, and reports the tokens that it stores."""

    def get_seq_length(self):
        return max(0, super().get_seq_length() - 1)


def uncounted(model):
    return Cache(layers=[UncountedLayer() for _ in range(model.config.num_hidden_layers)])


class KeepFirst:
    """A press like those of kvpress 0.5. Its hook reads arguments that transformers no longer passes."""

    def __init__(self, share):
        self.share = share

    def forward_hook(self, module, inputs, arguments, output):
        length = arguments["hidden_states"].shape[1]
        assert length > 8, "8 tokens are too few"
        assert arguments["cache_position"][-1] + 1 == length
        layer = arguments["past_key_values"].layers[module.layer_idx]
        layer.keys, layer.values = (x[:, :, : int(length * self.share)] for x in (layer.keys, layer.values))
        return output

    @contextmanager
    def __call__(self, model):
        hooks = [x.self_attn.register_forward_hook(self.forward_hook, with_kwargs=True) for x in model.model.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class FirstLayer(KeepFirst):
    """It compresses one layer only."""

    def forward_hook(self, module, inputs, arguments, output):
        return output if module.layer_idx else super().forward_hook(module, inputs, arguments, output)


class Masking(KeepFirst):
    """Like AdaKV: it does not drop keys, but masks them."""

    def forward_hook(self, module, inputs, arguments, output):
        module.masked_key_indices = [0]
        return output


class Lower:
    """Windows, as an object with `apply` and `cache`."""

    def __init__(self, tokens):
        self.tokens = tokens

    @classmethod
    def from_pretrained(cls, folder):
        return cls(len(folder))

    def apply(self, model):
        model.set_attn_implementation("eager")

    def remove(self, model):
        model.set_attn_implementation("sdpa")

    def cache(self):
        return counting_cache(MODEL, self.tokens)


def press(share):
    return context_cache(f"{__name__}.KeepFirst:{share}")


def static(model):
    return StaticCache(config=model.config, max_cache_len=64)


def near(a, b):
    return bool((a - b).norm() <= 3e-5 * b.norm())


EXACT = {
    # the model, the cache, and whether it stores all keys
    "full": ("llama", "full", True),
    "static": ("llama", static, True),
    "quantized": ("llama", rounded, False),
    "window": ("llama", "window:9", False),
    "window that fills up later": ("llama", "window:30:sinks=0", False),
    "press": ("llama", press(0.5), False),
    "quantized, sliding layers": ("gemma3", rounded, False),
    "window, sliding layers": ("gemma3", "window:9", False),
    "press, sliding layers": ("gemma3", press(0.5), False),
    "full FoX": ("fox", "full", True),
    "FoX": ("fox", "hf_longctx.fox.PrunedCache:0.5:logit_bound=observed:prune_every=8", False),
    "FoX, function": ("fox", lambda model: PrunedCache(model, 0.5, "observed", prune_every=7), False),
    "FoX, window": ("fox", "window:3:sinks=1", False),
    "windows of heads": ("llama", HeadWindows([[-1, 5], [8, 16]], sinks=2), False),
    "windows of heads, sliding layers": ("gemma3", HeadWindows([[3], [8]]), False),
}


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("context, rows", [(17, 3), (17, 100), (0, 3), (0, 100)])
def test_blocks_equal_one_token_at_a_time(case, context, rows):
    name, cache, keeps_all = EXACT[case]
    model, compressed, ids = MODELS[name], context_cache(cache), np.resize(CORPUS, 60)
    with torch.inference_mode(), applied(compressed.windows, model):
        engine = Engine(model, ids, compressed=compressed)
        engine.logits_per_pass = rows * 32
        if compressed.press and not context:
            with pytest.raises(UnsupportedInput, match="did not drop any keys from a context of 0 tokens"):
                [*engine.logits(ids, range(20, 60))]
            return
        found = torch.cat([*engine.logits(ids, range(20, 60), context)])
        after = engine.read_context(ids[:context])
        expected = torch.cat([engine.last_logits(ids[None, i : i + 1], 1, after)[0] for i in range(context, 60)])
    exact = model(torch.tensor(ids[None])).logits[0, 20:]
    assert near(found, expected[20 - context :])
    assert near(found, exact) == keeps_all


# -- positions, sizes


def test_dropped_tokens_keep_the_positions_of_the_others():
    ids = np.resize(CORPUS, 40)
    with torch.inference_mode():
        engine = Engine(MODEL, ids, compressed=press(0.5))
        found = torch.cat([*engine.logits(ids, range(30, 40), context=30)])
        cache = full(MODEL)
        MODEL(torch.tensor(ids[None, :30]), **{NAME: cache})
        cache.crop(-15)
        positions = torch.arange(30, 40)[None]
        expected = MODEL(torch.tensor(ids[None, 30:]), **{NAME: cache}, position_ids=positions).logits[0]
    assert torch.allclose(found, expected, atol=1e-5)
    assert engine.largest == (30, 2 * 2 * 15 * 8 * 4)  # layers, keys and values, tokens, width, bytes


def test_a_window_stores_the_sinks_and_the_newest_tokens():
    cache, ids = context_cache("window:9:sinks=2").create(MODEL), torch.tensor(np.resize(CORPUS, 40)[None])
    whole = full(MODEL)
    for part in ids.split([17, 1, 1, 21], dim=1):
        MODEL(part, **{NAME: cache})
    MODEL(ids, **{NAME: whole})
    kept, keys = cache.layers[0].keys, whole.layers[0].keys  # later layers have read other keys
    assert torch.equal(kept, torch.cat([keys[:, :, :2], keys[:, :, -7:]], 2))


def test_the_bytes_of_a_cache_are_those_of_its_tensors():
    cache = full(MODEL)
    MODEL(torch.tensor(CORPUS[None, :10]), **{NAME: cache})
    assert cache_bytes(cache) == 2 * 2 * 10 * 8 * 4


# -- curves


OPTIONS = {"lengths": [9, 20], "repeats": 3, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("cache", [full, "full", "window:1000"])
def test_a_curve_of_a_full_cache_is_that_of_the_model(cache):
    """All tokens of a passage are scored. The predictions equal those of a single pass."""
    plain = forgetting_curve(MODEL, CORPUS, **OPTIONS)
    curve = forgetting_curve(LocalReader(MODEL, cache), CORPUS, **OPTIONS)
    for point in curve.points:
        n = point.length
        for begin, copied in zip(point.begin_locs, point.copy_correct):
            passage = CORPUS[begin : begin + n]
            logits = MODEL(torch.tensor([[1, *passage, 1, *passage]])).logits[0, n + 1 : -1]
            assert copied == (logits.argmax(-1).numpy() == passage).sum()
    assert [p.scored_tokens for p in curve.points] == [9, 20]
    assert [p.scored_tokens for p in plain.points] == [5, 10]
    assert "cache" not in plain.settings


def test_a_cache_of_the_newest_half_does_not_pass():
    """The copier copies from the cached tokens. The scored half of a plain curve would be complete in this cache."""
    reader = LocalReader(MODEL, "window:10:sinks=0")
    with reader.reading(CORPUS[:20], None):
        ids = np.array([1, *CORPUS[:20], 1, *CORPUS[:20], 2])
        reader.predict(ids[None], 21, range(21, 41))
        assert reader.cache_size() == (21, 2 * 2 * 10 * 8 * 4)
    assert "all tokens scored" in forgetting_curve(reader, CORPUS, **OPTIONS).summary()


# -- journals, facts


def test_a_resumed_run_knows_the_largest_cache(tmp_path):
    file, reader = tmp_path / "journal", LocalReader(MODEL, rounded)
    whole = forgetting_curve(reader, CORPUS, **OPTIONS, run=Run(file))
    lines = file.read_bytes().splitlines(keepends=True)
    assert whole.settings["cache_tokens"] == 21
    for kept in range(1, len(lines)):
        file.write_bytes(b"".join(lines[:kept]))
        again = forgetting_curve(LocalReader(MODEL, rounded), CORPUS, **OPTIONS, run=Run(file))
        assert (again, file.read_bytes().splitlines(keepends=True)) == (whole, lines)


@pytest.mark.parametrize(
    "one, other, setting",
    [
        (None, "full", "cache"),
        ("window:9", "window:8", "cache"),
        (lambda model: rounded(model, 6), lambda model: rounded(model, 7), "cache_sha256"),
        (KeepFirst(0.5), KeepFirst(0.4), "cache_sha256"),
        (Lower(8), Lower(9), "cache_sha256"),
    ],
)
def test_journals_of_two_caches_do_not_mix(tmp_path, one, other, setting):
    run = Run(tmp_path / "journal")
    forgetting_curve(LocalReader(MODEL, one), CORPUS, **OPTIONS, run=run)
    with pytest.raises(ValueError, match=f"from another run.*{setting} is"):
        forgetting_curve(LocalReader(MODEL, other), CORPUS, **OPTIONS, run=run)


# -- names


@pytest.mark.parametrize(
    "cache",
    [
        *("quantised:4", "window", "window:4", "window:9:sink=1", "window:9.5", "full:4", "quantized", "", ":"),
        *("hf_longctx.Missing:1", "hf_longctx:1", f"{__name__}.CORPUS"),
        *(f"{__name__}.KeepFirst", f"{__name__}.KeepFirst:0.5:shares=1"),
    ],
)
def test_an_unknown_cache_is_refused(cache):
    with pytest.raises(ValueError, match="cache must be full, quantized:BITS"):
        context_cache(cache)


def test_a_missing_package_is_named():
    with pytest.raises(ImportError, match=r"no_such_package\.Press:0.5 needs no_such_package. Install it with pip"):
        context_cache("no_such_package.Press:0.5")


def test_windows_are_applied_while_the_model_is_read():
    reader = LocalReader(MODEL, f"{__name__}.Lower:runs/keep=1")
    attention = MODEL.config._attn_implementation
    curve = forgetting_curve(reader, CORPUS, **OPTIONS)
    assert curve.scores == forgetting_curve(LocalReader(MODEL, "window:11:sinks=0"), CORPUS, **OPTIONS).scores
    assert MODEL.config._attn_implementation == attention == "sdpa"


@pytest.mark.parametrize("folder", ["2024", "0.25", "a:b=c"])
def test_windows_of_heads_come_from_a_folder(folder, tmp_path, monkeypatch):
    """A user types the name of the class and the folder. The model is unchanged afterwards."""
    monkeypatch.chdir(tmp_path)
    HeadWindows([[-1, 5], [8, 16]], sinks=2).save_pretrained(folder)
    reader = LocalReader(MODEL, f"hf_longctx.windows.HeadWindows:{folder}")
    before, plain = vars(MODEL).copy(), MODEL(torch.tensor(CORPUS[None])).logits
    loss = position_loss(reader, CORPUS, context_length=60)
    assert vars(MODEL) == before and torch.equal(MODEL(torch.tensor(CORPUS[None])).logits, plain)
    HeadWindows([[-1, 5], [8, 16]], sinks=2).apply(MODEL)
    try:
        assert position_loss(MODEL, CORPUS, context_length=60).loss == pytest.approx(loss.loss, rel=1e-5)
        with pytest.raises(ValueError, match=r"would be removed at its end\. Call windows\.remove"):
            position_loss(reader, CORPUS, context_length=60)
    finally:
        HeadWindows.remove(MODEL)
    assert position_loss(MODEL, CORPUS, context_length=60).loss != pytest.approx(loss.loss, rel=1e-2)


# -- what is not supported


def curve_error(error, match, cache, model=MODEL):
    with pytest.raises(error, match=match):
        forgetting_curve(LocalReader(model, cache), CORPUS, **OPTIONS)


def test_a_press_that_does_not_act_is_an_error():
    curve_error(UnsupportedInput, "KeepFirst did not drop any keys from a context of 21 tokens", KeepFirst(1))
    curve_error(ValueError, "a press must drop keys, but Masking only masks them", Masking(0.5))
    assert not any(getattr(module, "masked_key_indices", None) for module in MODEL.modules())
    curve_error(ValueError, r"the same number of keys in all layers, got \[3, 10\]", FirstLayer(0.34))
    rotating = KeepFirst(0.5)
    rotating.rerotate_keys = True
    with pytest.raises(ValueError, match="KeepFirst rotates keys to other positions"):
        LocalReader(MODEL, rotating)


def test_a_length_that_a_press_does_not_support_is_missing():
    curve = forgetting_curve(LocalReader(MODEL, press(0.5)), CORPUS, **OPTIONS | {"lengths": [7, 20]})
    assert [*curve.scores] == [20]
    assert "8 tokens are too few" in curve.missing[7]


def test_a_loss_has_no_context_for_a_press():
    with pytest.raises(ValueError, match="a loss does not have a context"):
        position_loss(LocalReader(MODEL, press(0.5)), CORPUS, context_length=20)
    assert position_loss(LocalReader(MODEL, "window:9"), CORPUS, context_length=20).settings["cache_tokens"] == 20


def test_models_that_do_not_support_a_cache_are_refused():
    continues = "requires a model that continues a cache exactly"
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    curve_error(ValueError, continues, full, tiny_llama(rope_parameters=dynamic))
    memory = HMTWrapper.from_backbone(tiny_llama(), HMTConfig(segment_length=8, sensory_tokens=3, memory_size=4))
    curve_error(ValueError, continues, "window:9", memory.eval())
    mistral = build("mistral", **SMALL, sliding_window=4, num_key_value_heads=2)
    curve_error(
        ValueError,
        "need a DynamicLayer in the cache, but MistralForCausalLM has DynamicSlidingWindowLayer",
        "window:8",
        mistral,
    )
    curve_error(ValueError, "must return the number of tokens that it has seen, got 9 after 10", uncounted)
    with pytest.raises(ValueError, match="must return the number of tokens that it has seen, got 19 after 20"):
        position_loss(LocalReader(MODEL, uncounted), CORPUS, context_length=20)
    curve_error(ValueError, "must create a Cache of transformers, got list", lambda model: [])
    curve_error(ValueError, "does not support LlamaForCausalLM: .*positional arg", lambda: DynamicCache())
    curve_error(NotImplementedError, "FoX cannot use a quantized cache", rounded, MODELS["fox"])


# -- generation configs


@pytest.mark.parametrize(
    "implementation, options, name",
    [
        ("quantized", None, "quantized:4"),
        ("quantized", {"nbits": 2, "backend": "hqq", "axis_key": 1}, "quantized:2:backend=hqq:axis_key=1"),
        ("static", None, "static"),
        ("offloaded", None, "offloaded"),
        (None, {"nbits": 2}, "nbits=2"),
        (None, None, None),
        ("dynamic", None, None),
        ("hybrid", None, None),
    ],
)
def test_a_cache_in_the_generation_config_is_never_ignored_silently(implementation, options, name, recwarn):
    model = tiny_llama()
    model.generation_config.cache_implementation, model.generation_config.cache_config = implementation, options
    curve = forgetting_curve(model, CORPUS, **OPTIONS)
    assert curve.settings.get("ignored_cache") == name
    assert ("Note: The generation config asks" in curve.summary()) == (name is not None)
    said = [str(warning.message) for warning in recwarn if "The generation config asks" in str(warning.message)]
    assert (len(said), name in said[0] and "--cache" in said[0]) == (1, True) if name else not said
    recwarn.clear()
    assert "ignored_cache" not in forgetting_curve(LocalReader(model, "full"), CORPUS, **OPTIONS).settings
    assert not recwarn


class Digits:
    """A tokenizer of ids, for responses."""

    def decode(self, ids):
        return ids


@pytest.mark.parametrize("asked", [{}, {"cache_implementation": "quantized"}, {"use_cache": False}])
@pytest.mark.parametrize("cache", [None, "full", "window:9", rounded])
@pytest.mark.filterwarnings("ignore:The generation config asks")
def test_a_reply_reads_the_same_cache_as_the_scores(asked, cache):
    """Whatever the generation config says: token by token, the most likely one."""
    vars(MODEL.generation_config).update(asked)
    try:
        reader, prompt = LocalReader(MODEL, cache), np.resize(CORPUS, 40)
        with reader.reading(prompt, None):
            reply = reader.reply(prompt, 6, Digits(), **({} if cache is None else {"context": 30}))
            ids = prompt.tolist()
            for _ in range(min(len(reply) + 1, 6)):
                context = {} if cache is None else {"context": 30}
                _, best = reader.score(np.array(ids), np.array([0]), range(len(ids) - 1, len(ids)), **context)
                ids += best.tolist()
    finally:
        vars(MODEL.generation_config).update({"cache_implementation": None, "use_cache": True})
    assert reply == ids[40:] if len(reply) == 6 else [*reply, 2] == ids[40:]
