"""`HeadWindows`: the file, `apply` and `remove`, and unsupported models."""

import copy
import json
import re

import pytest
import torch
from tiny_windows import CACHE, SIZES, WINDOWS, difference, make, tokens, windowed
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.metrics import LocalReader, forgetting_curve
from hf_longctx.windows import HeadWindows
from hf_longctx.windows.groups import group_heads, kept_keys
from hf_longctx.windows.layers import attention_layers
from hf_longctx.windows.learning import WindowLearner


def test_the_share_counts_what_heads_keep():
    windows = HeadWindows([[-1, 100], [10, 1000]], sinks=4)
    assert windows.share(500) == (500 + 104 + 14 + 500) / 2000
    sliding = make("gemma3")  # windows of 24, all, 24
    windows = HeadWindows([[-1, -1] * 2, [-1, 46] * 2, [10, 30] * 2], sinks=4)
    assert windows.share(500, sliding) == (48 + 550 + 38) / (48 + 1000 + 48)
    assert kept_keys(100, 4, 104) == kept_keys(100, 4, 105) == 104
    assert [group.heads for group in group_heads([8, -1, 8])] == [(1,), (0, 2)]


def test_windows_are_saved_and_loaded(tmp_path):
    windows = HeadWindows(torch.tensor(WINDOWS), sinks=2)
    windows.save_pretrained(tmp_path / "folder")
    for path in (tmp_path / "folder", str(tmp_path / "folder"), tmp_path / "folder" / "head_windows.json"):
        assert HeadWindows.from_pretrained(path) == windows == HeadWindows(WINDOWS, 2)
    assert json.loads((tmp_path / "folder" / "head_windows.json").read_text()) == {"windows": WINDOWS, "sinks": 2}
    assert HeadWindows(WINDOWS) != windows


def test_windows_are_saved_next_to_a_model_and_not_applied_when_it_is_loaded(tmp_path):
    model, windows = windowed()
    ids = tokens()
    model.save_pretrained(tmp_path)
    windows.save_pretrained(tmp_path)
    assert "head_windows" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, make()(ids).logits)
        HeadWindows.from_pretrained(tmp_path).apply(loaded)
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_windows_are_replaced_and_removed():
    model, windows = windowed()
    ids, plain = tokens(), make()
    with torch.no_grad():
        wanted, first = plain(ids).logits, model(ids).logits
        other = HeadWindows([[4] * 4] * 3)
        other.apply(model)
        assert difference(model(ids).logits, first) > 0.1
        with pytest.raises(ValueError, match="cache of other windows"):
            model(ids, **{CACHE: windows.cache()})
        windows.apply(model)
        assert torch.equal(model(ids).logits, first)
        windows.remove(model)
        assert torch.equal(model(ids).logits, wanted)
        assert torch.equal(model.generate(ids, max_new_tokens=5), plain.generate(ids, max_new_tokens=5))
        assert vars(model).keys() == vars(plain).keys()
        with pytest.raises(ValueError, match="must have windows"):
            windows.remove(model)


@pytest.mark.parametrize("slots", [None, 80])
def test_a_cache_of_fewer_layers(slots):
    model, _ = windowed()
    with pytest.raises(ValueError, match="`cache` must have a layer for each layer of the model, got 2 layers"):
        model(tokens(), **{CACHE: HeadWindows(WINDOWS[:2], 3).cache(slots)})


def test_a_copied_model_keeps_its_windows():
    model, windows = windowed()
    ids, twin = tokens(1), copy.deepcopy(model)
    windows.remove(model)
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, windowed()[0](ids).logits)
        cache = twin.generate(ids, max_new_tokens=3, return_dict_in_generate=True)[CACHE]
    assert type(cache.layers[0]).__name__ == "WindowLayer"


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_another_attention_implementation_is_not_used_silently(name):
    model, windows = windowed()
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=f'must be "head_windows" while windows are applied, got "{name}"'):
        model(tokens())
    windows.apply(model)
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, windowed()[0](tokens()).logits)


BAD_WINDOWS = {
    "no layers": ([], "list of layers"),
    "no heads": ([[]], "list of layers"),
    "a flat list": ([1, 2], "list of layers"),
    "a string": (["ab"], "list of layers"),
    "rows of unequal length": ([[1, 2], [1]], "list of layers"),
    "zero": ([[4, 0]], "at least 1, or -1 for all keys, got 0 in layer 0"),
    "below -1": ([[4, 4], [4, -2]], "got -2 in layer 1"),
    "a float": ([[4, 2.0]], "got 2.0"),
    "a bool": ([[4, True]], "got True"),
    "a float tensor": (torch.ones(2, 2), "got 1.0"),
    "None": (None, "list of layers"),
}


@pytest.mark.parametrize("name", BAD_WINDOWS)
def test_bad_windows(name):
    windows, message = BAD_WINDOWS[name]
    with pytest.raises(ValueError, match=message):
        HeadWindows(windows)


@pytest.mark.parametrize("sinks", [-1, 1.5, True, None, "4"])
def test_bad_sinks(sinks):
    with pytest.raises(ValueError, match="`sinks` must be an integer of at least 0"):
        HeadWindows([[4]], sinks)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"windows": [[1]]}', '{"windows": [[0]], "sinks": 4}', '{"windows": 3, "sinks": 4}', "{"]
)
def test_a_bad_file(text, tmp_path):
    (tmp_path / "head_windows.json").write_text(text)
    with pytest.raises(ValueError, match=r'head_windows\.json must contain \{"windows"'):
        HeadWindows.from_pretrained(tmp_path)


