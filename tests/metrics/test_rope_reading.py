"""Configs as people publish them: what is read, what is claimed, and what transformers' modeling code decides."""

import json
import re
from contextlib import suppress

import pytest
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from hf_longctx.metrics.rope import config as rope_config
from hf_longctx.metrics.rope import measure
from hf_longctx.metrics.rope.bounds import rope_context_bound
from hf_longctx.metrics.rope.config import NoRopeError
from hf_longctx.metrics.rope.measure import rope_report
from hf_longctx.metrics.rope.reading import LENGTHS, ROPE_UNLESS, TEXT_PARTS
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
    monkeypatch.setattr(measure, "rope_context_bound", lambda **keywords: None)
    monkeypatch.setattr(measure, "_negative_distances", lambda theta, reach: (0, None, 0.0))


# --- what only modeling code says ---


@pytest.mark.slow
def test_rules_and_lists_are_those_of_the_modeling_code():
    """For every type that this transformers ships; seamless_m4t and moshi_depth rotate outside of their decoders."""
    shipped, derived = set(rope_types.language_models()), rope_types.derived()
    assert len(shipped) > 200
    ruled = {name for name in shipped if rope_config.may_rotate(CONFIG_MAPPING[name]())}
    assert derived.pop("rotate") - {"moshi_depth", "seamless_m4t"} == ruled
    for name, types in derived.items():
        assert types == set(getattr(rope_config, name)) & shipped, name


@pytest.mark.parametrize("name", ["nemotron_h", "kimi_linear", "jamba", "gpt2", "t5"])
def test_a_type_that_rotates_nothing_has_no_bound(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} lacks {name}")
    config = CONFIG_MAPPING[name]()
    config.rope_theta = 1e4
    for source in (config, config.to_dict(), {"model_type": "new_vision", "text_config": config.to_dict()}):
        with pytest.raises(NoRopeError, match=f"the attention of {name} rotates nothing"):
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


def test_cross_attention_layers_do_not_rotate():
    text = tf.MllamaConfig().text_config
    _, group = only(text)
    assert group.layers == text.num_hidden_layers - len(text.cross_attention_layers)


# --- settings of rope_parameters ---

HUNYUAN = {**PLAIN, "model_type": "hunyuan_v1_dense", "head_dim": 128, "max_position_embeddings": 32768}


@pytest.mark.parametrize("kind", ["hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan"])
def test_ntk_alpha_is_the_models_own_frequencies(kind):
    """Of a type that transformers knows and of an older one that it does not."""
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}
    report, group = only({**HUNYUAN, "model_type": kind, "rope_scaling": scaling})
    assert group.context_bound == rope_context_bound(base=1e4 * 1000 ** (128 / 126), head_dim=128) == 123304
    assert report.verdict == "holds" and not any("depend on the length" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["llama", "new"])
@pytest.mark.parametrize(
    "settings, note",
    [
        ({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "default RoPE does not use factor"),
        ({"rope_scaling": {"factor": 8.0, "type": None}}, "default RoPE does not use factor"),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
            "multimodal RoPE .mrope. is judged on text",
        ),
        (
            {"rope_scaling": {"type": "su", "long_factor": [1.5] * 64, "short_factor": [1.0] * 64}},
            "longrope freq.* 4096",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}},
            "yarn claims|by 4",
        ),
        ({"rope_scaling": False, "dual_chunk_attention_config": {}}, "dual_chunk_attention_config .fewer tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.split()[0],
)
def test_what_a_rope_type_assumes_is_noted(kind, settings, note):
    report, _ = only({**PLAIN, "model_type": kind, **settings})
    assert any(re.search(note, found) for found in report.notes), report.notes


@pytest.mark.parametrize("kind", ["llama", "new"])
@pytest.mark.parametrize("name, values", ROPE_UNLESS.items())
def test_settings_that_switch_rope_off(kind, name, values):
    for value in (False, True, "alibi", *values):
        config = {**PLAIN, "model_type": kind, name: value}
        if value is None or value in values:
            assert only(config)[1].base == 1e4
        else:
            with pytest.raises(NoRopeError, match=f"{name} is {value!r}"):
                rope_report(config)


JUNK = (
    None,
    True,
    0,
    -3,
    2.5,
    float("nan"),
    10**400,
    "x",
    "x" * 5000,
    "",
    [],
    [1],
    ["x"],
    {},
    {"x": 1},
    {"full_attention": 3},
)
FIELDS = (
    *("model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary", "rotary_dim", "rope_ratio"),
    *("layer_types", "sliding_window", "no_rope_layers", "rope_condense_ratio", "dual_chunk_attention_config"),
    *("text_config", "qk_rope_head_dim", "n_ctx", "quantization_config", "architectures"),
)


@pytest.mark.parametrize("kind", ["llama", "new"])
@pytest.mark.parametrize("name", FIELDS)
def test_no_json_ends_in_a_traceback(quick, kind, name):
    config = {**PLAIN, "model_type": kind}
    ropes = [{"rope_scaling": {"type": "linear", "factor": 2.0, name: junk}} for junk in JUNK]
    for change in ({name: junk} for junk in JUNK):
        judged(config | change)
    for change in ropes * (name.startswith("rope") or name == "partial_rotary_factor"):
        judged(config | change)


