"""Configs as people publish them: what is read, what is claimed, and what transformers' modeling code decides."""

import json
import re

import numpy as np
import pytest
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from hf_longctx.fox import FoxConfig
from hf_longctx.metrics import rope_context_bound, rope_report
from hf_longctx.metrics.rope import config as rope_config
from hf_longctx.metrics.rope import layers as rope_layers
from hf_longctx.metrics.rope import report as rope_reports
from hf_longctx.metrics.rope.config import LENGTHS, ROPE_UNLESS, TEXT_PARTS, NoRopeError
from scripts import rope_types


SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2}
PLAIN = {**SIZES, "max_position_embeddings": 4096, "rope_theta": 1e4}


def only(config, **options):
    report = rope_report(config, minimum_base=False, **options)
    (group,) = report.groups
    return report, group


@pytest.fixture
def quick(monkeypatch):
    """Reports without the search for violations."""
    monkeypatch.setattr(rope_reports, "rope_context_bound", lambda **keywords: None)
    monkeypatch.setattr(rope_reports, "rope_decay", lambda *arguments, **keywords: np.zeros(1))


# --- what is read ---


def row(config, *notes, **found):
    """Return a case: a config, patterns of its report's notes, and differences to the report of PLAIN."""
    return pytest.param(
        config, notes, found, id=f"{config.get('model_type')} {'-'.join(sorted({**config} - PLAIN.keys()))}"
    )


def scaled(rope_type, factor=8.0, **parameters):
    return {"rope_scaling": {"type": rope_type, "factor": factor, **parameters}}