def test_a_missing_file(tmp_path):
    with pytest.raises(OSError, match=r"head_windows\.json"):
        HeadWindows.from_pretrained(tmp_path)


@pytest.mark.parametrize("windows", [[[4] * 4] * 2, [[4] * 8] * 3, [[4] * 4] * 4])
def test_windows_of_another_model(windows):
    with pytest.raises(ValueError, match=r"must have 3 layers of 4 key heads, got \d layers of \d"):
        HeadWindows(windows).apply(make())
    with pytest.raises(ValueError, match=r"must have 3 layers of 4 key heads, got \d layers of \d"):
        HeadWindows(windows).share(500, make())


def test_windows_of_another_model_type(tmp_path):
    HeadWindows(WINDOWS, model_type="qwen2").save_pretrained(tmp_path)
    windows = HeadWindows.from_pretrained(tmp_path)
    assert (windows.model_type, windows) == ("qwen2", HeadWindows(WINDOWS))
    windows.apply(make("qwen2"))
    with pytest.raises(ValueError, match="`model` must have the type 'qwen2', got 'llama'"):
        windows.apply(make())
    reader = LocalReader(make(), f"hf_longctx.windows.HeadWindows:{tmp_path}")
    with pytest.raises(ValueError, match="must have the type 'qwen2', got 'llama'"):
        forgetting_curve(reader, tokens(1, 200)[0].numpy(), lengths=[20], repeats=1, bos_token_id=1, eos_token_id=2)


def test_a_model_with_a_memory():
    model, windows = windowed(dtype=torch.float32)
    config = HMTConfig(segment_length=32, sensory_tokens=4)
    with pytest.raises(ValueError, match=r"while windows are applied, got .*\.remove"):
        HMTWrapper.from_backbone(model, config)
    hmt = HMTWrapper.from_backbone(make(dtype=torch.float32), config)
    with pytest.raises(NotImplementedError, match="`model` must be a model without a memory, got an HMT"):
        windows.apply(hmt)
    with pytest.raises(NotImplementedError, match="`model` must be a model without a memory, got an HMT"):
        WindowLearner(hmt, 128, keep=0.5, keep_context=256)


TINY = {name: x for name, x in SIZES.items() if name != "initializer_range"}


def unusual(kind, **options):
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**TINY, **options))


UNSUPPORTED = {
    "MLA": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**TINY, n_routed_experts=4, n_group=1, topk_group=1)),
    "linear attention": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**{**TINY, "num_hidden_layers": 4})),
    "no attention": lambda: MambaForCausalLM(MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1)),
    "hybrid layers": lambda: JambaForCausalLM(JambaConfig(**TINY, attn_layer_period=2, attn_layer_offset=1)),
    "shared keys": lambda: Gemma3nForCausalLM(
        Gemma3nTextConfig(**{**TINY, "intermediate_size": [48] * 3}, num_kv_shared_layers=1)
    ),
    "capped logits": lambda: Gemma2ForCausalLM(Gemma2Config(**TINY)),
    "no key heads": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2)),
    "own attention": lambda: BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2)),
    "keys that are read twice": lambda: unusual("diffllama"),
    "a mask of its own": lambda: unusual("doge"),
    "repeated keys": lambda: unusual("jetmoe", kv_channels=8),
    "an encoder": lambda: T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2)),
}


REASONS = {
    "MLA": "multi-head latent attention",
    "linear attention": "layers of type linear_attention|no attention layer|attention modules",
    "no attention": "no attention layer",
    "hybrid layers": "attention modules|layers of type",
    "shared keys": "share the keys",
    "capped logits": "capped",
    "no key heads": "no attention layer",
    "own attention": "no attention layer",
    "keys that are read twice": "reads the cached keys twice",
    "a mask of its own": "a mask of its own",
    "repeated keys": "repeats the cached keys",
    "an encoder": "no attention layer",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models(name):
    model = UNSUPPORTED[name]()
    before = model.config._attn_implementation
    with pytest.raises(
        NotImplementedError, match="`model` must be a decoder whose layers all have softmax attention"
    ) as error:
        HeadWindows([[4] * 4] * 3).apply(model)
    assert re.search(REASONS[name], str(error.value))
    assert model.config._attn_implementation == before


def test_not_a_model():
    with pytest.raises(ValueError, match="`model` must be a transformers model, got str"):
        attention_layers("gpt2")


def test_a_cache_without_windows_applied():
    with pytest.raises(NotImplementedError, match=r"Call windows\.apply\(model\)"):
        make()(tokens(), **{CACHE: HeadWindows(WINDOWS).cache()})


def test_keys_that_are_read_twice_raise_an_error_in_other_models_too(monkeypatch):
    monkeypatch.setattr("hf_longctx.windows.layers.UNUSUAL", {})
    model, windows = unusual("diffllama"), HeadWindows([[4] * 4] * 3)
    windows.apply(model)
    with pytest.raises(NotImplementedError, match="reads the keys of a cache twice"):
        model(tokens(), **{CACHE: windows.cache()})