def judged(config):
    with suppress(ValueError, NotImplementedError):
        report = rope_report(config, minimum_base=False)
        assert all(group.layers > 0 and 1 < group.base < 1e300 for group in report.groups if group.rope_type)


# --- the claimed context ---

COHERE = {**PLAIN, "model_type": "cohere", "max_position_embeddings": 8192, "rope_theta": 8e6}


@pytest.mark.parametrize(
    "settings, claimed, by, note",
    [
        ({**COHERE, "model_max_length": 131072}, 131072, "model_max_length", "max_position_embeddings is 8192"),
        ({**PLAIN, "max_sequence_length": 16384, "rope_condense_ratio": 8}, 32768, "rope_condense_ratio", "FastChat"),
        (
            {**PLAIN, "max_position_embeddings": 2048, "max_sequence_length": 16384, "rope_condense_ratio": 8},
            *(16384, "max_sequence_length", "plain RoPE is judged"),
        ),
        (
            {
                **PLAIN,
                "model_type": "qwen2",
                "dual_chunk_attention_config": {"original_max_position_embeddings": 1024},
            },
            *(4096, "max_position_embeddings", "dual_chunk_attention_config (1024 tokens without it)"),
        ),
        (
            {**PLAIN, "rope_scaling": {"type": "yarn", "factor": 32.0}},
            *(131072, "32 times max_position_embeddings, by yarn scaling", "after scaling, check 4096 tokens"),
        ),
    ],
)
def test_the_largest_claim_is_judged_and_named(settings, claimed, by, note):
    report, _ = only({"model_type": "llama", **settings})
    assert (report.claimed_context, report.claimed_by) == (claimed, by)
    assert any(note in found for found in report.notes), report.notes


@pytest.mark.parametrize("kind", ["llama", "new"])
def test_every_name_of_the_context_claims(quick, kind):
    for name in LENGTHS:
        for settings in (PLAIN, {key: value for key, value in PLAIN.items() if key != "max_position_embeddings"}):
            report = rope_report({**settings, "model_type": kind, name: 65536}, minimum_base=False)
            assert (report.claimed_context, report.claimed_by) == (65536, name)


@pytest.mark.parametrize("length, claimed", [(8192, 8192), (10**30, 4096), (2048, 4096), (None, 4096)])
def test_the_tokenizer_claims_too(tmp_path, length, claimed):
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path), tf.AutoConfig.from_pretrained(tmp_path)):
        report, _ = only(source)
        assert report.claimed_context == claimed and report.model == tmp_path.name
        assert ("tokenizer" in report.claimed_by) == (claimed == 8192)


# --- types that transformers does not know, and parts ---

CHATGLM = {"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40}
KIMI = {**PLAIN, "model_type": "kimi_k2", "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "num_key_value_heads": 64}
PHI = {"model_type": "phi-msft", "n_embd": 2560, "n_head": 32, "n_layer": 32, "n_positions": 2048, "rotary_dim": 32}
SU = {"rope_scaling": {"type": "su", "long_factor": [1.5] * 64, "short_factor": [1.0] * 64}}


@pytest.mark.parametrize(
    "config, base, rotary_dim, head_dim, claimed",
    [
        ({**PLAIN, "model_type": "internlm2", "rope_theta": 1e6}, 1e6, 128, 128, 4096),
        ({**SIZES, "model_type": "internlm", "seq_length": 512, "rotary": {"base": 1e5}}, 1e5, 128, 128, 512),
        (
            {**SIZES, "model_type": "internlm", "n_ctx": 512, "rotary": {"base": 9.0, "type": "dynamic"}},
            *(9.0, 128, 128, 512),
        ),
        ({**CHATGLM, "kv_channels": 128, "seq_length": 8192, "rope_ratio": 500}, 5e6, 64, 128, 8192),
        ({**PLAIN, "model_type": "qwen", "rotary_emb_base": 1e5, "rope_theta": None}, 1e5, 128, 128, 4096),
        (KIMI, 1e4, 64, 192, 4096),
        (PHI, 1e4, 32, 80, 2048),
        ({**PLAIN, **SU, "model_type": "phi3_v"}, 1e4, 128, 128, 4096),
        ({"model_type": "internvl_chat", "llm_config": {**PLAIN, "model_type": "internlm2"}}, 1e4, 128, 128, 4096),
        ({**PLAIN, "model_type": None}, 1e4, 128, 128, 4096),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else "",
)
def test_unknown_types_are_read_as_a_llama_would(config, base, rotary_dim, head_dim, claimed):
    report, group = only(config)
    assert (group.base, group.rotary_dim, group.head_dim) == (base, rotary_dim, head_dim)
    assert report.claimed_context == claimed
    assert any("read as a Llama would" in note for note in report.notes)


@pytest.mark.parametrize("name", ["use_dynamic_ntk", "rope_scaling_factor", "ntk_alpha", "rope_percentage"])
def test_settings_about_rope_that_are_not_read_are_named(name):
    report, _ = only({**PLAIN, "model_type": "qwen", name: 2.0})
    assert f"not read: {name}" in report.notes


def test_parts_of_another_shape_than_the_class_expects():
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