SU = {"type": "su", "long_factor": [1.5] * 64, "short_factor": [1.0] * 64}
SCALINGS = [
    ({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, ["default RoPE does not use factor"], {}),
    (
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        ["multimodal RoPE .mrope. is checked for"],
        {},
    ),
    ({"rope_scaling": SU}, ["longrope freq.* 4096"], {}),
    ({"dual_chunk_attention_config": {"chunk_size": 1024}}, ["dual_chunk_attention_config .* plain RoPE"], {}),
    ({"rope_condense_ratio": 8}, ["rope_condense_ratio only has .* FastChat"], {}),
    # Vicuna 16k says 4096 tokens and a factor of 4: at 4096, linear scaling by 4 holds always
    (scaled("linear", 4.0), [], {"claimed": 16384, "by": "4 times max_position_embeddings, by linear scaling"}),
    (
        scaled("linear", 2.0),
        ["before linear scaling by 2; if it is the length after scaling, check 4096 tokens"],
        {"claimed": 8192, "by": "2 times max_position_embeddings, by linear scaling"},
    ),
    (scaled("linear", 1.5), ["with linear scaling by 1.5; if it is the length before scaling, check 6144 tokens"], {}),
    (
        scaled("dynamic", 2.0),
        ["dynamic frequencies depend on the length; we use the frequencies for 8192"],
        {"claimed": 8192, "by": "2 times max_position_embeddings, by dynamic scaling"},
    ),
    (
        scaled("yarn", 32.0, original_max_position_embeddings=None),
        ["before yarn scaling by 32; if it is the length after scaling, check 4096 tokens"],
        {"claimed": 131072, "by": "32 times max_position_embeddings, by yarn scaling"},
    ),
    *(
        (
            scaled(name, original_max_position_embeddings=4096),
            [f"max_position_embeddings is 4096; factor of {name} claims 32768 tokens"],
            {"claimed": 32768, "by": f"factor of {name}"},
        )
        for name in ("yarn", "linear")
    ),
    (
        scaled("linear") | {"max_sequence_length": 30000},
        ["max_sequence_length claims 30000 tokens"],
        {"claimed": 30000, "by": "max_sequence_length"},
    ),
]
CHATGLM = {"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40}
KIMI = {**PLAIN, "model_type": "kimi_k2", "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "num_key_value_heads": 64}
PHI = {"model_type": "phi-msft", "n_embd": 2560, "n_head": 32, "n_layer": 32, "n_positions": 2048, "rotary_dim": 32}
CONFIGS = [
    row(
        {**PLAIN, "model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 131072},
        "max_position_embeddings is 8192; model_max_length claims 131072",
        **{"claimed": 131072, "by": "model_max_length"},
    ),
    row({**PLAIN, "model_type": "internlm2", "rope_theta": 1e6}, base=1e6),
    row(
        {**CHATGLM, "kv_channels": 128, "seq_length": 8192, "rope_ratio": 500},
        "rope_ratio multiplies the base by 500",
        **{"base": 5e6, "rotary": 64, "claimed": 8192, "by": "seq_length"},
    ),
    row({**PLAIN, "model_type": "qwen", "rotary_emb_base": 1e5, "rope_theta": None}, base=1e5),
    row(KIMI, rotary=64, head=192),
    row(PHI, "base = 10000 is Llama's default", rotary=32, head=80, claimed=2048, by="n_positions"),
    row({**PLAIN, "model_type": None}),
    *(
        row({**PLAIN, "model_type": "qwen", name: 2.0}, f"not read: {name}")
        for name in ("use_dynamic_ntk", "rope_scaling_factor", "ntk_alpha", "rope_percentage", "rotary")
    ),
]


@pytest.mark.parametrize(
    "config, notes, found",
    [
        *CONFIGS,
        *(
            row({**PLAIN, "model_type": kind, **settings}, *notes, **found)
            for settings, notes, found in SCALINGS
            for kind in ("llama", "new")
        ),
    ],
)
def test_configs_are_read_and_assumptions_noted(quick, config, notes, found):
    """A type that transformers does not know is read like a Llama config."""
    report, group = only(config)
    read = {"claimed": report.claimed_context, "by": report.claimed_by, "base": group.base}
    read |= {"rotary": group.rotary_dim, "head": group.head_dim}
    plain = {"claimed": 4096, "by": "max_position_embeddings", "base": 1e4, "rotary": 128, "head": 128}
    assert read == plain | found
    unknown = ["like a Llama config"] * (config["model_type"] not in CONFIG_MAPPING)
    for note in (*notes, *unknown):
        assert any(re.search(note, found) for found in report.notes), report.notes


@pytest.mark.parametrize("kind", ["llama", "new"])
def test_every_name_of_the_context_claims(quick, kind):
    for name in LENGTHS:
        for settings in (PLAIN, {key: value for key, value in PLAIN.items() if key != "max_position_embeddings"}):
            report = rope_report({**settings, "model_type": kind, name: 65536}, minimum_base=False)
            assert (report.claimed_context, report.claimed_by) == (65536, name)


@pytest.mark.parametrize("length, claimed", [(8192, 8192), (10**30, 4096), (2048, 4096), (None, 4096)])
def test_the_tokenizer_claims_too(quick, tmp_path, length, claimed):
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path), tf.AutoConfig.from_pretrained(tmp_path)):
        report, _ = only(source)
        assert report.claimed_context == claimed and report.model == tmp_path.name
        assert ("tokenizer" in report.claimed_by) == (claimed == 8192)


def test_defaults_of_the_config_class_are_named(quick, tmp_path):
    """Llama-2's first config.json named neither base nor context. A length in the file precedes a default."""
    named = {"model_type": "llama", "max_position_embeddings": 2048, "rope_theta": 10000.0}
    for content, notes in (
        ({"model_type": "llama"}, ["max_position_embeddings = 2048 is the", "base = 10000 is the"]),
        (named, []),
        ({"model_type": "llama", "n_ctx": 1024}, ["base = 10000 is the"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        for source in (tmp_path, tf.AutoConfig.from_pretrained(tmp_path)):
            report, _ = only(source)
            assert report.claimed_context == (1024 if "n_ctx" in content else 2048)
            assert [note.partition(" default of LlamaConfig")[0] for note in report.notes] == notes
    assert not only(tf.LlamaConfig())[0].notes, "without a file to look into"
    unknown = {**PLAIN, "model_type": "new", "rope_theta": None, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert sum("base = 10000" in note for note in only(unknown)[0].notes) == 1


def test_parts_of_another_shape_than_the_class_expects(quick):
    """A text model with a part, as of a reduced file, and a flat file of a model of several parts."""
    text = {**PLAIN, "model_type": "mistral", "sliding_window": None, "rope_theta": 1e6}
    expected = only(text)[1]
    for config in (
        {"model_type": "mistral", "text_config": text},
        {"model_type": "mistral", "text_config": {key: value for key, value in text.items() if key != "model_type"}},
        tf.MistralConfig(text_config=text),
        {**text, "model_type": "llava"},
        *({"model_type": "new_vision", part: text} for part in TEXT_PARTS),
    ):
        assert only(config)[1] == expected


@pytest.mark.parametrize("kind", ["hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan"])
def test_ntk_alpha_is_the_models_own_frequencies(kind):
    """transformers supports the first two model types, but not the older third one."""
    sizes = {"head_dim": 128, "max_position_embeddings": 32768, "model_type": kind}
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}
    report, group = only({**PLAIN, **sizes, "rope_scaling": scaling})
    assert group.context_bound == rope_context_bound(base=1e4 * 1000 ** (128 / 126), head_dim=128) == 123304
    assert report.verdict == "holds" and not any("depend on the length" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["llama", "new"])
@pytest.mark.parametrize("name, values", ROPE_UNLESS.items())
def test_settings_that_switch_rope_off(quick, kind, name, values):
    for value in (False, True, "alibi", *values):
        config = {**PLAIN, "model_type": kind, name: value}
        if value is None or value in values:
            assert only(config)[1].base == 1e4
        else:
            with pytest.raises(NoRopeError, match=f"{name} is {value!r}"):
                rope_report(config)


# --- what only modeling code says ---


@pytest.mark.slow
def test_rules_and_lists_are_those_of_the_modeling_code():
    """For every type that this transformers ships; the types named here rotate or have windows outside of decoders."""
    shipped, derived = set(rope_types.language_models()), rope_types.derived()
    assert len(shipped) > 200
    configs = {name: CONFIG_MAPPING[name]() for name in shipped}
    ruled = {name for name, config in configs.items() if rope_config.may_rotate(config)}
    rotating = derived.pop("rotate")
    assert rotating - {"moshi_depth", "seamless_m4t"} == ruled
    defined = {
        name
        for name in rotating
        for setting in ("sliding_window", "attention_chunk_size")
        if rope_layers.defines(configs[name], setting)
    }
    windowed = derived.pop("window") - {"blt", "blt_local_decoder", "moonshine_streaming"}
    assert defined - windowed <= set(rope_layers.WINDOW_UNUSED) and windowed == defined - set(
        rope_layers.WINDOW_UNUSED
    )
    for name, types in derived.items():
        listed = getattr(rope_config if name == "NTK_ALPHA" else rope_layers, name)
        assert types == set(listed) & shipped, name


@pytest.mark.parametrize("name", ["nemotron_h", "kimi_linear", "jamba", "gpt2", "t5"])
def test_a_type_that_rotates_nothing_has_no_bound(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} lacks {name}")
    config = CONFIG_MAPPING[name]()
    config.rope_theta = 1e4
    for source in (config, config.to_dict(), {"model_type": "new_vision", "text_config": config.to_dict()}):
        with pytest.raises(NoRopeError, match=f"the attention of {name} does not rotate"):
            rope_report(source, context_length=64)


@pytest.mark.slow
def test_every_config_class_with_its_defaults(quick):
    """Each is judged or refused by name, and its JSON is read as the config itself."""
    judged = 0
    for name in sorted(CONFIG_MAPPING_NAMES):
        try:
            config = CONFIG_MAPPING[name]()
            CONFIG_MAPPING[name].from_dict(config.to_dict())
        except Exception:  # a few cannot be built without arguments, or from their own JSON
            continue
        outcomes = []
        for source in (config, config.to_dict()):
            try:
                report = rope_report(source, minimum_base=False)
                outcomes.append((report.claimed_context, report.groups))
            except (ValueError, NotImplementedError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], name
        judged += isinstance(outcomes[0], tuple)
    assert judged > 200


@pytest.mark.parametrize("window, reach", [(None, 511), (64, 63)])
@pytest.mark.parametrize("make", [FoxConfig, FoxConfig.pro])
def test_a_class_of_another_package_computes_its_layer_types(make, window, reach):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    sizes = dict(hidden_size=64, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=512)
    config = make(**sizes, sliding_window=window, rope_parameters=rope)
    report, group = only(config)
    assert (group.max_distance, group.layer_type) == (reach, config.layer_types[0]) and not report.notes
